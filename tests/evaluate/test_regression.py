"""A new version against the former one: what counts as a fall, what is retired, what is kept from run to run."""

from __future__ import annotations

from pathlib import Path

import pytest

from ragbuild.core.config import load_config
from ragbuild.core.errors import InputRefused
from ragbuild.core.records import EvalPair, GroundSpan
from ragbuild.core.store import read_json, write_json
from ragbuild.evaluate.gates import Baseline, BaselineFigure
from ragbuild.evaluate.regression import Regression, _in_words, recall_at_5, regression
from ragbuild.index.staging import write_version
from ragbuild.index.versions import IndexVersion
from ragbuild.offline.prompts import load_prompt
from tests.conftest import FakeEmbedder, make_chunks, make_document
from tests.evaluate.test_qdoc import DOCUMENTS, GUIDE, SMALL, TERMS, TEXTS

CONFIG = load_config()
RETRIEVAL = CONFIG.with_overrides({"knowledge.regression_answers": False})
QUESTIONS = {  # id: (question, document, child, keyword)
    "fan": ("is the fan tray replaced without tools", "guide", 1, "without tools"),
    "login": ("forgot the rescue login", "guide", 0, "console"),
    "backups": ("how long are backups kept in v4.2", "guide", 2, "30 days"),
    "weight": ("how much does the LG-500 weigh", "small", 0, "12 kg"),
    "portal": ("用户怎样访问门户", "faq", 0, "单点登录"),
}


def pair(name: str) -> EvalPair:
    query, document, child, keyword = QUESTIONS[name]
    start = sum(len(t) + 2 for t in TEXTS[document][:child])
    span = GroundSpan(doc_key=DOCUMENTS[document].key, start=start, end=start + len(TEXTS[document][child]))
    return EvalPair(
        pair_id=name, query=query, gt_answer=TEXTS[document][child], language=DOCUMENTS[document].language,
        gt_spans=(span,), gt_keywords=(keyword,), query_type="factual", gen_source="single_chunk",
    )  # fmt: skip


def expert(name: str, source: str, quotes=(), keyword: str = "", **fields) -> dict:
    base = {
        "case_id": name,
        "query": "How long are backups kept?",
        "language": "en",
        "reference_answer": keyword or "?",
    }
    ground = [{"doc_source": source, "pages": [1], "quotes": list(quotes)}]
    return base | {"ground": ground, "gt_keywords": [keyword] if keyword else []} | fields


def add(workspace: Path, documents=None, texts=None, terms=TERMS) -> str:
    """A version of these documents, published; by default the small index of the Q-DOC tests."""
    documents, texts = {**DOCUMENTS, **(documents or {})}, {**TEXTS, **(texts or {})}
    chunks = [c for name, d in documents.items() if d for c in make_chunks(texts[name], d, name)]
    return write_version(
        workspace / "indexes", chunks, [d for d in documents.values() if d], terms, config=CONFIG,
        encode=FakeEmbedder().encode_documents, embedder={"name": "fake", "dim": 64},
        prompt=load_prompt("initial_prompt").text,
    )  # fmt: skip


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    write_json(tmp_path / "eval_set.json", [pair(name) for name in QUESTIONS])
    add(tmp_path)
    return tmp_path


def held(workspace: Path, staged: str, config=RETRIEVAL, former: str | None = "v0001", **options) -> Regression:
    return regression(workspace, former, staged, config, **{"embedder": FakeEmbedder()} | options)


def cases_file(workspace: Path, *cases: dict) -> Path:
    write_json(workspace / "expert.json", {"cases": list(cases)})
    return workspace / "expert.json"


# --- the same and worse -----------------------------------------------------------------------------------------------


def test_the_same_index_again_changes_nothing(workspace):
    found = held(workspace, add(workspace), CONFIG)
    assert found.passed and not found.retired and not found.added and "none fell" in found.said
    assert {r.metric for r in found.rows} == {
        "qdoc/generated/fused/recall@50", "qdoc/generated/fused/recall@5", "qdoca/generated/overall"
    }  # fmt: skip
    assert all((r.change, r.n, r.former) == (0, 5, r.now) for r in found.rows)
    assert found.metrics["qdoc/generated/fused/recall@50"] == 1.0
    assert {r.margin for r in found.rows} == {0.4}, "two of five cases are more than gates.margin"


def test_answers_are_left_out_where_the_configuration_says_so(workspace):
    found = held(workspace, add(workspace))
    assert {r.metric.split("/")[0] for r in found.rows} == {"qdoc"} and "recall@5" in found.metrics


CROWD = [f"The rescue login of team {n} was forgotten, forgot it." for n in range(60)]
CROWDED = {"documents": {"crowd": make_document("crowd")}, "texts": {"crowd": CROWD}, "terms": []}


def accepted(margin: float, profile: str = "offline") -> Baseline:
    figure = BaselineFigure(value=1.0, n=5, margin=margin)
    return Baseline(
        profile=profile, corpus_hash="of the build", eval_sets={}, judge={}, margin=0.02,
        metrics={"qdoc/generated/fused/recall@50": figure},
    )  # fmt: skip


def test_a_document_that_was_emptied_by_a_correction_does_not_pass_for_lack_of_questions(workspace):
    """The same key and status, another content, and three of five answers are gone: misses, not retired cases."""
    emptied = DOCUMENTS["guide"].model_copy(update={"content_hash": "other"})
    staged = add(workspace, {"guide": emptied}, {"guide": ["See the manual."] * len(TEXTS["guide"])})
    found = held(workspace, staged)
    row = next(r for r in found.rows if r.metric.endswith("recall@50"))
    assert (row.former, row.now, row.n) == (1.0, 0.4, 5) and not found.retired and not found.passed
    assert "3 count as missed: a corrected document no longer says what they ask for" in found.said


def test_a_figure_that_falls_beyond_its_margin_fails_and_names_the_cases(workspace):
    """60 chunks that say the question's words, and no term to rewrite it: the right one is not among the first 50."""
    staged = add(workspace, **CROWDED)
    found = held(workspace, staged, baseline=accepted(0.1))
    row = next(r for r in found.rows if r.metric.endswith("recall@50"))
    assert (row.former, row.now, row.change, row.n) == (1.0, 0.8, -0.2, 5)
    assert (row.fell, row.margin, row.worse) == (True, 0.1, ("login",))
    assert not found.passed and "1.0000 -> 0.8000 (n = 5, may fall by 0.1; worse: login)" in found.said
    assert held(workspace, staged, baseline=accepted(0.2)).passed, "a fall of the margin itself is none beyond it"
    assert not held(workspace, staged, baseline=accepted(0.199999)).passed
    assert held(workspace, staged, baseline=accepted(0.1, "qwen")).passed, "another profile's baseline says nothing"
    assert held(workspace, staged).passed, "two of five cases may fall where nobody set a margin"


def test_an_answer_of_a_wrong_version_is_never_allowed(workspace):
    ask = expert("kept", "guide.md", ["kept for 30 days"], "30 days", wrong_keywords=["7 days"])
    cases = cases_file(workspace, *(ask | {"case_id": f"kept-{n}"} for n in range(3)))
    twin = make_document("other")
    staged = add(workspace, {"other": twin}, {"other": ["How long are backups kept? Backups are kept for 7 days."]})
    rows = {r.metric: r for r in held(workspace, staged, CONFIG, expert=cases).rows}
    row = rows["qdoca/expert/right_version"]
    assert (row.former, row.now, row.margin, row.fell, row.worse[0]) == (1.0, 0.0, 0.0, True, "kept-0")
    assert rows["qdoca/expert/overall"].margin == round(2 / 3, 9)


def test_a_case_that_could_not_be_measured_any_more_counts_as_zero(workspace):
    staged = add(workspace)
    held(workspace, staged)
    for name, unmeasured in (("v0001", "portal"), (staged, "fan")):
        digest = IndexVersion(workspace / "indexes", name).digest[:12]
        (path,) = (workspace / "regression").glob(f"{digest}-*-qdoc.json")
        figures = read_json(path)
        figures["generated/fused/recall@50"][unmeasured] = None
        write_json(path, figures)
    row = next(r for r in held(workspace, staged).rows if r.metric.endswith("recall@50"))
    assert (row.n, row.former, row.now) == (4, 1.0, 0.75), "'portal' was not measured before and takes no part"


# --- what is retired --------------------------------------------------------------------------------------------------


def test_a_replaced_document_takes_its_cases_along_and_the_others_are_compared(workspace):
    new = make_document("guide", doc_version="v5.0", doc_source="guide-5.md")
    cases = cases_file(
        workspace, expert("old", "guide.md", ["kept for 30 days"], "30 days"),
        expert("new", "guide-5.md", ["kept for 90 days"], "90 days"),
        expert("stays", "spec500.md", ["12 kg"], "12 kg", query="How much does the LG-500 weigh?"),
    )  # fmt: skip
    staged = add(workspace, {"guide": None, "new": new}, {"new": ["Backups are kept for 90 days."]})
    found = held(workspace, staged, expert=cases)
    assert found.retired == ("backups", "fan", "login", "old") and found.added == 1 and found.passed
    counts = {r.metric: r.n for r in found.rows}
    assert (counts["qdoc/generated/fused/recall@50"], counts["qdoc/expert/fused/recall@50"]) == (2, 1)
    assert "4 case(s) retired" in found.said
    assert held(workspace, staged, expert=cases, former="v0001").rows == found.rows


def test_a_document_that_became_legacy_is_asked_for_by_its_version_only(workspace):
    old = GUIDE.model_copy(update={"status": "legacy"})
    found = held(workspace, add(workspace, {"guide": old}))
    assert found.retired == ("fan", "login"), "'in v4.2' stays: it must be found still"


@pytest.mark.parametrize(("name", "query", "named"), [
    ("4.2", "how long in v4.2?", True), ("4.2", "V4.2版本的保留时间", True), ("4.2", "in 14.2 or 4.2.1", False),
    ("1", "the LG-100", False), ("1", "in v1", True), ("lg-7", "the LG-700", False),
    ("特别版", "岚关特别版的端口", True),
])  # fmt: skip
def test_a_version_is_named_by_a_word_of_its_own(name: str, query: str, named: bool):
    assert _in_words(name, query) is named


def test_a_page_of_the_same_name_is_the_same_question_while_it_says_the_same(workspace):
    """Replaced under its file name: one value changed, one did not."""
    new = SMALL.model_copy(update={"doc_version": "v5.0"})
    cases = cases_file(
        workspace, expert("kg", "spec500.md", keyword="12 kg"), expert("disks", "spec500.md", keyword="both disks"),
        expert("free", "spec500.md"),
    )  # fmt: skip
    found = held(workspace, add(workspace, {"small": new}, {"small": ["It weighs 14 kg with both disks."]}),
                 expert=cases)  # fmt: skip
    assert found.retired == ("kg", "weight"), "the pair left with its key, the expert's case with its value"
    assert next(r.n for r in found.rows if r.metric == "qdoc/expert/fused/recall@50") == 2


def test_a_corrected_value_retires_its_case_alone(workspace):
    corrected = DOCUMENTS["guide"].model_copy(update={"content_hash": "other"})
    texts = [*TEXTS["guide"][:2], TEXTS["guide"][2].replace("30", "60")]
    found = held(workspace, add(workspace, {"guide": corrected}, {"guide": texts}))
    assert found.retired == ("backups",) and found.passed


# --- nothing to compare -----------------------------------------------------------------------------------------------


def test_without_an_eval_set_nothing_is_evaluated_and_a_broken_one_is_refused(workspace):
    staged = add(workspace)
    (workspace / "eval_set.json").write_text("[1]", encoding="utf-8")
    with pytest.raises(InputRefused, match="row 1"):
        held(workspace, staged)
    (workspace / "eval_set.json").unlink()
    assert held(workspace, staged) == Regression(said="not evaluated: no eval set")
    assert recall_at_5(workspace, staged, RETRIEVAL) == {}


def test_a_first_version_is_measured_all_the_same(workspace):
    found = held(workspace, "v0001", former=None)
    assert found.passed and not found.rows and found.metrics["qdoc/generated/fused/recall@50"] == 1.0
    by_case = recall_at_5(workspace, None, RETRIEVAL, embedder=FakeEmbedder())
    assert by_case.keys() == {f"generated/{name}" for name in QUESTIONS}
    assert found.metrics["recall@5"] == sum(by_case.values()) / len(by_case)


def test_no_case_about_both_versions_is_said(workspace):
    write_json(workspace / "eval_set.json", [pair("weight")])
    found = held(workspace, add(workspace, {"small": None}))
    nothing = "not evaluated: no case is about documents of both versions"
    assert found.passed and not found.rows and not found.metrics
    assert found.said == f"{nothing}; 1 case(s) retired, since their documents changed"
    write_json(workspace / "eval_set.json", [])
    assert held(workspace, "v0002").said == nothing


# --- kept -------------------------------------------------------------------------------------------------------------


def test_what_a_version_reached_is_measured_once(workspace):
    staged, embedder = add(workspace), FakeEmbedder()
    first = held(workspace, staged, embedder=embedder)
    asked = len(embedder.encoded)
    assert asked and held(workspace, staged, embedder=embedder) == first and len(embedder.encoded) == asked
    third = add(workspace)
    held(workspace, third, former=staged, embedder=embedder)
    assert len(embedder.encoded) == asked + asked // 2, "of two versions the former is known"
    other = RETRIEVAL.with_overrides({"retrieve.top_n": 10})
    held(workspace, staged, other, embedder=embedder)
    assert len(embedder.encoded) > asked + asked // 2, "another configuration is measured anew"
    for path in (workspace / "regression").iterdir():
        path.write_text("{", encoding="utf-8")
    assert held(workspace, staged, embedder=embedder) == first, "and so is one whose file is damaged"

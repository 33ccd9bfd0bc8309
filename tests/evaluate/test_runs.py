"""From eval sets to ledger entries: which sets are there, what goes into the ledger, and the tables of notebook 21."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from ragbuild.core.config import load_config
from ragbuild.core.errors import InputRefused
from ragbuild.core.records import Answer, EvalPair, GroundSpan
from ragbuild.core.store import write_json, write_text
from ragbuild.evaluate import runs
from ragbuild.evaluate.align import align
from ragbuild.evaluate.answers import AnswerTrace, summary
from ragbuild.evaluate.judge import RubricJudge
from ragbuild.evaluate.ledger import SECTIONS, Figure
from ragbuild.evaluate.qdoc import report
from ragbuild.evaluate.rubric import DIMENSIONS, Score
from ragbuild.index.staging import Content, stage_whole
from ragbuild.index.versions import IndexVersion
from ragbuild.offline.evalset import set_hash
from ragbuild.offline.prompts import load_prompt
from tests.conftest import FakeEmbedder, make_chunks
from tests.evaluate import test_qdoc as small

EXPERT = {
    "case_id": "e1", "query": "How long are backups kept?", "language": "en", "reference_answer": "30 days",
    "ground": [{"doc_source": "guide.md", "pages": [1], "quotes": ["kept for 30 days"]}], "gt_keywords": ["30 days"],
}  # fmt: skip


@pytest.fixture(scope="module")
def version(tmp_path_factory):
    return small.version_in(tmp_path_factory.mktemp("indexes"), load_prompt("initial_prompt").text)


def pair(name: str, key: str, start: int = 0, end: int = 5) -> dict:
    return EvalPair(
        pair_id=name, query="Where is the break-glass account reset?", gt_answer="On the console.", language="en",
        gt_spans=(GroundSpan(doc_key=key, start=start, end=end),), query_type="factual", gen_source="single_chunk",
    ).model_dump(mode="json")  # fmt: skip


def workspace(folder, pairs=True, expert=True):
    """The folder and the path of its expert set, None where it has none."""
    if pairs:
        write_json(folder / "eval_set.json", [pair("here", small.GUIDE.key), pair("gone", "default/none/v1/all")])
    if expert:
        write_json(folder / "expert_eval_set.json", {"cases": [EXPERT]})
    return folder, folder / "expert_eval_set.json" if expert else None


# --- sets -------------------------------------------------------------------------------------------------------------


def test_both_sets_are_mapped_to_the_index_at_hand_and_what_is_gone_is_named(version, tmp_path):
    folder, path = workspace(tmp_path)
    expert, generated = runs.load_sets(version, folder, path)
    assert (expert.name, [c.groups for c in expert.cases], expert.lost) == ("expert", [(("c-guide-002",),)], [])
    assert (generated.name, [c.id for c in generated.cases], generated.lost) == ("generated", ["here"], ["gone"])
    assert generated.cases[0].groups == (("c-guide-000",),) and generated.hash == set_hash(folder / "eval_set.json")


@pytest.mark.parametrize(("pairs", "expert", "names"), [(True, False, ["generated"]), (False, True, ["expert"])])
def test_of_the_two_sets_one_is_enough(pairs, expert, names, version, tmp_path):
    assert [s.name for s in runs.load_sets(version, *workspace(tmp_path, pairs, expert))] == names


def test_a_set_by_its_path_is_told_by_what_it_holds(version, tmp_path):
    folder, path = workspace(tmp_path)
    path.rename(tmp_path / "mine.json")
    (mine,) = runs.load_sets(version, folder, None, [str(tmp_path / "mine.json")])
    assert (mine.name, mine.cases[0].id, mine.cases[0].source) == ("mine", "e1", "expert")


def test_no_set_at_all_is_refused_with_what_to_do(version, tmp_path):
    with pytest.raises(InputRefused, match="notebook 06"):
        runs.load_sets(version, tmp_path, None)
    for wanted in ("expert", "generated", str(tmp_path / "nowhere.json")):
        with pytest.raises(InputRefused, match="eval set at"):
            runs.load_sets(version, tmp_path, tmp_path / "none.json", [wanted])


# --- an index that took in documents after the build -----------------------------------------------------------------


def later(folder, made_by: str = "ingest"):
    """The small index, without the guide that the cases are about but for its first two chunks, made by `made_by`."""
    names = {"guide": small.TEXTS["guide"][:2], "faq": small.TEXTS["faq"]}
    documents = [small.DOCUMENTS[name] for name in names]
    kept = {}
    for name, texts in names.items():
        write_text(folder / f"{name}.md", "\n\n".join(texts))
        kept[small.DOCUMENTS[name].key] = {f"{name}.md": folder / f"{name}.md"}
    content = Content(documents, small.TERMS, load_prompt("initial_prompt").text, kept, {"command": made_by})
    chunks = [c for name, texts in names.items() for c in make_chunks(texts, small.DOCUMENTS[name], name)]
    name = stage_whole(folder / "indexes", chunks, content, config=load_config(),
                       encode=FakeEmbedder().encode_documents, embedder={"name": "fake", "dim": 64})  # fmt: skip
    return IndexVersion(folder / "indexes", name)


def test_what_has_left_the_index_is_lost_and_in_a_build_refused(tmp_path):
    folder, path = workspace(tmp_path)
    expert, generated = runs.load_sets(later(tmp_path), folder, path)
    assert (expert.cases, expert.lost) == ([], ["e1"]) and generated.lost == ["gone"]
    with pytest.raises(InputRefused, match="e1: guide.md, page 1, does not hold the quote"):
        runs.load_sets(later(tmp_path / "built", "build"), folder, path)


def test_layer_1_of_it_does_not_read_the_builds_files(tmp_path):
    folder, path = workspace(tmp_path)
    write_json(folder / "chunked_corpus.json", [])
    write_json(folder / "keyword_dict.json", [])
    asked = small.pipeline(later(tmp_path), embedder__name="auto")
    report, sets = runs.measure_offline(asked, folder, asked.config, None, path)
    assert [s.lost for s in sets] == [["e1"], ["gone"]]
    assert [c for c in report.checks if not c["ok"]] == [], "its own chunks and dictionary, the embedder as built"
    assert {r["found"] for r in report.chunking if r["must be 0"] or r["what"].startswith("document without")} == {0}


# --- what the ledger gets ---------------------------------------------------------------------------------------------

FOUND = small.by_hand(small.PLAIN, fused=["c-guide-001"], parents=["p-guide"])
MISSED = small.by_hand(small.BEFORE, fused=["c-guide-002"], parents=["p-guide"])
NOTHING = small.by_hand(small.case("unmeasured", "?"), fused=["c-guide-002"])


def test_retrieval_values_by_case_with_the_headline_first(version):
    values = runs.retrieval_values({"expert": report([FOUND, MISSED, NOTHING], (1, 5), version)})
    assert next(iter(values)) == "expert/fused/recall@5"
    found = values["expert/fused/recall@5"]
    assert (found["plain"], found["before"]) == (1.0, 0.0) and found["unmeasured"] != found["unmeasured"], "NaN"
    assert {k.split("/")[1] for k in values} == {"fused", "parents", "reranked", "lexical"}
    assert not any("ndcg@10" in k for k in values), "10 is no cutoff here"


def answered(name: str, text: str = "30 days.", status: str = "answered", **fields) -> AnswerTrace:
    scores = fields.pop("scores", {"content_accuracy": Score(value=1.0), "keyword_hit_rate": Score(value=0.5)})
    case = small.case(name, "How long?", ("c-guide-002",), **{"keywords": ("30 days",), **fields})
    return AnswerTrace(case, Answer(query="q", text=text, status=status), scores)


UNANSWERABLE = {"answerable": False, "documents": (), "groups": (), "parent_groups": (), "keywords": ()}
ANSWERS = [
    answered("right"),
    answered("other", "7 days.", wrong_keywords=("7 days",), half="tuning"),
    answered("shy", "not in the documents", "abstained", scores={"content_accuracy": Score(value=0.0)}),
    answered("rightly", "not in the documents", "abstained", **UNANSWERABLE,
             scores={"keyword_hit_rate": Score(value=None, applies=False), "content_accuracy": Score(value=1.0)}),
    answered("bold", **UNANSWERABLE, scores={"content_accuracy": Score(value=None, reason="not parsed")}),
]  # fmt: skip


def test_answer_values_leave_out_what_does_not_apply_and_keep_what_is_unmeasured():
    values = runs.answer_values({"expert": ANSWERS})
    assert next(iter(values)) == "expert/overall"
    # min(accuracy, 0.4 + 0.6 x the least other): 0.4 + 0.6 x 0.5 = 0.7
    assert values["expert/overall"] == {
        "right": pytest.approx(0.7), "other": pytest.approx(0.7), "shy": 0.0, "rightly": 1.0, "bold": None,
    }  # fmt: skip
    assert values["expert/keyword_hit_rate"] == {"right": 0.5, "other": 0.5}
    assert values["expert/content_accuracy"]["bold"] is None
    assert values["expert/right_version"] == {"right": 1.0, "other": 0.0, "shy": 1.0}
    assert values["expert/refused_rightly"] == {"rightly": 1.0, "bold": 0.0}
    assert values["expert/not_refused_wrongly"] == {"right": 1.0, "other": 1.0, "shy": 0.0}
    assert "generated/refused_rightly" not in runs.answer_values({"generated": ANSWERS[:2]})


def test_an_entry_counts_unmeasured_and_names_every_component(version, tmp_path):
    folder, path = workspace(tmp_path)
    sets = runs.load_sets(version, folder, path)
    pipeline = small.pipeline(version)
    began = time.perf_counter()
    reports = runs.measure_retrieval(pipeline, sets, (1, 5))
    answers = runs.measure_answers(pipeline, sets, RubricJudge())
    assert list(reports) == list(answers) == ["expert", "generated"]
    some = (
        "parse",
        "evaluate",
        "chunk",
        "embedder",
        "dense",
        "rewrite",
        "route",
        "retrieve",
        "rerank",
        "generate",
        "llm",
        "profile",
    )
    view = pipeline.config.only(some)
    made = runs.entry("qdoca", runs.answer_values(answers), sets, pipeline, view, judge="rubric", started=began)
    assert made.eval_sets == {s.name: s.hash for s in sets} and made.seconds["total"] > 0
    assert {*SECTIONS, "judge", "dictionary", "embedder", "generator", "prompt"} <= made.components.keys()
    assert made.components["judge"] == {"name": "rubric", "dimensions": list(DIMENSIONS)}
    assert made.config["profile"] == "offline"
    assert all(f.n + f.unmeasured == len(made.per_query[m]) for m, f in made.metrics.items())
    again = runs.entry("qdoc", runs.retrieval_values(reports), sets, pipeline, pipeline.config)
    assert again.components | {"judge": 0} == made.components | {"judge": 0}, "a notebook's view and the whole are one"
    assert again.corpus_hash == made.corpus_hash and again.seconds == {}


# --- tables -----------------------------------------------------------------------------------------------------------


def test_targets_by_hand(version):
    found = report([FOUND, MISSED], (1, 50), version)
    rows = {r["target"]: r for r in runs.targets(found, ANSWERS)}
    chunks, parents = rows["right chunks in the fused list, recall@50"], rows["right parents within Top-M"]
    assert (chunks["reached"], chunks["n"], chunks["met"], chunks["needed"]) == (0.5, 2, "no", ">= 0.95")
    assert chunks["95 % interval"] == "0.095 to 0.905"  # Wilson, 1 of 2
    assert (parents["reached"], parents["met"]) == (0.5, "no")
    wrong = rows["answers of a wrong version"]
    assert (wrong["reached"], wrong["n"], wrong["met"]) == (0.3333, 3, "no")
    right, wrongly = rows["unanswerable, refused"], rows["answerable, wrongly refused"]
    assert (right["reached"], right["n"], right["met"]) == (0.5, 2, "no")
    assert (wrongly["reached"], wrongly["n"], wrongly["met"]) == (0.5, 2, "no"), "the test half alone"


def test_a_target_counts_its_own_half_and_stage_and_what_was_measured(version):
    found = report([FOUND, MISSED, NOTHING, small.by_hand(small.PLAIN, fused=["c-guide-001"])], (1, 50), version)
    tuned = answered("tuned", "not in the documents", "abstained", half="tuning", **UNANSWERABLE)
    rows = [(r["reached"], r["n"], r["unmeasured"], r["95 % interval"]) for r in runs.targets(found, [*ANSWERS, tuned])]
    assert rows[0] == (0.6667, 3, 1, runs.span(*runs.wilson(2, 3)))
    assert rows[1] == (0.3333, 3, 1, runs.span(*runs.wilson(1, 3))), "parents are measured by parents"
    assert rows[3][:2] == (0.5, 2), "the tuning half has no part in it"


def test_a_target_without_a_case_is_neither_met_nor_missed(version):
    rows = runs.targets(report([FOUND], (1,), version), ANSWERS[1:2])
    assert [r["met"] for r in rows] == ["yes", "yes", "no", "no such case", "no such case"]
    assert (rows[3]["reached"], rows[3]["n"], rows[3]["95 % interval"]) == (None, 0, "–")
    none = runs.targets(report([], (1,), version), [])
    assert {r["met"] for r in none} == {"no such case"}


def test_the_test_half_stands_beside_the_tuning_half():
    rows = {r["dimension"]: r for r in runs.half_rows(summary(ANSWERS, ("half",)))}
    accuracy = rows["content_accuracy"]
    assert accuracy["test half"] == pytest.approx((1 + 0 + 1) / 3) and (accuracy["n"], accuracy["unmeasured"]) == (3, 1)
    assert (accuracy["tuning half"], accuracy["n (tuning)"]) == (1.0, 1)
    assert (rows["keyword_hit_rate"]["n"], rows["keyword_hit_rate"]["not applicable"]) == (1, 1)
    assert (accuracy["errors"], accuracy["fallbacks"]) == (0, 0)
    alone = runs.half_rows(summary(ANSWERS[1:2], ("half",)))[0]
    assert (alone["test half"], alone["n"], alone["95 % interval"]) == (None, 0, "–")


def test_kappa_as_a_table():
    a = align([2, 2, 0, 0], [0.9, 0.9, 0.1, None])
    (row,) = runs.kappa_rows({"test": a})
    assert (row["half"], row["n"], row["unmeasured"], row["kappa"], row["agreement"]) == ("test", 3, 1, 1.0, 1.0)
    assert row["people say 0, 1, 2"] == row["judge says 0, 1, 2"] == "0.33, 0.00, 0.67"


def test_gated_figures_are_ones_that_a_run_measures(version):
    reports = dict.fromkeys(runs.SETS, report([FOUND, MISSED], (10, 50), version))
    assert set(runs.GATED["qdoc"]) <= runs.retrieval_values(reports).keys()
    assert set(runs.GATED["qdoca"]) <= runs.answer_values(dict.fromkeys(runs.SETS, ANSWERS)).keys()


def test_a_baseline_allows_two_cases_but_no_wrong_version():
    figures = {
        "expert/overall": Figure(value=0.5, n=128), "expert/right_version": Figure(value=1.0, n=88),
        "expert/refused_rightly": Figure(value=0.5, n=40),
    }  # fmt: skip
    run = SimpleNamespace(kind="qdoca", metrics=figures)
    own = runs.own_margins([run], 0.02)
    assert own == {"qdoca/expert/right_version": 0.0, "qdoca/expert/refused_rightly": 0.05}

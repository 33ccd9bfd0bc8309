"""Q-DOC on a small index: groups, stages, what a part adds, routing's accuracy, authenticity, failures."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from ragbuild.core.config import load_config
from ragbuild.core.errors import InputRefused, MissingResource
from ragbuild.core.records import TermEntry
from ragbuild.evaluate.metrics import per_query
from ragbuild.evaluate.qdoc import CaseTrace, Variants, canonical, load_traces, report, run_qdoc, save_traces
from ragbuild.index.staging import write_version
from ragbuild.index.versions import IndexVersion
from ragbuild.offline.evalset import EvalCase
from ragbuild.online.pipeline import Pipeline
from tests.conftest import FakeEmbedder, make_chunks, make_document

GUIDE = make_document("guide")
OLD = make_document("guide", doc_version="v3.4", status="legacy", doc_source="guide-3.4.md")
SMALL = make_document("spec500", doc_type="spec", product_model=("LG-500",))
LARGE = make_document("spec900", doc_type="spec", product_model=("LG-900",))
TWIN = make_document("guide", doc_version="v5.0")
FAQ = make_document("faq", doc_type="faq", language="zh")
TEXTS = {
    "guide": ["Reset the break-glass account on the console.", "The fan tray is replaced without tools.",
              "Backups are kept for 30 days."],
    "old": ["Backups are kept for 7 days.", "A screwdriver opens the lid."],
    "small": ["It weighs 12 kg with both disks."],
    "large": ["It weighs 20 kg with all disks."],
    "faq": ["用户通过单点登录访问门户。"],
}  # fmt: skip
DOCUMENTS = {"guide": GUIDE, "old": OLD, "small": SMALL, "large": LARGE, "faq": FAQ}
TERMS = [TermEntry(standard_term="break-glass account", colloquial=("rescue login",))]


def case(name: str, query: str, *groups: tuple[str, ...], document=GUIDE, **fields) -> EvalCase:
    base = {
        "id": name, "query": query, "language": "en", "query_type": "factual", "kind": "plain", "source": "expert",
        "half": "test", "documents": (document.key,), "groups": groups,
        "parent_groups": tuple((f"p-{g[0].split('-')[1]}",) for g in groups),
    }  # fmt: skip
    return EvalCase(**(base | fields))


PLAIN = case("plain", "is the fan tray replaced without tools", ("c-guide-001",))
WORDS = case("words", "forgot the rescue login", ("c-guide-000",), language="zh", query_type="procedural")
BEFORE = case("before", "how long are backups kept in version 3.4", ("c-old-000",), document=OLD)
LOST = case("lost", "it weighs 12 kg, the LG-900?", ("c-small-000",), document=SMALL)
NONE = case("none", "who won the cup", answerable=False, documents=())
BROKEN = case("broken", "???", ("c-faq-000",), document=FAQ)


def version_in(folder, prompt: str = "") -> IndexVersion:
    chunks = [c for name, texts in TEXTS.items() for c in make_chunks(texts, DOCUMENTS[name], name)]
    write_version(
        folder, chunks, list(DOCUMENTS.values()), TERMS, config=load_config(),
        encode=FakeEmbedder().encode_documents, embedder={"name": "fake", "dim": 64}, prompt=prompt,
    )  # fmt: skip
    return IndexVersion(folder)


@pytest.fixture(scope="module")
def version(tmp_path_factory) -> IndexVersion:
    return version_in(tmp_path_factory.mktemp("indexes"))


def pipeline(version: IndexVersion, embedder=None, **overrides) -> Pipeline:
    config = load_config(overrides={k.replace("__", "."): v for k, v in overrides.items()})
    return Pipeline(version, config, embedder or FakeEmbedder())


def by_hand(case: EvalCase, **rankings: list[str]) -> CaseTrace:
    """A trace that went this way, the same without rewriting and routing where nothing else is said."""
    fused = rankings.get("fused", [])
    other = {f"{a}_{s}": fused for a in ("no_rewrite", "no_routing") for s in ("fused", "reranked")}
    return CaseTrace(case, case.query, rankings={"lexical": fused, "reranked": fused} | other | rankings)


# --- groups -----------------------------------------------------------------------------------------------------------


def test_a_hit_counts_for_the_group_it_serves_once_and_ranks_do_not_move():
    groups = [("a", "b"), ("c",)]
    ranking = ["x", "b", "a", "c"]
    assert canonical(ranking, groups) == ["x", "a", "a#2", "c"], "b serves a's group; a itself then brings nothing"
    figures = per_query([canonical(ranking, groups)], [{"a": 1.0, "c": 1.0}], (1, 2, 3, 4))
    assert [figures[f"recall@{k}"][0] for k in (1, 2, 3, 4)] == [0, 1 / 2, 1 / 2, 1]
    assert [figures[f"precision@{k}"][0] for k in (2, 4)] == [1 / 2, 2 / 4]
    assert figures["mrr"][0] == 1 / 2
    assert canonical([], groups) == [] and canonical(["x", "y"], groups) == ["x", "y"] and canonical(["a"], []) == ["a"]


def test_a_child_of_two_groups_serves_the_first_and_another_the_second():
    assert canonical(["b", "a"], [("a", "b"), ("b", "c")]) == ["a", "a#1"]
    assert canonical(["b", "c"], [("a", "b"), ("b", "c")]) == ["a", "b"]


# --- the way through retrieval ----------------------------------------------------------------------------------------


def test_stages_of_a_question_about_an_old_version(version):
    trace = Variants(pipeline(version)).trace(BEFORE)
    assert trace.rankings["fused"][0] == "c-old-000" and trace.rankings["parents"][0] == "p-old"
    assert "c-old-000" not in trace.rankings["raw_fused"], "raw means active documents"
    assert (
        "c-old-000" not in trace.rankings["no_routing_fused"] and trace.rankings["no_rewrite_fused"][0] == "c-old-000"
    )
    assert "raw_parents" not in trace.rankings and set(trace.rankings["parents"]) <= {f"p-{name}" for name in TEXTS}
    assert "doc_version" in trace.routed and trace.where["doc_version"] == ["v3.4"] and not trace.routed_out
    assert sorted(trace.rankings["reranked"]) == sorted(trace.rankings["fused"])


def test_a_rewrite_is_in_the_trace_and_missing_without_it(version):
    trace = Variants(pipeline(version)).trace(WORDS)
    assert "break-glass account" in trace.query and trace.rankings["lexical"][0] == "c-guide-000"
    assert trace.rankings["raw_lexical"][:1] != ["c-guide-000"], "no document says rescue login"


def test_a_route_that_keeps_the_right_document_out_is_seen(version):
    trace = Variants(pipeline(version)).trace(LOST)
    assert trace.routed == ("product_model",) and trace.routed_out
    assert "c-small-000" not in trace.rankings["fused"] and trace.rankings["no_routing_fused"][0] == "c-small-000"
    assert not Variants(pipeline(version)).trace(case("n", LOST.query, answerable=False, documents=())).routed_out
    both = case("both", LOST.query, ("c-small-000",), ("c-large-000",), document=SMALL)
    assert Variants(pipeline(version)).trace(both).routed_out, "one of the two documents that it needs is kept out"


class Reversed:
    name, stand_in = "reversed", True

    def score(self, query, candidates):
        return [float(c.hit.rank) for c in candidates]


def test_fused_and_reranked_are_each_their_own_order(version):
    asked = pipeline(version)
    asked.reranker = Reversed()
    rankings = Variants(asked).trace(PLAIN).rankings
    assert len(rankings["fused"]) > 1 and rankings["reranked"] == rankings["fused"][::-1]
    fused = pipeline(version).retrieve(PLAIN.query).retrieval.candidates
    assert rankings["fused"] == [c.hit.chunk_id for c in fused]


def test_the_same_search_is_made_once(version):
    embedder = FakeEmbedder()
    variants = Variants(pipeline(version, embedder))
    variants.trace(PLAIN)
    assert embedder.encoded == [PLAIN.query], "nothing to rewrite, nothing to route: all four ways are one"
    embedder.encoded.clear()
    variants.trace(BEFORE)
    assert embedder.encoded == [BEFORE.query] * 2, "with routing and without; rewriting changes nothing"


class Down(FakeEmbedder):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def encode_queries(self, texts):
        raise self.error


def test_a_failure_is_a_miss_that_is_shown_and_a_missing_model_stops_the_run(version):
    found = run_qdoc(pipeline(version), [PLAIN, BROKEN], [1])
    assert [e["id"] for e in found.errors] == ["broken"] and "UsageError" in found.errors[0]["error"]
    assert found.values["fused"]["recall@1"].tolist() == [1, 0], "a miss, not left out"
    assert found.values["fused"]["authenticity@1"].tolist() == [1, 0]
    slow = run_qdoc(pipeline(version, Down(TimeoutError("too slow"))), [PLAIN], [1])
    assert slow.errors[0]["error"] == "TimeoutError: too slow"
    assert slow.advice() == ["no answerable case came through retrieval: nothing can be said"]
    with pytest.raises(MissingResource):
        run_qdoc(pipeline(version, Down(MissingResource("no model"))), [PLAIN], [1])


def test_two_runs_are_equal_and_recall_does_not_fall_with_k(version):
    cases = [PLAIN, WORDS, BEFORE, LOST, NONE]
    seen = []
    first = run_qdoc(pipeline(version), cases, [1, 2, 5], lambda done, total: seen.append((done, total)))
    again = run_qdoc(pipeline(version), cases, [1, 2, 5])
    assert seen[-1] == (5, 5) and first.rows() == again.rows()
    assert [t.rankings for t in first.traces] == [t.rankings for t in again.traces]
    for row in first.rows():
        assert row["recall@1"] <= row["recall@2"] <= row["recall@5"] and row["hit@1"] <= row["hit@5"]
        assert (row["n"], row["unmeasured"]) == (4, 0), "unanswerable questions have no right chunk"


def test_one_route_only(version):
    found = run_qdoc(pipeline(version, retrieve__routes=["lexical"]), [PLAIN, LOST], [1])
    assert "dense" not in found.values and "raw_dense" not in found.values and found.mean("lexical", "recall@1") == 0.5
    assert all("dense" not in remark for remark in found.advice())


# --- figures ----------------------------------------------------------------------------------------------------------


def test_routing_is_right_when_every_right_document_still_passes(version):
    routed = case("routed", "what does the LG-900 cost", answerable=False, documents=())
    found = run_qdoc(pipeline(version), [PLAIN, BEFORE, LOST, NONE, routed], [1, 5])
    assert found.traces[-1].routed, "routing acts on what nothing answers too, and is neither right nor wrong there"
    assert found.routing == {"cases": 3, "acted": 2, "right": 1, "accuracy": 0.5}
    assert not any("remove" in remark for remark in found.advice()), "one half is not under one half"
    third = run_qdoc(pipeline(version), [BEFORE, LOST, LOST], [1, 5])
    assert third.routing["accuracy"] == 0.3333 and any("only 1 of 3" in remark for remark in third.advice())
    lost = run_qdoc(pipeline(version), [LOST], [1, 5])
    assert lost.routing["accuracy"] == 0.0
    assert any("kept the right document in only 0 of 1" in remark for remark in lost.advice())
    assert any(remark.startswith("routing lowers recall@5 from 1.000 to 0.000") for remark in lost.advice())
    assert run_qdoc(pipeline(version), [PLAIN], [1]).routing["accuracy"] is None, "it never acted"


def test_without_ablations_the_pipelines_own_figures_are_the_same(version):
    whole, plain = (run_qdoc(pipeline(version), [PLAIN, BEFORE, NONE], (1, 5), ablations=a) for a in (True, False))
    assert list(plain.values) == ["lexical", "dense", "fused", "reranked", "parents"]
    for stage, figures in plain.values.items():
        assert {k: v.tolist() for k, v in figures.items()} == {k: v.tolist() for k, v in whole.values[stage].items()}
    assert [t.routed_out for t in plain.traces] == [t.routed_out for t in whole.traces]


def test_another_version_with_the_same_file_name_is_not_authentic(tmp_path):
    chunks = [c for d in (GUIDE, TWIN) for c in make_chunks(TEXTS["guide"][:1], d, d.doc_version)]
    write_version(tmp_path, chunks, [GUIDE, TWIN], [], config=load_config(),
                  encode=FakeEmbedder().encode_documents, embedder={"name": "fake", "dim": 64})  # fmt: skip
    trace = by_hand(case("x", "reset it", ("c-v4.2-000",)), fused=["c-v5.0-000", "c-v4.2-000"])
    found = report([trace], (1, 2), IndexVersion(tmp_path))
    assert [found.values["fused"][f"authenticity@{k}"][0] for k in (1, 2)] == [0, 0.5]


def test_authenticity_is_the_share_of_the_list_that_comes_from_a_right_document(version):
    traces = [
        by_hand(PLAIN, fused=["c-faq-000", "c-guide-002", "c-guide-001"]),
        by_hand(BEFORE, fused=["c-guide-002", "c-old-001"]),
    ]
    found = report(traces, (1, 2, 4), version)
    shares = [found.values["fused"][f"authenticity@{k}"].tolist() for k in (1, 2, 4)]
    assert shares == [[0, 0], [1 / 2, 1 / 2], [2 / 3, 1 / 2]], "of what was retrieved; another version is not right"
    assert "authenticity@1" not in found.values.get("parents", {})


def test_parents_are_measured_by_parents(version):
    trace = by_hand(PLAIN, fused=["c-old-000", "c-guide-001"], parents=["p-old", "p-guide"])
    found = report([trace], (1, 2), version)
    assert found.values["parents"]["recall@1"].tolist() == [0] and found.values["parents"]["mrr"].tolist() == [1 / 2]


TRACES = [
    by_hand(PLAIN, fused=["c-guide-001"]),
    by_hand(WORDS, fused=["c-faq-000", "c-guide-000"]),
    by_hand(BEFORE, fused=["c-guide-002"]),
    by_hand(NONE, fused=["c-guide-002"]),
]


def test_rows_and_groups_by_hand(version):
    found = report(TRACES, (1, 2), version)
    row = next(r for r in found.rows() if r["stage"] == "fused")
    assert (row["n"], row["recall@1"], row["recall@2"]) == (3, 0.3333, 0.6667) and row["mrr"] == 0.5
    kept = next(r for r in found.rows(lambda c: c.language == "zh") if r["stage"] == "fused")
    assert (kept["n"], kept["recall@1"], kept["recall@2"]) == (1, 0, 1)
    assert found.by("language", "fused", ["recall@1"]) == [
        {"language": "en", "n": 2, "recall@1": 0.5}, {"language": "zh", "n": 1, "recall@1": 0.0},
    ]  # fmt: skip
    assert found.by("document", "fused", ["recall@2"]) == [{"document": "guide", "n": 3, "recall@2": 0.6667}]
    assert [r["query_type"] for r in found.by("query_type", "fused", ["mrr"])] == ["factual", "procedural"]


def test_what_was_not_measured_is_counted_and_is_no_number(version):
    found = report(
        [by_hand(PLAIN, fused=["c-guide-001"]), by_hand(case("x", "?"), fused=["c-guide-001"])], (1,), version
    )
    row = next(r for r in found.rows() if r["stage"] == "fused")
    assert (row["n"], row["unmeasured"], row["recall@1"]) == (1, 1, 1.0), "a case without a right chunk has no recall"
    empty = next(r for r in found.rows(lambda c: c.half == "tuning") if r["stage"] == "fused")
    assert (empty["n"], empty["recall@1"]) == (0, None)
    json.dumps(found.rows() + found.by("half", "fused", ["recall@1"]), allow_nan=False)


def test_what_a_part_adds_question_by_question(version):
    better = by_hand(PLAIN, fused=["c-guide-001"], no_rewrite_fused=["c-faq-000"], no_rewrite_reranked=["c-guide-001"])
    worse = by_hand(WORDS, fused=["c-faq-000"], no_rewrite_fused=["c-guide-000"])
    same = by_hand(BEFORE, fused=["c-old-000"])
    found = report([better, better, worse, same], (1,), version)
    rewriting, reranked, routing, _ = found.ablations(n_resamples=200)
    assert (rewriting["part"], rewriting["stage"], rewriting["figure"]) == ("rewriting", "fused", "recall@1")
    assert (rewriting["with_it"], rewriting["without"], rewriting["difference"]) == (0.75, 0.5, 0.25)
    assert (rewriting["helped"], rewriting["hurt"], rewriting["n"]) == (2, 1, 4)
    assert rewriting["low"] <= 0 <= rewriting["high"], "three questions tell nothing"
    assert (reranked["figure"], reranked["helped"]) == ("ndcg@1", 0) and routing["difference"] == 0
    assert not any("rewriting lowers" in remark for remark in found.advice())


def test_advice_when_the_reranked_order_is_worse_than_one_route(version):
    right, wrong = ["c-guide-001", "c-faq-000"], ["c-faq-000", "c-guide-001"]
    trace = by_hand(PLAIN, lexical=right, dense=wrong, fused=wrong, reranked=wrong)
    (remark,) = report([trace] * 5, (1, 2), version).advice()
    assert "below the lexical route alone" in remark and "retrieve.routes=[lexical]" in remark
    assert "made from chunks" not in remark and report([trace], (1, 2), version).advice() == [], "one tells nothing"
    made = replace(trace, case=replace(PLAIN, source="generated"))
    assert "made from chunks, which favours words" in report([made] * 5, (1, 2), version).advice()[0]
    good = by_hand(PLAIN, lexical=right, dense=wrong, fused=wrong, reranked=right)
    assert report([good], (1, 2), version).advice() == []


def test_a_set_without_answerable_questions(version):
    found = run_qdoc(pipeline(version), [NONE], [1])
    assert found.answerable == [] and found.by("kind", "no_rewrite_fused", ["recall@1"]) == []
    assert found.routing["cases"] == 0 and len(found.advice()) == 1


def test_traces_come_back_as_they_were(version, tmp_path):
    made = run_qdoc(pipeline(version), [BEFORE, NONE, BROKEN], [1])
    save_traces(tmp_path / "t.json", made.traces, CaseTrace)
    kept = load_traces(tmp_path / "t.json", CaseTrace)
    assert kept == made.traces
    assert report(kept, (1,), version).rows() == made.rows()
    (tmp_path / "t.json").write_text("[{}]", encoding="utf-8")
    with pytest.raises(InputRefused, match="run its notebook again"):
        load_traces(tmp_path / "t.json", CaseTrace)

"""Answers over cases: traces, failures, version traps, refusals and the averages with what they rest on."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ragbuild.core.config import load_config
from ragbuild.core.errors import MissingResource, RagbuildError
from ragbuild.core.records import Answer, Citation
from ragbuild.evaluate.answers import AnswerTrace, KeptAnswers, judged_of, refusals, run_answers, summary
from ragbuild.evaluate.judge import RubricJudge
from ragbuild.evaluate.qdoc import load_traces, save_traces
from ragbuild.evaluate.rubric import Score
from ragbuild.offline.evalset import EvalCase
from tests.conftest import make_chunks, make_document

NEW = make_chunks(["The idle timeout is 15 minutes."], make_document("guide"), "new")[0]
OLD = make_chunks(
    ["The idle timeout is 30 minutes."], make_document("guide", doc_version="v3.4", status="legacy"), "old"
)[0]
OTHER = make_chunks(["The lid is blue."], make_document("lids"), "lid")[0]


def case(name: str = "a", **fields) -> EvalCase:
    base = {
        "id": name, "query": "What is the idle timeout?", "language": "en", "query_type": "factual", "kind": "version",
        "source": "expert", "half": "test", "documents": (NEW.doc_key,), "parent_groups": ((NEW.chunk_id,),),
        "answer": "15 minutes.", "keywords": ("15 minutes",), "wrong_keywords": ("30 minutes",),
    }  # fmt: skip
    return EvalCase(**(base | fields))


UNANSWERABLE = {"answerable": False, "documents": (), "parent_groups": (), "keywords": (), "wrong_keywords": ()}


def answer(text: str = "The idle timeout is 15 minutes. ^1^", parents=(NEW, OLD, OTHER), cited=(1,), status="answered"):
    citations = tuple(
        Citation(
            number=n, chunk_id=parents[n - 1].chunk_id, doc_id=parents[n - 1].doc_id, page=1, quote="q", section="s",
            doc_version=parents[n - 1].doc_version, title="t", doc_source="s.md", status="active", chapter="c",
        )
        for n in cited
    )  # fmt: skip
    return Answer(query="q", text=text, status=status, citations=citations, parents=parents)


def pipeline(**answers):
    """Gives, for the query `name`, the answer of that name, or raises it."""

    def ask(query: str) -> Answer:
        found = answers[query]
        if isinstance(found, Exception):
            raise found
        return found

    return SimpleNamespace(ask=ask)


def trace(text: str, cited=(1,), **fields) -> AnswerTrace:
    return AnswerTrace(case(**fields), answer(text, cited=cited))


def test_the_judge_sees_parents_in_the_order_of_their_numbers_and_whether_sources_are_right():
    judged = judged_of(case(), answer(cited=(2,)))
    assert [c.splitlines()[-1] for c in judged.contexts] == [NEW.content, OLD.content, OTHER.content]
    assert (judged.right_cited, judged.needed_cited) == (False, 0.0)
    assert judged_of(case(), answer(cited=(2, 1))).right_cited is True
    assert judged_of(case(), answer(cited=())).right_cited is None
    two = case(parent_groups=((NEW.chunk_id, "p-elsewhere"), (OTHER.chunk_id,)))
    assert judged_of(two, answer(cited=(1,))).needed_cited == 0.5


def test_one_failing_case_becomes_an_error_and_the_others_go_on():
    seen = []
    asked = pipeline(good=answer(), bad=RagbuildError("timed out"), none=ValueError("odd"))
    cases = [case("1", query="bad"), case("2", query="good"), case("3", query="none", **UNANSWERABLE)]
    traces = run_answers(asked, cases, RubricJudge(), lambda done, total: seen.append((done, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert [t.error for t in traces] == ["RagbuildError: timed out", "", "ValueError: odd"]
    assert [t.overall for t in traces] == [0.0, 1.0, 0.0]  # an answer that never came is no right refusal either
    assert not any(t.refused for t in traces)
    rows = {(r["group"], r["dimension"]): r for r in summary(traces, ())}
    accuracy = rows["all", "content_accuracy"]
    assert (accuracy["mean"], accuracy["n"], accuracy["unmeasured"], accuracy["errors"]) == (1 / 3, 3, 0, 2)
    form = rows["all", "expression_quality"]
    assert (form["mean"], form["n"], form["not_applicable"]) == (1.0, 1, 2)


def test_a_missing_resource_ends_the_run():
    with pytest.raises(MissingResource):
        run_answers(pipeline(x=MissingResource("no endpoint")), [case(query="x")], RubricJudge())


@pytest.mark.parametrize(
    ("text", "cited", "fields", "wrong"),
    [
        ("It is 15 minutes.", (1,), {}, False),
        ("It is 15 minutes.", (2,), {}, True),  # cites 3.4 alone
        ("It is 15 minutes, in 3.4 it was 30 minutes.", (2, 1), {}, False),
        ("It is 30 minutes.", (1,), {}, True),
        ("It is 30 minutes.", (), {}, True),
        ("It is blue.", (3,), {}, False),  # wrong, but of no other version
        ("It is 15 minutes.", (1,), {"documents": (NEW.doc_key.replace("/all", "/LG-9"),)}, False),  # of this version
        ("30 minutes.", (2,), {"documents": (OLD.doc_key,), "keywords": ("30 min",), "wrong_keywords": ("15",)}, False),
        ("The documents do not say whether 30 minutes is right.", (2,), {}, False),  # refused
    ],
)  # fmt: skip
def test_wrong_version_answers(text, cited, fields, wrong):
    assert trace(text, cited, **fields).wrong_version is wrong


def test_refusals_by_half_with_n():
    refusal = "The documents do not answer this."
    traces = [
        trace(refusal, (), name="1", half="tuning", **UNANSWERABLE),
        trace("It is 7.", (), name="2", half="test", **UNANSWERABLE),
        trace(refusal, (), name="3", half="test"),
        trace("It is 15 minutes.", name="4", half="test"),
        AnswerTrace(case("5", half="test"), None, {}, "time-out"),  # no answer is no refusal, and counts
    ]
    rows = {(r["group"], r["value"], r["what"][:10]): r for r in refusals(traces, ("half",))}
    every = rows["all", "", "unanswerab"]
    assert (every["share"], every["refused"], every["n"]) == (0.5, 1, 2)
    assert rows["all", "", "answerable"]["share"] == pytest.approx(1 / 3)
    assert (rows["half", "test", "unanswerab"]["share"], rows["half", "test", "answerable"]["n"]) == (0.0, 3)
    assert ("half", "tuning", "answerable") not in rows


def test_the_average_says_what_it_rests_on():
    def scored(name: str, value: float | None, language: str) -> AnswerTrace:
        scores = {"content_accuracy": Score(value=value), "tone": Score(value=None, applies=False)}
        return AnswerTrace(case(name, language=language), answer(), scores)

    traces = [scored("1", 1.0, "en"), scored("2", 0.5, "zh"), scored("3", None, "zh"), scored("4", 0.0, "en")]
    rows = {(r["group"], r["value"], r["dimension"]): r for r in summary(traces, ("language",))}
    first = rows["all", "", "content_accuracy"]
    assert (first["mean"], first["n"], first["unmeasured"], first["not_applicable"]) == (0.5, 3, 1, 0)
    assert 0 <= first["low"] < 0.5 < first["high"] <= 1
    assert rows["language", "en", "content_accuracy"]["mean"] == 0.5
    alone = rows["language", "zh", "content_accuracy"]
    assert (alone["mean"], alone["n"], alone["low"]) == (0.5, 1, None)  # one value has no interval
    assert (rows["all", "", "tone"]["mean"], rows["all", "", "tone"]["not_applicable"]) == (None, 4)
    assert (rows["all", "", "overall"]["n"], rows["all", "", "overall"]["unmeasured"]) == (3, 1)


def test_a_stand_in_s_answer_in_place_of_the_model_s_is_counted():
    said = answer().model_copy(update={"warnings": ("extractive answer instead of the model's: 503",)})
    traces = run_answers(pipeline(a=answer(), b=said), [case("1", query="a"), case("2", query="b")], RubricJudge())
    assert [t.fallback for t in traces] == ["", said.warnings[0]]
    assert {(r["n"], r["errors"], r["fallbacks"]) for r in summary(traces, ())} == {(2, 0, 1)}


def test_two_runs_are_identical_and_traces_come_back_from_disk(tmp_path):
    cases = [case("1", query="a"), case("2", query="b", **UNANSWERABLE)]
    asked = pipeline(a=answer(), b=answer("No idea.", cited=(), status="abstained"))
    first, second = (run_answers(asked, cases, RubricJudge()) for _ in range(2))
    assert first == second and summary(first) == summary(second) and refusals(first) == refusals(second)
    save_traces(tmp_path / "answers.json", first, AnswerTrace)
    assert load_traces(tmp_path / "answers.json", AnswerTrace) == first


def test_a_run_that_died_goes_on_and_a_stand_in_is_not_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("RAGBUILD_CACHE_DIR", str(tmp_path))
    asked: list[str] = []

    def told(query: str) -> Answer:
        asked.append(query)
        return Answer(query=query, text="x", status="answered", generator="extractive" if query == "b" else "openai:m")

    model = SimpleNamespace(
        ask=told, generator=SimpleNamespace(name="openai:m"), version=SimpleNamespace(digest="v"), config=load_config()
    )
    first = KeptAnswers(model)
    assert [first.ask(q).text for q in ("a", "b", "a", "b")] == ["x"] * 4 and asked == ["a", "b", "b"]
    with first.path.open("ab") as handle:
        handle.write(b'{"key": "torn')
    again = KeptAnswers(model)
    assert again.ask("a").text == "x" and asked == ["a", "b", "b"]
    again.ask("c")
    KeptAnswers(model).ask("c")
    assert asked == ["a", "b", "b", "c"]
    model.config = load_config(overrides={"retrieve.top_n": 20})
    KeptAnswers(model).ask("a")
    assert asked[-1] == "a", "another configuration is asked anew"

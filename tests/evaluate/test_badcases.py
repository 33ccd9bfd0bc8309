"""Bad cases: each cause from a trace made by hand, and each path of the decision tree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ragbuild.core.config import load_config
from ragbuild.core.records import Answer, Chunk, Citation
from ragbuild.evaluate.answers import AnswerTrace
from ragbuild.evaluate.badcases import FIXES, PROMPT_FIXES, BadCase, bad_cases, counts, ranks, walk
from ragbuild.evaluate.qdoc import CaseTrace, QdocReport
from ragbuild.evaluate.rubric import DIMENSIONS, Score
from ragbuild.index.staging import write_version
from ragbuild.index.versions import IndexVersion
from ragbuild.offline.evalset import EvalCase
from tests.conftest import FakeEmbedder, make_chunks, make_document

TOP_M = 2
TEXT = (
    "The idle timeout ends a session after 15 minutes without a request, and an administrator may set another value in "
    "the policy of an application, but never beyond the absolute limit of twelve hours."
)
GUIDE = make_chunks([TEXT, "Short row."], make_document("guide"), "guide")
OLD = make_chunks(
    ["The idle timeout is 30 minutes in this release, for all applications and for every user, and can't be changed by "
     "anybody at all, whichever role they may have."],
    make_document("guide", doc_version="v3.4", status="legacy"), "old",
)  # fmt: skip
LIDS = make_chunks(["The lid of the box is blue and closes after 15 minutes by policy."], make_document("lids"), "lids")
START = len(LIDS[0].content) + 2  # where the next parent of the same document begins
NEXT = [
    c.model_copy(update={"span": (c.span[0] + START, c.span[1] + START)})
    for c in make_chunks(["The rest of what is told about lids."], make_document("lids"), "next")
]
G, ROW, LID, REST = "c-guide-000", "c-guide-001", "c-lids-000", "c-next-000"


@pytest.fixture(scope="module")
def version(tmp_path_factory: pytest.TempPathFactory) -> IndexVersion:
    indexes: Path = tmp_path_factory.mktemp("bad") / "indexes"
    documents = [make_document("guide"), make_document("guide", doc_version="v3.4", status="legacy"),
                 make_document("lids")]  # fmt: skip
    write_version(
        indexes, [*GUIDE, *OLD, *LIDS, *NEXT], documents, [], config=load_config(),
        encode=FakeEmbedder().encode_documents, embedder={"name": "fake", "dim": 64},
    )  # fmt: skip
    return IndexVersion(indexes)


def case(**fields: Any) -> EvalCase:
    base = {
        "id": "a", "query": "How long is the idle timeout of a session?", "language": "en", "query_type": "factual",
        "kind": "plain", "source": "expert", "half": "tuning", "documents": (GUIDE[0].doc_key,), "groups": ((G,),),
        "parent_groups": (("p-guide",),), "answer": "15 minutes; another value by policy.",
        "keywords": ("15 minutes", "policy"), "wrong_keywords": ("30 minutes",),
    }  # fmt: skip
    return EvalCase(**(base | fields))


UNANSWERABLE = {"answerable": False, "documents": (), "groups": (), "parent_groups": (), "keywords": ()}


def at(rank: int, item: str = G) -> list[str]:
    """A ranking in which `item` stands at `rank`."""
    return [f"x{i}" for i in range(1, rank)] + [item]


SERVED = {"lexical": at(1), "dense": at(1), "fused": at(1), "reranked": at(1), "parents": ["p-guide"]}
NOWHERE = {"lexical": ["x"], "dense": ["x"], "fused": ["x"], "reranked": ["x"], "parents": ["p-lids"]}


def trace(rankings: dict[str, list[str]] | None = None, about: EvalCase | None = None, **fields: Any) -> CaseTrace:
    about = about or case()
    held = {"query": about.query, "sub_questions": (about.query,), "rankings": rankings or SERVED} | fields
    return CaseTrace(about, **held)


def answered(
    text: str, cited: tuple[str, ...] = ("guide",), about: EvalCase | None = None, status: str = "answered",
    warnings: tuple[str, ...] = (), generator: str = "extractive", **low: float | None,
) -> AnswerTrace:  # fmt: skip
    """Every dimension is 1 but those given in `low`. Citations are numbered as in `cited`."""
    parents: dict[str, Chunk] = {"guide": GUIDE[0], "old": OLD[0], "lids": LIDS[0], "next": NEXT[0]}
    used = [parents[name] for name in cited]
    citations = tuple(
        Citation(
            number=n, chunk_id=p.chunk_id, doc_id=p.doc_id, doc_version=p.doc_version, title="t", section="s",
            doc_source=p.doc_source, status=p.status, chapter="c", page=1, quote="q",
        )
        for n, p in enumerate(used, 1)
    )  # fmt: skip
    answer = Answer(
        query="q", text=text, status=status, citations=citations, parents=tuple(used), warnings=warnings,
        generator=generator,
    )  # fmt: skip
    scores = {name: Score(value=value) for name, value in (dict.fromkeys(DIMENSIONS, 1.0) | low).items()}
    return AnswerTrace(about or case(), answer, scores)


WRONG = answered("The lid is blue. ^1^", ("lids",), content_accuracy=0.0, keyword_hit_rate=0.0)


def found(version: IndexVersion, one: CaseTrace, answer: AnswerTrace | None = None) -> BadCase | None:
    bad = bad_cases(QdocReport([one], (10,), {}), [answer] if answer else [], version, TOP_M)
    return bad[0] if bad else None


# --- where retrieval lost it ------------------------------------------------------------------------------------------

OTHER_WORDS, LOST_WORDS = "Wann endet sie?", "Wieso kickt mich die Kiste beim timeout?"
RETRIEVAL = {
    "routed out": (
        trace(NOWHERE | {"no_routing_fused": at(3)}, routed=("model_version",), routed_out=True),
        "routing", "right document filtered out", "without: at rank 3",
    ),
    "routed out, and not found either": (
        trace(NOWHERE, routed=("model_version",), routed_out=True),
        "routing", "right document filtered out", "not found either",
    ),
    "lost by rewriting": (
        trace(NOWHERE | {"no_rewrite_reranked": at(7)}), "rewrite", "lost by rewriting", "reranked at 7",
    ),
    "ranked down by rewriting": (
        trace(SERVED | {"reranked": at(9), "no_rewrite_reranked": at(2), "parents": []}),
        "rewrite", "ranked down by rewriting", "reranked at 2",
    ),
    "cut apart": (
        trace(NOWHERE | {"lexical": at(1, LID)}, case(groups=((LID,), (REST,)))),
        "chunking", "answer cut between two parents", "its other half was given",
    ),
    "fragment": (trace(NOWHERE, case(groups=((ROW,),))), "chunking", "a fragment", "2 tokens: 'Short row.'"),
    "both routes": (
        trace(NOWHERE | {"lexical": at(40), "dense": at(30)}), "fusion", "found by both routes, cut at Top-N",
        "lexical 40, dense 30, fused –",
    ),
    "one route": (
        trace(NOWHERE | {"dense": at(30)}), "fusion", "found by the dense route alone, cut at Top-N", "dense 30",
    ),
    "other words": (
        trace(NOWHERE, case(query=OTHER_WORDS)), "tokenizer or dictionary", "no word in common", "cut into",
    ),
    "few words": (
        trace(NOWHERE, case(query=LOST_WORDS)), "tokenizer or dictionary", "too few words in common",
        "unknown: Wieso, kickt",
    ),
    "no dense route": (
        trace({k: v for k, v in NOWHERE.items() if k != "dense"}), "tokenizer or dictionary", "too few words in common",
        "shared: ",
    ),
    "neither near": (trace(NOWHERE), "embedding", "not near", "shared words: "),
    "no lexical route": (
        trace({k: v for k, v in NOWHERE.items() if k != "lexical"}, case(query=OTHER_WORDS)), "embedding", "not near",
        "none",
    ),
    "ranked down": (
        trace(SERVED | {"reranked": at(3), "parents": []}), "rerank", "ranked down", "fused 1, reranked 3",
    ),
    "ranked down from the last place": (
        trace(SERVED | {"fused": at(TOP_M), "reranked": at(3), "parents": []}), "rerank", "ranked down", "fused 2",
    ),
    "diluted": (
        trace({"lexical": ["x"], "dense": at(2), "fused": at(8), "reranked": at(5), "parents": []}),
        "rerank", "diluted by fusion, not lifted", "dense 2, fused 8",
    ),
    "never near": (
        trace({"lexical": at(9), "dense": at(8), "fused": at(8), "reranked": at(5), "parents": []}),
        "rerank", "never near the top", "Top-M is 2",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("one", "category", "sub", "told"), RETRIEVAL.values(), ids=RETRIEVAL)
def test_what_retrieval_lost(one: CaseTrace, category: str, sub: str, told: str, version: IndexVersion):
    for answer in (None, AnswerTrace(one.case, WRONG.answer, WRONG.scores)):
        bad = found(version, one, answer)
        assert bad and (bad.category, bad.sub_category) == (category, sub)
        assert told in bad.evidence and bad.fix == FIXES[category]


def test_a_right_answer_is_no_bad_case_whatever_was_lost(version: IndexVersion):
    assert found(version, trace(NOWHERE), answered("15 minutes, by policy. ^1^")) is None
    assert found(version, trace()) is None, "nothing was lost, and no answer asked for"


def test_of_several_losses_the_earliest_stage_counts(version: IndexVersion):
    """One place is ranked down, the other is found by no route."""
    both = case(groups=((G,), ("c-old-000",)), query="How is the idle timeout for every user and all applications set?")
    one = trace(SERVED | {"reranked": at(3), "parents": []}, both)
    assert found(version, one).category == "embedding"


def test_ranks_by_stage():
    assert ranks(trace({"lexical": at(3), "dense": ["x"]}), (G,)) == {"lexical": 3, "dense": None}


# --- what the answer made of it ---------------------------------------------------------------------------------------

LONG = "The box has a lid that one can open. " * 60
ANSWERS = {
    "refusal": answered("The documents at hand do not answer this.", (), status="abstained", content_accuracy=0.0),
    "format": answered("x ^1^", warnings=("1 citation(s) to documents that were not given were removed",),
                       content_accuracy=0.1),
    "hallucination": answered("A gnome closes it. ^1^", credibility=0.2, content_accuracy=0.1),
    "source not used": answered("The lid is blue. ^1^", ("lids",), content_accuracy=0.1, keyword_hit_rate=0.0),
    "wrong passage": answered("Never beyond the absolute limit. ^1^", content_accuracy=0.1, keyword_hit_rate=0.0),
    "incomplete": answered("It is 15 minutes. ^1^", keyword_hit_rate=0.5),
    "inaccurate": answered("Not 15 minutes, whatever the policy. ^1^", content_accuracy=0.3),
    "over-citation": answered("15 minutes by policy, or 30 minutes. ^1^ ^2^ ^3^", ("guide", "old", "lids"),
                              content_accuracy=0.5),
    "wrong language": answered("会话在 15 minutes 后结束，见 policy。 ^1^", expression_quality=0.5),
    "verbose": answered(f"15 minutes by policy. {LONG} ^1^", expression_quality=0.5),
    "illogical": answered("By policy. So 15 minutes. ^1^", logical_coherence=0.4),
    "tone": answered("15 minutes, by policy. ^1^", tone=0.1),
}  # fmt: skip


@pytest.mark.parametrize(("sub", "answer"), ANSWERS.items(), ids=ANSWERS)
def test_what_the_answer_made_of_its_sources(sub: str, answer: AnswerTrace, version: IndexVersion):
    bad = found(version, trace(), answer)
    assert bad and (bad.category, bad.sub_category) == ("prompt", sub)
    assert bad.fix == PROMPT_FIXES.get(sub, "a rule on tone") and bad.evidence
    assert bad.got == answer.answer.text and bad.score == pytest.approx(answer.overall)


def test_every_failing_of_an_answer_has_an_example_here():
    assert set(PROMPT_FIXES) <= set(ANSWERS) | {"missing refusal"}
    assert set(FIXES) == {c for _, c, *_ in RETRIEVAL.values()} | {"engineering", "ground truth", "prompt"}


def test_markdown_that_is_broken_is_a_matter_of_form(version: IndexVersion):
    bad = found(version, trace(), answered("**15 minutes, by policy. ^1^", expression_quality=0.5))
    assert bad.sub_category == "format"


@pytest.mark.parametrize(
    ("text", "status", "sub"),
    [
        ("The documents at hand do not answer this.", "abstained", None),
        ("The lid of the box is blue. ^1^", "answered", "missing refusal"),
        ("A gnome paints it green at midnight. ^1^", "answered", "hallucination"),
    ],
)
def test_what_no_document_holds(text: str, status: str, sub: str | None, version: IndexVersion):
    about = case(**UNANSWERABLE, query="What colour is the lid at night?")
    zero = {} if sub is None else {"content_accuracy": 0.0, "credibility": 0.0}
    bad = found(version, trace(NOWHERE, about), answered(text, ("lids",), about, status, **zero))
    assert (bad.sub_category if bad else None) == sub
    assert bad is None or (bad.category == "prompt" and "lids" in bad.evidence)


def test_another_version_is_a_matter_of_routing(version: IndexVersion):
    other = answered("It is 30 minutes. ^1^", ("old",), content_accuracy=0.0)
    for one in (trace(), trace(NOWHERE)):
        bad = found(version, one, other)
        assert (bad.category, bad.sub_category) == ("routing", "wrong version let through")
        assert "routing did not act" in bad.evidence and "v3.4" in bad.evidence
    fluent = answered("It is 30 minutes. ^1^", ("old",))  # full marks from a judge that did not see it
    assert found(version, trace(), fluent).sub_category == "wrong version let through"


# --- faults of the case and of the machine ----------------------------------------------------------------------------


def test_a_keyword_that_no_right_place_holds(version: IndexVersion):
    about = case(keywords=("15 minutes", "frobnicate"))
    lacks = answered("It is 15 minutes. ^1^", about=about, keyword_hit_rate=0.5)
    bad = found(version, trace(about=about), lacks)
    assert (bad.category, bad.sub_category) == ("ground truth", "keyword not in its chunks")
    assert "frobnicate" in bad.evidence
    lacks = answered("Never beyond the limit. ^1^", about=about, keyword_hit_rate=0.0)
    assert found(version, trace(about=about), lacks).category == "prompt", "what its place holds is lacking too"


def test_all_keywords_from_another_place(version: IndexVersion):
    elsewhere = answered("It closes after 15 minutes by policy. ^1^", ("lids",), content_accuracy=0.5)
    bad = found(version, trace(), elsewhere)
    assert (bad.category, bad.sub_category) == ("ground truth", "another place holds the same")
    about = case(keywords=("15 minutes",), answer="It ends when nobody has sent a request for a quarter of an hour.")
    bad = found(version, trace(about=about), AnswerTrace(about, elsewhere.answer, elsewhere.scores))
    assert bad.category == "prompt", "one keyword alone may be held by chance"


@pytest.mark.parametrize(
    ("one", "answer", "sub"),
    [
        (trace(error="TimeoutError: timed out"), None, "time-out"),
        (trace(), AnswerTrace(case(), error="UsageError: too long"), "error"),
        (trace(), answered("15 minutes, by policy. ^1^", warnings=("extractive answer instead of the model's: 500",)),
         "endpoint or parse"),
        (trace(), answered("15 minutes. ^1^", **dict.fromkeys(DIMENSIONS)), "not judged"),
    ],
)  # fmt: skip
def test_engineering_comes_before_everything(
    one: CaseTrace, answer: AnswerTrace | None, sub: str, version: IndexVersion
):
    bad = found(version, one, answer)
    assert (bad.category, bad.sub_category) == ("engineering", sub)


def test_counts_and_rows(version: IndexVersion):
    names = ("incomplete", "illogical", "incomplete")
    cases = [case(id=f"q{i}") for i in range(3)]
    answers = [AnswerTrace(c, ANSWERS[n].answer, ANSWERS[n].scores) for c, n in zip(cases, names, strict=True)]
    bad = bad_cases(QdocReport([trace(about=c) for c in cases], (10,), {}), answers, version, TOP_M)
    assert [(c["sub_category"], c["cases"], c["id"]) for c in counts(bad)] == [
        ("incomplete", 2, "q0"),
        ("illogical", 1, "q1"),
    ]
    assert bad[0].row()["score"] == 0.7 and bad[0].row()["document"] == GUIDE[0].doc_key  # 0.4 + 0.6 x 0.5
    assert bad_cases(QdocReport([], (10,), {}), [], version, TOP_M) == [] == counts([])


# --- the decision tree ------------------------------------------------------------------------------------------------


def report(routed: tuple[int, int] = (0, 0), **recall: float | None) -> QdocReport:
    """Ten answerable cases with the recall given; of `routed` (n, right) cases routing acted on n and kept right."""
    stages = {"fused": 1.0, "lexical": 1.0, "dense": 1.0, "parents": 1.0} | recall
    values = {s: {"recall@10": np.full(10, v)} for s, v in stages.items() if v is not None}
    traces = [
        trace(SERVED, case(id=f"q{i}"), routed=("tag",) * (i < routed[0]), routed_out=routed[1] <= i < routed[0])
        for i in range(10)
    ]
    return QdocReport(traces, (10, 1000), values)


def judged(generator: str = "openai:m", **low: float | None) -> list[AnswerTrace]:
    one = answered("15 minutes. ^1^", generator=generator, **low)
    return [AnswerTrace(case(id=f"q{i}"), one.answer, one.scores) for i in range(10)]


def bad(sub: str, n: int, category: str = "prompt") -> list[BadCase]:
    empty = dict.fromkeys(BadCase.__dataclass_fields__, "")
    return [BadCase(**empty | {"id": f"q{i}", "category": category, "sub_category": sub}) for i in range(n)]


PATHS = {
    "engineering": (report(fused=0.1), [], bad("time-out", 1, "engineering"), 1, "engineering: the errors"),
    "routing": (report((10, 8), fused=0.5), [], [], 3, "routing:"),
    "lexical": (report((10, 10), fused=0.5, lexical=0.4), [], [], 4, "tokenizer or dictionary:"),
    "dense": (report(fused=0.5, dense=0.4), [], [], 5, "embedding:"),
    "fusion": (report(fused=0.9, lexical=0.9, dense=0.9), [], [], 5, "fusion: retrieve.rrf_k"),
    "fusion of one route": (report(fused=0.9, lexical=0.9, dense=None), [], [], 5, "fusion:"),
    "rerank": (report(parents=0.5), [], [], 3, "rerank: a stronger reranker"),
    "keywords": (
        report(), judged(keyword_hit_rate=0.5), [*bad("verbose", 3), *bad("incomplete", 7)[3:], *bad("x", 9, "rerank")],
        4, "prompt, loop 2: of 16 bad cases low in keyword hit rate, 4 are 'incomplete' (Answer Specification",
    ),
    "the stand-in": (
        report(), judged("extractive", keyword_hit_rate=0.5), bad("incomplete", 2), 4,
        "generator: a chat endpoint (generate.generator=openai); the stand-in reads no prompt; of 2",
    ),
    "accuracy": (report(), judged(content_accuracy=0.5), bad("inaccurate", 1), 5, "prompt, loop 2: of 1 bad cases"),
    "credibility": (report(), judged(credibility=0.5), bad("hallucination", 1), 6, "prompt, loop 2"),
    "completeness": (report(), judged(content_completeness=0.5), bad("incomplete", 1), 8, "prompt, loop 2"),
    "expression": (report(), judged(expression_quality=0.5), [], 8, "prompt, loop 2: of 0 bad cases"),
    "coherence": (report(), judged(logical_coherence=0.5), bad("illogical", 1), 9, "prompt, loop 2"),
    "a team's own": (report(), judged(tone=0.5), bad("tone", 1), 10, "prompt, loop 2: of 1 bad cases low in tone"),
    "nothing": (report(), judged(), [], 9, "nothing stands out"),
}  # fmt: skip


@pytest.mark.parametrize(("retrieval", "answers", "some", "n", "change"), PATHS.values(), ids=PATHS)
def test_each_path_of_the_tree(retrieval, answers, some, n: int, change: str):
    forks, recommended = walk(retrieval, answers, some, top_n=50)
    assert recommended.startswith(change) and len(forks) == n
    taken = [i for i, f in enumerate(forks) if f.low]
    assert all(f.row().keys() == forks[0].row().keys() for f in forks)
    if change.startswith("nothing"):
        assert not taken
    elif not change.startswith(("fusion", "prompt")):
        assert taken[-1] == n - 1


def test_sources_that_were_not_given_are_no_fault_of_the_prompt():
    """The tree asks where completeness is low; the mean over all cases may look fine."""
    held = report()
    lost = QdocReport([trace(NOWHERE, t.case) for t in held.traces], held.cutoffs, held.values)
    forks, change = walk(lost, judged(content_completeness=0.5), [], 50)
    assert change.startswith("rerank:") and forks[-1].low and forks[-1].value == 0.0


def test_only_cases_that_are_low_in_the_dimension_are_counted_for_it():
    answers = judged(content_accuracy=0.1)[:5] + judged(content_accuracy=0.9)[5:]
    assert ": of 5 bad cases low in content accuracy, 5 are" in walk(report(), answers, bad("inaccurate", 10), 50)[1]


def test_the_cutoff_is_within_top_n_and_nothing_measured_takes_no_fork():
    forks, _ = walk(report(), [], [], top_n=50)
    assert forks[1].question == "chunk recall@10, fused" and forks[1].n == 10
    forks, change = walk(QdocReport([], (10,), {}), judged(keyword_hit_rate=None), [], 50)
    assert change.startswith("nothing") and [f.value for f in forks[1:4]] == [None, None, None]

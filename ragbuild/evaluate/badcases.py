"""Bad cases: every failed case gets a category and a sub-category from its trace, and the method's decision tree is
walked with the numbers at each fork to one recommended next change.

A case is put down to the first stage at which it went wrong: engineering, ground truth, routing, rewriting, then
the lexical or the dense route, fusion, reranking, and only then generation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ragbuild.core.records import Chunk
from ragbuild.evaluate.answers import AnswerTrace
from ragbuild.evaluate.qdoc import STAGES, CaseTrace, QdocReport
from ragbuild.evaluate.rubric import holds
from ragbuild.index.versions import IndexVersion

GOOD = 0.8  # a score from here on is right and complete: level 2 of the human scale
# Below these a fork of the decision tree is taken. Ours: the method names none.
RECALL, ROUTE, RANKING, ROUTING = 0.95, 0.8, 0.85, 0.9
# What loop 2 changes for each failing of an answer (method A15).
PROMPT_FIXES = {
    "format": "Answer Specification: the form of citations",
    "hallucination": "Prohibitions: nothing that the documents do not hold",
    "refusal": "Answer Specification and an example: answer when the documents hold it; here generate.abstain_*",
    "over-citation": "Prohibitions: no citation that supports nothing",
    "incomplete": "Answer Specification: every part of the question; or missing ground-truth sources",
    "verbose": "Answer Specification: length and form",
    "illogical": "Answer Specification and an example: order of steps",
}


@dataclass(frozen=True)
class BadCase:
    """One failed case; `evidence` says in words and ranks why it was classified so."""

    id: str
    source: str
    half: str
    language: str
    kind: str
    query_type: str
    category: str
    sub_category: str
    query: str
    evidence: str
    expected: str
    got: str
    document: str

    def row(self) -> dict[str, str]:
        return asdict(self)


def bad_cases(
    retrieval: QdocReport, answers: Sequence[AnswerTrace], version: IndexVersion, top_m: int
) -> list[BadCase]:
    """Every case that failed in retrieval (something needed is not among the Top-M's parents) or in its answer."""
    answered = {a.case.id: a for a in answers}
    out = []
    for trace in retrieval.traces:
        found = _classify(trace, answered.get(trace.case.id), version, top_m)
        if found:
            out.append(_bad(trace, answered.get(trace.case.id), *found))
    return out


def counts(bad: Sequence[BadCase]) -> list[dict[str, Any]]:
    """Categories and sub-categories by how many, with one example each."""
    number = Counter((b.category, b.sub_category) for b in bad)
    first = {(b.category, b.sub_category): b for b in reversed(bad)}
    return [
        {"category": key[0], "sub_category": key[1], "cases": n, "example": first[key].query, "id": first[key].id}
        for key, n in sorted(number.items(), key=lambda item: (-item[1], item[0]))
    ]


def _bad(trace: CaseTrace, answer: AnswerTrace | None, category: str, sub: str, evidence: str) -> BadCase:
    case = trace.case
    got = answer.answer.text if answer and answer.answer else ""
    document = case.documents[0] if case.documents else ""
    return BadCase(
        case.id, case.source, case.half, case.language, case.kind, case.query_type, category, sub, case.query, evidence,
        case.answer, got, document,
    )  # fmt: skip


def _classify(
    trace: CaseTrace, answer: AnswerTrace | None, version: IndexVersion, top_m: int
) -> tuple[str, str, str] | None:
    case = trace.case
    error = trace.error or (answer.error if answer else "")
    if error:
        return "engineering", "time-out" if "imeout" in error or "timed out" in error else "error", error
    fallback = [w for w in answer.answer.warnings if w.startswith("extractive answer")] if _has(answer) else []
    if fallback:
        return "engineering", "endpoint or parse", fallback[0]
    if not case.answerable:
        if answer is None or answer.refused:
            return None
        return "prompt", "hallucination", "answered, though no document holds it"
    missing = [g for g in case.groups if not _served(trace, version, g)]
    if not missing and (answer is None or _right(answer)):
        return None
    if answer is None or not _right(answer):
        wrong = _ground_truth(case.keywords, case.groups, answer, version)
        if wrong:
            return "ground truth", *wrong
    if missing and (answer is None or not _right(answer)):
        return _retrieval(trace, missing[0], version, top_m)
    return _generation(answer) if answer is not None and not _right(answer) else None


def _served(trace: CaseTrace, version: IndexVersion, group: Sequence[str]) -> bool:
    """Is a parent of the group among those given to the generator?"""
    parents = {p.chunk_id for p in version.parents_of(version.rows_of(group))}
    return bool(parents & set(trace.rankings.get("parents", ())))


def _ranks(trace: CaseTrace, group: Sequence[str]) -> dict[str, int | None]:
    """Best rank of the group at each stage, from 1; None where it was not found."""
    return {
        stage: next((r for r, item in enumerate(ids, 1) if item in group), None)
        for stage, ids in trace.rankings.items()
    }


def _retrieval(trace: CaseTrace, group: Sequence[str], version: IndexVersion, top_m: int) -> tuple[str, str, str]:
    ranks = _ranks(trace, group)
    seen = ", ".join(f"{s} {ranks.get(s) or '–'}" for s in STAGES if s != "parents")
    chunk = version.children(version.rows_of(group[:1]))[0]
    place = f"{chunk.doc_source} p{chunk.page}; ranks: {seen}"
    if trace.routed_out and not ranks.get("fused"):
        saved = ranks.get("no_routing_reranked") or "–"
        why = f"filter on {', '.join(trace.routed)}; without routing at rank {saved}; {place}"
        return "routing", "right document filtered out", why
    if not ranks.get("fused"):
        without = ranks.get("no_rewrite_fused")
        if without:
            return "rewrite", "lost by rewriting", f"as typed it is found at rank {without}; {place}"
        if ranks.get("lexical") and ranks.get("dense"):
            return "fusion", "found by both routes, cut at Top-N", place
        if ranks.get("lexical") or ranks.get("dense"):
            found = "lexical" if ranks.get("lexical") else "dense"
            return "fusion", f"found by the {found} route alone, cut at Top-N", place
        return _not_found(trace, chunk, version, place)
    if (ranks.get("reranked") or 10**6) > top_m:
        better = min((ranks[s] or 10**6 for s in ("lexical", "dense", "fused") if s in ranks), default=10**6)
        sub = "ranked down" if better <= top_m else "never near the top"
        return "rerank", sub, f"reranked at {ranks.get('reranked')}, Top-M is {top_m}; {place}"
    return "chunking", "the child is there, another part of the answer is not", place


def _not_found(trace: CaseTrace, chunk: Chunk, version: IndexVersion, place: str) -> tuple[str, str, str]:
    """Neither route has it: do question and chunk share words at all?"""
    words = dict.fromkeys(t for q in trace.sub_questions or (trace.query,) for t in version.tokenizer(q))
    held = set(version.tokenizer(chunk.content)) & set(words)
    unknown = [w for w in words if not version.lexical.idf(w)]
    if not held:
        return "tokenizer or dictionary", "no word in common", f"question cut into {' | '.join(words)}; {place}"
    if unknown:
        return "tokenizer or dictionary", "words that no document holds", f"{', '.join(unknown[:6])}; {place}"
    return "embedding", "neither near nor ranked by its words", f"shared: {', '.join(sorted(held)[:6])}; {place}"


def _ground_truth(
    keywords: Sequence[str], groups: Sequence[Sequence[str]], answer: AnswerTrace | None, version: IndexVersion
) -> tuple[str, str] | None:
    """Is the case itself at fault: keywords that its own chunks lack, or the same facts rightly cited elsewhere?"""
    if not keywords:
        return None
    chunks = version.parents_of(version.rows_of([g[0] for g in groups]))
    text = "\n".join(c.breadcrumb + "\n" + c.content for c in chunks)
    lacking = [k for k in keywords if not holds(text, k)]
    if lacking:
        return "keyword not in its chunks", f"'{lacking[0]}' stands in none of the ground-truth parents"
    if _has(answer) and not answer.refused and all(holds(answer.answer.text, k) for k in keywords):
        right = {c.chunk_id for c in chunks}
        cited = {c.chunk_id: c for c in answer.answer.citations}
        if cited and not set(cited) & right:
            other = next(iter(cited.values()))
            return "another place holds the same", f"all keywords answered from {other.doc_source} p{other.page}"
    return None


def _generation(answer: AnswerTrace) -> tuple[str, str, str]:
    """What is wrong with an answer whose sources were all there."""
    scores = {name: s.value for name, s in answer.scores.items() if s.value is not None}
    said = "; ".join(f"{n} {v:.2f}" for n, v in sorted(scores.items(), key=lambda i: i[1])[:3])

    def low(name: str) -> bool:
        return scores.get(name, 1.0) < GOOD

    if answer.refused:
        return "prompt", "refusal", "refused, though the sources were given"
    if answer.wrong_version:
        return "routing", "wrong version let through", said
    warnings = [w for w in answer.answer.warnings if "citation" in w] if answer.answer else []
    if warnings:
        return "prompt", "format", warnings[0]
    if scores.get("credibility", 1.0) < 0.5:
        return "prompt", "hallucination", said
    cited = {c.chunk_id for c in answer.answer.citations} if answer.answer else set()
    if low("content_accuracy") and not low("keyword_hit_rate") and len(cited) >= 3:
        return "prompt", "over-citation", f"{len(cited)} sources cited; {said}"
    if low("keyword_hit_rate") or low("content_completeness") or low("content_accuracy"):
        return "prompt", "incomplete", said
    if low("expression_quality"):
        return "prompt", "verbose", said
    return "prompt", "illogical", said


def _has(answer: AnswerTrace | None) -> bool:
    return answer is not None and answer.answer is not None


def _right(answer: AnswerTrace) -> bool:
    return answer.overall is not None and answer.overall >= GOOD and not answer.wrong_version


@dataclass(frozen=True)
class Fork:
    """One question of the decision tree with the number it was answered by."""

    question: str
    value: float | None
    threshold: float
    n: int
    low: bool

    def row(self) -> dict[str, Any]:
        return {**asdict(self), "value": None if self.value is None else round(self.value, 4)}


def walk(retrieval: QdocReport, dimensions: dict[str, tuple[float, int]], top_n: int) -> tuple[list[Fork], str]:
    """The method's decision tree (A15) with the numbers at each fork, ending in one recommended next change.

    `dimensions`: mean and n of each Q-DOC-A dimension. Retrieval and answer figures are compared with their own
    thresholds, never with each other.
    """
    forks: list[Fork] = []
    n = len(retrieval.answerable)

    def low(question: str, value: float | None, threshold: float, count: int) -> bool:
        forks.append(Fork(question, value, threshold, count, value is not None and value < threshold))
        return forks[-1].low

    depth = max((k for k in retrieval.cutoffs if k <= top_n), default=retrieval.cutoffs[-1])
    share = 1 - len(retrieval.errors) / max(1, len(retrieval.traces))
    if low("engineering: do all cases run?", share, 1.0, len(retrieval.traces)):
        return forks, "engineering first: fix the errors listed, since technical failures look like quality problems"

    def recall(stage: str) -> float:
        return retrieval.mean(stage, f"recall@{depth}")

    if low(f"fused chunk recall@{depth}", recall("fused"), RECALL, n):
        routing = retrieval.routing
        if routing["acted"] and low("routing accuracy", routing["accuracy"], ROUTING, routing["acted"]):
            return forks, "routing: fix the layer that filters right documents out, or route.enabled=false"
        if low(f"lexical recall@{depth}", recall("lexical"), ROUTE, n):
            return forks, "tokenizer or dictionary: add the words of the lost questions in term_review.csv"
        if low(f"dense recall@{depth}", recall("dense"), ROUTE, n):
            return forks, "dense route: another embedding model (embedder.name); then loop 1, fine-tuning"
        return forks, "fusion: rrf_k or a larger retrieve.top_n (notebook 20)"
    if low("right parents within Top-M", retrieval.mean("parents", f"recall@{depth}"), RANKING, n):
        return forks, "ranking: a stronger reranker (rerank.model), then Top-M and Top-N (notebook 20)"
    changes = (
        ("keyword_hit_rate", "prompt, loop 2: what the answer leaves out"),
        ("content_accuracy", "prompt, loop 2: accuracy"),
        ("credibility", "prompt, loop 2: Prohibitions"),
        ("content_completeness", "missing ground-truth sources? raise rerank.top_m; else prompt, loop 2"),
        ("expression_quality", "prompt, loop 2: guidelines of expression"),
        ("logical_coherence", "prompt, loop 2: guidelines and examples"),
    )
    for name, change in changes:
        if name in dimensions and low(name.replace("_", " "), dimensions[name][0], GOOD, dimensions[name][1]):
            return forks, change
    return forks, "nothing stands out: widen the eval set before tuning further"

"""Bad cases: every failed case gets a category and a sub-category from its trace, and the method's decision tree is
walked with the numbers at each fork to one recommended next change.

A case is put down to the first stage at which it went wrong, in the order of `FIXES`; what has all its sources and is
still wrong is the generator's, "prompt" in the method's words whichever generator it was.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ragbuild.core.records import Chunk
from ragbuild.core.text import language_of
from ragbuild.evaluate.answers import AnswerTrace, judged_of
from ragbuild.evaluate.facts import holds, words
from ragbuild.evaluate.qdoc import CaseTrace, QdocReport
from ragbuild.evaluate.rubric import Reading
from ragbuild.index.versions import IndexVersion
from ragbuild.online.answerable import unknown_words

GOOD, WRONG = 0.8, 0.4  # the human scale: level 2 from the first on, level 0 below the second
# Below these a fork of the decision tree is taken. Ours: the method names none.
RECALL, ROUTE, RANKING, ROUTING = 0.95, 0.8, 0.85, 0.9
FRAGMENT = 20  # tokens; a smaller child says too little to be found by itself
NEAR = 4  # characters between two children that were one text
NOWHERE = 10**6
# What to change, by category, in the order of the stages.
FIXES = {
    "engineering": "the errors themselves, before anything else: technical failures look like quality problems",
    "ground truth": "the case itself: its keywords, or a further right place",
    "routing": "the layer of routing that chose the documents, or route.enabled=false",
    "rewrite": "the dictionary entry that changed the question, or the part of rewriting (rewrite.*)",
    "chunking": "chunk sizes and overlap (notebook 02)",
    "tokenizer or dictionary": "the lost words, in term_review.csv (notebook 01), or another lexical.tokenizer",
    "embedding": "another embedding model (embedder.name), then loop 1: fine-tuning",
    "fusion": "retrieve.rrf_k or a larger retrieve.top_n (notebook 20)",
    "rerank": "a stronger reranker (rerank.model), then rerank.top_m and retrieve.top_n (notebook 20)",
    "prompt": "loop 2",
}
# What loop 2 changes for each failing of an answer (method A15); an element of the prompt comes first.
PROMPT_FIXES = {
    "format": "Answer Specification: the form of citations and Markdown",
    "hallucination": "Prohibitions: nothing that the documents do not hold",
    "refusal": "Answer Specification and an example: answer when the documents hold it",
    "missing refusal": "Prohibitions and an example: say so when the documents do not answer",
    "over-citation": "Prohibitions: no citation that supports nothing",
    "source not used": "Goal and an example: read every document given, cite the one that answers",
    "wrong passage": "Goal and an example: what was asked, not what stands near it",
    "incomplete": "Answer Specification: every part of the question",
    "inaccurate": "Answer Specification: values and conditions as the documents have them",
    "wrong language": "Answer Specification: the language of the question",
    "verbose": "Answer Specification: length and form",
    "illogical": "Answer Specification and an example: order of steps",
}


@dataclass(frozen=True)
class BadCase:
    """One failed case; `evidence` says in words and ranks why it was classified so, `fix` what to change."""

    id: str
    source: str
    half: str
    language: str
    kind: str
    query_type: str
    category: str
    sub_category: str
    score: float | None
    query: str
    evidence: str
    fix: str
    expected: str
    got: str
    document: str

    def row(self) -> dict[str, Any]:
        return {**asdict(self), "score": "" if self.score is None else round(self.score, 4)}


Found = tuple[str, str, str]  # category, sub-category, evidence


def bad_cases(
    retrieval: QdocReport, answers: Sequence[AnswerTrace], version: IndexVersion, top_m: int
) -> list[BadCase]:
    """Every case that failed: in its answer, or, where none was asked for, in retrieval (something needed is not among
    the parents of the Top-M)."""
    answered = {a.case.id: a for a in answers}
    found = [(t, a := answered.get(t.case.id), _classify(t, a, version, top_m)) for t in retrieval.traces]
    return [_bad(trace, answer, *cause) for trace, answer, cause in found if cause]


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
    fix = PROMPT_FIXES.get(sub, f"a rule on {sub}") if category == "prompt" else FIXES[category]
    return BadCase(
        case.id, case.source, case.half, case.language, case.kind, case.query_type, category, sub,
        answer.overall if answer else None, case.query, evidence, fix, case.answer,
        answer.answer.text if answer and answer.answer else "", case.documents[0] if case.documents else "",
    )  # fmt: skip


def _classify(trace: CaseTrace, answer: AnswerTrace | None, version: IndexVersion, top_m: int) -> Found | None:
    case = trace.case
    if error := trace.error or (answer.error if answer else ""):
        return "engineering", "time-out" if "imeout" in error or "timed out" in error else "error", error
    if answer and answer.fallback:
        return "engineering", "endpoint or parse", answer.fallback
    if answer and answer.overall is None:
        reason = next((s.reason for s in answer.scores.values()), "no dimension was asked for")
        return "engineering", "not judged", reason
    if not case.answerable:
        return None if answer is None or answer.refused else _not_refused(answer)
    if answer and answer.overall >= GOOD and not answer.wrong_version:
        return None
    missing = [g for g in case.groups if not _served(trace, version, g)]
    if answer is None and not missing:
        return None
    if wrong := _ground_truth(answer, trace, version):
        return "ground truth", *wrong
    if answer and answer.wrong_version:
        routed = f"routing acted on {', '.join(trace.routed)}" if trace.routed else "routing did not act"
        return "routing", "wrong version let through", f"{routed}; cites {_cites(answer)}"
    if missing:
        found = [_retrieval(trace, group, version, top_m) for group in missing]
        return min(found, key=lambda f: list(FIXES).index(f[0]))
    return "prompt", *_generation(answer, trace, version)


# --- retrieval --------------------------------------------------------------------------------------------------------


def _served(trace: CaseTrace, version: IndexVersion, group: Sequence[str]) -> bool:
    """Is a parent of the group among those given to the generator?"""
    parents = {p.chunk_id for p in version.parents_of(version.rows_of(group))}
    return bool(parents & set(trace.rankings.get("parents", ())))


def ranks(trace: CaseTrace, group: Sequence[str]) -> dict[str, int | None]:
    """The group's best rank at each stage, from 1; None where it was not found. `group`: ids of children, or of parents
    for the stage ``parents``."""
    return {
        stage: next((r for r, item in enumerate(ids, 1) if item in group), None)
        for stage, ids in trace.rankings.items()
    }


def _retrieval(trace: CaseTrace, group: Sequence[str], version: IndexVersion, top_m: int) -> Found:
    at = ranks(trace, group)

    def place_at(stage: str) -> int:
        return at.get(stage) or NOWHERE

    chunk = version.children(version.rows_of(group[:1]))[0]
    seen = ", ".join(f"{s} {at[s] or '–'}" for s in ("lexical", "dense", "fused", "reranked") if s in at)
    other = "" if chunk.language == trace.case.language else f" (in {chunk.language}, asked in {trace.case.language})"
    place = f"{chunk.doc_source} p{chunk.page}{other}; ranks: {seen}"
    lost, routes = place_at("fused") == NOWHERE, [r for r in ("lexical", "dense") if at.get(r)]
    unrouted, typed = at.get("no_routing_fused"), place_at("no_rewrite_reranked")
    if trace.routed_out and lost and (unrouted or len(trace.case.groups) == 1):
        without = f"at rank {unrouted}" if unrouted else "not found either"
        return "routing", "right document filtered out", f"by {', '.join(trace.routed)}; without: {without}; {place}"
    if typed <= top_m or (lost and typed < NOWHERE):
        sub = "lost by rewriting" if lost else "ranked down by rewriting"
        return "rewrite", sub, f"as typed it is reranked at {typed}; {place}"
    if any(_cut_apart(chunk, other, version) for other in trace.case.groups if _served(trace, version, other)):
        return "chunking", "answer cut between two parents", f"its other half was given; {place}"
    if lost and routes:
        sub = "found by both routes" if len(routes) == 2 else f"found by the {routes[0]} route alone"
        return "fusion", f"{sub}, cut at Top-N", place
    if lost:
        return _not_found(trace, chunk, version, place)
    if place_at("fused") <= top_m:
        return "rerank", "ranked down", f"fused it would be within Top-M = {top_m}; {place}"
    if min(map(place_at, routes), default=NOWHERE) <= top_m:
        return "rerank", "diluted by fusion, not lifted", f"Top-M is {top_m}; {place}"
    return "rerank", "never near the top", f"Top-M is {top_m}; {place}"


def _cut_apart(chunk: Chunk, group: Sequence[str], version: IndexVersion) -> bool:
    """Do the two stand side by side in one document?"""
    return any(
        c.doc_key == chunk.doc_key and max(chunk.span[0] - c.span[1], c.span[0] - chunk.span[1]) <= NEAR
        for c in version.children(version.rows_of(group))
    )


def _not_found(trace: CaseTrace, chunk: Chunk, version: IndexVersion, place: str) -> Found:
    """No route has it: do question and chunk share words at all?"""
    asked = dict.fromkeys(t for q in trace.sub_questions or (trace.query,) for t in version.tokenizer(q))
    held = sorted(set(version.tokenizer(f"{chunk.breadcrumb}\n{chunk.content}")) & set(asked))
    unknown = unknown_words(trace.query, version)
    if chunk.n_tokens < FRAGMENT:
        return "chunking", "a fragment", f"{chunk.n_tokens} tokens: {chunk.content[:60]!r}; {place}"
    if "lexical" in trace.rankings:
        if not held:
            words_ = f"question cut into {' | '.join(list(asked)[:12])}"
            return "tokenizer or dictionary", "no word in common", f"{words_}; {place}"
        if len(unknown) >= len(held) or "dense" not in trace.rankings:
            lost = f"unknown: {', '.join(unknown[:6]) or 'none'}; shared: {', '.join(held[:6])}"
            return "tokenizer or dictionary", "too few words in common", f"{lost}; {place}"
    return "embedding", "not near", f"shared words: {', '.join(held[:6]) or 'none'}; {place}"


def _ground_truth(answer: AnswerTrace | None, trace: CaseTrace, version: IndexVersion) -> tuple[str, str] | None:
    """Is the case itself at fault: all that the answer lacks stands in no right place either, or the same is answered,
    whole, from another place?"""
    if answer is None or answer.answer is None or answer.refused or not trace.case.groups:
        return None
    case, reading = trace.case, Reading(judged_of(trace.case, answer.answer))
    right = version.parents_of(version.rows_of([i for group in case.groups for i in group]))
    text = "\n".join(f"{c.breadcrumb}\n{c.content}" for c in right)
    if reading.lacking and not any(holds(text, k) for k in reading.lacking):
        return "keyword not in its chunks", f"'{reading.lacking[0]}' stands in none of the right places"
    cited = {c.chunk_id for c in answer.answer.citations}
    whole = not reading.lacking and (len(case.keywords) > 1 or (case.keywords and (reading.said or 0.0) >= GOOD))
    wrong = any(holds(answer.answer.text, k) for k in case.wrong_keywords)
    if whole and cited and not wrong and not cited & {c.chunk_id for c in right}:
        return "another place holds the same", f"all keywords are answered from {_cites(answer)}: is it right too?"
    return None


# --- generation -------------------------------------------------------------------------------------------------------


def _cites(answer: AnswerTrace) -> str:
    cited = answer.answer.citations if answer.answer else ()
    return ", ".join(dict.fromkeys(f"{c.doc_source} {c.doc_version} p{c.page}" for c in cited)) or "nothing"


def _not_refused(answer: AnswerTrace) -> Found:
    """Answered what no document holds: invented, or quoted from something near?"""
    reading = Reading(judged_of(answer.case, answer.answer))
    n, bad = len(reading.claims), len(reading.unsupported)
    evidence = f"answered, though no document holds it; {bad} of {n} sentences unsupported; cites {_cites(answer)}"
    return "prompt", "hallucination" if 2 * bad > n else "missing refusal", evidence


def _generation(answer: AnswerTrace, trace: CaseTrace, version: IndexVersion) -> tuple[str, str]:
    """What is wrong with an answer that had all its sources: the failing that costs it most (see `judge.overall`)."""
    case, given = trace.case, answer.answer
    scores = {name: s for name, s in answer.scores.items() if s.value is not None}
    place = min((trace.rankings["parents"].index(i) + 1 for g in case.parent_groups for i in g
                 if i in trace.rankings["parents"]), default=0)  # fmt: skip
    told = f"the right source was given at place {place}; it cites {_cites(answer)}"
    if given is None or answer.refused:
        unknown = ", ".join(unknown_words(trace.query, version)[:6]) or "none"
        return "refusal", f"refused, though the right source was given at place {place}; unknown words: {unknown}"
    if removed := [w for w in given.warnings if "citation" in w]:
        return "format", removed[0]
    # the least of what `overall` is the minimum of
    worst = min(scores, key=lambda n: scores[n].value if n == "content_accuracy" else WRONG + 0.6 * scores[n].value)
    if "credibility" in scores and scores["credibility"].value < 0.5:
        worst = "credibility"
    reason = f"{worst.replace('_', ' ')} {scores[worst].value:.2f}: {scores[worst].reason}; {told}"
    if worst in ("keyword_hit_rate", "content_accuracy", "content_completeness"):
        return _content(answer, Reading(judged_of(case, given))), reason
    if worst == "expression_quality":
        if language_of(given.text) != language_of(case.query):
            return "wrong language", reason
        long = len(words(given.text)) > 4 * max(40, len(words(case.answer)))
        return "verbose" if long or "repeat" in scores[worst].reason else "format", reason
    return {"credibility": "hallucination", "logical_coherence": "illogical"}.get(worst, worst), reason


def _content(answer: AnswerTrace, reading: Reading) -> str:
    """Which failing of content: by whether a right source is cited and how much of what is needed is said."""
    cited = {c.chunk_id for c in answer.answer.citations}
    right = {i for group in answer.case.parent_groups for i in group}
    hit, said = reading.hit_rate if answer.case.keywords else None, reading.said or 0.0
    share = said if hit is None else hit
    if share >= GOOD:
        return "over-citation" if cited and len(cited - right) * 2 > len(cited) else "inaccurate"
    if not cited & right:
        return "incomplete" if share >= 0.5 else "source not used"
    return "incomplete" if hit or said >= WRONG else "wrong passage"


# --- the decision tree ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fork:
    """One question of the decision tree with the number it was answered by; `low`: the fork was taken."""

    question: str
    value: float | None
    threshold: float
    n: int
    low: bool

    def row(self) -> dict[str, Any]:
        return {**asdict(self), "value": None if self.value is None else round(self.value, 4)}


def walk(
    retrieval: QdocReport, answers: Sequence[AnswerTrace], bad: Sequence[BadCase], top_n: int
) -> tuple[list[Fork], str]:
    """The method's decision tree (A15) with the numbers at each fork, ending in one recommended next change.

    Retrieval and answer figures are compared with their own thresholds, never with each other. `bad` tells which
    failing is the commonest among the answers that are low.
    """
    forks: list[Fork] = []
    n, depth = len(retrieval.answerable), max([k for k in retrieval.cutoffs if k <= top_n] or retrieval.cutoffs[-1:])

    def low(question: str, value: float | None, threshold: float, count: int) -> bool:
        value = None if value is None or math.isnan(value) else value
        forks.append(Fork(question, value, threshold, count, value is not None and value < threshold))
        return forks[-1].low

    def recall(stage: str) -> float:
        return retrieval.mean(stage, f"recall@{depth}") if stage in retrieval.values else math.nan

    def change(category: str) -> tuple[list[Fork], str]:
        return forks, f"{category}: {FIXES[category]}"

    cases, failed = len(retrieval.traces), sum(b.category == "engineering" for b in bad)
    if low("engineering: cases that ran and were judged", 1 - failed / max(1, cases), 1.0, cases):
        return change("engineering")
    if low(f"chunk recall@{depth}, fused", recall("fused"), RECALL, n):
        routing = retrieval.routing
        if low("routing accuracy, where it acted", routing["accuracy"], ROUTING, routing["acted"]):
            return change("routing")
        if low(f"chunk recall@{depth}, lexical", recall("lexical"), ROUTE, n):
            return change("tokenizer or dictionary")
        if low(f"chunk recall@{depth}, dense", recall("dense"), ROUTE, n):
            return change("embedding")
        return change("fusion")
    if low("right parents within Top-M", recall("parents"), RANKING, n):
        return change("rerank")
    for name in dict.fromkeys(d for a in answers for d in a.scores):
        some = [a for a in answers if name in a.scores and a.scores[name].value is not None]
        mean = math.fsum(a.scores[name].value for a in some) / len(some) if some else None
        if low(name.replace("_", " "), mean, GOOD, len(some)):
            weak = {a.case.id for a in some if a.scores[name].value < GOOD}
            told = "missing sources? right parents given where completeness is low"
            if name == "content_completeness" and low(told, _sources(retrieval, weak), RANKING, len(weak)):
                return change("rerank")
            return forks, _loop2(name, [b for b in bad if b.id in weak], answers)
    return forks, "nothing stands out: widen the eval set before tuning further"


def _sources(retrieval: QdocReport, weak: set[str]) -> float:
    """Of the answerable cases named, the mean share of needed places that the generator was given."""
    some = [t for t in retrieval.answerable if t.case.id in weak and t.case.parent_groups]
    given = [[bool(set(g) & set(t.rankings.get("parents", ()))) for g in t.case.parent_groups] for t in some]
    return sum(sum(g) / len(g) for g in given) / len(given) if given else math.nan


def _loop2(name: str, bad: Sequence[BadCase], answers: Sequence[AnswerTrace]) -> str:
    common = Counter(b.sub_category for b in bad if b.category == "prompt").most_common(1)
    told = f"of {len(bad)} bad cases low in {name.replace('_', ' ')}, "
    told += f"{common[0][1]} are '{common[0][0]}' ({PROMPT_FIXES.get(common[0][0], name)})" if common else "none is its"
    if all(a.answer is None or a.answer.generator == "extractive" for a in answers):
        return f"generator: a chat endpoint (generate.generator=openai); the stand-in reads no prompt; {told}"
    return f"prompt, loop 2: {told}"

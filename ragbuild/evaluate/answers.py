"""Q-DOC-A: answers over an eval set, judged in all dimensions.

Every figure carries the number of answers it rests on and how many were unmeasured. An answer that never came has 0 in
content: who asked got nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ragbuild.core.errors import MissingResource, RagbuildError
from ragbuild.core.records import Answer, Record, index_text
from ragbuild.core.store import append_line, cache_dir, sha256, whole_lines
from ragbuild.evaluate.facts import holds
from ragbuild.evaluate.judge import Judge, Scores, overall
from ragbuild.evaluate.metrics import bootstrap_ci, wilson
from ragbuild.evaluate.rubric import Judged
from ragbuild.offline.evalset import EvalCase
from ragbuild.online.pipeline import Pipeline

GROUPS = ("query_type", "language", "kind", "half", "source")


@dataclass(frozen=True)
class AnswerTrace:
    """One case's answer and its scores by dimension. With `error` there is no answer."""

    case: EvalCase
    answer: Answer | None = None
    scores: Scores = field(default_factory=dict)
    error: str = ""

    @property
    def overall(self) -> float | None:
        return overall(self.scores)

    @property
    def refused(self) -> bool:
        return self.answer is not None and judged_of(self.case, self.answer).refused

    @property
    def fallback(self) -> str:
        """Why the extractive stand-in answered in place of the model that was configured; "" where it did not."""
        warnings = self.answer.warnings if self.answer else ()
        return next((w for w in warnings if w.startswith("extractive answer")), "")

    @property
    def wrong_version(self) -> bool:
        """Answered, and it cites another version of a right document and none that is right, or holds a value of
        another version or model and none of the right ones."""
        if self.answer is None or self.refused:
            return False
        text, case = self.answer.text, self.case
        right = any(holds(text, k) for k in case.keywords)
        if not right and any(holds(text, k) for k in case.wrong_keywords):
            return True
        cited = _cited(self.answer)
        if any(p.doc_key in case.documents for p in cited):
            return False
        others = [(f"{p.kb}/{p.doc_id}/", f"{p.kb}/{p.doc_id}/{p.doc_version}/") for p in cited]
        return any(k.startswith(a) and not k.startswith(b) for k in case.documents for a, b in others)


def _cited(answer: Answer) -> list[Any]:
    ids = {c.chunk_id for c in answer.citations}
    return [p for p in answer.parents if p.chunk_id in ids]


def judged_of(case: EvalCase, answer: Answer) -> Judged:
    """The answer as a judge is shown it; citation ``^n^`` is the n-th parent."""
    cited = _cited(answer)
    ids = {p.chunk_id for p in cited}
    known = bool(cited and case.documents)
    return Judged(
        query=case.query, answer=answer.text, reference=case.answer, keywords=case.keywords,
        wrong_keywords=case.wrong_keywords, contexts=tuple(map(index_text, answer.parents)),
        answerable=case.answerable, status=answer.status,
        right_cited=any(p.doc_key in case.documents for p in cited) if known else None,
        needed_cited=_mean([bool(ids & set(g)) for g in case.parent_groups]) if cited and case.parent_groups else None,
    )  # fmt: skip


class _Told(Record):
    key: str
    answer: Answer


class KeptAnswers:
    """A pipeline that asks a model once for each question: a run that died goes on where it stopped.

    Answers lie in the user's cache by a hash of index, configuration and question. A stand-in's answer in place of the
    model's is not kept.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        held = pipeline.config.model_dump(mode="json")
        names = ("retrieve", "rewrite", "route", "rerank", "generate", "llm", "embedder")
        about = [pipeline.version.digest, {name: held.get(name) for name in names}]
        self.path = cache_dir("answers") / f"{sha256(json.dumps(about, sort_keys=True))[:16]}.jsonl"
        self._known = {told.key: told.answer for told in whole_lines(self.path, _Told)}

    def ask(self, query: str) -> Answer:
        """As `Pipeline.ask`."""
        key = sha256(query)
        if key not in self._known:
            answer = self.pipeline.ask(query)
            if answer.generator != self.pipeline.generator.name:
                return answer
            self._known[key] = answer
            append_line(self.path, _Told(key=key, answer=answer).model_dump_json().encode())
        return self._known[key]


def run_answers(
    pipeline: Pipeline | KeptAnswers, cases: Iterable[EvalCase], judge: Judge,
    progress: Callable[[int, int], None] | None = None,
) -> list[AnswerTrace]:  # fmt: skip
    """Ask and judge every case. A case that fails becomes an error and the others go on; MissingResource is raised."""
    cases, traces = list(cases), []
    for number, case in enumerate(cases, 1):
        traces.append(_trace(pipeline, case, judge))
        if progress:
            progress(number, len(cases))
    return traces


def _trace(pipeline: Pipeline | KeptAnswers, case: EvalCase, judge: Judge) -> AnswerTrace:
    try:
        answer = pipeline.ask(case.query)
    except MissingResource:
        raise
    except (RagbuildError, ValueError, OSError) as error:
        return AnswerTrace(case, None, failed(case, judge), f"{type(error).__name__}: {error}")
    return AnswerTrace(case, answer, judge(judged_of(case, answer)))


def failed(case: EvalCase, judge: Judge) -> Scores:
    """The scores of an answer that never came: 0 in content, form does not apply."""
    return judge(Judged(case.query, "", case.answer, case.keywords, answerable=case.answerable, status="failed"))


def summary(
    traces: Sequence[AnswerTrace], by: Sequence[str] = GROUPS, n_resamples: int = 2000, seed: int = 13
) -> list[dict[str, Any]]:
    """A row for each group (``all`` first) and dimension (``overall`` last): mean with its 95 % bootstrap interval over
    the `n` measured; `unmeasured` could not be judged, `not_applicable` (a refusal's form, a case without keywords) is
    not counted, `errors` are answers that never came (0 in content), `fallbacks` a stand-in's in place of the model's.
    """
    rows = []
    for group, value, some in groups(traces, by):
        for name in (*dict.fromkeys(d for t in some for d in t.scores), "overall"):
            if name == "overall":
                values, unmeasured = [t.overall for t in some], sum(t.overall is None for t in some)
            else:
                scores = [t.scores[name] for t in some if name in t.scores]
                values, unmeasured = [s.value for s in scores], sum(s.value is None and s.applies for s in scores)
            measured = [v for v in values if v is not None]
            rows.append({
                "group": group, "value": value, "dimension": name, "mean": _mean(measured) if measured else None,
                **_interval(measured, n_resamples, seed), "n": len(measured), "unmeasured": unmeasured,
                "not_applicable": len(values) - len(measured) - unmeasured, "errors": sum(bool(t.error) for t in some),
                "fallbacks": sum(bool(t.fallback) for t in some),
            })  # fmt: skip
    return rows


def groups(
    traces: Sequence[AnswerTrace], by: Sequence[str] = GROUPS
) -> list[tuple[str, str, list[AnswerTrace]]]:  # fmt: skip
    """(field, value, traces) for all and for each value of the case's fields, in order of value."""
    out = [("all", "", list(traces))]
    for name in by:
        for value in sorted({str(getattr(t.case, name)) for t in traces}):
            out.append((name, value, [t for t in traces if str(getattr(t.case, name)) == value]))
    return out


def refusals(traces: Sequence[AnswerTrace], by: Sequence[str] = ("half", "kind")) -> list[dict[str, Any]]:
    """Share of unanswerable questions that were refused and of answerable ones that were, wrongly, each with its 95 %
    Wilson interval and n."""
    rows = []
    for group, value, some in groups(traces, by):
        for answerable in (False, True):
            flags = [float(t.refused) for t in some if t.case.answerable == answerable]
            if flags:
                name = "answerable, wrongly refused" if answerable else "unanswerable, rightly refused"
                low, high = wilson(sum(flags), len(flags))
                rows.append({
                    "group": group, "value": value, "what": name, "share": _mean(flags), "low": low, "high": high,
                    "refused": int(sum(flags)), "n": len(flags),
                })  # fmt: skip
    return rows


def _interval(values: Sequence[float], n_resamples: int, seed: int) -> dict[str, float | None]:
    low, high = bootstrap_ci(values, n_resamples, seed)
    return {"low": None if math.isnan(low) else low, "high": None if math.isnan(high) else high}


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)

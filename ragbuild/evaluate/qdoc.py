"""Q-DOC: retrieval, stage by stage, over an eval set.

Each case goes the pipeline's own way once, and again with one part switched off (raw, no rewriting, no routing), so
that what a part adds is measured and not believed. Raw means: the question as typed, active documents, no rewriting,
no routing, no reranking.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from pydantic import TypeAdapter, ValidationError

from ragbuild.core.errors import InputRefused, MissingResource, RagbuildError
from ragbuild.core.store import write_bytes
from ragbuild.evaluate.metrics import mean, paired_test, per_query
from ragbuild.index.versions import IndexVersion
from ragbuild.offline.evalset import EvalCase
from ragbuild.online.pipeline import Found, Pipeline
from ragbuild.online.retrieve import rrf

STAGES = ("raw_lexical", "raw_dense", "raw_fused", "lexical", "dense", "fused", "reranked", "parents")
ABLATIONS = {"no_rewrite": "rewriting", "no_routing": "routing"}
_OFF = {
    "rewrite": {"rewrite.complete": False, "rewrite.split": False, "rewrite.fallback": False, "rewrite.use_llm": False},
    "routing": {"route.enabled": False},
}
T = TypeVar("T")
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class CaseTrace:
    """One case's way through retrieval. `rankings`: stage to ids in order (children; parents under ``parents``);
    with `error` they are empty, and count as misses that are shown."""

    case: EvalCase
    query: str = ""
    sub_questions: tuple[str, ...] = ()
    where: dict[str, list[str]] = field(default_factory=dict)
    routed: tuple[str, ...] = ()  # the layers on which routing decided something
    routed_out: bool = False  # a right document does not pass the filter
    rankings: dict[str, list[str]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    error: str = ""


class Variants:
    """The pipeline and, unless they are not asked for, its ablations on one index version and one embedder."""

    def __init__(self, pipeline: Pipeline, ablations: bool = True) -> None:
        def without(*parts: str) -> Pipeline:
            config = pipeline.config.with_overrides({k: v for part in parts for k, v in _OFF[part].items()})
            return Pipeline(pipeline.version, config, pipeline.embedder)

        self.full, self.ablations = pipeline, ablations
        self.raw, self.no_rewrite, self.no_routing = (
            without("rewrite", "routing"), without("rewrite"), without("routing"),
        )  # fmt: skip

    def trace(self, case: EvalCase) -> CaseTrace:
        """Raises MissingResource; any other failure becomes the trace's `error`."""
        try:
            found = self.full.retrieve(case.query)
            known = {_way(found): found}

            def other(pipeline: Pipeline) -> Found:
                rewritten = pipeline.rewriter(case.query)
                way = (rewritten.query, rewritten.sub_questions, pipeline.router(rewritten.query).where)
                if way not in known:  # most questions are not rewritten or routed: the same search is made once
                    known[way] = pipeline.retrieve(case.query)
                return known[way]

            rankings = _rankings(found, "")
            others = (("no_rewrite", self.no_rewrite), ("no_routing", self.no_routing)) if self.ablations else ()
            if others:
                rankings |= {k: v for k, v in _rankings(other(self.raw), "raw_").items() if k in STAGES}
            for name, pipeline in others:
                rankings |= {f"{name}_{k}": v for k, v in _rankings(other(pipeline), "").items()}
        except MissingResource:
            raise
        except (RagbuildError, ValueError, OSError) as error:
            return CaseTrace(case, error=f"{type(error).__name__}: {error}")
        return CaseTrace(
            case, found.rewritten.query, found.rewritten.sub_questions,
            {k: list(v) for k, v in found.routing.where.conditions().items()},
            tuple(d.layer for d in found.routing.decisions), self._routed_out(case, found), rankings, found.seconds,
        )  # fmt: skip

    def _routed_out(self, case: EvalCase, found: Found) -> bool:
        if not case.answerable:
            return False
        allowed = self.full.version.allowed(found.routing.where)
        if allowed is None:
            return False
        return not all(allowed[self.full.version.rows_of(group)].any() for group in case.groups)


def _way(found: Found) -> tuple[Any, ...]:
    return (found.rewritten.query, found.rewritten.sub_questions, found.routing.where)


def _rankings(found: Found, prefix: str) -> dict[str, list[str]]:
    """Each route's lists over sub-questions as one (by RRF), the fused and the reranked order, and the parents."""
    out = {f"{prefix}{r}": [i for i, _ in rrf(lists)] for r, lists in found.retrieval.routes.items()}
    out[f"{prefix}fused"] = [c.hit.chunk_id for c in found.retrieval.candidates]
    out[f"{prefix}reranked"] = [c.hit.chunk_id for c in found.ranked]
    out[f"{prefix}parents"] = [p.chunk_id for p in found.parents]
    return out


def canonical(ranking: Sequence[str], groups: Sequence[Sequence[str]]) -> list[str]:
    """The ranking with each hit under the name of the group it serves (the group's first id), once; what repeats a
    group already served keeps its place as a miss, so that ranks do not move."""
    open_groups = list(groups)
    out = []
    for rank, item in enumerate(ranking):
        group = next((g for g in open_groups if item in g), None)
        if group is not None:
            open_groups.remove(group)
            out.append(group[0])
        else:
            out.append(f"{item}#{rank}" if any(item in g for g in groups) else item)
    return out


@dataclass(frozen=True)
class QdocReport:
    """Traces of all cases and, over the answerable ones, each stage's figures by case (aligned with `answerable`)."""

    traces: list[CaseTrace]
    cutoffs: tuple[int, ...]
    values: dict[str, dict[str, np.ndarray]]

    @cached_property
    def answerable(self) -> list[CaseTrace]:
        return [t for t in self.traces if t.case.answerable]

    def rows(self, keep: Callable[[EvalCase], bool] = lambda case: True) -> list[dict[str, Any]]:
        """One row a stage: the mean of every figure over the cases kept (None where none was measured), with n and how
        many were unmeasured."""
        mask = np.array([keep(t.case) for t in self.answerable], bool)
        out = []
        for stage, figures in self.values.items():
            means = {name: mean(values[mask]) for name, values in figures.items()}
            n, unmeasured = next(iter(means.values()))[1:]
            row = {k: _rounded(m[0]) for k, m in means.items()}
            out.append({"stage": stage, "n": n, "unmeasured": unmeasured, **row})
        return out

    def by(self, what: str, stage: str, metrics: Sequence[str]) -> list[dict[str, Any]]:
        """One row for each value of a case's query_type, language, kind or half, or of its first ``document``."""

        def value(case: EvalCase) -> str:
            return case.documents[0].split("/")[1] if what == "document" else str(getattr(case, what))

        cases = [t.case for t in self.answerable]
        out = []
        for group in sorted({value(c) for c in cases}):
            mask = np.array([value(c) == group for c in cases])
            figures = {m: _rounded(mean(self.values[stage][m][mask])[0]) for m in metrics}
            out.append({what: group, "n": int(mask.sum()), **figures})
        return out

    @property
    def routing(self) -> dict[str, Any]:
        """Of the answerable cases on which routing acted: how often every right document still passed."""
        acted = [t for t in self.answerable if t.routed]
        right = sum(not t.routed_out for t in acted)
        return {
            "cases": len(self.answerable), "acted": len(acted), "right": right,
            "accuracy": round(right / len(acted), 4) if acted else None,
        }  # fmt: skip

    def ablations(self, n_resamples: int = 2000, seed: int = 13) -> list[dict[str, Any]]:
        """What rewriting and routing add to the fused list's recall and to the reranked order: `with_it` and
        `without`, their paired difference with its 95 % interval, and how many cases the part helped and hurt."""
        figures, out = {"fused": f"recall@{max(self.cutoffs)}", "reranked": self._ndcg}, []
        for (name, part), (stage, figure) in product(ABLATIONS.items(), figures.items()):
            if stage not in self.values:
                continue
            on, off = self.values[stage][figure], self.values[f"{name}_{stage}"][figure]
            difference, low, high, _ = paired_test(on, off, n_resamples, seed)
            out.append({
                "part": part, "stage": stage, "figure": figure, "with_it": _rounded(mean(on)[0]),
                "without": _rounded(mean(off)[0]), "difference": _rounded(difference), "low": _rounded(low),
                "high": _rounded(high), "helped": int((on > off).sum()), "hurt": int((on < off).sum()),
                "n": mean(on)[1],
            })  # fmt: skip
        return out

    @property
    def _ndcg(self) -> str:
        return f"ndcg@{10 if 10 in self.cutoffs else max(self.cutoffs)}"

    @property
    def errors(self) -> list[dict[str, str]]:
        return [{"id": t.case.id, "query": t.case.query, "error": t.error} for t in self.traces if t.error]

    def advice(self) -> list[str]:
        """What the figures recommend; one remark a finding, none when nothing stands out."""
        out, routing = [], self.routing
        if "fused" not in self.values:
            return ["no answerable case came through retrieval: nothing can be said"]
        if routing["accuracy"] is not None and routing["accuracy"] < 0.5:
            out.append(
                f"routing kept the right document in only {routing['right']} of {routing['acted']} cases: remove it "
                "(route.enabled=false) or route with a language model (route.use_llm=true)"
            )
        depth = max(self.cutoffs)
        for name, part in ABLATIONS.items():
            with_, without = (self.mean(s, f"recall@{depth}") for s in ("fused", f"{name}_fused"))
            if with_ < without:
                out.append(f"{part} lowers recall@{depth} from {without:.3f} to {with_:.3f} on this set: look at why")
        for row in self.ablations():
            if row["stage"] == "reranked" and row["high"] is not None and row["high"] < 0:
                out.append(
                    f"{row['part']} lowers {row['figure']} of the reranked order by {-row['difference']:.3f} "
                    f"(95 % interval {-row['high']:.3f} to {-row['low']:.3f}): look at why"
                )
        top = self._ndcg
        best = max((s for s in ("lexical", "dense") if s in self.values), key=lambda s: self.mean(s, top))
        difference, low, high, _ = paired_test(self.values["reranked"][top], self.values[best][top])
        if difference < -0.01 and high < 0:
            made = best == "lexical" and all(t.case.source == "generated" for t in self.answerable)
            out.append(
                f"the reranked order ({top} {self.mean('reranked', top):.3f}) is below the {best} route alone "
                f"({self.mean(best, top):.3f}; 95 % interval of the difference {low:.3f} to {high:.3f}): try another "
                f"reranker, or retrieve.routes=[{best}]"
                + made * "; these questions were made from chunks, which favours words: drop no route before you have "
                "asked people's questions"
            )  # fmt: skip
        return out

    def mean(self, stage: str, metric: str) -> float:
        """The mean over all answerable cases; NaN where nothing was measured."""
        return mean(self.values[stage][metric])[0]


def run_qdoc(
    pipeline: Pipeline, cases: Iterable[EvalCase], cutoffs: Sequence[int], progress: Progress | None = None,
    ablations: bool = True,
) -> QdocReport:  # fmt: skip
    """Trace every case and measure each stage. The cutoffs beyond Top-N are measured on what there is. Without
    `ablations` the pipeline's own stages alone are measured, in less than half of the time."""
    cases, variants, traces = list(cases), Variants(pipeline, ablations), []
    for number, case in enumerate(cases, 1):
        traces.append(variants.trace(case))
        if progress:
            progress(number, len(cases))
    return report(traces, cutoffs, pipeline.version)


def report(traces: Sequence[CaseTrace], cutoffs: Sequence[int], version: IndexVersion) -> QdocReport:
    """Figures of traces that were made before."""
    answerable = [t for t in traces if t.case.answerable]
    stages = [s for s in STAGES if any(s in t.rankings for t in answerable)]
    ablated = [f"{a}_{s}" for a in ABLATIONS for s in ("fused", "reranked")]
    stages += ablated if not stages or any(ablated[0] in t.rankings for t in answerable) else []
    ids = sorted({i for t in answerable for s in stages if s != "parents" for i in t.rankings.get(s, ())})
    of_chunk = {c.chunk_id: c.doc_key for c in version.children(version.rows_of(ids))}
    values: dict[str, dict[str, np.ndarray]] = {}
    for stage in stages:
        groups = [t.case.parent_groups if stage == "parents" else t.case.groups for t in answerable]
        rankings = [canonical(t.rankings.get(stage, []), g) for t, g in zip(answerable, groups, strict=True)]
        truths = [{group[0]: 1.0 for group in g} for g in groups]
        values[stage] = per_query(rankings, truths, cutoffs)
        if stage != "parents":
            for k in cutoffs:
                values[stage][f"authenticity@{k}"] = np.array(
                    [_share([of_chunk[i] in t.case.documents for i in t.rankings.get(stage, [])[:k]])
                     for t in answerable]
                )  # fmt: skip
    return QdocReport(list(traces), tuple(cutoffs), values)


def save_traces(path: Path, traces: Sequence[Any], kind: type) -> None:
    """Traces as JSON, for the steps that read them later."""
    write_bytes(path, TypeAdapter(list[kind]).dump_json(list(traces)))  # type: ignore[valid-type]


def load_traces(path: Path, kind: type[T]) -> list[T]:
    """Traces that `save_traces` wrote. Raises InputRefused when they can't be read."""
    try:
        return TypeAdapter(list[kind]).validate_json(path.read_bytes())  # type: ignore[valid-type]
    except (OSError, ValidationError) as error:
        raise InputRefused(f"{path} holds no traces of this version ({error}); run its notebook again") from None


def _rounded(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 4)


def _share(flags: Sequence[bool]) -> float:
    """0 for an empty list: nothing that was retrieved is right."""
    return math.fsum(flags) / len(flags) if flags else 0.0

"""One evaluation run on a workspace, from eval sets to ledger entries: shared by notebooks and command line."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ragbuild.core.config import Config, ConfigView
from ragbuild.core.errors import InputRefused
from ragbuild.core.records import Chunk
from ragbuild.core.store import iter_records
from ragbuild.evaluate.answers import AnswerTrace, run_answers
from ragbuild.evaluate.judge import Judge
from ragbuild.evaluate.ledger import Entry, components_of, corpus_hash, new_entry
from ragbuild.evaluate.offline import OfflineReport, evaluate_offline
from ragbuild.evaluate.qdoc import Progress, QdocReport, load_cases, run_qdoc
from ragbuild.index.versions import IndexVersion
from ragbuild.offline.evalset import ChunkMap, EvalCase, set_hash
from ragbuild.offline.review import read_query_log
from ragbuild.online.pipeline import Pipeline

Values = dict[str, dict[str, float | None]]
SETS = ("expert", "generated")
LEDGER_STAGES = ("fused", "parents", "reranked", "lexical", "dense", "raw_fused")
# What a baseline holds later runs to, where a run has measured it.
GATED = {
    "qdoc": (
        "expert/fused/recall@50", "expert/parents/recall@50", "expert/reranked/ndcg@10", "generated/fused/recall@50",
    ),
    "qdoca": ("expert/overall", "expert/right_version", "expert/refused_rightly", "expert/not_refused_wrongly"),
}  # fmt: skip


@dataclass(frozen=True)
class EvalSet:
    """A set for the index at hand; `lost`: ids of pairs whose place is not in it."""

    name: str
    cases: list[EvalCase]
    hash: str
    lost: list[str] = field(default_factory=list)


def load_sets(
    version: IndexVersion, workspace: Path, expert: Path | None, wanted: Sequence[str] = SETS
) -> list[EvalSet]:
    """The sets named (see `load_cases`); of the two usual ones, those that there are.

    Raises InputRefused when there is none, or a set named by its path is missing or can't be mapped.
    """
    places = {"expert": expert, "generated": workspace / "eval_set.json"}
    out = []
    for which in wanted:
        path = places.get(which, Path(which))
        if path is None or (which in places and not path.is_file() and len(wanted) > 1):
            continue
        cases, lost = load_cases(version, which, workspace, expert)
        name = which if which in places else Path(which).stem
        out.append(EvalSet(name, cases, set_hash(path), lost))
    if not out:
        raise InputRefused(
            f"no eval set: notebook 06 makes {places['generated']}, and expert_eval_set.json may lie beside the corpus"
        )
    return out


def chunk_map(version: IndexVersion) -> ChunkMap:
    """The chunks of an index version, for mapping ground truth to them."""
    return ChunkMap([*version.all_parents(), *version.children(np.arange(len(version)))])


def measure_offline(
    pipeline: Pipeline, workspace: Path, generated: EvalSet, config: Config | ConfigView, query_log: Path | None
) -> OfflineReport:
    """Layer 1 on a workspace as the build left it."""

    def markdown(doc_source: str) -> str | None:
        path = workspace / "parsed" / f"{doc_source}.md"
        return path.read_text(encoding="utf-8") if path.is_file() else None

    return evaluate_offline(
        pipeline.version, list(iter_records(workspace / "chunked_corpus.json", Chunk)), generated.cases,
        pipeline.embedder, config, markdown=markdown, dictionary=workspace / "keyword_dict.json",
        log=read_query_log(query_log) if query_log else (), lost=generated.lost,
    )  # fmt: skip


def measure_retrieval(
    pipeline: Pipeline, sets: Sequence[EvalSet], cutoffs: Sequence[int], progress: Progress | None = None
) -> dict[str, QdocReport]:
    """Q-DOC of each set, by its name."""
    return {s.name: run_qdoc(pipeline, s.cases, cutoffs, progress) for s in sets}


def measure_answers(
    pipeline: Pipeline, sets: Sequence[EvalSet], judge: Judge, progress: Progress | None = None
) -> dict[str, list[AnswerTrace]]:
    """Q-DOC-A of each set, by its name."""
    return {s.name: run_answers(pipeline, s.cases, judge, progress) for s in sets}


def retrieval_values(reports: Mapping[str, QdocReport]) -> Values:
    """``set/stage/metric`` to a value by case, for the stages and figures worth comparing; the headline, recall of the
    fused list at the largest cutoff, comes first."""
    out: Values = {}
    for name, report in reports.items():
        ids = [t.case.id for t in report.answerable]
        for stage in (s for s in LEDGER_STAGES if s in report.values):
            for metric in (f"recall@{max(report.cutoffs)}", "ndcg@10", "mrr"):
                if metric in report.values[stage]:
                    values = map(float, report.values[stage][metric])
                    out[f"{name}/{stage}/{metric}"] = dict(zip(ids, values, strict=True))
    return out


def answer_values(traces: Mapping[str, Sequence[AnswerTrace]]) -> Values:
    """``set/overall``, ``set/<dimension>``, and as 0 or 1: `right_version`, `refused_rightly` (unanswerable cases),
    `not_refused_wrongly` (answerable ones). What does not apply to a case is left out, unmeasured is None."""
    out: Values = {}
    for name, some in traces.items():
        out[f"{name}/overall"] = {t.case.id: t.overall for t in some}
        for dimension in dict.fromkeys(d for t in some for d in t.scores):
            scores = {t.case.id: t.scores[dimension] for t in some if dimension in t.scores}
            out[f"{name}/{dimension}"] = {i: s.value for i, s in scores.items() if s.applies}
        out[f"{name}/right_version"] = {t.case.id: float(not t.wrong_version) for t in some if t.case.answerable}
        out[f"{name}/refused_rightly"] = {t.case.id: float(t.refused) for t in some if not t.case.answerable}
        out[f"{name}/not_refused_wrongly"] = {t.case.id: float(not t.refused) for t in some if t.case.answerable}
    return {metric: values for metric, values in out.items() if values}


def entry(
    kind: str, values: Values, sets: Sequence[EvalSet], pipeline: Pipeline, config: Config | ConfigView, *,
    judge: str = "", label: str = "", workspace: str = "", started: float | None = None,
) -> Entry:  # fmt: skip
    """The ledger entry of a run; `started`: time.perf_counter() at its beginning."""
    version = pipeline.version
    seconds = {"total": round(time.perf_counter() - started, 3)} if started is not None else {}
    return new_entry(
        kind, config, values, corpus_hash=corpus_hash(version.documents), eval_sets={s.name: s.hash for s in sets},
        components=components_of(config, version, judge), workspace=workspace, label=label, seconds=seconds,
    )  # fmt: skip

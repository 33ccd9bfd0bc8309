"""One evaluation run on a workspace, from eval sets to ledger entries: shared by notebooks and command line."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ragbuild.core.config import Config, ConfigView
from ragbuild.core.errors import InputRefused
from ragbuild.core.records import Chunk
from ragbuild.core.store import iter_records
from ragbuild.evaluate.align import Alignment
from ragbuild.evaluate.answers import AnswerTrace, KeptAnswers, run_answers
from ragbuild.evaluate.completeness import grown
from ragbuild.evaluate.judge import Judge
from ragbuild.evaluate.ledger import Entry, components_of, corpus_hash, new_entry
from ragbuild.evaluate.metrics import mean, wilson
from ragbuild.evaluate.offline import OfflineReport, evaluate_offline
from ragbuild.evaluate.qdoc import Progress, QdocReport, run_qdoc
from ragbuild.evaluate.quality import parsed_text
from ragbuild.index.versions import IndexVersion
from ragbuild.offline.evalset import ChunkMap, EvalCase, expert_cases, load_expert, load_pairs, pair_cases, set_hash
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
    "qdoca": (
        "expert/overall", "expert/right_version", "expert/refused_rightly", "expert/not_refused_wrongly",
        "generated/overall",
    ),
}  # fmt: skip

# What the course's own sample is to reach; a team sets its own.
TARGETS = {
    "right chunks in the fused list": (">=", 0.95), "right parents within Top-M": (">=", 0.85),
    "answers of a wrong version": ("<=", 0.0), "unanswerable, refused": (">=", 0.80),
    "answerable, wrongly refused": ("<=", 0.10),
}  # fmt: skip


@dataclass(frozen=True)
class EvalSet:
    """A set for the index at hand; `lost`: ids of the cases whose place is not in it."""

    name: str
    cases: list[EvalCase]
    hash: str
    lost: list[str] = field(default_factory=list)


def load_sets(
    version: IndexVersion, workspace: Path, expert: Path | None, wanted: Sequence[str] = SETS
) -> list[EvalSet]:
    """The sets named, for the index at hand: ``generated`` (the workspace's eval_set.json), ``expert`` (the file given)
    or a path to either kind; of several, those that there are.

    Raises InputRefused when there is none, rows can't be read, or an expert's case can't be mapped to a built index.
    Once an index has taken in other documents, such a case is no mistake: its document has left, and it is `lost`.
    """
    return map_sets(chunk_map(version), workspace, expert, wanted, lenient=grown(version))


def map_sets(
    chunks: ChunkMap, workspace: Path, expert: Path | None, wanted: Sequence[str] = SETS, *, lenient: bool
) -> list[EvalSet]:
    """As `load_sets`, for these chunks; `lenient`: expert cases that can't be mapped are lost and not refused."""
    places = {"expert": expert, "generated": workspace / "eval_set.json"}
    out = []
    for name in wanted:
        path = places.get(name, Path(name))
        if name in places and len(wanted) > 1 and not (path and path.is_file()):
            continue
        if path is None or not path.is_file():
            raise InputRefused(
                f"no {name} eval set{f' at {path}' if path else ''}: 'generated' is made by notebook 06, 'expert' is "
                "expert_eval_set.json beside the corpus, anything else is a file"
            )
        by_people = name == "expert" or (name != "generated" and b'"case_id"' in path.read_bytes())
        if by_people:
            lost: list[str] = []
            cases = expert_cases(load_expert(path), chunks, lost if lenient else None)
        else:
            cases, lost = pair_cases(load_pairs(path), chunks)
        out.append(EvalSet(name if name in places else path.stem, cases, set_hash(path), lost))
    if not out:
        raise InputRefused(
            f"no eval set: notebook 06 makes {places['generated']}, and expert_eval_set.json may lie beside the corpus"
        )
    return out


def chunk_map(version: IndexVersion) -> ChunkMap:
    """The chunks of an index version, for mapping ground truth to them."""
    return ChunkMap(_held(version))


def _held(version: IndexVersion) -> list[Chunk]:
    return [*version.all_parents(), *version.children(np.arange(len(version)))]


def measure_offline(
    pipeline: Pipeline, workspace: Path, config: Config | ConfigView, query_log: Path | None, expert: Path | None
) -> tuple[OfflineReport, list[EvalSet]]:
    """Layer 1 on a workspace, over both eval sets.

    As the build left it, cases are mapped to the chunks that the index should hold, so that one it lacks is a miss and
    no refusal. An index that took in documents since then has its own chunks, parsed texts and dictionary.
    """
    version, later = pipeline.version, grown(pipeline.version)
    chunks = _held(version) if later else list(iter_records(workspace / "chunked_corpus.json", Chunk))
    sets = map_sets(ChunkMap(chunks), workspace, expert, lenient=later)
    texts = (lambda chunk: version.markdown(chunk.doc_key)) if later else parsed_text(workspace / "parsed")
    report = evaluate_offline(
        version, chunks, [c for s in sets for c in s.cases], pipeline.embedder, config,
        markdown=texts, dictionary=(version.folder if later else workspace) / "keyword_dict.json",
        log=read_query_log(query_log) if query_log else (), lost=[i for s in sets for i in s.lost],
    )  # fmt: skip
    return report, sets


def measure_retrieval(
    pipeline: Pipeline, sets: Sequence[EvalSet], cutoffs: Sequence[int], progress: Progress | None = None,
    ablations: bool = True,
) -> dict[str, QdocReport]:  # fmt: skip
    """Q-DOC of each set, by its name."""
    return {s.name: run_qdoc(pipeline, s.cases, cutoffs, progress, ablations) for s in sets}


def measure_answers(
    pipeline: Pipeline, sets: Sequence[EvalSet], judge: Judge, progress: Progress | None = None
) -> dict[str, list[AnswerTrace]]:
    """Q-DOC-A of each set, by its name. What a model answered is kept, so that a run that died goes on."""
    asked = pipeline if pipeline.generator.stand_in else KeptAnswers(pipeline)
    return {s.name: run_answers(asked, s.cases, judge, progress) for s in sets}


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


def own_margins(entries: Sequence[Entry], margin: float) -> dict[str, float]:
    """Margins for a baseline where the general one does not fit: none at all for answers of a wrong version, two cases
    where that is more than the margin, so that rounding on another machine fails no build."""
    out = {}
    for run in entries:
        for metric in GATED.get(run.kind, ()):
            n = run.metrics[metric].n if metric in run.metrics else 0
            if metric.endswith("/right_version"):
                out[f"{run.kind}/{metric}"] = 0.0
            elif n and 2 / n > margin:
                out[f"{run.kind}/{metric}"] = round(2 / n, 9)
    return out


def targets(report: QdocReport, traces: Sequence[AnswerTrace]) -> list[dict[str, Any]]:
    """Each of `TARGETS`: what was reached, with its 95 % Wilson interval, over how many cases, and whether it is met.
    Refusals are measured on the test half, since thresholds were set on the other."""
    deepest = f"recall@{max(report.cutoffs)}"
    answerable = [t for t in traces if t.case.answerable]
    test = [t for t in traces if t.case.half == "test"]
    values = (
        ("answerable", report.values.get("fused", {}).get(deepest, ())),
        ("answerable", report.values.get("parents", {}).get(deepest, ())),
        ("answerable", [t.wrong_version for t in answerable]),
        ("unanswerable, test half", [t.refused for t in test if not t.case.answerable]),
        ("answerable, test half", [t.refused for t in test if t.case.answerable]),
    )
    out = []
    for (name, (sign, needed)), (cases, reached) in zip(TARGETS.items(), values, strict=True):
        name += f", {deepest}" if name.endswith("list") else ""
        value, n, unmeasured = mean([float(v) for v in reached])
        interval = span(*wilson(min(value * n, n), n)) if n else span(None, None)
        met = value >= needed if sign == ">=" else value <= needed
        out.append({
            "target": name, "cases": cases, "needed": f"{sign} {needed:g}", "reached": round(value, 4) if n else None,
            "95 % interval": interval, "n": n, "unmeasured": unmeasured,
            "met": ("yes" if met else "no") if n else "no such case",
        })  # fmt: skip
    return out


def half_rows(averages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """`answers.summary` by half as a table: each dimension's test half with its interval and what it rests on, and the
    tuning half beside it; None for a half without cases."""
    out, counted = [], ("n", "unmeasured", "not_applicable", "errors", "fallbacks")
    for name in dict.fromkeys(r["dimension"] for r in averages):
        by = {r["value"]: r for r in averages if r["dimension"] == name and r["group"] == "half"}
        test, tuning = by.get("test", {}), by.get("tuning", {})
        out.append({
            "dimension": name, "test half": test.get("mean"), "95 % interval": span(test.get("low"), test.get("high")),
            **{key.replace("_", " "): test.get(key, 0) for key in counted},
            "tuning half": tuning.get("mean"), "n (tuning)": tuning.get("n", 0),
        })  # fmt: skip
    return out


def kappa_rows(aligned: Mapping[str, Alignment]) -> list[dict[str, Any]]:
    """`align.align_expert` as a table: a row for each half, with how often people and the judge give each level."""
    return [
        {
            "half": half, "n": a.n, "unmeasured": a.unmeasured, "agreement": a.agreement, "kappa": a.kappa,
            "95 % interval": span(a.low, a.high), "quadratic": a.quadratic,
            **{f"{who} 0, 1, 2": ", ".join(f"{share:.2f}" for share in base)
               for who, base in (("people say", a.human_base), ("judge says", a.judge_base))},
        }
        for half, a in aligned.items()
    ]  # fmt: skip


def span(low: float | None, high: float | None) -> str:
    """An interval as a person reads it."""
    return "–" if low is None or high is None else f"{low:.3f} to {high:.3f}"


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

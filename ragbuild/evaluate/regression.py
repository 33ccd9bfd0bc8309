"""Before a new index version is published: do the questions that both versions can answer still get what they got?

Only cases with the same ground truth in both versions are compared, case by case. One whose truth left with its
document, says otherwise by now, or became an older version that the question does not name is *retired*: a decision
about a document is no fall in quality. What a version reached is kept, so that it is not measured again as the former
one of the next run.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field

from ragbuild.core.config import Config, ConfigView
from ragbuild.core.errors import InputRefused
from ragbuild.core.records import Record
from ragbuild.core.store import read_json, sha256, write_json
from ragbuild.evaluate.facts import holds
from ragbuild.evaluate.gates import Baseline
from ragbuild.evaluate.judge import make_judge
from ragbuild.evaluate.ledger import components_of
from ragbuild.evaluate.qdoc import Progress
from ragbuild.evaluate.runs import (
    GATED,
    SETS,
    EvalSet,
    Values,
    answer_values,
    chunk_map,
    map_sets,
    measure_answers,
    measure_retrieval,
    retrieval_values,
)
from ragbuild.index.versions import IndexVersion
from ragbuild.models.embedders import Embedder
from ragbuild.offline.evalset import ChunkMap, EvalCase
from ragbuild.online.pipeline import Pipeline

CUTOFFS = (5, 10, 50)  # whatever evaluate.cutoffs says: what is gated must be there
RECALL = {name: f"{name}/fused/recall@5" for name in SETS}
EDITED = 0.6  # a passage that holds this share of the words of another is that passage, edited
KEPT = 24  # files of figures that stay in the workspace


class RegressionRow(Record):
    """One gated figure over the `n` cases compared; `worse`: those that have less now, named where the figure fell."""

    metric: str
    former: float
    now: float
    change: float
    margin: float
    n: int
    fell: bool
    worse: tuple[str, ...] = ()


class Regression(Record):
    """`retired`: cases of the former version that no longer apply; `added`: how many cases only the new one can map;
    `metrics`: what the new version reached over all of its own cases, ``recall@5`` over both sets."""

    rows: tuple[RegressionRow, ...] = ()
    retired: tuple[str, ...] = ()
    added: int = 0
    passed: bool = True
    said: str
    metrics: dict[str, float] = Field(default_factory=dict)


@dataclass(frozen=True)
class _Side:
    """One version with the eval sets mapped to it."""

    pipeline: Pipeline
    chunks: ChunkMap
    sets: list[EvalSet]

    def cases(self) -> dict[tuple[str, str], EvalCase]:
        return {(s.name, c.id): c for s in self.sets for c in s.cases}

    def text(self, case: EvalCase) -> str:
        return "\n".join(self.chunks.child[i].content for group in case.groups for i in group)

    def current(self, case: EvalCase) -> bool:
        """Do the first places of all parts of the answer stand in active documents?"""
        return all(self.chunks.child[i].status == "active" for i in case.truth)

    def names(self) -> set[str]:
        """The versions and models that documents are about, as a question may write them."""
        documents = self.pipeline.version.documents
        versions = {d.doc_version.lower().removeprefix("v") for d in documents}
        return {v for v in versions if len(v) > 2} | {m.lower() for d in documents for m in d.product_model}

    def named(self, case: EvalCase) -> bool:
        """Does the question name the version of a document that holds its answer?"""
        held = {self.chunks.child[i].doc_version.lower().removeprefix("v") for group in case.groups for i in group}
        return any(_in_words(version, case.query) for version in held)


def regression(
    workspace: Path, former: str | None, staged: str, config: Config | ConfigView, *, expert: Path | None = None,
    baseline: Baseline | None = None, embedder: Embedder | None = None, progress: Progress | None = None,
) -> Regression:  # fmt: skip
    """Hold the version `staged` to `former` (None: the first one; its figures are measured all the same).

    A figure may fall by the margin that a `baseline` of this profile gives it, else by `gates.margin`, or two cases
    where that is more; answers of a wrong version may not become more. A case that was measured and is not any more
    counts as zero. Answers are measured where `knowledge.regression_answers` is on. `embedder`: used where a version
    was encoded with it. Raises InputRefused for an eval set that can't be read, MissingResource without a model.
    """
    new = _side(workspace, staged, config, expert, embedder)
    if new is None:
        return Regression(said="not evaluated: no eval set")
    kinds = ("qdoc", "qdoca") if config.knowledge.regression_answers else ("qdoc",)
    now = {kind: _figures(new, kind, workspace, config, progress) for kind in kinds}
    means = {
        f"{kind}/{m}": v for kind, f in now.items() for m, by in f.items() if (v := _mean(by.values())) is not None
    }
    if (recall := _mean(_recall(now["qdoc"], new).values())) is not None:
        means["recall@5"] = recall
    old = _side(workspace, former, config, expert, new.pipeline.embedder) if former and former != staged else None
    if old is None:
        return Regression(metrics=means, said="measured, with no former version to hold it to")
    before, after = old.cases(), new.cases()
    same = {key for key in before.keys() & after.keys() if _same(before[key], after[key], old, new)}
    lost = {key for key in before.keys() - same if _corrected_away(before[key], old, new)}
    both, rows = same | lost, []
    for kind in kinds:
        was = _figures(old, kind, workspace, config, progress)
        for metric, by in was.items():
            name = metric.split("/")[0]
            ids = [i for i, value in by.items() if value is not None and (name, i) in both]
            if ids:
                values = now[kind].get(metric, {})
                pairs = {i: (by[i] or 0.0, values.get(i) or 0.0 if (name, i) in same else 0.0) for i in ids}
                rows.append(_row(f"{kind}/{metric}", pairs, _margin(kind, metric, len(ids), config, baseline)))
    retired = tuple(sorted(i for _, i in before.keys() - both))
    said = _said(rows, len(both), retired, len(lost))
    return Regression(
        rows=tuple(rows), retired=retired, added=len(after.keys() - before.keys()),
        passed=not any(r.fell for r in rows), said=said, metrics=means,
    )  # fmt: skip


def recall_at_5(
    workspace: Path, name: str | None, config: Config | ConfigView, *, expert: Path | None = None,
    embedder: Embedder | None = None, progress: Progress | None = None,
) -> dict[str, float]:  # fmt: skip
    """Recall@5 of the fused list of a version (None: the published one), by ``set/case``, kept like the other figures;
    without questions about what is an older version by now and is not found by default."""
    side = _side(workspace, name, config, expert, embedder)
    return {} if side is None else _recall(_figures(side, "qdoc", workspace, config, progress), side)


def _side(
    workspace: Path, name: str | None, config: Config | ConfigView, expert: Path | None, embedder: Embedder | None
) -> _Side | None:
    if not (expert and expert.is_file()) and not (workspace / "eval_set.json").is_file():
        return None
    version = IndexVersion(workspace / "indexes", name)
    fits = embedder is not None and embedder.name == version.manifest["embedder"]["name"]
    chunks = chunk_map(version)
    sets = map_sets(chunks, workspace, expert, lenient=True)  # a set may be ahead of the former version, too
    return _Side(Pipeline(version, config, embedder if fits else None), chunks, sets)


def _in_words(name: str, query: str) -> bool:
    """Does the query name this version (without its v) or model? Version 1 is not named by ``LG-100``."""
    return re.search(rf"(?<![a-z0-9.])v?{re.escape(name)}(?![a-z0-9]|\.\d)", query.lower()) is not None


def _corrected_away(was: EvalCase, old: _Side, new: _Side) -> bool:
    """Has a text lost the answer that is still the same version of the same document? A decision took nothing out then:
    a parser that failed, or a file that was emptied, must not pass because its questions are gone. A value that was
    corrected is another thing: the passage is there, with most of its words, and its question is retired."""
    held = {d.key: d for d in new.pipeline.version.documents}
    own = {d.key: d for d in old.pipeline.version.documents}
    for i in was.truth:
        key, version = old.chunks.child[i].doc_key, new.pipeline.version
        if key not in held or held[key].status != own[key].status:
            return False
        if held[key].content_hash != own[key].content_hash:
            words = set(version.tokenizer(old.chunks.child[i].content))
            texts = version.tokens(version.rows_of_document(held[key]))
            if all(len(words & set(text)) < EDITED * len(words) for text in texts):
                return True
    return False


def _same(was: EvalCase, now: EvalCase, old: _Side, new: _Side) -> bool:
    """Is this the same question still? What its truth said it says; it has become no older version, unless the question
    names it; and where no document answered, it names no version or model that has come since."""
    if not was.answerable:  # who asked about 5.0 before its manuals came is not to be refused any more
        return not any(_in_words(name, was.query) for name in new.names() - old.names())
    if old.current(was) and not new.current(now) and not new.named(now):
        return False
    before, after = old.text(was), new.text(now)
    return all(holds(after, word) for word in was.keywords if holds(before, word))


# --- figures ----------------------------------------------------------------------------------------------------------


def _figures(
    side: _Side, kind: str, workspace: Path, config: Config | ConfigView, progress: Progress | None
) -> Values:  # fmt: skip
    """The gated figures of a kind by case, None for unmeasured, and recall@5; measured once for the same version, sets,
    configuration and code."""
    pipeline, sets = side.pipeline, side.sets
    judge = make_judge(config, workspace / "reports" / "judged.jsonl") if kind == "qdoca" else None
    how = components_of(config, pipeline.version, judge.name if judge else "")
    parts = (pipeline.version.digest, *(_digest(x) for x in ({s.name: s.hash for s in sets}, how)))
    folder = workspace / "regression"
    path = folder / f"{'-'.join(p[:12] for p in parts)}-{kind}.json"
    with contextlib.suppress(InputRefused):
        return read_json(path)
    if judge:
        values = answer_values(measure_answers(pipeline, sets, judge, progress))
    else:
        reports = measure_retrieval(pipeline, sets, CUTOFFS, progress, ablations=False)
        values = retrieval_values(reports)
        for name, report in reports.items():
            by_case = report.values.get("fused", {}).get("recall@5", ())
            values[f"{name}/fused/recall@5"] = dict(zip((t.case.id for t in report.answerable), by_case, strict=False))
    wanted = (*GATED[kind], *(RECALL.values() if kind == "qdoc" else ()))
    found = {m: {i: _number(v) for i, v in values[m].items()} for m in wanted if m in values}
    write_json(path, found)
    for stale in sorted(folder.glob("*.json"), key=lambda p: p.stat().st_mtime)[:-KEPT]:
        stale.unlink(missing_ok=True)
    return found


def _digest(data: object) -> str:
    return sha256(json.dumps(data, sort_keys=True, ensure_ascii=False))


def _number(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else float(value)


def _mean(values: Iterable[float | None]) -> float | None:
    measured = [v for v in values if v is not None]
    return math.fsum(measured) / len(measured) if measured else None


def _recall(figures: Values, side: _Side) -> dict[str, float]:
    asked = {key for key, case in side.cases().items() if side.current(case) or side.named(case)}
    found = {(name, i): v for name, metric in RECALL.items() for i, v in figures.get(metric, {}).items()}
    return {f"{name}/{i}": v for (name, i), v in found.items() if v is not None and (name, i) in asked}


# --- comparing --------------------------------------------------------------------------------------------------------


def _margin(kind: str, metric: str, n: int, config: Config | ConfigView, baseline: Baseline | None) -> float:
    """As `runs.own_margins`, for the cases compared."""
    if baseline is not None and baseline.profile == config.profile:
        own = baseline.metrics.get(f"{kind}/{metric}")
        if own is not None and own.margin is not None:
            return own.margin
    return 0.0 if metric.endswith("/right_version") else round(max(config.gates.margin, 2 / n), 9)


def _row(metric: str, pairs: dict[str, tuple[float, float]], margin: float) -> RegressionRow:
    former, now = (math.fsum(p[side] for p in pairs.values()) / len(pairs) for side in (0, 1))
    fall = round(former - now, 9)
    worse = sorted((i for i, (a, b) in pairs.items() if b < a), key=lambda i: (pairs[i][1] - pairs[i][0], i))
    fell = fall > margin
    return RegressionRow(
        metric=metric, former=former, now=now, change=0.0 - fall, margin=margin, n=len(pairs), fell=fell,
        worse=tuple(worse) if fell else (),
    )  # fmt: skip


def _said(rows: Sequence[RegressionRow], cases: int, retired: Sequence[str], lost: int) -> str:
    gone = f"; {len(retired)} case(s) retired, since their documents changed" if retired else ""
    gone += f"; {lost} count as missed: a corrected document no longer says what they ask for" if lost else ""
    if not rows:
        return f"not evaluated: no case is about documents of both versions{gone}"
    fell = [r for r in rows if r.fell]
    if not fell:
        return f"{len(rows)} figures over {cases} cases, none fell beyond its margin{gone}"
    told = (
        f"{r.metric} {r.former:.4f} -> {r.now:.4f} (n = {r.n}, may fall by {r.margin:g}; worse: "
        f"{', '.join(r.worse[:5])}{' …' if len(r.worse) > 5 else ''})"
        for r in fell
    )
    return f"{len(fell)} of {len(rows)} figures fell beyond their margin: {'; '.join(told)}{gone}"

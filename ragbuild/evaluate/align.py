"""Does a judge agree with people? Cohen's kappa on three levels, query by query, before it is trusted at scale.

Continuous scores become levels at 0.8 and 0.4 (method A15): 2 right, complete, clear; 1 partly; 0 wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ragbuild.core.records import ExpertCase, Record, index_text
from ragbuild.evaluate.facts import uncited
from ragbuild.evaluate.judge import Judge, Scores, overall
from ragbuild.evaluate.rubric import Judged
from ragbuild.offline.evalset import ChunkMap, expert_cases

TRUST = 0.6
LEVELS = 3


def level(score: float) -> int:
    """[0.8, 1] -> 2, [0.4, 0.8) -> 1, [0, 0.4) -> 0."""
    return 2 if score >= 0.8 else 1 if score >= 0.4 else 0


def kappa(counts: np.ndarray, quadratic: bool = False) -> np.ndarray:
    """Cohen's kappa (1960; 1968 for quadratic weights) of confusion matrices of shape (..., k, k).

    ``1 - sum(w * observed) / sum(w * expected)``; NaN where both sides know one and the same level only.
    """
    k = counts.shape[-1]
    distance = np.abs(np.subtract.outer(np.arange(k), np.arange(k))).astype(float)
    weights = distance**2 if quadratic else (distance > 0).astype(float)
    total = counts.sum((-2, -1), keepdims=True)
    expected = counts.sum(-1, keepdims=True) * counts.sum(-2, keepdims=True) / np.maximum(total, 1)
    off, chance = (counts * weights).sum((-2, -1)), (expected * weights).sum((-2, -1))
    return np.where(chance > 0, 1 - off / np.where(chance > 0, chance, 1), np.nan)


def confusion(a: Sequence[int], b: Sequence[int]) -> np.ndarray:
    """Counts, `a` in rows."""
    cells = np.asarray(a, int) * LEVELS + np.asarray(b, int)
    return np.bincount(cells, minlength=LEVELS**2).reshape(LEVELS, LEVELS)


class Alignment(Record):
    """How a judge agrees with people. `confusion`: people in rows, the judge in columns, levels 0, 1, 2. `low`, `high`:
    the 95 % bootstrap interval of the plain kappa. Kappas are None where they are undefined; `verdict` says so."""

    n: int
    unmeasured: int
    kappa: float | None
    low: float | None
    high: float | None
    quadratic: float | None
    agreement: float | None
    human_base: tuple[float, ...]
    judge_base: tuple[float, ...]
    confusion: tuple[tuple[int, ...], ...]
    rows: tuple[dict[str, Any], ...]
    verdict: str

    @property
    def disagreements(self) -> list[dict[str, Any]]:
        """Worst first; what could not be judged is at the end."""
        off = [r for r in self.rows if not r["agree"]]
        return sorted(off, key=lambda r: -abs(r["human"] - r["judge"]) if r["judge"] is not None else 1)


def align(
    human: Sequence[int],
    scores: Sequence[float | None],
    info: Sequence[Mapping[str, Any]] | None = None,
    n_resamples: int = 2000,
    seed: int = 13,
    levels: Callable[[float], int] = level,
) -> Alignment:
    """Compare people's levels with a judge's scores (None: unmeasured, counted and left out of kappa), in order.

    `info`: what each row of the result is to carry besides.
    """
    rows = []
    for i, (given, score) in enumerate(zip(human, scores, strict=True)):
        judged = None if score is None else levels(score)
        rows.append(
            {**(info[i] if info else {}), "human": given, "judge": judged, "score": score, "agree": judged == given}
        )
    pairs = [(r["human"], r["judge"]) for r in rows if r["judge"] is not None]
    counts = confusion(*zip(*pairs, strict=True)) if pairs else np.zeros((LEVELS, LEVELS), int)
    n = len(pairs)
    one_class = np.count_nonzero(counts.sum(1)) < 2
    plain, quadratic = (None if one_class else _or_none(kappa(counts, q)) for q in (False, True))
    low = high = None
    if plain is not None:
        draws = np.random.default_rng(seed).multinomial(n, counts.ravel() / n, n_resamples)
        low, high = (_or_none(v) for v in np.nanpercentile(kappa(draws.reshape(-1, LEVELS, LEVELS)), (2.5, 97.5)))
    return Alignment(
        n=n, unmeasured=len(rows) - n, kappa=plain, low=low, high=high, quadratic=quadratic,
        agreement=float(np.trace(counts) / n) if n else None, human_base=_shares(counts.sum(1)),
        judge_base=_shares(counts.sum(0)), confusion=tuple(map(tuple, counts.tolist())), rows=tuple(rows),
        verdict=_verdict(plain, low, n, len(rows) - n),
    )  # fmt: skip


def _shares(counts: np.ndarray) -> tuple[float, ...]:
    return tuple((counts / max(1, counts.sum())).round(4).tolist())


def _or_none(value: Any) -> float | None:
    return None if math.isnan(value) else float(value)


def _verdict(value: float | None, low: float | None, n: int, unmeasured: int) -> str:
    out = f" {unmeasured} could not be judged." if unmeasured else ""
    if value is None:
        return f"kappa is undefined: people gave one level only, or nothing was measured (n = {n}).{out}"
    if value < TRUST:
        return f"kappa {value:.2f} at n = {n} is below {TRUST}: this judge is not to be trusted at scale.{out}"
    sure = "" if low is not None and low >= TRUST else f", but its 95 % interval reaches down to {low or 0:.2f}"
    return f"kappa {value:.2f} at n = {n} reaches {TRUST}{sure}.{out}"


def reasons(scores: Scores) -> str:
    """Why the scores below level 2 are what they are, or why nothing was measured."""
    return "; ".join(
        f"{k} {s.value:.2f}: {s.reason}" for k, s in scores.items() if s.value is not None and s.value < 0.8
    ) or (next((s.reason for s in scores.values() if s.value is None and s.applies), ""))


def align_expert(
    cases: Sequence[ExpertCase], judge: Judge, chunks: ChunkMap, n_resamples: int = 2000, seed: int = 13,
    lost: list[str] | None = None,
) -> dict[str, Alignment]:  # fmt: skip
    """The judge on the given answers that a person scored: ``tuning``, ``test`` and ``all``.

    The documents shown are the parents that hold the right answer; citation marks are taken out, since the numbers
    were those of the system that gave the answer. `lost`: as in `expert_cases`.
    """
    parents = {p.chunk_id: p for some in chunks.parents.values() for p in some}
    human, scores, info = [], [], []
    places = {mapped.id: mapped for mapped in expert_cases(cases, chunks, lost)}
    for case in cases:
        mapped = places.get(case.case_id)
        if case.human_score is None or mapped is None:
            continue
        needed = dict.fromkeys(i for group in mapped.parent_groups for i in group)
        judged = Judged(
            case.query, uncited(case.given_answer), case.reference_answer, case.gt_keywords, case.wrong_keywords,
            tuple(index_text(parents[i]) for i in needed), case.answerable,
        )  # fmt: skip
        given = judge(judged)
        human.append(case.human_score)
        scores.append(overall(given))
        info.append({
            "id": case.case_id, "half": mapped.half, "language": case.language, "kind": case.kind, "query": case.query,
            "answer": case.given_answer, "human_reason": case.human_reason, "judge_reason": reasons(given),
        })  # fmt: skip
    out = {}
    for half in ("tuning", "test", "all"):
        keep = [i for i, row in enumerate(info) if half in (row["half"], "all")]
        out[half] = align(
            [human[i] for i in keep], [scores[i] for i in keep], [info[i] for i in keep], n_resamples, seed
        )
    return out

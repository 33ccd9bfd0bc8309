"""Metrics of rankings, one value a query, and the statistics of their means.

All queries are measured at once, in arrays. A query without a relevant document has no recall: its value is NaN, which
`mean` counts and never averages. Order within a run is (-score, id); trec_eval and pytrec_eval break ties the other
way round (the larger id first), other tools as it happens, so a run is ranked here before it is measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

_BLOCK = 2**21  # numbers drawn at once


def ranked(run: Mapping[str, float]) -> list[str]:
    """The ids of an unordered run by (-score, id). Raises ValueError for a score that is NaN."""
    if any(math.isnan(score) for score in run.values()):
        raise ValueError("a score is NaN, which has no place in an order")
    return sorted(run, key=lambda item: (-run[item], item))


def per_query(
    rankings: Sequence[Sequence[str]], truths: Sequence[Mapping[str, float]], cutoffs: Sequence[int]
) -> dict[str, np.ndarray]:
    """``name@K`` to one float64 a query, and ``mrr`` over whole rankings; NaN for a query without relevant documents.

    `rankings`: ids, best first (equal ids count once, at their first rank); `truths`: grade of each judged id, relevant
    above 0. With g(i) the grade at rank i, 0 where nothing was judged or retrieved, and R the number of relevant ids:

        recall@K    = |{i <= K : g(i) > 0}| / R
        precision@K = |{i <= K : g(i) > 0}| / K
        hit@K       = 1 if some g(i) > 0 with i <= K, else 0
        mrr@K       = 1 / (the first i with g(i) > 0), 0 when it lies beyond K       (Voorhees 1999)
        ndcg@K      = DCG@K / DCG@K of the ideal order, DCG@K = sum over i <= K of g(i) / log2(i + 1)

    nDCG is that of Järvelin and Kekäläinen (2002), linear in the grade, with the discount of trec_eval's `ndcg_cut`.
    Raises ValueError for lists of different length, a cutoff below 1 and a grade that is not finite.
    """
    if len(rankings) != len(truths):
        raise ValueError(f"expected one truth a ranking, got {len(truths)} for {len(rankings)}")
    if not cutoffs or min(cutoffs) < 1:
        raise ValueError(f"cutoffs must be whole numbers from 1, got {list(cutoffs)}")
    if not all(map(math.isfinite, chain.from_iterable(truth.values() for truth in truths))):
        raise ValueError("a grade is not a finite number")
    grades = [{item: grade for item, grade in truth.items() if grade > 0} for truth in truths]
    width = max(cutoffs)
    gains = _padded(
        [[grade.get(item, 0.0) for item in dict.fromkeys(r)] for r, grade in zip(rankings, grades, strict=True)], width
    )
    ideal = _padded([sorted(grade.values(), reverse=True) for grade in grades], width)
    relevant = gains > 0
    found = relevant.cumsum(axis=1)
    first = np.where(relevant.any(axis=1), relevant.argmax(axis=1) + 1.0, np.inf)
    dcg, best = (np.cumsum(g[:, :width] / np.log2(np.arange(2, width + 2)), axis=1) for g in (gains, ideal))
    total = np.array([len(grade) or np.nan for grade in grades], dtype=np.float64)  # NaN goes into all that it divides
    measured = total / total
    out = {"mrr": measured / first}
    for k in sorted(set(cutoffs)):
        out |= {
            f"recall@{k}": found[:, k - 1] / total,
            f"precision@{k}": measured * found[:, k - 1] / k,
            f"hit@{k}": measured * (first <= k),
            f"mrr@{k}": measured * (first <= k) / first,
            f"ndcg@{k}": measured * dcg[:, k - 1] / np.where(best[:, k - 1] > 0, best[:, k - 1], 1.0),
        }
    return out


def _padded(rows: Sequence[Sequence[float]], width: int) -> np.ndarray:
    """Rows of different length as one array, filled up with zeros to the longest one, and to at least `width`."""
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    out = np.zeros((len(rows), max(width, lengths.max(initial=0))))
    out[np.arange(out.shape[1]) < lengths[:, None]] = np.fromiter(chain.from_iterable(rows), np.float64, lengths.sum())
    return out


class Mean(NamedTuple):
    """A mean with what it is a mean of: `n` values were measured, `unmeasured` could not be."""

    mean: float
    n: int
    unmeasured: int


def mean(values: Sequence[float] | np.ndarray) -> Mean:
    """The mean of the values that are not NaN, and how many there are of either; NaN when none was measured."""
    measured = _measured(values)
    return Mean(float(measured.mean()) if len(measured) else math.nan, len(measured), len(values) - len(measured))


def wilson(successes: float, n: int) -> tuple[float, float]:
    """The 95 % interval of a rate (Wilson 1927); (0, 1) when n is 0, since nothing is known then.

    ``(p + z²/2n ± z sqrt(p (1 - p) / n + z²/4n²)) / (1 + z²/n)`` with p = successes / n and z = 1.96. `successes` may
    be a sum of shares, such as recall over n questions. Raises ValueError when it is not between 0 and n.
    """
    if not 0 <= successes <= n:
        raise ValueError(f"expected successes between 0 and n, got {successes} of {n}")
    if n == 0:
        return 0.0, 1.0
    z, p = NormalDist().inv_cdf(0.975), successes / n
    centre, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    low, high = ((centre + sign * half) / (1 + z * z / n) for sign in (-1, 1))
    return (0.0 if successes == 0 else low), (1.0 if successes == n else high)  # exact at the ends


def bootstrap_ci(values: Sequence[float] | np.ndarray, n_resamples: int = 2000, seed: int = 13) -> tuple[float, float]:
    """The 95 % percentile interval of the mean of the measured values (Efron 1979).

    NaN when fewer than two were measured: a comparison such as ``low > 0`` is then false.
    """
    measured, rng = _measured(values), np.random.default_rng(seed)
    if len(measured) < 2:
        return math.nan, math.nan
    means = [measured[rng.integers(0, shape[1], shape)].mean(axis=1) for shape in _blocks(n_resamples, len(measured))]
    low, high = np.percentile(np.concatenate(means), (2.5, 97.5))
    return float(low), float(high)


def paired_test(
    a: Sequence[float] | np.ndarray, b: Sequence[float] | np.ndarray, n_resamples: int = 2000, seed: int = 13
) -> tuple[float, float, float, float]:
    """(mean of a - b, low, high, p) over the queries that both measured.

    The interval is the paired bootstrap's (see `bootstrap_ci`); p is two-sided, from random flips of the differences'
    signs: ``(1 + |{flips : |their mean| >= |the mean|}|) / (1 + n_resamples)`` (Fisher 1935; Smucker, Allan and
    Carterette 2007). Without a pair the difference is NaN and p is 1. Raises ValueError for lists of different length.
    """
    if len(a) != len(b):
        raise ValueError(f"a paired test compares the same queries, got {len(a)} and {len(b)} values")
    d = _measured(np.asarray(a, np.float64) - np.asarray(b, np.float64))
    if not len(d):
        return math.nan, math.nan, math.nan, 1.0
    rng, observed = np.random.default_rng(seed), float(d.mean())
    as_large = 0
    for shape in _blocks(n_resamples, len(d)):
        flips = np.where(rng.integers(0, 2, shape, dtype=np.int8), d, -d).mean(axis=1)
        as_large += int((np.abs(flips) >= abs(observed) - 1e-12).sum())
    low, high = bootstrap_ci(d, n_resamples, seed)
    return observed, low, high, (1 + as_large) / (1 + n_resamples)


def _measured(values: Sequence[float] | np.ndarray) -> np.ndarray:
    array = np.asarray(values, np.float64)
    return array[~np.isnan(array)]


def _blocks(n_resamples: int, n: int) -> Iterator[tuple[int, int]]:
    """Shapes (resamples, n) that add up to `n_resamples`, none of more than `_BLOCK` numbers."""
    step = max(1, _BLOCK // n)
    for start in range(0, n_resamples, step):
        yield min(step, n_resamples - start), n

"""Metrics of 10,000 queries with 200 results each, beside ranx in the same run.

    python benchmarks/metrics_speed.py [--queries 10000] [--top 200] [--json]

Both get ranked ids in Python lists and grades in dicts, and give recall, precision, hit rate, MRR and nDCG at 10, 50
and 200 a query. ranx first turns ids into its own typed containers, which is shown apart; it is compiled before the
clock starts. The figures of both are compared to 1e-9.
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np

from ragbuild.evaluate.metrics import per_query

CUTOFFS = (10, 50, 200)
THEIRS = {"recall": "recall", "precision": "precision", "hit": "hit_rate", "mrr": "mrr", "ndcg": "ndcg"}


def generate(n: int, top: int) -> tuple[list[list[str]], list[dict[str, int]]]:
    """Rankings of `top` of 5,000 ids and up to 20 judged ids a query, of which about half are retrieved."""
    rng = np.random.default_rng(13)
    names = np.array([f"doc-{i:05}" for i in range(5000)])
    rankings, truths = [], []
    for _ in range(n):
        drawn = rng.choice(5000, top + 10, replace=False)
        judged = rng.choice(drawn, min(20, top), replace=False)
        rankings.append(names[drawn[:top]].tolist())
        truths.append({str(names[i]): int(g) for i, g in zip(judged, rng.integers(1, 4, len(judged)), strict=True)})
    return rankings, truths


def ranx(rankings: list[list[str]], truths: list[dict[str, int]]) -> tuple[dict[str, np.ndarray], float, float]:
    """Its figures, and the seconds to make its containers and to evaluate."""
    from ranx import Qrels, Run, evaluate

    start = time.perf_counter()
    run = Run({f"q{q:06}": {i: 1 / rank for rank, i in enumerate(r, 1)} for q, r in enumerate(rankings)})
    qrels = Qrels({f"q{q:06}": truth for q, truth in enumerate(truths)})
    made = time.perf_counter()
    names = [f"{their}@{k}" for their in THEIRS.values() for k in CUTOFFS]
    figures = evaluate(qrels, run, names, return_mean=False, save_results_in_run=False)
    return figures, made - start, time.perf_counter() - made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queries", type=int, default=10_000)
    parser.add_argument("--top", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rankings, truths = generate(arguments.queries, arguments.top)
    ranx(rankings[:20], truths[:20])
    start = time.perf_counter()
    figures = per_query(rankings, truths, CUTOFFS)
    ours = time.perf_counter() - start
    theirs, made, evaluated = ranx(rankings, truths)
    gap = max(
        float(np.abs(figures[f"{our}@{k}"] - theirs[f"{their}@{k}"]).max())
        for our, their in THEIRS.items()
        for k in CUTOFFS
    )
    result = {
        "queries": arguments.queries, "top": arguments.top, "seconds": ours, "ranx_seconds": made + evaluated,
        "ranx_containers_seconds": made, "ranx_evaluate_seconds": evaluated, "ratio_to_ranx": ours / (made + evaluated),
        "ratio_to_ranx_evaluate": ours / evaluated, "largest_difference": gap,
    }  # fmt: skip
    if arguments.json:
        print(json.dumps(result))
        return
    print(f"{arguments.queries:,} queries x Top-{arguments.top}, {len(THEIRS) * len(CUTOFFS)} metrics a query")
    print(f"ragbuild {ours:6.2f} s from lists to figures")
    print(f"ranx     {made + evaluated:6.2f} s ({made:.2f} s to make its containers, {evaluated:.2f} s to evaluate)")
    print(f"ratio    {result['ratio_to_ranx']:6.2f} of all, {result['ratio_to_ranx_evaluate']:.2f} of evaluating alone")
    print(f"largest difference of a figure: {gap:.1e}")


if __name__ == "__main__":
    main()

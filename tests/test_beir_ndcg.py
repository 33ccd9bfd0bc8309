"""The nDCG of the benchmark script against an independent implementation and by hand."""

from __future__ import annotations

from math import log2

import pytest

from benchmarks.beir import ndcg

RELEVANT = {"a": 2.0, "b": 1.0, "c": 1.0}


@pytest.mark.parametrize(
    ("ranking", "expected"),
    [
        (["a", "b", "c"], 1.0),
        (["x", "y"], 0.0),
        ([], 0.0),
        (["x", "a", "y", "b"], (2 / log2(3) + 1 / log2(5)) / (2 + 1 / log2(3) + 1 / log2(4))),
        (["x"] * 10 + ["a"], 0.0),
    ],
)
def test_ndcg_by_hand(ranking, expected):
    assert ndcg(ranking, RELEVANT) == pytest.approx(expected)


def test_ndcg_equals_that_of_ranx():
    from ranx import Qrels, Run, evaluate

    rankings = {"q1": ["x", "a", "y", "b"], "q2": ["c", "b", "a"], "q3": ["x", "y"]}
    run = Run({q: {doc: 1.0 / rank for rank, doc in enumerate(docs, 1)} for q, docs in rankings.items()})
    qrels = Qrels({q: {doc: int(grade) for doc, grade in RELEVANT.items()} for q in rankings})
    ours = sum(ndcg(docs, RELEVANT) for docs in rankings.values()) / len(rankings)
    assert evaluate(qrels, run, "ndcg@10") == pytest.approx(ours)

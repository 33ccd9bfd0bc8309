"""The dense index against a brute-force search in numpy: filters, segments, ties, graphs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragbuild.index.dense import DenseIndex, build_graph
from ragbuild.models.embedders import unit

DIM = 16


def vectors(n: int, seed: int = 0) -> np.ndarray:
    return unit(np.random.default_rng(seed).normal(size=(n, DIM)))


def brute(data: np.ndarray, query: np.ndarray, k: int, id_rank: np.ndarray, allowed: np.ndarray | None) -> list[int]:
    scores = data @ query
    rows = [r for r in range(len(data)) if allowed is None or allowed[r]]
    return sorted(rows, key=lambda r: (-round(float(scores[r]), 5), id_rank[r]))[:k]


def split(data: np.ndarray, cuts: list[int]) -> list[np.ndarray]:
    return [np.ascontiguousarray(part) for part in np.split(data, sorted(cuts))]


@pytest.mark.parametrize("cuts", [[], [200], [1, 50, 50, 499]], ids=["one segment", "two", "five, one empty"])
@pytest.mark.parametrize("share", [None, 1.0, 0.6, 0.11, 0.09, 0.01, 0.0])
def test_equals_brute_force(cuts: list[int], share: float | None):
    data, rng = vectors(500), np.random.default_rng(1)
    id_rank = rng.permutation(500)
    allowed = None if share is None else np.zeros(500, bool)
    if allowed is not None:
        allowed[rng.choice(500, int(500 * share), replace=False)] = True
    index = DenseIndex(split(data, cuts), id_rank)
    assert len(index) == 500
    for query in vectors(8, seed=2):
        rows, scores = index.search(query, 10, allowed)
        assert rows.tolist() == brute(data, query, 10, id_rank, allowed)
        assert scores == pytest.approx(data[rows] @ query, abs=1e-5)
        assert len(rows) == min(10, 500 if allowed is None else int(allowed.sum())), "a filtered search returns k hits"


@given(st.integers(1, 40), st.integers(1, 45), st.integers(0, 2**16), st.lists(st.integers(0, 40), max_size=3))
def test_equals_brute_force_on_any_size(n: int, k: int, seed: int, cuts: list[int]):
    data, rng = vectors(n, seed), np.random.default_rng(seed)
    id_rank, allowed = rng.permutation(n), rng.random(n) < rng.random()
    query = vectors(1, seed + 1)[0]
    index = DenseIndex(split(data, [min(c, n) for c in cuts]), id_rank)
    for mask in (None, allowed):
        assert index.search(query, k, mask)[0].tolist() == brute(data, query, k, id_rank, mask)


@pytest.mark.parametrize("cuts", [[], [30]])
@pytest.mark.parametrize("allowed", [None, np.arange(60) % 2 == 0, np.arange(60) < 5])
def test_ties_are_broken_by_id(cuts: list[int], allowed: np.ndarray | None):
    """Sixty chunks with one text: more ties than are over-fetched."""
    data = np.repeat(vectors(1), 60, axis=0)
    id_rank = np.arange(60)[::-1].copy()
    rows, scores = DenseIndex(split(data, cuts), id_rank).search(data[0], 4, allowed)
    expected = [r for r in range(59, -1, -1) if allowed is None or allowed[r]][:4]
    assert rows.tolist() == expected
    assert len(set(scores.tolist())) == 1


def test_vectors_and_scores_of_given_rows():
    data = vectors(50)
    index = DenseIndex(split(data, [20, 35]), np.arange(50))
    rows = np.array([49, 0, 20, 19, 35, 20])
    assert np.array_equal(index.vectors(rows), data[rows])
    assert index.score(data[3], rows) == pytest.approx(data[rows] @ data[3], abs=1e-6)
    assert index.vectors(np.zeros(0, np.int64)).shape == (0, DIM)


def test_an_empty_index_and_no_k():
    for index in (
        DenseIndex([], np.zeros(0, np.int64)),
        DenseIndex([np.zeros((0, DIM), np.float32)], np.zeros(0, np.int64)),
    ):
        rows, scores = index.search(vectors(1)[0], 5)
        assert len(index) == len(rows) == len(scores) == 0
    assert len(DenseIndex([vectors(5)], np.arange(5)).search(vectors(1)[0], 0)[0]) == 0


@pytest.mark.parametrize("query", [np.ones(DIM + 1, np.float32), np.ones((1, DIM), np.float32), np.full(DIM, np.nan)])
def test_a_query_of_another_model_is_refused(query: np.ndarray):
    with pytest.raises(ValueError, match=f"expected a query of {DIM} finite numbers"):
        DenseIndex([vectors(5)], np.arange(5)).search(query, 3)


def test_graphs_find_nearly_all(tmp_path):
    """HNSW: at least nine of ten of the exact ten, with and without a filter, k hits always."""
    data = vectors(1500)
    parts = split(data, [900])
    graphs = [tmp_path / "0.faiss", None]
    build_graph(parts[0], graphs[0], m=16)
    exact, index = DenseIndex(parts, np.arange(1500)), DenseIndex(parts, np.arange(1500), graphs)
    for allowed in (None, np.arange(1500) % 3 == 0, np.arange(1500) % 8 == 0):
        found = []
        for query in vectors(30, seed=3):
            rows, _ = index.search(query, 10, allowed)
            assert len(rows) == 10 and (allowed is None or allowed[rows].all())
            found.append(len(set(rows.tolist()) & set(exact.search(query, 10, allowed)[0].tolist())) / 10)
        assert np.mean(found) >= 0.9


def test_graphs_belong_to_their_segments(tmp_path):
    """An empty segment before a segment with a graph does not shift the graphs."""
    data = vectors(300)
    build_graph(data, tmp_path / "a.faiss", m=16)
    index = DenseIndex([np.zeros((0, DIM), np.float32), data], np.arange(300), [None, tmp_path / "a.faiss"])
    assert index.search(data[7], 1)[0].tolist() == [7]


def test_a_graph_still_gives_k_hits_where_few_pass(tmp_path):
    rng = np.random.default_rng(0)
    data = unit(np.concatenate([rng.normal(size=(800, DIM)) + 6, rng.normal(size=(100, DIM)) - 6]))
    build_graph(data, tmp_path / "a.faiss", m=4)
    index = DenseIndex([data], np.arange(900), [tmp_path / "a.faiss"])
    allowed = np.arange(900) >= 800
    rows, _ = index.search(data[0], 60, allowed)
    assert len(rows) == 60 and allowed[rows].all()

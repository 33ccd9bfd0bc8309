"""The dense index: FAISS over segments of unit vectors that are memory-mapped and never rewritten.

Flat (exact) search reads the mapped file directly, without a copy in memory; above `hnsw_above` vectors a segment has
an HNSW graph beside it. A filter that lets through less than a tenth searches the allowed rows exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ragbuild.index.lexical import NEAR, best

SELECTIVE = 0.1


class DenseIndex:
    """Cosine (inner product of unit vectors) over the concatenation of `segments`, each (n, dim) float32.

    `live`: where deleted vectors lie between the others, the places of those that are left, ascending; rows then number
    these alone.
    """

    def __init__(
        self, segments: Sequence[np.ndarray], id_rank: np.ndarray, graphs: Sequence[Path | None] = (),
        live: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        pairs = [(s, g) for s, g in zip(segments, graphs or [None] * len(segments), strict=True) if len(s)]
        self._segments = [s for s, _ in pairs]
        self._graphs = [_read_graph(g) for _, g in pairs]
        self._id_rank, self._live = id_rank, live
        self._offsets = np.cumsum([0] + [len(s) for s in self._segments])

    def __len__(self) -> int:
        return int(self._offsets[-1]) if self._live is None else len(self._live)

    def search(self, query: np.ndarray, k: int, allowed: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Rows and cosines of the k nearest to one unit vector (dim,), by (-cosine, id).

        `allowed`: bool (n,) or None for all rows.
        """
        if not len(self) or k < 1:
            return np.zeros(0, np.int64), np.zeros(0, np.float32)
        dim = self._segments[0].shape[1]
        if query.shape != (dim,) or not np.isfinite(query).all():
            raise ValueError(f"expected a query of {dim} finite numbers, got shape {query.shape}")
        if allowed is not None and allowed.sum() < SELECTIVE * len(self):
            rows = np.flatnonzero(allowed)
            return best(rows, self.score(query, rows), k, self._id_rank)
        places = self._places(allowed)
        found = [
            self._search_segment(i, query, k, None if places is None else places[start : start + len(segment)])
            for i, (segment, start) in enumerate(zip(self._segments, self._offsets, strict=False))
        ]
        rows = np.concatenate([rows + start for (rows, _), start in zip(found, self._offsets, strict=False)])
        rows = rows if self._live is None else np.searchsorted(self._live, rows)
        return best(rows, np.concatenate([scores for _, scores in found]), k, self._id_rank)

    def _places(self, allowed: np.ndarray | None) -> np.ndarray | None:
        """Which vectors may be found, deleted ones among them: bool over all places, or None for all."""
        if self._live is None:
            return allowed
        places = np.zeros(self._offsets[-1], bool)
        places[self._live if allowed is None else self._live[allowed]] = True
        return places

    def score(self, query: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Cosines of `query` (dim,) with the given rows, in their order."""
        return self.vectors(rows) @ np.asarray(query, np.float32)

    def vectors(self, rows: np.ndarray) -> np.ndarray:
        """Vectors of the given rows, float32 (n, dim)."""
        rows = np.asarray(rows, np.int64) if self._live is None else self._live[np.asarray(rows, np.int64)]
        if len(self._segments) == 1:
            return np.asarray(self._segments[0][rows])
        out = np.empty((len(rows), self._segments[0].shape[1] if self._segments else 0), np.float32)
        place = np.searchsorted(self._offsets, rows, side="right") - 1
        for i in np.unique(place):
            mine = place == i
            out[mine] = self._segments[i][rows[mine] - self._offsets[i]]
        return out

    def _search_segment(
        self, i: int, query: np.ndarray, k: int, allowed: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """At least the k best of one segment, with every tie of the last one where the search is exact."""
        import faiss

        vectors, graph = self._segments[i], self._graphs[i]
        query = np.ascontiguousarray(query, np.float32).reshape(1, -1)
        passing = len(vectors) if allowed is None else int(allowed.sum())
        if passing == 0:
            return np.zeros(0, np.int64), np.zeros(0, np.float32)
        # the selector path computes distances row by row: for one query that is faster than a matrix product
        bits = np.packbits(np.ones(len(vectors), bool) if allowed is None else allowed, bitorder="little")
        selector = faiss.IDSelectorBitmap(bits)
        wanted = min(k + 8, passing)
        if graph is not None:
            params = faiss.SearchParametersHNSW(sel=selector, efSearch=max(64, 2 * wanted))
            scores, rows = graph.search(query, wanted, params=params)
            valid = rows[0] >= 0
            if valid.sum() >= min(k, passing):  # a graph may lose its way between rows that do not pass
                return rows[0][valid], scores[0][valid]
        while True:
            scores, rows = np.empty((1, wanted), np.float32), np.empty((1, wanted), np.int64)
            faiss.knn_inner_product(
                faiss.swig_ptr(query), faiss.swig_ptr(vectors), vectors.shape[1], 1, len(vectors), wanted,
                faiss.swig_ptr(scores), faiss.swig_ptr(rows), selector,
            )  # fmt: skip
            if wanted == passing or scores[0, -1] < scores[0, k - 1] - NEAR * abs(scores[0, k - 1]):
                return rows[0], scores[0]
            wanted = min(wanted * 4, passing)  # more ties than were fetched: the id decides, not faiss


def build_graph(vectors: np.ndarray, path: Path, m: int) -> None:
    """Write an HNSW graph (M links a node) over `vectors` to `path`."""
    import faiss

    index = faiss.IndexHNSWFlat(vectors.shape[1], m, faiss.METRIC_INNER_PRODUCT)
    index.hnsw.efConstruction = 100
    index.add(np.ascontiguousarray(vectors))
    faiss.write_index(index, str(path))


def _read_graph(path: Path | None):  # type: ignore[no-untyped-def]
    if path is None:
        return None
    import faiss

    return faiss.read_index(str(path))

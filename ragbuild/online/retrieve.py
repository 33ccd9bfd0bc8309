"""Hybrid retrieval: the lexical and the dense route side by side, fused by RRF over ranks, always.

Scores of different scales are never summed to fuse routes. (Cormack, Clarke, Büttcher 2009: k = 60.)
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ragbuild.core.config import RetrieveConfig
from ragbuild.core.records import Candidate, Hit, RouteHit
from ragbuild.index.filters import Filter
from ragbuild.index.versions import IndexVersion
from ragbuild.models.embedders import Embedder


def rrf(rankings: Sequence[Sequence[str]], k: int = 60) -> list[tuple[str, float]]:
    """Reciprocal rank fusion: ``score(d) = sum over rankings of 1 / (k + rank of d)``, ranks from 1.

    Equal ids within one ranking are collapsed to the first before fusion. Order: (-score, id); sums are exact, so that
    equal ranks tie whatever the order of the rankings.
    """
    parts: dict[str, list[float]] = {}
    for ranking in rankings:
        for rank, item in enumerate(dict.fromkeys(ranking), 1):
            parts.setdefault(item, []).append(1.0 / (k + rank))
    return sorted(((item, math.fsum(p)) for item, p in parts.items()), key=lambda pair: (-pair[1], pair[0]))


@dataclass(frozen=True)
class Retrieval:
    """Top-N candidates in fused order; each route's ranked ids for every (sub-)question; seconds by stage."""

    candidates: list[Candidate]
    routes: dict[str, list[list[str]]]
    seconds: dict[str, float] = field(default_factory=dict)


class Retriever:
    """Searches one index version. Nothing is tokenised or encoded here but the question."""

    def __init__(self, version: IndexVersion, embedder: Embedder, config: RetrieveConfig) -> None:
        self.version, self.embedder, self.config = version, embedder, config

    def __call__(self, questions: Sequence[str], where: Filter | None = None) -> Retrieval:
        """`questions`: the whole question, or its sub-questions, each searched on both routes and fused together."""
        version, config, where = self.version, self.config, where or Filter()
        seconds = dict.fromkeys(("lexical", "encode", "dense", "fuse", "features"), 0.0)
        clock = _Clock(seconds)
        allowed = version.allowed(where)
        depth = config.top_n
        tokens = [version.tokenizer(q) for q in questions]
        found: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
        if "lexical" in config.routes:
            found["lexical"] = [version.search_lexical(t, depth, where, allowed) for t in tokens]
        clock("lexical")
        vectors = self.embedder.encode_queries(list(questions))
        clock("encode")
        if "dense" in config.routes:
            found["dense"] = [version.dense.search(v, depth, allowed) for v in vectors]
        clock("dense")
        routes = {r: [[i.decode() for i in version.ids[rows]] for rows, _ in results] for r, results in found.items()}
        fused = rrf([ids for lists in routes.values() for ids in lists], config.rrf_k)[: config.top_n]
        clock("fuse")
        rows = version.rows_of([chunk_id for chunk_id, _ in fused])
        chunks, held = version.children_and_tokens(rows)
        features = _features(version, tokens, vectors, rows, held)
        per_route = _route_hits(found, version)
        candidates = [
            Candidate(
                hit=Hit(chunk_id=chunk_id, rank=rank, score=score, routes=per_route[chunk_id]),
                chunk=chunk,
                features={name: float(values[rank - 1]) for name, values in features.items()},
            )
            for rank, ((chunk_id, score), chunk) in enumerate(zip(fused, chunks, strict=True), 1)
        ]
        clock("features")
        return Retrieval(candidates, routes, seconds)


def _route_hits(
    found: dict[str, list[tuple[np.ndarray, np.ndarray]]], version: IndexVersion
) -> dict[str, dict[str, RouteHit]]:
    """For each chunk the best rank that each route gave it over the sub-questions."""
    out: dict[str, dict[str, RouteHit]] = {}
    for route, results in found.items():
        for rows, scores in results:
            for rank, (chunk_id, score) in enumerate(zip(version.ids[rows], scores, strict=True), 1):
                hits = out.setdefault(chunk_id.decode(), {})
                if route not in hits or rank < hits[route].rank:
                    hits[route] = RouteHit(rank=rank, score=float(score))
    return out


def _features(
    version: IndexVersion, tokens: Sequence[Sequence[str]], vectors: np.ndarray, rows: np.ndarray, held: list[list[str]]
) -> dict[str, np.ndarray]:
    """Features of every candidate from both indexes; over sub-questions a feature is the maximum.

    ``*_share`` are taken within the (sub-)question: lexical by its maximum, cosine between its minimum and maximum.
    """
    if not len(rows):
        return {}
    out: dict[str, np.ndarray] = {}
    for query_tokens, vector in zip(tokens, vectors, strict=True):
        one = version.features(query_tokens, vector, rows, held)
        one["lexical_share"] = one["lexical"] / (one["lexical"].max() or 1.0)
        span = np.ptp(one["cosine"])
        one["cosine_share"] = (one["cosine"] - one["cosine"].min()) / span if span > 0 else np.zeros(len(rows))
        out = {name: np.maximum(out[name], values) if out else values for name, values in one.items()}
    return out


class _Clock:
    """Adds the seconds since its last call to a stage."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self._seconds, self._last = seconds, time.perf_counter()

    def __call__(self, stage: str) -> None:
        now = time.perf_counter()
        self._seconds[stage] += now - self._last
        self._last = now

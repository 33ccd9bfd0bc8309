"""Rerank Top-N children, keep Top-M, and map them to their parents for the generator.

The reranker reads children (a cross-encoder given parents reads only their first 400 tokens or so); the generator
reads parents.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ragbuild.core.records import Candidate, Chunk
from ragbuild.index.versions import IndexVersion
from ragbuild.models.rerankers import Reranker


def rerank(query: str, candidates: Sequence[Candidate], reranker: Reranker) -> list[Candidate]:
    """All candidates with their score, by (-score, id). `query` is the whole question, also when it was split."""
    scores = reranker.score(query, candidates)
    if len(scores) != len(candidates) or not np.isfinite(scores).all():
        raise ValueError(
            f"reranker '{reranker.name}' gave {len(scores)} scores for {len(candidates)}, or NaN among them"
        )
    scored = [c.model_copy(update={"score": float(s)}) for c, s in zip(candidates, scores, strict=True)]
    return sorted(scored, key=lambda c: (-c.score, c.hit.chunk_id))


def to_parents(top_m: Sequence[Candidate], version: IndexVersion) -> list[Chunk]:
    """Parents of the Top-M children, collapsed, in the order of their best child."""
    return version.parents_of(version.rows_of([c.hit.chunk_id for c in top_m]))

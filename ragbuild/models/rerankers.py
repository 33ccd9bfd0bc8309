"""Rerankers: score (query, child) pairs. They read children, since most cross-encoders see only 512 tokens.

`features` is a declared stand-in for a cross-encoder where none can be had, and is called so wherever its figures
appear. It does not fuse routes: it orders the candidates that RRF chose.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from ragbuild.core.config import RerankConfig, RerankWeights
from ragbuild.core.errors import MissingResource
from ragbuild.core.records import Candidate, index_text
from ragbuild.models.embedders import model_path


class Reranker(Protocol):
    """`score` gives one float per candidate, higher is better, in the candidates' order."""

    name: str
    stand_in: bool

    def score(self, query: str, candidates: Sequence[Candidate]) -> np.ndarray: ...


class FeatureReranker:
    """Stand-in: a fixed weighted sum of the lexical score and the cosine, each taken within the query, and coverage.

    ``score = w_l * lexical / max lexical + w_c * (cosine - min) / (max - min) + w_v * coverage``
    """

    name, stand_in = "features", True

    def __init__(self, weights: RerankWeights) -> None:
        self.weights = weights

    def score(self, query: str, candidates: Sequence[Candidate]) -> np.ndarray:
        if not candidates:
            return np.zeros(0)
        lexical, cosine, coverage = (
            np.array([c.features[name] for c in candidates]) for name in ("lexical_share", "cosine_share", "coverage")
        )
        w = self.weights
        return w.lexical * lexical + w.cosine * cosine + w.coverage * coverage


class NoReranker:
    """Keeps the fused order; for measuring what the reranker adds."""

    name, stand_in = "none", False

    def score(self, query: str, candidates: Sequence[Candidate]) -> np.ndarray:
        return np.array([c.hit.score for c in candidates])


class _PairReranker:
    """A model that reads (question, child) pairs; a subclass gives `_raw`, one number a pair."""

    stand_in = False

    def score(self, query: str, candidates: Sequence[Candidate]) -> np.ndarray:
        if not candidates:
            return np.zeros(0)
        pairs = [(query, index_text(c.chunk)) for c in candidates]
        return np.asarray(self._raw(pairs), dtype=np.float64).reshape(len(pairs))

    def _raw(self, pairs: list[tuple[str, str]]) -> Any:
        raise TypeError(f"{type(self).__name__} scores no pairs")


class CrossEncoderReranker(_PairReranker):
    """Any sentence-transformers CrossEncoder: a hub id or a local folder."""

    def __init__(self, name: str, local_files_only: bool) -> None:
        from sentence_transformers import CrossEncoder

        self.name = name
        try:
            self._model = CrossEncoder(name, local_files_only=local_files_only)
        except (OSError, ValueError) as error:
            raise MissingResource(_no_reranker(name, error)) from error

    def _raw(self, pairs: list[tuple[str, str]]) -> Any:
        return self._model.predict(pairs, show_progress_bar=False)


class FlagReranker(_PairReranker):
    """bge-reranker through FlagEmbedding: a hub id or a local folder."""

    def __init__(self, name: str, local_files_only: bool) -> None:
        from FlagEmbedding import FlagReranker as Model

        self.name = name
        path = model_path("reranker", name, local_files_only)
        try:
            self._model = Model(path, use_fp16=False)
        except (OSError, ValueError) as error:
            raise MissingResource(_no_reranker(name, error)) from error

    def _raw(self, pairs: list[tuple[str, str]]) -> Any:
        return self._model.compute_score(pairs)


def _no_reranker(name: str, error: Exception) -> str:
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return f"reranker '{name}' could not be loaded ({first}). Give a local folder, or -p rerank.model=features"


def load_reranker(config: RerankConfig, local_files_only: bool = True) -> Reranker:
    """The reranker that ``rerank.model`` names. Raises MissingResource (exit 5)."""
    if config.model == "features":
        return FeatureReranker(config.weights)
    if config.model == "none":
        return NoReranker()
    if config.model.startswith("flag:"):
        return FlagReranker(config.model.removeprefix("flag:"), local_files_only)
    return CrossEncoderReranker(config.model, local_files_only)

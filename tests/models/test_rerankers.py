"""Rerankers: the stand-in by hand; hub models, random and tiny, through their own libraries."""

from __future__ import annotations

import numpy as np
import pytest

from ragbuild.core.config import RerankConfig, RerankWeights
from ragbuild.core.errors import MissingResource
from ragbuild.core.records import Candidate, Hit, index_text
from ragbuild.models.rerankers import (
    CrossEncoderReranker,
    FeatureReranker,
    FlagReranker,
    NoReranker,
    load_reranker,
)
from tests.conftest import make_chunks

HEAVY = pytest.mark.xdist_group("heavy models")
TEXTS = ["reset admin password", "license expired", "证 书 过 期", "reset " * 600]
CHUNKS = [c for c in make_chunks(TEXTS) if not c.is_parent]


def candidates(**features: list[float]) -> list[Candidate]:
    hits = [Hit(chunk_id=c.chunk_id, rank=i + 1, score=1 / (61 + i)) for i, c in enumerate(CHUNKS)]
    rows = [{name: values[i] for name, values in features.items()} for i in range(len(CHUNKS))]
    return [Candidate(hit=h, chunk=c, features=f) for h, c, f in zip(hits, CHUNKS, rows, strict=True)]


def test_features_by_hand():
    """w_l * lexical / max + w_c * (cosine - min) / (max - min) + w_v * coverage; the shares are taken before."""
    given = candidates(lexical_share=[1.0, 0.5, 0, 0], cosine_share=[0.2, 1.0, 0.5, 0], coverage=[1.0, 0.5, 0, 0.25])
    reranker = FeatureReranker(RerankWeights(lexical=2.0, cosine=1.0, coverage=0.4))
    assert reranker.score("any", given).tolist() == pytest.approx([2.0 + 0.2 + 0.4, 1.0 + 1.0 + 0.2, 0.5, 0.1])
    assert reranker.stand_in and reranker.name == "features"
    assert reranker.score("any", []).tolist() == []


def test_none_keeps_the_fused_order():
    scores = NoReranker().score("any", candidates())
    assert scores.tolist() == pytest.approx([1 / 61, 1 / 62, 1 / 63, 1 / 64])
    assert not NoReranker.stand_in


@HEAVY
@pytest.mark.parametrize("prefix", ["", "flag:"])
def test_hub_rerankers_from_a_local_folder(tiny_reranker, prefix: str):
    reranker = load_reranker(RerankConfig(model=f"{prefix}{tiny_reranker}"))
    assert type(reranker) is (FlagReranker if prefix else CrossEncoderReranker)
    assert reranker.name == str(tiny_reranker) and not reranker.stand_in
    scores = reranker.score("reset password", candidates())
    assert scores.shape == (4,) and scores.dtype == np.float64 and np.isfinite(scores).all()
    assert len(set(scores.round(9).tolist())) == 4
    alone = [reranker.score("reset password", candidates()[i : i + 1])[0] for i in range(4)]
    assert scores == pytest.approx(alone, abs=1e-4), "in the candidates' order, whatever the batch"
    assert reranker.score("reset password", []).tolist() == []


@HEAVY
def test_both_libraries_order_alike(tiny_reranker):
    """The one gives logits, the other what their sigmoid gives; the order is the same."""
    flag = load_reranker(RerankConfig(model=f"flag:{tiny_reranker}")).score("backup", candidates()[:3])
    cross = load_reranker(RerankConfig(model=str(tiny_reranker))).score("backup", candidates()[:3])
    assert np.argsort(flag).tolist() == np.argsort(cross).tolist()
    assert 1 / (1 + np.exp(-flag)) == pytest.approx(cross, abs=1e-3)


@HEAVY
def test_a_reranker_reads_the_text_that_is_searched(tiny_reranker):
    reranker = load_reranker(RerankConfig(model=str(tiny_reranker)))
    direct = reranker._model.predict([("reset", index_text(c)) for c in CHUNKS])
    assert reranker.score("reset", candidates()) == pytest.approx(direct, abs=1e-5)


@HEAVY
@pytest.mark.parametrize(
    "model", ["BAAI/bge-reranker-v2-m3", "flag:BAAI/bge-reranker-v2-m3", "/no/such/folder", "flag:/no/such"]
)
def test_a_reranker_that_is_not_here_names_what_to_do(model: str):
    with pytest.raises(MissingResource, match="reranker.*could not be loaded"):
        load_reranker(RerankConfig(model=model))


def test_names():
    assert isinstance(load_reranker(RerankConfig()), FeatureReranker)
    assert isinstance(load_reranker(RerankConfig(model="none")), NoReranker)

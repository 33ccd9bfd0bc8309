"""Fusion by hand and by property; hybrid retrieval and reranking on a small index."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragbuild.core.config import RerankConfig, RerankWeights, RetrieveConfig, load_config
from ragbuild.index.filters import EVERYTHING, Filter
from ragbuild.index.staging import write_version
from ragbuild.index.versions import IndexVersion
from ragbuild.models.rerankers import FeatureReranker, NoReranker
from ragbuild.online.rerank import rerank, to_parents
from ragbuild.online.retrieve import Retriever, rrf
from tests.conftest import FakeEmbedder, make_chunks, make_document

rankings = st.lists(st.lists(st.sampled_from("abcdefgh"), max_size=10), max_size=6)

# --- RRF -------------------------------------------------------------------------------------------------------------


def test_by_hand():
    fused = rrf([["a", "b", "c"], ["b", "d", "a"]])
    assert fused == [
        ("b", pytest.approx(1 / (60 + 2) + 1 / (60 + 1))),
        ("a", pytest.approx(1 / (60 + 1) + 1 / (60 + 3))),
        ("d", pytest.approx(1 / (60 + 2))),
        ("c", pytest.approx(1 / (60 + 3))),
    ]
    assert rrf([["a"], ["b"]], k=1) == [("a", 0.5), ("b", 0.5)], "a tie: by id"
    assert rrf([]) == [] == rrf([[], []])


def test_equal_ids_within_a_ranking_are_collapsed_before_fusion():
    """Chunks that share an id must not inflate a score, and those behind them move up."""
    assert rrf([["a", "a", "b", "a"]]) == rrf([["a", "b"]])


@given(rankings, st.integers(1, 100))
def test_equals_the_formula(lists, k: int):
    fused = dict(rrf(lists, k))
    assert set(fused) == {x for ranking in lists for x in ranking}
    for item, score in fused.items():
        ranks = [list(dict.fromkeys(ranking)).index(item) + 1 for ranking in lists if item in ranking]
        assert score == pytest.approx(sum(1 / (k + r) for r in ranks))


@given(rankings, st.randoms(use_true_random=False))
def test_the_order_of_the_rankings_does_not_matter(lists, rng):
    shuffled = rng.sample(lists, len(lists))
    assert rrf(shuffled) == rrf(lists), "to the last bit, so that a tie is a tie"
    assert rrf(lists) == sorted(rrf(lists), key=lambda pair: (-pair[1], pair[0]))


@given(st.permutations("abcd"), st.permutations("abcd"), st.permutations("abcd"))
def test_items_with_equal_ranks_tie_and_are_ordered_by_id(a, b, c):
    x = [*a[:2], "x", *a[2:]], [*b[:1], "x", *b[1:]], [*c, "x"]
    y = [*b[:1], "y", *b[1:]], [*c, "y"], [*a[:2], "y", *a[2:]]
    scores = dict(rrf([*x, *y]))
    assert scores["x"] == scores["y"]
    order = [item for item, _ in rrf([*x, *y])]
    assert order.index("x") < order.index("y")


@given(st.permutations("abcdef"), st.permutations("abcdef"), st.integers(1, 5))
def test_a_better_rank_never_lowers_a_score(one, other, place: int):
    moved = [*one]
    item = moved.pop(place)
    moved.insert(place - 1, item)
    assert dict(rrf([moved, other]))[item] > dict(rrf([one, other]))[item]


# --- hybrid retrieval ------------------------------------------------------------------------------------------------

GUIDE = make_document("guide", product_model=["LG-500"])
OLD = make_document("guide", doc_version="v3.4", status="legacy", product_model=["LG-500"])
FAQ = make_document("faq", language="zh", doc_type="faq")
CHUNKS = [
    *make_chunks(["Reset the admin password in the console.", "The license expires after a year."], GUIDE, "a"),
    *make_chunks(["Back up the configuration every night.", "Reset needs a console cable."], GUIDE, "b"),
    *make_chunks(["Reset the admin password with the old console."], OLD, "c"),
    *make_chunks(["重置管理员密码的步骤。", "证书过期后怎么更新？"], FAQ, "d"),
]


@pytest.fixture(scope="module")
def version(tmp_path_factory) -> IndexVersion:
    folder, embedder = tmp_path_factory.mktemp("indexes"), FakeEmbedder()
    write_version(
        folder, CHUNKS, [GUIDE, OLD, FAQ], [], config=load_config(), encode=embedder.encode_documents,
        embedder={"name": "fake", "dim": 64},
    )  # fmt: skip
    return IndexVersion(folder)


def retriever(version: IndexVersion, **config) -> Retriever:
    return Retriever(version, FakeEmbedder(), RetrieveConfig(**config))


def ids(candidates) -> list[str]:
    return [c.hit.chunk_id for c in candidates]


def test_candidates_are_the_fusion_of_both_routes(version: IndexVersion):
    found = retriever(version)(["reset the admin password"])
    assert set(found.routes) == {"lexical", "dense"}
    (lexical,), (dense,) = found.routes["lexical"], found.routes["dense"]
    assert ids(found.candidates) == [i for i, _ in rrf([lexical, dense])]
    for rank, candidate in enumerate(found.candidates, 1):
        hit = candidate.hit
        assert hit.rank == rank and hit.chunk_id == candidate.chunk.chunk_id
        assert {r: h.rank for r, h in hit.routes.items()} == {
            route: ranked.index(hit.chunk_id) + 1
            for route, ranked in (("lexical", lexical), ("dense", dense))
            if hit.chunk_id in ranked
        }
        assert hit.score == pytest.approx(sum(1 / (60 + h.rank) for h in hit.routes.values()))
    assert "c-c-000" not in ids(found.candidates), "legacy is filtered out by default"
    assert set(found.seconds) == {"lexical", "encode", "dense", "fuse", "features"}


def test_a_hit_that_scored_zero_is_no_hit(version: IndexVersion):
    found = retriever(version)(["license"])
    assert found.routes["lexical"] == [["c-a-001"]]
    assert retriever(version)(["zzz"]).routes["lexical"] == [[]]
    assert len(retriever(version)(["zzz"]).candidates) == 6, "the dense route ranks all that pass"


def test_features_are_complete_whichever_route_found_it(version: IndexVersion):
    query = "重置密码"
    found = retriever(version)([query])
    tokens, vector = version.tokenizer(query), FakeEmbedder().encode_queries([query])[0]
    for candidate in found.candidates:
        row = version.rows_of([candidate.hit.chunk_id])
        features = candidate.features
        assert set(features) == {"lexical", "cosine", "coverage", "lexical_share", "cosine_share"}
        assert features["cosine"] == pytest.approx(float(version.dense.score(vector, row)[0]), abs=1e-6)
        assert features["coverage"] == pytest.approx(version.features(tokens, vector, row)["coverage"][0])
        lexical = candidate.hit.routes.get("lexical")
        assert features["lexical"] == pytest.approx(lexical.score if lexical else 0)
    cosines = [c.features["cosine_share"] for c in found.candidates]
    assert (min(cosines), max(cosines)) == (0, 1)
    assert max(c.features["lexical_share"] for c in found.candidates) == 1


def test_sub_questions_are_fused_and_a_feature_is_their_maximum(version: IndexVersion):
    parts = ["reset the admin password", "license"]
    found = retriever(version)(parts)
    assert [len(found.routes[r]) for r in ("lexical", "dense")] == [2, 2]
    assert ids(found.candidates) == [i for i, _ in rrf([x for r in found.routes.values() for x in r])]
    alone = [{c.hit.chunk_id: c for c in retriever(version)([p]).candidates} for p in parts]
    for candidate in found.candidates:
        for name in ("lexical", "cosine", "coverage"):
            best = max(one[candidate.hit.chunk_id].features[name] for one in alone)
            assert candidate.features[name] == pytest.approx(best, abs=1e-6)
        for route, hit in candidate.hit.routes.items():
            ranks = [one[candidate.hit.chunk_id].hit.routes.get(route) for one in alone]
            assert hit.rank == min(h.rank for h in ranks if h)


def test_top_n_cuts_after_fusion(version: IndexVersion):
    found = retriever(version, top_n=2)(["reset the admin password"])
    assert len(found.candidates) == 2 and [c.hit.rank for c in found.candidates] == [1, 2]
    assert all(len(ranked) <= 2 for lists in found.routes.values() for ranked in lists)


def test_one_route_alone_keeps_its_order_and_all_features(version: IndexVersion):
    for route in ("lexical", "dense"):
        found = retriever(version, routes=[route])(["reset the admin password"])
        assert list(found.routes) == [route] and ids(found.candidates) == found.routes[route][0]
        assert all(c.hit.routes.keys() == {route} and "cosine" in c.features for c in found.candidates)


def test_rrf_k_is_a_setting(version: IndexVersion):
    found = retriever(version, rrf_k=1, routes=["dense"])(["reset"])
    assert [c.hit.score for c in found.candidates][:2] == [pytest.approx(1 / 2), pytest.approx(1 / 3)]


def test_filters(version: IndexVersion):
    query = ["reset the admin password"]
    everything = retriever(version)(query, EVERYTHING)
    assert "c-c-000" in ids(everything.candidates) and len(everything.candidates) == 7
    faq = retriever(version)(query, Filter(doc_type=("faq",)))
    assert sorted(ids(faq.candidates)) == ["c-d-000", "c-d-001"]
    assert retriever(version)(query, Filter(kb=("moon",))).candidates == []


def test_nothing_is_encoded_but_the_question(version: IndexVersion):
    embedder = FakeEmbedder()
    Retriever(version, embedder, RetrieveConfig())(["one", "two"])
    assert embedder.encoded == ["one", "two"]


# --- rerank ----------------------------------------------------------------------------------------------------------


class Fixed:
    """A reranker that gives what it is told."""

    name, stand_in = "fixed", False

    def __init__(self, scores: list[float]) -> None:
        self.scores, self.queries = scores, []

    def score(self, query, candidates):
        self.queries.append(query)
        return np.array(self.scores)


def test_rerank_orders_by_score_and_id_and_changes_nothing(version: IndexVersion):
    candidates = retriever(version)(["reset the admin password"]).candidates
    before = list(candidates)
    reranker = Fixed([0.5] * len(candidates))
    assert ids(rerank("whole question", candidates, reranker)) == sorted(ids(candidates)), "ties: by id"
    assert reranker.queries == ["whole question"]
    up = rerank("q", candidates, Fixed(list(range(len(candidates)))))
    assert ids(up) == ids(candidates)[::-1] and [c.score for c in up] == sorted((c.score for c in up), reverse=True)
    assert candidates == before and all(c.score is None for c in candidates)
    assert rerank("q", candidates, NoReranker()) == sorted(
        [c.model_copy(update={"score": c.hit.score}) for c in candidates], key=lambda c: (-c.score, c.hit.chunk_id)
    )
    assert rerank("q", [], FeatureReranker(RerankWeights())) == []


@pytest.mark.parametrize("scores", [[float("nan")] * 6, [1.0], [float("inf")] * 6])
def test_bad_scores_are_refused(version: IndexVersion, scores: list[float]):
    candidates = retriever(version)(["reset the admin password"]).candidates
    with pytest.raises(ValueError, match="reranker 'fixed' gave"):
        rerank("q", candidates, Fixed(scores))


def test_the_stand_in_puts_the_answer_first(version: IndexVersion):
    reranker = FeatureReranker(RerankConfig().weights)
    for query, first in (("reset admin password", "c-a-000"), ("license expires", "c-a-001"), ("证书过期", "c-d-001")):
        assert ids(rerank(query, retriever(version)([query]).candidates, reranker))[0] == first


def test_children_become_parents_collapsed_in_the_order_of_their_best_child(version: IndexVersion):
    by_id = {c.hit.chunk_id: c for c in retriever(version)(["reset the admin password"], EVERYTHING).candidates}
    top = [by_id[i] for i in ("c-b-001", "c-a-000", "c-b-000", "c-d-001", "c-a-001")]
    parents = to_parents(top, version)
    assert [p.chunk_id for p in parents] == ["p-b", "p-a", "p-d"]
    assert all(p.is_parent for p in parents)
    assert to_parents([], version) == []

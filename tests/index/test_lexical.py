"""BM25: the formula by hand, an independent brute force, and both engines against each other."""

from __future__ import annotations

import json
import math
from collections import Counter
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragbuild.core.text import WordTokenizer
from ragbuild.index.filters import EVERYTHING, FIELDS, Filter
from ragbuild.index.lexical import RankBM25Index, TantivyIndex, best, bm25_scores, lucene_idf
from tests.conftest import SHARED

words = st.sampled_from("alpha beta gamma delta 登录 证书 lg-500".split())
corpora = st.lists(st.lists(words, max_size=8), min_size=1, max_size=12)
queries = st.lists(st.one_of(words, st.just("unseen")), max_size=5)
NONE = dict.fromkeys(FIELDS, ("x",))


def brute(documents, query, k1=1.2, b=0.75) -> list[float]:
    """BM25 with Lucene's idf, document by document, term by term; written without looking at the package."""
    n = len(documents)
    average = sum(len(d) for d in documents) / n
    scores = []
    for document in documents:
        score = 0.0
        for term in query:
            tf = document.count(term)
            df = sum(term in d for d in documents)
            if tf:
                idf = math.log(1 + (n - df + 0.5) / (df + 0.5))
                score += idf * tf * (k1 + 1) / (tf + k1 * (1 - b + b * len(document) / average))
        scores.append(score)
    return scores


def rank_index(documents, **options) -> RankBM25Index:
    return RankBM25Index(documents, np.arange(len(documents)), **options)


def tantivy_index(folder: Path, documents, fields=None) -> TantivyIndex:
    TantivyIndex.build(folder, ((i, tokens, fields[i] if fields else NONE) for i, tokens in enumerate(documents)))
    index = TantivyIndex(folder, np.arange(len(documents)), np.arange(len(documents)))
    index.average_length = sum(map(len, documents)) / max(1, len(documents))
    return index


def search(index, query, k=10, allowed=None, where=EVERYTHING) -> tuple[list[int], list[float]]:
    rows, scores = index.search(query, k, allowed, where)
    return rows.tolist(), scores.tolist()


# --- the formula -----------------------------------------------------------------------------------------------------


def test_three_documents_by_hand():
    documents = [["a", "b"], ["a", "a", "c", "d"], ["e", "f", "g"]]  # lengths 2, 4, 3; on average 3
    rows, scores = search(rank_index(documents), ["a"])
    idf = math.log(1 + (3 - 2 + 0.5) / (2 + 0.5))  # two of three documents hold it
    first = idf * 1 * 2.2 / (1 + 1.2 * (0.25 + 0.75 * 2 / 3))
    second = idf * 2 * 2.2 / (2 + 1.2 * (0.25 + 0.75 * 4 / 3))
    assert idf == pytest.approx(math.log(1.6))
    assert rows == [1, 0], "the third document scores zero and is no hit"
    assert scores == pytest.approx([second, first])
    assert scores == pytest.approx([0.5909, 0.5442], abs=1e-4)


@given(st.integers(1, 10**6), st.integers(0, 10**6))
def test_idf_is_always_positive(n: int, frequency: int):
    assert lucene_idf(n, frequency) > 0
    assert lucene_idf(n, frequency) >= lucene_idf(n, frequency + 1)


def test_a_token_in_exactly_half_of_the_documents_still_counts():
    rows, scores = search(rank_index([["a"], ["a"], ["b"], ["c"]]), ["a"])
    assert rows == [0, 1] and scores[0] == scores[1] > 0, "rank_bm25's own idf is zero here"


def test_a_query_that_meets_nothing_finds_nothing(tmp_path):
    """The famous fault of Chinese tutorials: unsegmented text, every query answers with the same last documents."""
    documents = [["如何重置管理员密码"], ["如何备份配置"], ["证书过期怎么办"]]
    for index in (rank_index(documents), tantivy_index(tmp_path, documents)):
        assert search(index, ["重置密码"]) == ([], [])
        assert search(index, []) == ([], [])
        assert search(index, ["如何备份配置"])[0] == [1]


def test_nothing_indexed():
    for documents in ([], [[]], [[], []]):
        index = rank_index(documents)
        assert search(index, ["a"]) == ([], []) and index.idf("a") == 0


def test_an_empty_document_among_others():
    for b in (0.0, 0.75, 1.0):
        assert search(rank_index([["a"], [], ["b"]], b=b), ["a"])[0] == [0]


@given(corpora, queries, st.sampled_from([(1.2, 0.75), (0.9, 0.4), (2.0, 0.0), (1.5, 1.0)]))
def test_rank_bm25_equals_brute_force(documents, query, parameters):
    k1, b = parameters
    if not any(documents):
        return
    expected = brute(documents, query, k1, b)
    rows, scores = search(rank_index(documents, k1=k1, b=b), query, k=len(documents))
    assert sorted(rows) == [i for i, s in enumerate(expected) if s > 0]
    assert scores == pytest.approx([expected[r] for r in rows])
    assert list(zip(np.negative(scores), rows, strict=True)) == sorted(zip(np.negative(scores), rows, strict=True))


@given(corpora, queries)
def test_scores_of_given_documents_equal_those_of_the_search(documents, query):
    if not any(documents):
        return
    index = rank_index(documents)
    scores, coverage = bm25_scores(query, documents, index, 1.2, 0.75)
    assert scores == pytest.approx(brute(documents, query))
    assert all(0 <= c <= 1 + 1e-9 for c in coverage)
    for document, covered in zip(documents, coverage, strict=True):
        assert (covered > 1 - 1e-9) == bool(query and set(query) <= set(document))
        assert (covered > 0) == bool(set(query) & set(document))


def test_coverage_by_hand():
    """A token that no document holds weighs most, so a question about something unknown is not covered."""
    documents = [["a", "b"], ["a", "c"]]
    index = rank_index(documents)
    _, coverage = bm25_scores(["a", "b", "unseen"], documents, index, 1.2, 0.75)
    a, b, unseen = math.log(1 + 0.5 / 2.5), math.log(1 + 1.5 / 1.5), math.log(1 + 2.5 / 0.5)
    assert coverage == pytest.approx([(a + b) / (a + b + unseen), a / (a + b + unseen)])
    assert bm25_scores([], documents, index, 1.2, 0.75)[1].tolist() == [0, 0]


# --- order -----------------------------------------------------------------------------------------------------------


def test_ties_are_broken_by_id_and_not_by_row(tmp_path):
    documents = [["a"]] * 40
    id_rank = np.arange(40)[::-1].copy()
    assert RankBM25Index(documents, id_rank).search(["a"], 3, None, EVERYTHING)[0].tolist() == [39, 38, 37]
    TantivyIndex.build(tmp_path, ((i, tokens, NONE) for i, tokens in enumerate(documents)))
    index = TantivyIndex(tmp_path, np.arange(40), id_rank)
    assert index.search(["a"], 3, None, EVERYTHING)[0].tolist() == [39, 38, 37], "40 ties: more than are over-fetched"


@given(st.lists(st.integers(0, 4), max_size=30), st.integers(0, 35), st.randoms(use_true_random=False))
def test_best_equals_a_full_sort(scores, k, rng):
    id_rank = np.array(rng.sample(range(len(scores)), len(scores)), np.int64)
    rows = np.arange(len(scores))
    found, found_scores = best(rows, np.array(scores, float), k, id_rank)
    expected = sorted(rows.tolist(), key=lambda r: (-scores[r], id_rank[r]))[:k]
    assert found.tolist() == expected
    assert found_scores.tolist() == [scores[r] for r in expected]


# --- tantivy ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_both_engines_give_one_order_on_documents_of_one_length(tmp_path, seed: int):
    rng = np.random.default_rng(seed)
    vocabulary = [f"t{i}" for i in range(25)]
    weights = 1 / np.arange(1, 26)
    documents = [rng.choice(vocabulary, 12, p=weights / weights.sum()).tolist() for _ in range(120)]
    rank, tantivy = rank_index(documents), tantivy_index(tmp_path, documents)
    assert [tantivy.idf(t) for t in vocabulary] == pytest.approx([rank.idf(t) for t in vocabulary])
    for _ in range(15):
        query = rng.choice([*vocabulary, "unseen"], rng.integers(1, 6)).tolist()
        a_rows, a_scores = search(rank, query, 120)
        b_rows, b_scores = search(tantivy, query, 120)
        assert b_rows == a_rows
        assert b_scores == pytest.approx(a_scores, rel=1e-5, abs=1e-6)
        assert search(tantivy, query, 7)[0] == a_rows[:7]


def test_a_query_is_never_parsed(tmp_path):
    index = tantivy_index(tmp_path, [["a"], ["a:b"], ["(a", "AND", "b)"], ['"', "*", "x"]])
    for tokens, row in ((["a:b"], 1), (["(a"], 2), (["*"], 3), (["b)", "AND"], 2)):
        assert search(index, tokens)[0] == [row]
    assert search(index, ["+a", "-b", "body:a", "a*", "[a TO b]"]) == ([], [])


def test_a_token_with_white_space_is_one_token(tmp_path):
    index = tantivy_index(tmp_path, [["two words"], ["two"], ["words"]])
    assert search(index, ["two words"])[0] == [0]
    assert search(index, ["two"])[0] == [1]


# --- filters ---------------------------------------------------------------------------------------------------------

FIELD_VALUES = {
    "status": ("active", "legacy"), "product_model": ("LG-200", "LG-500"), "doc_version": ("v3.4", "v4.2"),
    "doc_type": ("guide", "faq"), "kb": ("gateways", "portal"), "tag": ("网络", "backup"),
}  # fmt: skip


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("engine", ["rank_bm25", "tantivy"])
def test_a_filtered_search_still_returns_k_hits(tmp_path, engine: str, field: str):
    """The 100 best documents do not pass; the filter comes before the ranking, so k others are found."""
    common, rare = FIELD_VALUES[field]
    values = [common] * 100 + [rare] * 20
    documents = [["a", "a", "b"]] * 100 + [["a", "c", "d"]] * 20
    fields = [{f: (FIELD_VALUES[f][0],) for f in FIELDS} | {field: (v,)} for v in values]
    if field == "product_model":
        fields[-1][field] = ("all",)
    where = EVERYTHING.with_(**{field: (rare,)})
    allowed = np.array([v == rare for v in values])
    index = rank_index(documents) if engine == "rank_bm25" else tantivy_index(tmp_path, documents, fields)
    assert search(index, ["a"], 10, None, EVERYTHING)[0] == list(range(10))
    rows, filtered = search(index, ["a"], 10, allowed, where)
    assert rows == list(range(100, 110)), "by (-score, id) among those that pass"
    assert search(index, ["a"], 50, allowed, where)[0] == list(range(100, 120)), "'all' passes every model filter"
    everything = dict(zip(*search(index, ["a"], 120), strict=True))
    assert filtered == pytest.approx([everything[r] for r in rows], rel=1e-6), "a filter does not change a score"
    assert search(index, ["a"], 5, np.zeros(120, bool), EVERYTHING.with_(**{field: ("unknown",)}))[0] in ([], [119])


def test_filters_combine(tmp_path):
    fields = [
        NONE | {"status": (s,), "tag": t} for s, t in [("active", ("x", "y")), ("active", ("z",)), ("legacy", ("x",))]
    ]
    index = tantivy_index(tmp_path, [["a"]] * 3, fields)
    mask = np.ones(3, bool)
    assert search(index, ["a"], 5, mask, Filter(tag=("x",)))[0] == [0]
    assert search(index, ["a"], 5, mask, Filter(status=("active", "legacy"), tag=("x", "z")))[0] == [0, 1, 2]
    assert search(index, ["a"], 5, mask, Filter())[0] == [0, 1]
    assert search(index, ["b"], 5, mask, Filter())[0] == []


# --- a real corpus ---------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def scifact() -> tuple[list[list[str]], list[list[str]]]:
    folder = SHARED / "bench" / "scifact"
    if not folder.is_dir():
        pytest.skip("the scifact data set is not beside this checkout")
    tokenizer = WordTokenizer()

    def rows(name: str) -> list[dict]:
        return [json.loads(line) for line in (folder / name).read_text(encoding="utf-8").splitlines()]

    documents = [tokenizer(f"{row['title']} {row['text']}") for row in rows("corpus.jsonl")]
    return documents, [tokenizer(row["text"]) for row in rows("queries.jsonl")[:300]]


def test_both_engines_agree_on_scifact(tmp_path):
    documents, questions = scifact()
    tantivy = tantivy_index(tmp_path, documents)
    # Lucene's formula again, over postings: rank_bm25 would take a minute for 300 questions
    postings: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    wanted = {t for q in questions for t in q}
    lists: dict[str, list[tuple[int, int]]] = {}
    for i, document in enumerate(documents):
        for token, n in Counter(t for t in document if t in wanted).items():
            lists.setdefault(token, []).append((i, n))
    postings = {t: tuple(np.array(pairs).T) for t, pairs in lists.items()}
    lengths = np.array([len(d) for d in documents])
    overlap = []
    for question in questions:
        scores = np.zeros(len(documents))
        for token in question:
            if token in postings:
                at, tf = postings[token]
                weight = 1.2 * (0.25 + 0.75 * lengths[at] / lengths.mean())
                scores[at] += lucene_idf(len(documents), len(at)) * tf * 2.2 / (tf + weight)
        rows = np.flatnonzero(scores > 0)
        exact = best(rows, scores[rows], 10, np.arange(len(documents)))[0]
        found = tantivy.search(question, 10, None, EVERYTHING)[0]
        overlap.append(len(set(exact.tolist()) & set(found.tolist())) / max(1, len(exact)))
    assert np.mean(overlap) >= 0.9
    rank = rank_index(documents)
    for question in questions[:5]:
        assert rank.idf(question[0]) == pytest.approx(tantivy.idf(question[0]))
        near = set(search(rank, question)[0]) & set(search(tantivy, question)[0])
        assert len(near) >= 7, "the length of a document is rounded in tantivy"

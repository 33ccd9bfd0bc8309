"""The lexical index: BM25 over tokens that were cut once, when the index was made.

Two engines on the same tokens and with Lucene's formula, so that they give the same order up to tantivy's rounding of
document lengths:

    idf(t) = ln(1 + (N - df + 0.5) / (df + 0.5))
    score  = sum over t of idf(t) * tf * (k1 + 1) / (tf + k1 * (1 - b + b * length / average length))

`rank_bm25` is readable and takes up to 20,000 chunks; `tantivy` is for more, and wherever documents come one by one.
Their scores are never mixed. (Robertson and Zaragoza 2009; the positive idf is Lucene's.)
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ragbuild.core.errors import MissingResource
from ragbuild.core.store import link_tree
from ragbuild.index.filters import FIELDS, Filter

NEAR = 2e-6  # relative: some twenty terms added up in 32-bit floats


def lucene_idf(n_documents: int, frequency: int) -> float:
    """Always positive, unlike the original BM25 idf, also where a frequency still counts deleted documents."""
    return math.log(1 + (max(n_documents, frequency) - frequency + 0.5) / (frequency + 0.5))


class LexicalIndex(Protocol):
    """`search` returns rows and scores by (-score, id), hits only: a document that scored zero is no hit."""

    n_documents: int
    average_length: float

    def search(
        self, tokens: Sequence[str], k: int, allowed: np.ndarray | None, where: Filter
    ) -> tuple[np.ndarray, np.ndarray]: ...

    def idf(self, token: str) -> float:
        """0 for a token that no document holds."""
        ...

    def rows_with(self, token: str) -> np.ndarray:
        """The rows that hold this token, in no order."""
        ...


def best(rows: np.ndarray, scores: np.ndarray, k: int, id_rank: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The k best by (-score, id); `id_rank[row]` is the row's place in the order of ids.

    Scores that differ by rounding alone (`NEAR`) tie, and get the score of the first of them: engines add up the terms
    of a query in different orders.
    """
    if k < 1 or not len(rows):
        return rows[:0], scores[:0]
    if len(rows) > k:  # keep every tie with the k-th score, so that the id decides and not the partition
        last = np.partition(scores, len(scores) - k)[len(scores) - k]
        keep = scores >= last - NEAR * abs(last)
        rows, scores = rows[keep], scores[keep]
    order = np.argsort(-scores, kind="stable")
    rows, scores = rows[order], scores[order]
    tie = np.concatenate([[0], np.cumsum(-np.diff(scores) > NEAR * np.abs(scores[:-1]))])
    first = np.searchsorted(tie, tie)
    order = np.lexsort((id_rank[rows], tie))[:k]
    return rows[order], scores[first][order]


class RankBM25Index:
    """`rank_bm25.BM25Okapi` with its idf, a method meant to be overridden, replaced by Lucene's."""

    def __init__(
        self, documents: Sequence[Sequence[str]], id_rank: np.ndarray, k1: float = 1.2, b: float = 0.75
    ) -> None:
        """`documents`: the tokens of each row."""
        self.n_documents = len(documents)
        self.average_length = sum(map(len, documents)) / max(1, len(documents))
        self._id_rank = id_rank
        # rank_bm25 divides by the number of documents and by the average length
        self._bm25 = _lucene_bm25(documents, k1, b) if self.average_length else None

    def search(
        self, tokens: Sequence[str], k: int, allowed: np.ndarray | None, where: Filter
    ) -> tuple[np.ndarray, np.ndarray]:
        if self._bm25 is None or not tokens:
            return np.zeros(0, np.int64), np.zeros(0)
        with np.errstate(invalid="ignore"):  # b = 1 and a document without tokens: 0 / 0, which is no hit
            scores = np.asarray(self._bm25.get_scores(list(tokens)), dtype=np.float64)
        hit = scores > 0
        rows = np.flatnonzero(hit if allowed is None else hit & allowed)
        return best(rows, scores[rows], k, self._id_rank)

    def idf(self, token: str) -> float:
        return self._bm25.idf.get(token, 0.0) if self._bm25 else 0.0

    def rows_with(self, token: str) -> np.ndarray:
        counts = self._bm25.doc_freqs if self._bm25 else []
        return np.flatnonzero(np.fromiter((token in c for c in counts), bool, len(counts)))


def _lucene_bm25(documents: Sequence[Sequence[str]], k1: float, b: float) -> Any:
    from rank_bm25 import BM25Okapi

    class LuceneBM25(BM25Okapi):
        def _calc_idf(self, nd: dict[str, int]) -> None:
            self.idf = {token: lucene_idf(self.corpus_size, frequency) for token, frequency in nd.items()}

    return LuceneBM25([list(tokens) for tokens in documents], k1=k1, b=b)


@contextmanager
def _system_errors() -> Iterator[None]:
    """A full or read-only disk is a ValueError of tantivy's: as the OSError that it is."""
    try:
        yield
    except ValueError as error:
        found = re.search(r'\(os error (\d+)\)(?: at path "([^"]*)")?', str(error))
        if found is None:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1])), found[2]) from error


class TantivyIndex:
    """tantivy over pre-cut tokens. Queries are built from term objects, never parsed from what a user typed."""

    def __init__(self, folder: Path, row_of_uid: np.ndarray, id_rank: np.ndarray) -> None:
        """`row_of_uid`: ascending uids; the place of a uid is its row."""
        tantivy = _tantivy()
        self._tantivy, self._uids, self._id_rank = tantivy, row_of_uid, id_rank
        self._index = tantivy.Index.open(str(folder))
        self._schema = self._index.schema
        self._searcher = self._index.searcher()
        self.n_documents = self._searcher.num_docs
        self.average_length = 0.0  # set by the version, which keeps the sum of lengths

    @staticmethod
    @_system_errors()
    def build(folder: Path, rows: Iterable[tuple[int, Sequence[str], dict[str, Sequence[str]]]]) -> None:
        """Write an index of (uid, tokens, filter fields). One writer thread: the same input gives one segment."""
        tantivy = _tantivy()
        folder.mkdir(parents=True, exist_ok=True)
        schema = tantivy.SchemaBuilder().add_text_field("body", tokenizer_name="whitespace", index_option="freq")
        schema = schema.add_unsigned_field("uid", indexed=True, fast=True)
        for field in FIELDS:
            schema = schema.add_text_field(field, tokenizer_name="raw", index_option="basic")
        _write(tantivy.Index(schema.build(), path=str(folder)), rows)

    @staticmethod
    @_system_errors()
    def update(
        former: Path,
        folder: Path,
        gone: Iterable[int],
        rows: Iterable[tuple[int, Sequence[str], dict[str, Sequence[str]]]],
    ) -> None:
        """Write to `folder` the index `former` without the uids of `gone` and with `rows` more.

        Files are shared: tantivy's segments never change once written, and what does change it replaces. Document
        frequencies count deleted documents until their segments are merged.
        """
        TantivyIndex.share(former, folder)
        _write(_tantivy().Index.open(str(folder)), rows, gone)

    @staticmethod
    def share(former: Path, folder: Path) -> None:
        """Make `folder` the same index as `former`, of the same files."""
        link_tree(former, folder, skip=(".tantivy-meta.lock", ".tantivy-writer.lock"))

    def search(
        self, tokens: Sequence[str], k: int, allowed: np.ndarray | None, where: Filter
    ) -> tuple[np.ndarray, np.ndarray]:
        if not tokens or not self.n_documents:
            return np.zeros(0, np.int64), np.zeros(0)
        query = self._query(tokens, where if allowed is not None else None)
        limit = min(self.n_documents, k + 16)
        while True:  # candidates over-fetched: ties with the k-th score are broken by id, not by tantivy's order
            hits = self._searcher.search(query, limit, count=False).hits
            if len(hits) < limit or limit >= self.n_documents or hits[-1][0] < hits[k - 1][0] * (1 - NEAR):
                break
            limit = min(self.n_documents, limit * 4)
        scores = np.fromiter((score for score, _ in hits), np.float64, len(hits))
        uids = np.asarray(self._searcher.fast_field_values("uid", [address for _, address in hits]), dtype=np.int64)
        return best(np.searchsorted(self._uids, uids), scores, k, self._id_rank)

    def _query(self, tokens: Sequence[str], where: Filter | None) -> Any:
        q, occur = self._tantivy.Query, self._tantivy.Occur
        terms = []
        for token, times in Counter(tokens).items():
            term = q.term_query(self._schema, "body", _safe(token), "freq")
            terms.append((occur.Should, q.boost_query(term, float(times)) if times > 1 else term))
        words = q.boolean_query(terms)
        if where is None or not where.conditions():
            return words
        clauses = [(occur.Must, words)]
        for field, values in where.conditions().items():
            options = [(occur.Should, q.term_query(self._schema, field, value, "basic")) for value in values]
            if field == "doc_version":
                options += [(occur.Should, q.term_query(self._schema, "body", _safe(t), "freq")) for t in where.naming]
            clauses.append((occur.Must, q.const_score_query(q.boolean_query(options), 0.0)))
        return q.boolean_query(clauses)

    def idf(self, token: str) -> float:
        frequency = self._searcher.doc_freq("body", _safe(token))
        return lucene_idf(self.n_documents, frequency) if frequency else 0.0

    def rows_with(self, token: str) -> np.ndarray:
        query = self._tantivy.Query.term_query(self._schema, "body", _safe(token), "freq")
        hits = self._searcher.search(query, max(1, self.n_documents), count=False).hits
        uids = self._searcher.fast_field_values("uid", [address for _, address in hits])
        return np.searchsorted(self._uids, np.asarray(uids, dtype=np.int64))


def _write(
    index: Any, rows: Iterable[tuple[int, Sequence[str], dict[str, Sequence[str]]]], gone: Iterable[int] = ()
) -> None:
    """Delete uids, add rows, commit. One writer thread: the same input gives the same segments."""
    tantivy, writer = _tantivy(), index.writer(heap_size=50_000_000, num_threads=1)
    if uids := list(gone):  # by a query: `delete_documents_by_term` makes a signed term, which an unsigned field lacks
        writer.delete_documents_by_query(tantivy.Query.term_set_query(index.schema, "uid", uids))
    for uid, tokens, fields in rows:
        made = tantivy.Document()
        made.add_unsigned("uid", uid)
        made.add_text("body", " ".join(_safe(t) for t in tokens))
        for field in FIELDS:
            for value in fields[field]:
                made.add_text(field, value)
        writer.add_document(made)
    writer.commit()
    writer.wait_merging_threads()


def _safe(token: str) -> str:
    """Tokens go to tantivy's white-space tokenizer, so none may hold white space itself."""
    return token if not any(c.isspace() for c in token) else "_".join(token.split())


def _tantivy():  # type: ignore[no-untyped-def]
    try:
        import tantivy
    except ImportError as error:
        raise MissingResource("pip install tantivy, or set lexical.engine=rank_bm25") from error
    return tantivy


def bm25_scores(
    tokens: Sequence[str], documents: Sequence[Sequence[str]], index: LexicalIndex, k1: float, b: float
) -> tuple[np.ndarray, np.ndarray]:
    """(BM25 score, idf-weighted coverage) of each document for the query `tokens`, from the tokens kept with the index.

    Coverage is the share of the query's idf weight that the document holds, 0 to 1; a token that no document of the
    index holds counts with the idf of a frequency of zero, so that a question about something unknown is not covered.
    """
    query = Counter(tokens)
    idf = {t: index.idf(t) for t in query}
    unknown = lucene_idf(index.n_documents, 0)
    weight = {t: idf[t] or unknown for t in query}
    total = sum(weight.values()) or 1.0
    scores, coverage = np.zeros(len(documents)), np.zeros(len(documents))
    for i, document in enumerate(documents):
        length = 1 - b + b * len(document) / (index.average_length or 1)
        counts = Counter(t for t in document if t in query)
        scores[i] = sum(idf[t] * n * query[t] * (k1 + 1) / (n + k1 * length) for t, n in counts.items())
        coverage[i] = sum(weight[t] for t in counts) / total
    return scores, coverage

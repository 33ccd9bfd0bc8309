"""Chunkers scored by how well what they make can be retrieved: recall, precision and IoU of characters.

A set holds full_documents.jsonl (``_id``, ``title``, ``text``), queries.jsonl and spans.jsonl: the excerpts that answer
each query, as half-open offsets into one document. The measures are those of Smith and Troynikov, "Evaluating Chunking
Strategies for Retrieval" (Chroma, 2024), counted in characters as their `chunking_evaluation` does. E: characters of
the excerpts, C: characters of the k chunks retrieved for the query, in any document, one that lies in two overlapping
chunks counted twice:

    recall = |E ∩ C| / |E|      precision = |E ∩ C| / |C|      IoU = |E ∩ C| / (|C| + |E| - |E ∩ C|)
    precision_omega = |E ∩ W| / |E ∪ W|,  W: characters of every chunk that holds some of E, each counted once

Each character of E counts once above the line. precision_omega needs no retrieval: it is what the chunks alone allow.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, Field, ValidationError

from ragbuild.core.config import Config
from ragbuild.core.errors import InputRefused
from ragbuild.core.records import Chunk, Document
from ragbuild.core.store import error_fields, sha256
from ragbuild.core.text import HAN, TokenCounter, language_of, strip_span
from ragbuild.evaluate.beir import flat_chunks, lines, read_rows
from ragbuild.evaluate.bench import Searcher, embedder_for, indexed
from ragbuild.evaluate.metrics import bootstrap_ci, mean
from ragbuild.offline.chunk import chunk_document

Place = tuple[str, int, int]  # document, start, end
MEASURES = ("recall", "precision", "iou", "precision_omega")
_WORD = re.compile(rf"[{HAN}]\s*|[^\s{HAN}]+\s*|\s+")


class _Reference(BaseModel):
    content: str
    start_index: int = Field(ge=0)
    end_index: int


class _Spans(BaseModel):
    id: str = Field(alias="_id")
    corpus: str
    references: list[_Reference] = Field(min_length=1)


def read_excerpts(path: Path, documents: dict[str, tuple[str, str]]) -> dict[str, list[Place]]:
    """Excerpts by query. Raises InputRefused, with file and line, for one that isn't where it says it is."""
    out: dict[str, list[Place]] = {}
    for place, line in lines(path):
        try:
            row = _Spans.model_validate_json(line)
        except ValidationError as error:
            raise InputRefused(f"{place}: expected _id, corpus and references; {error_fields(error)}") from None
        if row.corpus not in documents:
            raise InputRefused(f"{place}: no document '{row.corpus}' in full_documents.jsonl")
        for r in row.references:
            if not r.content or documents[row.corpus][1][r.start_index : r.end_index] != r.content:
                raise InputRefused(f"{place}: '{row.corpus}' does not hold its excerpt at {r.start_index}")
        out[row.id] = [(row.corpus, r.start_index, r.end_index) for r in row.references]
    return out


def _characters(places: Iterable[Place]) -> set[tuple[str, int]]:
    return {(document, i) for document, start, end in places for i in range(start, end)}


def span_scores(excerpts: Sequence[Place], retrieved: Sequence[Place]) -> tuple[float, float, float]:
    """(recall, precision, IoU) of one query; precision is 0 when nothing was retrieved."""
    wanted, size = _characters(excerpts), sum(end - start for _, start, end in retrieved)
    found = len(wanted & _characters(retrieved))
    return found / len(wanted), found / size if size else 0.0, found / (size + len(wanted) - found)


def precision_omega(excerpts: Sequence[Place], chunks: Iterable[Place]) -> float:
    """The precision of retrieving every chunk that holds some of the excerpts; what no chunk holds lowers it."""
    holding = [c for c in chunks if any(c[0] == d and c[1] < end and start < c[2] for d, start, end in excerpts)]
    wanted, whole = _characters(excerpts), _characters(holding)
    return len(wanted & whole) / len(wanted | whole)


def fixed_windows(text: str, size: int, overlap: int, counter: TokenCounter) -> list[tuple[int, int]]:
    """The plain splitter: runs of whole words (of single Han characters) of at most `size` tokens, wherever that ends.

    Each begins with the last words of the one before that make up at most `overlap` tokens. A longer word stands alone.
    """
    words = [m.span() for m in _WORD.finditer(text)]

    def tokens(first: int, stop: int) -> int:
        return counter.count([text[words[first][0] : words[stop - 1][1]]])[0] if first < stop else 0

    out, first, stop = [], 0, 0
    while stop < len(words):
        stops = range(first + 1, min(len(words), first + 8 * size) + 1)
        stop = stops[max(0, bisect_right(stops, size, key=lambda s, first=first: tokens(first, s)) - 1)]
        start, end = strip_span(text, words[first][0], words[stop - 1][1])
        out += [(start, end)] if end > start else []
        starts = range(first + 1, stop + 1)
        first = starts[bisect_left(starts, -overlap, key=lambda f, stop=stop: -tokens(f, stop))]
    return out


def _own(documents: dict[str, tuple[str, str]], config: Config, counter: TokenCounter) -> list[Chunk]:
    out: list[Chunk] = []
    for name, (title, text) in documents.items():
        fields = {"doc_id": name, "doc_source": name, "title": title or name, "content_hash": sha256(text)}
        document = Document(language=language_of(text), **fields)
        out += chunk_document(document, text, lambda offset: 1, config=config.chunk, counter=counter).chunks
    return out


def _fixed(documents: dict[str, tuple[str, str]], size: int, overlap: int, counter: TokenCounter) -> list[Chunk]:
    return list(
        flat_chunks(
            (f"{name}:{start}-{end}", title or name, text[start:end], (start, end), name)
            for name, (title, text) in documents.items()
            for start, end in fixed_windows(text, size, overlap, counter)
        )
    )


def score_chunkers(
    folder: Path, config: Config, k: int = 5, progress: Callable[[int, int, str], None] | None = None
) -> list[dict[str, Any]]:
    """One row a chunker: this configuration's parents and children, and windows of as many tokens with and without
    overlap. Each query retrieves k children by RRF of the configured routes; `MEASURES` with their 95 % intervals.

    Raises InputRefused for a malformed set, which names file and line.
    """
    files = [folder / f"{name}.jsonl" for name in ("full_documents", "queries", "spans")]
    if missing := [f.name for f in files if not f.is_file()]:
        raise InputRefused(f"{folder} lacks {', '.join(missing)}, with which chunkers are scored by spans")
    documents, asked = read_rows(files[0]), read_rows(files[1])
    excerpts = read_excerpts(files[2], documents)
    queries = [query for query in asked if query in excerpts]
    if not queries:
        raise InputRefused(
            f"{folder}: spans.jsonl has no excerpts for the queries of queries.jsonl; do their ids agree?"
        )
    counter, size = TokenCounter(config.chunk.tokenizer), config.chunk.child_tokens
    embedder = embedder_for((text for _, text in documents.values()), config)
    overlap = config.chunk.overlap_tokens
    makers: dict[str, Callable[[], list[Chunk]]] = {
        f"parent-child {config.chunk.parent_tokens}/{size}/{overlap}": lambda: _own(documents, config, counter)
    }
    for by in (0, overlap):
        makers[f"fixed {size}/{by}"] = lambda by=by: _fixed(documents, size, by, counter)
    out = []
    tell = progress or (lambda done, total, what: None)
    for name, make in makers.items():
        chunks = make()
        places = {c.chunk_id: (c.doc_id, *c.span) for c in chunks if not c.is_parent}
        with indexed(chunks, config, embedder, lambda n, of=places, name=name: tell(n, len(of), name)) as version:
            found = Searcher(version, config, [asked[q][1] for q in queries], embedder).ranking("hybrid")
        values = [
            (*span_scores(excerpts[q], [places[i] for i in ids[:k]]), precision_omega(excerpts[q], places.values()))
            for q, ids in zip(queries, found, strict=True)
        ]
        columns = dict(zip(MEASURES, np.array(values).T, strict=True))
        lengths = counter.count([c.content for c in chunks if not c.is_parent])
        row: dict[str, Any] = {"chunker": name, "chunks": len(places), "mean_tokens": round(float(np.mean(lengths)), 1)}
        row |= {measure: round(mean(column).mean, 4) for measure, column in columns.items()}
        intervals = {m: bootstrap_ci(c, config.evaluate.bootstrap, config.seed) for m, c in columns.items()}
        row["intervals"] = {m: [round(low, 4), round(high, 4)] for m, (low, high) in intervals.items()}
        out.append(row | {"k": k, "queries": len(queries), "embedder": embedder.name})
    return out

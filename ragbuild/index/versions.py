"""Index versions: folders that are never changed once ``CURRENT`` names them.

``indexes/v0001/`` holds segments, the lexical engine's files, the documents as they then were, and the dictionary and
prompt that belong to it; `version.json` names all of them by hash. Renaming ``CURRENT`` is the only commit point: a
build that is killed leaves the former version in use.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ragbuild.core.config import Config, ConfigView
from ragbuild.core.errors import InputRefused, UsageError
from ragbuild.core.records import Chunk, Document, TermEntry, index_text
from ragbuild.core.store import hash_path, read_json, read_records, sha256, write_json, write_records, write_text
from ragbuild.core.text import LexicalTokenizer, make_tokenizer
from ragbuild.index.dense import DenseIndex, build_graph
from ragbuild.index.filters import FIELDS, Filter
from ragbuild.index.lexical import LexicalIndex, RankBM25Index, TantivyIndex, bm25_scores
from ragbuild.index.segments import COLUMNS, Rows, Segment, SegmentWriter, as_chunks

BATCH = 1024  # children held in memory while an index is written
Encode = Callable[[Sequence[str]], np.ndarray]


def current_version(indexes: Path) -> str | None:
    """The name that ``CURRENT`` holds, or None when nothing was published. Raises InputRefused when it is damaged."""
    path = indexes / "CURRENT"
    if not path.is_file():
        return None
    name = path.read_bytes().decode("utf-8", "replace").strip()
    if not re.fullmatch(r"v\d+", name):
        raise InputRefused(f"{path} is damaged: it names no version but {name[:40]!r}; run 'ragbuild build' again")
    return name


def version_names(indexes: Path) -> list[str]:
    """Published versions, oldest first; other folders are left out."""
    names = [p.name for p in indexes.glob("v*") if re.fullmatch(r"v\d+", p.name) and (p / "version.json").is_file()]
    return sorted(names, key=lambda name: int(name[1:]))


def write_version(
    indexes: Path,
    chunks: Iterable[Chunk],
    documents: Sequence[Document],
    entries: Sequence[TermEntry],
    *,
    config: Config | ConfigView,
    encode: Encode,
    embedder: dict[str, Any],
    prompt: str = "",
    progress: Callable[[int], None] | None = None,
) -> str:
    """Make a new version from chunks (each parent before its children), streaming, and publish it.

    `encode`: texts to unit vectors (n, dim); `embedder`: at least name and dim, kept in the manifest.
    Returns the version's name. Raises InputRefused when there is no child to index.
    """
    indexes.mkdir(parents=True, exist_ok=True)
    for leftover in indexes.glob(".building-*"):
        shutil.rmtree(leftover)
    name = f"v{max([int(v[1:]) for v in version_names(indexes)], default=0) + 1:04d}"
    folder = indexes / f".building-{name}"
    tokenizer = _tokenizer(config, entries)
    with SegmentWriter(folder / "segments" / "s0001", first_uid=0, dim=embedder["dim"]) as writer:
        for batch in _batches(chunks, BATCH):
            writer.add_parents([c for c in batch if c.is_parent])
            children = [c for c in batch if not c.is_parent]
            if children:
                texts = [index_text(c) for c in children]
                writer.add_children(children, [tokenizer(t) for t in texts], encode(texts))
            if progress:
                progress(writer.n_children)
    if not writer.n_children:
        raise InputRefused("there is no child chunk to index; see the report of the chunking step for what was refused")
    segment = Segment(folder / "segments" / "s0001", embedder["dim"])
    counts = pc.value_counts(segment.keys["chunk_id"])
    twice = counts.filter(pc.greater(counts.field("counts"), 1))
    if len(twice):
        raise InputRefused(f"chunk {twice[0]['values']} stands {twice[0]['counts']} times; ids must be unique")
    engine = config.lexical.engine
    if engine == "auto":
        engine = "rank_bm25" if writer.n_children <= config.lexical.rank_bm25_up_to else "tantivy"
    if engine == "tantivy":
        TantivyIndex.build(folder / "lexical", _lexical_rows(segment))
    if writer.n_children > config.dense.hnsw_above:
        build_graph(segment.vectors, segment.folder / "hnsw.faiss", config.dense.hnsw_m)
    write_text(folder / "documents.jsonl", "".join(d.model_dump_json() + "\n" for d in documents))
    write_records(folder / "keyword_dict.json", entries)
    write_text(folder / "prompt.md", prompt)
    write_json(
        folder / "version.json",
        {
            "version": name,
            "segments": ["s0001"],
            "children": writer.n_children,
            "parents": writer.n_parents,
            "n_tokens": writer.n_tokens,
            "documents": len(documents),
            "lexical": {**config.lexical.model_dump(mode="json"), "engine": engine},
            "embedder": embedder,
            "hashes": {f.name: hash_path(f) for f in sorted(folder.iterdir()) if f.is_file()},
        },
    )
    os.replace(folder, indexes / name)
    publish(indexes, name)
    return name


def publish(indexes: Path, name: str) -> None:
    """Make `name` the version that readers open from now on; those that hold the old one finish on it."""
    write_text(indexes / "CURRENT", name + "\n")


def _batches(chunks: Iterable[Chunk], size: int) -> Iterator[list[Chunk]]:
    batch: list[Chunk] = []
    for chunk in chunks:
        batch.append(chunk)
        if len(batch) >= size:
            yield batch
            batch = []
    if batch:
        yield batch


def _tokenizer(config: Config | ConfigView, entries: Sequence[TermEntry]) -> LexicalTokenizer:
    lexical = config.lexical
    return make_tokenizer(lexical.tokenizer, entries, lexical.stem, lexical.char_bigrams)


def _lexical_rows(segment: Segment) -> Iterator[tuple[int, list[str], dict[str, list[str]]]]:
    for batch in segment.children.batches(["uid", "tokens", *FIELDS]):
        for row in batch.to_pylist():
            fields = {f: row[f] if isinstance(row[f], list) else [row[f]] for f in FIELDS}
            yield row["uid"], row["tokens"], fields


def _take(files: Sequence[Rows], rows: np.ndarray, *names: Sequence[str]) -> list[dict[str, Any]]:
    """Records of the given rows of the concatenation of `files`, in their order."""
    starts = np.cumsum([0] + [f.num_rows for f in files])
    place = np.searchsorted(starts, rows, side="right") - 1
    out: list[dict[str, Any]] = [{}] * len(rows)
    for number, file in enumerate(files):
        mine = np.flatnonzero(place == number)
        for where, row in zip(mine, file.take(np.asarray(rows)[mine] - starts[number], *names), strict=True):
            out[where] = row
    return out


class Vocabulary:
    """``word in vocabulary``: do the documents hold all tokens of this word? Asked of the index: costs no memory."""

    def __init__(self, tokenizer: LexicalTokenizer, lexical: LexicalIndex) -> None:
        self._tokenizer, self._lexical = tokenizer, lexical

    def __contains__(self, word: object) -> bool:
        tokens = self._tokenizer(str(word))
        return bool(tokens) and all(self._lexical.idf(t) > 0 for t in tokens)


class IndexVersion:
    """One published version, open for reading. Rows number the children of all segments, in order."""

    def __init__(self, indexes: Path, name: str | None = None) -> None:
        """`name`: a version, or None for the one that ``CURRENT`` names. Raises InputRefused when there is none."""
        name = name or current_version(indexes)
        if name is None:
            raise InputRefused(f"no index in {indexes}; run 'ragbuild build' first")
        self.folder = indexes / name
        if not (self.folder / "version.json").is_file():
            raise InputRefused(f"index version {name} is not there; {indexes} holds {version_names(indexes) or 'none'}")
        self.name = name
        self.manifest: dict[str, Any] = read_json(self.folder / "version.json")
        try:
            self._check_hashes()
            dim, _ = self.manifest["embedder"]["dim"], self.manifest["lexical"]["engine"]
            self._segments = [Segment(self.folder / "segments" / s, dim) for s in self.manifest["segments"]]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            what = f"{type(error).__name__}: {error}"
            raise InputRefused(f"index version {name} is damaged ({what}); run 'ragbuild build' again") from error
        self._keys = pa.concat_tables([s.keys for s in self._segments])
        offsets = np.cumsum([0] + [s.parents.num_rows for s in self._segments])
        self._parent_row = np.concatenate(
            [s.keys["parent_row"].to_numpy() + o for s, o in zip(self._segments, offsets, strict=False)]
        )
        self.ids: np.ndarray = self._keys["chunk_id"].cast(pa.binary()).to_numpy(zero_copy_only=False).astype("S")
        self._by_id = np.argsort(self.ids, kind="stable")
        self.id_rank = np.empty(len(self.ids), np.int64)
        self.id_rank[self._by_id] = np.arange(len(self.ids))

    def _check_hashes(self) -> None:
        for file, expected in self.manifest["hashes"].items():
            if hash_path(self.folder / file) != expected:
                raise InputRefused(f"{self.folder / file} was changed after publishing; run 'ragbuild build' again")

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def documents(self) -> list[Document]:
        lines = (self.folder / "documents.jsonl").read_text(encoding="utf-8").split("\n")  # a title may hold U+2028
        return [Document.model_validate_json(line) for line in lines if line]

    @cached_property
    def entries(self) -> list[TermEntry]:
        return read_records(self.folder / "keyword_dict.json", TermEntry)

    @cached_property
    def prompt(self) -> str:
        return (self.folder / "prompt.md").read_text(encoding="utf-8")

    @cached_property
    def tokenizer(self) -> LexicalTokenizer:
        """The tokenizer that this index was built with, on the dictionary that belongs to it."""
        lexical = self.manifest["lexical"]
        return make_tokenizer(lexical["tokenizer"], self.entries, lexical["stem"], lexical["char_bigrams"])

    @cached_property
    def lexical(self) -> LexicalIndex:
        lexical = self.manifest["lexical"]
        if lexical["engine"] == "rank_bm25":
            tokens = [
                t for s in self._segments for b in s.children.batches(["tokens"]) for t in b["tokens"].to_pylist()
            ]
            return RankBM25Index(tokens, self.id_rank, lexical["k1"], lexical["b"])
        index = TantivyIndex(self.folder / "lexical", self._keys["uid"].to_numpy(), self.id_rank)
        index.average_length = self.manifest["n_tokens"] / max(1, len(self))
        return index

    @property
    def vocabulary(self) -> Vocabulary:
        """Which words the documents hold."""
        return Vocabulary(self.tokenizer, self.lexical)

    @cached_property
    def dense(self) -> DenseIndex:
        graphs = [s.graph for s in self._segments]
        return DenseIndex([s.vectors for s in self._segments], self.id_rank, graphs if any(graphs) else ())

    @cached_property
    def _codes(self) -> dict[str, tuple[np.ndarray, list[str]]]:
        """Scalar filter fields as (code of each row, values)."""
        out = {}
        for field in ("status", "doc_version", "doc_type", "kb"):
            encoded = pc.dictionary_encode(self._keys[field]).combine_chunks()
            encoded = encoded.chunk(0) if isinstance(encoded, pa.ChunkedArray) else encoded
            out[field] = (encoded.indices.to_numpy(), encoded.dictionary.to_pylist())
        return out

    @cached_property
    def _list_codes(self) -> dict[str, tuple[np.ndarray, np.ndarray, list[str]]]:
        """List filter fields as (row of each value, code of each value, values)."""
        out = {}
        for field in ("product_model", "tag"):
            column = self._keys[field].combine_chunks()
            column = column.chunk(0) if isinstance(column, pa.ChunkedArray) else column
            encoded = column.flatten().dictionary_encode()
            out[field] = (
                pc.list_parent_indices(column).to_numpy(),
                encoded.indices.to_numpy(),
                encoded.dictionary.to_pylist(),
            )
        return out

    @property
    def doc_sources(self) -> list[str]:
        """The file name of each row's document."""
        return self._keys["doc_source"].to_pylist()

    def values(self, field: str) -> list[str]:
        """The values of a filter field that the index holds, sorted."""
        if field not in FIELDS:
            raise UsageError(f"filters take {', '.join(FIELDS)}, got '{field}'")
        return sorted(self._codes[field][1] if field in self._codes else self._list_codes[field][2])

    def allowed(self, where: Filter) -> np.ndarray | None:
        """Which rows pass the filter: bool (n,), or None when all do."""
        mask = np.ones(len(self), bool)
        for field, wanted in where.conditions().items():
            if field in self._codes:
                codes, values = self._codes[field]
                passing = np.isin(codes, [i for i, v in enumerate(values) if v in wanted])
                for token in where.naming if field == "doc_version" else ():
                    passing[self.lexical.rows_with(token)] = True
                mask &= passing
            else:
                rows, codes, values = self._list_codes[field]
                passing = np.zeros(len(self), bool)
                passing[rows[np.isin(codes, [i for i, v in enumerate(values) if v in wanted])]] = True
                mask &= passing
        return None if mask.all() else mask

    def rows_of(self, ids: Sequence[str]) -> np.ndarray:
        """Rows of child ids. Raises InputRefused for an id that this version does not hold."""
        wanted = np.array([i.encode() for i in ids], dtype="S") if len(ids) else np.zeros(0, "S1")
        place = np.searchsorted(self.ids, wanted, sorter=self._by_id)
        rows = self._by_id[np.minimum(place, len(self) - 1)]
        unknown = [i for i, ok in zip(ids, self.ids[rows] == wanted, strict=True) if not ok]
        if unknown:
            raise InputRefused(f"chunk {unknown[0]} is not in index version {self.name}")
        return rows

    def children(self, rows: np.ndarray) -> list[Chunk]:
        return as_chunks(_take([s.children for s in self._segments], rows))

    def parents_of(self, rows: np.ndarray) -> list[Chunk]:
        """The parents of the given children, collapsed, in the order of first appearance."""
        wanted = np.array(list(dict.fromkeys(self._parent_row[rows].tolist())), np.int64)
        return as_chunks(_take([s.parents for s in self._segments], wanted))

    def all_parents(self) -> list[Chunk]:
        files = [s.parents for s in self._segments]
        return as_chunks(_take(files, np.arange(sum(f.num_rows for f in files))))

    def children_and_tokens(self, rows: np.ndarray) -> tuple[list[Chunk], list[list[str]]]:
        """Both of the given rows, in one read."""
        records = _take([s.children for s in self._segments], rows, (*COLUMNS, "tokens"))
        tokens = [record.pop("tokens") for record in records]
        return as_chunks(records), tokens

    def tokens(self, rows: np.ndarray) -> list[list[str]]:
        """The tokens that were cut when the index was made."""
        return [row["tokens"] for row in _take([s.children for s in self._segments], rows, ("tokens",))]

    def search_lexical(self, tokens: Sequence[str], k: int, where: Filter, allowed: np.ndarray | None):  # type: ignore[no-untyped-def]
        """Rows and BM25 scores of the k best that pass, by (-score, id)."""
        return self.lexical.search(tokens, k, allowed, where)

    def features(
        self, tokens: Sequence[str], query: np.ndarray, rows: np.ndarray, held: Sequence[Sequence[str]] | None = None
    ) -> dict[str, np.ndarray]:
        """Lexical score, coverage and cosine of every given row, whichever route found it. `held`: their tokens, when
        they have been read already."""
        lexical, held = self.manifest["lexical"], self.tokens(rows) if held is None else held
        scores, coverage = bm25_scores(tokens, held, self.lexical, lexical["k1"], lexical["b"])
        return {"lexical": scores, "coverage": coverage, "cosine": self.dense.score(query, rows)}

    def inspect(self, what: str) -> dict[str, Any]:
        """Facts about ``index``, a chunk id, a document (id or source) or a term. Raises InputRefused for others."""
        if what == "index":
            return self.manifest
        for document in self.documents:
            if what in (document.doc_id, document.doc_source, document.key):
                rows = np.flatnonzero(
                    pc.equal(self._keys["doc_source"], document.doc_source).to_numpy(zero_copy_only=False)
                )
                return {
                    **document.model_dump(mode="json"),
                    "children": len(rows),
                    "parents": len(set(self._parent_row[rows].tolist())),
                }
        if what.encode() in set(self.ids.tolist()):
            row = self.rows_of([what])
            return {**self.children(row)[0].model_dump(mode="json"), "tokens": self.tokens(row)[0]}
        for parent in self.all_parents() if what.startswith("p-") else []:
            if parent.chunk_id == what:
                return parent.model_dump(mode="json")
        for entry in self.entries:
            if what.lower() in (form.lower() for form in entry.forms):
                return {
                    **entry.model_dump(mode="json"),
                    "tokens": self.tokenizer(what),
                    "idf": [round(self.lexical.idf(t), 3) for t in self.tokenizer(what)],
                }
        raise InputRefused(
            f"'{what}' is no chunk, document or term of index version {self.name}; 'ragbuild registry' lists documents"
        )

    @property
    def digest(self) -> str:
        """Hash of the manifest, which names everything that belongs to this version."""
        return sha256((self.folder / "version.json").read_bytes())

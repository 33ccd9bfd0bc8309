"""Index versions: folders that are never changed once ``CURRENT`` names them, open for reading.

``indexes/v0001/`` holds the lexical engine's files, the documents as they then were, the dictionary and prompt that
belong to it, and which children are deleted; segments lie in ``indexes/segments/`` and parsed texts and images in
``indexes/files/``, where versions share them. `version.json` names all of it by hash; `made.json` says when, how and
why. Renaming ``CURRENT`` is the only commit point: a writer that is killed leaves the former version in use.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import weakref
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ragbuild.core.errors import InputRefused, UsageError
from ragbuild.core.records import Chunk, Document, TermEntry, document_key
from ragbuild.core.store import hash_path, read_json, read_records, sha256, write_text
from ragbuild.core.text import LexicalTokenizer, make_tokenizer
from ragbuild.index.dense import DenseIndex
from ragbuild.index.filters import FIELDS, Filter
from ragbuild.index.lexical import LexicalIndex, RankBM25Index, TantivyIndex, bm25_scores
from ragbuild.index.segments import COLUMNS, Rows, Segment, as_chunks

SEGMENTS, FILES = "segments", "files"  # shared by all versions
LAYOUT = 2  # of an index version; one of another layout has to be built again
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


def publish(indexes: Path, name: str) -> None:
    """Make `name` the version that readers open from now on; those that hold the old one finish on it."""
    write_text(indexes / "CURRENT", name + "\n")


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
        self._hold = self._opened(indexes, name)
        self.indexes, self.folder, self.name = indexes, self._folder, self._folder.name
        self.manifest: dict[str, Any] = read_json(self.folder / "version.json")
        layout = self.manifest.get("layout") if isinstance(self.manifest, dict) else None
        if isinstance(layout, int | None) and layout != LAYOUT and self.manifest:
            raise InputRefused(
                f"index version {self.name} was made by another version of ragbuild; run 'ragbuild build' again"
            )
        try:
            self._check_hashes()
            dim, _ = self.manifest["embedder"]["dim"], self.manifest["lexical"]["engine"]
            segments = self.manifest["segments"]
            self._segments = [Segment(indexes / SEGMENTS / s["name"], dim) for s in segments]
            masks = [self._live_in(s, segment) for s, segment in zip(segments, self._segments, strict=True)]
            live = np.concatenate(masks)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            what = f"{type(error).__name__}: {error}"
            raise InputRefused(f"index version {self.name} is damaged ({what}); run 'ragbuild build' again") from error
        self._live = None if live.all() else np.flatnonzero(live)
        keys = [
            s.keys if mask.all() else s.keys.filter(pa.array(mask))
            for s, mask in zip(self._segments, masks, strict=True)
        ]
        self._keys = pa.concat_tables(keys)
        offsets = np.cumsum([0] + [s.parents.num_rows for s in self._segments])
        self._parent_row = np.concatenate([k["parent_row"].to_numpy() + o for k, o in zip(keys, offsets, strict=False)])
        self.ids: np.ndarray = self._keys["chunk_id"].cast(pa.binary()).to_numpy(zero_copy_only=False).astype("S")
        self._by_id = np.argsort(self.ids, kind="stable")
        self.id_rank = np.empty(len(self.ids), np.int64)
        self.id_rank[self._by_id] = np.arange(len(self.ids))

    def _opened(self, indexes: Path, name: str | None) -> Any:
        """Find the folder and hold it: what a reader holds is not pruned. Returns the open file that holds it."""
        for _ in range(5):
            wanted = name or current_version(indexes)
            if wanted is None:
                names = version_names(indexes)  # CURRENT alone is lost: the versions are all there
                lost = f"{indexes / 'CURRENT'} is missing: write the name of the version to use into it, of {names}"
                raise InputRefused(lost if names else f"no index in {indexes}; run 'ragbuild build' first")
            self._folder = indexes / wanted
            try:
                hold = os.open(self._folder / "version.json", os.O_RDONLY)
            except OSError:
                if name is None and current_version(indexes) != wanted:
                    continue
                break
            weakref.finalize(self, os.close, hold)
            try:
                fcntl.flock(hold, fcntl.LOCK_SH | fcntl.LOCK_NB)
                if not (self._folder / "version.json").exists():  # it was pruned between the two
                    continue
                return hold
            except BlockingIOError:  # it is being pruned; CURRENT names another by now
                continue
            except OSError:  # a file system without locks
                return hold
        raise InputRefused(f"index version {wanted} is not there; {indexes} holds {version_names(indexes) or 'none'}")

    def release(self) -> None:
        """Hold it no longer: it may be pruned while it is open."""
        with contextlib.suppress(OSError):
            fcntl.flock(self._hold, fcntl.LOCK_UN)

    def _live_in(self, entry: dict[str, Any], segment: Segment) -> np.ndarray:
        """Which children of a segment are not deleted: bool (n,)."""
        n = segment.keys.num_rows
        if not entry["deleted"]:
            return np.ones(n, bool)
        bits = np.frombuffer((self.folder / f"{entry['name']}.deleted").read_bytes(), np.uint8)
        gone = np.unpackbits(bits, count=n).astype(bool)
        if gone.sum() != entry["deleted"]:
            raise ValueError(f"{entry['name']}: {gone.sum()} children are marked as deleted, not {entry['deleted']}")
        return ~gone

    def _check_hashes(self) -> None:
        for file, expected in self.manifest["hashes"].items():
            if hash_path(self.folder / file) != expected:
                raise InputRefused(f"{self.folder / file} was changed after publishing; run 'ragbuild build' again")
        for entry in self.manifest["segments"]:
            path = self.indexes / SEGMENTS / entry["name"] / "segment.json"
            if hash_path(path) != entry["hash"]:
                raise ValueError(f"{path} is missing or was changed")

    def verify(self) -> list[str]:
        """Read everything that belongs to this version and compare it with its hash; what is wrong, in words."""
        expected = {self.folder / "lexical" / file: digest for file, digest in self.manifest["lexical_files"].items()}
        for entry in self.manifest["segments"]:
            folder = self.indexes / SEGMENTS / entry["name"]
            expected |= {folder / file: digest for file, digest in read_json(folder / "segment.json").items()}
        for files in self.kept.values():
            expected |= {self.indexes / FILES / digest: digest for digest in files.values()}
        wrong = [path for path, digest in expected.items() if hash_path(path) != digest]
        return [f"{path} is missing or was changed" for path in wrong]

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def documents(self) -> list[Document]:
        lines = (self.folder / "documents.jsonl").read_text(encoding="utf-8").split("\n")  # a title may hold U+2028
        return [Document.model_validate_json(line) for line in lines if line]

    @cached_property
    def made(self) -> dict[str, Any]:
        """When, by which command and why this version was made, and what was measured of it then."""
        path = self.folder / "made.json"
        return read_json(path) if path.is_file() else {}

    @cached_property
    def kept(self) -> dict[str, dict[str, str]]:
        """For each document's key, its parsed text, page map and images in ``files/``: name to hash."""
        return read_json(self.folder / "kept.json")

    def markdown(self, doc_key: str) -> str | None:
        """The parsed Markdown that the spans of this document's chunks are offsets into; None where none was kept."""
        digest = next((h for n, h in self.kept.get(doc_key, {}).items() if n.endswith(".md")), None)
        return (self.indexes / FILES / digest).read_bytes().decode("utf-8") if digest else None

    @cached_property
    def entries(self) -> list[TermEntry]:
        return read_records(self.folder / "keyword_dict.json", TermEntry)

    @cached_property
    def prompt(self) -> str:
        return (self.folder / "prompt.md").read_text(encoding="utf-8")

    @cached_property
    def tokenizer(self) -> LexicalTokenizer:
        """The tokenizer that this index was built with, on the dictionary that belongs to it."""
        return self.tokenizer_on(self.entries)

    def tokenizer_on(self, entries: Sequence[TermEntry]) -> LexicalTokenizer:
        """The tokenizer that this index was built with, whatever the configuration says by now, on a dictionary."""
        lexical = self.manifest["lexical"]
        return make_tokenizer(lexical["tokenizer"], entries, lexical["stem"], lexical["char_bigrams"])

    @cached_property
    def lexical(self) -> LexicalIndex:
        lexical = self.manifest["lexical"]
        if lexical["engine"] == "rank_bm25":
            tokens = [
                t for s in self._segments for b in s.children.batches(["tokens"]) for t in b["tokens"].to_pylist()
            ]
            tokens = tokens if self._live is None else [tokens[i] for i in self._live]
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
        return DenseIndex([s.vectors for s in self._segments], self.id_rank, graphs if any(graphs) else (), self._live)

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
        rows, known = self._find(ids)
        unknown = [i for i, ok in zip(ids, known, strict=True) if not ok]
        if unknown:
            raise InputRefused(f"chunk {unknown[0]} is not in index version {self.name}")
        return rows

    def children(self, rows: np.ndarray) -> list[Chunk]:
        return as_chunks(self._read(rows, tuple(COLUMNS)))

    def _read(self, rows: np.ndarray, names: Sequence[str]) -> list[dict[str, Any]]:
        return _take([s.children for s in self._segments], self.places(np.asarray(rows, np.int64)), names)

    def parents_of(self, rows: np.ndarray) -> list[Chunk]:
        """The parents of the given children, collapsed, in the order of first appearance."""
        wanted = np.array(list(dict.fromkeys(self._parent_row[rows].tolist())), np.int64)
        return as_chunks(_take([s.parents for s in self._segments], wanted))

    def all_parents(self) -> list[Chunk]:
        """Every parent that has a child left."""
        return as_chunks(_take([s.parents for s in self._segments], np.unique(self._parent_row)))

    def children_and_tokens(self, rows: np.ndarray) -> tuple[list[Chunk], list[list[str]]]:
        """Both of the given rows, in one read."""
        records = self._read(rows, (*COLUMNS, "tokens"))
        tokens = [record.pop("tokens") for record in records]
        return as_chunks(records), tokens

    def tokens(self, rows: np.ndarray) -> list[list[str]]:
        """The tokens that were cut when the index was made."""
        return [row["tokens"] for row in self._read(rows, ("tokens",))]

    def rows_of_document(self, document: Document) -> np.ndarray:
        """The rows of a document's children, ascending."""
        same = np.ones(len(self), bool)
        for field in ("doc_id", "doc_version", "kb"):
            same &= pc.equal(self._keys[field], getattr(document, field)).to_numpy(zero_copy_only=False)
        rows = np.flatnonzero(same)
        models = self._keys["product_model"].take(pa.array(rows)).to_pylist()
        mine = [document_key(document.kb, document.doc_id, document.doc_version, m) == document.key for m in models]
        return rows[np.array(mine, bool)]

    def holds(self, ids: Sequence[str], apart_from: np.ndarray) -> list[str]:
        """Which of these child ids a row has that is not among `apart_from`."""
        rows, known = self._find(ids)
        return [i for i, yes in zip(ids, known & ~np.isin(rows, apart_from), strict=True) if yes]

    def _find(self, ids: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """The row of each child id, and whether there is one."""
        wanted = np.array([i.encode() for i in ids], dtype="S") if len(ids) else np.zeros(0, "S1")
        rows = self._by_id[np.minimum(np.searchsorted(self.ids, wanted, sorter=self._by_id), len(self) - 1)]
        return rows, self.ids[rows] == wanted

    def places(self, rows: np.ndarray) -> np.ndarray:
        """Where rows lie among all children of the segments, deleted ones included."""
        return rows if self._live is None else self._live[rows]

    def deleted(self) -> list[np.ndarray]:
        """For each segment, which of its children are deleted: bool (n,)."""
        return [~self._live_in(e, s) for e, s in zip(self.manifest["segments"], self._segments, strict=True)]

    def uids(self, rows: np.ndarray) -> np.ndarray:
        """The numbers by which the lexical engine knows these children."""
        return self._keys["uid"].to_numpy()[rows]

    def families(self, rows: np.ndarray) -> np.ndarray:
        """The rows of all children of the parents of these children, ascending."""
        return np.flatnonzero(np.isin(self._parent_row, self._parent_row[rows]))

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
                rows = self.rows_of_document(document)
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

"""A segment: chunk records in Arrow columns, the children's tokens, and their vectors.

Written once by streaming and never changed. Vectors and filter columns are memory-mapped. Records lie in small
batches and are read when a hit needs them: mapped, the pages around every hit would stay resident, at 100,000 chunks
more than the vectors. `Chunk` objects are made for hits only.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ragbuild.core.errors import InputRefused
from ragbuild.core.records import Chunk
from ragbuild.core.store import hash_path, write_json

_TEXT, _LIST = pa.string(), pa.list_(pa.string())
COLUMNS: dict[str, pa.DataType] = {
    "chunk_id": _TEXT, "parent_id": _TEXT, "child_ids": _LIST, "chapter": _TEXT, "section": _TEXT, "breadcrumb": _TEXT,
    "page": pa.int32(), "page_end": pa.int32(), "tag": _LIST, "content": _TEXT, "span": pa.list_(pa.int64(), 2),
    "n_tokens": pa.int32(), "image_ids": _LIST, "doc_id": _TEXT, "doc_version": _TEXT, "product_model": _LIST,
    "kb": _TEXT, "doc_type": _TEXT, "status": _TEXT, "effective_date": _TEXT, "doc_source": _TEXT, "language": _TEXT,
    "table_header": _TEXT,
}  # fmt: skip
_CHILD_ONLY = {"uid": pa.int64(), "parent_row": pa.int32(), "tokens": _LIST}
# Read for all rows when a version is opened: in a file of their own.
_KEYS = (
    "chunk_id",
    "uid",
    "parent_row",
    "doc_source",
    "doc_id",
    "status",
    "product_model",
    "doc_version",
    "doc_type",
    "kb",
    "tag",
)
BATCH_ROWS = 32  # records in a batch: what is read from disk for one hit


class _Records:
    """Writes record batches of exactly `BATCH_ROWS` rows (the last may be shorter), so that a row's batch is known."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self.schema = schema
        self._file = pa.ipc.new_file(str(path), schema)
        self._rest = pa.RecordBatch.from_pylist([], schema=schema)

    def write(self, batch: pa.RecordBatch) -> None:
        rows = pa.concat_batches([self._rest, batch])
        whole = rows.num_rows - rows.num_rows % BATCH_ROWS
        for start in range(0, whole, BATCH_ROWS):
            self._file.write_batch(rows.slice(start, BATCH_ROWS))
        self._rest = rows.slice(whole)

    def close(self) -> None:
        if self._rest.num_rows:
            self._file.write_batch(self._rest)
        self._file.close()


class SegmentWriter:
    """Streams parents, children with tokens, and vectors into a folder; `close` makes them whole."""

    def __init__(self, folder: Path, first_uid: int, dim: int) -> None:
        folder.mkdir(parents=True)
        self._dim = dim
        self.folder, self.n_children, self.n_parents, self.n_tokens = folder, 0, 0, 0
        self._first_uid = first_uid
        self._parent_row: dict[str, int] = {}
        schema = pa.schema([*COLUMNS.items(), *_CHILD_ONLY.items()])
        self._parents = _Records(folder / "parents.arrow", pa.schema(list(COLUMNS.items())))
        self._children = _Records(folder / "children.arrow", schema)
        self._keys = pa.ipc.new_file(str(folder / "keys.arrow"), pa.schema([schema.field(n) for n in _KEYS]))
        self._vectors = (folder / "vectors.f32").open("wb")

    def add_parents(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            self._parent_row[chunk.chunk_id] = self.n_parents
            self.n_parents += 1
        self._parents.write(_batch(chunks, self._parents.schema))

    def add_children(
        self, chunks: Sequence[Chunk], tokens: Sequence[Sequence[str]], vectors: np.ndarray,
        uids: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        """`vectors`: (n, dim) float32. The parents must have been added before; then they are forgotten. `uids`: those
        that the children have already, where a segment is written again.

        Raises InputRefused for a child without its parent, ValueError for vectors that are not what they should be.
        """
        unknown = next((c for c in chunks if c.parent_id not in self._parent_row), None)
        if unknown is not None:
            raise InputRefused(f"chunk {unknown.chunk_id} comes before its parent {unknown.parent_id}, or without it")
        if vectors.shape != (len(chunks), self._dim) or not np.isfinite(vectors).all():
            raise ValueError(f"expected {len(chunks)} finite vectors of {self._dim} numbers, got {vectors.shape}")
        first = self._first_uid + self.n_children
        extra = {
            "uid": list(uids or range(first, first + len(chunks))),
            "parent_row": [self._parent_row[str(c.parent_id)] for c in chunks],
            "tokens": [list(t) for t in tokens],
        }
        batch = _batch(chunks, self._children.schema, extra)
        self._children.write(batch)
        self._keys.write_batch(batch.select(list(_KEYS)))
        self._vectors.write(np.ascontiguousarray(vectors, np.float32).tobytes())
        self.n_children += len(chunks)
        self.n_tokens += sum(map(len, tokens))
        last = self._parent_row[str(chunks[-1].parent_id)]  # a batch may end before the children of later parents
        self._parent_row = {k: v for k, v in self._parent_row.items() if v >= last}

    def copy(self, segment: Segment, live: np.ndarray) -> None:
        """Add the children of another segment for which `live` (n,) is true, and their parents, with their uids."""
        parent_row = segment.keys["parent_row"].to_numpy()
        parents = np.unique(parent_row[live])
        moved = np.full(segment.parents.num_rows, -1, np.int32)
        moved[parents] = self.n_parents + np.arange(len(parents))
        for batch, mask in _masked(segment.parents.batches(list(COLUMNS)), moved >= 0):
            self._parents.write(batch.filter(mask))
        place = self._children.schema.get_field_index("parent_row")
        keys, start = [], 0
        for batch, mask in _masked(segment.children.batches(self._children.schema.names), live):
            rows = pa.array(moved[parent_row[start : start + batch.num_rows]], pa.int32())
            start += batch.num_rows
            batch = batch.set_column(place, self._children.schema.field(place), rows).filter(mask)
            self._children.write(batch)
            keys.append(batch.select(list(_KEYS)))
        self._keys.write_batch(pa.concat_batches(keys))  # they are read whole: thousands of batches would be slow
        for start in range(0, len(live), 4096):
            part = slice(start, start + 4096)
            self._vectors.write(np.ascontiguousarray(segment.vectors[part][live[part]]).tobytes())
        self.n_children += int(live.sum())
        self.n_parents += len(parents)

    def __enter__(self) -> SegmentWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        with self._vectors:
            self._parents.close()
            self._children.close()
            self._keys.close()


def _masked(batches: Iterator[pa.RecordBatch], mask: np.ndarray) -> Iterator[tuple[pa.RecordBatch, pa.Array]]:
    """Each batch with its part of `mask`."""
    start = 0
    for batch in batches:
        yield batch, pa.array(mask[start : start + batch.num_rows])
        start += batch.num_rows


def seal(folder: Path) -> str:
    """Sync a segment's files and name them by hash in ``segment.json``; returns the hash of that."""
    files = sorted(f for f in folder.iterdir() if f.name != "segment.json")
    for file in files:
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
    write_json(folder / "segment.json", {f.name: hash_path(f) for f in files})
    return hash_path(folder / "segment.json")


def _batch(chunks: Sequence[Chunk], schema: pa.Schema, extra: dict[str, list[Any]] | None = None) -> pa.RecordBatch:
    columns: dict[str, list[Any]] = {name: [getattr(c, name) for c in chunks] for name in COLUMNS}
    columns.update(extra or {})
    return pa.RecordBatch.from_arrays([pa.array(columns[f.name], f.type) for f in schema], schema=schema)


class Segment:
    """A written segment, opened without reading it."""

    def __init__(self, folder: Path, dim: int) -> None:
        self.folder = folder
        self.parents = Rows(folder / "parents.arrow")
        self.children = Rows(folder / "children.arrow")
        with pa.memory_map(str(folder / "keys.arrow")) as source:
            self.keys = pa.ipc.open_file(source).read_all()
        shape = (self.keys.num_rows, dim)
        path = folder / "vectors.f32"
        self.vectors = np.memmap(path, np.float32, "r", shape=shape) if shape[0] else np.zeros(shape, np.float32)
        graph = folder / "hnsw.faiss"
        self.graph = graph if graph.is_file() else None


class Rows:
    """The records of one file: any of them by row number, or all in order. Safe to share between threads."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        self._readers: dict[tuple[str, ...], Any] = {}
        reader = self._reader(())
        last = reader.num_record_batches - 1
        self.num_rows = last * BATCH_ROWS + reader.get_batch(last).num_rows if last >= 0 else 0

    def _reader(self, names: tuple[str, ...]) -> Any:
        """A reader of the named columns alone."""
        if names not in self._readers:
            with pa.OSFile(str(self._path)) as source:
                schema = pa.ipc.open_file(source).schema
            options = pa.ipc.IpcReadOptions(
                included_fields=[schema.get_field_index(n) for n in names], use_threads=False
            )
            self._readers[names] = pa.ipc.open_file(pa.OSFile(str(self._path)), options=options)
        return self._readers[names]

    def take(self, rows: np.ndarray, names: Sequence[str] = tuple(COLUMNS)) -> list[dict[str, Any]]:
        """The named columns of the given rows as dicts, in the order of `rows`."""
        if not len(rows):
            return []
        with self._lock:
            reader = self._reader(tuple(names))
            held = {number: reader.get_batch(number) for number in {int(row) // BATCH_ROWS for row in rows}}
        slices = [held[int(row) // BATCH_ROWS].slice(int(row) % BATCH_ROWS, 1) for row in rows]
        return pa.concat_batches(slices).to_pylist()

    def batches(self, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """The named columns of all rows, a small batch at a time, so that nothing stays resident."""
        reader = self._reader(tuple(names))
        for number in range(reader.num_record_batches):
            yield reader.get_batch(number)


def as_chunks(rows: Sequence[dict[str, Any]]) -> list[Chunk]:
    """`Chunk` objects of records."""
    return [Chunk.model_validate({**row, "span": tuple(row["span"])}) for row in rows]

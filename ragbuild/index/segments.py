"""A segment: chunk records in Arrow columns (memory-mapped), the children's tokens, and their vectors.

Written once by streaming and never changed. `Chunk` objects are made for hits only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ragbuild.core.errors import InputRefused
from ragbuild.core.records import Chunk

_TEXT, _LIST = pa.string(), pa.list_(pa.string())
_COLUMNS: dict[str, pa.DataType] = {
    "chunk_id": _TEXT, "parent_id": _TEXT, "child_ids": _LIST, "chapter": _TEXT, "section": _TEXT, "breadcrumb": _TEXT,
    "page": pa.int32(), "page_end": pa.int32(), "tag": _LIST, "content": _TEXT, "span": pa.list_(pa.int64(), 2),
    "n_tokens": pa.int32(), "image_ids": _LIST, "doc_id": _TEXT, "doc_version": _TEXT, "product_model": _LIST,
    "kb": _TEXT, "doc_type": _TEXT, "status": _TEXT, "effective_date": _TEXT, "doc_source": _TEXT, "language": _TEXT,
    "table_header": _TEXT,
}  # fmt: skip
_CHILD_ONLY = {"uid": pa.int64(), "parent_row": pa.int32(), "tokens": _LIST}
# Read for all rows when a version is opened: in a file of their own, since mapping scattered pages of the large one would
# keep most of it resident.
_KEYS = ("chunk_id", "uid", "parent_row", "doc_source", "status", "product_model", "doc_version", "doc_type", "kb", "tag")


class SegmentWriter:
    """Streams parents, children with tokens, and vectors into a folder; `close` makes them whole."""

    def __init__(self, folder: Path, first_uid: int, dim: int) -> None:
        folder.mkdir(parents=True)
        self._dim = dim
        self.folder, self.n_children, self.n_parents, self.n_tokens = folder, 0, 0, 0
        self._first_uid = first_uid
        self._parent_row: dict[str, int] = {}
        self._parents_schema = pa.schema(list(_COLUMNS.items()))
        self._children_schema = pa.schema([*_COLUMNS.items(), *_CHILD_ONLY.items()])
        self._parents = pa.ipc.new_file(str(folder / "parents.arrow"), self._parents_schema)
        self._children = pa.ipc.new_file(str(folder / "children.arrow"), self._children_schema)
        self._keys = pa.ipc.new_file(str(folder / "keys.arrow"), pa.schema([self._children_schema.field(n) for n in _KEYS]))
        self._vectors = (folder / "vectors.f32").open("wb")

    def add_parents(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            self._parent_row[chunk.chunk_id] = self.n_parents
            self.n_parents += 1
        self._parents.write_batch(_batch(chunks, self._parents_schema))

    def add_children(self, chunks: Sequence[Chunk], tokens: Sequence[Sequence[str]], vectors: np.ndarray) -> None:
        """`vectors`: (n, dim) float32. The parents must have been added before; then they are forgotten.

        Raises InputRefused for a child without its parent, ValueError for vectors that are not what they should be.
        """
        unknown = next((c for c in chunks if c.parent_id not in self._parent_row), None)
        if unknown is not None:
            raise InputRefused(f"chunk {unknown.chunk_id} comes before its parent {unknown.parent_id}, or without it")
        if vectors.shape != (len(chunks), self._dim) or not np.isfinite(vectors).all():
            raise ValueError(f"expected {len(chunks)} finite vectors of {self._dim} numbers, got {vectors.shape}")
        extra = {
            "uid": [self._first_uid + self.n_children + i for i in range(len(chunks))],
            "parent_row": [self._parent_row[str(c.parent_id)] for c in chunks],
            "tokens": [list(t) for t in tokens],
        }
        batch = _batch(chunks, self._children_schema, extra)
        self._children.write_batch(batch)
        self._keys.write_batch(batch.select(list(_KEYS)))
        self._vectors.write(np.ascontiguousarray(vectors, np.float32).tobytes())
        self.n_children += len(chunks)
        self.n_tokens += sum(map(len, tokens))
        first = self._parent_row[str(chunks[-1].parent_id)]  # a batch may end before the children of later parents
        self._parent_row = {k: v for k, v in self._parent_row.items() if v >= first}

    def __enter__(self) -> SegmentWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._parents.close()
        self._children.close()
        self._keys.close()
        self._vectors.close()


def _batch(chunks: Sequence[Chunk], schema: pa.Schema, extra: dict[str, list[Any]] | None = None) -> pa.RecordBatch:
    columns: dict[str, list[Any]] = {name: [getattr(c, name) for c in chunks] for name in _COLUMNS}
    columns.update(extra or {})
    return pa.RecordBatch.from_arrays([pa.array(columns[f.name], f.type) for f in schema], schema=schema)


class Segment:
    """A written segment, opened without reading it: Arrow tables and vectors are memory-mapped."""

    def __init__(self, folder: Path, dim: int) -> None:
        self.folder = folder
        self.parents = _open(folder / "parents.arrow")
        self.children = _open(folder / "children.arrow")
        self.keys = _open(folder / "keys.arrow")
        shape = (self.children.num_rows, dim)
        path = folder / "vectors.f32"
        self.vectors = np.memmap(path, np.float32, "r", shape=shape) if shape[0] else np.zeros(shape, np.float32)
        graph = folder / "hnsw.faiss"
        self.graph = graph if graph.is_file() else None


def _open(path: Path) -> pa.Table:
    with pa.memory_map(str(path)) as source:
        return pa.ipc.open_file(source).read_all()


def read_batches(path: Path, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """The named columns, a batch at a time and not memory-mapped, so that reading a whole file leaves nothing resident."""
    schema = pa.ipc.open_file(str(path)).schema
    options = pa.ipc.IpcReadOptions(included_fields=[schema.get_field_index(n) for n in names])
    with pa.OSFile(str(path)) as source:
        reader = pa.ipc.open_file(source, options=options)
        for number in range(reader.num_record_batches):
            yield reader.get_batch(number)


class Rows:
    """Random access to the rows of a table. Goes to the batch that holds a row: `Table.take` would first copy whole
    columns into one piece, which at 100,000 chunks costs more time and memory than all the rest of a query."""

    def __init__(self, table: pa.Table) -> None:
        self._batches = table.to_batches()
        self._starts = np.cumsum([0] + [b.num_rows for b in self._batches])

    def take(self, rows: np.ndarray, names: Sequence[str]) -> list[dict[str, Any]]:
        """The named columns of the given rows as dicts, in the order of `rows`."""
        rows = np.asarray(rows, np.int64)
        out: list[dict[str, Any]] = [{}] * len(rows)
        place = np.searchsorted(self._starts, rows, side="right") - 1
        for number in np.unique(place):
            mine = np.flatnonzero(place == number)
            batch = self._batches[number].select(list(names))
            for where, row in zip(mine, batch.take(pa.array(rows[mine] - self._starts[number])).to_pylist(), strict=True):
                out[where] = row
        return out

    def chunks(self, rows: np.ndarray) -> list[Chunk]:
        """`Chunk` objects of the given rows, in their order."""
        return [Chunk.model_validate({**row, "span": tuple(row["span"])}) for row in self.take(rows, list(_COLUMNS))]

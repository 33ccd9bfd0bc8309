"""Files of a retrieval set in BEIR's layout, read with their faults named, and of TREC runs, written.

corpus.jsonl and queries.jsonl hold one JSON object a line (``_id``, ``text``, a corpus may have ``title``); qrels.tsv,
or qrels/test.tsv as BEIR has it, the columns query-id, corpus-id and score. (Thakur et al. 2021)
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

from pydantic import BaseModel, Field, ValidationError

from ragbuild.core.errors import InputRefused
from ragbuild.core.records import Chunk, Text
from ragbuild.core.store import error_fields, write_text


class _Row(BaseModel):
    id: Text = Field(alias="_id")
    title: str | None = None
    text: str


def lines(path: Path) -> Iterator[tuple[str, str]]:
    """(file and line number, line) of every line that is not blank. Raises InputRefused."""
    if not path.is_file():
        need = "corpus.jsonl, queries.jsonl, and qrels.tsv or qrels/test.tsv"
        raise InputRefused(f"{path} is missing; a set in BEIR's layout holds {need}")
    with path.open("rb") as handle:
        for number, raw in enumerate(handle, 1):
            try:
                line = raw.decode("utf-8-sig").rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise InputRefused(f"{path}, line {number}: not UTF-8 ({error.reason})") from None
            if line.strip():
                yield f"{path}, line {number}", line


def read_rows(path: Path) -> dict[str, tuple[str, str]]:
    """(title, text) by id of corpus.jsonl or queries.jsonl. Raises InputRefused that names file and line."""
    out: dict[str, tuple[str, str]] = {}
    for place, line in lines(path):
        try:
            row = _Row.model_validate_json(line)
        except ValidationError as error:
            raise InputRefused(f"{place}: expected JSON with _id and text; {error_fields(error)}") from None
        if row.id in out:
            raise InputRefused(f"{place}: the id '{row.id}' stands twice")
        out[row.id] = (row.title or "", row.text)
    if not out:
        raise InputRefused(f"{path} holds no row; it takes one JSON object a line, with _id and text")
    return out


def read_qrels(folder: Path) -> dict[str, dict[str, float]]:
    """Grade by query and document, from qrels.tsv or qrels/test.tsv. Raises InputRefused that names file and line."""
    path = next((p for p in (folder / "qrels.tsv", folder / "qrels" / "test.tsv") if p.is_file()), folder / "qrels.tsv")
    rows = ((place, line.split("\t")) for place, line in lines(path))
    place, head = next(rows, (str(path), []))
    if head != ["query-id", "corpus-id", "score"]:
        raise InputRefused(f"{place}: expected the columns query-id, corpus-id and score, tab-separated; got {head}")
    out: dict[str, dict[str, float]] = {}
    for place, row in rows:
        try:
            query, document, grade = row
            out.setdefault(query, {})[document] = float(grade)
            if not math.isfinite(float(grade)):
                raise ValueError
        except ValueError:
            raise InputRefused(f"{place}: expected a query's id, a document's id and a number; got {row}") from None
    return out


def flat_chunks(rows: Iterable[tuple[str, str, str, tuple[int, int], str]]) -> Iterator[Chunk]:
    """A parent and its one child for each (id, title, text, span, document); the child's id is the one given."""
    for chunk_id, title, text, span, document in rows:
        text, title = text.strip() or "-", title.strip() or "-"
        common = dict(
            chapter=title, breadcrumb=title, page=1, page_end=1, content=text, span=span, n_tokens=1, doc_id=document,
            doc_version="unversioned", product_model=("all",), kb="default", doc_type="document", status="active",
            doc_source=document, language="en",
        )  # fmt: skip
        yield Chunk(chunk_id="parent:" + chunk_id, child_ids=(chunk_id,), **common)
        yield Chunk(chunk_id=chunk_id, parent_id="parent:" + chunk_id, **common)


def write_runs(
    folder: Path,
    queries: Sequence[str],
    rankings: Mapping[str, Sequence[Sequence[str]]],
    truths: Sequence[Mapping[str, float]],
) -> None:
    """``<route>.trec`` and ``qrels.trec``, for trec_eval, pytrec_eval and ranx.

    Their columns are parted by white space, so white space and ``%`` in ids are percent-encoded. The score is 1 / rank:
    these tools sort by score and each breaks ties in its own way, so strict scores keep our order.
    """
    names = [_word(query) for query in queries]
    for route, found in rankings.items():
        rows = [
            f"{name} Q0 {_word(item)} {rank} {1 / rank:.9f} ragbuild-{route}\n"
            for name, ids in zip(names, found, strict=True)
            for rank, item in enumerate(ids, 1)
        ]
        write_text(folder / f"{route}.trec", "".join(rows))
    judged = zip(names, truths, strict=True)
    rows = [f"{name} 0 {_word(item)} {grade:g}\n" for name, truth in judged for item, grade in truth.items()]
    write_text(folder / "qrels.trec", "".join(rows))


def _word(text: str) -> str:
    return re.sub(r"[\s%]", lambda match: quote(match.group(), safe=""), text)

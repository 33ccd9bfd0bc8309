"""Blocks, the pieces of a PDF page, and its tables: those that the library found, and those without rules."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from ragbuild.offline.parse.pdf_lines import Box, Line, inside, join_lines, merged, rows, union

BULLET = re.compile(r"[•●▪◦■□–‣➢*o-]\s+(?=\S)|[•●▪■□◆]")
NUMBER = re.compile(r"(\d{1,2}[.)、](?!\d)|[(（]\d{1,2}[)）]|\[\d{1,3}\])\s*(?=\S)")
CAPTION = re.compile(
    r"(?:Figure|Fig\.|FIGURE|图)\s*(?:[A-Z][.-])?\d++(?:[-.–]\d++)*+[.:：、]?+"  # possessive: 图 5-1 所示 is not 图 5
    r"(?!\s*+(?:(?:shows?|is|are|lists?|illustrates?|depicts?|gives?|and)\b|所示|显示|表示|给出))"
)


@dataclass
class Block:
    """A piece of a page in reading order. `kind`: text, heading, item, code, note, table, image."""

    kind: str
    page: int
    box: Box
    lines: list[Line] = field(default_factory=list)
    table: list[list[str]] = field(default_factory=list)
    columns: tuple[float, ...] = ()  # left edges of a table's columns
    source: str = ""  # the file of a picture
    hint: str = ""  # what the library took it for
    level: int = 0

    @property
    def size(self) -> float:
        return round(median(line.size for line in self.lines) * 2) / 2 if self.lines else 0.0

    @property
    def text(self) -> str:
        return join_lines([line.text for line in self.lines])


def walk(elements: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """All elements, each before those inside it."""
    for element in elements:
        yield element
        for key in ("kids", "list items", "rows", "cells"):
            yield from walk(element.get(key) or ())


def is_layout(table: dict[str, Any]) -> bool:
    """A table of one column, or with hardly anything in it (callouts of a drawing), only lays out."""
    cells = [cell for row in table.get("rows", ()) for cell in row.get("cells", ())]
    filled = sum(bool(cell.get("kids")) for cell in cells)
    return table.get("number of columns", 1) < 2 or filled < max(2, 0.2 * len(cells))


def ruled_table(element: dict[str, Any], page: int, box: Box, pool: list[Line]) -> Block:
    """A table with its cells' text taken from the page's lines; a merged cell is repeated in each place it covers."""
    grid: dict[tuple[int, int], str] = {}
    edges: dict[int, float] = {}
    for cell in (cell for row in element["rows"] for cell in row["cells"]):
        text = _cell([merged(row) for row in rows([line for line in pool if inside(line, cell["bounding box"], 0.5)])])
        if not text:
            text = "\n".join(
                join_lines(k["content"].split("\n")) for k in walk(cell.get("kids", ())) if k.get("content")
            )
        top, left = cell["row number"], cell["column number"]
        edges[left] = cell["bounding box"][0]
        for r in range(top, top + cell.get("row span", 1)):
            for c in range(left, left + cell.get("column span", 1)):
                grid[r, c] = text
    height, width = element["number of rows"], element["number of columns"]
    table = [[grid.get((r, c), "") for c in range(1, width + 1)] for r in range(1, height + 1)]
    return Block("table", page, box, table=table, columns=tuple(edges[c] for c in sorted(edges)))


def _cell(lines: Sequence[Line]) -> str:
    parts: list[list[str]] = []
    for i, line in enumerate(lines):
        if not parts or BULLET.match(line.text) or lines[i - 1].box[1] - line.box[1] > 1.9 * line.size:
            parts.append([])
        parts[-1].append(line.text)
    return "\n".join(join_lines(part) for part in parts)


def aligned_tables(lines: Sequence[Line], page: int) -> list[Block]:
    """Tables without rules: three rows or more of at least three short pieces, which stand in the same columns."""
    found, run = [], []
    for row in [*rows(lines), []]:
        near = run and row and run[-1][0].box[1] - row[0].box[1] < 3.2 * row[0].size
        if row and not row[0].mono and ((near and _spans([*run, row])) or (not run and len(row) > 1)):
            run.append(row)
            continue
        spans, pieces = _spans(run), [piece for r in run for piece in r]
        long = sum(median(len(p.text) for p in pieces if a <= p.box[0] <= b) > 30 for a, b in spans)
        if len(spans) > 2 and sum(len(r) > 2 for r in run) > 2 and long < 2:  # columns of running text are no table
            found.append(_grid(run, spans, page))
        run = [row] if len(row) > 1 else []
    return found


def _spans(run: Sequence[Sequence[Line]]) -> list[list[float]]:
    """The x ranges of the columns that the rows share; empty when a piece spans two of them."""
    spans: list[list[float]] = []
    for x0, x1 in sorted((piece.box[0], piece.box[2]) for row in run for piece in row):
        if spans and x0 < spans[-1][1] + 2:
            spans[-1][1] = max(spans[-1][1], x1)
        else:
            spans.append([x0, x1])
    return spans if all(len({_column(spans, piece) for piece in row}) == len(row) for row in run) else []


def _column(spans: Sequence[Sequence[float]], piece: Line) -> int:
    return next(i for i, (_, right) in enumerate(spans) if piece.box[0] <= right)


def _grid(run: Sequence[Sequence[Line]], spans: Sequence[Sequence[float]], page: int) -> Block:
    """The rows as a table. A piece alone in its row, close below another, goes on with that cell."""
    table: list[list[str]] = []
    for above, row in zip([run[0], *run], run, strict=False):
        c = _column(spans, row[0])
        if table and len(row) == 1 and c and above[0].box[1] - row[0].box[1] < 1.5 * row[0].size:
            table[-1][c] = join_lines([table[-1][c], row[0].text])
            continue
        table.append([""] * len(spans))
        for piece in row:
            table[-1][_column(spans, piece)] = piece.text
    pieces = [piece for row in run for piece in row]
    return Block("table", page, union(p.box for p in pieces), pieces, table, tuple(left for left, _ in spans))

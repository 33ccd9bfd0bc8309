"""From the library's elements and a page's lines to blocks: paragraphs, items, code, notes, tables, pictures.

The library finds tables, pictures and most of the reading order; the lines, with their fonts and places, say where one
paragraph ends and the next begins, what is code, and which columns a page has.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median
from typing import Any

from ragbuild.offline.parse.pdf_lines import Box, Line, clean, inside, join_lines, merged, rows, union

BULLET = re.compile(r"[•●▪◦■□–‣➢*o-]\s+(?=\S)|[•●▪■□◆]")
NUMBER = re.compile(r"(\d{1,2}[.)、](?!\d)|[(（]\d{1,2}[)）]|\[\d{1,3}\])\s*(?=\S)")
CAPTION = re.compile(
    r"(?:Figure|Fig\.|FIGURE|图)\s*(?:[A-Z][.-])?\d+(?:[-.–]\d+)*(?!\d)[.:：、]?"
    r"(?!\s*(?:shows?|is|are|lists?|illustrates?|depicts?|gives?|and)\b|所示|显示|表示|给出)"
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


def leadings(pages: Sequence[list[Line]]) -> dict[float, float]:
    """The distance of base lines inside a paragraph for each font size, in points: the smallest that is common."""
    gaps: dict[float, Counter[float]] = defaultdict(Counter)
    for above, below in (pair for lines in pages for pair in pairwise(lines)):
        gap = round(2 * (above.box[1] - below.box[1])) / 2
        if above.size == below.size and 0.9 * above.size < gap < 2.2 * above.size:
            gaps[above.size][gap] += 1
    return {size: min(g for g, n in found.items() if n >= 0.15 * max(found.values())) for size, found in gaps.items()}


def page_blocks(
    elements: Sequence[dict[str, Any]], lines: list[Line], page: int, leading: dict[float, float]
) -> list[Block]:
    """Blocks of one page, in reading order. `lines` are all of the page's; each is used once."""
    ruled = [e["bounding box"] for e in _walk(elements) if e["type"] == "table" and not _is_layout(e)]
    gutters = _gutters(_blocks_of(elements, lines, page, leading))
    free: dict[int, list[Line]] = defaultdict(list)  # by column; what crosses a gutter is no part of a table in one
    for line in lines:
        if not any(inside(line, box) for box in ruled) and not any(line.box[0] < g < line.box[2] for g in gutters):
            free[sum(g < line.box[0] for g in gutters)].append(line)
    tables = [table for column in free.values() for table in _aligned_tables(column, page)]
    taken = {id(line) for table in tables for line in table.lines}
    blocks = _blocks_of(elements, [line for line in lines if id(line) not in taken], page, leading, bool(tables))
    for table in (replace(table, lines=[]) for table in tables):
        lower = (
            i
            for i, b in enumerate(blocks)
            if b.box[3] <= table.box[3] and min(b.box[2], table.box[2]) > max(b.box[0], table.box[0])
        )
        at = next(lower, len(blocks))
        head = blocks[at - 1] if at else table
        if (
            head.kind == "table"
            and len(head.table) < 3
            and len(head.table[0]) == len(table.table[0])
            and head.box[1] - table.box[3] < 40
        ):
            titles = [" ".join(dict.fromkeys(filter(None, cells))) for cells in zip(*head.table, strict=True)]
            blocks[at - 1] = replace(table, table=[titles, *table.table])  # a ruled header over rows without rules
        else:
            blocks.insert(at, table)
    return _in_columns(blocks)


def _walk(elements: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for element in elements:
        yield element
        for key in ("kids", "list items", "rows", "cells"):
            yield from _walk(element.get(key) or ())


def _is_layout(table: dict[str, Any]) -> bool:
    """A table of one column, or with hardly anything in it (callouts of a drawing), only lays out."""
    cells = [cell for row in table.get("rows", ()) for cell in row.get("cells", ())]
    filled = sum(bool(cell.get("kids")) for cell in cells)
    return table.get("number of columns", 1) < 2 or filled < max(2, 0.2 * len(cells))


def _leaves(elements: Sequence[dict[str, Any]], framed: bool = False) -> Iterator[tuple[dict[str, Any], bool]]:
    """(element, does it stand in a frame) for all that holds text, a table or a picture, in the library's order."""
    for element in elements:
        kind = element["type"]
        if kind in ("header", "footer"):
            continue
        if kind == "table" and not _is_layout(element):
            yield element, framed
            yield from ((inner, framed) for inner in _walk(element["rows"]) if inner["type"] == "image")
            continue
        if "bounding box" in element and (kind == "image" or element.get("content", "").strip()):
            yield element, framed
        kids = [kid for key in ("kids", "list items", "rows", "cells") for kid in element.get(key) or ()]
        frame = kind == "text block" and not any(kid["type"] in ("image", "heading") for kid in _walk(kids))
        yield from _leaves(kids, framed or frame)


def _blocks_of(
    elements: Sequence[dict[str, Any]], pool: list[Line], page: int, leading: dict[float, float], partly: bool = False
) -> list[Block]:
    """The blocks of the library's elements, in its order. `partly`: some lines were taken for a table."""
    blocks: list[Block] = []
    for element, framed in _leaves(elements):
        box = tuple(element["bounding box"])
        if element["type"] == "image":
            blocks.append(Block("image", page, box, source=element.get("source") or ""))
        elif element["type"] == "table":
            blocks.append(_table(element, page, box, pool))
        else:
            own = [line for line in pool if inside(line, box)]
            pool = [line for line in pool if not inside(line, box)]
            blocks += _split(_checked(own, element, partly), element["type"], page, framed, leading)
    if not any(block.lines or block.table for block in blocks):  # an OCR layer, or text that the library did not see
        blocks += _split([merged(row) for row in rows(pool)], "paragraph", page, False, leading)
    return blocks


def _checked(own: list[Line], element: dict[str, Any], partly: bool) -> list[Line]:
    """The page's lines when they say what the library read; else the library's, with places made up."""
    content = [text for line in element["content"].split("\n") if (text := clean(line))]
    length, expected = (len(re.sub(r"\s", "", "".join(texts))) for texts in ([line.text for line in own], content))
    if partly or not content or (own and 0.6 * expected <= length <= 1.2 * expected + 3):
        apart = [row if all(CAPTION.match(piece.text) for piece in row) else [merged(row)] for row in rows(own)]
        return [line for row in apart for line in row]
    x0, y0, x1, y1 = element["bounding box"]
    step, font, size = (y1 - y0) / len(content), element.get("font", ""), float(element.get("font size", 10))
    bold, mono = bool(re.search("bold|black", font, re.I)), bool(re.search("mono|courier", font, re.I))
    return [
        Line((x0, y1 - (i + 1) * step, x1, y1 - i * step), size, bold, mono, text) for i, text in enumerate(content)
    ]


def _split(lines: list[Line], hint: str, page: int, framed: bool, leading: dict[float, float]) -> list[Block]:
    """The lines of one element as blocks: a new one where the font changes, at a gap, at a list mark, at an indent."""
    groups: list[list[Line]] = []
    for line in lines:
        if not groups or _begins(groups[-1], line, hint, leading):
            groups.append([])
        groups[-1].append(line)
    out = []
    for group in groups:
        if hint == "list item":
            group[0].text = re.sub(r"^([*•·∙◦▪–-])(?=[^\s\d*-])", r"\1 ", group[0].text)
        first, box = group[0].text, union(line.box for line in group)
        code = all(line.mono for line in group) and not re.fullmatch(r".*@\S+|https?:\S+", first)
        listed = BULLET.match(first) or NUMBER.match(first)
        if box[3] - box[1] < 3 * (box[2] - box[0]) or len(first) < 6:  # else written upwards in the margin: a stamp
            out.append(
                Block(
                    "code" if code else "note" if framed else "item" if listed else "text", page, box, group, hint=hint
                )
            )
    return out


def _begins(group: list[Line], line: Line, hint: str, leading: dict[float, float]) -> bool:
    """Whether `line` begins a new block after `group`."""
    last, first = group[-1], group[0]
    gap, usual = last.box[1] - line.box[1], leading.get(line.size, 1.25 * line.size)
    if last.mono != line.mono or abs(last.size - line.size) > max(0.7, 0.06 * last.size) or gap > 1.3 * usual + 0.5:
        return True
    if line.mono or CAPTION.match(line.text):
        return not line.mono
    if last.bold != line.bold and (line.bold or len(group) < 4):
        return len(group) < 4 if last.bold else len(line.text) < 70
    if BULLET.match(line.text) and not line.text.startswith(("o ", "- ", "– ")):
        return True
    if NUMBER.match(line.text) and (hint == "list item" or NUMBER.match(first.text)):
        return abs(line.box[0] - first.box[0]) < 4
    if BULLET.match(first.text) or NUMBER.match(first.text):  # back to the left of a hanging indent
        return len(group) > 1 and group[1].box[0] > first.box[0] + 5 and line.box[0] < first.box[0] + 3
    return len(group) > 1 and 5 < line.box[0] - last.box[0] < 45 and bool(re.search(r"[.。:：!?！？”\")]$", last.text))


def _table(element: dict[str, Any], page: int, box: Box, pool: list[Line]) -> Block:
    """A table with its cells' text taken from the page's lines; a merged cell is repeated in each place it covers."""
    grid: dict[tuple[int, int], str] = {}
    edges: dict[int, float] = {}
    for cell in (cell for row in element["rows"] for cell in row["cells"]):
        text = _cell([merged(row) for row in rows([line for line in pool if inside(line, cell["bounding box"], 0.5)])])
        if not text:
            text = "\n".join(
                join_lines(k["content"].split("\n")) for k in _walk(cell.get("kids", ())) if k.get("content")
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


def _aligned_tables(lines: Sequence[Line], page: int) -> list[Block]:
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


def _in_columns(blocks: list[Block]) -> list[Block]:
    """Reading order of a page with columns of running text: what crosses a gutter parts the page into bands; in each
    band the columns are read from left to right. Where there are no columns the library's order stays.
    """
    gutters = _gutters(blocks)
    across = {id(b) for b in blocks if any(b.box[0] < g < b.box[2] for g in gutters)}
    cuts = [(b.box[1] + b.box[3]) / 2 for b in blocks if id(b) in across]

    def place(item: tuple[int, Block]) -> tuple[int, bool, int, float, int]:
        i, block = item
        x, y = (block.box[0] + block.box[2]) / 2, (block.box[1] + block.box[3]) / 2
        band = sum(cut > y for cut in cuts)
        return (
            (band, True, 0, 0.0, i)
            if id(block) in across
            else (band, False, sum(g < x for g in gutters), -block.box[3], i)
        )

    return [block for _, block in sorted(enumerate(blocks), key=place)] if gutters else blocks


def _gutters(blocks: Sequence[Block]) -> list[float]:
    """The middles of the white stripes between columns of paragraphs (three lines or more), items or tables."""
    wide = 0.6 * (max(b.box[2] for b in blocks) - min(b.box[0] for b in blocks)) if blocks else 0
    running = [b for b in blocks if (len(b.lines) > 2 and b.kind != "code") or b.kind in ("item", "table")]
    spans: list[list[float]] = []
    for box in sorted(b.box for b in running if b.box[2] - b.box[0] < wide):
        if spans and box[0] < spans[-1][1] + 4:
            spans[-1][1], spans[-1][2] = max(spans[-1][1], box[2]), spans[-1][2] + box[3] - box[1]
        else:
            spans.append([box[0], box[2], box[3] - box[1]])
    columns = [span for span in spans if span[2] > 50 and span[1] - span[0] > 80]
    return [(left[1] + right[0]) / 2 for left, right in pairwise(columns)]

"""From the layout model's elements and the page's lines to blocks: paragraphs, headings, items, code, tables, pictures.

The library finds tables, pictures and most of the reading order; the lines (with their fonts) say where a heading ends
and its text begins, what is code, and which columns a page has. Every rule is stated where it is applied.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median
from typing import Any

from ragbuild.core.text import HAN
from ragbuild.offline.parse.pdf_lines import Box, Line, inside, join_lines, merged, rows, union

BULLET = re.compile(r"[•●▪◦■□–‣➢\u2751*o-]\s+(?=\S)|[•●▪■□◆]")
NUMBER = re.compile(r"(\d{1,2}[.)、](?!\d)|[(（]\d{1,2}[)）]|\[\d{1,3}\])\s*(?=\S)")
CAPTION = re.compile(r"(?:Figure|Fig\.|FIGURE|Abb\.|图)\s*(?:[A-Z][.-])?\d+(?:[-.–]\d+)*(?!\d)[.:：、]?(?!\s*(?:shows?|is|are|lists?|illustrates?|depicts?|gives?|and)\b|所示|显示|表示|给出)")  # noqa: E501
_NUMBERED = re.compile(
    r"(?P<digits>\d{1,2}(?:\.\d{1,2}){0,4})\.?[ \u3000]+(?=[^\W\d_])|(?P<roman>[IVX]{1,5}\.) |(?P<letters>[A-Z](?:\.[A-Z\d]{1,2}){1,3}) |"
    r"(?P<word>第[一二三四五六七八九十\d]{1,3}[章节]|Chapter ?\d+|Appendix [A-Z]|附录)"
)


@dataclass
class Block:
    """A piece of a page in reading order. `kind`: text, heading, item, code, note, table, image, caption."""

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
        return median(line.size for line in self.lines) if self.lines else 0.0

    @property
    def text(self) -> str:
        return join_lines([line.text for line in self.lines])


def heading_number(text: str) -> int:
    """The depth of a heading's number: 1 for ``3 Scope``, ``第一章`` or ``IV.``, 2 for ``3.1``; 0 without a number."""
    match = _NUMBERED.match(text)
    if not match:
        return 0
    number = match.group("digits") or match.group("letters") or ""
    return number.count(".") + 1


def page_blocks(elements: Sequence[dict[str, Any]], lines: list[Line], page: int, leading: dict[float, float]) -> list[Block]:
    """Blocks of one page, in reading order. `lines` are all of the page's; each is used once."""
    tables = [e["bounding box"] for e in _walk(elements) if e["type"] == "table" and not _is_layout(e)]
    free = [line for line in lines if not any(inside(line, tuple(box)) for box in tables)]
    found = _aligned_tables(free, page)
    taken = {id(line) for block in found for line in block.lines}
    pool = [line for line in lines if id(line) not in taken]
    blocks: list[Block] = []
    for element, boxed in _leaves(elements):
        box = tuple(element["bounding box"])
        if element["type"] == "image":
            blocks.append(Block("image", page, box, source=element.get("source") or ""))
        elif element["type"] == "table":
            blocks.append(_table(element, page, box, pool))
        else:
            own = [line for line in pool if inside(line, box)]
            pool = [line for line in pool if not inside(line, box)]
            blocks += _split(_checked(own, element, taken and any(inside(f, box) for t in found for f in t.lines)), element, page, boxed, leading)
    if not any(block.lines or block.table for block in blocks):  # an OCR layer, or text that the library did not see
        blocks += _split([merged(row) for row in rows(pool)], {"type": "paragraph"}, page, False, leading)
    for block in found:
        at = next((i for i, other in enumerate(blocks) if other.box[3] <= block.box[3] and _overlap(other.box, block.box)), len(blocks))
        blocks.insert(at, replace(block, lines=[]))
    return _in_columns(blocks)


def leadings(pages: Sequence[list[Line]]) -> dict[float, float]:
    """The distance of base lines inside a paragraph for each font size, in points: the smallest that is common."""
    gaps: dict[float, Counter[float]] = defaultdict(Counter)
    for lines in pages:
        for above, below in pairwise(lines):
            gap = round(2 * (above.box[1] - below.box[1])) / 2
            if above.size == below.size and 0.9 * above.size < gap < 2.2 * above.size:
                gaps[above.size][gap] += 1
    return {
        size: min(gap for gap, count in counter.items() if count >= 0.15 * counter.most_common(1)[0][1])
        for size, counter in gaps.items()
    }


def _walk(elements: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for element in elements:
        yield element
        for key in ("kids", "list items", "rows", "cells"):
            yield from _walk(element.get(key) or ())


def _is_layout(table: dict[str, Any]) -> bool:
    """A table of one column, or with hardly anything in it (callouts of a drawing), only lays out."""
    cells = [cell for row in table.get("rows", ()) for cell in row.get("cells", ())]
    filled = sum(bool(cell.get("kids")) for cell in cells)
    return table.get("number of columns", 1) < 2 or filled < 2 or filled < 0.2 * len(cells)


def _leaves(elements: Sequence[dict[str, Any]], boxed: bool = False) -> Iterator[tuple[dict[str, Any], bool]]:
    """(element, does it stand in a frame) for all that holds text, a table or a picture, in the library's order."""
    for element in elements:
        kind = element.get("type")
        if kind in ("header", "footer") or (kind != "list" and "bounding box" not in element):
            continue
        if kind == "table" and not _is_layout(element):
            yield element, boxed
            for inner in _walk(element.get("rows", ())):
                if inner["type"] == "image":
                    yield inner, boxed
            continue
        if kind == "image" or element.get("content", "").strip():
            yield element, boxed
        kids = [kid for key in ("kids", "list items", "rows", "cells") for kid in element.get(key) or ()]
        frame = kind in ("text block", "table") and not any(k["type"] in ("image", "heading") for k in _walk(kids))
        if kind == "table row":  # has no box of its own
            kids = element["cells"]
        yield from _leaves([k | {"bounding box": k.get("bounding box", element.get("bounding box"))} for k in kids], boxed or frame)


def _checked(own: list[Line], element: dict[str, Any], shared: bool) -> list[Line]:
    """The page's lines when they say what the library read; else the library's, with places made up."""
    content = [line for line in element["content"].split("\n") if line.strip()]
    length, expected = (len(re.sub(r"\s", "", "".join(texts))) for texts in ([line.text for line in own], content))
    if own and (0.6 * expected <= length <= 1.2 * expected + 3):
        return [merged(row) for row in rows(own)]
    if shared or not content:
        return [merged(row) for row in rows(own)] if own else []
    x0, y0, x1, y1 = element["bounding box"]
    step, font, size = (y1 - y0) / len(content), element.get("font", ""), float(element.get("font size", 10))
    bold, mono = bool(re.search("bold|black", font, re.I)), bool(re.search("mono|courier", font, re.I))
    return [Line((x0, y1 - (i + 1) * step, x1, y1 - i * step), size, bold, mono, text.strip()) for i, text in enumerate(content)]


def _split(lines: list[Line], element: dict[str, Any], page: int, boxed: bool, leading: dict[float, float]) -> list[Block]:
    """The lines of one element as blocks: a new one where the font changes, at a gap, at a list mark, at an indent."""
    groups: list[list[Line]] = []
    for line in lines:
        if not groups or _begins(groups[-1], line, element["type"], leading):
            groups.append([])
        groups[-1].append(line)
    out = []
    for group in groups:
        first = group[0].text
        listed = BULLET.match(first) or (NUMBER.match(first) and element["type"] in ("list item", "paragraph"))
        kind = "code" if all(g.mono for g in group) else "note" if boxed else "item" if listed else "text"
        if kind == "text" and (group[0].box[3] - group[0].box[1]) > 3 * (group[0].box[2] - group[0].box[0]) and len(first) > 5:
            continue  # written from bottom to top in the margin: a stamp
        out.append(Block(kind, page, union(line.box for line in group), group, hint=element["type"]))
    return out


def _begins(group: list[Line], line: Line, hint: str, leading: dict[float, float]) -> bool:
    """Whether `line` begins a new block after `group`."""
    last, gap = group[-1], group[-1].box[1] - line.box[1]
    usual = leading.get(line.size, 1.25 * line.size)
    if last.mono != line.mono or abs(last.size - line.size) > max(0.7, 0.06 * last.size) or gap > 1.3 * usual + 0.5:
        return True
    if line.mono:
        return False
    if last.bold != line.bold and (line.bold or len(group) < 4):
        return len(group) < 4 if last.bold else len(line.text) < 70
    if BULLET.match(line.text) and not line.text.startswith(("o ", "- ", "– ")):
        return True
    if NUMBER.match(line.text) and (hint == "list item" or NUMBER.match(group[0].text)):
        return abs(line.box[0] - group[0].box[0]) < 4
    left = min(other.box[0] for other in group)
    if BULLET.match(group[0].text) or NUMBER.match(group[0].text):  # back to the left of a hanging indent
        return len(group) > 1 and group[1].box[0] > left + 5 and line.box[0] < left + 3
    indented = 5 < line.box[0] - min(left, line.box[0]) < 45 and len(group) > 1
    return indented and bool(re.search(r"[.。:：!?！？”\")]$", last.text))


def _table(element: dict[str, Any], page: int, box: Box, pool: list[Line]) -> Block:
    """A table with its cells' text taken from the page's lines; a merged cell is repeated in each place it covers."""
    grid: dict[tuple[int, int], str] = {}
    edges: dict[int, float] = {}
    for cell in (cell for row in element["rows"] for cell in row["cells"]):
        own = [line for line in pool if inside(line, tuple(cell["bounding box"]), 0.5)]
        text = _cell([merged(row) for row in rows(own)])
        if not text:
            text = "\n".join(join_lines(k["content"].split("\n")) for k in _walk(cell.get("kids", ())) if k.get("content"))
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
        gap = lines[i - 1].box[1] - line.box[1] if i else 0
        if not parts or BULLET.match(line.text) or gap > 1.9 * line.size:
            parts.append([])
        parts[-1].append(line.text)
    return "\n".join(join_lines(part) for part in parts)


def _aligned_tables(lines: Sequence[Line], page: int) -> list[Block]:
    """Tables without rules: at least three rows of short pieces that stand in at least three columns.

    A piece alone in its row, close below another, continues that cell.
    """
    found, run = [], []
    for row in [*rows(lines), []]:
        fits = bool(row) and (len(row) > 1 or bool(run)) and not row[0].mono
        near = not run or (row and run[-1][0].box[1] - row[0].box[1] < 3.2 * row[0].size)
        aligned = not run or not row or _columns([*run, row]) is not None
        if fits and near and aligned:
            run.append(row)
            continue
        while run and len(run[-1]) < 2 and len(run) > 1 and run[-2][0].box[1] - run[-1][0].box[1] > 1.5 * run[-1][0].size:
            run.pop()
        columns = _columns(run) if run else None
        pieces = [piece for r in run for piece in r]
        if columns and len(columns) > 2 and sum(len(r) > 1 for r in run) > 2 and median(len(p.text) for p in pieces) < 26:
            found.append(_grid(run, columns, page))
        run = [row] if row and len(row) > 2 else []
    return found


def _columns(run: Sequence[Sequence[Line]]) -> list[tuple[float, float]] | None:
    """The x ranges of the columns that the rows share, or None when a piece spans two of them."""
    spans: list[list[float]] = []
    for x0, x1 in sorted((p.box[0], p.box[2]) for row in run for p in row):
        if spans and x0 < spans[-1][1] + 2:
            spans[-1][1] = max(spans[-1][1], x1)
        else:
            spans.append([x0, x1])
    fit = all(len({_which(spans, p) for p in row}) == len(row) for row in run)
    return [(a, b) for a, b in spans] if fit and len(spans) > 1 else None


def _which(spans: Sequence[Sequence[float]], piece: Line) -> int:
    return next(i for i, (a, b) in enumerate(spans) if a <= piece.box[0] + 0.01 and piece.box[2] <= b + 0.01)


def _grid(run: Sequence[Sequence[Line]], columns: Sequence[tuple[float, float]], page: int) -> Block:
    table: list[list[str]] = []
    above = run[0][0]
    for row in run:
        if table and len(row) == 1 and above.box[1] - row[0].box[1] < 1.5 * row[0].size and _which(columns, row[0]) > 0:
            c = _which(columns, row[0])
            table[-1][c] = join_lines([table[-1][c], row[0].text])
        else:
            table.append([""] * len(columns))
            for piece in row:
                table[-1][_which(columns, piece)] = piece.text
        above = row[0]
    pieces = [piece for row in run for piece in row]
    return Block("table", page, union(p.box for p in pieces), pieces, table, tuple(a for a, _ in columns))


def _overlap(a: Box, b: Box) -> bool:
    return min(a[2], b[2]) - max(a[0], b[0]) > 0


def _in_columns(blocks: list[Block]) -> list[Block]:
    """Reading order of a page with columns of running text: what crosses a gutter parts the page into bands; in each
    band the columns are read from left to right. Where there are no columns the library's order stays.
    """
    gutters = _gutters(blocks)
    if not gutters:
        return blocks
    across = [b for b in blocks if any(b.box[0] < g < b.box[2] for g in gutters)]
    cuts = sorted(((b.box[1] + b.box[3]) / 2 for b in across), reverse=True)

    def place(item: tuple[int, Block]) -> tuple[int, bool, int, float, int]:
        i, block = item
        x, y = (block.box[0] + block.box[2]) / 2, (block.box[1] + block.box[3]) / 2
        band, crosses = sum(cut > y for cut in cuts), any(other is block for other in across)
        return (band, True, 0, 0.0, i) if crosses else (band, False, sum(g < x for g in gutters), -block.box[3], i)

    return [block for _, block in sorted(enumerate(blocks), key=place)]


def _gutters(blocks: Sequence[Block]) -> list[float]:
    """The middles of the white stripes between columns: each column holds paragraphs of three lines or more."""
    wide = 0.6 * (max(b.box[2] for b in blocks) - min(b.box[0] for b in blocks)) if blocks else 0
    running = [b for b in blocks if len(b.lines) > 2 and b.kind != "code" and b.box[2] - b.box[0] < wide]
    spans: list[list[float]] = []
    for block in sorted(running, key=lambda b: b.box[0]):
        if spans and block.box[0] < spans[-1][1] + 4:
            spans[-1][1], spans[-1][2] = max(spans[-1][1], block.box[2]), spans[-1][2] + block.box[3] - block.box[1]
        else:
            spans.append([block.box[0], block.box[2], block.box[3] - block.box[1]])
    columns = [span for span in spans if span[2] > 50 and span[1] - span[0] > 80]
    return [(left[1] + right[0]) / 2 for left, right in pairwise(columns)]

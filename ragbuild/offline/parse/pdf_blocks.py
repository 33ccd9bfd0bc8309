"""From the library's elements and a page's lines to blocks: paragraphs, items, code, notes, tables, pictures.

The library finds tables, pictures and most of the reading order; the lines, with their fonts and places, say where one
paragraph ends and the next begins, what is code, and which columns a page has.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from ragbuild.offline.parse.pdf_lines import Line, clean, inside, merged, rows, union
from ragbuild.offline.parse.pdf_tables import (
    BULLET,
    CAPTION,
    NUMBER,
    Block,
    aligned_tables,
    is_layout,
    ruled_table,
    walk,
)


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
    ruled = [e["bounding box"] for e in walk(elements) if e["type"] == "table" and not is_layout(e)]
    gutters = _gutters(_blocks_of(elements, lines, page, leading))
    free: dict[int, list[Line]] = defaultdict(list)  # by column; what crosses a gutter is no part of a table in one
    for line in lines:
        if not any(inside(line, box) for box in ruled) and not any(line.box[0] < g < line.box[2] for g in gutters):
            free[sum(g < line.box[0] for g in gutters)].append(line)
    tables = [table for column in free.values() for table in aligned_tables(column, page)]
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


def _leaves(elements: Sequence[dict[str, Any]], framed: bool = False) -> Iterator[tuple[dict[str, Any], bool]]:
    """(element, does it stand in a frame) for all that holds text, a table or a picture, in the library's order."""
    for element in elements:
        kind = element["type"]
        if kind in ("header", "footer"):
            continue
        if kind == "table" and not is_layout(element):
            yield element, framed
            yield from ((inner, framed) for inner in walk(element["rows"]) if inner["type"] == "image")
            continue
        if "bounding box" in element and (kind == "image" or element.get("content", "").strip()):
            yield element, framed
        kids = [kid for key in ("kids", "list items", "rows", "cells") for kid in element.get(key) or ()]
        frame = kind == "text block" and not any(kid["type"] in ("image", "heading") for kid in walk(kids))
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
            blocks.append(ruled_table(element, page, box, pool))
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

"""Passages of a parent that can be quoted: sentences, list items, whole lists, table rows, code blocks.

Each is a span of the parent's content, so that a citation points at the very text it quotes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ragbuild.core.text import sentences, strip_span

Kind = Literal["sentence", "item", "list", "row", "code"]
_ITEM = re.compile(r"^\s{0,8}(?:[-*+]|\d{1,3}[.)、])\s+")
_NUMBERED = re.compile(r"^\s{0,3}\d{1,3}[.)、]\s+")
_HEADING = re.compile(r"^#{1,6}\s")
_RULE = re.compile(r"^\s*\|?\s*:?-{2,}")
_IMAGE = re.compile(r"^\s*!\[[^\]]*\]\([^)]*\)\s*$")


@dataclass(frozen=True)
class Passage:
    """Span within the parent's content; `header` is the header row of a table row; `steps` of a numbered list."""

    start: int
    end: int
    kind: Kind
    header: str = ""
    steps: int = 0


def passages(content: str) -> list[Passage]:
    """All passages in order. Headings, rules and images are none. A list comes as its items and also whole, with the
    sentence that leads into it."""
    out: list[Passage] = []
    for kind, start, end in _blocks(content):
        if kind == "code":
            out.append(Passage(start, end, "code"))
        elif kind == "table":
            out += _rows(content, start, end)
        elif kind == "list":
            items = _items(content, start, end)
            before = out[-1] if out and out[-1].kind == "sentence" else None
            lead = before and content[before.start : before.end].rstrip()[-1:] in ":：" and before.end >= start - 3
            numbered = sum(bool(_NUMBERED.match(content[a:b])) for a, b in items)
            out += [Passage(a, b, "item") for a, b in items]
            if len(items) > 1:
                out.append(Passage(before.start if lead and before else start, items[-1][1], "list", steps=numbered))
        else:
            out += [Passage(start + a, start + b, "sentence") for a, b in sentences(content[start:end])]
    return out


def _blocks(content: str) -> Iterator[tuple[str, int, int]]:
    """(kind, start, end) of code, table, list and text blocks; a blank line ends a text block but not a list."""
    kind, start, end, fence = "", 0, 0, False
    position = 0
    for line in content.splitlines(keepends=True):
        a, position = position, position + len(line)
        text = line.strip()
        if text.startswith(("```", "~~~")):
            if not fence and kind:
                yield kind, start, end
            if fence:
                yield "code", start, position
                kind = ""
            else:
                kind, start = "code", a
            fence = not fence
            end = position
            continue
        if fence:
            end = position
            continue
        now = _line_kind(line, kind)
        if now != kind:
            if kind:
                yield kind, start, end
            kind, start = now, a
        if now:
            end = a + len(line.rstrip())
    if kind:
        yield kind, start, end


def _line_kind(line: str, before: str) -> str:
    text = line.strip()
    if not text:
        return "list" if before == "list" else ""
    if _HEADING.match(line) or _IMAGE.match(line):
        return ""
    if text.startswith("|"):
        return "table"
    if _ITEM.match(line) or (before == "list" and line[:1] in " \t"):
        return "list"
    return "text"


def _items(content: str, start: int, end: int) -> list[tuple[int, int]]:
    """Spans of the items of a list, each with its continuation lines."""
    starts, position = [], start
    for line in content[start:end].splitlines(keepends=True):
        if _ITEM.match(line):
            starts.append(position)
        position += len(line)
    starts = starts or [start]
    return [strip_span(content, a, b) for a, b in zip(starts, [*starts[1:], end], strict=True)]


def _rows(content: str, start: int, end: int) -> list[Passage]:
    lines, position = [], start
    for line in content[start:end].splitlines(keepends=True):
        lines.append((position, position + len(line.rstrip()), line))
        position += len(line)
    header = lines[0][2].strip() if len(lines) > 1 and _RULE.match(lines[1][2]) else ""
    body = lines[2:] if header else lines
    return [Passage(a, b, "row", header) for a, b, line in body if not _RULE.match(line) and line.strip(" |\n")]


def readable(content: str, passage: Passage) -> str:
    """The passage as a person reads it: a table row becomes ``column: value`` pairs, a quote mark or emphasis goes."""
    text = content[passage.start : passage.end]
    if passage.kind == "row":
        cells = _cells(text)
        names = _cells(passage.header) if passage.header else []
        if len(names) == len(cells):
            return "; ".join(f"{n}: {c}" if n else c for n, c in zip(names, cells, strict=True) if c)
        return "; ".join(c for c in cells if c)
    if passage.kind == "code":
        return text
    text = re.sub(r"^\s*>\s?", "", text, flags=re.MULTILINE)
    if passage.kind == "item":
        text = _ITEM.sub("", text, count=1)
    return text.replace("**", "").strip()


def _cells(row: str) -> list[str]:
    row = row.strip().removeprefix("|")
    row = row if row.endswith("\\|") else row.removesuffix("|")  # an empty cell at either end stays a cell
    return [c.strip().replace("\\|", "|").replace("**", "") for c in re.split(r"(?<!\\)\|", row)]

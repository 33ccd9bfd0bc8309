"""Passages of a parent that can be quoted: sentences, short paragraphs, list items, whole lists, table rows, whole
tables, code blocks.

Each is a span of the parent's content, so that a citation points at the very text it quotes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from ragbuild.core.text import HAN, row_cells, sentences, strip_span

Kind = Literal["sentence", "paragraph", "note", "item", "list", "row", "table", "code"]
Block = tuple[str, int, int]  # kind, start, end

_ITEM = re.compile(r"^\s{0,8}(?:[-*+•]\s|\d{1,3}(?:[.)]\s|、)|[（(]\d{1,3}[)）])\s*")
_NUMBERED = re.compile(r"^\s{0,3}[（(]?(\d{1,3})[.)、）]")
_HEADING = re.compile(r"^#{1,6}\s")
_RULE = re.compile(r"^\s*\|?\s*:?-{2,}")
_IMAGE = re.compile(r"^\s*!\[[^\]]*\]\([^)]*\)\s*$")
_ASKED = re.compile(r"\A\s*(?:\*\*)?(?:Q|问)\s*[:：][^\n]*\n+(?=\s*(?:\*\*)?(?:A|答)\s*[:：])")
_PLAIN = frozenset(
    "value values description meaning details setting 值 数值 内容 说明 描述 含义 规格 参数".split()
)  # names that add nothing
_LONG = 480  # width of a paragraph or note that is quoted whole; a Han character is as wide as two and a half letters
_ROWS = 24  # of a table that is quoted whole


@dataclass(frozen=True)
class Passage:
    """Span within the parent's content.

    `header` is what the passage is read with: the header row of a row or table, the question that a paragraph answers.
    `steps` counts the numbered steps of a list, the rows of a table. `block` numbers the block of text it comes from.
    """

    start: int
    end: int
    kind: Kind
    header: str = ""
    steps: int = 0
    block: int = 0


def passages(content: str, table_header: str = "") -> list[Passage]:
    """All passages in order. Headings, rules and images are none.

    A list comes as its items and also whole, with the sentence that leads into it; numbered steps go on over the code
    between them. A table comes as its rows and also whole, a short paragraph as its sentences and also whole.
    `table_header`: of a table which the content continues without repeating it.
    """
    out: list[Passage] = []
    for number, (kind, start, end) in enumerate(_joined(content)):
        last = out[-1] if out else None
        leads = (
            last
            and last.kind in ("sentence", "paragraph")
            and content[last.end - 1] in ":："
            and last.block == number - 1
        )
        led = next(p.start for p in reversed(out) if p.kind == "sentence") if leads else start
        if kind == "code":
            out.append(Passage(led, end, "code", block=number))
        elif kind == "table":
            out += _table(content, start, end, table_header if not out else "", number)
        elif kind == "list":
            items = _items(content, start, end)
            steps = sum(bool(_NUMBERED.match(content[a:b])) for a, b in items)
            out += [Passage(a, b, "item", block=number) for a, b in items]
            if len(items) > 1:
                out.append(Passage(led, items[-1][1], "list", steps=steps, block=number))
        else:
            out += _text(content, kind, start, end, number)
    return out


def _text(content: str, kind: str, start: int, end: int, number: int) -> list[Passage]:
    asked = _ASKED.match(content[start:end])
    question = asked.group().strip() if asked else ""
    start += asked.end() if asked else 0
    text = content[start:end]
    spans = [(start + a, start + b) for a, b in sentences(text)]
    out = [Passage(a, b, "sentence", question, block=number) for a, b in spans]
    short = len(text) + 1.5 * len(re.findall(f"[{HAN}]", text)) <= _LONG
    if kind == "quote" and short:
        return [Passage(*strip_span(content, start, end), "note", question, block=number)]
    if len(spans) > 1 and short:
        out.append(Passage(spans[0][0], spans[-1][1], "paragraph", question, block=number))
    return out


def _joined(content: str) -> list[Block]:
    """Blocks, with numbered steps and the code between or after them as one list."""
    out: list[Block] = []
    for kind, start, end in _blocks(content):
        if out and kind == "code" and out[-1][0] == "list" and content[out[-1][2] - 1] in ":：":
            out[-1] = ("list", out[-1][1], end)
        elif out and kind == "list" and out[-1][0] == "list":
            before, first = _numbers(content, *out[-1][1:]), _numbers(content, start, end)
            if before and first and first[0] == before[-1] + 1:
                out[-1] = ("list", out[-1][1], end)
            else:
                out.append((kind, start, end))
        else:
            out.append((kind, start, end))
    return out


def _numbers(content: str, start: int, end: int) -> list[int]:
    return [int(m[1]) for a, b in _items(content, start, end) if (m := _NUMBERED.match(content[a:b]))]


def _blocks(content: str) -> Iterator[Block]:
    """(kind, start, end) of code, table, list, quote and text blocks; a blank line ends all but a list."""
    kind, start, end, fence, position = "", 0, 0, "", 0
    for line in content.splitlines(keepends=True):
        a, position = position, position + len(line)
        text = line.strip()
        if fence:
            end = a + len(line.rstrip()) if text else end
            if text.startswith(fence):
                fence = ""
                if kind == "code":
                    yield kind, start, end
                    kind = ""
            continue
        if text.startswith(("```", "~~~")):
            fence = text[:3]
            now = "list" if kind == "list" and line[:1] in " \t" else "code"  # indented code belongs to its step
        else:
            now = _line_kind(line, kind)
        if now != kind:
            if kind:
                yield kind, start, end
            kind, start = now, a
        if now and text:
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
    return "quote" if text.startswith(">") else "text"


def _items(content: str, start: int, end: int) -> list[tuple[int, int]]:
    """Spans of the items of a list, each with its continuation lines and code."""
    starts, position, fence = [], start, False
    for line in content[start:end].splitlines(keepends=True):
        if line.strip().startswith(("```", "~~~")):
            fence = not fence
        elif not fence and _ITEM.match(line):
            starts.append(position)
        position += len(line)
    ends = pairwise([*(starts or [start]), end])
    return [strip_span(content, a, b) for a, b in ends]


def _table(content: str, start: int, end: int, header: str, number: int) -> list[Passage]:
    """The rows, and the whole table when it is not long. Its own header wins over the one it continues."""
    lines, position = [], start
    for line in content[start:end].splitlines(keepends=True):
        lines.append((position, position + len(line.rstrip()), line))
        position += len(line)
    own = len(lines) > 1 and bool(_RULE.match(lines[1][2]))
    header = lines[0][2].strip() if own else header.strip().split("\n")[0]
    body = [(a, b) for a, b, line in (lines[2:] if own else lines) if not _RULE.match(line) and line.strip(" |\n")]
    out = [Passage(a, b, "row", header, block=number) for a, b in body]
    if 1 < len(body) <= _ROWS:
        out.append(Passage(body[0][0], body[-1][1], "table", header, len(body), number))
    return out


def readable(content: str, passage: Passage) -> str:
    """The passage as a person reads it: a table row as its first cell and ``column: value`` pairs, quote marks,
    emphasis and the ``A:`` of an answer gone."""
    text = content[passage.start : passage.end]
    if passage.kind == "row":
        return _row(text, passage.header)
    if passage.kind == "table":
        rows = [line for line in text.split("\n") if line.strip(" |") and not _RULE.match(line)]
        return "\n".join(f"- {_row(line, passage.header)}" for line in rows)
    if passage.kind == "code":
        lead, fence, code = text.partition("```" if "```" in text else "~~~")
        return lead.replace("**", "").rstrip() + ("\n" if lead.strip() else "") + fence + code
    text = re.sub(r"^\s*>\s?", "", text, flags=re.MULTILINE)
    if passage.kind == "item":
        text = _ITEM.sub("", text, count=1)
    text = re.sub(r"\A\s*(?:\*\*)?(?:A|答)\s*[:：]\s*(?:\*\*)?", "", text)
    text = re.sub(r"!\[[^\]\n]{0,300}\]\([^)\n]{0,300}\)|\*\*", "", text)
    return (
        re.sub(r"\n{2,}", "\n", text).strip()
        if passage.kind in ("list", "item")
        else " ".join(text.split("\n")).strip()
    )


def _row(line: str, header: str) -> str:
    cells, names = row_cells(line), row_cells(header) if header else []
    if len(names) != len(cells) or not any(cells):
        return "; ".join(c for c in cells if c)
    zh = bool(re.search(f"[{HAN}]", line))
    named = [f"{n}{'：' if zh else ': '}{c}" if n else c for n, c in zip(names, cells, strict=True) if c]
    if re.search(f"[A-Za-z{HAN}]", cells[0]):  # what a row is about needs no name, a bare number does
        named[0] = cells[0]
        if len(named) == 2 and names[1].lower() in _PLAIN:
            return ("：" if zh else ": ").join((cells[0], next(c for c in cells[1:] if c)))
    return named[0] + (" — " if len(named) > 1 else "") + ("；" if zh else "; ").join(named[1:])

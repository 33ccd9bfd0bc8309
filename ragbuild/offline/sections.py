"""Reads Markdown into sections and their units, the pieces that chunking does not cut if it can be helped.

Every ATX heading outside a code fence starts a section. Units are headings, sentences (of paragraphs and list items),
table headers and rows, code lines and images. Spans are code points, half-open, without surrounding white space; every
character that is not white space lies in exactly one unit. Time is linear in the text, whatever it holds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ragbuild.core.text import sentences, strip_span

# What a break before a unit costs, where one chunk more costs 1. A break at the start of a paragraph is free.
ITEM_START, SENTENCE, ROW, CODE, IN_ITEM, LEAD_IN, KEEP = 0.1, 0.15, 0.15, 0.3, 0.3, 1.0, 20.0

_LINE = re.compile(r"[^\r\n]*+(?:\r\n?|\n)|[^\r\n]++\Z")
_HEADING = re.compile(r"(#{1,6})(?:[ \t]+(.*))?", re.DOTALL)
_FENCE = re.compile(r"`{3,}(?=[^`]*\Z)|~{3,}")  # no code fence: ```inline```
_ITEM = re.compile(r"(?:[-*+•]|\d{1,9}[.)])(?=\s|\Z)|[（(]\d{1,2}[）)]|\d{1,2}、|[①-⑳]")
_IMAGE = re.compile(r"!\[[^\]]*\]\([^)]*\)")
_LINK = re.compile(r"!?\[([^\[\]]{0,300})\]\([^()]{0,1000}\)")


@dataclass(frozen=True, slots=True)
class Section:
    """A place in a document: the headings in force there."""

    path: dict[int, str]  # heading level -> text of the heading in force
    level: int  # of its own heading; 0 before the first one


@dataclass(frozen=True, slots=True)
class Unit:
    """A piece of Markdown that is not divided while chunks are packed; a span of code points."""

    start: int
    end: int
    kind: str  # heading | prose | thead | row | code | image
    glue: float  # cost of a break before it
    section: Section
    block: int = -1  # start of the table or code block that it belongs to
    header: str = ""  # of a row's table
    inner: bool = False  # starts inside a sentence, a row or a code line


class _Reader:
    """Reads Markdown line by line into `units`; everything that is not white space lies in exactly one."""

    def __init__(self, markdown: str) -> None:
        self.md, self.section, self.units = markdown, Section({}, 0), list[Unit]()
        self.paragraph: tuple[int, int, int] | None = None  # start, end, where the text behind a list marker starts
        self.lines = [(m.start(), *strip_span(markdown, *m.span())) for m in _LINE.finditer(markdown)]
        fence, header, in_list, blank, skip = "", "", False, False, -1
        for i, (origin, start, end) in enumerate(self.lines):
            line, indent = markdown[start:end], len(markdown[origin:start].expandtabs(4))
            if i == skip:
                continue
            if not line:
                self._flush()
                header, blank = "", True
                continue
            if fence:
                closes = line.startswith(fence) and not line.strip(fence[0])
                self._add(start, end, "code", LEAD_IN if closes else ITEM_START if blank else CODE)
                fence = "" if closes else fence
            elif (match := _FENCE.match(line)) and (indent < 4 or in_list):
                self._flush()
                self._add(start, end, "code")
                fence, header = match.group(), ""
            elif (match := _HEADING.fullmatch(line)) and indent < 4:
                self._flush()
                self._heading(start, end, len(match[1]), match[2] or "")
                header, in_list = "", False
            elif "|" in line and not header and self._divides(i + 1):
                self._flush()
                skip, end = i + 1, self.lines[i + 1][2]
                header = markdown[start:end]
                self._add(start, end, "thead")
            elif "|" in line and (header or line.startswith("|")):
                self._flush()
                self._add(start, end, "row", 0.0 if blank else ROW, header)
            elif (match := _ITEM.match(line)) and self._begins_item(match.group()):
                self._flush()
                self.paragraph, in_list, header = (start, end, start + match.end()), True, ""
            elif self.paragraph:
                self.paragraph = (self.paragraph[0], end, self.paragraph[2])
            elif indent >= 4 and not in_list:
                self._add(start, end, "code", 0.0 if blank else CODE)
            elif _IMAGE.fullmatch(line):
                self._add(start, end, "image")
            else:
                self.paragraph, in_list, header = (start, end, start), in_list and indent >= 2, ""
            blank = False
        self._flush()

    def _divides(self, i: int) -> bool:
        """Whether line `i` is the row of dashes under a table's header."""
        line = self.md[slice(*self.lines[i][1:])].lstrip("> \t") if i < len(self.lines) else ""
        return "-" in line and "|" in line and not set(line) - set("|:- \t")

    def _begins_item(self, marker: str) -> bool:
        """Inside a paragraph a number other than 1 begins an item only after a finished sentence or an item."""
        if not self.paragraph or self.paragraph[0] < self.paragraph[2] or marker.strip("（().、）") in "1-*+•①":
            return True
        return self.md[self.paragraph[1] - 1] in ".!?。！？：:；;"

    def _add(self, start: int, end: int, kind: str, glue: float = 0.0, header: str = "") -> None:
        last = self.units[-1] if self.units and self.units[-1].section is self.section else None
        block = -1
        if kind in ("thead", "row", "code"):
            block = last.block if last and glue and last.block >= 0 else start
        if last and (last.kind == "heading" or (last.kind == "thead" and kind == "row")):
            glue = KEEP
        elif last and last.kind == "prose" and self.md[last.end - 1] in ":：":
            glue = LEAD_IN
        self.units.append(Unit(start, end, kind, glue, self.section, block, header))

    def _flush(self) -> None:
        """Close the open paragraph or list item: its sentences become units."""
        if not self.paragraph:
            return
        (start, end, body), self.paragraph = self.paragraph, None
        item = body > start
        spans = [(body + a, body + b) for a, b in sentences(self.md[body:end])] or [(start, end)]
        for n, (a, b) in enumerate(spans):
            glue = (IN_ITEM if item else SENTENCE) if n else ITEM_START * item
            self._add(a if n else start, b, "prose", glue)

    def _heading(self, start: int, end: int, level: int, text: str) -> None:
        bare = text.rstrip("#")
        text = bare if not bare or bare[-1] in " \t" else text  # a closing row of # is no text
        text = _LINK.sub(r"\1", text).replace("`", "").replace("**", "").strip()
        path = {k: v for k, v in self.section.path.items() if k < level}
        self.section = Section(path | {level: text if len(text) <= 200 else text[:199] + "…"}, level)
        self._add(start, end, "heading")


def read_units(markdown: str) -> list[Unit]:
    """The units of a Markdown text in order; units of one section share their `section` object."""
    return _Reader(markdown).units


def place(path: dict[int, str], several: bool, title: str) -> tuple[str, str, str]:
    """(chapter, section, breadcrumb). The chapter is the H2 above, or the H1 where a document has `several` of them,
    or else the title; the section is what stands below it."""
    head = 1 if several and path.get(1) else 2
    chapter = path.get(head) or path.get(1) or title
    section = " > ".join(text for level, text in sorted(path.items()) if level > head and text)
    crumbs = [title, chapter, section]
    if chapter == path.get(1) and chapter.casefold() in title.casefold():
        crumbs.remove(chapter) if chapter != title else None
    return chapter, section, " > ".join(dict.fromkeys(crumb for crumb in crumbs if crumb))

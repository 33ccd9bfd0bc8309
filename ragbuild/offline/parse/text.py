"""Plain text: its encoding is found, numbered headings that stand alone become Markdown ones, tables are fenced."""

from __future__ import annotations

import re
from itertools import groupby
from pathlib import Path

from ragbuild.offline.parse.base import DocumentParser, ParsedDocument, ParseOptions, decode, tidy

# "1 Overview", "1.1 Scope", "第一章 总则", "一、概述", "（一）范围", "Chapter 2 Setup"; never "1. Connect it."
_HAN_NUMBER = "[一二三四五六七八九十百]{1,4}"
_HEADING = re.compile(
    r"(?P<dotted>\d{1,2}(?:\.\d{1,2}){0,3})[ \t\u3000]+(?=[^\W\d_])"
    rf"|(?P<top>第(?:{_HAN_NUMBER}|\d{{1,3}})[章编篇部]|{_HAN_NUMBER}、"
    rf"|(?:Chapter|Appendix) [\dA-Z]{{1,3}}\b|附录\s?[A-Z一二三四五]?)"
    rf"|第(?:{_HAN_NUMBER}|\d{{1,3}})节|[（(]{_HAN_NUMBER}[)）]"
)
_LIST = re.compile(r"([-*•·●○▪–]|\d{1,2}[.)、]|[（(]\d{1,2}[)）]|[a-z][.)])\s*(?=\S)")
_QUESTION = re.compile(r"(\d{1,2}(\.\d{1,2}){1,3}\s+)(Q|问)\s*[:：]")
_COLUMNS = re.compile(r"\S(?: {2,}|\t+|\u3000{2,})\S")


class TextParser(DocumentParser):
    """Plain text. Rules for a heading: numbered, one line of at most 80 characters, alone between empty lines, no
    punctuation at its end. A numbered question (``1.1 Q: …``) with its answer on the next line is one too.
    """

    name, version = "text", "2"

    def parse(self, path: Path, options: ParseOptions) -> ParsedDocument:
        text = decode(path.read_bytes())
        lines = [line.expandtabs(4).rstrip() for line in text.split("\n")]
        blocks = [list(block) for filled, block in groupby(lines, key=bool) if filled]
        metadata, out = {}, []
        for i, block in enumerate(blocks):
            first = block[0].strip()
            if i == 0 and len(blocks) > 1 and _is_title(block):  # a file of one line is no title without a text
                metadata["title"] = first
                out.append(f"# {first}")
            elif len(block) == 1 and (level := heading_level(first)):
                out.append(f"{'#' * level} {first}")
            elif (match := _QUESTION.match(first)) and len(block) > 1:
                out += [f"{'#' * min(2 + match.group(2).count('.'), 6)} {first}", *_block(block[1:])]
            else:
                out += _block(block)
        return ParsedDocument(tidy("\n\n".join(out)), metadata=metadata, parser=self.name)


def heading_level(line: str) -> int:
    """2 to 5 when a line that stands alone is a numbered heading, else 0."""
    match = _HEADING.match(line)
    if not match or len(line) > 80 or line[-1] in ".。;；:：,，!！…" or _COLUMNS.search(line) or line == match.group():
        return 0
    if match.group("dotted"):
        return min(2 + match.group("dotted").count("."), 5)
    return 2 if match.group("top") else 3


def _is_title(block: list[str]) -> bool:
    line = block[0].strip()
    return (
        len(block) == 1 and 1 < len(line) <= 100 and line[-1] not in ".。;；:：,，!！?？"
        and not _HEADING.match(line) and not _LIST.match(line) and not _COLUMNS.search(line)
    )  # fmt: skip


def _block(block: list[str]) -> list[str]:
    """One run of lines as Markdown: a list, a fenced table or command, or a paragraph with its line ends."""
    indent = min(len(line) - len(line.lstrip()) for line in block)
    lines = [line[indent:] for line in block]
    if sum(bool(_COLUMNS.search(line)) for line in lines) >= max(2, 0.6 * len(lines)):
        return ["```\n" + "\n".join(lines) + "\n```"]
    if _LIST.match(lines[0]):
        return ["\n".join(_LIST.sub(lambda m: "- " if len(m[1]) == 1 else m[1] + " ", line, count=1) for line in lines)]
    if indent >= 4 and not any(re.search(r"[.。！？：:；]$", line) for line in lines):
        return ["```\n" + "\n".join(lines) + "\n```"]
    return ["\n".join(line.strip() for line in lines)]

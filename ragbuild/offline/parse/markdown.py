"""Markdown: kept as it is, its front matter taken out."""

from __future__ import annotations

import re
from pathlib import Path

import yaml
from bs4 import BeautifulSoup

from ragbuild.offline.parse.base import (
    DocumentParser,
    ParsedDocument,
    ParsedImage,
    ParseOptions,
    decode,
    from_base64,
    tidy,
)

_FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})")
_EMBEDDED = re.compile(r"!\[([^\[\]\n]*)\]\(data:image/(\w{1,10})(?:\+\w+)?;base64,([A-Za-z0-9+/=\s]+)\)")
_LAYOUT = re.compile(r"</?(?:div|p|a|img|span|center|picture|source|figure|font)\b(?:\s[^<>]*)?/?>", re.I)


class MarkdownParser(DocumentParser):
    """Markdown stays as it is, but for setext and HTML headings, which become ATX ones, and HTML that only lays out."""

    name, version = "markdown", "1"

    def parse(self, path: Path, options: ParseOptions) -> ParsedDocument:
        metadata, text, warnings = front_matter(decode(path.read_bytes()))
        images: list[ParsedImage] = []

        def embedded(match: re.Match[str]) -> str:
            data = from_base64(match.group(3)) if options.parse.images else None
            if data is None:
                return match.group(1)
            name = f"{options.name}_1_{len(images) + 1}.{match.group(2).replace('jpeg', 'jpg')}"
            images.append(ParsedImage(name, data, 1, match.group(1)))
            return f"![{match.group(1)}](images/{name})"

        parts = [part if code else _EMBEDDED.sub(embedded, _atx(part)) for code, part in by_fence(text)]
        return ParsedDocument(tidy("\n".join(parts)), (0,), tuple(images), metadata, self.name, warnings)


class _PlainLoader(yaml.BaseLoader):
    """Strings, lists and mappings only; no aliases, with which a few lines expand to gigabytes."""

    def compose_node(self, parent: object, index: object) -> object:
        if self.check_event(yaml.AliasEvent):
            raise ValueError("it holds a YAML alias (*name), which is not read")
        return super().compose_node(parent, index)


def front_matter(text: str) -> tuple[dict[str, str], str, tuple[str, ...]]:
    """(fields, the text without them, warnings). Lists are joined with ``;``. Broken YAML stays text, with a warning.

    Scalars stay strings (YAML's base loader, which makes nothing but strings, lists and mappings): a version 4.10
    must not become 4.1.
    """
    match = re.match(r"---[ \t]*\n(.*?)\n(?:---|\.\.\.)[ \t]*(?:\n|$)", text, re.S)
    if not match:
        return {}, text, ()
    try:
        data = yaml.load(match.group(1), Loader=_PlainLoader)
        if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
            raise ValueError("it is no mapping of keys to values")
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        problem = " ".join(str(error).split())[:160]
        return {}, text, (f"front matter is broken and was read as text: {problem}",)
    fields = {}
    for key, value in data.items():
        items = [str(item).strip() for item in (value if isinstance(value, list) else [value])]
        joined = ";".join(item for item in items if item and item.lower() not in ("null", "~"))
        if joined:
            fields[key.strip()] = joined
    return fields, text[match.end() :], ()


def by_fence(text: str) -> list[tuple[bool, str]]:
    """The text cut into (is it fenced code, lines), in order."""
    parts: list[tuple[bool, list[str]]] = [(False, [])]
    fence = ""
    for line in text.split("\n"):
        match = _FENCE.match(line)
        if not fence and match:
            fence = match.group(1)
            parts.append((True, [line]))
            continue
        parts[-1][1].append(line)
        if fence and match and match.group(1).startswith(fence) and not line.strip().strip(fence[0]):
            fence = ""
            parts.append((False, []))
    return [(code, "\n".join(lines)) for code, lines in parts if lines]


def _atx(text: str) -> str:
    text = re.sub(r"<!--(?:(?!<!--|-->).)*+-->", "", text, flags=re.S)  # possessive: time is linear in the text
    for mark, level in (("=", "#"), ("-", "##")):
        text = re.sub(
            rf"(?:^|(?<=\n\n))(?![#>|\-*+\s]|\d+\.)([^\n|]+)\n{mark}{{2,}}[ \t]*(?=\n|$)", rf"{level} \1", text
        )

    def heading(match: re.Match[str]) -> str:
        title = " ".join(BeautifulSoup(f"<p>{match.group(2)}</p>", "lxml").get_text(" ").split())
        return f"\n\n{'#' * int(match.group(1))} {title}\n\n" if title else ""

    html_heading = r"(?<![ \t])[ \t]*+<h([1-6])\b[^<>]*>((?:(?!</?h[1-6]\b).){0,2000}+)</h\1\s*>"
    text = re.sub(html_heading, heading, text, flags=re.S | re.I)
    return re.sub(r"^[ \t]++$", "", _LAYOUT.sub("", text), flags=re.M)

"""Figures in a section's text: each once, at the paragraph that it belongs to, with a line that names its source."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ragbuild.apps.evidence_tables import Figure
from ragbuild.core.errors import GateFailed, UsageError
from ragbuild.core.forms import fold

_PAGE = re.compile(r"(?<![A-Za-z0-9])(?:P|p\. ?|page )(\d{1,4})(?:[–-](\d{1,4}))?(?!\d)|第\s*(\d{1,4})\s*页")
_SOURCE = re.compile(r"\*(?:来源：|Source: )")
WORDS = {
    "zh": {
        "source": "来源：", "figure": "图表 p{}", "points": "{} 分", "unsaved": "尚未完成", "comma": "、",
        "none": "未检索到证据：{}（检索到 {} 条，无一可用）",
        "head": "本稿只引文件原文，不作推断。证据 {} 条，图 {} 幅。",
    },
    "en": {
        "source": "Source: ", "figure": "Figure p{}", "points": "{} points", "unsaved": "Not finished", "comma": ", ",
        "none": "No evidence was found for {} ({} hits, none usable)",
        "head": "Quotations only, nothing inferred: {} pieces of evidence, {} figures.",
    },
}  # fmt: skip


@lru_cache(maxsize=2)
def parser(html: bool) -> Any:
    """The reader of Markdown with tables; `html`: is HTML in it read as such, or shown as text?"""
    from markdown_it import MarkdownIt

    return MarkdownIt("commonmark", {"html": html}).enable("table")


def insert_images(text: str, img_list: Sequence[Figure], language: str = "zh") -> str:
    """The text with each figure once (by url), after the paragraph that is nearest: the one that names its number, else
    the one whose page is closest; under it a line with source and page. One that stands there already stays.

    Raises GateFailed for a picture in the text that is not in the list.
    """
    refuse_unknown(text, img_list)
    there = set(images_in(text))
    figures = {url: figure for figure in reversed(img_list) if (url := as_url(figure.img_url)) not in there}
    lines = text.rstrip("\n").split("\n")
    paragraphs = _paragraphs(lines)
    after: dict[int, list[str]] = {}
    for figure in sorted(figures.values(), key=lambda f: (f.source, f.page_no, f.at)):
        after.setdefault(_place(figure, paragraphs, len(lines)), []).append(figure_block(figure, language))
    out: list[str] = []
    for i in range(len(lines) + 1):
        for block in after.get(i, ()):
            out += ["", block] if out and out[-1] else [block]
            out += [""] if i < len(lines) and lines[i] else []
        out += lines[i : i + 1]
    return "\n".join(out).strip("\n") + "\n"


def figure_block(figure: Figure, language: str = "zh") -> str:
    """``![caption](url)`` and, below, the line with its source; ``图表 p8`` where there is no caption."""
    if re.search(r"[<>\n]", figure.img_url):
        raise UsageError(f"img_url {figure.img_url!r} holds <, > or a line break; give the figure's file a plain name")
    words = WORDS.get(language, WORDS["en"])
    caption = figure.caption or words["figure"].format(figure.page_no)
    url = figure.img_url if not re.search(r"[\s()]", figure.img_url) else f"<{figure.img_url}>"
    return f"![{escaped(caption)}]({url})\n\n{source_line(figure.source, figure.page_no, language=language)}"


def source_line(source: str, page: int, page_end: int = 0, more: Sequence[str] = (), language: str = "zh") -> str:
    """``*来源：招股说明书.pdf P8*``; `more` follows, parted by a dot."""
    pages = f"P{page}–{page_end}" if page_end > page else f"P{page}"
    parts = [f"{WORDS.get(language, WORDS['en'])['source']}{escaped(source)} {pages}", *map(escaped, more)]
    return f"*{' · '.join(parts)}*"


def images_in(text: str) -> list[str]:
    """The urls of all pictures in a Markdown text, in order, as a browser would ask for them; HTML ones too."""
    out = []
    for token in parser(True).parse(text):
        for part in token.children or [token]:
            if part.type == "image":
                out.append(str(part.attrs["src"]))
            elif part.type in ("html_inline", "html_block"):
                out += re.findall(r"<(?:img|image|picture|object|embed|svg)\b[^>]*>?", part.content, re.I)
    return out


def as_url(url: str) -> str:
    """As `images_in` gives it."""
    return parser(True).normalizeLink(url)


def refuse_unknown(text: str, images: Sequence[Figure]) -> None:
    """Raises GateFailed for a picture in the text that is not among `images`."""
    known = {as_url(figure.img_url) for figure in images}
    if unknown := [url for url in images_in(text) if url not in known]:
        listed = ", ".join(f.img_url for f in images) or "empty"
        raise GateFailed(f"the picture {unknown[0]} is not in the section's list ({listed}); remove it")


@dataclass(frozen=True)
class _Paragraph:
    text: str
    pages: tuple[int, int] | None
    end: int  # the line after it, and after its source


def blocks(text: str) -> list[tuple[str, int, int]]:
    """(kind, first line, line after the last) of the top blocks of a Markdown text."""
    tokens = [t for t in parser(True).parse(text) if t.level == 0 and t.map and t.nesting >= 0]
    return [(t.type.removesuffix("_open"), *t.map) for t in tokens]


def quotations_in(text: str) -> list[tuple[int, int]]:
    """(first line, line after the last) of the quotations of a Markdown text, also those in a list."""
    out: list[tuple[int, int]] = []
    for token in parser(True).parse(text):
        if token.type == "blockquote_open" and (not out or token.map[0] >= out[-1][1]):
            out.append((token.map[0], token.map[1]))
    return out


def _paragraphs(lines: Sequence[str]) -> list[_Paragraph]:
    """Blocks that a figure may follow: no headings, pictures or source lines, which belong to the block above."""
    out: list[_Paragraph] = []
    picture = False
    for kind, start, end in blocks("\n".join(lines)):
        text = "\n".join(lines[start:end]).strip()
        end = start + len("\n".join(lines[start:end]).rstrip().split("\n"))
        if kind == "paragraph" and _SOURCE.match(text):
            if out and not picture:
                out[-1] = _Paragraph(out[-1].text, _pages(text), end)
            elif out:
                out[-1] = _Paragraph(out[-1].text, out[-1].pages, end)
        elif kind == "paragraph" and re.fullmatch(r"!\[[^\n]*\]\([^\n]*\)", text):
            out = [*out[:-1], _Paragraph(out[-1].text, out[-1].pages, end)] if out else out
            picture = True
            continue
        elif kind not in ("heading", "hr"):
            out.append(_Paragraph(text, _pages(text), end))
        picture = False
    return out


def _pages(text: str) -> tuple[int, int] | None:
    """The last page, or range of pages, that a text names."""
    found = _PAGE.findall(text)
    if not found:
        return None
    first, last, chinese = found[-1]
    return int(first or chinese), int(last or first or chinese)


def _place(figure: Figure, paragraphs: Sequence[_Paragraph], end: int) -> int:
    """The line before which a figure goes."""

    def distance(paragraph: _Paragraph) -> float:
        if paragraph.pages is None:
            return float("inf")
        first, last = paragraph.pages
        return max(first - figure.page_no, figure.page_no - last, 0)

    number = re.escape(fold(figure.figure_number))
    named = re.compile(rf"(?:图|figure|fig\.?)\s*{number}(?!\d|[-.–]\d)")
    naming = [p for p in paragraphs if number and named.search(fold(p.text))]
    choice = naming or [p for p in paragraphs if p.pages] or paragraphs[-1:]
    return min(choice, key=distance).end if choice else end


def escaped(text: str) -> str:
    """For a line of Markdown: what would become a link, a picture, emphasis or HTML is text."""
    return re.sub(r"([\\\[\]*`<])", r"\\\1", " ".join(text.split()))

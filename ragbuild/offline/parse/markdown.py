"""Markdown (kept as it is, front matter taken out) and HTML (boilerplate dropped, then converted)."""

from __future__ import annotations

import base64
import contextlib
import re
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import yaml
from bs4 import BeautifulSoup, Comment, Tag
from bs4.dammit import EncodingDetector
from markdownify import MarkdownConverter

from ragbuild.offline.parse.base import (
    DocumentParser,
    ParsedDocument,
    ParsedImage,
    ParseOptions,
    decode,
    pipe_table,
    tidy,
)

_FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})")
_EMBEDDED = re.compile(r"!\[([^\]\n]*)\]\(data:image/(\w+);base64,([A-Za-z0-9+/=\s]+)\)")
_LAYOUT = re.compile(r"</?(?:div|p|a|img|span|center|picture|source|figure|font)\b(?:\s[^<>]*)?/?>", re.I)


class MarkdownParser(DocumentParser):
    """Markdown stays as it is, but for setext and HTML headings, which become ATX ones, and HTML that only lays out."""

    name, version = "markdown", "1"

    def parse(self, path: Path, options: ParseOptions) -> ParsedDocument:
        metadata, text, warnings = front_matter(decode(path.read_bytes()))
        images: list[ParsedImage] = []

        def embedded(match: re.Match[str]) -> str:
            name = f"{options.name}_1_{len(images) + 1}.{match.group(2).replace('jpeg', 'jpg')}"
            images.append(ParsedImage(name, base64.b64decode(match.group(3)), 1, match.group(1)))
            return f"![{match.group(1)}](images/{name})" if options.parse.images else match.group(1)

        parts = [part if code else _EMBEDDED.sub(embedded, _atx(part)) for code, part in _by_fence(text)]
        kept = tuple(images) if options.parse.images else ()
        return ParsedDocument(tidy("\n".join(parts)), (0,), kept, metadata, self.name, warnings)


def front_matter(text: str) -> tuple[dict[str, str], str, tuple[str, ...]]:
    """(fields, the text without them, warnings). Lists are joined with ``;``. Broken YAML stays text, with a warning.

    Scalars stay strings (YAML's base loader, which makes nothing but strings, lists and mappings): a version 4.10
    must not become 4.1.
    """
    match = re.match(r"---[ \t]*\n(.*?)\n(?:---|\.\.\.)[ \t]*(?:\n|$)", text, re.S)
    if not match:
        return {}, text, ()
    try:
        data = yaml.load(match.group(1), Loader=yaml.BaseLoader)
        if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
            raise ValueError("it is no mapping of keys to values")
    except (yaml.YAMLError, ValueError) as error:
        problem = " ".join(str(error).split())[:160]
        return {}, text, (f"front matter is broken and was read as text: {problem}",)
    fields = {}
    for key, value in data.items():
        items = [str(item).strip() for item in (value if isinstance(value, list) else [value])]
        joined = ";".join(item for item in items if item and item.lower() not in ("null", "~"))
        if joined:
            fields[key.strip()] = joined
    return fields, text[match.end() :], ()


def _by_fence(text: str) -> list[tuple[bool, str]]:
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
    text = re.sub(r"<!--.{0,20000}?-->", "", text, flags=re.S)
    for mark, level in (("=", "#"), ("-", "##")):
        text = re.sub(
            rf"(?:^|(?<=\n\n))(?![#>|\-*+\s]|\d+\.)([^\n|]+)\n{mark}{{2,}}[ \t]*(?=\n|$)", rf"{level} \1", text
        )

    def heading(match: re.Match[str]) -> str:
        title = " ".join(BeautifulSoup(f"<p>{match.group(2)}</p>", "lxml").get_text(" ").split())
        return f"\n\n{'#' * int(match.group(1))} {title}\n\n" if title else ""

    text = re.sub(r"[ \t]*<h([1-6])\b[^>]*>(.{0,2000}?)</h\1\s*>", heading, text, flags=re.S | re.I)
    return re.sub(r"^[ \t]+$", "", _LAYOUT.sub("", text), flags=re.M)


class HtmlParser(DocumentParser):
    """A page: menus, banners and side bars go, the main part stays and becomes Markdown."""

    name, version = "html", f"1+markdownify{version('markdownify')}"

    def parse(self, path: Path, options: ParseOptions) -> ParsedDocument:
        data = path.read_bytes()
        soup = BeautifulSoup(re.sub(r"\s*<\?xml[^>]*>", "", _html_text(data), count=1), "lxml")
        metadata = {"title": " ".join(soup.title.get_text().split())} if soup.title else {}
        markdown, images = html_to_markdown(_main_part(soup), options)
        return ParsedDocument(markdown, (0,), images, metadata, self.name)


def _html_text(data: bytes) -> str:
    """Byte order mark, then the page's own declaration, then what `decode` finds."""
    declared = EncodingDetector.find_declared_encoding(data, is_html=True)
    if declared and not data.startswith((b"\xff\xfe", b"\xfe\xff", b"\xef\xbb\xbf")):
        with contextlib.suppress(UnicodeDecodeError, LookupError):  # it may be wrong, as often in saved pages
            return data.decode("gb18030" if declared.lower() in ("gb2312", "gbk", "x-gbk") else declared)
    return decode(data)


_DROP = (
    "script style noscript template nav aside footer form button svg iframe object select input dialog video".split()
)
_ROLES = {"navigation", "search", "dialog", "banner", "contentinfo", "complementary", "menu", "alert"}
_BOILERPLATE = re.compile(
    r"(?:^|[-_ ])(?:nav|navbar|navbox|navigation|menu|sidebar|breadcrumbs?|cookies?|consent|banner|footer|toc|skip|"
    r"share|social|related|feedback|advert|ads|promo|newsletter|editsection|hatnote|noprint|catlinks|sitenotice|backlink|"
    r"siteSub|contentSub|printfooter|vector-dropdown|mw-indicators?|metadata|ambox|authority-control)(?:[-_ ]|$)"
)


def _main_part(soup: BeautifulSoup) -> Tag:
    """The content of a page: boilerplate removed, then `main` or `article` where it holds most of the text."""
    body = soup.body or soup
    for element in [*body.find_all(string=lambda s: isinstance(s, Comment)), *body.find_all(_DROP)]:
        element.extract()
    whole = len(body.get_text())
    for tag in body.find_all(True):
        if tag.attrs is None or tag.name in ("body", "main", "article", "h1"):
            continue  # gone with its parent, or the content itself
        marks = " ".join([*(tag.get("class") or []), str(tag.get("id") or "")])
        hidden = tag.has_attr("hidden") or re.search(r"display:\s*none", str(tag.get("style") or ""))
        boilerplate = (tag.get("role") in _ROLES or _BOILERPLATE.search(marks)) and not tag.find("h1")
        if hidden or (boilerplate and len(tag.get_text()) < 0.5 * whole):  # a wrapper "has-sidebar" is no side bar
            tag.decompose()
    whole = len(body.get_text())
    for name, attrs in (("main", {}), (True, {"role": "main"}), ("article", {}), (True, {"id": "content"})):
        found = next((tag for tag in body.find_all(name, attrs=attrs) if len(tag.get_text()) > 0.5 * whole), None)
        if found is not None:
            if body.h1 is not None and found.h1 is None:
                found.insert(0, body.h1)
            return found
    for tag in body.find_all("header"):
        if tag.h1 is None:
            tag.decompose()
    return body


class _Converter(MarkdownConverter):
    """markdownify with tables as ready Markdown, fenced code that keeps its language, and pictures by a callback."""

    def __init__(self, image: Callable[[Tag], str], **options: object) -> None:
        super().__init__(**options)
        self._image = image

    def convert_mdtable(self, el: Tag, text: str, parent_tags: set[str]) -> str:
        return f"\n\n{el['data-markdown']}\n\n"

    def convert_img(self, el: Tag, text: str, parent_tags: set[str]) -> str:
        return self._image(el)


def html_to_markdown(root: Tag, options: ParseOptions) -> tuple[str, tuple[ParsedImage, ...]]:
    """Markdown of a part of a page, and the pictures embedded in it. Links keep their text only."""
    images: list[ParsedImage] = []

    def image(tag: Tag) -> str:
        alt, source = " ".join(str(tag.get("alt") or "").split()), str(tag.get("src") or "")
        embedded = re.match(r"data:image/(\w+)[^,]*;base64,", source)
        if not embedded:  # not fetched: a page's pictures lie elsewhere
            return f"({alt})" if len(alt) > 3 and not re.search(r"\.\w{3,4}$", alt) else ""
        if not options.parse.images:
            return alt
        kind = embedded.group(1).lower().replace("jpeg", "jpg")
        name = f"{options.name}_1_{len(images) + 1}.{kind}"
        images.append(ParsedImage(name, base64.b64decode(source[embedded.end() :]), 1, alt))
        return f"![{alt}](images/{name})"

    def language(tag: Tag) -> str:
        marks = " ".join([*(tag.get("class") or []), *((tag.code and tag.code.get("class")) or [])])
        found = re.search(r"(?:language|lang|highlight-source)-([\w+#]+)", marks)
        return found.group(1) if found else ""

    converter = _Converter(
        image, heading_style="ATX", bullets="-", strip=["a"], escape_underscores=False, escape_asterisks=False,
        escape_misc=False, code_language_callback=language, newline_style="spaces", sup_symbol="", sub_symbol="",
    )  # fmt: skip
    for tag in root.find_all("sup", class_="reference"):
        tag.decompose()
    for string in root.find_all(string=re.compile("\xa0")):
        string.replace_with(re.sub("[ \xa0]+", " ", string))
    for table in reversed(root.find_all("table")):  # inner tables first
        _replace_table(table, converter)
    parts = _by_fence(converter.convert_soup(root))
    return tidy("\n".join(part if code else _clean(part) for code, part in parts)), tuple(images)


def _clean(text: str) -> str:
    """No bold headings, no single blank before a line, no runs of blanks inside one."""
    text = re.sub(r"^(#{1,6}) +\*\*(.+)\*\* *$", r"\1 \2", text, flags=re.M)
    return re.sub(r"^ (?=\S)", "", re.sub(r"(?<=[^\s|]) {2,}(?=[^\s|])", " ", text), flags=re.M)


def _replace_table(table: Tag, converter: MarkdownConverter) -> None:
    """Put a ready pipe table in the place of `table`.

    A cell over several rows or columns is repeated in each, but one that fills its whole row stands there once.
    """
    grid: dict[tuple[int, int], Tag] = {}
    rows = [row for row in table.find_all("tr") if row.find_parent("table") is table]
    for r, row in enumerate(rows):
        column = 0
        for cell in row.find_all(["td", "th"], recursive=False):
            while (r, column) in grid:
                column += 1
            wide, high = (
                min(int(n), 200) if (n := str(cell.get(k) or 1)).isdigit() else 1 for k in ("colspan", "rowspan")
            )
            for dr in range(max(high, 1)):
                for dc in range(max(wide, 1)):
                    grid[r + dr, column + dc] = cell
            column += max(wide, 1)

    def text(cell: Tag | None, header: bool) -> str:
        if cell is None:
            return ""
        header, cell.name = header or cell.name == "th", "div"
        markdown = re.sub(r"\s*\n\s*", "\n", converter.convert_soup(cell).strip())
        return markdown.replace("**", "") if header else markdown

    cells = []
    width = max((c for _, c in grid), default=-1) + 1
    for r in range(len(rows)):
        row = [grid.get((r, c)) for c in range(width)]
        if width > 1 and row[0] is not None and all(cell is row[0] for cell in row):
            row[1:] = [None] * (width - 1)
        cells.append([text(cell, r == 0) for cell in row])
    caption = table.find("caption")
    new = BeautifulSoup("", "lxml").new_tag("mdtable")
    markdown = "\n\n".join(row[0] for row in cells) if width == 1 else pipe_table(cells)  # one column only lays out
    new["data-markdown"] = (f"{caption.get_text(' ', strip=True)}\n\n" if caption else "") + markdown
    table.replace_with(new)

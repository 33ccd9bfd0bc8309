"""HTML: menus, banners and side bars dropped, the main part converted by markdownify. DOCX comes this way too."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from bs4 import BeautifulSoup, Comment, Tag
from bs4.dammit import EncodingDetector
from markdownify import MarkdownConverter

from ragbuild.offline.parse.base import (
    DocumentParser,
    ParsedDocument,
    ParsedImage,
    ParseOptions,
    decode,
    from_base64,
    pipe_table,
    tidy,
)
from ragbuild.offline.parse.markdown import by_fence


class HtmlParser(DocumentParser):
    """A page: menus, banners and side bars go, the main part stays and becomes Markdown."""

    name, version = "html", f"1+markdownify{version('markdownify')}"

    def parse(self, path: Path, options: ParseOptions) -> ParsedDocument:
        data = path.read_bytes()
        soup = BeautifulSoup(re.sub(r"<\?xml[^<>]*>", "", _html_text(data), count=1), "lxml")
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
        embedded = re.match(r"data:image/(\w{1,10})[^,]*;base64,", source)
        if not embedded:  # not fetched: a page's pictures lie elsewhere
            return f"({alt})" if len(alt) > 3 and not re.search(r"\.\w{3,4}$", alt) else ""
        data = from_base64(source[embedded.end() :]) if options.parse.images else None
        if data is None:
            return alt
        kind = embedded.group(1).lower().replace("jpeg", "jpg")
        name = f"{options.name}_1_{len(images) + 1}.{kind}"
        images.append(ParsedImage(name, data, 1, alt))
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
    for string in root.find_all(string=re.compile("[ \t]{100}")):  # markdownify's time grows with the square of a run
        string.replace_with(re.sub("[ \t]{100,}", " " * 100, string))
    for table in reversed(root.find_all("table")):  # inner tables first
        _replace_table(table, converter)
    parts = by_fence(converter.convert_soup(root))
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
            if len(grid) > 100_000:  # a table that spans itself out of memory
                wide = high = 1
            for dr in range(max(min(high, len(rows) - r), 1)):
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

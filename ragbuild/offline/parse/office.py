"""DOCX (mammoth, through HTML), PPTX (python-pptx; a slide is a page) and XLSX (openpyxl; a sheet is a section)."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator
from datetime import date, datetime, time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bs4 import BeautifulSoup
from lxml import etree

from ragbuild.offline.parse.base import (
    DocumentParser,
    ParsedDocument,
    ParsedImage,
    ParseOptions,
    check_archive,
    pipe_table,
    tidy,
)
from ragbuild.offline.parse.html import html_to_markdown

_MONOSPACE = re.compile(r"mono|courier|consol|menlo|lucida console", re.I)
_STYLES = """
p[style-name='Title'] => h1:fresh
p[style-name='Subtitle'] => p:fresh
p[style-name='Code'] => pre:separator('\\n')
p[style-name='caption'] => p.caption:fresh
p[style-name='Caption'] => p.caption:fresh
p[style-name^='List Continue'] => p:fresh
"""


def core_properties(path: Path) -> dict[str, str]:
    """Title, author and subject of an Office file, where they are set."""
    with zipfile.ZipFile(path) as archive:
        if "docProps/core.xml" not in archive.namelist():
            return {}
        root = etree.fromstring(
            archive.read("docProps/core.xml"), etree.XMLParser(resolve_entities=False, no_network=True)
        )
    names = {"title": "title", "creator": "author", "subject": "subject"}
    found = ((etree.QName(e).localname, (e.text or "").strip()) for e in root if isinstance(e.tag, str))
    return {names[key]: text for key, text in found if key in names and text}


class DocxParser(DocumentParser):
    """Headings, lists, tables, monospaced paragraphs as code, pictures in place; headers and footers stay out."""

    name, version = "docx", f"1+mammoth{version('mammoth')}"

    def parse(self, path: Path, options: ParseOptions) -> ParsedDocument:
        import mammoth

        check_archive(path, options.corpus.max_unzipped_mb)
        with path.open("rb") as handle:
            result = mammoth.convert_to_html(
                handle, style_map=_STYLES, transform_document=mammoth.transforms.paragraph(_code_style)
            )
        soup = BeautifulSoup(f"<body>{result.value}</body>", "lxml")
        for image in soup.find_all("img"):
            paragraph = image.find_parent("p")
            caption = paragraph.find_next_sibling() if paragraph else None
            if caption is not None and "caption" in (caption.get("class") or []):
                image["alt"] = " ".join(caption.get_text().split())  # the caption is the link's text
                caption.decompose()
        for code in soup.find_all("pre"):
            for line_end in code.find_all("br"):
                line_end.replace_with("\n")
            if code.find_parent("td"):
                code.name = "code"
            before, after = code.find_previous_sibling(), code.find_next_sibling()
            if before and after and before.name == after.name == "ol":  # code inside a procedure
                after["start"] = str(int(before.get("start") or 1) + len(before.find_all("li", recursive=False)))
        markdown, images = html_to_markdown(soup.body, options)
        ignored = sorted({m.message for m in result.messages if "image" in m.message.lower()})
        return ParsedDocument(markdown, (0,), images, core_properties(path), self.name, tuple(ignored))


def _code_style(paragraph: Any) -> Any:
    """A paragraph set in a monospaced font throughout gets the style `Code`."""
    fonts = [run.font or "" for run in _runs(paragraph) if any(getattr(c, "value", "").strip() for c in run.children)]
    if fonts and all(_MONOSPACE.search(font) for font in fonts) and not paragraph.numbering:
        return paragraph.copy(style_name="Code", style_id="Code")
    return paragraph


def _runs(element: Any) -> Iterator[Any]:
    for child in getattr(element, "children", ()):
        if hasattr(child, "font"):
            yield child
        else:
            yield from _runs(child)


class PptxParser(DocumentParser):
    """Each slide is a page and a section named by its title; text, tables, pictures, then the speaker's notes."""

    name, version = "pptx", f"1+{version('python-pptx')}"

    def parse(self, path: Path, options: ParseOptions) -> ParsedDocument:
        import pptx

        check_archive(path, options.corpus.max_unzipped_mb)
        metadata, images, starts, markdown = core_properties(path), [], [], ""
        for number, slide in enumerate(pptx.Presentation(str(path)).slides, 1):
            title = slide.shapes.title
            heading = " ".join(title.text_frame.text.split()) if title is not None else ""
            parts = (
                [f"{'#' if number == 1 and heading == metadata.get('title') else '##'} {heading}"] if heading else []
            )
            for shape in _shapes(slide.shapes):
                if title is None or shape.shape_id != title.shape_id:
                    parts.append(self._shape(shape, number, images, options))
            if slide.has_notes_slide and (notes := slide.notes_slide.notes_text_frame):
                parts.append(notes.text.strip())
            text = tidy("\n\n".join(part for part in parts if part.strip()))
            starts.append(len(markdown) + (1 if markdown else 0))
            markdown += ("\n" if markdown else "") + text
        return ParsedDocument(markdown, tuple(starts) or (0,), tuple(images), metadata, self.name)

    def _shape(self, shape: Any, page: int, images: list[ParsedImage], options: ParseOptions) -> str:
        if getattr(shape, "has_table", False) and shape.has_table:
            return pipe_table([[cell.text for cell in row.cells] for row in shape.table.rows])
        if shape.shape_type in (13, 14) and hasattr(shape, "image") and options.parse.images:  # embedded pictures only
            alt = " ".join((shape._element._nvXxPr.cNvPr.get("descr") or "").split())
            alt = "" if re.search(r"\.\w{3,4}$", alt) else alt  # a file's name
            name = f"{options.name}_{page}_{sum(i.page == page for i in images) + 1}.{shape.image.ext}"
            images.append(ParsedImage(name, shape.image.blob, page, alt))
            return f"![{alt}](images/{name})"
        if not shape.has_text_frame:
            return ""
        lines = []
        for paragraph in shape.text_frame.paragraphs:
            text = " ".join(paragraph.text.split())
            listed = (
                shape.is_placeholder
                and shape.placeholder_format.type not in (3, 4)
                and len(shape.text_frame.paragraphs) > 1
            )
            mark = "" if not listed or re.match(r"\d+[.)、](?!\d)", text) else "- "
            if text:
                lines.append("  " * paragraph.level + mark + text)
        return ("\n" if any(line.lstrip().startswith(("- ", "1. ")) for line in lines) else "\n\n").join(lines)


def _shapes(shapes: Any) -> Iterator[Any]:
    """Shapes in reading order (top to bottom, left to right), those of groups among them."""
    flat: list[Any] = []
    for shape in shapes:
        flat += list(_shapes(shape.shapes)) if hasattr(shape, "shapes") else [shape]
    return iter(sorted(flat, key=lambda s: ((s.top or 0) // 200000, s.left or 0)))  # EMU: 200000 are 5.6 mm


class XlsxParser(DocumentParser):
    """Each sheet is a section; runs of rows are tables, single cells paragraphs. Values are shown, not formulas."""

    name, version = "xlsx", f"1+{version('openpyxl')}"

    def parse(self, path: Path, options: ParseOptions) -> ParsedDocument:
        import openpyxl

        check_archive(path, options.corpus.max_unzipped_mb)
        metadata, parts, warnings = core_properties(path), [], []
        book = openpyxl.load_workbook(path, read_only=True, data_only=True)
        try:
            for sheet in book.worksheets:
                if sheet.sheet_state != "visible":
                    warnings.append(f"sheet '{sheet.title}' is hidden and was left out")
                    continue
                parts.append(f"## {sheet.title}")
                sheet.reset_dimensions()  # what the file declares may be the whole grid
                block: list[list[str]] = []
                for row in [*sheet.iter_rows(values_only=True), ()]:
                    cells = [_value(cell) for cell in row]
                    if any(cells):
                        block.append(cells)
                    elif block:
                        parts.append(_rows(block))
                        block = []
        finally:
            book.close()
        if metadata.get("title"):
            parts.insert(0, f"# {metadata['title']}")
        return ParsedDocument(tidy("\n\n".join(parts)), metadata=metadata, parser=self.name, warnings=tuple(warnings))


def _rows(block: list[list[str]]) -> str:
    used = [c for c in range(max(map(len, block))) if any(c < len(row) and row[c] for row in block)]
    rows = [[row[c] if c < len(row) else "" for c in used] for row in block]
    return "\n\n".join(row[0] for row in rows) if len(used) == 1 else pipe_table(rows)


def _value(value: Any) -> str:
    """A cell as a person reads it: dates in ISO form without a midnight, whole numbers without a point."""
    if value is None:
        return ""
    if isinstance(value, datetime):
        return value.date().isoformat() if value.time() == time() else value.isoformat(" ", "minutes")
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, bool):
        return str(value).upper()
    if isinstance(value, float):
        return f"{value:.12g}"
    return str(value).strip()

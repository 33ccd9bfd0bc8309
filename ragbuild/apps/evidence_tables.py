"""What an evidence store knows of its documents beside their chunks: whose each is, its sections, its figures.

Sections come from the document's own headings; captions are lines at a figure that begin with 图 or
Figure and a number.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from ragbuild.core.records import Record, Span, Text
from ragbuild.offline.parse import ParsedDocument, ParsedEntry, pictures_of, safe_name
from ragbuild.offline.sections import read_units


class CompanyDocument(Record):
    """Whose a document is. `uploaded_pdf`: the company gave it, and it is a PDF by its content."""

    company_id: Text
    task_id: Text
    doc_key: Text
    doc_source: Text
    title: Text
    language: Text
    uploaded_pdf: bool


class SectionRow(Record):
    """A chapter of a document (``sec_5``) or a subsection of one (``sec_5_2``), in the order of the document.

    `names`: the heading as it stands and without its number; `span`: of the parsed Markdown; pages count from 1.
    """

    company_id: Text
    task_id: Text
    doc_key: Text
    doc_source: Text
    section_id: Text
    chapter_code: Text
    chapter_title: Text
    names: tuple[Text, ...] = Field(min_length=1)
    page_start: int = Field(ge=1)
    page_end: int = Field(ge=1)
    span: Span
    is_chapter: bool


class Figure(Record):
    """A picture of a document. `at`: where its link stands in the parsed Markdown, -1 for none; `caption` and
    `figure_number` are empty where no line at the picture begins with 图 or Figure and a number."""

    company_id: Text
    doc_key: Text
    source: Text
    page_no: int = Field(ge=1)
    img_url: Text
    caption: str = ""
    figure_number: str = ""
    at: int = -1


_DIGITS = "零一二三四五六七八九十"
_NUMBER = re.compile(
    rf"(?:第\s*([{_DIGITS}百\d]{{1,5}})\s*[章节篇部]分?|(?:chapter|section|part|item)\s+(\d{{1,3}}|[IVX]{{1,5}}\b)"
    rf"|[（(]?([{_DIGITS}]{{1,3}})[）)、.．]|(\d{{1,3}}(?:\.\d{{1,3}}){{0,4}})(?=[.、．:：\s])|(\d{{1,3}})$)[.、．:：\s]*",
    re.I,
)
_CHAPTER = re.compile(rf"第\s*[{_DIGITS}百\d]{{1,5}}\s*[章节篇部]|(?:chapter|part|item)\s+[\dIVX]", re.I)
_CAPTION = re.compile(
    r"(?:Figure|FIGURE|Fig\.|图)\s*(?P<number>(?:[A-Z][.-])?\d++(?:[-.–]\d++)*+)[.:：、]?+"
    r"(?!\s*+(?:(?:shows?|is|are|lists?|illustrates?|depicts?|gives?|and)\b|[所显表展列]示|[为是]|反映|给出"
    r"|中(?![国东部小央型高低间期标])|[和与及至、]\s*(?:图|\d)))"
)
CONTENTS = re.compile(r"目\s*录|(?:table of )?contents", re.I)


def numbered(heading: str) -> tuple[str, str]:
    """(number, title) of a heading: 5 and 业务和技术 for 第五节 业务和技术; the number is empty where it has none."""
    match = _NUMBER.match(heading.strip())
    if not match:
        return "", heading.strip()
    number = next((group for group in match.groups() if group), "")
    return _arabic(number), heading.strip()[match.end() :].strip()


def _arabic(number: str) -> str:
    if not re.match(f"[{_DIGITS}]", number):
        return number
    tens, ten, ones = number.rpartition("十")
    return str((_DIGITS.index(tens) if tens else 1) * 10 * bool(ten) + (_DIGITS.index(ones) if ones else 0))


def section_rows(document: CompanyDocument, parsed: ParsedDocument, prefix: str = "") -> list[SectionRow]:
    """Chapters and their subsections, from the headings. A chapter's code is its own number, or ``x`` and its place
    where it has none; a subsection counts within its chapter. `prefix` tells a second document's ids apart.
    A table of contents is no section.
    """
    markdown = parsed.markdown
    heads = [
        (u.start, u.section.level, u.section.path[u.section.level]) for u in read_units(markdown) if u.kind == "heading"
    ]
    called = [depth for _, depth, title in heads if _CHAPTER.match(title)]  # a cover may have headings above them
    level = next((n for n in range(1, 7) if called.count(n) > 1), 0)
    level = level or (1 if sum(depth == 1 for _, depth, _ in heads) > 1 else 2)
    chapters = [head for head in heads if head[1] == level] or [(0, level, document.title)]
    ends = [start for start, _, _ in chapters[1:]] + [len(markdown)]
    out: list[SectionRow] = []
    codes: set[str] = set()

    def row(start: int, end: int, title: str, code: str, chapter: str, section_id: str, is_chapter: bool) -> SectionRow:
        last = start + max(1, len(markdown[start:end].rstrip())) - 1
        names = tuple(dict.fromkeys(name for name in (title, numbered(title)[1]) if name))
        pages = {"page_start": parsed.page_of(start), "page_end": parsed.page_of(last)}
        whose = document.model_dump(include={"company_id", "task_id", "doc_key", "doc_source"})
        return SectionRow(
            **whose, section_id=section_id, chapter_code=code, chapter_title=chapter, names=names, **pages,
            span=(start, end), is_chapter=is_chapter,
        )  # fmt: skip

    for place, ((start, _, title), end) in enumerate(zip(chapters, ends, strict=True), 1):
        if CONTENTS.fullmatch(title.strip()) or not title:
            continue
        number = numbered(title)[0].replace(".", "_")
        code = number if number and number not in codes else f"x{place}"
        codes.add(code)
        out.append(row(start, end, title, code, title, f"sec_{prefix}{code}", True))
        inner = [head for head in heads if start < head[0] < end and head[1] > level]
        inner = [head for head in inner if head[1] == min(depth for _, depth, _ in inner)]
        for i, (at, _, name) in enumerate(inner, 1):
            stop = inner[i][0] if i < len(inner) else end
            out.append(row(at, stop, name or title, code, title, f"sec_{prefix}{code}_{i}", False))
    return out


def figure_rows(document: CompanyDocument, entry: ParsedEntry) -> list[Figure]:
    """The pictures of a document. A caption is the text of the picture's link, or the line below or above it, whichever
    the document has more of, that begins with 图 or Figure and a number; a line serves one picture."""
    markdown, pictures = entry.parsed.markdown, pictures_of(entry.document, entry.parsed)
    beside = [_lines_at(markdown, p["span"]) if p["span"] != [0, 0] else ("", "") for p in pictures]
    order = (0, 1) if sum(bool(b) for b, _ in beside) >= sum(bool(a) for _, a in beside) else (1, 0)
    used: set[tuple[int, str]] = set()
    out = []
    for picture, lines in zip(pictures, beside, strict=True):
        options = [caption_of(picture["description"]), *(lines[i] for i in order)]
        caption = next((c for c in options if c and (picture["page"], c) not in used), "")
        used.add((picture["page"], caption))
        number = _CAPTION.match(caption)
        out.append(
            Figure(
                company_id=document.company_id, doc_key=document.doc_key, source=document.doc_source,
                page_no=picture["page"], caption=caption, figure_number=number["number"] if number else "",
                img_url=f"images/{safe_name(document.company_id)}_{Path(picture['image_path']).name}",
                at=picture["span"][0] if picture["span"] != [0, 0] else -1,
            )
        )  # fmt: skip
    return sorted(out, key=lambda f: (f.page_no, f.at))


def caption_of(line: str) -> str:
    """The line, where it is a caption: it begins with 图 or Figure and a number, and is no sentence about a figure."""
    line = " ".join(line.strip(" *_>#\t").split())
    return line if len(line) < 200 and _CAPTION.match(line) and not line.endswith("。") else ""


def _lines_at(markdown: str, span: Sequence[int]) -> tuple[str, str]:
    """The captions in the next line with text below a picture's link, and above it."""
    below, above = markdown[span[1] :].lstrip("\n"), markdown[: span[0]].rstrip()
    return caption_of(below.partition("\n")[0]), caption_of(above.rpartition("\n")[2])

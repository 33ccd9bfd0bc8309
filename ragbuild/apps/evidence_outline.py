"""What a report asks for, section by section, and which section of the documents a name means."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import yaml
from pydantic import Field, ValidationError, model_validator

from ragbuild.apps.evidence_store import EvidenceStore
from ragbuild.apps.evidence_tables import SectionRow, numbered
from ragbuild.core.errors import InputRefused, UsageError
from ragbuild.core.forms import fold
from ragbuild.core.records import Record, Text
from ragbuild.core.store import error_fields
from ragbuild.core.text import normalise

NO_CHAPTER_FILTER = (
    "limit_chapter is not taken: a report's chapter numbers look like those of the company's document and mean other "
    "chapters, so that a filter by chapter code finds the wrong ones. Give section_id (see the table of sections), or "
    "none to search by query and company_id"
)
FUZZY, CLEAR = 60, 8  # rapidfuzz ratio of a name to a title, and how far it must lead


class Chapter(Record):
    """A chapter of a document, as `get_chapter_map` lists it."""

    chapter_title: str
    chapter_code: str
    page_start: int
    page_end: int
    section_id: str
    source: str


class Need(Record):
    """What one section of a report needs. `chapter` and `section` are names as the outline's author wrote them;
    `section_id` is exact. Without any of these the whole company is searched."""

    title: Text
    chapter: str = ""
    section: str = ""
    section_id: str = ""
    keywords: tuple[str, ...] = ()
    must_terms: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _asks(self) -> Need:
        if not self.terms:
            raise ValueError("give at least one keyword or must_term: nothing else is searched for")
        return self

    @property
    def terms(self) -> list[str]:
        """All terms, must_terms first, none twice."""
        return distinct((*self.must_terms, *self.keywords))


class Outline(Record):
    """The outline of a report. `task_id`: by default the company's id."""

    title: Text
    company_id: str = ""
    task_id: str = ""
    sections: tuple[Need, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _distinct(self) -> Outline:
        titles = [need.title for need in self.sections]
        if twice := next((t for t in titles if titles.count(t) > 1), None):
            raise ValueError(f"two sections are called '{twice}'; give each a title of its own")
        return self


def load_outline(path: Path) -> Outline:
    """An outline in YAML. Raises InputRefused, naming the field, for what it lacks or does not know."""
    try:
        return Outline.model_validate(yaml.safe_load(path.read_text(encoding="utf-8-sig")))
    except OSError as error:
        raise InputRefused(f"{path} cannot be read ({error.strerror}); give the outline of the report") from error
    except (ValidationError, yaml.YAMLError, UnicodeDecodeError) as error:
        what = error_fields(error) if isinstance(error, ValidationError) else " ".join(str(error).split())
        what += f"; {NO_CHAPTER_FILTER}" if "limit_chapter" in what else ""
        raise InputRefused(
            f"{path} is no outline ({what}); it takes title, company_id and sections, each with title, keywords, "
            "must_terms and chapter, section or section_id"
        ) from error


def is_outline(path: Path) -> bool:
    """Is this file an outline, and so no document: what it asks for would be found in it?"""
    try:
        return path.suffix.lower() in (".yaml", ".yml") and bool(load_outline(path))
    except InputRefused:
        return False


def get_chapter_map(store: EvidenceStore, task_id: str) -> list[Chapter]:
    """The chapters of a task's documents, in their order."""
    return [
        Chapter(
            chapter_title=s.chapter_title, chapter_code=s.chapter_code, page_start=s.page_start, page_end=s.page_end,
            section_id=s.section_id, source=s.doc_source,
        ) for s in store.sections(task_id) if s.is_chapter
    ]  # fmt: skip


def match_name(name: str, rows: Sequence[SectionRow]) -> SectionRow:
    """The row that a name means: its title, else the one title that holds it, else the one that is clearly most alike.

    A number before the name is left out: it is the report's own. A title of the main document goes before one of
    another. Raises UsageError, with candidates, for a name that
    several titles fit or none, or that is only a number.
    """
    from rapidfuzz import fuzz

    wanted = letters(numbered(name)[1])
    if not wanted:
        raise UsageError(f"'{name}' is only a number, and the report's numbers are not the document's; {_list(rows)}")
    titles = [(row, [letters(n) for n in row.names]) for row in rows]
    fits: list[SectionRow] = []
    for document in dict.fromkeys(row.doc_key for row in rows):  # the main one comes first
        mine = [(row, names) for row, names in titles if row.doc_key == document]
        fits = fits or [row for row, names in mine if wanted in names or letters(name) in names]
        fits = fits or [row for row, names in mine if any(wanted in n for n in names)]
    if not fits:
        ratios = [(max(fuzz.ratio(wanted, n) for n in names), row) for row, names in titles]
        best = max((ratio for ratio, _ in ratios), default=0)
        fits = [row for ratio, row in ratios if best >= FUZZY and ratio > best - CLEAR]
    if len(fits) != 1:
        what = "means none of the titles" if not fits else "may mean several titles"
        raise UsageError(f"'{name}' {what}; {_list(fits or rows)}")
    return fits[0]


def _list(rows: Sequence[SectionRow]) -> str:
    shown = [f"{r.names[0]} ({r.section_id}, {r.doc_source} p{r.page_start})" for r in rows[:20]]
    return "candidates: " + ("; ".join(shown) or "none, the documents have no headings") + ("; …" if rows[20:] else "")


def section_of(store: EvidenceStore, task_id: str, need: Need, company_id: str = "") -> SectionRow | None:
    """The section of the documents (of one company) that a need names; None when it names none. Raises UsageError as
    `match_name`."""
    rows = [row for row in store.sections(task_id) if not company_id or row.company_id == company_id]
    if need.section_id:
        return by_id(rows, need.section_id)
    chapter = match_name(need.chapter, [r for r in rows if r.is_chapter]) if need.chapter else None
    if not need.section:
        return chapter
    inner = [r for r in rows if not r.is_chapter]
    if chapter:
        inner = [r for r in inner if (r.doc_key, r.chapter_code) == (chapter.doc_key, chapter.chapter_code)]
    return match_name(need.section, inner)


def by_id(rows: Sequence[SectionRow], section_id: str) -> SectionRow:
    """The row with this id. Raises UsageError, with candidates, when there is none."""
    row = next((r for r in rows if r.section_id == section_id), None)
    if row is None:
        raise UsageError(f"no section has the id '{section_id}'; {_list(rows)}")
    return row


def letters(text: str) -> str:
    """A text's letters and digits alone: white space, punctuation, case and width do not count."""
    return re.sub(r"[\W_]+", "", normalise(text).casefold())


def distinct(terms: Sequence[str]) -> list[str]:
    """Without empty ones and repeats (case and width do not count)."""
    out: dict[str, str] = {}
    for term in terms:
        if term.strip():
            out.setdefault(fold(term.strip()), term.strip())
    return list(out.values())

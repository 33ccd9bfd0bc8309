"""Evidence for each section of a report: names to sections, retrieval, scores, no snippet twice, none made up.

A section's keywords are searched within the company and, preferably, one section of its documents. What is found is
scored (+6 once for a must_term, +2 for each keyword, +1 for a PDF that the company uploaded), dropped below 2,
deduplicated, and handed out once in a report.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from ragbuild.apps.evidence_outline import NO_CHAPTER_FILTER, Need, distinct, letters
from ragbuild.apps.evidence_store import EvidenceStore, Snippet
from ragbuild.apps.evidence_tables import SectionRow
from ragbuild.core.config import EvidenceConfig
from ragbuild.core.errors import UsageError
from ragbuild.core.forms import FormMatcher, fold
from ragbuild.core.records import Record, Text
from ragbuild.offline.parse.markdown import by_fence

MUST_TERM, KEYWORD, UPLOADED_PDF = 6, 2, 1  # points
LEAST = 2  # below: no evidence
NEAR = 0.95  # texts of one source that are so much alike, and have the same numbers, count as one
_LOST = {"below": f"below {LEAST} points", "duplicates": "repeated", "handed_out": "used before"}
_IMAGE = re.compile(r"!\[(?:[^\[\]\n]|\[[^\[\]\n]*+\])*+\]\((?:[^()\n]|\([^()\n]*+\))*+\)")


class Evidence(Record):
    """One piece of evidence. `content` is the document's own text without pictures and headings; `score` is the
    relevance (0 to 1), `points` what it is kept and ordered by, `matched` the terms that gave them."""

    snippet_id: Text
    content: str
    table_header: str = ""
    source: Text
    page_no: int
    page_end: int
    chapter_code: str | None = None
    section_id: str | None = None
    breadcrumb: str | None = None
    score: float = Field(ge=0, le=1)
    points: int
    matched: tuple[str, ...] = ()
    type: Literal["text", "image"] = "text"
    img_url: str | None = None
    caption: str | None = None
    figure_number: str | None = None


class Found(Record):
    """The evidence of one section, best first; `message` says what became of the hits, also when nothing is left."""

    items: tuple[Evidence, ...] = ()
    message: str
    retrieved: int = 0
    below: int = 0
    duplicates: int = 0
    handed_out: int = 0


class Ledger:
    """Which snippets a report has handed out, and to which section: each serves one."""

    def __init__(self) -> None:
        self.owner: dict[str, str] = {}
        self._texts: list[tuple[str, str]] = []  # source, text

    def holds(self, item: Evidence) -> bool:
        """Was this snippet, or one of its source that says the same, handed out?"""
        return item.snippet_id in self.owner or any(_same(item, s, text) for s, text in self._texts)

    def hand_out(self, items: Sequence[Evidence], section: str) -> None:
        for item in items:
            self.owner[item.snippet_id] = section
            self._texts.append((item.source, letters(item.content)))


def points(text: str, need: Need, uploaded_pdf: bool) -> tuple[int, tuple[str, ...]]:
    """(points, the terms that the text holds). +6 once for any must_term, +2 a keyword, +1 for an uploaded PDF."""
    must = [t for t in distinct(need.must_terms) if holds(text, t)]
    words = [t for t in distinct(need.keywords) if holds(text, t)]
    total = MUST_TERM * bool(must) + KEYWORD * len(words) + UPLOADED_PDF * uploaded_pdf
    return total, tuple(distinct((*must, *words)))


def holds(text: str, term: str) -> bool:
    """Does a text hold a term? Latin terms as whole words in any case, Han terms as they stand."""
    if len(re.findall(r"\w", term)) < 2:
        return bool(term.strip()) and fold(term.strip()) in fold(text)
    return bool(FormMatcher([(term, True)]).find(text))


def find_evidence(
    store: EvidenceStore, company_id: str, need: Need, *, settings: EvidenceConfig | None = None,
    ledger: Ledger | None = None, section: SectionRow | None = None, images: bool = False, limit_chapter: Any = None,
) -> Found:  # fmt: skip
    """Retrieve, score, drop, deduplicate, and hand out the best, in stable order: points, then rank of retrieval.

    `images`: captioned figures too. Raises UsageError for `limit_chapter`, with the reason.
    """
    if limit_chapter is not None:
        raise UsageError(NO_CHAPTER_FILTER)
    settings, ledger = settings or EvidenceConfig(), Ledger() if ledger is None else ledger
    hits = store.search(company_id, need.terms, settings.rag, section=section, skip=set(ledger.owner), images=images)
    kept: list[Evidence] = []
    counts = {"retrieved": len(hits), "below": 0, "duplicates": 0, "handed_out": 0}
    for hit in hits:
        content = own_text(hit.content)
        total, matched = points(content, need, hit.document.uploaded_pdf)
        item = _evidence(hit, content, total, matched)
        if total < LEAST:
            counts["below"] += 1
        elif ledger.holds(item):
            counts["handed_out"] += 1
        else:
            kept.append(item)
    kept.sort(key=lambda item: -item.points)
    items: list[Evidence] = []
    for item in kept:
        if any(_same(item, other.source, letters(other.content)) for other in items):
            counts["duplicates"] += 1
        else:
            items.append(item)
    items = items[: settings.top_n]
    ledger.hand_out(items, need.title)
    what = f"{len(items)} of {len(hits)} hits" if items else "no evidence found"
    lost = (
        f"{counts['below']} below {LEAST} points, {counts['duplicates']} repeated, {counts['handed_out']} used before"
    )
    message = f"{what} for {', '.join(need.terms)} in {section.names[0] if section else 'all documents'} ({lost})"
    return Found(items=tuple(items), message=message, **counts)


def own_text(content: str) -> str:
    """A chunk's text as it stands, without picture links and heading lines (the breadcrumb says where it is)."""
    parts = (part if code else _plain(part) for code, part in by_fence(content))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(parts)).strip()


def _plain(text: str) -> str:
    return "\n".join(line for line in _IMAGE.sub("", text).split("\n") if not re.match(r" {0,3}#{1,6} ", line))


def _evidence(hit: Snippet, content: str, total: int, matched: tuple[str, ...]) -> Evidence:
    row, figure = hit.section, hit.figure
    crumbs = ["正文" if hit.document.language == "zh" else "Body"]
    crumbs += [row.chapter_title] + [row.names[0]] * (not row.is_chapter) if row else []
    about = (
        {"img_url": figure.img_url, "caption": figure.caption, "figure_number": figure.figure_number} if figure else {}
    )
    return Evidence(
        snippet_id=hit.snippet_id, content=content, table_header=hit.table_header, source=hit.document.doc_source,
        page_no=hit.page_no, page_end=hit.page_end, chapter_code=row.chapter_code if row else None,
        section_id=row.section_id if row else None, breadcrumb=" > ".join(crumbs) if row else None,
        score=round(hit.relevance, 4), points=total, matched=matched, type="image" if figure else "text", **about,
    )  # fmt: skip


def _same(item: Evidence, source: str, text: str) -> bool:
    """Of one source, and equal or nearly so: where the numbers differ, two rows that are alike say two things.
    `text`: letters and digits only."""
    from rapidfuzz import fuzz

    mine = letters(item.content)
    if item.source != source or re.sub(r"\D", "", mine) != re.sub(r"\D", "", text):
        return False
    return mine == text or fuzz.ratio(mine, text) >= 100 * NEAR

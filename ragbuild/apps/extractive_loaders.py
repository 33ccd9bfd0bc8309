"""Passages from local files: SEC 10-K reports (HTML) and central-bank statements, by the pipeline's parsers."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import date, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from ragbuild.core.config import ChunkConfig, CorpusConfig, ParseConfig
from ragbuild.core.errors import DocumentRefused, InputRefused
from ragbuild.core.records import Document
from ragbuild.core.store import hash_path, walk
from ragbuild.core.text import TokenCounter, language_of, normalise
from ragbuild.offline.chunk import chunk_document
from ragbuild.offline.parse import parse_file

if TYPE_CHECKING:
    from ragbuild.apps.extractive import Passage

# A 10-K has no headings in its HTML: "Item 1A. Risk Factors" and "PART II" are bold lines, or cells of a table.
_ITEM = re.compile(
    r"^(?:\| *)?\**(item[ \t]+\d{1,2}[A-C]?)\.?[*:]*(?: *\|)? *\**([^|\n]{0,100}?)\**(?: *\|)?[ \t]*$", re.I | re.M
)
_PART = re.compile(r"^\**(part[ \t]+[IV]{1,3})\.?\**[ \t]*$", re.I | re.M)
_BOLD = re.compile(r"^\*\*([^*\n]{3,100}[^*\n.。：:])\*\*[ \t]*$", re.M)  # a line in bold is a heading
_DATES = (
    (re.compile(r"\b([A-Z][a-z]{2,8}) (\d{1,2}), ?(\d{4})\b"), "{0} {1} {2}"),
    (re.compile(r"\b(\d{1,2}) ([A-Z][a-z]{2,8}) (\d{4})\b"), "{1} {0} {2}"),
)
_NUMERIC = re.compile(r"(?<!\d)(\d{4}) ?[-年./] ?(\d{1,2}) ?[-月./] ?(\d{1,2})(?!\d)")


def sec_10k(path: Path, issuer: str = "") -> list[Passage]:
    """The passages of a 10-K report as it is saved from EDGAR; sections are its items.

    The date is that of "for the fiscal year ended". Raises InputRefused with the parser's reason.
    """

    def headings(markdown: str) -> str:
        markdown = _PART.sub(lambda m: f"# {m[1].upper()}", markdown)
        return _ITEM.sub(lambda m: f"\n## {' '.join(m[1].split()).title()}. {m[2].strip(' .*')}\n", markdown)

    return _passages(Path(path), issuer, headings, re.compile(r"fiscal year ended", re.I))


def central_bank_statement(path: Path, issuer: str = "") -> list[Passage]:
    """The passages of a central bank's statement (HTML, PDF, DOCX, text) in Chinese or English; its first date counts.

    Raises InputRefused with the parser's reason.
    """
    return _passages(Path(path), issuer, lambda text: _BOLD.sub(r"\n## \1\n", text), None)


def folder_passages(folder: Path) -> list[Passage]:
    """What lies in ``10-k/`` and ``statements/`` of a folder, in the order of the files; links are not followed."""
    kinds: tuple[tuple[str, Callable[[Path], list[Passage]]], ...] = (
        ("10-k", sec_10k),
        ("statements", central_bank_statement),
    )
    return [p for name, read in kinds if (folder / name).is_dir() for file in walk(folder / name) for p in read(file)]


def find_date(text: str, after: re.Pattern[str] | None = None) -> str | None:
    """The first date (ISO) of a text, in words or numbers, of either language; behind what `after` finds."""
    text = normalise(text)
    found = after.search(text) if after else None
    text = text[found.end() : found.end() + 200] if found else text[:4000]
    dates: list[tuple[int, str]] = []
    for pattern, order in _DATES:
        for match in pattern.finditer(text):
            for form in ("%B %d %Y", "%b %d %Y"):
                try:
                    dates.append(
                        (match.start(), datetime.strptime(order.format(*match.groups()), form).date().isoformat())
                    )
                except ValueError:
                    continue
    for match in _NUMERIC.finditer(text):
        try:
            dates.append((match.start(), date(*map(int, match.groups())).isoformat()))
        except ValueError:
            continue
    return min(dates)[1] if dates else None


def _passages(path: Path, issuer: str, headings: Callable[[str], str], after: re.Pattern[str] | None) -> list[Passage]:
    """Parents of at most 256 tokens, without overlap: each text once, cut at sections and sentences."""
    from ragbuild.apps.extractive import Passage

    try:
        parsed = parse_file(path, ParseConfig(), CorpusConfig())
    except (DocumentRefused, OSError) as error:
        raise InputRefused(f"{path}: {error}") from error
    first = next((line.strip("#* \t") for line in parsed.markdown.splitlines() if line.strip("#* \t|-")), path.stem)
    title = (parsed.metadata.get("title") or first)[:200]
    markdown = headings(parsed.markdown)
    kept = len(markdown) == len(parsed.markdown)  # else offsets moved, and pages are counted from sections alone
    document = Document(
        doc_id=path.stem,
        doc_source=path.name,
        title=title,
        language=language_of(markdown),
        content_hash=hash_path(path),
    )
    config = ChunkConfig(parent_tokens=256, child_tokens=256, overlap_tokens=0)
    result = chunk_document(
        document,
        markdown,
        parsed.page_of if kept else lambda _: 1,
        config=config,
        counter=TokenCounter(config.tokenizer),
    )
    when = find_date(markdown, after)
    return [
        Passage(
            chunkId=chunk.chunk_id, issuer=issuer or title, title=title, source=path.name, page=chunk.page, date=when,
            section=" > ".join(dict.fromkeys(p for p in (chunk.chapter, chunk.section) if p and p != title)),
            language=document.language, text=chunk.content,
        )
        for chunk in result.chunks
        if chunk.is_parent
    ]  # fmt: skip

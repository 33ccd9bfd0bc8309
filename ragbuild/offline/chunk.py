"""Parent and child chunks of a parsed document: exact spans, stable ids, tags from the term dictionary.

`sections.py` reads the Markdown into units, `packing.py` chooses where to break between them; here the pieces become
records, with all metadata or not at all.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from ragbuild.core.config import ChunkConfig
from ragbuild.core.forms import FormMatcher
from ragbuild.core.records import Chunk, Document, TermEntry
from ragbuild.core.store import sha256
from ragbuild.core.text import TokenCounter
from ragbuild.offline.packing import CUTS, Packer, Piece
from ragbuild.offline.sections import place, read_units

_INHERITED = (
    "doc_id", "doc_version", "product_model", "kb", "doc_type", "status", "effective_date", "doc_source", "language",
)  # fmt: skip


@dataclass(frozen=True)
class ChunkResult:
    """`chunks`: parents, each followed by its children, in document order. `refused`: dicts of doc_source, span and
    reason. `stats`: counts, and the lists parent_tokens, child_tokens and overlaps (in tokens)."""

    chunks: list[Chunk]
    refused: list[dict[str, Any]]
    stats: dict[str, Any]


class Tagger:
    """The labels (`tag`) of the dictionary's terms that a text holds: most frequent first, at most three, ties by name.

    The longest form counts; Latin forms match whole words in any case.
    """

    def __init__(self, entries: Sequence[TermEntry]) -> None:
        self._matcher = FormMatcher((form, entry.tag) for entry in entries if entry.tag for form in entry.forms)

    def __call__(self, text: str) -> tuple[str, ...]:
        counts = Counter(tag for _, _, tag in self._matcher.find(text))
        return tuple(sorted(counts, key=lambda tag: (-counts[tag], tag))[:3])


def chunk_document(
    document: Document,
    markdown: str,
    page_of: Callable[[int], int],
    *,
    config: ChunkConfig,
    counter: TokenCounter,
    tagger: Tagger | None = None,
    image_ids: Callable[[int, int], tuple[str, ...]] | None = None,
) -> ChunkResult:
    """Chunk the parsed Markdown of one document (front matter removed).

    `page_of(offset)` gives the page, from 1, of a code point; `image_ids(start, end)` the images in a span. What lacks
    required metadata is refused with its reason, a parent together with its children. A chunk that holds no term has
    the tags of its headings.
    """
    units = read_units(markdown)
    sections = {id(u.section): u.section for u in units}
    full = {id(u.section) for u in units if u.kind != "heading"}
    several = sum(section.level == 1 for section in sections.values()) > 1
    packer = Packer(markdown, [u for u in units if id(u.section) in full], config, counter)
    settings = json.dumps([config.model_dump(mode="json"), counter.name], sort_keys=True)
    seed = f"{document.content_hash}|{document.key}|{sha256(settings)}"
    inherited = {name: getattr(document, name) for name in _INHERITED}
    chunks: list[Chunk] = []
    refused: list[dict[str, Any]] = []
    overlaps: list[tuple[int, int]] = []

    def identity(kind: str, piece: Piece) -> str:
        start, end = packer.span(piece)
        return f"{kind}-{sha256(f'{seed}|{kind}|{start}|{end}')[:16]}"

    def refuse(piece: Piece, reason: str) -> None:
        refused.append({"doc_source": document.doc_source, "span": packer.span(piece), "reason": reason})

    def make(kind: str, piece: Piece, **links: Any) -> Chunk | None:
        (start, end), unit = packer.span(piece), packer.units[piece.first]
        chapter, section, breadcrumb = place(unit.section.path, several, document.title)
        content = markdown[start:end]
        try:
            return Chunk(
                chunk_id=identity(kind, piece), chapter=chapter, section=section, breadcrumb=breadcrumb,
                page=page_of(start), page_end=page_of(end - 1), content=content, span=(start, end),
                tag=(tagger(content) or tagger(f"{chapter}\n{section}")) if tagger else (), n_tokens=piece.n_tokens,
                image_ids=image_ids(start, end) if image_ids else (), table_header=unit.header, **links, **inherited,
            )  # fmt: skip
        except (ValueError, LookupError) as error:  # pydantic's ValidationError, or a page map without this offset
            refuse(piece, _reason(error))
            return None

    for parent, pieces in packer.packed:
        made = [(piece, make("c", piece, parent_id=identity("p", parent))) for piece in pieces]
        kept = [(piece, chunk) for piece, chunk in made if chunk]
        if not kept:
            refuse(parent, "all its children were refused")
        elif whole := make("p", parent, child_ids=tuple(chunk.chunk_id for _, chunk in kept)):
            chunks += (whole, *(chunk for _, chunk in kept))
            overlaps += [packer.span(replace(piece, stop=piece.new)) for piece, _ in kept if piece.first < piece.new]
        else:
            for piece, _ in kept:
                refuse(piece, "its parent was refused")
    stats = {
        **packer.cuts,
        "heading_only_sections": len(sections) - len(full),
        "overlaps": packer.tokens(overlaps),
        **_measured(chunks),
    }
    return ChunkResult(chunks, refused, stats)


def chunk_corpus(
    items: Iterable[tuple[Any, ...]],
    *,
    config: ChunkConfig,
    counter: TokenCounter,
    tagger: Tagger | None = None,
    progress: Callable[[str], None] | None = None,
) -> ChunkResult:
    """Chunk many documents, given as (document, markdown, page_of) or (document, markdown, page_of, image_ids).

    Order is that of `items`; ids do not depend on it. A document given twice is refused the second time, since its
    ids would be equal. `progress` is called with the doc_source of each document that is done.
    """
    chunks: list[Chunk] = []
    refused: list[dict[str, Any]] = []
    stats: dict[str, Any] = {"documents": 0, "documents_without_chunks": [], "heading_only_sections": 0, "overlaps": []}
    stats |= dict.fromkeys(CUTS, 0) | _measured([])
    seen: set[tuple[str, str]] = set()
    for document, markdown, page_of, *images in items:
        stats["documents"] += 1
        if (document.key, document.content_hash) in seen:
            reason = f"the document {document.key} was given twice with the same content"
            refused.append({"doc_source": document.doc_source, "span": None, "reason": reason})
            continue
        seen.add((document.key, document.content_hash))
        result = chunk_document(
            document, markdown, page_of, config=config, counter=counter, tagger=tagger, image_ids=(*images, None)[0]
        )
        chunks += result.chunks
        refused += result.refused
        if not result.chunks:
            stats["documents_without_chunks"].append(document.doc_source)
        for name, value in result.stats.items():
            stats[name] += value  # counts add up, lists of lengths are joined
        if progress:
            progress(document.doc_source)
    return ChunkResult(chunks, refused, stats)


def _measured(chunks: Sequence[Chunk]) -> dict[str, Any]:
    parents, children = [c for c in chunks if c.is_parent], [c for c in chunks if not c.is_parent]
    ids = {c.chunk_id for c in parents}
    return {
        "parents": len(parents),
        "children": len(children),
        "orphan_parents": sum(not c.child_ids for c in parents),
        "orphan_children": sum(c.parent_id not in ids for c in children),
        "parent_tokens": [c.n_tokens for c in parents],
        "child_tokens": [c.n_tokens for c in children],
    }


def _reason(error: Exception) -> str:
    if isinstance(error, ValidationError):
        return "; ".join(f"{'.'.join(map(str, e['loc'])) or 'chunk'}: {e['msg']}" for e in error.errors())
    return f"{type(error).__name__}: {error}"

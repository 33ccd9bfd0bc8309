"""Eval sets: read, checked row by row, mapped to the chunks at hand, split into halves.

Ground truth is spans (a generated pair) or document name, pages and quotes (an expert's case); chunk ids are derived
from them here for whatever chunks there are, so that a set survives re-chunking and a wrong version never counts as
right. What evaluation reads is an `EvalCase`, whichever set it came from.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import BaseModel, ValidationError

from ragbuild.core.errors import InputRefused
from ragbuild.core.records import CaseKind, Chunk, EvalPair, ExpertCase, GroundSpan, PageRef, QueryType
from ragbuild.core.store import error_fields, hash_path, iter_records, read_json
from ragbuild.offline.question_text import bare

Half = Literal["tuning", "test"]
R = TypeVar("R", bound=BaseModel)


@dataclass(frozen=True)
class EvalCase:
    """One question with its ground truth as chunk ids of one index. `groups`: each is one thing that a complete
    answer needs, as the children of which any one holds it; `truth`: the first of each group.

    `documents` are the keys of the right documents (`also` included); `half` is by the first document's doc_id.
    """

    id: str
    query: str
    language: str
    query_type: QueryType
    kind: CaseKind
    source: Literal["generated", "expert"]
    half: Half
    answerable: bool = True
    documents: tuple[str, ...] = ()
    groups: tuple[tuple[str, ...], ...] = ()
    parent_groups: tuple[tuple[str, ...], ...] = ()  # the same for parents
    pages: tuple[int, ...] = ()
    answer: str = ""
    keywords: tuple[str, ...] = ()
    wrong_keywords: tuple[str, ...] = ()
    evaluation_point: str = ""

    @property
    def truth(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(group[0] for group in self.groups))

    @property
    def parents(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(group[0] for group in self.parent_groups))


def half_of(doc_id: str) -> Half:
    """Tuning or test, by a hash of the doc_id: stable when cases or documents are added, the same for all versions."""
    return "tuning" if int(hashlib.sha256(doc_id.encode()).hexdigest()[:8], 16) % 2 == 0 else "test"


def load_pairs(path: Path) -> list[EvalPair]:
    """A generated set. Raises InputRefused that names every bad row."""
    return _rows(path, EvalPair, "pair_id")


def load_expert(path: Path) -> list[ExpertCase]:
    """An expert's set: a JSON list, or an object with `cases`. Raises InputRefused that names every bad row."""
    return _rows(path, ExpertCase, "case_id")


def _rows(path: Path, model: type[R], key: str) -> list[R]:
    rows = read_json(path)
    rows = rows.get("cases") if isinstance(rows, dict) else rows
    if not isinstance(rows, list):
        raise InputRefused(f"{path}: expected a JSON list of {model.__name__}, or an object with 'cases'")
    out, bad, seen = [], [], set()
    for number, row in enumerate(rows, 1):
        name = row.get(key, "") if isinstance(row, dict) else ""
        try:
            out.append(model.model_validate(row))
        except ValidationError as error:
            bad.append(f"row {number} ({name or 'no ' + key}): {error_fields(error)}")
            continue
        if name in seen:
            bad.append(f"row {number}: {key} {name} stands twice")
        seen.add(name)
    if bad:
        more = f"\n  … and {len(bad) - 20} more" if len(bad) > 20 else ""
        raise InputRefused(f"{path}: {len(bad)} bad row(s):\n  " + "\n  ".join(bad[:20]) + more)
    return out


class ChunkMap:
    """The chunks at hand, by document, for turning spans and pages into chunk ids."""

    def __init__(self, chunks: Iterable[Chunk]) -> None:
        self.parents: dict[str, list[Chunk]] = defaultdict(list)  # by document key
        self.children: dict[str, list[Chunk]] = defaultdict(list)
        self._keys: dict[str, list[str]] = defaultdict(list)  # document keys by file name
        for chunk in chunks:
            side = self.parents if chunk.is_parent else self.children
            side[chunk.doc_key].append(chunk)
            if chunk.doc_key not in self._keys[chunk.doc_source]:
                self._keys[chunk.doc_source].append(chunk.doc_key)
        self.child = {c.chunk_id: c for cs in self.children.values() for c in cs}
        self.parent_of = {i: c.parent_id or "" for i, c in self.child.items()}

    @classmethod
    def read(cls, path: Path) -> ChunkMap:
        """From ``chunked_corpus.json``."""
        return cls(iter_records(path, Chunk))

    def holding(self, span: GroundSpan) -> list[tuple[str, ...]]:
        """The span as groups of child ids: the children that hold all of it, deepest first, as one group; where none
        does, one group for each child that holds a part. Empty when the document or the place is not there."""
        inside = []
        parts = []
        for child in self.children.get(span.doc_key, ()):
            start, end = child.span
            if start <= span.start and span.end <= end:
                inside.append((-min(span.start - start, end - span.end), child.chunk_id))
            elif start < span.end and span.start < end:
                parts.append((child.span, child.chunk_id))
        if inside:
            return [tuple(i for _, i in sorted(inside))]
        return [(i,) for _, i in sorted(parts)]

    def spans_of(self, ref: PageRef) -> list[GroundSpan]:
        """The quotes' places on these pages, or the children of these pages where none is quoted. Of several versions
        with this file name that hold them, the first that is active, else the first.

        Raises InputRefused for a document that is not there, a page without a chunk, or a quote that isn't on it.
        """
        keys = sorted(self._keys.get(ref.doc_source, ()), key=lambda k: self._first(k).status != "active")
        refused = None if keys else InputRefused(f"no document '{ref.doc_source}' in the corpus")
        for key in keys:
            try:
                return self._spans(ref, key)
            except InputRefused as error:
                refused = refused or error
        raise refused  # type: ignore[misc]

    def _spans(self, ref: PageRef, key: str) -> list[GroundSpan]:
        children = self.children[key]
        on = [c for c in children if any(c.page <= page <= c.page_end for page in ref.pages)]
        absent = [p for p in ref.pages if not any(c.page <= p <= c.page_end for c in children)]
        if absent:
            last = max((c.page_end for c in children), default=0)
            raise InputRefused(f"{ref.doc_source} has no chunk on page {absent[0]} (its last page is {last})")
        if not ref.quotes:
            return [GroundSpan(doc_key=c.doc_key, start=c.span[0], end=c.span[1]) for c in on]
        return [self._quote(ref, quote, key, on) for quote in ref.quotes]

    def _quote(self, ref: PageRef, quote: str, key: str, on: Sequence[Chunk]) -> GroundSpan:
        pattern = re.compile(r"\s+".join(map(re.escape, quote.split())))
        parents = {c.parent_id for c in on}
        for parent in self.parents[key]:
            if parent.chunk_id not in parents:
                continue
            for match in pattern.finditer(parent.content):
                start, end = (parent.span[0] + at for at in match.span())
                if any(c.span[0] < end and start < c.span[1] for c in on):
                    return GroundSpan(doc_key=key, start=start, end=end)
        pages = ", ".join(map(str, ref.pages))
        raise InputRefused(f"{ref.doc_source}, page {pages}, does not hold the quote '{quote[:80]}'")

    def doc_id_of(self, doc_source: str) -> str:
        keys = self._keys.get(doc_source)
        return self._first(keys[0]).doc_id if keys else doc_source

    def _first(self, key: str) -> Chunk:
        return (self.parents.get(key) or self.children[key])[0]


def pair_cases(pairs: Sequence[EvalPair], chunks: ChunkMap) -> tuple[list[EvalCase], list[str]]:
    """The pairs for these chunks, and the ids of those whose place is not in them, or holds another text by now (to be
    counted and shown)."""
    out, lost = [], []
    for pair in pairs:
        groups = _groups(pair.gt_spans, chunks)
        if not all(chunks.holding(span) for span in pair.gt_spans) or _moved(pair, groups, chunks):
            lost.append(pair.pair_id)
            continue
        spans = (*pair.gt_spans, *pair.also_spans)
        keys = tuple(dict.fromkeys(s.doc_key for s in spans if s.doc_key in chunks.children))
        halves = {
            half_of(chunks.children[s.doc_key][0].doc_id) for s in pair.gt_spans if chunks.children.get(s.doc_key)
        }
        out.append(
            EvalCase(
                id=pair.pair_id, query=pair.query, language=pair.language, query_type=pair.query_type,
                kind=pair.gen_source, source="generated", half="tuning" if "tuning" in halves else "test",
                documents=keys, pages=pair.gt_pages, answer=pair.gt_answer, keywords=pair.gt_keywords,
                **_found(pair.gt_spans, chunks, pair.also_spans, pair.also_of),
            )
        )  # fmt: skip
    return out, lost


def _moved(pair: EvalPair, groups: Sequence[tuple[str, ...]], chunks: ChunkMap) -> bool:
    """Does a key fact of a generated pair no longer stand where it stood?"""
    text = bare("\n".join(chunks.child[i].content for group in groups for i in group))
    return pair.generator != "expert" and not all(bare(word) in text for word in pair.gt_keywords)


def expert_cases(
    cases: Sequence[ExpertCase], chunks: ChunkMap, lost: list[str] | None = None
) -> list[EvalCase]:  # fmt: skip
    """The cases for these chunks. Those whose page or quote can't be mapped are left out and their ids added to `lost`;
    without it, raises InputRefused that names them all. Other places for an answer may then be missing."""
    out, bad = [], []
    for case in cases:
        try:
            spans = [span for ref in case.ground for span in chunks.spans_of(ref)]
            others = []
            for ref in case.also:
                with contextlib.suppress(*([] if lost is None else [InputRefused])):
                    others += chunks.spans_of(ref)
        except InputRefused as error:
            bad.append(f"{case.case_id}: {error}")
            if lost is not None:
                lost.append(case.case_id)
            continue
        sources = [ref.doc_source for ref in case.ground] or [case.near]
        halves = {half_of(chunks.doc_id_of(s)) if s else half_of(case.case_id) for s in sources}
        out.append(
            EvalCase(
                id=case.case_id, query=case.query, language=case.language, query_type=case.query_type, kind=case.kind,
                source="expert", answerable=case.answerable,
                half="tuning" if "tuning" in halves else "test",  # one that needs both stays out of the test half
                documents=tuple(dict.fromkeys(s.doc_key for s in [*spans, *others])),
                pages=tuple(p for ref in case.ground for p in ref.pages), answer=case.reference_answer,
                keywords=case.gt_keywords, wrong_keywords=case.wrong_keywords,
                evaluation_point=case.evaluation_point,
                **_found(spans, chunks, others),
            )
        )  # fmt: skip
    if bad and lost is None:
        raise InputRefused(f"{len(bad)} expert case(s) can't be mapped to the corpus:\n  " + "\n  ".join(bad))
    return out


def _groups(spans: Iterable[GroundSpan], chunks: ChunkMap) -> list[tuple[str, ...]]:
    return [group for span in spans for group in chunks.holding(span)]


def _found(
    spans: Sequence[GroundSpan], chunks: ChunkMap, also: Sequence[GroundSpan], of: Sequence[int] = ()
) -> dict[str, tuple]:
    """Groups of children and of their parents, without repeats. Another place that holds the same is an alternative of
    its group: of that of the span which `of` names, or of the only one. Else it only counts as a right document."""
    groups = [chunks.holding(span) for span in spans]
    for other, n in zip(also, of, strict=False):
        if len(groups[n]) == 1:
            groups[n] = [tuple(i for group in (*groups[n], *chunks.holding(other)) for i in group)]
    distinct = list(dict.fromkeys(tuple(dict.fromkeys(group)) for some in groups for group in some))
    distinct = [g for g in distinct if not any(set(other) < set(g) for other in distinct)]  # whoever has `other` has g
    if len(distinct) == 1 and not of:
        distinct = [tuple(dict.fromkeys(i for group in (*distinct, *_groups(also, chunks)) for i in group))]
    parents = dict.fromkeys(tuple(dict.fromkeys(chunks.parent_of[i] for i in group)) for group in distinct)
    return {"groups": tuple(distinct), "parent_groups": tuple(parents)}


def set_hash(path: Path) -> str:
    """The hash that the ledger knows a set by."""
    return hash_path(path)

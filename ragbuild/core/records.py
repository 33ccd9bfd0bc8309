"""The records that travel between the steps. Field names are those of the method and of the files on disk.

All are frozen and refuse unknown fields. Spans are code points, half-open, into the parsed Markdown that the
workspace keeps: ``content == markdown[start:end]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

Status = Literal["active", "legacy", "superseded"]
QueryType = Literal["factual", "procedural", "troubleshooting", "definitional"]


def _not_blank(value: str) -> str:
    if not value.strip():
        raise ValueError("must not be empty")
    return value


def _iso_date(value: str | None) -> str | None:
    if value is not None:
        date.fromisoformat(value)
    return value


Text = Annotated[str, AfterValidator(_not_blank)]
IsoDate = Annotated[str | None, AfterValidator(_iso_date)]
Span = tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0)]]


class Record(BaseModel):
    """Frozen; unknown fields are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def document_key(kb: str, doc_id: str, doc_version: str, product_model: Sequence[str]) -> str:
    """The key of a document, ``kb/doc_id/doc_version/model+model`` (models sorted)."""
    return "/".join((kb, doc_id, doc_version, "+".join(sorted(product_model))))


class Document(Record):
    """One document's fields. `product_model` is a list; ``all`` passes every filter."""

    doc_id: Text
    doc_version: Text = "unversioned"
    product_model: tuple[Text, ...] = Field(default=("all",), min_length=1)
    kb: Text = "default"
    doc_type: Text = "document"
    status: Status = "active"
    supersedes: str | None = None
    effective_date: IsoDate = None
    doc_source: Text
    title: Text
    language: Text
    content_hash: Text

    @property
    def key(self) -> str:
        return document_key(self.kb, self.doc_id, self.doc_version, self.product_model)


class Chunk(Record):
    """A parent (child_ids set) or a child (parent_id set) with the fields of its document copied in.

    The copy is deliberate: a filter at retrieval needs no join. May be empty: parent_id, child_ids, section, tag,
    effective_date, image_ids; all else is required, and a chunk without it is refused.
    """

    chunk_id: Text
    parent_id: str | None = None
    child_ids: tuple[str, ...] = ()
    chapter: Text
    section: str = ""
    breadcrumb: Text
    page: int = Field(ge=1)
    page_end: int = Field(ge=1)
    tag: tuple[str, ...] = ()
    content: Text
    span: Span
    n_tokens: int = Field(ge=1)
    image_ids: tuple[str, ...] = ()
    doc_id: Text
    doc_version: Text
    product_model: tuple[Text, ...] = Field(min_length=1)
    kb: Text
    doc_type: Text
    status: Status
    effective_date: IsoDate = None
    doc_source: Text
    language: Text
    table_header: str = ""  # repeated header of a table that this chunk continues: index_text only

    @model_validator(mode="after")
    def _consistent(self) -> Chunk:
        if self.parent_id and self.child_ids:
            raise ValueError("a chunk is a parent or a child, not both")
        if self.span[1] <= self.span[0]:
            raise ValueError(f"span {self.span} is empty")
        if self.page_end < self.page:
            raise ValueError(f"page_end {self.page_end} lies before page {self.page}")
        return self

    @property
    def is_parent(self) -> bool:
        return self.parent_id is None

    @property
    def doc_key(self) -> str:
        return document_key(self.kb, self.doc_id, self.doc_version, self.product_model)


def index_text(chunk: Chunk) -> str:
    """What is searched: where the chunk stands, the header of its table, then the document's own text."""
    return "\n".join(part for part in (chunk.breadcrumb, chunk.table_header, chunk.content) if part)


class TermEntry(Record):
    """One entry of the term dictionary. `colloquial` holds informal forms and common misspellings."""

    standard_term: Text
    abbreviation: str = ""
    full_form: str = ""
    colloquial: tuple[str, ...] = ()
    tag: str = ""
    kind: Literal["term", "product", "command", "error_code", "protocol"] = "term"
    source: Literal["machine", "expert", "llm"] = "machine"
    count: int = Field(default=0, ge=0)

    @property
    def formal(self) -> tuple[str, ...]:
        """The forms that documents use: standard term, abbreviation, full form (no empty ones, no repeats)."""
        return tuple(dict.fromkeys(f for f in (self.standard_term, self.abbreviation, self.full_form) if f))

    @property
    def forms(self) -> tuple[str, ...]:
        """All forms, formal ones first."""
        return tuple(dict.fromkeys((*self.formal, *self.colloquial)))


class ImageRecord(Record):
    """One image found in a document. `image_path` is relative to the workspace."""

    image_id: Text
    image_path: Text
    page: int = Field(ge=1)
    chapter: str = ""
    section: str = ""
    parent_chunk_id: str | None = None
    description: str = ""
    tag: tuple[str, ...] = ()
    doc_id: Text
    doc_version: Text


class GroundSpan(Record):
    """A piece of ground truth: the document's key and a span of its parsed Markdown."""

    doc_key: Text
    start: int = Field(ge=0)
    end: int = Field(gt=0)

    @model_validator(mode="after")
    def _forward(self) -> GroundSpan:
        if self.end <= self.start:
            raise ValueError(f"a span ends after it starts, got {self.start} to {self.end}")
        return self


class EvalPair(Record):
    """One generated Q-DOC-Q pair (1 query : N chunks : 1 answer). `gt_doc_ids` are **chunk** ids, in spite of the
    method's name for them, and are derived from `gt_spans` for the chunks at hand when a set is loaded. `also_spans`
    are other places that hold the same answer, or the same part of it as the ground span whose number `also_of` gives:
    to find one of them is right too."""

    pair_id: Text
    query: Text
    gt_spans: tuple[GroundSpan, ...] = Field(min_length=1)
    also_spans: tuple[GroundSpan, ...] = ()
    also_of: tuple[int, ...] = ()
    gt_doc_ids: tuple[str, ...] = ()
    gt_pages: tuple[int, ...] = ()
    gt_answer: Text
    gt_keywords: tuple[str, ...] = ()
    query_type: QueryType
    gen_source: Literal["single_chunk", "multi_chunk"]
    source_chunk_ids: tuple[str, ...] = ()
    language: Text
    generator: Text = "rules"


class PageRef(Record):
    """Ground truth as a person writes it: a document's file name and pages. `quotes`, verbatim, narrow it to the
    chunks that hold them; without any, every chunk of these pages is ground truth."""

    doc_source: Text
    pages: tuple[Annotated[int, Field(ge=1)], ...] = Field(min_length=1)
    quotes: tuple[Text, ...] = ()


CaseKind = Literal[
    "plain", "colloquial", "abbreviation", "compound", "version", "close_miss", "out_of_scope", "single_chunk",
    "multi_chunk",
]  # fmt: skip


class ExpertCase(Record):
    """One case written by a person. `answerable` false: to be refused. Keywords may hold alternatives joined by ``|``.

    `ground` is what a complete answer needs, `also` other places that hold the same. `wrong_keywords` are values of
    another version or model: an answer with one of them and none of `gt_keywords` is a wrong-version answer.
    """

    case_id: Text
    query: Text
    language: Text
    kind: CaseKind = "plain"
    query_type: QueryType = "factual"
    answerable: bool = True
    ground: tuple[PageRef, ...] = ()
    also: tuple[PageRef, ...] = ()
    near: str = ""  # the document that an unanswerable question nearly asks about
    reference_answer: Text
    gt_keywords: tuple[Text, ...] = ()
    wrong_keywords: tuple[Text, ...] = ()
    evaluation_point: str = ""
    given_answer: str = ""
    human_score: Literal[0, 1, 2] | None = None
    human_reason: str = ""

    @model_validator(mode="after")
    def _consistent(self) -> ExpertCase:
        if self.answerable != bool(self.ground):
            raise ValueError("an answerable case needs ground truth, and one that is not answerable has none")
        if (self.human_score is not None) != bool(self.given_answer):
            raise ValueError("given_answer and human_score go together")
        return self


class RouteHit(Record):
    """Where one route (``lexical`` or ``dense``) put a chunk: rank from 1, and the route's own score."""

    rank: int = Field(ge=1)
    score: float


class Hit(Record):
    """One retrieved child. `score` is the RRF score; `routes` keeps each route's rank and score."""

    chunk_id: Text
    rank: int = Field(ge=1)
    score: float
    routes: dict[str, RouteHit] = {}


class Candidate(Record):
    """A hit with its chunk and the features that a reranker may read.

    Features are completed from both indexes, so that a candidate found by one route alone lacks none:
    ``lexical`` (BM25), ``cosine`` and ``coverage`` (idf-weighted share of the query's terms, 0 to 1).
    """

    hit: Hit
    chunk: Chunk
    features: dict[str, float] = {}
    score: float | None = None  # the reranker's score, once it has spoken


class Citation(Record):
    """What a number in an answer points at: the passage quoted and where it stands."""

    number: int = Field(ge=1)
    chunk_id: Text
    doc_id: str
    doc_version: str
    title: str
    doc_source: str
    status: Status
    chapter: str
    section: str
    page: int
    quote: Text

    @property
    def place(self) -> str:
        """Chapter and section as a person reads them, once where they are the same."""
        return " > ".join(dict.fromkeys(part for part in (self.chapter, self.section) if part))


class Answer(Record):
    """An answer with citations, or a reason why there is none. `trace` holds stage outputs and timings."""

    query: str
    text: str
    status: Literal["answered", "abstained", "blocked"]
    citations: tuple[Citation, ...] = ()
    parents: tuple[Chunk, ...] = ()
    warnings: tuple[str, ...] = ()
    generator: str = ""
    trace: dict[str, Any] = {}

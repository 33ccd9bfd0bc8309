"""Where evidence comes from: the chunks of companies' documents, searched within a company and a section.

Three tables lie beside the index and not inside `Chunk` (evidence_tables.py). A company's and a section's condition is
applied before anything is ranked. `IndexStore` is the embedded store, on an index version of its own; one on a search
server has the same methods.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property
from pathlib import Path
from typing import Protocol

from pydantic import Field

from ragbuild.apps.evidence_tables import CONTENTS, CompanyDocument, Figure, SectionRow
from ragbuild.core.config import Config, ConfigView
from ragbuild.core.errors import InputRefused, UsageError
from ragbuild.core.records import Chunk, Record, Text
from ragbuild.core.store import read_json, read_records
from ragbuild.index.lexical import bm25_scores
from ragbuild.index.versions import FILES, IndexVersion
from ragbuild.models.embedders import Embedder, load_embedder
from ragbuild.offline.parse import (
    safe_name,
)  # fmt: skip
from ragbuild.online.retrieve import rrf


class Snippet(Record):
    """One hit of a store: a chunk, or a captioned figure. `relevance`: the mean of the idf-weighted share of the
    terms that it holds and its cosine; of a figure the share alone."""

    snippet_id: Text
    content: str
    table_header: str = ""  # of the table that the text goes on with
    document: CompanyDocument
    section: SectionRow | None
    page_no: int
    page_end: int
    relevance: float = Field(ge=0, le=1)
    figure: Figure | None = None


class EvidenceStore(Protocol):
    """What a report asks of a store. The embedded one is `IndexStore`; others are further implementations of this."""

    def sections(self, task_id: str) -> list[SectionRow]:
        """Chapters and subsections of all documents of a task, in their order."""
        ...

    def figures(self, company_id: str, section: SectionRow | None = None) -> list[Figure]:
        """Every figure of a company or of a section's pages, in the documents' order, captioned or not."""
        ...

    def search(
        self, company_id: str, terms: Sequence[str], k: int, *, section: SectionRow | None = None,
        skip: Collection[str] = (), images: bool = False,
    ) -> list[Snippet]:  # fmt: skip
        """The k best of the company's (and the section's) snippets that hold a term, without the ids in `skip`."""
        ...

    def text(self, section: SectionRow) -> str:
        """A section's own text, as Markdown."""
        ...

    def image(self, img_url: str) -> bytes: ...


class IndexStore:
    """`EvidenceStore` on an index version of the project's own in ``<folder>/indexes``."""

    def __init__(self, folder: Path, config: Config | ConfigView, embedder: Embedder | None = None) -> None:
        """Raises InputRefused where `build_store` has not finished."""
        self.folder, self._config, self._embedder = folder, config, embedder
        self.refused: list[dict[str, str]] = read_json(folder / "store.json")["refused"]
        self.version = IndexVersion(folder / "indexes")
        self.documents = {d.doc_key: d for d in read_records(folder / "documents.json", CompanyDocument)}
        self._sections = read_records(folder / "sections.json", SectionRow)
        self._figures = read_records(folder / "figures.json", Figure)
        self._held: dict[str, list[tuple[Chunk, list[str]]]] = {}

    def sections(self, task_id: str) -> list[SectionRow]:
        return [s for s in self._sections if s.task_id == task_id]

    def figures(self, company_id: str, section: SectionRow | None = None) -> list[Figure]:
        """A figure on a page where one section ends and the next begins belongs to the one in whose text it stands."""
        self._keys(company_id)
        mine = [f for f in self._figures if f.company_id == company_id]
        if section is None:
            return mine
        mine = [f for f in mine if f.doc_key == section.doc_key and section.page_start <= f.page_no <= section.page_end]
        return [f for f in mine if f.at < 0 or section.span[0] <= f.at < section.span[1]]

    def search(
        self, company_id: str, terms: Sequence[str], k: int, *, section: SectionRow | None = None,
        skip: Collection[str] = (), images: bool = False,
    ) -> list[Snippet]:  # fmt: skip
        """Both routes among what passes the filters, fused by RRF; what holds none of the terms is no hit."""
        tokens, lexical = self.version.tokenizer(" ".join(terms)), self.version.manifest["lexical"]
        pool: dict[str, Chunk | Figure] = {}
        held: list[list[str]] = []
        for chunk, cut in self._chunks(company_id):
            if chunk.chunk_id not in skip and _within(chunk, section):
                pool[chunk.chunk_id] = chunk
                held.append(cut)
        for figure in self.figures(company_id, section) if images else ():
            if figure.caption and figure.img_url not in skip:
                pool[figure.img_url] = figure
                held.append(self.version.tokenizer(figure.caption))
        scores, coverage = bm25_scores(tokens, held, self.version.lexical, lexical["k1"], lexical["b"])
        lexically = dict(sorted(zip(pool, scores, strict=True), key=lambda pair: (-pair[1], pair[0])))
        routes = [[name for name, score in lexically.items() if score > 0]]
        shares = dict(zip(pool, coverage, strict=True))
        if texts := sorted(name for name in routes[0] if isinstance(pool[name], Chunk)):
            vector = self.embedder.encode_queries([" ".join(terms)])[0]
            cosine = self.version.dense.score(vector, self.version.rows_of(texts))
            routes.append([texts[i] for i in (-cosine).argsort(kind="stable")])
            shares |= {name: (shares[name] + max(0.0, c)) / 2 for name, c in zip(texts, cosine, strict=True)}
        return [self._snippet(pool[name], min(1.0, float(shares[name]))) for name, _ in rrf(routes)[:k]]

    def text(self, section: SectionRow) -> str:
        return (self.version.markdown(section.doc_key) or "")[slice(*section.span)].strip()

    def image(self, img_url: str) -> bytes:
        """The bytes of a figure. Raises InputRefused for a url that is not in the store."""
        figure = next((f for f in self._figures if f.img_url == img_url), None)
        if figure is None:
            raise InputRefused(f"no picture {img_url} in the store {self.folder}")
        name = "images/" + figure.img_url.removeprefix(f"images/{safe_name(figure.company_id)}_")
        return (self.version.indexes / FILES / self.version.kept[figure.doc_key][name]).read_bytes()

    @cached_property
    def embedder(self) -> Embedder:
        """The one that the index was made with."""
        return self._embedder or load_embedder(self.version.manifest["embedder"]["name"], self._config.embedder)

    def _chunks(self, company_id: str) -> list[tuple[Chunk, list[str]]]:
        """The company's chunks with their tokens, read once."""
        if company_id not in self._held:
            mine = self._keys(company_id)
            documents = [d for d in self.version.documents if d.key in mine]
            read = [self.version.children_and_tokens(self.version.rows_of_document(d)) for d in documents]
            self._held[company_id] = [pair for chunks, cut in read for pair in zip(chunks, cut, strict=True)]
        return self._held[company_id]

    def _keys(self, company_id: str) -> set[str]:
        """The keys of the company's documents. Raises UsageError when there are none."""
        mine = {key for key, d in self.documents.items() if d.company_id == company_id}
        if not mine:
            known = ", ".join(sorted({d.company_id for d in self.documents.values()}))
            raise UsageError(f"the store holds no document of company '{company_id}'; it has {known}")
        return mine

    def _snippet(self, found: Chunk | Figure, relevance: float) -> Snippet:
        key = found.doc_key
        at, page = (found.span[0], found.page) if isinstance(found, Chunk) else (found.at, found.page_no)
        rows = [s for s in self._sections if s.doc_key == key and s.span[0] <= at < s.span[1]]
        about = {"document": self.documents[key], "section": rows[-1] if rows else None, "relevance": relevance}
        if isinstance(found, Figure):
            return Snippet(
                snippet_id=found.img_url, content=found.caption, page_no=page, page_end=page, figure=found, **about
            )
        return Snippet(
            snippet_id=found.chunk_id, content=found.content, table_header=found.table_header, page_no=page,
            page_end=found.page_end, **about,
        )  # fmt: skip


def _within(chunk: Chunk, section: SectionRow | None) -> bool:
    """Does a chunk stand in the section (a part of its document's pages)? Without one: all but a table of contents."""
    if section is None:
        return not any(CONTENTS.fullmatch(part) for part in chunk.breadcrumb.split(" > "))
    return chunk.doc_key == section.doc_key and section.span[0] <= chunk.span[0] < section.span[1]

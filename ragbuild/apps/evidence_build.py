"""Making an evidence store: the companies' documents read, indexed, and their tables written beside the index."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from ragbuild.apps.evidence_store import IndexStore
from ragbuild.apps.evidence_tables import CompanyDocument, SectionRow, figure_rows, section_rows
from ragbuild.core.config import Config, ConfigView
from ragbuild.core.errors import InputRefused, UsageError
from ragbuild.core.lock import WriterLock
from ragbuild.core.records import Chunk
from ragbuild.core.store import Workspace, read_json, sha256, walk, write_json, write_records
from ragbuild.core.text import TokenCounter
from ragbuild.index.staging import prune, write_version
from ragbuild.models.embedders import Embedder, VectorCache, load_embedder, resolve_auto
from ragbuild.offline.chunk import chunk_document
from ragbuild.offline.parse import ParsedEntry, image_ids_of, kept_files, parse_corpus, pictures_of, write_parsed


@dataclass(frozen=True)
class Source:
    """Documents (or folders of them) of one company; one for which ``documents.csv`` or its front matter gives a `kb`
    is that company's. `task_id`: the report they are for, by default the company's id; `uploaded`: by the company;
    `apart_from`: files and folders in the folders that are no documents."""

    company_id: str
    paths: Sequence[Path]
    task_id: str = ""
    uploaded: bool = True
    apart_from: Sequence[Path] = ()


def build_store(
    folder: Path, sources: Sequence[Source], config: Config | ConfigView, embedder: Embedder | None = None
) -> IndexStore:
    """Read and index the companies' documents in `folder`; what is there already is kept where nothing changed.

    `config` needs parse, corpus, chunk, embedder, lexical and dense. Raises InputRefused when no document can be read.
    """
    entries, refused = _read(sources, config)
    settings = {name: getattr(config, name).model_dump(mode="json") for name in ("chunk", "lexical", "embedder")}
    rows = [d.model_dump(mode="json") | {"text": sha256(e.parsed.markdown)} for d, e in entries]
    key = sha256(repr((1, settings, rows, embedder.name if embedder else "")))
    with WriterLock(folder):
        state = read_json(folder / "store.json") if (folder / "store.json").is_file() else {}
        if state.get("key") != key or not (folder / "indexes" / "CURRENT").is_file():
            _write(folder, entries, config, embedder)
            write_json(folder / "store.json", {"key": key, "refused": refused})
    return IndexStore(folder, config, embedder)


def _read(
    sources: Sequence[Source], config: Config | ConfigView
) -> tuple[list[tuple[CompanyDocument, ParsedEntry]], list[dict[str, str]]]:
    entries: dict[str, tuple[CompanyDocument, ParsedEntry]] = {}
    refused: list[dict[str, str]] = []
    for source in sources:
        groups: dict[Path, list[Path] | None] = {}
        for path in map(Path, source.paths):
            if not path.exists():
                raise UsageError(f"{path} is not there; give documents, or a folder of them")
            if path.is_dir():
                within = walk(path)
                apart = {p.resolve() for p in source.apart_from}
                kept = [f for f in within if apart.isdisjoint([f.resolve(), *f.resolve().parents])]
                groups[path] = kept if len(kept) < len(within) else None
            elif (group := groups.setdefault(path.parent, [])) is not None:
                group.append(path)
        for folder, files in groups.items():
            read = parse_corpus(folder, parse=config.parse, corpus=config.corpus, only=files)
            refused += read.refused
            for entry in read.documents:
                company = entry.document.kb if entry.document.kb != "default" else source.company_id
                document = entry.document.model_copy(update={"kb": company})  # each company is a base of its own
                task = source.task_id if company == source.company_id else ""
                row = CompanyDocument(
                    company_id=company, task_id=task or company, doc_key=document.key,
                    doc_source=document.doc_source, title=document.title, language=document.language,
                    uploaded_pdf=source.uploaded and entry.parsed.parser == "pdf",
                )  # fmt: skip
                if document.key in entries:
                    reason = f"the company has a document {document.key} already; rename one of the two"
                    refused.append({"doc_source": document.doc_source, "reason": reason})
                else:
                    entries[document.key] = row, ParsedEntry(document, entry.parsed)
    if not entries:
        reasons = "; ".join(f"{r['doc_source']}: {r['reason']}" for r in refused) or "the folders hold none"
        raise InputRefused(f"no document can be read ({reasons})")
    first = re.compile("prospectus|招股", re.I)  # the main document of a report, whose sections have the plain ids
    told = {key: f"{e.document.doc_type} {row.doc_source} {row.title}" for key, (row, e) in entries.items()}
    return [entries[key] for key in sorted(entries, key=lambda key: not first.search(told[key]))], refused


def _write(
    folder: Path, entries: Sequence[tuple[CompanyDocument, ParsedEntry]], config: Config | ConfigView,
    embedder: Embedder | None,
) -> None:  # fmt: skip
    """The index version, then the tables. Snippets share no text: chunks of this store do not overlap."""
    documents = [e.document for _, e in entries]
    if embedder is None:
        name = config.embedder.name
        name = resolve_auto(d.language for d in documents)[0] if name == "auto" else name
        embedder = load_embedder(name, config.embedder)
    chunking = config.chunk.model_copy(update={"overlap_tokens": 0})
    counter = TokenCounter(chunking.tokenizer)
    sections: list[SectionRow] = []
    for row, entry in entries:
        others = {s.doc_key for s in sections if s.task_id == row.task_id}
        sections += section_rows(row, entry.parsed, f"d{len(others) + 1}_" if others else "")

    def chunks() -> Iterator[Chunk]:
        for document, parsed in ((e.document, e.parsed) for _, e in entries):
            images = image_ids_of(pictures_of(document, parsed), document.key)
            yield from chunk_document(
                document, parsed.markdown, parsed.page_of, config=chunking, counter=counter, image_ids=images
            ).chunks

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "store.json").unlink(missing_ok=True)
    with TemporaryDirectory(dir=folder, prefix=".parsed-") as temporary:
        workspace = Workspace(temporary)
        write_parsed([e for _, e in entries], workspace)
        write_version(
            folder / "indexes", chunks(), documents, (), config=config, encode=VectorCache(embedder).encode,
            embedder={"name": embedder.name, "dim": embedder.dim},
            kept={d.key: kept_files(workspace, d) for d in documents},
        )  # fmt: skip
    write_records(folder / "documents.json", [row for row, _ in entries])
    write_records(folder / "sections.json", sections)
    write_records(folder / "figures.json", [f for row, e in entries for f in figure_rows(row, e)])
    prune(folder / "indexes", 1)

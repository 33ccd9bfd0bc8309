"""A folder of documents: each is read by the parser that its content asks for, cached, given its fields, or refused."""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ragbuild.core.config import CorpusConfig, ParseConfig
from ragbuild.core.errors import DocumentRefused, RagbuildError, UsageError
from ragbuild.core.records import Document
from ragbuild.core.store import (
    Workspace, cache_dir, hash_path, read_json, sha256, walk, write_bytes, write_json, write_text,
)  # fmt: skip
from ragbuild.offline.parse.base import (
    MB, DocumentParser, ParsedDocument, ParsedImage, ParseOptions, detect, mislabelled, read_head, safe_name,
)  # fmt: skip
from ragbuild.offline.parse.fields import read_sidecar, resolve
from ragbuild.offline.parse.markdown import HtmlParser, MarkdownParser
from ragbuild.offline.parse.office import DocxParser, PptxParser, XlsxParser
from ragbuild.offline.parse.pdf import PdfParser
from ragbuild.offline.parse.text import TextParser

# What a corpus folder may hold beside documents, in its root
NOT_DOCUMENTS = ("query_log.csv", "term_review.csv", "decisions.csv", "expert_eval_set.json", "README.md")
Progress = Callable[[str, int, int], None]  # doc_source, how many are done, how many there are


@dataclass(frozen=True)
class ParsedEntry:
    document: Document
    parsed: ParsedDocument


@dataclass(frozen=True)
class CorpusResult:
    """What became of a folder: documents, and what was refused (doc_source, reason), inferred and warned of."""

    documents: list[ParsedEntry] = field(default_factory=list)
    refused: list[dict[str, str]] = field(default_factory=list)
    inferred: list[dict[str, str]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def parsers() -> list[DocumentParser]:
    """All parsers, in the order in which they are asked; a new format is one more here."""
    return [PdfParser(), DocxParser(), PptxParser(), XlsxParser(), HtmlParser(), MarkdownParser(), TextParser()]


def parse_file(path: str | Path, parse: ParseConfig, corpus: CorpusConfig, name: str | None = None) -> ParsedDocument:
    """Read one file by the parser that its content asks for; raises DocumentRefused with the reason.

    `name`: the safe name with which its images begin; by default that of the file.
    """
    path = Path(path)
    options = ParseOptions(name or safe_name(path.name), parse, corpus)
    return _parse(path, _parser_for(path, parsers(), corpus), options, hash_path(path))


def _parser_for(path: Path, candidates: list[DocumentParser], corpus: CorpusConfig) -> DocumentParser:
    """The first parser that accepts the file. Raises DocumentRefused for what no parser may or can read."""
    size, head = path.stat().st_size, read_head(path)
    if not head.strip(b" \t\r\n\f\v\0\xef\xbb\xbf\xff\xfe"):
        raise DocumentRefused("the file is empty")
    if size > corpus.max_file_mb * MB:
        raise DocumentRefused(
            f"{size / MB:.0f} MB, over corpus.max_file_mb ({corpus.max_file_mb:g}); raise it or split the file"
        )
    for parser in candidates:
        if parser.accepts(head, path):
            return parser
    raise DocumentRefused("no parser reads this format; give it as PDF, DOCX, PPTX, XLSX, HTML, Markdown or text")


def _entry(parser: DocumentParser, options: ParseOptions, content_hash: str) -> Path:
    """The folder of the cache for these bytes, parser, settings and name."""
    settings = options.parse.model_dump_json() + f"|{options.corpus.max_unzipped_mb}"
    key = sha256("|".join([content_hash, parser.name, parser.version, options.name, settings]))
    return cache_dir("parsed") / key[:2] / key


def _parse(path: Path, parser: DocumentParser, options: ParseOptions, content_hash: str) -> ParsedDocument:
    """From the cache, else parsed. An unexpected exception of a library becomes a refusal with its type and message."""
    folder = _entry(parser, options, content_hash)
    parsed = _cached(folder)
    if parsed is None:
        try:
            parsed = parser.parse(path, options)
        except Exception as error:
            raise DocumentRefused(_reason(error, f" as {parser.name}")) from error
        if not re.search(r"\w", parsed.markdown):
            raise DocumentRefused(f"holds no text (read as {parser.name})")
        with contextlib.suppress(OSError):  # the cache only saves time: a full disk must not cost a document
            for image in parsed.images:
                write_bytes(folder / image.name, image.data)
            write_json(folder / "document.json", _as_json(parsed) | {"hashes": [sha256(i.data) for i in parsed.images]})
    warning = mislabelled(path, detect(read_head(path), path))
    return replace(parsed, warnings=(*parsed.warnings, *([warning] if warning else [])))


def _reason(error: Exception, how: str = "") -> str:
    """Our own errors say what is wrong; what a library raises on a broken file is named by its type."""
    return (
        str(error)
        if isinstance(error, RagbuildError)
        else f"cannot be read{how}: {type(error).__name__}: {str(error)[:200]}"
    )


def _as_json(parsed: ParsedDocument) -> dict[str, Any]:
    images = [{"name": image.name, "page": image.page, "caption": image.caption} for image in parsed.images]
    return {
        "parser": parsed.parser, "page_starts": list(parsed.page_starts), "metadata": parsed.metadata,
        "warnings": list(parsed.warnings), "markdown": parsed.markdown, "images": images,
    }  # fmt: skip


def _from_json(data: dict[str, Any], markdown: str, images: tuple[ParsedImage, ...]) -> ParsedDocument:
    return ParsedDocument(
        markdown,
        tuple(map(int, data["page_starts"])),
        images,
        dict(data["metadata"]),
        data["parser"],
        tuple(data["warnings"]),
    )


def _cached(folder: Path) -> ParsedDocument | None:
    """The cache's entry, or None when there is none or it is damaged."""
    try:
        data = read_json(folder / "document.json")
        images = tuple(
            ParsedImage(i["name"], (folder / i["name"]).read_bytes(), i["page"], i["caption"]) for i in data["images"]
        )
        if [sha256(image.data) for image in images] != data["hashes"]:
            return None
        return _from_json(data, str(data["markdown"]), images)
    except (RagbuildError, OSError, KeyError, TypeError, ValueError):
        return None


def parse_corpus(
    folder: str | Path, *, parse: ParseConfig, corpus: CorpusConfig, progress: Progress | None = None
) -> CorpusResult:
    """Read every document below `folder`, in the order of their relative paths. One that fails never stops the others.

    Links are not followed; the second of two files with the same bytes, or of two documents with the same key, is
    refused naming the first. Raises UsageError when there is no such folder, InputRefused for an unreadable sidecar.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UsageError(f"the corpus folder {folder} does not exist; give one with --corpus or corpus.dir")
    rows, warnings = read_sidecar(folder, corpus.sidecar)
    result, every = CorpusResult(warnings=warnings), parsers()
    for source in _links(folder):
        result.refused.append({"doc_source": source, "reason": "a link is not followed; copy the file into the folder"})
    skipped = {(folder / name).resolve() for name in (*NOT_DOCUMENTS, corpus.sidecar)}
    skipped |= {Path(name).resolve() for name in (corpus.query_log, corpus.term_review)}
    files = [path for path in walk(folder) if path.resolve() not in skipped]
    names = Counter(path.with_suffix("") for path in files)
    chosen: dict[Path, tuple[DocumentParser, str]] = {}
    by_hash: dict[str, str] = {}
    for path in files:
        source = path.relative_to(folder).as_posix()
        try:
            content_hash = hash_path(path)
            parser = _parser_for(path, every, corpus)
            if (first := by_hash.setdefault(content_hash, source)) != source:
                raise DocumentRefused(f"the same content as '{first}'; keep one of the two")
            chosen[path] = (parser, content_hash)
        except Exception as error:  # one bad file must not stop the others
            result.refused.append({"doc_source": source, "reason": _reason(error)})
    try:
        _prepare(chosen, folder, parse, corpus)
        keys: dict[str, str] = {}
        for done, (path, (parser, content_hash)) in enumerate(chosen.items(), 1):
            source = path.relative_to(folder).as_posix()
            try:
                parsed = _parse(path, parser, ParseOptions(safe_name(source), parse, corpus), content_hash)
                document, inferred, notes = resolve(
                    source, parsed, rows.get(source), corpus.sidecar, content_hash, names[path.with_suffix("")] > 1
                )
                if (first := keys.setdefault(document.key, source)) != source:
                    raise DocumentRefused(
                        f"the same key {document.key} as '{first}'; give it another doc_id or doc_version"
                    )
                result.documents.append(ParsedEntry(document, parsed))
                result.inferred.extend(inferred)
                result.warnings.extend([*notes, *(f"{source}: {warning}" for warning in parsed.warnings)])
            except Exception as error:
                result.refused.append({"doc_source": source, "reason": _reason(error)})
            if progress is not None:
                progress(source, done, len(chosen))
    finally:
        for parser in every:
            if isinstance(parser, PdfParser):
                parser.close()
    result.refused.sort(key=lambda item: item["doc_source"])
    return result


def _prepare(
    chosen: dict[Path, tuple[DocumentParser, str]], folder: Path, parse: ParseConfig, corpus: CorpusConfig
) -> None:
    """Hand all PDFs that the cache does not hold to one Java process."""
    pdfs: dict[PdfParser, list[Path]] = {}
    for path, (parser, content_hash) in chosen.items():
        options = ParseOptions(safe_name(path.relative_to(folder).as_posix()), parse, corpus)
        if isinstance(parser, PdfParser) and _cached(_entry(parser, options, content_hash)) is None:
            pdfs.setdefault(parser, []).append(path)
    for parser, paths in pdfs.items():
        parser.prepare(paths, parse)


def _links(folder: Path) -> list[str]:
    found = []
    for root, dirs, names in os.walk(folder, followlinks=False):
        found += [
            os.path.join(root, n)
            for n in (*dirs, *names)
            if not n.startswith(".") and os.path.islink(os.path.join(root, n))
        ]
    return sorted(Path(path).relative_to(folder).as_posix() for path in found)


def write_parsed(entries: Iterable[ParsedEntry], workspace: Workspace) -> list[dict[str, Any]]:
    """Write ``parsed/<name>.md``, ``parsed/<name>.pages.json`` and ``images/…``; returns a record for each image.

    A record holds image_id and image_path (relative), doc_key, doc_source, page, description and span (offsets of its
    link in the Markdown).
    """
    records = []
    for entry in entries:
        name, parsed = safe_name(entry.document.doc_source), entry.parsed
        for image in parsed.images:
            path = f"images/{image.name}"
            write_bytes(workspace.path(path), image.data)
            at = parsed.markdown.find(f"]({path})")
            start = parsed.markdown.rfind("![", 0, max(at, 0))
            records.append({
                "image_id": image.name.rpartition(".")[0], "image_path": path, "doc_key": entry.document.key,
                "doc_source": entry.document.doc_source, "page": image.page, "description": image.caption,
                "span": [start, at + len(path) + 3] if at >= 0 and start >= 0 else [0, 0],
            })  # fmt: skip
        data = _as_json(parsed)
        del data["markdown"]
        write_text(workspace.path(f"parsed/{name}.md"), parsed.markdown)
        write_json(workspace.path(f"parsed/{name}.pages.json"), {"doc_key": entry.document.key, **data})
    return records


def load_parsed(workspace: Workspace, document: Document) -> ParsedDocument:
    """What `write_parsed` kept of a document, without the images' bytes; raises UsageError when it is not there."""
    name = safe_name(document.doc_source)
    try:
        markdown = workspace.path(f"parsed/{name}.md").read_bytes().decode("utf-8")
    except OSError as error:
        raise UsageError(
            f"no parsed text of '{document.doc_source}' in {workspace.root}; run the build again"
        ) from error
    data = read_json(workspace.path(f"parsed/{name}.pages.json"))
    images = tuple(ParsedImage(i["name"], b"", i["page"], i["caption"]) for i in data["images"])
    return _from_json(data, markdown, images)

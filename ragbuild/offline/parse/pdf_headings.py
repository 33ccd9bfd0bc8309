"""Which blocks of a PDF are headings, and of which level."""

from __future__ import annotations

import re
from collections import defaultdict
from statistics import median

from ragbuild.offline.parse.pdf_lines import union
from ragbuild.offline.parse.pdf_tables import CAPTION, Block

_NUMBERED = re.compile(
    r"(?P<digits>\d{1,2}(?:\.\d{1,2}){0,4})\.?[ \u3000]+(?=[^\W\d_])|(?P<letters>[A-Z](?:\.[A-Z\d]{1,2}){1,3}) |"
    r"[IVX]{1,5}\. ?(?=[A-Z])|第[一二三四五六七八九十\d]{1,3}[章节]|Chapter ?\d+|Appendix [A-Z]|附录"
)
_KNOWN = re.compile(
    r"(?i:abstract|references|bibliography|acknowledge?ments?|contents|appendix)|摘要|目录|参考文献|致谢|附录"
)
LEADER = re.compile(r"(?:[ .·…]?[.·…]){4,}\s*")  # from an entry of a table of contents to its page


def is_caption(block: Block) -> bool:
    """Does the block name a figure or table?"""
    return bool(CAPTION.match(block.text)) and len(block.text) < 200


def mark_headings(blocks: list[Block], body: float) -> list[Block]:
    """Decide which blocks are headings and of which level. A numbered one has the level of its number; the others that
    of the numbered ones of their font size. Without numbers the level goes by font size.
    """
    headings: list[Block] = []
    for block in blocks:
        if block.kind in ("text", "item") and _is_heading(block, body):
            block.kind, last = "heading", headings[-1] if headings else block
            alike = last.page == block.page and abs(last.size - block.size) < 0.6 and not heading_number(block.text)
            if alike and -3 < last.box[1] - block.box[3] < 0.5 * block.size:  # one heading over two lines
                last.lines, last.box, block.kind = last.lines + block.lines, union((last.box, block.box)), "used"
            else:
                headings.append(block)
    numbered: dict[int, list[float]] = defaultdict(list)
    for block in headings:
        if depth := heading_number(block.text):
            numbered[depth].append(block.size)
    levels, level, last_size = {}, 0, 0.0
    for size in sorted({block.size for block in headings}, reverse=True):
        if not last_size or size < 0.9 * last_size or (size < last_size and size < 1.1 * body):
            level, last_size = level + 1, size
        levels[size] = level
    sized = {depth: median(found) for depth, found in numbered.items()}
    by_number = sum(map(len, numbered.values())) > 2
    largest = max(sized.values(), default=0.0)
    titled = any(block.size > 1.1 * largest for block in headings if not heading_number(block.text))
    for block in headings:
        depth = heading_number(block.text)
        if by_number and (depth or block.size <= 1.1 * largest):
            depth = depth or next((d for d in sorted(sized) if block.size > sized[d] - 0.5), max(sized) + 1)
            block.level = min(depth - min(sized) + 1 + titled, 6)
        else:
            block.level = 1 if by_number else min(levels[block.size], 6)
    return [block for block in blocks if block.kind != "used"]


def heading_number(text: str) -> int:
    """The depth of a heading's number: 1 for ``3 Scope``, ``第一章`` or ``IV.``, 2 for ``3.1``; 0 without a number."""
    match = _NUMBERED.match(text)
    return ((match["digits"] or match["letters"] or "").count(".") + 1) if match else 0


def _is_heading(block: Block, body: float) -> bool:
    """Short, without an end of a sentence, and larger than the text, bold, numbered or of a known name."""
    text, size = block.text, block.size
    numbered, hinted, bold = heading_number(text), block.hint == "heading", all(line.bold for line in block.lines)
    han = len(re.findall("[\u3400-\u9fff]", text))
    if (
        len(text) > (60 if han > len(text) / 3 else 130)
        or len(block.lines) > 3
        or any(line.parts > 1 for line in block.lines)
    ):
        return False
    if not re.search(r"[^\W\d_]{2}|[\u3400-\u9fff]", text) or re.search(r"[。；;,，、]$|[^.]\.$|^[•●▪*]", text):
        return False
    if is_caption(block) or LEADER.search(text) or (re.search(r"[:：]$|:\s", text) and not (hinted or numbered)):
        return False
    if (re.match(r"[IVX]+\. ?[A-Z]", text) and text.isupper()) or _KNOWN.fullmatch(text):
        return size >= 0.7 * body
    alone = len(block.lines) == 1
    if size >= max(body * 1.08, body + 0.9):
        return bool(numbered) or hinted or bold or (size >= 1.25 * body and alone and len(text) < 40)
    if size < 0.95 * body:
        return False
    lettered = re.match(r"[A-Z]\.[A-Z\d]", text) is not None
    return (bold and (bool(numbered) or hinted or (alone and len(text) < 70))) or (
        bool(numbered) and (hinted or lettered)
    )

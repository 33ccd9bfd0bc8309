"""What stands on a PDF page, line by line, with the geometry and the font that the layout rules need (pypdfium2)."""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ragbuild.core.text import HAN

_MONO = re.compile(r"mono|courier|consol|menlo|typewriter|cmtt", re.I)
_BOLD = re.compile(r"bold|black|heavy|semib|medi(?!um)|cmbx|-fbd", re.I)
_MARK = re.compile("[•●▪◦■□\x02\x7f-\x9f\ue000-\uf8ff]|\\d{1,2}[.)]")  # belongs to what follows it, however far
_LIGATURES = {c: s for c, s in zip("\ufb00\ufb01\ufb02\ufb03\ufb04", ("ff", "fi", "fl", "ffi", "ffl"), strict=True)}
_SOLID_END = re.compile(r"\w[-–]$|https?:\S*[/-]$|@$|[\u3000-\u303f\uff00-\uffef]$")  # lines join without a blank
_SOLID_START = re.compile(r"[\u3001-\u303f\uff00-\uffef]")
Box = tuple[float, float, float, float]  # x0, y0, x1, y1 in points, y upwards, as the reader sees the page


@dataclass
class Line:
    """A run of text on one base line. `size` in points; a wide gap on the same base line begins another Line."""

    box: Box
    size: float
    bold: bool
    mono: bool
    text: str
    parts: int = 1  # pieces far apart, of which it was put together


def page_lines(page: Any) -> list[Line]:
    """The lines of a page in the order of its content stream."""
    import pypdfium2.raw as raw

    text_page = page.get_textpage()
    turned, (width, height) = page.get_rotation(), page.get_mediabox()[2:]
    turn = {
        90: lambda b: (b[1], width - b[2], b[3], width - b[0]),
        180: lambda b: (width - b[2], height - b[3], width - b[0], height - b[1]),
        270: lambda b: (height - b[3], b[0], height - b[1], b[2]),
    }.get(turned, lambda b: b)
    runs: list[list[tuple[int, str, Box]]] = [[]]
    rect = raw.FS_RECTF()
    for i in range(text_page.count_chars()):
        char = chr(raw.FPDFText_GetUnicode(text_page, i))
        if char in "\r\n" or not raw.FPDFText_GetLooseCharBox(text_page, i, rect):
            if char in "\r\n":
                runs.append([])
            continue
        angle = math.degrees(raw.FPDFText_GetCharAngle(text_page, i)) + turned
        if abs((angle + 180) % 360 - 180) > 20 and not char.isspace():
            continue  # written upwards or askew
        box = turn((rect.left, rect.bottom, rect.right, rect.top))
        if runs[-1] and not char.isspace():
            last = runs[-1][-1][2]
            size = max(last[3] - last[1], box[3] - box[1], 1)
            gap = 4 if len(runs[-1]) < 5 and _MARK.fullmatch("".join(c for _, c, _ in runs[-1]).strip()) else 0.9
            if box[0] - last[2] > gap * size or box[2] < last[0] or abs(box[1] - last[1]) > 0.7 * size:
                runs.append([])
        if not char.isspace() or runs[-1]:
            runs[-1].append((i, char, box if not char.isspace() or not runs[-1] else runs[-1][-1][2]))
    lines = []
    for run in runs:
        text = clean("".join(char for _, char, _ in run))
        seen = [(i, box) for i, char, box in run if not char.isspace()]
        if not text or not seen:
            continue
        fonts = [_font(text_page, i, raw) for i in {seen[0][0], seen[len(seen) // 2][0], seen[-1][0]}]
        box = (
            min(b[0] for _, b in seen),
            min(b[1] for _, b in seen),
            max(b[2] for _, b in seen),
            max(b[3] for _, b in seen),
        )
        sizes, bold, mono = zip(*fonts, strict=True)
        lines.append(Line(box, round(sorted(sizes)[len(sizes) // 2], 1), all(bold), all(mono), text))
    return lines


def clean(text: str) -> str:
    """A line without ligatures, control and private characters; a symbol font's bullet and a broken hyphen stay."""
    text = "".join(_LIGATURES.get(char, char) for char in text).replace("\xa0", " ")
    text = re.sub("^[\x02\x7f-\x9f\ue000-\uf8ff\ufffd]", "• ", text)
    text = re.sub("[\x02\ufffe\xad](?=\\s*$)", "-", text)
    text = re.sub("[\x00-\x1f\x7f-\x9f\ue000-\uf8ff\ufffe\ufffd\xad\u200b]", "", text)
    return re.sub(" {2,}", " ", text).strip()


def _font(text_page: Any, index: int, raw: Any) -> tuple[float, bool, bool]:
    name, flags, matrix = ctypes.create_string_buffer(128), ctypes.c_int(), raw.FS_MATRIX()
    length = raw.FPDFText_GetFontInfo(text_page, index, name, 128, flags)
    font = name.raw[: max(min(length, 128) - 1, 0)].decode("utf-8", "replace")
    scale = math.hypot(matrix.c, matrix.d) if raw.FPDFText_GetMatrix(text_page, index, matrix) else 1.0
    bold = bool(_BOLD.search(font)) or raw.FPDFText_GetFontWeight(text_page, index) >= 600
    return (
        raw.FPDFText_GetFontSize(text_page, index) * (scale or 1.0),
        bold,
        bool(_MONO.search(font)) or bool(flags.value & 1),
    )


def inside(line: Line, box: Box, margin: float = 2.0) -> bool:
    """Whether the middle of the line lies in the box."""
    x, y = (line.box[0] + line.box[2]) / 2, (line.box[1] + line.box[3]) / 2
    return box[0] - margin <= x <= box[2] + margin and box[1] - margin <= y <= box[3] + margin


def union(boxes: Iterable[Box]) -> Box:
    """The smallest box around all `boxes`; at least one."""
    x0, y0, x1, y1 = zip(*boxes, strict=True)
    return min(x0), min(y0), max(x1), max(y1)


def rows(lines: Sequence[Line]) -> list[list[Line]]:
    """Lines on one base line together, left to right, the rows from top to bottom. Superscripts join their line."""
    out: list[list[Line]] = []
    for line in sorted(lines, key=lambda item: -item.box[1]):
        small, large = sorted(
            (line, max(out[-1], key=lambda item: item.size) if out else line), key=lambda item: item.size
        )
        raised = small.size < 0.85 * large.size and large.box[1] < (small.box[1] + small.box[3]) / 2 < large.box[3]
        if out and (raised or out[-1][0].box[1] - line.box[1] < 0.45 * large.size):
            out[-1].append(line)
        else:
            out.append([line])
    return [sorted(row, key=lambda item: item.box[0]) for row in out]


def merged(row: Sequence[Line]) -> Line:
    """One line out of those on a base line."""
    text, parts = row[0].text, row[0].parts
    for left, right in pairwise(row):
        gap = right.box[0] - left.box[2]  # a superscript stands close
        text, parts = text + ("" if gap < 0.12 * left.size else " ") + right.text, parts + (gap > 2.5 * left.size)
    box = union(line.box for line in row)
    return Line(box, max(r.size for r in row), all(r.bold for r in row), all(r.mono for r in row), text, parts)


def join_lines(lines: Sequence[str], words: frozenset[str] = frozenset()) -> str:
    """Wrapped lines as one: no blank between Han characters, a word hyphenated at a line's end whole again.

    `words` are the document's words in lower case: they tell a hyphen of the word from one of the line break.
    """
    out = ""
    for line in lines:
        line = line.strip()
        if not out or not line:
            out += line
            continue
        end = out[-60:]
        head, tail = re.search(r"([^\W\d_]+)-$", end), re.match(r"[^\W\d_]+", line)
        if head and tail:
            first, second = head.group(1).lower(), tail.group().lower()
            both = f"{first}-{second}" in words or (len(first) > 2 and first in words and second in words)
            kept = tail.group()[0].isupper() or (first + second not in words and both)
            out = (out if kept else out[:-1]) + line
        else:
            han = re.search(f"[{HAN}]$", end) and re.match(f"[{HAN}“‘]", line)
            out += ("" if han or _SOLID_END.search(end) or _SOLID_START.match(line) else " ") + line
    return out


def vocabulary(pages: Iterable[Iterable[Line]]) -> frozenset[str]:
    """The words of a document in lower case, without those that a line break cuts in two."""
    words, cut = set(), False
    for line in (line for lines in pages for line in lines):
        found = [word.lower() for word in re.findall(r"[^\W\d_]+(?:-[^\W\d_]+)*", line.text)]
        words.update(found[bool(cut) : len(found) - line.text.endswith("-")])
        cut = line.text.endswith("-")
    return frozenset(words)

"""Packs units of text into parents and children of a limited number of tokens, breaking where the text does.

A unit that is longer than a child by itself is cut at the best place, and that is counted. Token counts of the pieces
are real counts of their text; sums over units only guide the packing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from ragbuild.core.config import ChunkConfig
from ragbuild.core.text import TokenCounter, strip_span
from ragbuild.offline.sections import Unit

# Where an overlong unit may be cut, best first, with the cost of a break there; at any character it is 3.
_PLACES = ((r"\n", 0.5), (r"[|，、；：。！？]|[,;:.!?](?=\s)", 1.0), (r"\s", 2.0))
CUTS = ("cut_sentences", "cut_rows", "cut_code", "wide_table_headers")  # counts that a packer keeps
_CUT_KIND = {"row": "cut_rows", "thead": "cut_rows", "code": "cut_code"}
_CHARS_PER_TOKEN = 16  # a tokenizer that takes a page in an unknown script for one token is not believed
_GAP = re.compile(r"\s{0,8}")


@dataclass(frozen=True, slots=True)
class Piece:
    """Units [first, stop); those before `new` repeat the end of the piece before."""

    first: int
    new: int
    stop: int
    n_tokens: int = 0


class Packer:
    """Packs units into parents and the units of each parent into children: `packed`, a list of (parent, children)."""

    def __init__(self, markdown: str, units: list[Unit], config: ChunkConfig, counter: TokenCounter) -> None:
        self.md, self.counter, self.config = markdown, counter, config
        self.cuts = dict.fromkeys(CUTS, 0)
        self.units, self.sizes = self._fitting(units)
        units, n = self.units, len(self.units)
        bounds = [i for i in range(n + 1) if i in (0, n) or units[i].section is not units[i - 1].section]
        parents = [p for a, b in pairwise(bounds) for p in self._pack(a, b, config.parent_tokens)]
        parents = self._verified(parents, config.parent_tokens)
        children = [c for p in parents for c in self._pack(p.new, p.stop, config.child_tokens, config.overlap_tokens)]
        children = self._verified(children, config.child_tokens)
        self.packed: list[tuple[Piece, list[Piece]]] = [(parent, []) for parent in parents]
        k = 0
        for child in children:
            while child.new >= parents[k].stop:
                k += 1
            if not self._is_heading(child) or self.packed[k][0].stop == child.stop:
                self.packed[k][1].append(child)

    def span(self, piece: Piece) -> tuple[int, int]:
        return self.units[piece.first].start, self.units[piece.stop - 1].end

    def _is_heading(self, piece: Piece) -> bool:
        return all(unit.kind == "heading" for unit in self.units[piece.first : piece.stop])

    def tokens(self, spans: Iterable[tuple[int, int]]) -> list[int]:
        return self.counter.count([self.md[a:b] for a, b in spans])

    def _estimates(self, units: list[Unit]) -> list[int]:
        """Tokens of each unit with the gap behind it: their sum estimates the tokens of a chunk."""
        spans = [(u.start, _GAP.match(self.md, u.end).end()) for u in units]  # type: ignore[union-attr]
        floors = (-(-len("".join(self.md[a:b].split())) // _CHARS_PER_TOKEN) for a, b in spans)
        return [max(n, floor) for n, floor in zip(self.tokens(spans), floors, strict=True)]

    def _fitting(self, units: list[Unit]) -> tuple[list[Unit], list[int]]:
        """Units and their sizes, those longer than a child cut into pieces of about a quarter of one.

        A table's header of more than half a child is not repeated: it would bury the rows.
        """
        limit, sizes = self.config.child_tokens, self._estimates(units)
        kinds = Counter(_CUT_KIND.get(u.kind, "cut_sentences") for u, n in zip(units, sizes, strict=True) if n > limit)
        wide = {u.block for u, n in zip(units, sizes, strict=True) if u.kind == "thead" and n > limit // 2}
        units = [replace(u, header="") if u.header and u.block in wide else u for u in units]
        self.cuts |= kinds | {"wide_table_headers": len(wide)}
        while any(n > limit and u.end - u.start > 1 for u, n in zip(units, sizes, strict=True)):
            cut = [self._cut(u, n, limit) if n > limit else [u] for u, n in zip(units, sizes, strict=True)]
            fresh = iter(self._estimates([u for parts in cut if len(parts) > 1 for u in parts]))
            sizes = [next(fresh) if parts[1:] else n for parts, n in zip(cut, sizes, strict=True) for _ in parts]
            units = [u for parts in cut for u in parts]
        return units, sizes

    def _cut(self, unit: Unit, tokens: int, limit: int) -> list[Unit]:
        step = max(1, (unit.end - unit.start) * (limit - 8) // (4 * tokens))  # characters
        parts, start, glue = list[Unit](), unit.start, unit.glue
        while start < unit.end:
            stop, cost = min(start + step, unit.end), 3.0
            if stop < unit.end:
                for pattern, price in _PLACES:
                    found = [m.end() for m in re.compile(pattern).finditer(self.md, start, stop)]
                    if found:
                        stop, cost = found[-1], price
                        break
            a, b = strip_span(self.md, start, stop)
            if b > a:
                parts.append(replace(unit, start=a, end=b, glue=glue, inner=unit.inner or bool(parts)))
            start, glue = stop, cost
        return parts

    def _repeat(self, new: int, low: int) -> int:
        """First unit of the overlap before unit `new`: whole trailing units, never from inside a sentence.

        From inside a table or code block only where `new` goes on with it: its last lines alone say nothing.
        """
        first, total, budget = new, 0, self.config.overlap_tokens
        for k in range(new - 1, low - 1, -1):
            unit = self.units[k]
            total += self.sizes[k]
            if total > budget:
                break
            if not unit.inner and unit.block in (-1, unit.start, self.units[new].block):
                first = k
        last = self.units[new - 1]
        if first == new > low and last.kind == "prose" and not last.inner and self.sizes[new - 1] <= 2 * budget:
            return new - 1
        return first

    def _pack(self, a: int, b: int, limit: int, overlap: int = 0) -> list[Piece]:
        """Pieces of units [a, b) of at most `limit` tokens, overlap included, at the least cost.

        The cost of a piece is 1 + (unused share)^2 + that of the break behind it, so pieces are few, even and end
        where the text does (dynamic programming over the break points, O(units x units in a piece)).
        """
        total = np.concatenate(([0], np.cumsum(self.sizes[a:b])))
        n, ends = b - a, total.tolist()
        if ends[n] <= limit:
            return [Piece(a, a, b)]
        starts = total[:n]
        if overlap:
            starts = total[[self._repeat(i, a) - a for i in range(a, b)]]
        best, back, low = np.zeros(n + 1), [0] * (n + 1), 0
        for j in range(1, n + 1):
            while ends[j] - ends[low] > limit and low < j - 1:
                low += 1
            size = ends[j] - starts[low:j]
            cost = best[low:j] + ((limit - np.minimum(size, limit)) / limit) ** 2
            cost[:-1][size[:-1] > limit] = np.inf  # a unit alone always fits, without its overlap
            k = int(np.argmin(cost))
            back[j], best[j] = low + k, cost[k] + 1 + (self.units[a + j].glue if j < n else 0)
        breaks = [n]
        while breaks[-1]:
            breaks.append(back[breaks[-1]])
        pieces: list[Piece] = []
        for i, j in zip(breaks[:0:-1], breaks[-2::-1], strict=True):
            first = self._repeat(a + i, pieces[-1].new + 1) if pieces and overlap else a + i
            fits = ends[j] - ends[first - a] <= limit
            pieces.append(Piece(first if fits else a + i, a + i, a + j))
        return pieces

    def _verified(self, pieces: list[Piece], limit: int) -> list[Piece]:
        """The pieces with the real count of their tokens; one that is too long loses its overlap, then is halved."""
        out: list[Piece] = []
        for piece, n in zip(pieces, self.tokens(map(self.span, pieces)), strict=True):
            if n <= limit or piece.stop - piece.first == 1:
                out.append(replace(piece, n_tokens=n))
            elif piece.first < piece.new:
                out += self._verified([replace(piece, first=piece.new)], limit)
            else:
                k = self._middle(piece)
                out += self._verified([Piece(piece.new, piece.new, k), Piece(k, k, piece.stop)], limit)
        return out

    def _middle(self, piece: Piece) -> int:
        size = np.cumsum(self.sizes[piece.new : piece.stop])
        off = np.abs(size[:-1] / max(size[-1], 1) - 0.5)
        return piece.new + 1 + int(np.argmin(off + [u.glue for u in self.units[piece.new + 1 : piece.stop]]))

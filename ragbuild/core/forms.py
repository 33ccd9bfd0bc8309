"""Finding known forms in a text, exactly (`FormMatcher`) or one wrong character off (`NearHan`, `typo_distance`).

Spans are code points, half-open, into the text as given. Everything is linear in the length of the text.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from typing import Generic, TypeVar

from ragbuild.core.text import HAN

T = TypeVar("T")
Unit = tuple[str, int, int]

_UNIT = re.compile(rf"(?<=[{HAN}]) (?=[{HAN}])|[{HAN}]|[^\W{HAN}_]+")
_ES = re.compile(r"(?:ss|x|zz|[cs]h|[bnprt]us|ias)es$")  # takes es in the plural; "cause", "size" take s
_JOINTS = frozenset("-\u2010\u2011\u2013_/.'\u2019\u00b7&+:")


class _Folding(dict[int, str]):
    """One character to its NFKC small letter where that is one character too, else to itself."""

    def __missing__(self, code: int) -> str:
        small = unicodedata.normalize("NFKC", chr(code)).lower()
        self[code] = small if len(small) == 1 else chr(code)
        return self[code]


_FOLDING = _Folding()


def fold(text: str) -> str:
    """Small letters and plain forms, character by character, so that spans stay valid."""
    return text.translate(_FOLDING)


def units(text: str) -> list[Unit]:
    """(folded unit, start, end) in order: runs of letters and digits, single Han characters."""
    return [(m.group(), m.start(), m.end()) for m in _UNIT.finditer(fold(text))]


def form_key(form: str) -> str:
    """What two spellings of one form share: case, hyphens and spaces do not count."""
    return " ".join(u for u, _, _ in units(form) if u != " ")


def singular(word: str) -> str:
    """An English word without the s of the plural (folded; a word of three letters or fewer as it is)."""
    if len(word) < 4 or not word.isascii() or not word.endswith("s") or word.endswith(("ss", "us", "is")):
        return word
    if word.endswith("ies") and len(word) > 4:
        return word[:-3] + "y"
    return word[:-2] if _ES.search(word) and word != "caches" else word[:-1]


def plural(word: str) -> str:
    """The regular plural of an English word."""
    if re.search(r"[^aeiou]y$", word):
        return word[:-1] + "ies"
    return word + ("es" if re.search(r"(?:s|x|z|ch|sh)$", word) else "s")


class FormMatcher(Generic[T]):
    """Finds known forms in a text in one pass: the longest first, none overlapping, each with its value.

    Latin forms match whole words, whatever their case and hyphens, singular or plural; Han forms as they stand.
    Of two equal forms the first given counts. A form of one letter is left out.
    """

    def __init__(self, forms: Iterable[tuple[str, T]]) -> None:
        exact: dict[tuple[str, ...], T] = {}
        other: dict[tuple[str, ...], T] = {}
        for form, value in forms:
            key = tuple(u for u, _, _ in units(form))
            if sum(map(len, key)) < 2:
                continue
            exact.setdefault(key, value)
            last = key[-1]
            if last.isascii() and last.isalpha() and len(last) > 2:
                for number in {singular(last), plural(last)} - {last}:
                    other.setdefault((*key[:-1], number), value)
        self._table: dict[str, list[tuple[tuple[str, ...], T]]] = {}
        for key, value in (other | exact).items():
            self._table.setdefault(key[0], []).append((key, value))
        for rows in self._table.values():
            rows.sort(key=lambda row: -len(row[0]))

    def find(self, text: str) -> list[tuple[int, int, T]]:
        """(start, end, value) of every form in `text`, in order."""
        parts, out, i = units(text), [], 0
        while i < len(parts):
            for key, value in self._table.get(parts[i][0], ()):
                if len(key) == 1 or _stands(key, text, parts, i):
                    out.append((parts[i][1], parts[i + len(key) - 1][2], value))
                    i += len(key) - 1
                    break
            i += 1
        return out


def _stands(key: tuple[str, ...], text: str, parts: list[Unit], at: int) -> bool:
    if at + len(key) > len(parts):
        return False
    for k in range(1, len(key)):
        unit, start, _ = parts[at + k]
        if unit != key[k]:
            return False
        gap = text[parts[at + k - 1][2] : start]
        if gap and gap not in _JOINTS and not (gap.isspace() and len(gap) < 3):
            return False
    return True


class NearHan(Generic[T]):
    """Finds Han forms that are written with one wrong character which sounds alike (单点登陆 for 单点登录).

    Most wrong characters come from a phonetic keyboard. GB 2312 orders its first level by pronunciation, so that two
    characters close to each other there sound alike; of a rare character only the rest of the form is known.
    """

    def __init__(self, forms: Iterable[tuple[str, T]], min_length: int) -> None:
        self._table: dict[tuple[int, str], list[tuple[str, T]]] = {}
        self._lengths: set[int] = set()
        for form, value in forms:
            if min_length <= len(form) <= 12 and re.fullmatch(f"[{HAN}]+", form):
                self._lengths.add(len(form))
                for i in range(len(form)):
                    self._table.setdefault((i, form[:i] + form[i + 1 :]), []).append((form, value))

    def find(self, run: str) -> list[tuple[int, int, str, T]]:
        """(start, end, the right form, its value) of every near form in a run of Han characters, longest first."""
        out = []
        for length in sorted(self._lengths, reverse=True):
            for start in range(len(run) - length + 1):
                window = run[start : start + length]
                for i in range(length):
                    for form, value in self._table.get((i, window[:i] + window[i + 1 :]), ()):
                        if form[i] != window[i] and sounds_alike(form[i], window[i]):
                            out.append((start, start + length, form, value))
        return out


def sounds_alike(a: str, b: str) -> bool:
    """Do two Han characters stand within eight places of each other in the first level of GB 2312?"""
    codes = [char.encode("gb2312", "ignore") for char in (a, b)]
    if any(len(code) != 2 or code[0] >= 0xD8 for code in codes):
        return False  # from D8 on (second level) the order is by radical and says nothing of the sound
    places = [94 * code[0] + code[1] for code in codes]
    return abs(places[0] - places[1]) <= 8


def typo_distance(word: str, right: str) -> int | None:
    """Edit distance (a swap of neighbours counts one) where `word` may be a typing error for `right`, else None.

    At most one edit from five letters on, two from eight on; the first letter must be right: people get it right.
    """
    from rapidfuzz.distance import OSA

    limit = 0 if len(right) < 5 else 1 if len(right) < 8 else 2
    if not limit or word[:1] != right[:1] or abs(len(word) - len(right)) > limit:
        return None
    distance = OSA.distance(word, right, score_cutoff=limit)
    return distance if distance <= limit else None

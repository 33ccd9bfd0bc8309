"""What a rewrite may say: what documents hold, what an abbreviation or a misspelling is, how a term is put in."""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from functools import lru_cache

from ragbuild.core.forms import fold, form_key, units
from ragbuild.core.records import TermEntry
from ragbuild.core.text import HAN, STOPWORDS, stem_word
from ragbuild.offline.general_words import GENERAL

_HAN_RUN = re.compile(f"[{HAN}]+")
_SILENT = GENERAL - {"no", "not", "without"}  # words that a replacement may drop


class Held:
    """What the documents hold, from a vocabulary that answers ``word in vocabulary``.

    An index also answers for a whole form of its dictionary; a plain set of words only for single words.
    """

    def __init__(self, vocabulary: Container[str] | None) -> None:
        self._vocabulary = vocabulary

    @property
    def known(self) -> bool:
        return self._vocabulary is not None

    def phrase(self, form: str) -> bool:
        """Do the documents hold this form of the dictionary? A plain set of words can only answer for its words."""
        if self._vocabulary is None or form in self._vocabulary:
            return True
        return isinstance(self._vocabulary, (set, frozenset)) and self.words(form)

    def whole(self, form: str) -> bool:
        return self._vocabulary is not None and form in self._vocabulary

    def words(self, form: str) -> bool:
        latin = [u for u, _, _ in units(form) if u.isascii() and u != " " and u not in STOPWORDS]
        return all(map(self.word, latin)) and all(self.han(r) == len(r) for r in _HAN_RUN.findall(form))

    def word(self, word: str) -> bool:
        return self._vocabulary is not None and (word in self._vocabulary or stem_word(word) in self._vocabulary)

    def han(self, run: str) -> int:
        """How many characters of a Han form stand in words of two to four characters that documents hold?"""
        if self._vocabulary is None:
            return 0
        held = i = 0
        while i < len(run):
            size = next((n for n in (4, 3, 2) if i + n <= len(run) and run[i : i + n] in self._vocabulary), 0)
            held += size
            i += size or 1
        return held

    def loses(self, form: str, terms: Sequence[str]) -> bool:
        """Would replacing `form` by `terms` drop a word that documents hold, or a number that tells things apart?"""
        if self._vocabulary is None:
            return False
        if any(number not in term for number in re.findall(r"\d{2,}", form) for term in terms[:1]):
            return True
        kept = {stem_word(u) for term in terms for u, _, _ in units(term)}
        latin = [u for u, _, _ in units(form) if u.isascii() and u != " " and u not in _SILENT]
        if form in self._vocabulary or any(stem_word(u) not in kept and self.word(u) for u in latin):
            return True
        return any(2 * self.han(run) >= len(run) for run in _HAN_RUN.findall(form))


def slip(word: str, right: str) -> bool:
    """Is it how fingers slip: a letter lost, doubled or swapped, one vowel for another; one other in a long word?"""
    if len(word) != len(right) or sorted(word) == sorted(right):
        return True
    wrong = [(a, b) for a, b in zip(word, right, strict=True) if a != b]
    return all(a in "aeiouy" and b in "aeiouy" for a, b in wrong) or (len(wrong) == 1 and len(right) > 7)


def abbreviates(text: str, start: int, end: int, abbreviation: str, language: str) -> bool:
    """Is it the abbreviation: no word in other letters (act, Roc), no piece of a name (PD-1), not just explained?"""
    form = text[start:end]
    if form not in (abbreviation, abbreviation + "s", form.lower(), form.upper()):
        return False
    if form == form.lower() != abbreviation and language == "en" and (len(form) < 3 or form in GENERAL):
        return False
    before, after = text[max(0, start - 2) : start], text[end : end + 2]
    inside = re.search(r"[A-Za-z0-9][-_.]$", before) or re.match(r"[-_.][A-Za-z0-9]", after)
    return not (inside or before.endswith(("(", "（")) or re.match(r" ?[(（]", after))


def meant(form: str, entry: TermEntry) -> str:
    """The formal form that `form` is a misspelling of (one Han character, or two letters, in a longer form), or ""."""
    from rapidfuzz.distance import OSA

    limit = 1 if _HAN_RUN.search(form) else 2
    for right in entry.formal:
        near = abs(len(form) - len(right)) <= limit and len(right) > 3 * limit - (limit == 1)
        if near and form_key(form) != form_key(right) and OSA.distance(fold(form), fold(right)) <= limit:
            return right
    return ""


def holds(text: str, form: str) -> bool:
    """Does `form` stand in `text`, in whole words?"""
    if _HAN_RUN.search(form):
        return fold(form) in fold(text)
    return f" {form_key(form)} " in _key_of(text)


@lru_cache(maxsize=4)
def _key_of(text: str) -> str:
    return f" {form_key(text)} "


def overlap(text: str, start: int, end: int, term: str) -> tuple[int, int]:
    """Widen the span over a word that `term` would repeat: "default selfsigned cert", 灾备恢复."""
    first, last = term.split(" ")[0] + " ", term[-2:]
    if " " in term and fold(text[:start]).endswith(fold(first)):
        start -= len(first)
    if _HAN_RUN.fullmatch(last) and text[end:].startswith(last):
        end += len(last)
    return start, end


def in_language(forms: Sequence[str], language: str) -> str:
    """The first form in that language (zh: with a Han character; en: without one), or ""."""
    return next((f for f in forms if ("zh" if _HAN_RUN.search(f) else "en") == language), "")


def bracket(terms: Sequence[str], language: str) -> str:
    """Terms in brackets as the language sets them, ready to stand behind a word."""
    return f"（{'、'.join(terms)}）" if language == "zh" else f" ({', '.join(terms)})"

"""How people say it: forms of the query log that no document holds, each attached to the term it stands for.

By string: English words in one or two wrong letters, Han forms with one wrong character that sounds alike. By vector:
the nearest term of an embedder, where it is near enough and clearly nearer than the next.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ragbuild.core.config import DictionaryConfig
from ragbuild.core.forms import FormMatcher, NearHan, fold, form_key, typo_distance, units
from ragbuild.core.text import HAN, STOPWORDS, stem_word
from ragbuild.offline.candidates import HanWords
from ragbuild.offline.general_words import GENERAL

_WORD = re.compile(r"[a-z]{2,}(?:['’][a-z]+)?")
_HAN_RUN = re.compile(f"[{HAN}]+")
_MARGIN = 0.03  # cosine by which the nearest term must lead the next one


@dataclass(frozen=True)
class Attachment:
    """`form` of the log attached to the term number `term`; `how` is "string" or "vector", with its score."""

    form: str
    term: int
    how: str
    score: float
    count: int
    rivals: tuple[int, ...] = ()  # other terms with the same score: a conflict


class DocumentWords:
    """Does a document hold this word, or this run of Han characters?"""

    def __init__(self, texts: Iterable[str]) -> None:
        self._text = "\n".join(map(fold, texts))
        self.latin = set(_WORD.findall(self._text))
        self._stems = set(map(stem_word, self.latin))

    def __contains__(self, form: str) -> bool:
        if _HAN_RUN.search(form):
            return form in self._text
        return form in self.latin or stem_word(form) in self._stems


def attach(
    queries: Sequence[tuple[str, int]],
    forms: Sequence[tuple[str, int]],
    documents: DocumentWords,
    words: HanWords,
    config: DictionaryConfig,
    embed: Callable[[list[str]], np.ndarray] | None = None,
) -> list[Attachment]:
    """Attach what `queries` (text, count) say to `forms` (form, number of its term), most frequent first.

    A form that already stands in the dictionary is left alone, and so is everything with a digit in it.
    """
    known = FormMatcher(forms)
    unknown: Counter[str] = Counter()
    near = NearHan(forms, min_length=3)
    wrong: dict[str, Counter[tuple[str, int]]] = {}
    for query, count in queries:
        text = fold(query)
        taken = [(a, b) for a, b, _ in known.find(text)]
        for gram, a, b in _latin_grams(text, documents):
            if not _overlap(a, b, taken):
                unknown[gram] += count
        for run in _HAN_RUN.finditer(text):
            for start, end, form, term in near.find(run.group()):
                window, offset = run.group()[start:end], run.start()
                if window not in documents and not _overlap(offset + start, offset + end, taken):
                    wrong.setdefault(window, Counter())[form, term] += count
            if not _overlap(*run.span(), taken):
                cut = [w for w in words.cut(run.group()) if len(w) > 1 and words.termlike(w)]
                unknown.update({w: count for w in cut if w not in documents})
    found = [_han(form, rights) for form, rights in wrong.items()]
    found += _by_string(unknown, forms, config.string_similarity)
    done = {a.form for a in found}
    rest = {
        form: n
        for form, n in sorted(unknown.items())
        if len(form) > 2
        and not any(form in d or d in form for d in done)
        and all(w not in documents for w in form.split())
    }
    if embed and rest and forms:
        found += _by_vector(rest, forms, config.vector_similarity, embed)
    return sorted(found, key=lambda a: (-a.count, a.form))


def _overlap(start: int, end: int, taken: Sequence[tuple[int, int]]) -> bool:
    return any(start < b and a < end for a, b in taken)


def _latin_grams(text: str, documents: DocumentWords) -> Iterable[tuple[str, int, int]]:
    """Word sequences of one to three words that hold a word no document has, without general words at the ends."""
    parts = [(u, a, b) for u, a, b in units(text) if u.isascii()]
    strange = [len(u) > 3 and u.isalpha() and u not in documents for u, _, _ in parts]
    for i in range(len(parts)):
        for n in (1, 2, 3):
            gram = parts[i : i + n]
            if len(gram) < n or not all(u.isalpha() for u, _, _ in gram) or len(text[gram[0][1] : gram[-1][2]]) > 40:
                break
            ends = {gram[0][0], gram[-1][0]}
            joined = all(text[a[2] : b[1]] in (" ", "-") for a, b in pairwise(gram))
            if joined and any(strange[i : i + n]) and not ends & (GENERAL | STOPWORDS):
                yield " ".join(u for u, _, _ in gram), gram[0][1], gram[-1][2]


def _han(form: str, rights: Counter[tuple[str, int]]) -> Attachment:
    best = sorted({term for _, term in rights})
    score = round(100 * (len(form) - 1) / len(form), 1)
    return Attachment(form, best[0], "string", score, max(rights.values()), tuple(best[1:]))


def _by_string(unknown: Counter[str], forms: Sequence[tuple[str, int]], similarity: float) -> list[Attachment]:
    from rapidfuzz import fuzz, process

    choices = [(form_key(form), term) for form, term in forms if form.isascii() and not re.search(r"\d", form)]
    keys = [key for key, _ in choices]
    out = []
    for form, count in unknown.items():
        hits = process.extract(form, keys, scorer=fuzz.ratio, score_cutoff=similarity, limit=5)
        good = [(score, choices[i][1]) for key, score, i in hits if _misspelt(form, key)]
        if good:
            best = max(score for score, _ in good)
            terms = sorted({term for score, term in good if score == best})
            out.append(Attachment(form, terms[0], "string", round(best, 1), count, tuple(terms[1:])))
    # "recvoery key" is enough where "lost recvoery key" would be attached too
    return [a for a in out if not any(b is not a and b.term == a.term and f" {b.form} " in f" {a.form} " for b in out)]


def _misspelt(form: str, right: str) -> bool:
    """Word by word the same or a typing error, or the same letters with the words joined otherwise."""
    if form.replace(" ", "") == right.replace(" ", ""):
        return True
    a, b = form.split(), right.split()
    if len(a) != len(b) or [stem_word(w) for w in a] == [stem_word(w) for w in b]:
        return False
    return all(
        x == y or stem_word(x) == stem_word(y) or typo_distance(x, y) is not None for x, y in zip(a, b, strict=True)
    )


def _by_vector(
    unknown: dict[str, int],
    forms: Sequence[tuple[str, int]],
    similarity: float,
    embed: Callable[[list[str]], np.ndarray],
) -> list[Attachment]:
    vectors = [np.asarray(embed(list(texts)), dtype=np.float32) for texts in (unknown, [form for form, _ in forms])]
    a, b = (v / np.maximum(np.linalg.norm(v, axis=1, keepdims=True), 1e-9) for v in vectors)
    terms = np.array([term for _, term in forms])
    out = []
    for form, row in zip(unknown, a @ b.T, strict=True):
        best = int(row.argmax())
        others = row[terms != terms[best]]
        if row[best] >= similarity and (not others.size or row[best] - others.max() >= _MARGIN):
            out.append(Attachment(form, int(terms[best]), "vector", round(float(row[best]), 3), unknown[form]))
    return out

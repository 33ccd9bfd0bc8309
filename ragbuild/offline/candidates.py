"""Candidate terms by statistics: TF-IDF over documents, headings, and co-occurrence of adjacent words (NPMI).

A candidate is one to three words without function words: Latin words, Han words (jieba), or both (``API 令牌``). What
no expert would keep is removed here: pieces of longer candidates, phrases that begin or end with a word of general
use, units, and numbers.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ragbuild.core.forms import singular
from ragbuild.core.text import HAN, STOPWORDS
from ragbuild.offline.entities import Plain
from ragbuild.offline.general_words import GENERAL, GENERAL_HAN, TOO_WIDE

_HAN = re.compile(f"[{HAN}]")

# Tags of jieba's dictionary that a term does not hold: function words, numbers, pronouns, adverbs, directions, times.
_NO_TERM = ("p", "c", "d", "r", "m", "q", "u", "y", "e", "o", "f", "z", "x", "t", "k", "h")
_TOKEN = re.compile(
    rf"(?P<latin>(?<![\w-])[A-Za-z][A-Za-z0-9]*(?:['’][a-z]+)?(?:[-\u2010\u2011\u2013][A-Za-z0-9]+)*(?![\w-]))"
    rf"|(?P<han>[{HAN}]+)|(?P<space> )"
)
_HEADING = re.compile(
    r"^#{1,6}\s+(?:[\dA-Z]{1,3}(?:\.\d{1,3}){0,4}\.?\s+|第?[一二三四五六七八九十\d]{1,3}[章节、.]\s*)?(.{2,60})$"
)
_MAX_WORDS = 3
_KEYNESS = 150  # a single Han word must be this many times commoner than in general text
Gram = tuple[str, ...]
_PIECE_OF = 0.7  # a form that stands in a longer one this often is a piece of it


@dataclass
class Candidate:
    """A form with what speaks for it. `sources` names the statistics that found it; `score` (0 to 3) orders them."""

    form: str
    count: int
    score: float
    sources: set[str] = field(default_factory=set)


class HanWords:
    """jieba's own dictionary as three questions: how is a run cut, can a term hold a word, how special is it?"""

    def __init__(self, tokenizer) -> None:  # type: ignore[no-untyped-def]
        self._cut: Callable[[str], list[str]] = tokenizer.lcut
        self._frequency, self._total = tokenizer.FREQ, tokenizer.total
        self._file: Callable[[], Any] = tokenizer.get_dict_file

    @cached_property
    def _tags(self) -> dict[str, str]:
        """Each word's part of speech, read when one is asked for: half a second."""
        with self._file() as lines:
            rows = (line.decode("utf-8").split() for line in lines)
            return {word: tag for word, _, tag in rows}

    def cut(self, run: str) -> list[str]:
        """The words of a run of Han characters, 200 at once: jieba's time grows with the square of an unknown run."""
        return [word for start in range(0, len(run), 200) for word in self._cut(run[start : start + 200])]

    def termlike(self, word: str) -> bool:
        tag = self._tags.get(word, "n")
        return word not in GENERAL_HAN and word not in STOPWORDS and not (tag != "zg" and tag.startswith(_NO_TERM))

    def verb(self, word: str) -> bool:
        return self._tags.get(word) == "v"

    def nounlike(self, word: str) -> bool:
        """A noun to jieba, or unknown to it and without a function character."""
        tag = self._tags.get(word, "")
        return tag[:1] in ("n", "l", "i", "j") or tag == "vn" or (not tag and all(self.termlike(c) for c in word))

    def keyness(self, word: str, share: float) -> float:
        """How many times commoner `word` is here than in jieba's general count."""
        return share * self._total / (self._frequency.get(word) or 1)


def token_runs(line: str, words: HanWords) -> Iterator[list[str]]:
    """Runs of neighbouring words of one line: whatever is neither word nor single space ends a run."""
    run: list[str] = []
    at = 0
    for match in _TOKEN.finditer(line):
        if match.start() != at and run:
            yield run
            run = []
        at = match.end()
        if match.lastgroup == "han":
            run += words.cut(match.group())
        elif match.lastgroup == "latin":
            run.append(match.group())
    if run:
        yield run


def join(words: Sequence[str]) -> str:
    """Words to a form: no space between Han words."""
    out = words[0]
    for word in words[1:]:
        out += ("" if _is_han(out[-1]) and _is_han(word[0]) else " ") + word
    return out


def statistical_candidates(documents: Sequence[Plain], words: HanWords, min_count: int) -> list[Candidate]:
    """Candidates from all documents, best first (ties by form)."""
    runs = [[run for line in d.lines for run in token_runs(line, words)] for d in documents]
    total: Counter[Gram] = Counter(gram for document in runs for run in document for gram, _ in _grams(run))
    size = max(1, sum(n for gram, n in total.items() if len(gram) == 1))
    common = {gram: n for gram, n in total.items() if n >= min_count}
    longer: dict[Gram, Counter[Gram]] = defaultdict(Counter)
    for gram, n in common.items():
        if len(gram) > 1:
            longer[gram[1:]][gram] = n
            longer[gram[:-1]][gram] = n
    likely = {
        gram
        for gram, n in common.items()
        if len(gram) <= _MAX_WORDS and _termlike(gram, n, words) and not _piece(gram, n, longer[gram], words)
    }
    surfaces: dict[Gram, Counter[str]] = defaultdict(Counter)
    for gram, form in (pair for document in runs for run in document for pair in _grams(run)):
        if gram in likely:
            surfaces[gram][join(form)] += 1
    found = (_HEADING.match(line) for document in documents for line in document.lines)
    headings = {m.group(1).strip().lower() for m in found if m}
    codes = Counter(code.lower() for document in documents for code in document.code)
    kept: dict[Gram, Candidate] = {}
    for gram in sorted(likely):
        form, n = _surface(gram, surfaces), common[gram]
        sources = {"heading"} if form.lower() in headings or " ".join(gram) in headings else set()
        if len(gram) > 1:
            weight = _npmi(gram, total, size)
            if weight < 0.4 or ("of" in gram and not sources):
                continue
            sources.add("cooccurrence")
        elif gram[0] in TOO_WIDE or form.lower() in TOO_WIDE:
            continue
        elif _is_han(form[0]):
            keyness = words.keyness(form, n / size) if words.nounlike(form) and len(form) > 1 else 0.0
            if keyness < _KEYNESS or n < 2 * min_count:
                continue
            weight = min(1.0, math.log10(keyness) / 5)
        elif len(form) > 3 and (sources or codes[form.lower()] >= min_count):
            weight = 0.6
        else:
            continue
        # NPMI flatters what is rare: discounted as Pantel & Lin (2002) do.
        kept[gram] = Candidate(form, n, weight * n / (n + 2) + (0.3 if "heading" in sources else 0.0), sources)
    for gram, weight in _tfidf(runs, kept).items():
        kept[gram].score += weight
        if weight >= 0.25:
            kept[gram].sources.add("tfidf")
    return sorted((c for c in kept.values() if c.sources), key=lambda c: (-c.score, c.form))


def _grams(run: Sequence[str]) -> Iterator[tuple[Gram, Sequence[str]]]:
    """(small letters, as written) of one to four words: four, to see what a form of three is a piece of."""
    low = [word.lower() for word in run]
    for i in range(len(run)):
        for end in range(i + 1, min(i + _MAX_WORDS + 1, len(run)) + 1):
            yield tuple(low[i:end]), run[i:end]


def _surface(gram: Gram, surfaces: dict[Gram, Counter[str]]) -> str:
    """How the documents write it most; in small letters and in the singular where they do so at all."""
    one = (*gram[:-1], singular(gram[-1]))
    if one in surfaces:
        gram = one
    seen = surfaces[gram]
    return min(seen, key=lambda form: (form != form.lower(), -seen[form], form))


def _termlike(key: Gram, n: int, words: HanWords) -> bool:
    """Do all words of `key` look like those of a name?"""
    for i, word in enumerate(key):
        edge = i in (0, len(key) - 1)
        if _is_han(word[0]):
            if not words.termlike(word) or (edge and len(word) == 1 and words.verb(word) and (i > 0 or n < 5)):
                return False
        elif (word in GENERAL and (edge or word != "of")) or len(word) < 2 or (edge and word.endswith(("ly", "'s"))):
            return False
        elif re.search(r"\d{2}", word):
            return False  # a model or a code, alone or beside a word: the named-entity rules have those
    return any(len(word) > 1 for word in key)


def _piece(key: Gram, n: int, longer: Counter[Gram], words: HanWords) -> bool:
    """Does `key` nearly always stand inside of one longer form? Function words around it do not count."""
    extras = (other[0] if other[1:] == key else other[-1] for other, count in longer.items() if count >= _PIECE_OF * n)
    return not all(e in GENERAL or (_is_han(e[0]) and len(e) > 1 and not words.termlike(e)) for e in extras)


def _npmi(key: Gram, total: Counter[Gram], size: int) -> float:
    """Normalised pointwise mutual information (Bouma 2009) of the weakest joint of `key`, -1 to 1."""
    share = total[key] / size
    joints = (total[key[:i]] * total[key[i:]] / size**2 for i in range(1, len(key)))
    return min(math.log(share / joint) / -math.log(share) if share < 1 else 1.0 for joint in joints)


def _tfidf(runs: Sequence[list[list[str]]], kept: Iterable[Gram]) -> dict[Gram, float]:
    """The best TF-IDF weight of each form over the documents, scaled to 0..1."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    places = {gram: i for i, gram in enumerate(kept)}
    if not places:
        return {}
    model = TfidfVectorizer(
        analyzer=lambda document: (gram for run in document for gram, _ in _grams(run)),
        vocabulary=places, norm=None, sublinear_tf=True,
    )  # fmt: skip
    weights = model.fit_transform(runs).max(axis=0).toarray().ravel()
    best = max(float(weights.max()), 1e-9)
    return {gram: float(weights[i]) / best for gram, i in places.items()}


def _is_han(char: str) -> bool:
    return bool(_HAN.match(char))

"""Query rewriting: completion, fallback and sub-question split, from the term dictionary; an LLM for hard cases.

Each wrong rewrite costs recall, so each acts only on what the dictionary knows, and a query that needs none is left
exactly alone. What people typed is dropped only where no document holds it; else the documents' term goes beside it.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from ragbuild.core.config import RewriteConfig
from ragbuild.core.errors import RagbuildError
from ragbuild.core.forms import FormMatcher, NearHan, fold, form_key, singular, typo_distance, units
from ragbuild.core.records import TermEntry
from ragbuild.core.text import HAN, han_terms, jieba_tokenizer, language_of, stem_word
from ragbuild.offline.general_words import GENERAL
from ragbuild.online.split import split_question
from ragbuild.online.wording import Held, abbreviates, bracket, holds, in_language, meant, overlap, slip

Propose = Callable[[str], Mapping[str, Any] | None]
Edit = tuple[int, int, str]
Kind = Literal["completion", "split", "fallback", "model", "llm"]

_HAN_RUN = re.compile(f"[{HAN}]+")
_CODE = re.compile(r"(?<![A-Za-z0-9.])([A-Za-z]{1,8}[ _-]?\d{1,5}(?:\.\d{1,2})?[A-Za-z]?)(?![A-Za-z0-9]|[.-]\d)")
_ERROR_NUMBER = re.compile(
    r"(?:(?<![a-z])(?:error|err|fault|alarm|event)(?: ?code| no\.?| number)?|(?:错误|故障|告警)(?:代?码|号)?|报错?)"
    r" ?[:：#]? ?(\d{3,5})(?![\d.:/%])",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Rewrite:
    """One change: `before` became `after`, for `reason`."""

    kind: Kind
    before: str
    after: str
    reason: str


@dataclass(frozen=True)
class RewriteResult:
    """`query`: the whole question after fallback and completion; `sub_questions`: (query,) unless it is compound."""

    original: str
    query: str
    sub_questions: tuple[str, ...]
    rewrites: tuple[Rewrite, ...]

    @property
    def asked(self) -> tuple[str, ...]:
        """The sub-questions without what completion added: what was asked, for choosing what answers it."""
        out = []
        for question in self.sub_questions:
            for rewrite in self.rewrites:
                if rewrite.kind == "completion":
                    question = question.replace(rewrite.after, rewrite.before)
            out.append(question)
        return tuple(out)


class _Known(NamedTuple):
    """What a form in the query is: of which entry, and whether documents use it."""

    entry: TermEntry
    formal: bool


class Rewriter:
    """Rewrites by rules; made once from the dictionary an index was built with, called for every question.

    `vocabulary` answers ``word in vocabulary`` for the documents; without it no typing error is corrected and every
    colloquial form is replaced. `propose` maps a query to {"query", "sub_questions"} or None; it is asked only where
    `config.use_llm` is on and no rule applied.
    """

    def __init__(
        self,
        entries: Sequence[TermEntry],
        config: RewriteConfig,
        vocabulary: Container[str] | None = None,
        propose: Propose | None = None,
    ) -> None:
        self.config, self._held, self._propose = config, Held(vocabulary), propose
        self._han_terms = han_terms(entries)
        self._matcher = FormMatcher(_forms(entries))
        self._models = {_squeeze(f): f for e in reversed(entries) for f in e.formal if _is_code(e, f)}
        codes = {e.standard_term: re.sub(r"\D", "", e.standard_term) for e in entries if e.kind == "error_code"}
        unique = Counter(codes.values())
        self._numbers = {number: code for code, number in codes.items() if unique[number] == 1}
        self._near = NearHan(((f, f) for e in entries for f in e.formal), min_length=4)
        self._words: dict[str, set[str]] = defaultdict(set)
        for word in {u for e in entries for f in e.formal for u, _, _ in units(f) if len(u) > 4}:
            if word.isascii() and word.isalpha():
                self._words[word[0]].add(word)
        self._tagged = any(e.tag for e in entries)

    def __call__(self, query: str) -> RewriteResult:
        rewrites: list[Rewrite] = []
        text = query
        if self.config.fallback:
            text = self._write(text, self._loose_codes(text), "model", rewrites)
            text = self._write(text, self._misspelt(text), "fallback", rewrites)
            text = self._write(text, self._colloquial(text), "fallback", rewrites)
        if self.config.complete:
            text = self._write(text, self._abbreviations(text), "completion", rewrites)
        parts: tuple[str, ...] = (text,)
        if self.config.split:
            parts = split_question(text, self._topics, self.config.max_sub_questions)
            if len(parts) > 1:
                rewrites.append(Rewrite("split", text, " | ".join(parts), f"{len(parts)} questions in one"))
        if not rewrites and self.config.use_llm and self._propose:
            return self._by_llm(query)
        return RewriteResult(query, text, parts, tuple(rewrites))

    @staticmethod
    def _write(text: str, edits: list[tuple[Edit, str]], kind: Kind, rewrites: list[Rewrite]) -> str:
        """Apply edits, which do not overlap, and note each with its reason."""
        out, at = [], 0
        for (start, end, new), reason in sorted(edits):
            out += [text[at:start], new]
            at = end
            rewrites.append(Rewrite(kind, text[start:end], new, reason))
        return "".join(out) + text[at:] if out else text

    def _loose_codes(self, text: str) -> list[tuple[Edit, str]]:
        """lg500, LG 900 -> LG-500, LG-900; "error 1042" -> "error E1042"."""
        edits = []
        for match in _CODE.finditer(text):
            right = self._models.get(_squeeze(match.group(1)))
            if right and fold(right) != fold(match.group(1)):
                edits.append(((*match.span(1), right), f"the documents write {right}"))
        taken = _Taken(text, [edit for edit, _ in edits])
        for match in _ERROR_NUMBER.finditer(text):
            right = self._numbers.get(match.group(1))
            if right and taken.free(*match.span(1)):
                edits.append(((*match.span(1), right), f"{right} is the only code with this number"))
        return edits

    def _misspelt(self, text: str) -> list[tuple[Edit, str]]:
        """English words that no document holds to the nearest word of a term; Han forms with one wrong character."""
        if not self._held.known:
            return []
        taken = _Taken(text, self._matcher.find(text))
        edits = []
        for word, start, end in units(text):
            if len(word) > 4 and word.isascii() and word.isalpha() and word not in GENERAL and taken.free(start, end):
                right = self._nearest(word)
                if right and not self._held.word(word):
                    edits.append(((start, end, right), f"'{word}' stands in no document; nearest word of a term"))
        for run in _HAN_RUN.finditer(fold(text)):
            for a, b, right, _ in self._near.find(run.group()):
                start, end, wrong = run.start() + a, run.start() + b, run.group()[a:b]
                if taken.free(start, end) and not self._held.whole(wrong):
                    taken.add(start, end)
                    edits.append(((start, end, right), f"'{wrong}' stands in no document; one character from {right}"))
        return edits

    def _nearest(self, word: str) -> str | None:
        found = []
        for right in self._words.get(word[0], set()):
            distance = typo_distance(word, right)
            if distance and slip(word, right) and not (right.startswith(word) or word.startswith(right)):
                found.append((distance, right))
        if any(stem_word(right) == stem_word(word) for _, right in found):
            return None
        best = min(found, default=(0, ""))[0]
        rights = {stem_word(right): right for distance, right in sorted(found, reverse=True) if distance == best}
        return next(iter(rights.values())) if len(rights) == 1 else None

    def _colloquial(self, text: str) -> list[tuple[Edit, str]]:
        found = self._matcher.find(text)
        language = language_of(text)
        present = {id(known.entry) for _, _, known in found if known.formal}
        edits = []
        for start, end, known in found:
            entry, form = known.entry, text[start:end]
            if known.formal or id(entry) in present or not self._is_word(text, start, end):
                continue
            present.add(id(entry))
            if right := meant(form, entry):
                edits.append(((start, end, right), f"'{form}' is a misspelling of {right}"))
                continue
            terms = self._terms_for(form, entry)
            if not terms or any(holds(text, f) for f in entry.formal if f != entry.abbreviation):
                continue
            if self._held.loses(form, terms):
                beside = form + bracket(terms, language)
                edits.append(((start, end, beside), f"the documents' term for '{form}' beside it"))
            elif not any(holds(form, f) for f in entry.formal):
                start, end = overlap(text, start, end, terms[0])
                new = terms[0] + (bracket(terms[1:], language) if terms[1:] else "")
                edits.append(((start, end, new), f"the documents' term for '{form}', which no document holds"))
        return edits

    def _terms_for(self, form: str, entry: TermEntry) -> list[str]:
        """What the documents call it, in the language of `form` where they have a name in it, then the abbreviation."""
        language = "zh" if _HAN_RUN.search(form) else "en"
        longs = [f for f in entry.formal if f != entry.abbreviation]
        long = in_language(longs, language)
        if not long and not entry.abbreviation:
            long = entry.standard_term
            if language == "en" and self._held.words(form):
                return []  # English documents have the form itself
        short = entry.abbreviation and self._held.known and self._held.word(fold(entry.abbreviation))
        terms = [long] if long and (not short or self._held.phrase(long)) else []
        if entry.abbreviation and not holds(form, entry.abbreviation):
            terms.append(entry.abbreviation)
        return terms

    def _abbreviations(self, text: str) -> list[tuple[Edit, str]]:
        found = self._matcher.find(text)
        language = language_of(text)
        present = {id(k.entry) for a, b, k in found if form_key(text[a:b]) != form_key(k.entry.abbreviation)}
        edits = []
        for start, end, known in found:
            entry, form = known.entry, text[start:end]
            # The machine names a term after the form that documents use most: where that is the abbreviation, they
            # need no other, and the words of the long form would only draw in what defines it.
            enough = entry.source == "machine" and entry.standard_term == entry.abbreviation
            if id(entry) in present or not entry.abbreviation or enough:
                continue
            if not abbreviates(text, start, end, entry.abbreviation, language):
                continue
            present.add(id(entry))
            longs = [f for f in entry.formal if f != entry.abbreviation]
            long = in_language(longs, language) or next(iter(longs), "")
            if long and not holds(text, long) and self._held.phrase(long):
                edit = start, end, form + bracket([long], language)
                edits.append((edit, f"{entry.abbreviation} stands for {long}"))
        return edits

    def _is_word(self, text: str, start: int, end: int) -> bool:
        """Is a short Han form a word here, or do its characters belong to its neighbours (对时 in 对时间)?"""
        if end - start > 3 or not _HAN_RUN.fullmatch(text[start:end]):
            return True
        left = max(0, start - 4)
        at, edges = left, {left}
        for word in jieba_tokenizer(self._han_terms).cut(text[left : end + 4]):
            at += len(word)
            edges.add(at)
        return {start, end} <= edges

    def _topics(self, text: str) -> list[tuple[str, bool]]:
        """The documents' names of the terms in `text`, each once, and whether a term belongs to a subsystem."""
        seen: dict[int, tuple[str, bool]] = {}
        for start, end, known in self._matcher.find(text):
            form = text[start:end]
            name = form if known.formal else next(iter(self._terms_for(form, known.entry)), form)
            seen.setdefault(id(known.entry), (name, bool(known.entry.tag) or not self._tagged))
        return list(seen.values())

    def _by_llm(self, query: str) -> RewriteResult:
        """Take the model's proposal when it is one: no code of the query lost, not much longer than the query."""
        try:
            answer = self._propose(query) if self._propose else None
        except RagbuildError as error:
            return _unchanged(query, f"the model failed: {error}")
        answer = answer if isinstance(answer, Mapping) else {}
        text, parts = answer.get("query"), answer.get("sub_questions") or []
        if not isinstance(text, str) or not isinstance(parts, (list, tuple)):
            return _unchanged(query, "the model gave no usable answer")
        parts = [p.strip() for p in parts if isinstance(p, str) and p.strip()][: self.config.max_sub_questions]
        text = text.strip()
        codes = {u for u, _, _ in units(query) if re.search(r"\d", u)}
        if not text or len(text) > 4 * len(query) + 200 or not codes <= {u for u, _, _ in units(text)}:
            return _unchanged(query, "the model lost or added too much")
        if not self.config.split or len(parts) < 2:
            parts = [text]
        if parts == [query]:
            return RewriteResult(query, query, (query,), ())
        note = Rewrite("llm", query, " | ".join(parts), "proposed by the language model; no rule applied")
        return RewriteResult(query, text, tuple(parts), (note,))


def _unchanged(query: str, reason: str) -> RewriteResult:
    return RewriteResult(query, query, (query,), (Rewrite("llm", query, query, reason),))


def _forms(entries: Sequence[TermEntry]) -> list[tuple[str, _Known]]:
    """Formal forms of all entries before colloquial ones: a name is nobody's nickname."""
    formal = [(f, _Known(e, True)) for e in entries for f in e.formal]
    names = {_number_free(f) for f, _ in formal}
    return formal + [(f, _Known(e, False)) for e in entries for f in e.colloquial if _number_free(f) not in names]


def _number_free(form: str) -> str:
    return " ".join(map(singular, form_key(form).split()))


def _is_code(entry: TermEntry, form: str) -> bool:
    return entry.kind in ("product", "error_code", "protocol") and bool(re.search(r"\d", form)) and " v" not in form


def _squeeze(code: str) -> str:
    return re.sub(r"[\s_-]+", "", code).lower()


class _Taken:
    """Which characters of a text are spoken for."""

    def __init__(self, text: str, spans: Sequence[Sequence[Any]]) -> None:
        self._mask = bytearray(len(text))
        for start, end, *_ in spans:
            self.add(start, end)

    def add(self, start: int, end: int) -> None:
        self._mask[start:end] = b"\1" * (end - start)

    def free(self, start: int, end: int) -> bool:
        return not any(self._mask[start:end])

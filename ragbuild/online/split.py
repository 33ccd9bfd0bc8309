"""Splitting a compound question where each part can stand alone; else it stays whole.

A part is a question: context before the first question belongs to it, a remark after one to that one. A part that only
points back ("where do I change it", 在哪里改) gets the topic of the first part in brackets.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from ragbuild.core.forms import units
from ragbuild.core.text import HAN, STOPWORDS
from ragbuild.offline.general_words import GENERAL

_AUX = r"(?:can|could|do|does|did|is|are|was|were|should|must|will|would|may|has|have)(?:n't)?"
_WH = r"(?:how|what|where|when|which|who|whose|why)\b"
_PRONOUN = r"(?:i|we|you|it|they|he|she|there|this|that|these|those)\b"
_ASK = rf"{_AUX} (?:{_PRONOUN}|(?:the|an?|my|our|your|any|all|both|one)\b)"
# After "and" any question word; after a comma alone only what cannot be a relative clause ("the file, which is …").
_SEPARATOR = re.compile(
    rf"[;?!；？！。，]+|,(?= ?[{HAN}])|(?<=[{HAN}]),"
    rf"|,?\s{{1,3}}(?:and|but|also|then)\s{{1,3}}(?:also |then )?(?={_WH}|{_ASK})"
    rf"|,\s{{0,3}}(?=(?:how|what|why)\b|(?:where|when|which|who) (?:\w+ )?{_ASK}|{_ASK})",
    re.IGNORECASE,
)
# "When a user signs in" and "the person who signs in" ask nothing; "when does …" and "who …" at the start do.
_QUESTION = re.compile(
    rf"\b(?:how|what|why)\b|\b(?:when|where) {_AUX}\b|^\W*(?:which|who|whose)\b|^\W*{_ASK}"
    rf"|\b{_AUX} {_PRONOUN}|\bwhich \w+ first|([{HAN}])[不没]\1|几[{HAN}]|呢$"
    r"|怎么|怎样|如何|为什么|为何|什么|哪|多久|多少|多长|多大|是否|吗|谁|何时|有没有|能否|可否",
    re.IGNORECASE,
)
_COMPLETE = re.compile(rf"\b{_AUX}\b", re.IGNORECASE)
_BARE_ASK = re.compile(rf"\s*{_ASK}", re.IGNORECASE)
_POINTS_BACK = re.compile(r"\b(?:it|its|them|they|their|that one)\b|它|这个|那个|该项", re.IGNORECASE)
_NOUN = re.compile(r"\b(?:the|my|our|an?)\s+([a-z][a-z-]{2,30})\b", re.IGNORECASE)


def split_question(text: str, topics: Callable[[str], list[tuple[str, bool]]], most: int) -> tuple[str, ...]:
    """The sub-questions of `text` in order, at most `most`; (text,) when it is not compound.

    `topics` gives the dictionary's terms in a text, each with whether it can be what a question is about.
    """
    spans = _questions(text) if most > 1 else []
    if len(spans) < 2:
        return (text,)
    first = text[spans[0][0] : spans[0][1]]
    named = topics(first)
    about = [name for name, sure in named if sure][:2] or [name for name, _ in named][:2]
    about = about or [m.group(1) for m in _NOUN.finditer(first) if m.group(1).lower() not in GENERAL][:1]
    parts: list[tuple[int, int, str]] = []
    begin = spans[0][0]
    for start, end in spans:
        piece = text[start:end]
        han = bool(re.search(f"[{HAN}]", piece))
        back = bool(_POINTS_BACK.search(piece))
        own = any(sure for _, sure in topics(piece))
        if not parts:
            if own or _content(piece) >= 1:
                parts.append((begin, end, ""))  # else it waits for what comes next
        elif own or not (back or han or _content(piece) < 2):
            parts.append((start, end, ""))
        elif about and (back or han):
            parts.append((start, end, f"（{' '.join(about)}）" if han else f" ({' '.join(about)})"))
        else:
            parts[-1] = (parts[-1][0], end, parts[-1][2])  # can't stand alone
    if len(parts) > most:
        parts = [*parts[: most - 1], (parts[most - 1][0], parts[-1][1], "")]
    if len(parts) < 2:
        return (text,)
    return tuple(text[start:end].strip(" ,，;；") + topic for start, end, topic in parts)


def _questions(text: str) -> list[tuple[int, int]]:
    """Spans of the questions in `text`, each with the context before it; a remark at the end goes to the last."""
    spans: list[tuple[int, int]] = []
    pending = at = 0
    for match in _SEPARATOR.finditer(text):
        spoken = any(c.isalpha() for c in match.group())
        # "What phrase, according to the guide, must I write": what follows still belongs to the question.
        torn = match.group().startswith(",") and not spoken and _BARE_ASK.match(text, match.end())
        if not (torn and not _COMPLETE.search(text, pending, match.start())):
            # "cert renew and do I have to restart": keywords before a spoken "and" are a question of their own.
            piece = text[at : match.start()]
            if _QUESTION.search(piece) or (spoken and not spans and _content(piece) > 1):
                spans.append((pending, match.start()))
                pending = match.end()
        at = match.end()
    if _QUESTION.search(text[at:]):
        spans.append((pending, len(text)))
    elif spans:
        spans[-1] = (spans[-1][0], len(text))
    return spans


def _content(text: str) -> float:
    """Words that carry meaning, without those that ask; two Han characters count as one."""
    total = 0.0
    for unit, _, _ in units(_QUESTION.sub(" ", text)):
        if unit not in STOPWORDS and unit not in GENERAL:
            total += 0.5 if re.match(f"[{HAN}]", unit) else unit != " "
    return total

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

_WH = r"(?:how|what|where|when|which|who|whose|why)\b"
_SUBJECT = r"(?:i|we|you|it|they|he|she|there|this|that|these|those|the|an?|my|our|your|any|all|both|one)\b"
_ASK = rf"(?:can|could|do|does|did|is|are|was|were|should|must|will|would|may)(?:n't)? {_SUBJECT}"
# After "and" any question word; after a comma alone only what cannot be a relative clause ("the file, which is …").
_AFTER_COMMA = rf"(?:how|what|why)\b|(?:where|when|which|who) (?:\w+ )?{_ASK}|{_ASK}"
_SEPARATOR = re.compile(
    rf"[;?!；？！。，]+|,(?= ?[{HAN}])|(?<=[{HAN}]),|,?\s{{1,3}}(?:and|but|also|then)\s{{1,3}}(?:also |then )?(?={_WH}|{_ASK})"
    rf"|,\s{{0,3}}(?={_AFTER_COMMA})",
    re.IGNORECASE,
)
_QUESTION = re.compile(
    rf"\b{_WH}|\b{_ASK}|怎么|怎样|如何|为什么|为何|什么|哪|多久|多少|多长|多大|几[{HAN}]|是否|吗|呢$|谁|何时|([{HAN}])[不没]\1|有没有|能否|可否",
    re.IGNORECASE,
)
_POINTS_BACK = re.compile(r"\b(?:it|its|them|they|their|that one)\b|它|这个|那个|该项", re.IGNORECASE)
_NOUN = re.compile(r"\b(?:the|my|our|an?)\s+([a-z][a-z-]{2,30})\b", re.IGNORECASE)


def split_question(text: str, topics: Callable[[str], list[tuple[str, bool]]], most: int) -> tuple[str, ...]:
    """The sub-questions of `text` in order, at most `most`; (text,) when it is not compound.

    `topics` gives the dictionary's terms in a text, each with whether it can be what a question is about.
    """
    spans: list[tuple[int, int]] = []
    pending, at, joined_by_word = 0, 0, False
    for match in [*_SEPARATOR.finditer(text), None]:
        end = match.start() if match else len(text)
        piece = text[at:end]
        asks = bool(_QUESTION.search(piece))
        # "cert renew and do I have to restart": keywords before a spoken "and" are a question of their own.
        spoken = bool(match and re.search(r"[a-z]", match.group(), re.IGNORECASE))
        if asks or (spoken and not spans and _content(piece) > 1):
            spans.append((pending, end))
            pending = match.end() if match else end
        elif spans and (not match or not spoken) and not match:
            spans[-1] = (spans[-1][0], end)  # a remark at the end
        at = match.end() if match else end
    if len(spans) < 2 or most < 2:
        return (text,)
    first = text[spans[0][0] : spans[0][1]].strip()
    named = topics(first)
    about = [name for name, sure in named if sure][:2] or [name for name, _ in named][:2]
    about = about or [m.group(1) for m in _NOUN.finditer(first) if m.group(1).lower() not in GENERAL][:1]
    parts: list[tuple[int, int, str]] = []
    for start, end in spans:
        piece = text[start:end].strip()
        own = any(sure for _, sure in topics(piece))
        back = bool(_POINTS_BACK.search(piece))
        weak = not own and (back or _content(piece) < 2 or bool(re.search(f"[{HAN}]", piece)))
        topic = ""
        if parts and weak:
            if not about or not (back or re.search(f"[{HAN}]", piece)):
                parts[-1] = (parts[-1][0], end, parts[-1][2])  # cannot stand alone
                continue
            topic = f"（{' '.join(about)}）" if re.search(f"[{HAN}]", piece) else f" ({' '.join(about)})"
        parts.append((start, end, topic))
    if len(parts) > most:
        parts = [*parts[: most - 1], (parts[most - 1][0], parts[-1][1], "")]
    if len(parts) < 2:
        return (text,)
    return tuple(text[start:end].strip(" ,，;；") + topic for start, end, topic in parts)


def _content(text: str) -> float:
    """Words that carry meaning; two Han characters count as one."""
    total = 0.0
    for unit, _, _ in units(text):
        if unit not in STOPWORDS and unit not in GENERAL:
            total += 0.5 if re.match(f"[{HAN}]", unit) else unit != " "
    return total

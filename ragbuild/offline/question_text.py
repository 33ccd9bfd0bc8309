"""Texts of questions and answers: reading Markdown as plain text, values and codes in it, spaces, key facts."""

from __future__ import annotations

import re
from functools import lru_cache
from importlib import resources
from typing import Any

import yaml

from ragbuild.core.forms import FormMatcher
from ragbuild.core.records import TermEntry
from ragbuild.core.text import HAN, normalise, sentences

CODE = re.compile(r"(?<![A-Za-z0-9-])[A-Z]{1,5}-?\d{4,5}(?![\w-])")
AMOUNT = re.compile(r"(?:默认|约|至少|最多|不超过|提前|连续失败)?\s?[±<>≥≤]?\d[\d,.–]*\s?\S{0,6}")
MARKER = re.compile(r"\A\s*(?:[-*+•]\s+|\d{1,2}(?:[.)]\s+|、)|[（(]\d{1,2}[)）]\s*)")
_REFERENCE = re.compile(r"[(（][^()（）\n]{0,20}(?:section|chapter|节|章|见 ?\d)[^()（）\n]{0,20}[)）]")
# Units of time and of size, and what Chinese counts with.
TIME = "ms|s|seconds?|minutes?|hours?|days?|weeks?|months?|years?|毫秒|秒|分钟|小时|天|周|个月|年"
SIZE = r"%|°C|[KMGT]i?B|[MG]bit/s|GbE|kg|mm|cm|m|k?W|V|Nm|N·m|dB\(A\)|Hz|steps?|characters?|times?"
COUNTER = "字符|个|台|条|份|次|位|张|块|种|名|核|步|级"
VALUE = re.compile(
    r"(?<![\w.-])[±<>≥≤−]?\d+(?:[,.]\d+)*(?:[–:/-]\d+(?:\.\d+)*)*"
    rf"(?: ?(?P<unit>{SIZE}|{TIME}|{COUNTER}))?(?![A-Za-z0-9])"
)
_COUNT = r"(?:\d[\d,.]*|two|three|four|five|six|seven|eight|nine|ten|twelve|twenty)"
_MACROS = {
    "S ": r"(?P<s>(?:The |A |An |Each |Every )?[A-Za-z<][^,;:.()]{1,70}?) ",
    "LIM ": "(?P<lim>at least |at most |up to |only |exactly )?",
    "DUR": rf"(?P<v>{_COUNT} ?(?:{TIME}))\b",
    " NOUN": r" (?P<noun>(?!second|minute|hour|day|week|month|year)(?:[a-z][a-z-]+ ){0,2}[a-z][a-z-]+s)\b",
    "N ": rf"(?P<v>{_COUNT}) ", "UNIT": f"{SIZE}|{TIME}", "TIME": TIME, "COUNTER": COUNTER,
}  # fmt: skip


@lru_cache(maxsize=1)
def frames() -> dict[str, Any]:
    """Word lists, patterns and question frames by language (`question_frames.yaml`)."""
    return yaml.safe_load((resources.files("ragbuild.offline") / "question_frames.yaml").read_text(encoding="utf-8"))


@lru_cache(maxsize=4)
def patterns(language: str, name: str) -> list[tuple[re.Pattern[str], str]]:
    """(pattern, question) of a language under this name, with the macros above filled in."""
    out = []
    for pattern, question in frames()[language][name]:
        for macro, meaning in _MACROS.items():
            pattern = pattern.replace(macro, meaning)
        out.append((re.compile(pattern), question))
    return out


def strip_markdown(text: str) -> str:
    """One line of plain text: no list or quote marks, emphasis, code marks, links or images."""
    text = re.sub(r"!?\[([^\]\n]{0,300})\]\([^)\n]{0,300}\)", r"\1", text)
    return " ".join(re.sub(r"\*\*|`|^\s*>\s?", "", MARKER.sub("", text), flags=re.M).split())


def bare(text: str) -> str:
    """Text to compare by: small letters without white space and Markdown marks."""
    return re.sub(r"[\s*`|>]+", "", normalise(text)).lower()


def clean_heading(text: str) -> str:
    """A heading without its number: "5.4 Restore" -> "Restore", "案例 6：时钟" -> "时钟"."""
    text = re.sub(r"\A\s*(?:(?:chapter|section|case|step)\s+)?\d+(?:\.\d+)*[.:：)、]?\s+", "", text, flags=re.I)
    text = re.sub(r"\A(?:第\s?[\d一二三四五六七八九十]+\s?[章节]|案例\s?\d+|Q\s*[:：]|问[:：])[\s:：]*", "", text)
    return strip_markdown(text).strip(" :：")


def plural(phrase: str) -> bool:
    """Is the head of an English noun phrase plural, as far as its spelling tells?"""
    head = re.split(r" (?:of|for|in|per|after|before|at|to|on|with|from|by|under|until)\b|[,(:]", phrase)[0]
    word = (head.split() or [""])[-1]
    return len(word) > 3 and bool(re.search("(?<![sui])s$", word)) and word[:2] != word[:2].upper()


def tidy(text: str) -> str:
    """Spaces as each language sets them, and a capital at the beginning of a sentence."""
    text, marks = strip_markdown(text), f"{HAN}，。？：；、“”（）"
    if re.search(f"[{HAN}]", text):
        text = re.sub(rf"(?<=[{HAN}])(?=[A-Za-z0-9])|(?<=[A-Za-z0-9%])(?=[{HAN}])", " ", text)
        return re.sub(rf"(?<=[{marks}]) +(?=[{marks}])| +(?=[，。？：；、）])|(?<=[，。？：；、（]) +", "", text)
    text = re.sub(r"\s+([?,.])", r"\1", text)
    return text if re.match(r"[a-z]+[A-Z_/-]|[a-z-]+\d", text) else text[:1].upper() + text[1:]


def keywords(answer: str, terms: FormMatcher[TermEntry], most: int = 4) -> tuple[str, ...]:
    """What a right answer must hold: a short answer itself, else its commands and codes, and the values and terms of
    its steps or, in prose, of its first two sentences (of all where these hold none)."""
    plain = strip_markdown(answer)
    if len(plain) <= 32 and "\n" not in answer and not plain.endswith((".", "。")):
        return (plain,)
    answer = re.sub(r"https?://\S+", lambda m: "·" * len(m.group()), _REFERENCE.sub(" ", answer))
    ends = [end for _, end in sentences(answer)]
    first = len(answer) if MARKER.match(answer) or "|" in answer[:2] else ends[:2][-1]
    out: list[str] = []
    for part in (answer[:first], answer):
        known = [(part[a:b], e) for a, b, e in terms.find(part)]
        found = [m.strip() for m in re.findall(r"`([^`\n]{3,60})`", part)]
        found += [answer[a:b] for a, b, e in terms.find(answer) if e.kind in ("command", "error_code")]
        for m in VALUE.finditer(part):
            begins = m.start() == 0 or part[m.start() - 1] == "\n"  # the number of a step
            found += [m.group()] if m["unit"] or (len(re.findall(r"\d", m.group())) > 2 and not begins) else []
        names = [form for form, _ in known if " " in form or not form.islower() or not form.isascii()]
        found += sorted(names or [form for form, _ in known], key=lambda form: not (" " in form or len(form) > 3))
        for word in found if not out else ():
            if not any(word.lower() in other.lower() or other.lower() in word.lower() for other in out):
                out.append(word)
    return tuple(out[:most])

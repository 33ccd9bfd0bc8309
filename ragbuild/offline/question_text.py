"""Texts of questions and answers: reading Markdown as plain text, values and codes in it, spaces, key facts."""

from __future__ import annotations

import re
from functools import lru_cache
from importlib import resources
from typing import Any

import yaml

from ragbuild.core.forms import FormMatcher
from ragbuild.core.records import TermEntry
from ragbuild.core.text import HAN, normalise

CODE = re.compile(r"(?<![A-Za-z0-9-])[A-Z]{1,5}-?\d{4,5}(?![\w-])")
AMOUNT = re.compile(r"(?:默认|约|至少|最多|不超过|提前|连续失败)?\s?[±<>≥≤]?\d[\d,.–]*\s?\S{0,6}")
MARKER = re.compile(r"\A\s*(?:[-*+•]\s+|\d{1,2}(?:[.)]\s+|、)|[（(]\d{1,2}[)）]\s*)")
_REFERENCE = re.compile(r"[(（][^()（）\n]{0,20}(?:section|chapter|节|章|见 ?\d)[^()（）\n]{0,20}[)）]")


TIME = (
    "ms|s|seconds?|minutes?|hours?|days?|weeks?|months?|years?|毫秒|秒|分钟|小时|天|周|个月|年"  # units, also of size,
)
SIZE = r"%|°C|[KMGT]i?B|[MG]bit/s|GbE|kg|mm|cm|m|k?W|V|Nm|N·m|dB\(A\)|Hz|steps?|characters?|times?"
COUNTER = "字符|个|台|条|份|次|位|张|块|种|名|核|步|级"  # and what Chinese counts with
VALUE = re.compile(
    r"(?<![\w.-])[±<>≥≤−]?\d+(?:[,.]\d+)*(?:[–:/-]\d+(?:\.\d+)*)*"
    rf"(?: ?(?P<unit>{SIZE}|{TIME}|{COUNTER}))?(?![A-Za-z0-9])"
)


@lru_cache(maxsize=1)
def frames() -> dict[str, Any]:
    """Word lists, patterns and question frames by language (`question_frames.yaml`)."""
    return yaml.safe_load((resources.files("ragbuild.offline") / "question_frames.yaml").read_text(encoding="utf-8"))


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


def cells(row: str) -> list[str]:
    """The cells of a table's row without Markdown marks."""
    row = row.strip().removeprefix("|")
    row = row if row.endswith("\\|") else row.removesuffix("|")
    found = (
        re.sub(r"\*\*|`", "", re.sub(r"<br ?/?>", " ", c.replace("\\|", "|"))) for c in re.split(r"(?<!\\)\|", row)
    )
    return [" ".join(c.split()).strip(" :：") for c in found]


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
    """What a right answer must hold: a short answer itself, else its commands, codes, values and terms."""
    plain = strip_markdown(answer)
    if len(plain) <= 32 and "\n" not in answer and not plain.endswith((".", "。")):
        return (plain,)
    answer = _REFERENCE.sub(" ", answer)
    known = [
        (answer[a:b], e) for a, b, e in terms.find(re.sub(r"https?://\S+", lambda m: "·" * len(m.group()), answer))
    ]
    found = [m.strip() for m in re.findall(r"`([^`\n]{3,60})`", answer)]
    found += [form for form, e in known if e.kind in ("command", "error_code")]
    for m in VALUE.finditer(answer):
        begins = m.start() == 0 or answer[m.start() - 1] == "\n"  # the number of a step
        found += [m.group()] if m["unit"] or (len(m.group()) > 2 and not begins) else []
    names = [form for form, _ in known if " " in form or not form.islower() or not form.isascii()]
    found += sorted(names or [form for form, _ in known], key=lambda form: not (" " in form or len(form) > 3))
    out: list[str] = []
    for word in found:
        if not any(word.lower() in other.lower() or other.lower() in word.lower() for other in out):
            out.append(word)
    return tuple(out[:most])

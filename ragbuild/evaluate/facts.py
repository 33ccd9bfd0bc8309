"""What a text says, as far as words and numbers tell: keywords held, numbers, sentences with their citations, refusals.

Chinese and English go the same way. Used by the rubric, which reads no meaning.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from ragbuild.core.text import HAN, LexicalTokenizer, make_tokenizer, normalise, sentences
from ragbuild.offline.prompts import citations_in

# In a sentence that refuses, what is denied is that the sources hold something, or that one can tell.
_SOURCE = r"(?:documents?|documentation|manuals?|guides?|sources?|texts?|contexts?|passages?|materials?|notes)"
_TOLD = r"(?:documented|described|mentioned|covered|stated|specified|provided|given|contained|found)"
_REFUSAL = re.compile(
    rf"\b{_SOURCE}\b[^.]{{0,40}}(?:\b(?:do|does|did|can) ?not\b|n't\b|\b\w+ (?:no|nothing)\b|\blacks?\b"
    r"|\bcovers? only\b)"
    rf"|(?:\bnot\b|n't\b)[^.]{{0,20}}\b{_TOLD}\b[^.]{{0,60}}\b{_SOURCE}\b|\bno\b(?!,)[^.]{{0,60}}\bin \w+ {_SOURCE}\b"
    r"|\bnot (?:documented|described|stated|specified)\b|\bno (?:\w+ ){0,2}information\b"
    r"|\b(?:i|we)\b[^.]{0,20}(?:\b(?:not|unable|no|cannot)\b|n't\b)[^.]{0,20}\b(?:find|know|answer|tell|say|have|help)\b"
    r"|(?:文档|资料|手册|材料|文中|原文|知识库)[^。]{0,20}(?:没有|没提|不能|无法|不包含|不涉及|查不到|找不到|未[提说记写涉包给载收描])"
    r"|(?:没有|未|无法|不能|找不到|查不到)[^。]{0,12}(?:记载|提及|提到|相关信息|相关内容|相关资料|答案)"
    r"|(?:无法|不能)(?:回答|确定|确认|告知|提供)|(?:我|抱歉|对不起)[^。]{0,10}(?:不知道|不清楚|无法|不能|没有|没找到|查不到)",
    re.IGNORECASE,
)
_GREETING = re.compile(r"\A\W*(?:thank|hello|hi\b|dear|您好|你好|谢谢|感谢)[^\n.!。！，,]*[.!。！，,]?\s*", re.I)


def refuses(text: str) -> bool:
    """Does its first sentence (after a greeting) say that the question can't be answered? An empty one refuses too."""
    text = ungreeted(normalise(text).strip())
    first = sentences(text)[:1]
    return not first or bool(_REFUSAL.search(text[first[0][0] : first[0][1]]))


def ungreeted(text: str) -> str:
    """`text` without the thanks or greeting that it begins with."""
    return _GREETING.sub("", text, count=1)


_THOUSANDS = re.compile(r"(?<![\d.])\d{1,3}(?:[, ]\d{3})+(?![\d])")


def plain(text: str) -> str:
    """`text` as facts are compared: NFKC, small letters, no Markdown marks, single blanks."""
    return " ".join(re.sub(r"[*`]+", "", normalise(text).lower()).split())


def holds(text: str, keyword: str) -> bool:
    """Does `text` hold the keyword, or one of its alternatives joined by ``|``?

    Full width, case, Markdown marks, blanks, hyphens, thousands separators and the s of a plural do not count. A number
    that is part of another number, or a Latin word inside of another, is no hit.
    """
    text = plain(text)
    return any(_pattern(k).search(text) for k in keyword.split("|") if k.strip())


@lru_cache(maxsize=4096)
def _pattern(keyword: str) -> re.Pattern[str]:
    units = re.findall(rf"\d+(?:[.,]\d+)*|[a-z]+|[{HAN}]+|\S", plain(keyword))
    units = [u for i, u in enumerate(units) if u != "-" or i in (0, len(units) - 1)]
    body = r"[-\s]*".join(_digits(u) if u[0].isdigit() else re.escape(u) for u in units)
    first, last = units[0], units[-1]
    before = r"(?<!\d)(?<!\d[.,])(?<![a-uw-z])" if first[0].isdigit() else r"(?<![a-z0-9])" if _latin(first) else ""
    after = r"(?![.,]?\d)" if last[0].isdigit() else r"(?:e?s)?(?![a-z0-9])" if _latin(last) else ""
    return re.compile(before + body + after)  # "v" may stand before a number: v4.2


def _digits(number: str) -> str:
    whole, point, rest = _joined(number).partition(".")
    groups = [whole[max(0, i - 3) : i] for i in range(len(whole), 0, -3)][::-1]
    return "[, ]?".join(groups) + re.escape(point + rest)


def _joined(text: str) -> str:
    """`text` without thousands separators."""
    return _THOUSANDS.sub(lambda m: re.sub("[, ]", "", m[0]), text)


def _latin(unit: str) -> bool:
    return unit.isascii() and unit.isalpha()


_SPELT = {w: str(i) for i, w in enumerate("one two three four five six seven eight nine ten eleven twelve".split(), 1)}
_SPELT |= {w: str(i) for i, w in enumerate("一二三四五六七八九十", 1)} | {"两": "2", "once": "1", "twice": "2"}
_NUMBER = re.compile(r"\d+(?:\.\d+)*")


def numbers(text: str, spelt: bool = False) -> frozenset[str]:
    """The numbers that a text writes in digits; with `spelt`, also the small ones that it writes in words, and the
    parts of what may be no thousands separator ("80,443")."""
    text = plain(text)
    found = set(_NUMBER.findall(_joined(text)))
    if spelt:
        found.update(_NUMBER.findall(text))
        found.update(_SPELT[w] for w in re.findall("[a-z]+|[一二两三四五六七八九十]", text) if w in _SPELT)
    return frozenset(found)


@lru_cache(maxsize=1)
def _tokenizer() -> LexicalTokenizer:
    return make_tokenizer("jieba", (), stem=True, char_bigrams=True)


@lru_cache(maxsize=2048)
def words(text: str) -> tuple[str, ...]:
    """The words that carry meaning, in order: stems, jieba's words, whole codes."""
    return tuple(_tokenizer()(_joined(plain(text))))


@dataclass(frozen=True)
class Claim:
    """One sentence, list item or table row, without its marks; `cited`: the numbers of the documents it names."""

    text: str
    cited: tuple[int, ...] = ()


_MARK = re.compile(  # the remark on an older version is the generator's, not the documents'
    r"^\s*(?:\[[^\]\n]{0,80}older version[^\]\n]{0,80}\]|（[^）\n]{0,60}旧版本，仅供参考[^）\n]{0,60}）"
    r"|[-*+•>]\s+|\d{1,3}[.)、]\s*|[（(]\d{1,3}[)）]\s*|#{1,6}\s+|\s+)*"
)
_RULE = re.compile(r"[\s|:~`*_=-]*(?:[`~]{3}\s*\w{1,12})?")  # a rule, or a fence with its language
_STOP_FIRST = re.compile(r"([.。!?！？;；])((?:\s*[\^＾][\d,，、\s–-]+[\^＾])+)")


def claims(text: str) -> list[Claim]:
    """The sentences of a text, in order. One without a citation takes that of the next which has one."""
    out: list[Claim] = []
    for line in _STOP_FIRST.sub(r"\2\1", text).splitlines():
        line = _MARK.sub("", line)
        for start, end in [] if _RULE.fullmatch(line) else sentences(line):
            piece = line[start:end]
            cited = tuple(n for _, numbers_ in citations_in(piece) for n in numbers_)
            piece = uncited(piece).strip()
            if words(piece):
                out.append(Claim(piece, cited))
            elif cited and out:
                out[-1] = Claim(out[-1].text, out[-1].cited + cited)
    following: tuple[int, ...] = ()
    for i in reversed(range(len(out))):
        following = out[i].cited or following
        out[i] = Claim(out[i].text, following)
    return out


def uncited(text: str) -> str:
    """`text` without its citations."""
    for (start, end), _ in reversed(citations_in(text)):
        text = text[:start] + text[end:]
    return text

"""Documents and queries are data, never instructions: find text that tries to be one.

A finding changes nothing in what is done; it is reported with the answer. Only extractive QA (apps/) blocks on one.
"""

from __future__ import annotations

import base64
import binascii
import codecs
import html
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from urllib.parse import unquote

import yaml

from ragbuild.core.text import HAN, normalise

# "Ignore the effect of currency" and 忽略监管要求的后果 are ordinary. An order to drop the rules names them as the
# reader's own or as what stood before (your, previous, 你的, 之前), or is an imperative. All runs are bounded.
_FILL = r"(?:(?:all|any|every|each|of|the|these|those|this|that|and|to|in|other|current|existing|security)\s+){0,4}"
_THEIRS = (
    r"(?:(?:your|my|our|previous|prior|above|earlier|preceding|former|foregoing|initial|original|given|system|safety"
    r"|hidden)\s+){1,3}"
)
_NOUN = (
    r"(?:instruction|prompt|rule|guideline|guidance|directive|direction|order|command|restriction|constraint|guardrail"
    r"|safeguard|programming)s?\b"
)
_SOFT = r"(?:ignor(?:e|ing)|disregard|forget|neglect|(?:do not|don't|stop)\s+follow(?:ing)?)"
_HARD = r"(?:override|bypass|overrule)"
_BEGINS = r"(?:^|[.!?;:,。！？；：，\"'(]\s*|\b(?:please|and|then|now|just|must|should|will|you|can|also)\s+)"
_OURS_ZH = "(?:以上|上述|上面|之前|此前|前面|先前|所有|全部|一切|任何|[你您我]|收到|原有|原来|既定|初始|過去)"
_FILL_ZH = "(?:的|给|給|被|到|过|系统|系統|安全|这些|那些|這些|内置|所有|全部|[你您]){0,4}"
_SOFT_ZH = (
    "(?:忽略|无视|忘记|忘掉|抛开|不用管|别管|不用理会|無視|忘記"
    "|(?:不要|不再|别|停止|拒绝)(?:理会|遵守|遵循|遵从|执行|服从))"
)
_HARD_ZH = "(?:跳过|绕过|绕开|覆盖|推翻|作废|撤销|繞過|覆蓋)"
_NOUN_ZH = "(?:指令|指示|规则|要求|设定|限制|约束|命令|规定|提示词|規則|設定|約束|規定|提示詞)"
_SHOW = (
    r"\b(?:reveal|print|show|repeat|output|display|give|tell|translate|leak|disclose|quote|write|recite"
    r"|what (?:is|are|were))"
)
_SHOW_ZH = "(?:显示|输出|打印|泄露|告诉我|重复|透露|公开|给我看|翻译|写出|复述|说出|把|顯示|輸出|洩露|告訴我|重複)"
_ALL_ABOVE = r"(?:everything|all|text|words|lines|content|conversation)"
_PATTERNS = {  # what is tried: (marks: one of them stands in all that is found, and is looked for first; the pattern)
    "asks to ignore the rules": (
        "ignor/disregard/forget/neglect/not follow/n't follow/stop follow/override/bypass/overrule"
        "/忽略/无视/忘记/忘掉/抛开/不要/不再/不用/别/停止/拒绝/跳过/绕/覆盖/推翻/作废/撤销/無視/忘記/繞過/覆蓋",
        rf"\b(?:{_SOFT}|{_HARD})\s+{_FILL}{_THEIRS}{_FILL}{_NOUN}"
        rf"|{_BEGINS}{_SOFT}\s+{_FILL}{_NOUN}(?!\s+(?:issued|published|of|from|set|laid|by)\b)"
        rf"|{_BEGINS}{_SOFT}\s+(?:all|everything|the)\s+(?:of\s+)?(?:the\s+)?(?:above|foregoing)"
        r"\s*(?:and\b|text\b|[,.;:]|$)"
        rf"|\b{_SOFT}\s+(?:everything|anything|all|what)(?: that)?\s+(?:above|before|you (?:were|have been) told)\b"
        r"|\b(?:ignore|disregard|forget|override)(?:all|any|the|your|my|previous|prior|above|earlier|these|of){0,4}"
        r"(?:instruction|prompt|rule|guideline)"  # what was spaced out and is closed up again
        rf"|(?:{_SOFT_ZH}|{_HARD_ZH}){_FILL_ZH}{_OURS_ZH}{_FILL_ZH}{_OURS_ZH}?{_FILL_ZH}{_NOUN_ZH}"
        rf"|{_SOFT_ZH}(?:指令|指示|系统提示|系統提示)|{_SOFT_ZH}(?:[你您]|之前|此前|先前)的?(?:系统)?提示"
        rf"|{_SOFT_ZH}(?:上面|以上|之前|前面)的?(?:所有|全部|一切)?(?:内容|对话|话)",
    ),
    "asks for the prompt": (
        "prompt/hidden /secret /developer /your /s above/t above/ll above/g above/n above/ before this"
        "/so far/提示/指令/设定/内容/文字/文本/话",
        rf"{_SHOW}\b[^.\n?]{{0,30}}\b(?:system prompt|(?:hidden|secret|developer) (?:prompt|message|instruction)s?"
        r"|your (?:\w+ ){0,2}(?:prompt|instruction|rule|guideline)s?)\b(?! +(?:operator|user|staff))"
        r"|\byour (?:system|initial|original|hidden) (?:message|prompt|instruction)s?\b"
        rf"|{_SHOW}\s+(?:me\s+)?(?:all\s+)?(?:of\s+)?(?:the\s+)?{_ALL_ABOVE}\s+(?:above|before this|so far)\b"
        rf"|{_SHOW_ZH}[^。\n]{{0,12}}(?:系统提示(?:词|$|[^a-z{HAN}]|原样|内容)|提示词|系统指令|系統提示詞|提示詞|系統指令"
        r"|[你您]的?(?:初始|原始|内部|隐藏|全部)*(?:系统)?(?:指令|提示(?!我|您|你)|设定))"
        r"|[你您]的?(?:系统|初始|内部)?(?:提示词|系统提示|系统指令|初始指令)(?:是|有|里|中|的|内容|？|\?)"
        r"|(?:把|将|重复|复述|输出)(?:上面|以上|前面|之前)的?(?:所有|全部)?(?:内容|文字|文本|对话|话)"
        r"(?:原样|逐字|全部|都|一字不差|再)?(?:输出|重复|复述|打印|写|给|。|$)",
    ),
    "assigns another role": (
        "you are now/you are a/you are un/you are evil/you are dan/you're/you must now/act as /pretend/imagine"
        "/from now on/developer mode/jailbr/roleplay/role-play/anything now/stop being/you have no "
        "/你现在/您现在/现在你/现在您/现在开始/现在起/想象/假装/假设/模式/不受/没有/扮演/必须/你現在/從現在",
        r"\byou are now\b(?!\s+(?:able|required|ready|logged|signed|connected|subject|on|at|in|done|using|running"
        r"|entitled|allowed|permitted|asked)\b)"
        r"|\b(?:you are|you're|act as) (?:an? )?(?:unrestricted|unfiltered|evil|dan\b|jailbroken)"
        r"|\bact as (?:if|though) you (?:have|had|are|were)\b|\byou must now (?:answer|act|behave|obey)\b"
        r"|\b(?:pretend|imagine) (?:to be|that you are|you are|you're)\b|\brole-?play as\b|\bdo anything now\b"
        r"|\bstop being an? [a-z ]{0,30}(?:assistant|model|bot|ai)\b|\byou have no (?:rules|restrictions|limits)\b"
        r"|\bfrom now on,? you\b|\bdeveloper mode\b|\bjailbreak\b"
        r"|[你您]现在(?:就)?是[一个不没管D]|现在(?:开始)?[你您]是[一个不没管]"
        r"|从现在(?:起|开始)，?[你您](?:是|就是|扮演|将是)|(?:假装|假设|想象)[你您]是|你現在是"
        r"|從現在(?:起|開始)，?[你您](?:是|扮演)"
        r"|(?:进入|开启|開啟|進入)(?:开发者|越狱|開發者)模式|扮演一[个名位](?:没有|不受)|停止扮演|[你您]必须(?:服从|听从|无条件)"
        r"|(?:没有|不受)(?:任何|一切|道德|规则|的)*(?:限制|约束|束缚)的?(?:ai|人工智能|助手|模型|机器人)",
    ),
    "poses as a chat turn": (
        "<|/system:/system :/assistant:/assistant :/inst]/sys>/new instruction/\"system\"/'system'/system override"
        "/指令:/指令 :/系统:/系统消息",
        r"<\|(?:im_start|im_end|system|assistant|user)\|?>|^[ \t]*(?:system|assistant)[ \t]*:|\[/?INST\]|<</?SYS>>"
        r"|^#{1,4}[ \t]*(?:system|new instructions?)[ \t]*:|[\"']role[\"']\s*:\s*[\"']system[\"']"
        r"|\bsystem override\s*[:!]|^[ \t]*new instructions?[ \t]*:|^[ \t]*新的?指令[ \t]*:"
        r"|^[ \t]*系统(?:消息|指令)?[ \t]*:[ \t]*(?:忽略|无视|[你您]|现在)",
    ),
    "asks to decode and obey": (
        "decode/decipher/decrypt/unscramble/解码/解密/解碼/base64",
        r"\b(?:decode|decipher|decrypt|unscramble)\b[^.\n]{0,50}\b(?:follow(?! up)|execute|obey|comply|carry out"
        r"|do what)\b"
        r"|(?:解码|解密|解碼)[^。\n]{0,12}(?:执行|照做|遵照|遵循|服从|執行)|(?:执行|遵照)(?:以下|下面)的?(?:base64|编码)",
    ),
    "asks to switch off the safeguards": (
        "disable/turn off/switch off/deactivate/remove/drop/关闭/解除/取消/停用/去掉",
        r"\b(?:disable|turn off|switch off|deactivate|remove|drop)\s+(?:all\s+)?(?:of\s+)?"
        r"(?:your\s+(?:\w+\s+)?(?:filter|restriction|guardrail|safeguard|limit)s?"
        r"|(?:the\s+)?safety\s+(?:filter|guardrail)s?)\b"
        r"|(?:关闭|解除|取消|停用|去掉)[你您]的?(?:所有|全部|安全|内容)*(?:过滤|限制|防护|约束)",
    ),
}
_MARKS = {reason: tuple(marks.split("/")) for reason, (marks, _) in _PATTERNS.items()}
_COMPILED = {reason: re.compile(pattern, re.IGNORECASE | re.MULTILINE) for reason, (_, pattern) in _PATTERNS.items()}
# A question is about disclosures or manuals; one about the machine shows several of the signs of guard_words.yaml at
# once, in any order and wording. Weights add up; a question about others ("May the bank set aside earlier guidance?")
# has one off.
_POLITE = re.compile(
    r"\b(?:can|could|would|will) you (?:please )?(?:tell|show|give|explain|say|find|list|summari[sz]e)(?: me)?\b"
    "|(?:请问)?[你您](?:能|可以|可否|能否)(?:告诉我|说明|解释|列出|查|给我)?|[你您]现在能",
    re.IGNORECASE,
)
_QUESTION = re.compile("[?？吗呢]|如何|什么|哪些|多少|怎")
_ORDER_WEIGHT = 3
_TURN = re.compile(
    r"^[ \t]*(?:user|human|ai|用户|助手|助理|人类|系统)[ \t]*:|</?(?:system|assistant|user|prompt)>", re.I | re.M
)
_BEFORE, _AFTER = 120, 240  # signs around a mark that are read
_HIDDEN = "hides an order"  # in an encoding, or behind signs that nobody sees

_LOOK_ALIKE = str.maketrans("аеорсухіѕԁјһɡοαε", "aeopcyxisdjhgoae")  # Cyrillic and Greek for Latin
_ALIKE = re.compile("[\u0370-\u052f\u0261]")
_UNSEEN = re.compile(  # controls, soft hyphen, joiners, directions, variation selectors, tags: no glyph of their own
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180e\u200b-\u200f"
    "\u202a-\u202e\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\U000e0000-\U000e007f]"
)
_JOINED = re.compile(r"(?:ignor|disregard|forget|reveal|override)[a-z]*[-_.][a-z]+[-_.]", re.IGNORECASE)
_LEET = re.compile(
    r"\b(?:[1i]gn[o0]r[e3]|d[1i][s5$]r[e3]g|f[o0]rg[e3][t7]|r[e3]v[e3][a4@][l1]|[o0]v[e3]rr[1i]d)", re.IGNORECASE
)
_DIGITS = str.maketrans("013457@$", "oieastas")
_TAG = re.compile("[\U000e0020-\U000e007e]+")
_TAGS = {0xE0000 + code: chr(code) for code in range(0x20, 0x7F)}  # Unicode's invisible copies of ASCII
_BASE64 = re.compile(r"[A-Za-z0-9+/_-]{16,4096}={0,2}")
_HEX = re.compile(r"(?:(?:0x|\\x)?[0-9a-f]{2}[ :,]?){8,2048}", re.IGNORECASE)
_ESCAPE = re.compile(r"\\u\{?([0-9a-f]{4,5})\}?|\\x([0-9a-f]{2})", re.IGNORECASE)
_APART = re.compile(r"(?:(?<![^\W\d_])[a-z]([ .*_-]{1,3})){5,400}[a-z](?![^\W\d_])", re.IGNORECASE)
_APART_HAN = re.compile(rf"(?<=[{HAN}])[ \t.*_-]{{1,2}}(?=[{HAN}])")


def injections(text: str, asked: bool = False) -> list[str]:
    """What the text tries, in words; empty for ordinary text. Both languages. `asked`: it is a short question and no
    document, and is read more strictly.

    Invisible signs, full-width and look-alike letters, gaps between letters and encodings (base64, hex, ROT13, escapes,
    percent signs, reversed text) are undone first; what is found only then is reported as "hides an order" too.
    """
    plain = normalise(text)
    found = _search(plain, asked)
    seen = {plain}
    hidden: set[str] = set()
    for variant in _variants(text, plain):
        if variant not in seen:
            seen.add(variant)
            hidden.update(_search(variant, asked))
    return [*found, *sorted(hidden - set(found)), _HIDDEN] if hidden - set(found) else found


def _search(text: str, asked: bool) -> list[str]:
    lower = text.lower()
    if len(lower) != len(text):  # the capital I with a dot becomes two signs
        text = lower
    found = [
        reason
        for reason, pattern in _COMPILED.items()
        if any(pattern.search(text, start, end) for start, end in _around(lower, _MARKS[reason]))
    ]
    return found or (["speaks to the machine about its rules"] if asked and _about_the_machine(text) else [])


def _about_the_machine(question: str) -> bool:
    """Do enough different signs of an order come together?"""
    question = _POLITE.sub(" ", question)
    found = {name: weight for name, (weight, pattern) in _signs().items() if pattern.search(question)}
    about_others = "addresses it" not in found and _QUESTION.search(question)
    return sum(found.values()) - bool(about_others) >= _ORDER_WEIGHT or bool(_TURN.search(question))


@cache
def _signs() -> dict[str, tuple[int, re.Pattern[str]]]:
    """From ``guard_words.yaml``: name of a sign -> its weight, what it looks like."""
    words = yaml.safe_load(Path(__file__).with_name("guard_words.yaml").read_text(encoding="utf-8"))
    pattern = r"\b(?:{})\b|{}".format
    return {
        name: (sign["weight"], re.compile(pattern("|".join(sign["en"]), "|".join(sign["zh"])), re.IGNORECASE))
        for name, sign in words.items()
    }


def _around(lower: str, marks: tuple[str, ...]) -> Iterator[tuple[int, int]]:
    """Where a pattern may match: the surroundings of its marks, joined where they touch, so that all is read once."""
    places = []
    for mark in marks:
        at = lower.find(mark)
        while at >= 0:
            places.append(at)
            at = lower.find(mark, at + len(mark))
    start = end = -1
    for at in sorted(places):
        if at - _BEFORE > end:
            if end >= 0:
                yield start, end
            start = max(0, at - _BEFORE)
        end = at + _AFTER
    if end >= 0:
        yield start, end


def _variants(text: str, plain: str) -> Iterator[str]:
    """The text as it reads once a disguise is taken off."""
    seen = _UNSEEN.sub("", plain) if _UNSEEN.search(plain) else plain
    if seen is not plain or not text.isascii():
        if _TAG.search(text):
            yield normalise(_TAG.sub(lambda m: f"\n{m[0].translate(_TAGS)}\n", text))
        yield seen.translate(_LOOK_ALIKE) if _ALIKE.search(seen) else seen
        yield _APART_HAN.sub("", plain)
    if _JOINED.search(plain):
        yield re.sub("[-_.]", " ", plain)
    if _LEET.search(plain):
        yield plain.translate(_DIGITS)
    yield _APART.sub(lambda m: _closed(m[0]), plain)
    lower = plain.lower()
    if any(mark in lower for mark in ("vtaber", "qvfertneq", "sbetrg", "cebzcg", "vafgehpgvba")):
        yield codecs.decode(plain, "rot13")
    if any(mark in lower for mark in ("erongi", "dragersid", "tegrof", "tpmorp", "noitcurtsni", "令指", "则规")):
        yield plain[::-1]
    if "&" in plain:
        yield html.unescape(plain)
    if "%" in plain:
        yield unquote(plain)
    if "\\" in plain:
        yield _ESCAPE.sub(lambda m: chr(int(m[1] or m[2], 16)), plain)
    yield from _decoded(plain)


def _closed(run: str) -> str:
    """Spaced letters without their gaps; a wider gap is one between words."""
    gap = re.search("[^a-z]+", run, re.IGNORECASE)
    words = re.split("[ ]{2,}", run) if gap and len(gap[0]) < 2 else [run]
    return " ".join(re.sub("[^a-z]", "", word, flags=re.IGNORECASE) for word in words)


def _decoded(text: str) -> Iterator[str]:
    """What runs of base64 and of hex say, where it is text."""
    for match in _BASE64.finditer(text):
        run = match[0].rstrip("=").translate(str.maketrans("-_", "+/"))
        try:
            yield normalise(base64.b64decode(run + "=" * (-len(run) % 4)).decode())
        except (binascii.Error, UnicodeDecodeError):
            continue
    for match in _HEX.finditer(text):
        digits = re.sub(r"0x|\\x|[ :,]", "", match[0], flags=re.IGNORECASE)
        try:
            yield normalise(bytes.fromhex(digits).decode())
        except (ValueError, UnicodeDecodeError):
            continue

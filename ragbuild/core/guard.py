"""Documents and queries are data, never instructions: find text that tries to be one.

A finding changes nothing in what is done; it is reported with the answer.
"""

from __future__ import annotations

import re

from ragbuild.core.text import normalise

_PATTERNS = {
    "asks to ignore the rules": (
        r"\b(?:ignore|disregard|forget|override)\b[^.\n]{0,40}\b(?:instruction|prompt|rule|guideline)s?\b"
        r"|(?:忽略|无视|忘记|忘掉|不要理会)[^。\n]{0,15}(?:指令|指示|规则|提示|要求|设定)"
    ),
    "asks for the prompt": (
        r"\b(?:reveal|print|show|repeat|output)\b[^.\n]{0,30}\b(?:system prompt|your prompt|your instructions)\b"
        r"|(?:显示|输出|打印|泄露|告诉我|重复)[^。\n]{0,12}(?:系统提示|提示词|系统指令)"
    ),
    "assigns another role": (
        r"\byou are now\b|\bact as (?:an? )?(?:unrestricted|evil|dan\b|jailbroken)|\bdeveloper mode\b"
        r"|你现在是|从现在起你(?:是|扮演)|进入开发者模式"
    ),
    "poses as a chat turn": r"<\|(?:im_start|system|assistant)\|?>|^[ \t]*(?:system|assistant)[ \t]*:|\[/?INST\]",
}
_COMPILED = {reason: re.compile(pattern, re.IGNORECASE | re.MULTILINE) for reason, pattern in _PATTERNS.items()}


def injections(text: str) -> list[str]:
    """What the text tries, in words; empty for ordinary text. Both languages; zero-width characters don't hide it."""
    text = normalise(text)
    return [reason for reason, pattern in _COMPILED.items() if pattern.search(text)]

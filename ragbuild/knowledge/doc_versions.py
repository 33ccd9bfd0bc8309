"""Which of two document versions is the newer, as far as their names say it.

A version is read as words and groups of numbers; two of one shape are compared number by number, two of different
shapes not at all. PEP 440 orders software only: here are dates, editions, lettered revisions and serial numbers too.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from ragbuild.core.text import normalise

_MONTHS = "january february march april may june july august september october november december".split()
_MONTH = "|".join(f"{name[:3]}(?:{name[3:]})?" for name in _MONTHS)
_YEAR = "(?:19|20)[0-9]{2}"
_STAGES = ("dev", "draft", "alpha", "preview", "beta", "rc")  # oldest first; a release comes after them all
_SAME = {
    "开发": "dev", "草案": "draft", "草稿": "draft", "pre": "preview", "预览": "preview", "测试": "beta",
    "公测": "beta", "候选": "rc", "revision": "rev", "修订": "rev", "ed": "edition", "第": "edition",
}  # fmt: skip
_IGNORED = frozenset("v ver version release final ga 正式 发布".split())
_LONGEST = 64  # characters; a longer one is no version


class _Version(NamedTuple):
    shape: tuple[str, ...]  # words, and "number", "date" or "letter" for a group
    groups: tuple[tuple[int, ...], ...]


def compare_versions(a: str, b: str) -> int | None:
    """-1 when `a` is older than `b`, 1 when it is newer, 0 for the same version, None when that cannot be said.

    ``v2.10`` is newer than ``v2.9``, ``Rev. C`` than ``Rev. B``, ``2026年3月`` than ``2025-11``, a release than its
    beta; ``v4.2`` is ``4.2.0``. ``2026`` and ``2026-03`` cannot be compared, nor can two kinds (``v4`` and ``Rev. C``).
    """
    a, b = (normalise(v).strip().casefold() for v in (a, b))
    if a == b:
        return 0
    left, right = _read(a), _read(b)
    if left is None or right is None or left.shape != right.shape:
        return None
    kinds = [s for s in left.shape if s in ("number", "date", "letter")] + ["stage"]
    for kind, x, y in zip(kinds, left.groups, right.groups, strict=True):
        if x != y:
            vague = kind == "date" and x[: len(y)] == y[: len(x)]  # one names the year alone, the other its month
            return None if vague else -1 if x < y else 1
    return 0


def _read(text: str) -> _Version | None:
    """A version's parts, the stage (beta …) as the last group; None when nothing in it can be ordered."""
    if len(text) > _LONGEST:
        return None
    shape: list[str] = []
    groups: list[tuple[int, ...]] = []
    stage = [len(_STAGES), 0]
    tokens = [_SAME.get(t, t) for t in re.findall(r"[0-9]+(?:[./_-][0-9]+)*|[^\W\d_]+", _plain(text))]
    tokens = [t for t in tokens if t not in _IGNORED]
    if len(tokens) == 1:  # C, or C版
        tokens.insert(0, "rev") if re.fullmatch("[a-z]", tokens[0]) else None
    for before, token in zip(["", *tokens], tokens, strict=False):
        if not token[0].isdigit():
            if token in _STAGES and groups:
                stage[0] = _STAGES.index(token)
            elif before == "rev" and re.fullmatch("[a-z]{1,2}", token):
                shape.append("letter")
                groups.append((len(token), *map(ord, token)))  # AA comes after Z
            else:
                shape.append(token)
            continue
        numbers = [int(n) for n in re.findall("[0-9]+", token)]
        if before in _STAGES and groups and len(numbers) == 1:
            stage[1] = numbers[0]
        elif re.match(f"{_YEAR}(?![0-9])", token) and "." not in token:
            shape.append("date")
            groups.append(tuple(numbers))
        elif len(numbers) > 1 and re.search(f"(?<![0-9]){_YEAR}$", token):
            return None  # 04.03.2026: a day and a month, or the other way round
        else:
            while numbers and not numbers[-1]:
                numbers.pop()
            shape.append("number")
            groups.append(tuple(numbers))
    return _Version(tuple(shape), (*groups, tuple(stage))) if groups else None


def _plain(text: str) -> str:
    """Dates of any spelling as year-month-day, Chinese numerals of an edition as digits, 版 and 版本 left out."""
    text = re.sub("第([一二三四五六七八九十])", lambda m: f"第{'一二三四五六七八九十'.index(m[1]) + 1}", text)
    text = re.sub("版本?", " ", text)
    text = re.sub("(?<=[0-9])[年月](?=[0-9])", "-", text)
    text = re.sub("(?<=[0-9])[年月日号]", " ", text)
    text = re.sub("(?<=[0-9])(?:st|nd|rd|th)(?![a-z])", "", text)
    text = re.sub(rf"(?<![a-z0-9])(?:([0-9]{{1,2}}) )?({_MONTH})[., ]{{1,2}}({_YEAR})(?![0-9])", _named_month, text)
    text = re.sub(rf"(?<![0-9./-])(0?[1-9]|1[0-2])[/-]({_YEAR})(?![0-9./-])", r"\2-\1", text)
    compact = rf"(?<![0-9.])({_YEAR})(0[1-9]|1[0-2])(0[1-9]|[12][0-9]|3[01])?(?![0-9.])"
    return re.sub(compact, lambda m: "-".join(filter(None, m.groups())), text)


def _named_month(match: re.Match[str]) -> str:
    month = next(i for i, name in enumerate(_MONTHS, 1) if name.startswith(match[2][:3]))
    return "-".join(filter(None, (match[3], str(month), match[1])))

"""What a document names outright: abbreviations beside their long forms, products, commands, error codes, protocols.

Rules over the parsed Markdown; every pattern is bounded, so that a line of any length takes linear time.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ragbuild.core.text import HAN, STOPWORDS
from ragbuild.offline.general_words import GENERAL

_FENCE = re.compile(r"^ {0,3}(```+|~~~+)[^\n]*\n(.*?)(?:^ {0,3}\1[^\n]*$|\Z)", re.M | re.S)
_INLINE = re.compile(r"`([^`\n]{1,200})`")
_IMAGE = re.compile(r"!\[[^\]\n]{0,300}\]\([^)\n]{0,500}\)")
_LINK = re.compile(r"\[([^\]\n]{0,300})\]\([^)\n]{0,500}\)")
_NOISE = re.compile(r"<[^<>\n]{0,200}>|https?://\S{1,300}|[*~]{1,3}|^[ \t]*(?:>+|[-+•]|\d{1,3}[.)、])[ \t]+", re.M)


@dataclass(frozen=True)
class Plain:
    """A document for reading: `lines` of prose (headings keep their #), inline `code` and lines of code `blocks`."""

    lines: list[str]
    code: list[str]
    blocks: list[str]


def plain(markdown: str) -> Plain:
    """Markdown without its marks; a code span of one word stays in the prose, a longer one leaves a break (¦)."""
    blocks = [line.strip() for m in _FENCE.finditer(markdown) for line in m.group(2).splitlines() if line.strip()]
    text = _FENCE.sub("\n", markdown)
    code = _INLINE.findall(text)
    text = _INLINE.sub(lambda m: m.group(1) if re.fullmatch(r"[\w.-]+", m.group(1)) else " ¦ ", text)
    text = _NOISE.sub(" ", _LINK.sub(r"\1", _IMAGE.sub(" ", text)))
    return Plain([line.strip() for line in text.splitlines() if line.strip()], code, blocks)


# Named entities -----------------------------------------------------------------------------------------------------

_HYPHENED = re.compile(r"(?<![\w-])([A-Z]{2,5})-(\d{1,4})([A-Z]?)(?![\w-]|\.\d)")
_GLUED = re.compile(r"(?<![\w-])([A-Z]{1,2}|ERR)(\d{3,5})(?![\w-]|\.\d)")
_VERSIONED = re.compile(r"(?<![\w-])([A-Z][a-z]+(?:[A-Z][A-Za-z]*)) (\d{1,2}\.\d{1,2})(?![\w.]*\d)")
_NO_MODEL = frozenset(
    "AES SHA RSA ECDSA HMAC MD UTF ISO IEC RFC CVE CWE FIPS EN GB DIN IEEE ANSI ASTM VLAN RAID RJ USB CAT PCI DDR "
    "COVID SARS HTTP TLS SSL IP IPV P HS RS ES PS CC BY Q FY FIG TAB SEC CH PO NO UTC GMT".split()
)
_CODE_CUE = re.compile(r"error|code|fault|alarm|event|fail|错误|代码|故障|告警|报错|事件|报 ?E", re.I)
_PROTOCOL = re.compile(
    r"(?<![\w-])(SAML|OAuth|OpenID Connect|OIDC|mTLS|D?TLS|SSL|LDAPS?|StartTLS|RADIUS|TACACS\+|Kerberos|SCIM|SNMP|SSH|"
    r"SFTP|FTPS?|HTTPS?|HTTP/2|NTP|DNS|DHCP|IPsec|IKEv2|IPMI|SMTP|IMAP|POP3|MQTT|AMQP|gRPC|GraphQL|WebSocket|BGP|OSPF|"
    r"VRRP|WebAuthn|FIDO2|NFS|SMB|iSCSI|RDP|VNC|802\.1X|Modbus|OPC UA|ACME|syslog|HSTS|TOTP|HOTP|JWT|PKCE)"
    r"(?: ?(v\d(?:\.\d)?|\d\.\d(?!\.?\d)))?(?![\w-])"
)
_COMMAND = re.compile(
    r"\$? ?([a-z][a-z0-9]*(?:-[a-z0-9]+)*(?: [a-z][a-z0-9]*(?:-[a-z0-9]+)*){1,3})(?=$| [<\[{\-A-Z0-9\"'|.])"
)


def find_entities(documents: Iterable[Plain]) -> dict[str, Counter[str]]:
    """{kind: Counter of forms} of products, error codes, protocols and commands (`area verb`)."""
    out: dict[str, Counter[str]] = {k: Counter() for k in ("product", "error_code", "protocol", "command")}
    inline: Counter[str] = Counter()
    block: Counter[str] = Counter()
    families: set[str] = set()
    codes: Counter[tuple[str, str]] = Counter()
    for document in documents:
        for line in [*document.lines, *document.code]:
            for match in (*_HYPHENED.finditer(line), *_GLUED.finditer(line)):
                code, prefix, digits = match.group(), match.group(1), match.group(2)
                if prefix in _NO_MODEL:
                    continue
                if len(digits) > 3 or "-" not in code:
                    family = prefix + "-" * ("-" in code)
                    codes[family, code] += 1
                    if _CODE_CUE.search(line):
                        families.add(family)
                else:
                    out["product"][code] += 1
            for match in _PROTOCOL.finditer(line):
                out["protocol"].update({match.group(1), " ".join(filter(None, match.groups()))})
            versioned = (m.group() for m in _VERSIONED.finditer(line))
            out["product"].update(name for name in versioned if not _PROTOCOL.fullmatch(name))
        for line, counter in [(c, inline) for c in document.code] + [(b, block) for b in document.blocks]:
            match = _COMMAND.match(line)
            if match and not STOPWORDS & set(match.group(1).split()):
                counter[match.group(1)] += 1
    # A family of codes is one when any of its members stands beside a word such as "error".
    out["error_code"].update({code: n for (family, code), n in codes.items() if family in families})
    out["command"] = _commands(inline, block)
    return out


def _commands(inline: Counter[str], block: Counter[str]) -> Counter[str]:
    """Two words, or three where the third never varies (`system diag collect`); arguments are left off."""
    areas = {command.split()[0] for command in inline}
    seen = inline + Counter({c: n for c, n in block.items() if c.split()[0] in areas})
    thirds: dict[str, set[str]] = defaultdict(set)
    for command in seen:
        words = command.split()
        thirds[" ".join(words[:2])].add(words[2] if len(words) > 2 else "")
    out: Counter[str] = Counter()
    for command, n in seen.items():
        head = " ".join(command.split()[:2])
        third = next(iter(thirds[head])) if len(thirds[head]) == 1 else ""
        out[f"{head} {third}".strip()] += n
    return out


# Abbreviations ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Definition:
    """An abbreviation beside a long form of one language; without one, a Han term beside its Latin name."""

    abbreviation: str
    long_form: str
    language: str


_ABBR = r"(?=[A-Za-z]{0,7}[A-Z][A-Za-z]{0,7}[A-Z])[A-Za-z][A-Za-z0-9]{1,7}"
_ROMAN = re.compile(r"I{2,3}|IV|VI{0,3}|IX|XI{0,3}")
_ABBR_ONLY = re.compile(_ABBR)
_LATIN_WORD = re.compile(r"(?<![\w-])[A-Za-z][A-Za-z0-9]+(?![\w-])")
_BRACKETS = re.compile(r"[（(]([^（）()\n]{2,80})[）)]")
_PARTS = re.compile(r"\s*[,，;；、]\s*")
_HAN_TAIL = re.compile(f"[{HAN}]{{2,20}} ?$")
_LATIN_TAIL = re.compile(r"[A-Za-z][\w'’–-]*(?: [A-Za-z][\w'’–-]*){0,11} ?$")
# Words that stand before a Han name and are no part of it.
_HAN_LEAD = STOPWORDS | frozenset(
    "使用 启用 配置 支持 通过 生成 创建 导入 导出 提交 下载 上传 安装 运行 选择 输入 采用 添加 开启 关闭 设置 进行 "
    "执行 需要 要求 包括 利用 借助 提供 实现 建立 管理 检查 修改 更换 以及 并且 或者 例如 即 叫做 称为 所谓 本 该 其 "
    "各 每 两 两边 双方 一 个 台 新 旧 把 由 让 向 请 不 未 已 可 须".split()
)


def find_definitions(documents: Iterable[Plain], cut: Callable[[str], Sequence[str]]) -> Counter[Definition]:
    """Long forms in brackets after their abbreviation, or before it, in both languages and orders.

    English long forms must account for the letters of the abbreviation (Schwartz & Hearst 2003). A Han long form
    that stands before the bracket has no visible beginning: it is the longest tail, cut at words, that most of its
    definitions share and that the documents also use elsewhere.
    """
    found: Counter[Definition] = Counter()
    tails: dict[str, Counter[str]] = defaultdict(Counter)
    lines = [line for document in documents for line in document.lines]
    for line in lines:
        for match in _BRACKETS.finditer(line):
            left = line[max(0, match.start() - 120) : match.start()]
            inside = [p for p in _PARTS.split(match.group(1)) if p]
            before = re.search(rf"(?<![\w-])({_ABBR}) ?$", left)
            abbr = next((p for p in inside if _ABBR_ONLY.fullmatch(p)), before.group(1) if before else "")
            if not abbr or abbr.lower() in GENERAL or _ROMAN.fullmatch(abbr):
                continue
            others = [p for p in inside if p != abbr]
            if before and before.group(1) == abbr:
                left = ""
            han_parts = [p for p in others if re.search(f"[{HAN}]", p)]
            if len(han_parts) > 1 or (han_parts and left):
                others = [p for p in others if p not in han_parts]  # a remark, not the name
            han, latin = _HAN_TAIL.search(left), _LATIN_TAIL.search(left)
            if han:
                tails[abbr][han.group().strip()] += 1
            for text in (*others, latin.group().strip() if latin else ""):
                if re.fullmatch(f"[{HAN}]{{2,15}}", text):
                    found[Definition(abbr, text, "zh")] += 1
                elif long := long_form(abbr, text):
                    found[Definition(abbr, long, "en")] += 1
    joined = "\n".join(lines)
    for abbr, runs in tails.items():
        found[Definition(abbr, _han_tail(runs, len(abbr), cut, joined), "zh")] += sum(runs.values())
    # Forms are found in any case: an abbreviation that is an everyday word (ACT, WHO) would be found everywhere.
    words = Counter(word for line in lines for word in _LATIN_WORD.findall(line))
    everyday = {d.abbreviation for d in found if words[d.abbreviation.lower()] > words[d.abbreviation] > 0}
    return Counter({d: n for d, n in found.items() if d.long_form and d.abbreviation not in everyday})


def long_form(abbreviation: str, text: str) -> str:
    """The shortest tail of `text` with the abbreviation's letters in order, the first at a word's start; or ""."""
    at = len(text) - 1
    letters = abbreviation.lower()
    lower = text.lower()
    for i in range(len(letters) - 1, -1, -1):
        while at >= 0 and (lower[at] != letters[i] or (i == 0 and at > 0 and lower[at - 1].isalnum())):
            at -= 1
        if at < 0:
            return ""
        at -= 1
    long = text[text.rfind(" ", 0, at + 2) + 1 :].strip("\"'“”‘’[]<>*_ ")
    words = re.findall(r"\w+", long)
    if (
        not words
        or re.search(r'[\[\]"@<>|]', long)
        or len(words) > min(len(letters) + 5, 2 * len(letters))
        or len(long) <= len(abbreviation) + 1
    ):
        return ""
    initials = [w[0].lower() for w in words if w.lower() not in STOPWORDS] or [""]
    return long if 2 * sum(c in initials for c in letters) >= len(letters) and len(words) > 1 else ""


def _han_tail(runs: Counter[str], letters: int, cut: Callable[[str], Sequence[str]], text: str) -> str:
    """The name at the end of `runs`: what most share, else with as many words as the abbreviation has letters."""
    shared: Counter[str] = Counter()
    n_words: dict[str, int] = {}
    for run, n in runs.items():
        words = list(cut(run))
        first = max((i + 1 for i, w in enumerate(words) if w in _HAN_LEAD and w != "的"), default=0)
        for i in range(first, len(words)):
            tail = "".join(words[i:])
            if 2 <= len(tail) <= 12 and words[i] != "的" and ("的" not in words[i:] or i == first):
                shared[tail] += n
                n_words[tail] = sum(w != "的" for w in words[i:])
    if not shared:
        return ""
    most = max(shared.values())
    if most > 1:
        return max((t for t, n in shared.items() if 2 * n > most), key=lambda t: (len(t), t))
    return min(shared, key=lambda t: (abs(n_words[t] - letters), text.count(t) < 2, -len(t), t))

"""Do the documents answer this at all? Reads scores that are not normalised within the question, and names.

Two signs: evidence that is weak on both scales, and a thing that the question names and no document does. A question
about something near, whose answer is not there, looks like any other to both; only a model that reads can refuse it.
"""

from __future__ import annotations

import re

from ragbuild.core.config import GenerateConfig
from ragbuild.core.text import HAN, language_of
from ragbuild.index.versions import IndexVersion
from ragbuild.online.generate import Evidence

_WORD = rf"[{HAN}]+|[^\W_{HAN}]+(?:[-._'][^\W_{HAN}]+)*"
_CODE = re.compile(r"(?=.*\d)[a-z][a-z0-9]*(?:[-._][a-z0-9]+)*", re.I)  # 12V and 2nd are quantities
_NUMBER = re.compile(r"v?(\d+(?:\.\d+)+)", re.I)
_PRICE = re.compile(
    r"\bpric(?:es?|ing)\b|\bcosts? (?:per|an?) \w+|\bhow much (?:does|do|would|will)\b[^?]*\bcosts?\b"
    r"|多少钱|价格|价钱|售价|报价",
    re.I,
)
_MONEY = re.compile(r"[$€£¥￥]\s?\d|\d\s?(?:元|美元|欧元|USD|EUR|GBP|RMB|CNY)", re.I)


def weak(evidence: Evidence, config: GenerateConfig, version: IndexVersion) -> tuple[bool, dict[str, object]]:
    """Is the evidence too weak to answer? Either both the best coverage and the best cosine are below their threshold,
    or the question names what no document names, or asks for a price where none stands. Returns the figures too."""
    coverage = max((c.features["coverage"] for c in evidence.top_m), default=0.0)
    cosine = max((c.features["cosine"] for c in evidence.top_m), default=-1.0)
    names = unknown_names(evidence.query, version) if config.abstain_unknown_names else []
    if config.abstain_unknown_names and (asked := _PRICE.search(evidence.query)):
        names += [asked[0]] if not any(_MONEY.search(p.content) for p in evidence.parents) else []
    figures = {"coverage": round(coverage, 4), "cosine": round(cosine, 4), "unknown_names": names}
    low = coverage < config.abstain_coverage and cosine < config.abstain_cosine
    return low or bool(names), figures


def abstention(evidence: Evidence, version: IndexVersion) -> str:
    """Says, in the question's language, what was looked for, which of its words no document holds, and what came
    nearest."""
    terms = unknown_words(evidence.query, version)
    nearest = evidence.parents[0] if evidence.parents else None
    place = f"{nearest.breadcrumb} ({nearest.doc_source})" if nearest else ""
    if language_of(evidence.query) == "zh":
        missing = f"文档中没有出现：{'、'.join(terms[:6])}。" if terms else ""
        return f"现有文档不能回答这个问题。查找内容：“{evidence.query[:200]}”。{missing}" + (
            f"最接近的内容：{place}。" if place else ""
        )
    missing = f" No document holds: {', '.join(terms[:6])}." if terms else ""
    near = f" Nearest: {place}." if place else ""
    return f"The documents at hand do not answer this. Looked for: “{evidence.query[:200]}”.{missing}{near}"


def unknown_words(query: str, version: IndexVersion) -> list[str]:
    """The words of the question that no document holds, as they were typed."""
    words = re.findall(_WORD, query)
    found: dict[str, None] = {}
    for word in words:
        tokens = version.tokenizer(word)
        if re.match(f"[{HAN}]", word):
            new = [t for t in tokens if not version.lexical.idf(t)]
            found.update(dict.fromkeys(t for t in new if not any(t != u and t in u for u in new)))
        elif tokens and not any(version.lexical.idf(t) for t in tokens):
            found[word] = None
    return list(found)


def unknown_names(query: str, version: IndexVersion) -> list[str]:
    """What the question names and no document does: a code (``LG-700``: letters first, then digits), a version newer
    than every document's, a capitalised word within a sentence or within Chinese. A misspelt small word is no name."""
    words = re.findall(_WORD, query)
    latin = [w for w in words if w[0].isascii()]
    shouted = sum(w[0].isupper() for w in latin) * 2 > len(latin) and len(latin) > 2  # a title, or all in capitals
    chinese = language_of(query) == "zh"
    newest = max((_numbers(d.doc_version) for d in version.documents), default=())
    out = []
    for place, word in enumerate(words):
        tokens = version.tokenizer(word)
        if not tokens or version.lexical.idf(tokens[0]):
            continue  # the first token is the whole word, its parts follow
        if match := _NUMBER.fullmatch(word):
            named = _numbers(match[1]) > newest
        elif _CODE.fullmatch(word):
            named = True
        else:
            named = word[0].isupper() and len(word) > 2 and not shouted and (chinese or place > 0)
            named = named and not any(version.lexical.idf(t) for t in tokens)
        if named:
            out.append(word)
    return list(dict.fromkeys(out))


def _numbers(version: str) -> tuple[int, ...]:
    """``v4.2.2`` as (4, 2, 2); empty for what is no dotted version."""
    match = _NUMBER.fullmatch(version)
    return tuple(map(int, match[1].split("."))) if match else ()

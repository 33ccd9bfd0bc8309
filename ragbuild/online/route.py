"""Routing: narrow the search before it starts. Knowledge base, then product model and version, then (optional) tag.

A wrong route loses documents, so each layer acts only on what the question names. Everything it decided, and why, goes
into the trace. By default only active documents are searched; asking for an old version lets legacy ones in.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ragbuild.core.config import RouteConfig
from ragbuild.core.forms import FormMatcher
from ragbuild.core.records import Document, TermEntry
from ragbuild.core.text import normalise
from ragbuild.index.filters import ANY_MODEL, Filter

# How people name a document type; a type that is named by its own words ("release notes") needs no line here.
DOC_TYPE_WORDS = {
    "release_notes": ("release note", "发行说明", "版本说明"),
    "faq": ("faq", "常见问题"),
    "api_reference": ("api reference", "api 文档", "接口文档"),
    "spec_sheet": ("spec sheet", "specification sheet", "data sheet", "规格书"),
    "service_bulletin": ("bulletin", "服务公告", "公告"),
}
_OLD = re.compile(
    r"\b(?:old(?:er)?|previous|legacy|former|earlier)\s+(?:version|release|generation|manual|guide)s?\b"
    r"|[老旧](?:版|系统|手册)|以前的?版本|上一版|历史版本|早期版本"
)
_VERSION = re.compile(r"(?<![a-z0-9_.])v?(\d+(?:\.\d+)++)(?![a-z0-9_])")  # Han may stand right beside it: 3.4版本


@dataclass(frozen=True)
class Decision:
    """One layer's choice: which values pass, and why."""

    layer: str
    values: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class Routing:
    """The filter to search with, and the decisions that made it."""

    where: Filter
    decisions: tuple[Decision, ...]


class Router:
    """Rules from the documents of the index version and from the dictionary, or an LLM when one is given."""

    def __init__(
        self,
        documents: Sequence[Document],
        entries: Sequence[TermEntry],
        config: RouteConfig,
        ask: Callable[[str, dict[str, list[str]]], dict[str, list[str]]] | None = None,
    ) -> None:
        """`ask(query, {layer: known values})` returns the values that pass for each layer; unknown ones are dropped."""
        self.config, self._ask = config, ask
        self._models = {m: _loose(m) for d in documents for m in d.product_model if m != ANY_MODEL}
        self._types = {d.doc_type for d in documents}
        self._kbs = {d.kb for d in documents}
        self._by_version: dict[str, list[Document]] = {}
        for document in documents:
            self._by_version.setdefault(_bare(document.doc_version), []).append(document)
        self._tags = FormMatcher((form, e.tag) for e in entries if e.tag for form in e.formal)

    def __call__(self, query: str, where: Filter | None = None) -> Routing:
        """`where`: conditions the caller set; routing never loosens a field that the caller restricted."""
        where = where or Filter()
        if not self.config.enabled:
            return Routing(where, ())
        text = normalise(query).lower()
        found = self._by_llm(query) if self._ask and self.config.use_llm else self._by_rules(text)
        decisions = []
        for decision in found:
            field = decision.layer
            asked = getattr(where, field)
            if field == "status" and asked == ("active",):
                where = where.with_(status=decision.values)
            elif not asked:
                where = where.with_(**{field: decision.values})
                if field == "doc_version":  # what others say about this version passes too
                    where = where.with_(naming=tuple(dict.fromkeys(map(_bare, decision.values))))
            else:
                continue
            decisions.append(decision)
        return Routing(where, tuple(decisions))

    def _by_rules(self, text: str) -> list[Decision]:
        out = []
        if self.config.knowledge_base:
            out += self._knowledge_base(text)
        if self.config.model_version:
            out += self._model(text) + self._version(text)
        if self.config.tag:
            tags = {tag for _, _, tag in self._tags.find(text)}
            if len(tags) == 1:
                out.append(Decision("tag", tuple(tags), "the question's terms all belong to this subsystem"))
        return out

    def _knowledge_base(self, text: str) -> list[Decision]:
        named = [t for t in sorted(self._types) for w in (*DOC_TYPE_WORDS.get(t, ()), t.replace("_", " ")) if w in text]
        named = list(dict.fromkeys(named))
        if len(named) == 1 and named[0] in DOC_TYPE_WORDS:
            return [Decision("doc_type", tuple(named), "the question names this kind of document")]
        word = r"\s?(?:(?:knowledge )?(?:kb|base)\b|知识库)"
        names = {k: re.escape(normalise(k).lower()) for k in sorted(self._kbs)} if len(self._kbs) > 1 else {}
        kbs = [k for k, name in names.items() if re.search(rf"(?<![a-z0-9]){name}{word}", text)]
        return [Decision("kb", tuple(kbs), "the question names this knowledge base")] if len(kbs) == 1 else []

    def _model(self, text: str) -> list[Decision]:
        squeezed = re.sub(r"(?<=[a-z])[\s_-]+(?=\d)", "", text)
        models = sorted(self._models.items())
        named = tuple(m for m, loose in models if re.search(rf"(?<![a-z0-9]){loose}s?(?![a-z0-9])", squeezed))
        return [Decision("product_model", named, "the question names this model")] if named else []

    def _version(self, text: str) -> list[Decision]:
        named = [v for v in dict.fromkeys(_VERSION.findall(text)) if v in self._by_version]
        named += [v for v in self._by_version if not v[:1].isdigit() and len(v) > 5 and v in text]
        old = [v for v in named if any(d.status != "active" for d in self._by_version[v])]
        if len(named) == len(old) == 1:
            version = self._by_version[old[0]]
            statuses = tuple(dict.fromkeys(d.status for d in version if d.status != "active"))
            spellings = tuple(dict.fromkeys(d.doc_version for d in version))  # v3.4 and 3.4 are one version
            return [
                Decision("status", ("active", *statuses), f"documents of {version[0].doc_version} are {statuses[0]}"),
                Decision("doc_version", spellings, "the question names this version alone; what names it passes too"),
            ]
        if old or _OLD.search(text):
            return [Decision("status", ("active", "legacy"), "the question asks for an older version")]
        return []

    def _by_llm(self, query: str) -> list[Decision]:
        known = {
            "kb": sorted(self._kbs), "doc_type": sorted(self._types), "product_model": sorted(self._models),
            "doc_version": sorted({d.doc_version for v in self._by_version.values() for d in v}),
            "status": ["active", "legacy"],
        }  # fmt: skip
        answer = self._ask(query, known) if self._ask else {}
        out = []
        for layer, values in answer.items():
            passing = tuple(v for v in values if v in known.get(layer, ()))
            if passing:
                out.append(Decision(layer, passing, "chosen by the language model"))
        return out


def _loose(model: str) -> str:
    """``LG-500`` as a pattern that also finds lg500 and LG 500 in text without separators before digits."""
    return re.escape(re.sub(r"(?<=[a-z])[\s_-]+(?=\d)", "", normalise(model).lower()))


def _bare(version: str) -> str:
    lowered = version.lower()
    return lowered[1:] if re.match(r"v\d", lowered) else lowered

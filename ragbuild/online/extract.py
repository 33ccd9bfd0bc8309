"""Which passages of the parents answer a question, without a language model: a stand-in that quotes, never invents.

A passage is scored by the idf-weighted share of the question that it holds itself, that its heading holds and that the
rest of its parent holds, by its cosine, and by how the reranker ranked its parent; then by the kind of answer that the
question asks for (steps, a list, a number, a remedy). A section whose heading is what was asked is quoted from its
start. The weights are fixed; they were set by hand and checked on the sample's query log, in both languages.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from ragbuild.core.guard import injections
from ragbuild.core.records import Candidate, Chunk
from ragbuild.core.text import language_of
from ragbuild.index.lexical import lucene_idf
from ragbuild.index.versions import IndexVersion
from ragbuild.models.embedders import Embedder
from ragbuild.online.passages import Passage, passages

# Weights of the parts of a score, beside 1.0 for what a passage holds itself, then what is added or multiplied.
HEADING, ELSEWHERE, COSINE, PARENT = 0.9, 0.2, 0.6, 0.8
NUMBER, REMEDY = 0.2, 0.4  # a digit where a number is asked for; a remedy where trouble is told
STEPS, ALL, OTHER_LANGUAGE, OLDER = 1.4, 1.1, 0.8, 1.1  # OLDER: an older version is given only when it was asked for
# Choosing, as shares of the best score: the least, the least in the best quote's parent and elsewhere when nothing of
# the question is gained; then the least gain, and the share of words that must be new.
GOOD, SAME_PARENT, OTHER_PARENT, GAIN, NEW = 0.72, 0.8, 0.9, 0.1, 0.5
# A section answers as a whole when its heading holds this share of the question; among the first parents, to a length.
TITLED, SECTIONS, LENGTH = 0.7, 2, 900
_ENCODED = 8  # passages whose cosine is computed, the best without it: encoding is what an answer's time goes into

_STEPS = re.compile(r"\bhow (?:do|to|can|should)\b|\bsteps?\b|\bprocedure\b|怎么|怎样|如何|步骤|流程|咋", re.I)
_ALL = re.compile(r"\blist\b|\bwhich\b|\bwhat (?:are|is new|to)\b|\ball\b|哪些|清单|列表|分别|各是|各多少|一览", re.I)
_NUMBER = re.compile(
    r"\bhow (?:long|many|much|often|big|large|fast|high)\b|\bmax|\bmin(?:imum)?\b|\blimit|\binterval|\bdefault|\bsize"
    r"|\bwhen\b|几|多少|多久|多长|多大|多重|期限|上限|最[大小多少长短]|间隔|默认|什么时候",
    re.I,
)
_TROUBLE = re.compile(
    r"\b[a-z]{1,3}-?\d{4}\b|\berror|\bfail|\bnot \w+ing\b|\bcan'?t\b|\bcannot\b|\bwon'?t\b|\bdoesn'?t\b|\blost\b"
    r"|\bdown\b|\bdead\b|\brefused|\bexpired|\binvalid|\bbroken|\bwrong|报错|错误|失败|不[了上通能对到见动]|没反应|没数据|无效"
    r"|丢[了失]|坏了|怎么办|过期|超时|处理",
    re.I,
)
_ASKING = frozenset(
    "long mani much often more get 几 多久 多长 多长时间 多大 时间 哪 哪台 哪里 可以 能 要 要求 会 还 怎么办".split()
)
_SYMPTOM = re.compile(r"\W{0,4}(?:symptoms?|signs?|现象|症状|问题描述)\b[\s.:：*]", re.I)
_REMEDY = re.compile(
    r"\W{0,4}(?:remedy|resolution|solution|fix|what to do|workaround|处理|处置|解决|解决办法|对策|措施)\b[\s.:：*]",
    re.I,
)
_STEP = re.compile(r"^\s*[（(]?\d{1,3}[.)、）]", re.M)
_DIGIT = re.compile(r"\d|[一二三四五六七八九十两][个次天年月周台份条位]")
_KIND = {
    "list": 0.85,
    "table": 0.8,
    "code": 0.85,
    "note": 0.9,
    "paragraph": 1.0,
    "sentence": 1.0,
    "item": 0.95,
    "row": 1.0,
}


@dataclass(frozen=True)
class Quote:
    """A passage of the parent with index `parent`, its score, and the words of the question that it holds."""

    parent: int
    passage: Passage
    score: float
    held: frozenset[str] = frozenset()
    words: frozenset[str] = frozenset()
    cosine: float = 0.0  # of the passage with the question; computed for the best only

    def overlaps(self, other: Quote) -> bool:
        a, b = self.passage, other.passage
        return self.parent == other.parent and a.start < b.end and b.start < a.end


class Extractor:
    """Chooses quotes for one question from the parents given."""

    def __init__(self, version: IndexVersion, embedder: Embedder) -> None:
        self.version, self.embedder = version, embedder
        self._words = lru_cache(maxsize=20_000)(lambda text: frozenset(version.tokenizer(text)))  # texts come again

    def __call__(self, question: str, parents: Sequence[Chunk], top_m: Sequence[Candidate], limit: int) -> list[Quote]:
        """At most `limit` quotes, best first; each brings something that those before it lack."""
        weights = self.weights(question)
        scored = self.scored(question, parents, top_m)
        section = self._section(question, parents, scored, weights)[:limit]
        chosen = list(section)
        covered = {t for q in chosen for t in q.held}
        best = max((q.score for q in chosen), default=scored[0].score if scored else 0.0)
        for quote in scored:
            if len(chosen) == limit or quote.score < GOOD * best:
                break
            gain = sum(weights[t] for t in quote.held - covered)
            near = SAME_PARENT if chosen and quote.parent == chosen[0].parent else OTHER_PARENT
            if any(quote.overlaps(c) or _alike(quote, c) for c in chosen):
                continue
            second = quote.passage.steps > 1 and any(c.passage.kind == quote.passage.kind == "list" for c in chosen)
            if not chosen or gain >= GAIN or (not section and not second and quote.score >= near * best):
                chosen.append(quote)
                covered |= quote.held
        return _whole(chosen, scored)

    def _section(
        self, question: str, parents: Sequence[Chunk], scored: Sequence[Quote], weights: dict[str, float]
    ) -> list[Quote]:
        """The opening of the section whose heading is what the question asks about, unless it asks for a number."""
        if _NUMBER.search(question) and not _ALL.search(question):
            return []
        for number, parent in enumerate(parents[:SECTIONS]):
            if sum(weights[t] for t in self._held(parent.section or parent.chapter, weights)) < TITLED:
                continue
            blocks: dict[int, Quote] = {}
            for quote in scored:  # the widest passage of each block
                p = quote.passage
                if quote.parent == number:
                    kept = blocks.get(p.block)
                    if kept is None or p.end - p.start > kept.passage.end - kept.passage.start:
                        blocks[p.block] = quote
            out, width = [], 0
            for _, quote in sorted(blocks.items()):
                width += quote.passage.end - quote.passage.start
                if out and (width > LENGTH or any(quote.overlaps(q) for q in out)):
                    continue
                out.append(quote)
            return out
        return []

    def weights(self, question: str) -> dict[str, float]:
        """The question's words with their share of its idf weight, one that no document holds like the rarest; words
        that only ask count nothing."""
        lexical, tokens = self.version.lexical, dict.fromkeys(self.version.tokenizer(question))
        unknown = lucene_idf(lexical.n_documents, 0)
        idf = {t: lexical.idf(t) or unknown for t in tokens if t not in _ASKING}
        total = sum(idf.values()) or 1.0
        return {t: w / total for t, w in idf.items()}

    def scored(self, question: str, parents: Sequence[Chunk], top_m: Sequence[Candidate]) -> list[Quote]:
        """Every passage of the parents, by (-score, parent, position)."""
        weights, language = self.weights(question), language_of(question)
        best = {c.chunk.parent_id: c.score or 0.0 for c in reversed(top_m)}
        low = min([0.0, *best.values()])  # a cross-encoder's scores may be negative
        span = max(best.values(), default=0.0) - low or 1.0
        quotes = []
        for number, parent in enumerate(parents):
            prior = PARENT * (best.get(parent.chunk_id, low) - low) / span
            heading = self._held(parent.breadcrumb, weights)
            body = self._held(parent.content, weights)
            orders = bool(injections(parent.content))
            restating = set()  # blocks that only describe the trouble: nearest to the question, and no answer to it
            for passage in passages(parent.content, parent.table_header):
                text = parent.content[passage.start : passage.end]
                told = _SYMPTOM.match(text) or (
                    passage.kind == "code" and passage.block - 1 in restating
                )  # with its log
                if told and not _SYMPTOM.search(question):
                    restating.add(passage.block)
                if passage.block in restating:
                    continue
                if passage.kind in ("sentence", "item", "paragraph") and text[-1:] in ":：?？":
                    continue  # leads into something, or asks: no answer by itself
                if orders and injections(text):
                    continue  # an order to a reader who obeys is no answer to anybody
                words = self._words(text)
                held = words & frozenset(weights)
                near = (heading | self._held(passage.header, weights)) - held
                share = [sum(weights[t] for t in some) for some in (held, near, body - near - held)]
                own = 0.5 if passage.kind == "table" else 1.0  # a table holds many words by its size alone
                score = own * share[0] + HEADING * share[1] + ELSEWHERE * share[2] + prior
                score = (score + _fit(question, text)) * _factor(question, passage, number)
                score *= (1.0 if parent.language == language else OTHER_LANGUAGE) * (
                    1.0 if parent.status == "active" else OLDER
                )
                quotes.append(Quote(number, passage, score, held | near, words))
        quotes.sort(key=_order)
        near = self._with_cosine(question, parents, quotes[:_ENCODED])
        return sorted(near, key=_order) + quotes[_ENCODED:]

    def _with_cosine(self, question: str, parents: Sequence[Chunk], quotes: list[Quote]) -> list[Quote]:
        if not quotes:
            return []
        texts = [parents[q.parent].content[q.passage.start : q.passage.end][:300] for q in quotes]
        cosines = self.embedder.encode_documents(texts) @ self.embedder.encode_queries([question])[0]
        return [
            replace(q, score=q.score + COSINE * max(0.0, c), cosine=c)
            for q, c in zip(quotes, cosines.tolist(), strict=True)
        ]

    def _held(self, text: str, weights: dict[str, float]) -> frozenset[str]:
        return self._words(text) & frozenset(weights) if text else frozenset()


def _order(quote: Quote) -> tuple[float, int, int, int]:
    return (-quote.score, quote.parent, quote.passage.start, quote.passage.end)


def _alike(quote: Quote, before: Quote) -> bool:
    """Most of its words, and every number, were quoted before."""
    new = quote.words - before.words
    return len(new) < NEW * len(quote.words) and not any(map(_DIGIT.search, new))


def _whole(chosen: Sequence[Quote], scored: Sequence[Quote]) -> list[Quote]:
    """Where several parts of one list, paragraph or table were chosen, all of it; after steps, the note below them."""
    parts = {"item": ("list", 2), "sentence": ("paragraph", 2), "row": ("table", 3)}
    counts = Counter((q.parent, q.passage.block, q.passage.kind) for q in chosen)
    whole = {(q.parent, q.passage.block, q.passage.kind): q for q in scored}
    out: dict[Quote, None] = {}
    for quote in chosen:
        kind, least = parts.get(quote.passage.kind, ("", 99))
        enough = counts[quote.parent, quote.passage.block, quote.passage.kind] >= least
        quote = whole.get((quote.parent, quote.passage.block, kind), quote) if enough else quote
        out[quote] = None
        note = whole.get((quote.parent, quote.passage.block + 1, "note"))
        if quote.passage.kind == "list" and quote.passage.steps > 1 and note:
            out[note] = None
    return list(out)


def _fit(question: str, text: str) -> float:
    """What the passage offers of the kind that the question asks for."""
    fit = NUMBER if _NUMBER.search(question) and _DIGIT.search(_STEP.sub("", text)) else 0.0
    return fit + (REMEDY if _TROUBLE.search(question) and _REMEDY.match(text) else 0.0)


def _factor(question: str, passage: Passage, rank: int) -> float:
    """By kind of passage; steps count most when they are asked for and stand in one of the best parents."""
    if passage.kind == "list" and passage.steps > 1:
        if _STEPS.search(question) and not _NUMBER.search(question) and rank < 3:
            return STEPS
        return 1.0 if _TROUBLE.search(question) else _KIND["list"]
    if passage.kind in ("list", "table") and _ALL.search(question):
        return ALL
    return 1.1 if passage.kind == "paragraph" and passage.header else _KIND[passage.kind]

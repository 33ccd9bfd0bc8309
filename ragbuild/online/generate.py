"""Generation: parents and the prompt give an answer with citations that point at what they quote.

The offline generator is extractive: it quotes what the parents say and invents nothing. A chat endpoint writes an
answer from the same parents; its citations are checked against them. Both abstain when the evidence is weak, judged on
coverage and cosine that are not normalised within the question.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from pydantic import BaseModel

from ragbuild.core.config import GenerateConfig
from ragbuild.core.errors import RagbuildError
from ragbuild.core.records import Candidate, Chunk, Citation, Document
from ragbuild.core.text import language_of
from ragbuild.index.versions import IndexVersion
from ragbuild.models.embedders import Embedder
from ragbuild.models.llm import ChatClient, UnparsedAnswer, parse_json
from ragbuild.offline.prompts import PromptTemplate, check_citations, citations_in
from ragbuild.online.extract import Extractor, Quote
from ragbuild.online.passages import Passage, passages, readable

PART_COSINE = 0.34  # from here on a passage is near enough to a part of a compound question to answer it


@dataclass(frozen=True)
class Evidence:
    """What the generator is given: the Top-M children, their parents in order, and the sub-questions."""

    query: str
    questions: tuple[str, ...]
    top_m: list[Candidate]
    parents: list[Chunk]


@dataclass(frozen=True)
class Draft:
    """A generator's output. `text` is empty when it abstains."""

    text: str
    citations: list[Citation]
    notes: dict[str, object] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


class Generator(Protocol):
    """Evidence to a draft of an answer; `stand_in` for a model that can write."""

    name: str
    stand_in: bool

    def __call__(self, evidence: Evidence) -> Draft: ...


class ExtractiveGenerator:
    """Quotes the sentences, steps or table rows of the parents that answer; a stand-in for a language model."""

    name, stand_in = "extractive", True

    def __init__(self, version: IndexVersion, embedder: Embedder, config: GenerateConfig) -> None:
        self.version, self.config = version, config
        self.extract = Extractor(version, embedder)
        self._newer = newer_versions(version.documents)

    def __call__(self, evidence: Evidence) -> Draft:
        chosen: list[Quote] = []
        unanswered = []
        limit = max(1, self.config.max_quotes // len(evidence.questions))
        for question in evidence.questions:
            # the reranker's scores tell how parents fit the whole question, not a part of it
            ranked = evidence.top_m if len(evidence.questions) == 1 else []
            quotes = self.extract(question, evidence.parents, ranked, limit)
            if len(evidence.questions) > 1 and not self._supported(question, quotes):
                unanswered.append(question)
            else:
                chosen += [q for q in quotes if not any(q.overlaps(c) for c in chosen)]
        if not chosen:
            return Draft("", [])
        first = {q.parent: i for i, q in reversed(list(enumerate(chosen)))}
        chosen = sorted(chosen, key=lambda q: (first[q.parent], q.passage.start))
        lines = [self._line(q, evidence.parents[q.parent]) for q in chosen]
        zh = language_of(evidence.query) == "zh"
        lines += [
            f"现有文档没有回答：“{q}”。" if zh else f"The documents at hand do not answer: “{q}”." for q in unanswered
        ]
        citations = [
            cite(self.version, evidence.parents[q.parent], q.parent + 1, q.passage.start, q.passage.end) for q in chosen
        ]
        return Draft("\n".join(lines), citations, {"quotes": len(chosen), "unanswered": unanswered})

    def _supported(self, question: str, quotes: Sequence[Quote]) -> bool:
        """Is a sub-question answered? A passage holds less than a whole child, so half the coverage is asked of it."""
        weights = self.extract.weights(question)
        return any(
            sum(weights[t] for t in q.held) >= self.config.abstain_coverage / 2 or q.cosine >= PART_COSINE
            for q in quotes
        )

    def _line(self, quote: Quote, parent: Chunk) -> str:
        """A quote as a line of the answer with its citation; an older version says so and names the current one."""
        text, old = readable(parent.content, quote.passage), ""
        if parent.status != "active":
            newer = self._newer.get(parent.doc_key, "")
            if parent.language == "zh":
                old = f"（{parent.doc_version} 旧版本，仅供参考{f'，现行版本为 {newer}' if newer else ''}）"
            else:
                old = f"[{parent.doc_version}, older version{f'; the current one is {newer}' if newer else ''}] "
        mark = f"^{quote.parent + 1}^"
        return f"{old}{text}\n{mark}" if text.endswith("```") else f"{old}{text} {mark}"


def newer_versions(documents: Sequence[Document]) -> dict[str, str]:
    """For the key of each older document, the version of the active one that replaced it."""
    newer = {}
    for old in documents:
        for new in documents:
            same = (new.kb, new.doc_id) == (old.kb, old.doc_id) or new.supersedes == old.key
            if old.status != "active" and new.status == "active" and same:
                newer[old.key] = new.doc_version
    return newer


def cite(version: IndexVersion, parent: Chunk, number: int, start: int, end: int) -> Citation:
    """A citation of ``parent.content[start:end]``; the page is that of the child which holds the quote's start."""
    at = parent.span[0] + start
    children = version.children(version.rows_of(parent.child_ids)) if parent.child_ids else []
    page = max((c.page for c in children if c.span[0] <= at < c.span[1]), default=parent.page)
    document = next((d for d in version.documents if d.key == parent.doc_key), None)
    return Citation(
        number=number, chunk_id=parent.chunk_id, doc_id=parent.doc_id, doc_version=parent.doc_version,
        title=document.title if document else parent.doc_source, doc_source=parent.doc_source, status=parent.status,
        chapter=parent.chapter, section=parent.section or parent.chapter, page=page, quote=parent.content[start:end],
    )  # fmt: skip


class ChatGenerator:
    """Writes an answer with a chat endpoint; when that fails, the extractive generator answers, with a warning."""

    stand_in = False

    def __init__(self, client: ChatClient, prompt: PromptTemplate, fallback: ExtractiveGenerator) -> None:
        self.client, self.prompt, self.fallback = client, prompt, fallback
        self.name = f"openai:{client.config.model}"

    def __call__(self, evidence: Evidence) -> Draft:
        version = self.fallback.version
        titles = {d.key: d.title for d in version.documents}
        current = newer_versions(version.documents)
        try:
            completion = self.client.complete(self.prompt.messages(evidence.query, evidence.parents, titles, current))
        except RagbuildError as error:
            draft = self.fallback(evidence)
            notes = draft.notes | {"written_by": self.fallback.name}
            return Draft(draft.text, draft.citations, notes, [f"extractive answer instead of the model's: {error}"])
        text, numbers, removed = check_citations(_unwrapped(completion.text), len(evidence.parents))
        notes = {
            "prompt_version": self.prompt.version, "prompt_tokens": completion.prompt_tokens,
            "completion_tokens": completion.completion_tokens, "retries": completion.retries,
            "removed_citations": removed,
        }  # fmt: skip
        warnings = [f"{removed} citation(s) to documents that were not given were removed"] if removed else []
        return Draft(text, [self._cite(text, n, evidence) for n in numbers], notes, warnings)

    def _cite(self, text: str, number: int, evidence: Evidence) -> Citation:
        """The passage of parent `number` that is nearest to what the answer says before citing it."""
        parent, version = evidence.parents[number - 1], self.fallback.version
        said: set[str] = set()
        position = 0
        for (start, end), numbers in citations_in(text):
            if number in numbers:
                said |= set(version.tokenizer(text[position:start]))
            position = end
        found = [p for p in passages(parent.content) if p.kind not in ("list", "table", "paragraph")] or [
            Passage(0, len(parent.content), "sentence")
        ]
        held = [len(said & set(version.tokenizer(parent.content[p.start : p.end]))) for p in found]
        best = found[int(np.argmax(held))]
        return cite(version, parent, number, best.start, best.end)


class _Wrapped(BaseModel):
    answer: str


def _unwrapped(text: str) -> str:
    """The answer itself, when a model wrapped it in JSON although it was asked for text."""
    if not text.lstrip().startswith(("{", "```")):
        return text
    try:
        return parse_json(text, _Wrapped).answer
    except UnparsedAnswer:
        return text

"""One question's way to an answer: rewrite -> route -> retrieve -> rerank -> parents -> generate.

Each stage's output and time go into the answer's trace. Documents and the question are data: an instruction found in
either changes nothing and is reported.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ragbuild.core.config import Config, ConfigView, Endpoints
from ragbuild.core.errors import UsageError
from ragbuild.core.guard import injections
from ragbuild.core.records import Answer, Candidate, Chunk
from ragbuild.core.store import Workspace
from ragbuild.index.filters import Filter
from ragbuild.index.versions import IndexVersion
from ragbuild.models.assist import ask_rewriter, ask_router
from ragbuild.models.embedders import Embedder, load_embedder
from ragbuild.models.llm import ChatClient
from ragbuild.models.rerankers import Reranker, load_reranker
from ragbuild.offline.prompts import PromptTemplate
from ragbuild.online.answerable import abstention, weak
from ragbuild.online.generate import ChatGenerator, Evidence, ExtractiveGenerator, Generator
from ragbuild.online.rerank import rerank, to_parents
from ragbuild.online.retrieve import Retrieval, Retriever
from ragbuild.online.rewrite import Rewriter, RewriteResult
from ragbuild.online.route import Router, Routing


@dataclass(frozen=True)
class Found:
    """What retrieval gives for a question, stage by stage."""

    rewritten: RewriteResult
    routing: Routing
    retrieval: Retrieval
    ranked: list[Candidate]  # all candidates, reranked
    top_m: list[Candidate]
    parents: list[Chunk]
    seconds: dict[str, float]
    warnings: list[str] = field(default_factory=list)


class Pipeline:
    """Answers questions from one index version of a workspace. Made once, used for many questions."""

    def __init__(self, version: IndexVersion, config: Config | ConfigView, embedder: Embedder | None = None) -> None:
        self.version, self.config = version, config
        encoded_with = version.manifest["embedder"]["name"]
        if embedder is not None and embedder.name != encoded_with:
            raise UsageError(
                f"this index was encoded with '{encoded_with}' and can't be searched with '{embedder.name}'"
            )
        self._embedder = embedder

    @classmethod
    def open(cls, workspace: str | Path | Workspace, config: Config | ConfigView) -> Pipeline:
        """The published version of a workspace. Raises InputRefused when there is none."""
        root = workspace.root if isinstance(workspace, Workspace) else Path(workspace)
        return cls(IndexVersion(root / "indexes"), config)

    @cached_property
    def embedder(self) -> Embedder:
        """The embedder that this version was encoded with; vectors of two models never meet.

        Raises UsageError when the configuration names another one.
        """
        if self._embedder is not None:
            return self._embedder
        name = self.version.manifest["embedder"]["name"]
        if self.config.embedder.name not in ("auto", name):
            raise UsageError(
                f"the index was encoded with '{name}' and can't be searched with '{self.config.embedder.name}'; "
                "'ragbuild rebuild' encodes every chunk again"
            )
        return load_embedder(name, self.config.embedder)

    @cached_property
    def rewriter(self) -> Rewriter:
        propose = ask_rewriter(self._chat) if self.config.rewrite.use_llm else None
        return Rewriter(self.version.entries, self.config.rewrite, self.version.vocabulary, propose)

    @cached_property
    def router(self) -> Router:
        ask = ask_router(self._chat) if self.config.route.use_llm else None
        return Router(self.version.documents, self.version.entries, self.config.route, ask)

    @cached_property
    def retriever(self) -> Retriever:
        return Retriever(self.version, self.embedder, self.config.retrieve)

    @cached_property
    def reranker(self) -> Reranker:
        return load_reranker(self.config.rerank, self.config.embedder.local_files_only)

    @cached_property
    def _chat(self) -> ChatClient:
        return ChatClient(self.config.llm, Endpoints.from_env())

    @cached_property
    def generator(self) -> Generator:
        extractive = ExtractiveGenerator(self.version, self.embedder, self.config.generate)
        if self.config.generate.generator == "extractive":
            return extractive
        return ChatGenerator(self._chat, PromptTemplate.parse(self.version.prompt).validate(), extractive)

    def retrieve(self, query: str, where: Filter | None = None) -> Found:
        """Rewrite, route, retrieve and rerank one question.

        Raises UsageError for a question without a letter or digit.
        """
        query, warnings = self._checked(query)
        start = time.perf_counter()
        rewritten = self.rewriter(query)
        seconds = {"rewrite": time.perf_counter() - start}
        start = time.perf_counter()
        routing = self.router(rewritten.query, where)
        seconds["route"] = time.perf_counter() - start
        retrieval = self.retriever(rewritten.sub_questions, routing.where)
        seconds.update(retrieval.seconds)
        start = time.perf_counter()
        ranked = rerank(rewritten.query, retrieval.candidates, self.reranker)
        top_m = ranked[: self.config.rerank.top_m]
        parents = to_parents(top_m, self.version)
        seconds["rerank"] = time.perf_counter() - start
        return Found(rewritten, routing, retrieval, ranked, top_m, parents, seconds, warnings)

    def ask(self, query: str, where: Filter | None = None) -> Answer:
        """The whole way. Raises UsageError for a question without a letter or digit."""
        start = time.perf_counter()
        query = query.encode("utf-8", "replace").decode()
        found = self.retrieve(query, where)
        warnings = list(found.warnings)
        for parent in found.parents:
            warnings += [
                f"{parent.doc_source}, page {parent.page}: text {reason}; kept as data"
                for reason in injections(parent.content)
            ]
        evidence = Evidence(found.rewritten.query, found.rewritten.asked, found.top_m, found.parents)
        began = time.perf_counter()
        is_weak, figures = weak(evidence, self.config.generate, self.version)
        draft = None if is_weak or not found.parents else self.generator(evidence)
        notes = draft.notes if draft else {}
        answered = draft is not None and bool(draft.text)
        found.seconds["generate"] = time.perf_counter() - began
        found.seconds["total"] = time.perf_counter() - start
        return Answer(
            query=query,
            text=draft.text if draft and answered else abstention(evidence, self.version),
            status="answered" if answered else "abstained",
            citations=tuple(draft.citations) if draft and answered else (),
            parents=tuple(found.parents),
            warnings=tuple(warnings + (draft.warnings if draft else [])),
            generator=str(notes.get("written_by", self.generator.name)),
            trace=trace(found, self) | {"evidence": figures, "generation": notes},
        )

    def _checked(self, query: str) -> tuple[str, list[str]]:
        limit, warnings = self.config.retrieve.max_query_chars, []
        query = query.encode("utf-8", "replace").decode()  # a terminal may hand on bytes that are no UTF-8
        if not any(c.isalnum() for c in query[:limit]):
            raise UsageError("the question is empty: it holds no letter and no digit. Ask it in words.")
        if len(query) > limit:
            warnings.append(
                f"the question has {len(query):,} characters; the first {limit:,} were used (retrieve.max_query_chars)"
            )
            query = query[:limit]
        warnings += [f"the question {reason}; it is treated as data" for reason in injections(query)]
        return query, warnings


def trace(found: Found, pipeline: Pipeline) -> dict[str, Any]:
    """What each stage did, as plain data."""
    rewritten = found.rewritten
    return {
        "index_version": pipeline.version.name,
        "embedder": pipeline.embedder.name,
        "reranker": pipeline.reranker.name + (" (stand-in)" if pipeline.reranker.stand_in else ""),
        "rewrite": {
            "query": rewritten.query,
            "sub_questions": list(rewritten.sub_questions),
            "rewrites": [asdict(r) for r in rewritten.rewrites],
        },
        "route": {
            "filter": {k: list(v) for k, v in found.routing.where.conditions().items()},
            "decisions": [asdict(d) for d in found.routing.decisions],
        },
        "retrieve": {
            "candidates": len(found.retrieval.candidates),
            "routes": {r: [len(x) for x in lists] for r, lists in found.retrieval.routes.items()},
        },
        "rerank": [
            {
                "chunk_id": c.hit.chunk_id, "score": round(c.score or 0.0, 6), "fused_rank": c.hit.rank,
                "routes": {r: h.rank for r, h in c.hit.routes.items()},
            }
            for c in found.top_m
        ],
        "seconds": {stage: round(s, 5) for stage, s in found.seconds.items()},
    }  # fmt: skip

"""Computes a sweep: one search of each question with each filter, and two measurements that need more than arrays, the
rerank stage's time and answers at some values of Top-M.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from ragbuild.core.config import TuneConfig
from ragbuild.core.errors import InputRefused
from ragbuild.core.records import Candidate, Document, Hit
from ragbuild.core.store import sha256
from ragbuild.evaluate.answers import judged_of
from ragbuild.evaluate.judge import RubricJudge, overall
from ragbuild.evaluate.sweep import Sweep
from ragbuild.index.filters import Filter
from ragbuild.index.versions import IndexVersion
from ragbuild.models.embedders import Embedder
from ragbuild.offline.evalset import EvalCase
from ragbuild.online.pipeline import Pipeline
from ragbuild.online.rerank import rerank
from ragbuild.online.retrieve import Retriever
from ragbuild.online.rewrite import RewriteResult

Say = Callable[[str], None]
TIMED, ANSWERED = 9, 12  # questions whose rerank stage is timed, and whose answers are read
READ_AT = (1, 2, 4, 8, 16)  # Top-M at which answers are read


def answerable(cases: Sequence[EvalCase]) -> list[EvalCase]:
    """The cases that an index can answer: those that a sweep may ask."""
    return [case for case in cases if case.answerable and case.groups]


def compute_sweep(
    pipeline: Pipeline, cases: Sequence[EvalCase], tune: TuneConfig, progress: Say = lambda text: None
) -> Sweep:
    """Search every answerable case (at most ``tune.max_questions``, chosen by a hash of their ids) once with each
    filter, and measure what the rerank stage takes and what the extractive generator answers.

    Raises InputRefused when no case can be answered from this index.
    """
    asked = sorted(answerable(cases), key=lambda c: sha256(c.id))[: tune.max_questions]
    if not asked:
        raise InputRefused("no question has its answer in this index; give an eval set for this corpus to tune on")
    version, config = pipeline.version, pipeline.config
    depth = max(*tune.top_n, config.retrieve.top_n)
    documents = {d.key: d for d in version.documents}
    parents = version.all_parents()
    parent_of = np.full(len(version), -1, np.int32)
    for number, parent in enumerate(parents):
        parent_of[version.rows_of(parent.child_ids)] = number
    rewritten = [pipeline.rewriter(c.query) for c in asked]
    parts = [r.sub_questions for r in rewritten]
    n_parts = max(map(len, parts))
    embedder = _Once(pipeline.embedder)
    vectors = iter(embedder.encode_queries([p for some in parts for p in some]))
    filters = [_filters(pipeline, r.query, c, documents) for r, c in zip(rewritten, asked, strict=True)]
    names = [n for n in filters[0] if n == "as routed" or any(f[n] != f["as routed"] for f in filters)]
    columns: list[dict[str, np.ndarray]] = []
    for n, (some, wheres) in enumerate(zip(parts, filters, strict=True)):
        mine, under = [next(vectors) for _ in some], [wheres[name] for name in names]
        columns.append(_search(pipeline, rewritten[n].query, some, mine, under, depth, n_parts))
        if (n + 1) % 50 == 0 or n + 1 == len(asked):
            progress(f"searched {n + 1} of {len(asked)} questions, each with {len(names)} filter(s)")
    rows = _stack([c.pop("rows") for c in columns], -1)
    arrays = {name: _stack([c[name] for c in columns], 0) for name in columns[0]}
    arrays["parents"] = np.where(rows >= 0, parent_of[rows], -1)
    arrays["parent_tokens"] = np.array([p.n_tokens for p in parents], np.int32)
    arrays |= _truth(asked, version, parent_of, rows)
    facts = {
        "queries": [c.query for c in asked], "ids": [c.id for c in asked], "half": [c.half for c in asked],
        "kb": [documents[c.documents[0]].kb for c in asked], "filters": names, "children": len(version),
        "documents": len(documents), "corpus": "", "reranker": pipeline.reranker.name,
        "stand_in": pipeline.reranker.stand_in, "weights": config.rerank.weights.model_dump(),
        "embedder": pipeline.embedder.name,
        "answers": {}, "tolerance": tune.tolerance, "max_share": tune.max_share,
        "top_n": sorted(tune.top_n), "top_m": list(range(1, tune.top_m_max + 1)),
        "now": {"top_n": config.retrieve.top_n, "top_m": config.rerank.top_m, "rrf_k": config.retrieve.rrf_k,
                "routes": list(config.retrieve.routes)},
    }  # fmt: skip
    sweep = Sweep(facts, arrays)
    timed = list(zip(rewritten, filters, strict=True))[:TIMED]
    facts["seconds"] = [
        _latency(pipeline, embedder, [(r, f["as routed"]) for r, f in timed], n) for n in facts["top_n"]
    ]
    progress(f"timed the rerank stage ({facts['reranker']}) at {len(facts['top_n'])} values of Top-N")
    facts["answers_at"] = chosen = sweep.recommend()[0].value
    read = [asked[i] for i in np.flatnonzero(sweep.of("tuning"))[:ANSWERED]]
    facts["answers"] = {str(m): _answers(pipeline, embedder, read, chosen, m) for m in READ_AT if m <= tune.top_m_max}
    progress(f"judged answers to {len(read)} questions at {len(facts['answers'])} values of Top-M")
    return sweep


def _filters(
    pipeline: Pipeline, query: str, case: EvalCase, documents: dict[str, Document]
) -> dict[str, Filter]:  # fmt: skip
    """The filters to compare, by name: what routing sets, none, and what a perfect routing would add."""
    routed = pipeline.router(query).where
    out = {"as routed": routed, "not routed": Filter()}
    for field in ("kb", "doc_type"):
        right = tuple(dict.fromkeys(getattr(documents[key], field) for key in case.documents))
        if len(pipeline.version.values(field)) > 1:
            out[f"right {field}"] = routed.with_(**{field: right})
    return out


def _search(
    pipeline: Pipeline, query: str, parts: Sequence[str], vectors: Sequence[np.ndarray], wheres: Sequence[Filter],
    depth: int, n_parts: int,
) -> dict[str, np.ndarray]:  # fmt: skip
    """One question's part of the arrays; `rows` are those of the children found, in the order of ids."""
    version = pipeline.version
    tokens = [version.tokenizer(p) for p in parts]
    done: dict[Filter, list[np.ndarray]] = {}
    for where in wheres:
        if where not in done:
            allowed = version.allowed(where)
            lexical = [version.search_lexical(t, depth, where, allowed)[0] for t in tokens]
            done[where] = [*lexical, *(version.dense.search(v, depth, allowed)[0] for v in vectors)]
    rows = np.unique(np.concatenate([r for lists in done.values() for r in lists]))
    rows = rows[np.argsort(version.id_rank[rows])]
    place = {row: i for i, row in enumerate(rows.tolist())}
    ranks = np.zeros((len(wheres), 2 * n_parts, len(rows)), np.uint16)
    for f, where in enumerate(wheres):
        for n, found in enumerate(done[where]):
            route, part = divmod(n, len(parts))
            ranks[f, route * n_parts + part, [place[r] for r in found.tolist()]] = np.arange(1, len(found) + 1)
    chunks, held = (
        version.children_and_tokens(rows) if pipeline.reranker.name not in ("features", "none") else ([], None)
    )
    out = {"rows": rows, "ranks": ranks, "scores": np.zeros(len(rows))}
    held = version.tokens(rows) if held is None else held
    for name, kind in (("lexical", np.float64), ("coverage", np.float64), ("cosine", np.float32)):
        out[name] = np.zeros((n_parts, len(rows)), kind)
    for part, (t, v) in enumerate(zip(tokens, vectors, strict=True)):
        for name, values in version.features(t, v, rows, held).items():
            out[name][part] = values
    if chunks:
        hits = [Candidate(hit=Hit(chunk_id=c.chunk_id, rank=1, score=0.0), chunk=c) for c in chunks]
        out["scores"] = np.asarray(pipeline.reranker.score(query, hits), np.float64)
    return out


def _stack(parts: Sequence[np.ndarray], fill: float) -> np.ndarray:
    """Arrays of unlike width as one, padded at the end of their last axis (at least one wide)."""
    width = max(1, *(p.shape[-1] for p in parts))
    pad = [[(0, 0)] * (p.ndim - 1) + [(0, width - p.shape[-1])] for p in parts]
    return np.stack([np.pad(p, w, constant_values=fill) for p, w in zip(parts, pad, strict=True)], axis=0)


def _truth(
    asked: Sequence[EvalCase], version: IndexVersion, parent_of: np.ndarray, rows: np.ndarray
) -> dict[str, np.ndarray]:
    """Members of the ground-truth groups, as children (place among the question's columns, or -1) and as parents."""
    child, parent, n = [], [], 0
    for q, case in enumerate(asked):
        seen = set()
        for group in case.groups:
            members = version.rows_of(group)
            n += 1
            child += [(q, n, next(iter(np.flatnonzero(rows[q] == row)), -1)) for row in members]
            above = tuple(dict.fromkeys(parent_of[members].tolist()))
            if above not in seen:
                seen.add(above)
                parent += [(q, n, p) for p in above]
    names = ("case", "group", "place")
    return {f"{kind}_{name}": np.array(column) for kind, table in (("child", child), ("parent", parent))
            for name, column in zip(names, zip(*table, strict=True), strict=True)}  # fmt: skip


def _latency(
    pipeline: Pipeline, embedder: Embedder, questions: Sequence[tuple[RewriteResult, Filter]], top_n: int
) -> float:
    """Median seconds of the rerank stage over some questions: completing the candidates' features and scoring them,
    with the real reranker on real candidates."""
    config = pipeline.config.retrieve.model_copy(update={"top_n": top_n})
    retriever, taken = Retriever(pipeline.version, embedder, config), []
    for rewritten, where in questions:
        found = retriever(rewritten.sub_questions, where)
        start = time.perf_counter()
        rerank(rewritten.query, found.candidates, pipeline.reranker)
        taken.append(time.perf_counter() - start + found.seconds["features"])
    return float(np.median(taken))


def _answers(
    pipeline: Pipeline, embedder: Embedder, cases: Sequence[EvalCase], top_n: int, top_m: int
) -> list[float]:  # fmt: skip
    """The rubric's overall score (a stand-in for a judge) of the extractive generator's answer to each question."""
    changes = {"retrieve.top_n": top_n, "rerank.top_m": top_m, "generate.generator": "extractive"}
    asked, judge = Pipeline(pipeline.version, pipeline.config.with_overrides(changes), embedder), RubricJudge()
    return [overall(judge(judged_of(case, asked.ask(case.query)))) or 0.0 for case in cases]


class _Once:
    """An embedder that encodes no text twice."""

    def __init__(self, embedder: Embedder) -> None:
        self._embedder, self._known = embedder, dict[tuple[str, str], np.ndarray]()
        self.name, self.dim, self.max_tokens = embedder.name, embedder.dim, embedder.max_tokens

    def encode_queries(self, texts: Sequence[str]) -> np.ndarray:
        return self._encode("encode_queries", texts)

    def encode_documents(self, texts: Sequence[str]) -> np.ndarray:
        return self._encode("encode_documents", texts)

    def _encode(self, how: str, texts: Sequence[str]) -> np.ndarray:
        new = [text for text in dict.fromkeys(texts) if (how, text) not in self._known]
        if new:
            self._known |= zip([(how, text) for text in new], getattr(self._embedder, how)(new), strict=True)
        return np.array([self._known[how, text] for text in texts], np.float32).reshape(len(texts), self.dim)

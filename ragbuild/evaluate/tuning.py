"""What a sweep is computed from: a corpus to tune on, its index and questions, and one search of each question.

All of it is made once, kept in the user's cache and reused while libraries, documents, questions and configuration stay
the same.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import ragbuild
from ragbuild.core.config import Config, ConfigView, TuneConfig
from ragbuild.core.errors import InputRefused, UsageError
from ragbuild.core.records import Candidate, Document, Hit
from ragbuild.core.store import cache_dir, hash_path, sha256
from ragbuild.core.text import TokenCounter
from ragbuild.evaluate.answers import judged_of
from ragbuild.evaluate.judge import RubricJudge, overall
from ragbuild.evaluate.runs import load_sets
from ragbuild.evaluate.sweep import Sweep
from ragbuild.index.filters import Filter
from ragbuild.index.versions import IndexVersion, write_version
from ragbuild.models.embedders import Embedder, VectorCache, load_embedder, resolve_auto
from ragbuild.offline.chunk import chunk_corpus
from ragbuild.offline.evalset import EvalCase
from ragbuild.offline.parse.corpus import parse_corpus
from ragbuild.offline.python_docs import installed, write_python_docs
from ragbuild.online.pipeline import Pipeline
from ragbuild.online.rerank import rerank
from ragbuild.online.retrieve import Retriever
from ragbuild.online.rewrite import RewriteResult

Say = Callable[[str], None]
TIMED, ANSWERED = 9, 12  # questions whose rerank stage is timed, and whose answers are read
READ_AT = (1, 2, 4, 8, 16)  # Top-M at which answers are read
_PACKAGE = Path(ragbuild.__file__).parent
# The code that makes an index, and that searches it: when it changes, what the cache holds is made again.
_MADE_BY = ("core/text.py", "index/*.py", "offline/parse/*.py", "offline/python_docs.py", "offline/see_also.py",
            "offline/chunk.py", "offline/sections.py", "offline/packing.py")  # fmt: skip
_SEARCH = ("index/*.py", "models/rerankers.py", "online/*.py", "evaluate/sweep.py", "evaluate/tuning.py")


@dataclass(frozen=True)
class TuningCorpus:
    """An index to tune on, its questions, and a key that changes when either or the configuration does."""

    name: str
    pipeline: Pipeline
    cases: list[EvalCase]
    key: str

    def sweep(self, say: Say = print) -> Sweep:
        """From the cache, or computed and kept there."""
        path = cache_dir("tune") / f"sweep-{self.key}"
        sweep = Sweep.load(path)
        if sweep is None:
            start = time.perf_counter()
            sweep = compute_sweep(self.pipeline, self.cases, self.pipeline.config.tune, say)
            sweep.facts["corpus"] = self.name
            sweep.save(path)
            say(f"sweep computed in {time.perf_counter() - start:.0f} s and kept in the cache")
            _forget(sorted(path.parent.glob("sweep-*")), 12)
        return sweep


def open_corpus(
    config: Config | ConfigView, workspace: Path, expert: Path | None = None, say: Say = print
) -> TuningCorpus:
    """The corpus that ``tune.corpus`` names: ``python-docs``, ``own`` (this workspace; `expert`: its expert set) or a
    folder of documents with an eval set in it.

    Raises UsageError for a folder that is not there, InputRefused for one without documents or questions.
    """
    which = config.tune.corpus
    if which == "own":
        version, places = IndexVersion(workspace / "indexes"), (workspace, expert)
    elif which == "python-docs":
        key = _key(config, installed(), config.tune.min_children)
        folder = _built(f"python-docs-{key}", lambda out: _python_docs(out, config, say), config, say)
        version, places = IndexVersion(folder / "indexes"), (folder / "documents", None)
    else:
        documents = Path(which).expanduser()
        if not documents.is_dir():
            raise UsageError(f"tune.corpus takes python-docs, own or a folder of documents; there is no folder {which}")
        folder = _built(f"folder-{_key(config, hash_path(documents))}", lambda out: documents, config, say)
        places = (documents, documents / "expert_eval_set.json")
        version = IndexVersion(folder / "indexes")
    sets = load_sets(version, *places)
    cases = [case for some in sets for case in some.cases]
    sections = ("tune", "retrieve", "rewrite", "route", "rerank", "generate")
    held = {name: getattr(config, name).model_dump(mode="json") for name in sections}
    key = sha256(json.dumps([version.digest, [s.hash for s in sets], held, _code(*_SEARCH)], sort_keys=True))[:16]
    return TuningCorpus(which, Pipeline(version, config), cases, key)


def _python_docs(out: Path, config: Config | ConfigView, say: Say) -> Path:
    made = write_python_docs(out / "documents", config.tune.min_children, config.chunk)
    say(f"python-docs: {made['documents']} documents from {', '.join(made['versions'])}, {made['questions']} questions")
    return out / "documents"


def _built(name: str, documents: Callable[[Path], Path], config: Config | ConfigView, say: Say) -> Path:
    """The cache's folder `name` with an index of the documents; made in a temporary folder and renamed when whole."""
    from filelock import FileLock

    base = cache_dir("tune")
    folder = base / name
    with FileLock(base / f".{name}.lock"):  # a second process waits for the first one's result
        if not (folder / "indexes" / "CURRENT").is_file():
            say("making the corpus to tune on: once, then it is reused")
            with tempfile.TemporaryDirectory(dir=base) as temporary:
                new = Path(temporary) / "new"
                _index(documents(new), new / "indexes", config, say)
                os.replace(new, folder)
            _forget(sorted(base.glob(f"{name.rsplit('-', 1)[0]}-*")), 3)
    return folder


def _index(folder: Path, indexes: Path, config: Config | ConfigView, say: Say) -> None:
    parsed = parse_corpus(folder, parse=config.parse, corpus=config.corpus)
    if not parsed.documents:
        raise InputRefused(f"no document in {folder} can be read; tune.corpus takes a folder of documents")
    documents = [entry.document for entry in parsed.documents]
    counter = TokenCounter(config.chunk.tokenizer)
    items = ((e.document, e.parsed.markdown, e.parsed.page_of) for e in parsed.documents)
    chunks = chunk_corpus(items, config=config.chunk, counter=counter)
    name, why = config.embedder.name, "named in the configuration"
    if name == "auto":
        name, why = resolve_auto(d.language for d in documents)
    embedder = load_embedder(name, config.embedder)
    total, start = chunks.stats["children"], time.perf_counter()
    say(f"encoding {total:,} children with {name} (those that the cache holds are not encoded again)")
    write_version(
        indexes, chunks.chunks, documents, [], config=config, encode=VectorCache(embedder).encode,
        embedder={"name": name, "dim": embedder.dim, "why": why},
        progress=lambda n: say(f"  {n:,} of {total:,} children, {time.perf_counter() - start:.0f} s") if n else None,
    )  # fmt: skip


def _key(config: Config | ConfigView, *parts: Any) -> str:
    """Names what an index is made of: documents, configuration, and the code that makes it."""
    held = [
        getattr(config, s).model_dump(mode="json") for s in ("chunk", "lexical", "dense", "embedder", "parse", "corpus")
    ]
    return sha256(json.dumps([*parts, held, _code(*_MADE_BY)], sort_keys=True))[:16]


def _code(*patterns: str) -> str:
    """Hash of the package's files that match."""
    return sha256("".join(hash_path(f) for pattern in patterns for f in sorted(_PACKAGE.glob(pattern))))


def _forget(paths: Sequence[Path], keep: int) -> None:
    """Remove all but the newest of the cache's entries."""
    for path in sorted(paths, key=lambda p: p.stat().st_mtime)[:-keep]:
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def compute_sweep(
    pipeline: Pipeline, cases: Sequence[EvalCase], tune: TuneConfig, progress: Say = lambda text: None
) -> Sweep:
    """Search every answerable case (at most ``tune.max_questions``, chosen by a hash of their ids) once with each
    filter, and measure what the rerank stage takes and what the extractive generator answers.

    Raises UsageError when no case can be answered from this index.
    """
    asked = sorted((c for c in cases if c.answerable and c.groups), key=lambda c: sha256(c.id))[: tune.max_questions]
    if not asked:
        raise UsageError(
            "there is no question with an answer in this index to tune on; give an eval set for this corpus"
        )
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

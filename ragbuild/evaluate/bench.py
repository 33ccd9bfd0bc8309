"""Retrieval on public sets in BEIR's layout: what each route finds, and what the pipeline makes of them.

Every document becomes one child chunk; there is no dictionary, rewriting or routing (these sets have no fields of
documents), so this measures the lexical index, the dense index, RRF and the reranker. Whether the routes help each
other is read from paired differences a query, and the advice with a result is drawn from these.
"""

from __future__ import annotations

import math
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ragbuild.core.config import Config
from ragbuild.core.errors import InputRefused, UsageError
from ragbuild.core.records import Chunk
from ragbuild.core.text import language_of
from ragbuild.evaluate.beir import flat_chunks, read_qrels, read_rows, write_runs
from ragbuild.evaluate.metrics import mean, paired_test, per_query
from ragbuild.index.filters import EVERYTHING
from ragbuild.index.staging import write_version
from ragbuild.index.versions import IndexVersion
from ragbuild.models.embedders import Embedder, VectorCache, load_embedder, resolve_auto
from ragbuild.models.rerankers import Reranker, load_reranker
from ragbuild.online.rerank import rerank
from ragbuild.online.retrieve import Retriever, rrf

if TYPE_CHECKING:
    from rich.table import Table

ROUTES = ("lexical", "dense", "hybrid", "rerank")
METRICS = ("ndcg@10", "recall@10", "recall@100", "mrr@10")
DEPTH = 100  # of each route and of the fused list; the reranker gets retrieve.top_n
Progress = Callable[[int, int, str], None]  # done, total, what


def embedder_for(texts: Iterable[str], config: Config) -> Embedder:
    """The configured embedder; ``auto`` is resolved by the languages of all texts, as for a corpus."""
    name = config.embedder.name
    return load_embedder(resolve_auto(map(language_of, texts))[0] if name == "auto" else name, config.embedder)


class Searcher:
    """Answers all queries of a set from one index, route by route. Queries are encoded once, in one batch."""

    def __init__(
        self, version: IndexVersion, config: Config, queries: Sequence[str], embedder: Embedder | None = None,
        reranker: Reranker | None = None,
    ) -> None:  # fmt: skip
        """Without an `embedder` there is the lexical route only, without a `reranker` no route ``rerank``."""
        self.version, self.config, self.queries, self._reranker = version, config, queries, reranker
        _ = version.lexical, version.dense  # opened before a clock runs
        start = time.perf_counter()
        self._vectors = dict(zip(queries, embedder.encode_queries(queries), strict=True)) if embedder else {}
        self._encoding = time.perf_counter() - start
        self._rankings: dict[str, list[list[str]]] = {}
        self.seconds: dict[str, float] = {}  # by route: what all queries need to get that route's list

    def encode_queries(self, texts: Sequence[str]) -> np.ndarray:
        """The vectors made before, for the retriever."""
        return np.array([self._vectors[text] for text in texts])

    def ranking(self, route: str) -> list[list[str]]:
        """Ids, best first, of every query: at most `DEPTH` by lexical, dense and hybrid, Top-N by rerank."""
        if route not in self._rankings:
            parts = [self.ranking(r) for r in self.config.retrieve.routes] if route == "hybrid" else []
            seconds = sum(self.seconds[r] for r in self.config.retrieve.routes) if parts else 0.0
            start = time.perf_counter()
            if route == "lexical":
                found = [self._lexical(query) for query in self.queries]
            elif route == "dense":
                found = [self._ids(self.version.dense.search(self._vectors[q], DEPTH)[0]) for q in self.queries]
            elif route == "hybrid":
                k = self.config.retrieve.rrf_k
                found = [[i for i, _ in rrf(lists, k)[:DEPTH]] for lists in zip(*parts, strict=True)]
            else:
                found = self.pipeline(self.config)
            seconds += time.perf_counter() - start
            self.seconds[route] = seconds + (self._encoding if route in ("dense", "rerank") else 0.0)
            self._rankings[route] = found
        return self._rankings[route]

    def pipeline(self, config: Config) -> list[list[str]]:
        """Top-N of every query, reranked, as `config.retrieve` has it."""
        retriever = Retriever(self.version, self, config.retrieve)  # type: ignore[arg-type]
        out = []
        for query in self.queries:
            candidates = retriever([query], EVERYTHING).candidates
            out.append([c.hit.chunk_id for c in rerank(query, candidates, self._reranker)])  # type: ignore[arg-type]
        return out

    def _lexical(self, query: str) -> list[str]:
        tokens = self.version.tokenizer(query)
        return self._ids(self.version.search_lexical(tokens, DEPTH, EVERYTHING, None)[0])

    def _ids(self, rows: np.ndarray) -> list[str]:
        return [i.decode() for i in self.version.ids[rows]]


@contextmanager
def indexed(
    chunks: Iterable[Chunk], config: Config, embedder: Embedder | None, progress: Callable[[int], None] | None = None
) -> Iterator[IndexVersion]:
    """An index of these chunks in a temporary folder; document vectors come from the user's cache where they are."""
    encode = VectorCache(embedder).encode if embedder else (lambda texts: np.ones((len(texts), 1), np.float32))
    about = {"name": embedder.name, "dim": embedder.dim} if embedder else {"name": "none", "dim": 1}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_version(root, chunks, [], [], config=config, encode=encode, embedder=about, progress=progress)
        yield IndexVersion(root)


def bench(
    folder: Path,
    config: Config,
    routes: Sequence[str] = ROUTES,
    progress: Progress | None = None,
    runs: Path | None = None,
) -> dict[str, Any]:
    """`METRICS` of the asked routes on the judged queries of one set, with speed, memory and advice.

    ``hybrid`` fuses `retrieve.routes`, ``rerank`` is the pipeline (its recall@100 is that of Top-N). `runs`: a folder
    for TREC files. Memory is the peak while indexing and searching over what imports, models and the set itself take;
    sets measured in one process reuse what earlier ones have freed, so only the first one's figure is its own.
    Raises InputRefused for a malformed set, UsageError for an unknown route.
    """
    if not routes or set(routes) - set(ROUTES):
        raise UsageError(f"--routes takes {', '.join(ROUTES)}; got '{', '.join(routes)}'")
    tell = progress or (lambda done, total, what: None)
    corpus, asked, qrels = read_rows(folder / "corpus.jsonl"), read_rows(folder / "queries.jsonl"), read_qrels(folder)
    queries = {query: text for query, (_, text) in asked.items() if query in qrels}
    if not queries:
        raise InputRefused(f"{folder}: no query of queries.jsonl is judged in its qrels; do their ids agree?")
    truths = [qrels[query] for query in queries]
    relevant = [i for truth in truths for i, grade in truth.items() if grade > 0]
    if not set(relevant) & set(corpus):
        raise InputRefused(f"{folder}: its qrels hold no relevant document of corpus.jsonl; do their ids agree?")
    routes = [route for route in ROUTES if route in routes]
    encodes = bool({"dense", "rerank"} & set(routes)) or ("hybrid" in routes and "dense" in config.retrieve.routes)
    embedder = embedder_for((text for _, text in corpus.values()), config) if encodes else None
    if embedder:
        embedder.encode_queries(["warm up 预热"])
    reranker = load_reranker(config.rerank, config.embedder.local_files_only) if "rerank" in routes else None
    chunks = flat_chunks((i, title, text, (0, max(1, len(text))), i) for i, (title, text) in corpus.items())
    with (
        _memory() as peak,
        indexed(chunks, config, embedder, lambda n: tell(n, len(corpus), f"{folder.name}: documents")) as version,
    ):
        search = Searcher(version, config, list(queries.values()), embedder, reranker)
        rankings = {}
        for number, route in enumerate(routes):
            tell(number, len(routes), f"{folder.name}: {route}")
            rankings[route] = search.ranking(route)
        memory = peak()
        values = {route: per_query(found, truths, (10, 100)) for route, found in rankings.items()}

        def alone(route: str) -> np.ndarray:
            found = search.pipeline(config.with_overrides({"retrieve.routes": [route]}))
            return per_query(found, truths, (10,))[METRICS[0]]

        advice = advise({route: v[METRICS[0]] for route, v in values.items()}, config, alone)
    if runs:
        write_runs(runs / folder.name, list(queries), rankings, truths)
    return {
        "set": folder.name,
        "documents": len(corpus),
        "queries": len(queries),
        "unjudged": len(asked) - len(queries),
        "unmeasured": mean(values[routes[0]][METRICS[0]]).unmeasured,  # judged, but nothing is relevant
        "relevant_not_in_corpus": sum(i not in corpus for i in relevant),
        "embedder": embedder.name if embedder else None,
        "reranker": reranker.name if reranker else None,
        "stand_in": bool(reranker and reranker.stand_in),
        "routes": {route: {m: _rounded(mean(v[m]).mean) for m in METRICS} for route, v in values.items()},
        "queries_per_second": {route: round(len(queries) / search.seconds[route], 1) for route in routes},
        "memory_mb": round(memory, 1),
        "advice": advice,
    }


def _rounded(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 4)


@contextmanager
def _memory() -> Iterator[Callable[[], float]]:
    """Gives a function: the peak of this process's resident size since entry, over that at entry, in MiB; sampled."""
    import psutil

    process, done = psutil.Process(), threading.Event()
    sizes = [process.memory_info().rss] * 2  # at entry, largest since

    def watch() -> None:
        while not done.wait(0.02):
            sizes[1] = max(sizes[1], process.memory_info().rss)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield lambda: (max(sizes[1], process.memory_info().rss) - sizes[0]) / 2**20
    finally:
        done.set()


def advise(
    scores: Mapping[str, np.ndarray], config: Config, pipeline_with: Callable[[str], np.ndarray]
) -> dict[str, Any]:
    """What nDCG@10 a query says about the configured routes: comparisons with the best single one, and what to set.

    `scores`: by route. `pipeline_with(route)`: the reranked pipeline's values with this route alone; they are measured
    where fusion or the pipeline is below one route, and a route that then adds nothing is advised against. A difference
    counts when its 95 % paired interval is on one side of zero and p <= 0.05: where few queries differ at all the
    interval alone is too narrow. `recommended` holds the configuration keys to change; empty: leave all as it is.
    """
    single, fused = ([r for r in part if r in scores] for part in (ROUTES[:2], ROUTES[2:]))
    if not single or not fused:
        return {"text": "To advise, a single route and hybrid or rerank have to be measured.", "recommended": {}}
    best, last = max(single, key=lambda r: mean(scores[r]).mean), fused[-1]

    def compare(a: np.ndarray, b: np.ndarray) -> dict[str, Any]:
        d, low, high, p = paired_test(a, b, config.evaluate.bootstrap, config.seed)
        sign = 0 if p > 0.05 or low <= 0 <= high else 1 if d > 0 else -1
        text = f"{d:+.3f} nDCG@10, 95 % interval {low:+.3f} to {high:+.3f}, p = {p:.2g}, n = {mean(a - b).n}"
        figures = {"difference": _rounded(d), "low": _rounded(low), "high": _rounded(high), "p": _rounded(p)}
        return {**figures, "sign": sign, "text": text}

    tests = {route: compare(scores[route], scores[best]) for route in fused}
    names = {"hybrid": "Fusion by RRF", "rerank": "The reranked pipeline"}
    verbs = {1: "is above", 0: "does not differ significantly from", -1: "is below"}
    text = ". ".join(f"{names[r]} {verbs[t['sign']]} the {best} route alone ({t['text']})" for r, t in tests.items())
    recommended: dict[str, Any] = {}
    if any(t["sign"] < 0 for t in tests.values()):
        weak = " and ".join(r for r in config.retrieve.routes if r != best)
        alone = pipeline_with(best) if last == "rerank" else scores[best]
        tests[f"{last} with {best} alone"] = gain = compare(alone, scores[last])
        changes = f"without it the result changes by {gain['text']}"
        if weak and gain["sign"] < 0:
            text += f". Yet the reranker makes use of the {weak} route: {changes}"
        elif weak:
            recommended = {"retrieve.routes": [best]}
            text += f". The {weak} route is too weak to help here: {changes}"
        if last == "rerank" and compare(alone, scores[best])["sign"] < 0 and tests[last]["sign"] < 0:
            recommended |= {"rerank.model": "none"}
            text += f". The reranker '{config.rerank.model}' lowers it too"
    settings = " ".join(f"{key}={value}" for key, value in recommended.items()).replace("'", "")
    text += f". Set {settings}." if recommended else ". Keep the routes as they are."
    return {"text": text, "recommended": recommended, "best_route": best, "differences": tests}


def margins(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """nDCG@10 of the pipeline minus that of its best single route: by set, the mean, and the worst; {} without both."""
    out = {}
    for result in results:
        ndcg = {route: figures[METRICS[0]] for route, figures in result["routes"].items()}
        single = [ndcg[route] for route in ROUTES[:2] if route in ndcg]
        if single and "rerank" in ndcg and None not in ndcg.values():
            out[result["set"]] = round(ndcg["rerank"] - max(single), 4)
    values = list(out.values())
    return {"sets": out, "mean": round(float(np.mean(values)), 4), "worst": min(values)} if out else {}


def print_bench(results: Sequence[Mapping[str, Any]]) -> Table:
    """A table with the routes side by side: metrics, speed, memory, the pipeline's margin; below it the advice."""
    from rich.markup import escape
    from rich.table import Table

    routes = [route for route in ROUTES if any(route in r["routes"] for r in results)]
    table = Table("set", "metric", *routes, "rerank - best", box=None, pad_edge=False)
    by_set = margins(results).get("sets", {})
    for r in results:
        about = f"{r['documents']:,} documents", f"{r['queries']:,} queries", escape(r["embedder"] or ""), ""
        for label, metric in zip((escape(r["set"]), *about), METRICS, strict=False):
            cells = [r["routes"].get(route, {}).get(metric) for route in routes]
            margin = f"{by_set[r['set']]:+.4f}" if metric == METRICS[0] and r["set"] in by_set else ""
            table.add_row(label, metric, *("" if c is None else f"{c:.4f}" for c in cells), margin)
        speed = [r["queries_per_second"].get(route) for route in routes]
        memory = f"{r['memory_mb']:.0f} MiB"
        table.add_row("", "queries/s", *("" if s is None else f"{s:,.0f}" for s in speed), memory, end_section=True)
    notes = [f"{r['set']}: {r['advice']['text']}" for r in results]
    notes += [f"{r['set']}: {r['unmeasured']} queries have no relevant document" for r in results if r["unmeasured"]]
    absent = [(r["set"], r["relevant_not_in_corpus"]) for r in results if r["relevant_not_in_corpus"]]
    notes += [f"{name}: {n} relevant documents are not in its corpus and count as misses" for name, n in absent]
    if any(r["stand_in"] for r in results):
        notes.append(f"The reranker '{results[0]['reranker']}' is a stand-in for a cross-encoder.")
    table.caption, table.caption_justify = escape("\n".join(notes)), "left"
    return table

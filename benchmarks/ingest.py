"""What a document that comes, leaves or changes its status costs, beside the full build and the bare libraries.

    python benchmarks/ingest.py [--sizes 1000 10000 100000] [--repeats 5] [--json]

Chunks are generated: Zipf-distributed words of the sample corpus, about 150 a chunk, 20 chunks a document, unit vectors
drawn at random, engine tantivy, and for each document a parsed text and a page map that the version keeps. Making them
is not measured. Each time is that of opening the version in use, cutting tokens, staging the new version and publishing
it; before each repetition the first version is put back. `in a row` adds documents one after the other, so that merges
of segments are in it.

Encoding is measured by itself, on 200 generated texts and the offline encoder, and added by the chunk: shares of the
full build are given with it and without. The bare libraries do the same 20 chunks: tantivy adds and commits them, numpy
appends their vectors to a file that is synced.

Memory is the peak minus the resident size after imports, each phase in its own process, as a multiple of the index
(without the parsed texts). tantivy's writer alone takes some 50 MB, whatever the size.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from query_latency import DIM, PER_PARENT, WORDS, apart, configuration, peak, resident, words

from ragbuild.core.records import Chunk, Document, TermEntry, index_text

PER_DOCUMENT, ENCODED = 20, 200
CONTENT = dict(
    doc_version="v4.2", product_model=("all",), kb="manuals", doc_type="admin_guide", language="en", status="active"
)


class Source:
    """Generated documents by number, with their chunks and the files that are kept of them."""

    def __init__(self, files: Path) -> None:
        self._words, self._files = words(), files
        self._order = np.random.default_rng(13).permutation(len(self._words))
        weights = 1 / np.arange(1, len(self._words) + 1)
        self._sums = np.cumsum(weights / weights.sum())

    def document(self, number: int) -> Document:
        name = f"doc-{number}"
        return Document(doc_id=name, doc_source=f"{name}.md", title=f"Manual {number}", content_hash=name, **CONTENT)

    def texts(self, number: int) -> list[str]:
        drawn = np.random.default_rng(number).random((PER_DOCUMENT, WORDS))
        rows = np.minimum(np.searchsorted(self._sums, drawn), len(self._words) - 1)
        return [" ".join(self._words[self._order[w]] for w in row) for row in rows]

    def chunks(self, number: int) -> list[Chunk]:
        texts, out = self.texts(number), []
        common = (
            dict(doc_id=f"doc-{number}", doc_source=f"doc-{number}.md", status="active", page=1, page_end=1) | CONTENT
        )
        for p in range(0, PER_DOCUMENT, PER_PARENT):
            own, whole = texts[p : p + PER_PARENT], "\n".join(texts[p : p + PER_PARENT])
            common |= dict(chapter=f"Chapter {p}", breadcrumb=f"Manual {number} > Chapter {p}")
            ids, parent = tuple(f"c-{number:012x}{p + i:04x}" for i in range(len(own))), f"p-{number:012x}{p:04x}"
            common |= dict(content=whole, span=(0, len(whole)))
            out.append(Chunk(chunk_id=parent, child_ids=ids, n_tokens=800, **common))
            out += [
                Chunk(chunk_id=i, parent_id=parent, n_tokens=200, **common | dict(content=t, span=(0, len(t))))
                for i, t in zip(ids, own, strict=True)
            ]
        return out

    def kept(self, number: int) -> dict[str, Path]:
        """The parsed text and the page map."""
        text, pages = self._files / f"doc-{number}.md", self._files / f"doc-{number}.pages.json"
        text.write_text("\n\n".join(self.texts(number)), encoding="utf-8")
        pages.write_text(json.dumps([{"page": 1, "start": 0, "end": number}]), encoding="utf-8")
        return {"document.md": text, "document.pages.json": pages}


def vectors(n: int, seed: int = 0) -> np.ndarray:
    out = np.random.default_rng(seed).standard_normal((n, DIM)).astype(np.float32)
    return out / np.linalg.norm(out, axis=1, keepdims=True)


def entries() -> list[TermEntry]:
    return [TermEntry(standard_term=f"Term {i}", colloquial=(f"t{i}",), count=i) for i in range(300)]


def ready() -> float:
    """Load what any run loads, whatever the index holds; returns the resident size after it."""
    import faiss  # noqa: F401
    import pandas  # noqa: F401  # pyarrow imports it with the first array
    import tantivy  # noqa: F401

    import ragbuild.index.staging  # noqa: F401
    from ragbuild.core.text import WordTokenizer

    WordTokenizer()("预热 warm up")
    return resident()


def build(root: str, n: int, out: Any) -> None:
    """The full build, as its time less that of generating."""
    from ragbuild.index.staging import write_version

    source, made = Source(Path(root) / "parsed"), [0.0]
    documents = [source.document(i) for i in range(n // PER_DOCUMENT)]
    kept = {d.key: source.kept(i) for i, d in enumerate(documents)}

    def generated(function: Callable[..., Any], *arguments: Any) -> Any:
        start = time.perf_counter()
        result = function(*arguments)
        made[0] += time.perf_counter() - start
        return result

    def chunks() -> Iterator[Chunk]:
        for i in range(len(documents)):
            yield from generated(source.chunks, i)

    before, start = ready(), time.perf_counter()
    write_version(
        Path(root) / "indexes", chunks(), documents, entries(), config=configuration(), kept=kept,
        encode=lambda texts: generated(vectors, len(texts)), embedder={"name": "use-multilingual", "dim": DIM},
    )  # fmt: skip
    out.put({"seconds": time.perf_counter() - start - made[0], "memory_mib": peak() - before})


def change(root: str, n: int, kind: str, repeats: int, out: Any) -> None:
    """Add, remove, or change the status of one document; or add one after the other (`in a row`)."""
    from ragbuild.index.staging import Added, Content, discard, stage_update, tokenizer_of
    from ragbuild.index.versions import IndexVersion, publish

    indexes, source, config = Path(root) / "indexes", Source(Path(root) / "parsed"), configuration()
    rng, first = np.random.default_rng(n), n // PER_DOCUMENT

    def once(number: int, made: list[Chunk], kept: dict[str, Path]) -> None:
        base = IndexVersion(indexes)
        documents, gone, added = list(base.documents), np.zeros(0, np.int64), []
        document = source.document(number)
        if kind in ("add", "in a row"):
            tokenizer = tokenizer_of(config, base.entries)
            tokens = [tokenizer(index_text(c)) for c in made if not c.is_parent]
            added, documents = [Added(made, tokens, vectors(PER_DOCUMENT, number))], [*documents, document]
        else:
            gone, documents = base.rows_of_document(document), [d for d in documents if d.key != document.key]
            if kind == "status":
                moved, tokens = base.children_and_tokens(gone)
                moved = [c.model_copy(update={"status": "legacy"}) for c in (*base.parents_of(gone), *moved)]
                added = [Added(moved, tokens, base.dense.vectors(gone))]
                documents.append(document.model_copy(update={"status": "legacy"}))
        content = Content(documents, base.entries, base.prompt, {document.key: kept} if kept else {})
        publish(indexes, stage_update(indexes, base, content, config=config, gone=gone, added=added))

    adding = kind in ("add", "in a row")
    numbers = range(first, first + repeats) if adding else rng.permutation(first)[:repeats].tolist()
    prepared = [(i, source.chunks(i) if adding else [], source.kept(i) if adding else {}) for i in numbers]
    before, seconds = ready(), []
    for number, made, kept in prepared:
        if kind != "in a row":
            publish(indexes, "v0001")
            discard(indexes)
        start = time.perf_counter()
        once(number, made, kept)
        seconds.append(time.perf_counter() - start)
    memory = peak() - before
    publish(indexes, "v0001")
    discard(indexes)
    out.put({"seconds": seconds, "memory_mib": memory})


def bare(root: str, n: int, repeats: int, out: Any) -> None:
    """tantivy adds 20 chunks and commits, numpy appends 20 vectors to a file; each to a copy of the index."""
    import tantivy

    from ragbuild.index.filters import FIELDS
    from ragbuild.index.versions import IndexVersion

    version, source = IndexVersion(Path(root) / "indexes"), Source(Path(root) / "parsed")
    chunks = [c for c in source.chunks(n // PER_DOCUMENT) if not c.is_parent]
    texts = [" ".join(version.tokenizer(index_text(c))) for c in chunks]
    seconds: dict[str, list[float]] = {"tantivy": [], "numpy": []}
    for _ in range(repeats):
        copy, numbers = Path(root) / "bare", vectors(PER_DOCUMENT)
        shutil.copytree(version.folder / "lexical", copy)
        with (copy / "vectors.f32").open("wb") as file:
            version.dense.vectors(np.arange(len(version))).tofile(file)
            os.fsync(file.fileno())
        start = time.perf_counter()
        writer = tantivy.Index.open(str(copy)).writer(heap_size=50_000_000, num_threads=1)
        for i, (chunk, text) in enumerate(zip(chunks, texts, strict=True)):
            document = tantivy.Document()
            document.add_unsigned("uid", n + i)
            document.add_text("body", text)
            for field in FIELDS:
                for value in np.atleast_1d(getattr(chunk, field)):
                    document.add_text(field, str(value))
            writer.add_document(document)
        writer.commit()
        writer.wait_merging_threads()
        seconds["tantivy"].append(time.perf_counter() - start)
        start = time.perf_counter()
        with (copy / "vectors.f32").open("ab") as file:
            numbers.tofile(file)
            file.flush()
            os.fsync(file.fileno())
        seconds["numpy"].append(time.perf_counter() - start)
        shutil.rmtree(copy)
    out.put({name: float(np.median(values)) for name, values in seconds.items()})


def encoding(root: str, out: Any) -> None:
    """Seconds a chunk of the offline encoder."""
    from ragbuild.models.embedders import load_embedder

    embedder = load_embedder("use-multilingual", configuration().embedder)
    texts = [
        index_text(c) for i in range(ENCODED // PER_DOCUMENT) for c in Source(Path(root)).chunks(i) if not c.is_parent
    ]
    embedder.encode_documents(texts[:8])
    start = time.perf_counter()
    embedder.encode_documents(texts)
    out.put((time.perf_counter() - start) / len(texts))


def on_disk(indexes: Path) -> float:
    """MiB of the one version that is there: its own folder and segments, without the parsed texts that it keeps."""
    files = (p for folder in ("v0001", "segments") for p in (indexes / folder).rglob("*") if p.is_file())
    return sum(p.stat().st_size for p in files) / 2**20


def measure(n: int, repeats: int, in_a_row: int, per_chunk: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as root:
        (Path(root) / "parsed").mkdir()
        full = apart(build, root, n)
        size = on_disk(Path(root) / "indexes")
        out: dict[str, Any] = {
            "chunks": n, "index_mib": size, "bare_s": apart(bare, root, n, repeats),
            "build": full | {"memory_ratio": full["memory_mib"] / size},
        }  # fmt: skip
        for kind in ("add", "remove", "status", "in a row"):
            found = apart(change, root, n, kind, in_a_row if kind == "in a row" else repeats)
            middle = float(np.median(found["seconds"]))
            encoded = PER_DOCUMENT * per_chunk if kind in ("add", "in a row") else 0.0
            out[kind] = {
                "seconds": middle, "longest_s": max(found["seconds"]), "mean_s": float(np.mean(found["seconds"])),
                "share": middle / full["seconds"], "with_encoding_s": middle + encoded,
                "share_with_encoding": (middle + encoded) / (full["seconds"] + n * per_chunk),
                "memory_mib": found["memory_mib"], "memory_ratio": found["memory_mib"] / size,
            }  # fmt: skip
        out["ratio_to_bare"] = out["add"]["seconds"] / sum(out["bare_s"].values())
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--in-a-row", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        per_chunk = apart(encoding, folder)
    results = [measure(n, arguments.repeats, arguments.in_a_row, per_chunk) for n in arguments.sizes]
    if arguments.json:
        print(json.dumps({"encoding_s_per_chunk": per_chunk, "sizes": results}))
        return
    print(f"one document of {PER_DOCUMENT} chunks; encoding {per_chunk * 1e3:.1f} ms a chunk, its own column")
    print(f"{'chunks':>8} {'what':10}{'s':>9}{'longest':>9}{'% of build':>11}{'with enc. s':>12}{'% of build':>11}"
          f"{'memory MiB':>11}{'x index':>8}")  # fmt: skip
    for r in results:
        b = r["build"]
        encoded = b["seconds"] + r["chunks"] * per_chunk
        print(f"{r['chunks']:8,} {'build':10}{b['seconds']:9.3f}{'':9}{'':11}{encoded:12.2f}{'':11}"
              f"{b['memory_mib']:11.0f}{b['memory_ratio']:8.2f}")  # fmt: skip
        for kind in ("add", "remove", "status", "in a row"):
            x = r[kind]
            print(f"{'':8} {kind:10}{x['seconds']:9.3f}{x['longest_s']:9.3f}{x['share']:11.2%}"
                  f"{x['with_encoding_s']:12.2f}{x['share_with_encoding']:11.2%}"
                  f"{x['memory_mib']:11.0f}{x['memory_ratio']:8.2f}")  # fmt: skip
        print(f"{'':8} index {r['index_mib']:.0f} MiB; bare libraries: tantivy {r['bare_s']['tantivy']:.3f} s, numpy "
              f"{r['bare_s']['numpy']:.4f} s; adding takes {r['ratio_to_bare']:.1f} times as long")  # fmt: skip


if __name__ == "__main__":
    main()

"""What a sweep is computed from: a corpus to tune on, its index and its questions.

All of it, the sweep too, is made once, kept in the user's cache and reused while libraries, documents, questions and
configuration stay the same.
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

import ragbuild
from ragbuild.core.config import Config, ConfigView
from ragbuild.core.errors import InputRefused, UsageError
from ragbuild.core.store import cache_dir, hash_path, sha256
from ragbuild.core.text import TokenCounter
from ragbuild.evaluate.runs import load_sets
from ragbuild.evaluate.sweep import Sweep
from ragbuild.evaluate.sweep_compute import Say, answerable, compute_sweep
from ragbuild.index.staging import write_version
from ragbuild.index.versions import IndexVersion
from ragbuild.models.embedders import VectorCache, load_embedder, resolve_auto
from ragbuild.offline.chunk import chunk_corpus
from ragbuild.offline.evalset import EvalCase
from ragbuild.offline.parse.corpus import parse_corpus
from ragbuild.offline.python_docs import installed, write_python_docs
from ragbuild.online.pipeline import Pipeline

_PACKAGE = Path(ragbuild.__file__).parent
# The code that makes an index, and that searches it: when it changes, what the cache holds is made again.
_MADE_BY = ("core/text.py", "index/*.py", "offline/parse/*.py", "offline/python_docs.py", "offline/see_also.py",
            "offline/chunk.py", "offline/sections.py", "offline/packing.py")  # fmt: skip
_SEARCH = ("index/*.py", "models/rerankers.py", "online/*.py", "evaluate/sweep*.py")


@dataclass(frozen=True)
class TuningCorpus:
    """An index to tune on, its questions, and a key that changes when either or the configuration does."""

    name: str
    pipeline: Pipeline
    cases: list[EvalCase]
    key: str

    @property
    def asked(self) -> list[EvalCase]:
        """The cases that a sweep may ask: those that this index can answer."""
        return answerable(self.cases)

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
    with FileLock(base / ".lock"):  # a second process waits for the first one's result
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

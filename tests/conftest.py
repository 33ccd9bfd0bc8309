"""What tests share: documents and chunks made by hand, and an embedder that needs no model.

No test touches the user's cache (but jieba's, which is the same for everybody) or a model hub.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings

from ragbuild.core.records import Chunk, Document
from ragbuild.core.store import cache_dir

os.environ["HF_HUB_OFFLINE"] = "1"
SHARED = Path(__file__).resolve().parents[2] / "shared"  # data sets beside the checkout; absent on other machines


# Deterministic: the same examples in every run. No deadline: a test never asserts a time on a busy machine.
settings.register_profile("ragbuild", derandomize=True, deadline=None, max_examples=80)
settings.load_profile("ragbuild")


def pytest_configure(config: pytest.Config) -> None:
    jieba = cache_dir("jieba")
    config.former_cache = os.environ.get("RAGBUILD_CACHE_DIR")
    config.cache_folder = Path(tempfile.mkdtemp(prefix="ragbuild-cache-"))
    (config.cache_folder / "jieba").symlink_to(jieba.resolve())
    os.environ["RAGBUILD_CACHE_DIR"] = str(config.cache_folder)


def pytest_unconfigure(config: pytest.Config) -> None:
    if config.former_cache is None:
        del os.environ["RAGBUILD_CACHE_DIR"]
    else:
        os.environ["RAGBUILD_CACHE_DIR"] = config.former_cache
    shutil.rmtree(config.cache_folder, ignore_errors=True)


def make_document(doc_id: str = "guide", **fields: object) -> Document:
    """A document with every required field; `fields` overrides any."""
    base = {
        "doc_id": doc_id, "doc_version": "v4.2", "doc_type": "guide", "doc_source": f"{doc_id}.md", "language": "en",
        "title": doc_id.title(), "content_hash": hashlib.sha256(doc_id.encode()).hexdigest(),
    }  # fmt: skip
    return Document.model_validate(base | fields)


def make_chunks(
    texts: Sequence[str], document: Document | None = None, parent: str = "", **fields: object
) -> list[Chunk]:
    """One parent and a child for each text, in this order; ids are ``p-<parent>`` and ``c-<parent>-000``.

    The parent's content is the texts, joined by blank lines; spans reproduce them. `fields` go to all chunks.
    """
    document = document or make_document()
    parent = parent or document.doc_id
    copied = document.model_dump(
        include={
            "doc_id",
            "doc_version",
            "product_model",
            "kb",
            "doc_type",
            "status",
            "effective_date",
            "doc_source",
            "language",
        }
    )
    base = (
        copied | {"chapter": "Chapter", "breadcrumb": f"{document.title} > Chapter", "page": 1, "page_end": 1} | fields
    )
    ids = [f"c-{parent}-{i:03d}" for i in range(len(texts))]
    content = "\n\n".join(texts)
    chunks = [
        Chunk.model_validate(
            base
            | {"chunk_id": f"p-{parent}", "child_ids": ids, "content": content, "span": (0, len(content))}
            | {"n_tokens": max(1, len(content.split()))}
        )
    ]
    start = 0
    for chunk_id, text in zip(ids, texts, strict=True):
        own = {"chunk_id": chunk_id, "parent_id": f"p-{parent}", "content": text, "span": (start, start + len(text))}
        chunks.append(Chunk.model_validate(base | own | {"n_tokens": max(1, len(text.split()))}))
        start += len(text) + 2
    return chunks


class FakeEmbedder:
    """Words and Han characters hashed into 64 places, counted, scaled to length 1: like texts get like vectors.

    `encoded` lists every text it was given, so that a test can say what was encoded and what was not.
    """

    name, dim, max_tokens = "fake", 64, None

    def __init__(self) -> None:
        self.encoded: list[str] = []

    def encode_documents(self, texts: Sequence[str]) -> np.ndarray:
        self.encoded += texts
        out = np.zeros((len(texts), self.dim), np.float32)
        for row, text in zip(out, texts, strict=True):
            for word in re.findall(r"[a-z0-9]+|[^\W\da-z_]", text.lower()) or [text]:
                row[int.from_bytes(hashlib.sha256(word.encode()).digest()[:4]) % self.dim] += 1
        return out / np.linalg.norm(out, axis=1, keepdims=True)

    def encode_queries(self, texts: Sequence[str]) -> np.ndarray:
        return self.encode_documents(texts)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """One Chromium for all tests of a worker: playwright takes no second one beside it."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        pytest.skip("no Chromium or Chrome on this machine: the browser tests need one")
    with sync_api.sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])


class Built:
    """The one build of the sample corpus that all tests share, with the notebooks' solutions, under an audit hook."""

    def __init__(self, run: Path, audit: Path, result: dict) -> None:
        self.run, self.result, self._audit = run, result, audit

    def opened(self, name: str) -> set[tuple[str, str]]:
        """(r or w, path relative to the run) of every file of the run that notebook `name` opened."""
        out: set[tuple[str, str]] = set()
        for log in self._audit.glob("*.txt"):
            lines = [line.split("\t", 1) for line in log.read_text(encoding="utf-8").splitlines()]
            if any(
                path.endswith(f"/notebooks/{name}.ipynb") and not path.startswith(str(self.run)) for _, path in lines
            ):
                out |= {(m, os.path.relpath(p, self.run)) for m, p in lines if p.startswith(str(self.run) + "/")}
        return out


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Built:
    """Made once, also when several workers ask for it: the first builds, the others wait for its result."""
    from filelock import FileLock

    from ragbuild.core.config import load_config
    from ragbuild.core.store import read_json, write_json
    from ragbuild.course.report import write_report
    from ragbuild.course.runner import build, summary

    base = tmp_path_factory.getbasetemp()
    base = base if worker_id == "master" else base.parent
    run, audit, result = base / "shared-run", base / "shared-audit", base / "shared-result.json"
    with FileLock(base / "shared.lock"):
        if not result.is_file():
            audit.mkdir()
            before = os.environ.copy()
            os.environ["PYTHONPATH"] = f"{Path(__file__).parent / 'audit'}:{os.environ.get('PYTHONPATH', '')}".rstrip(
                ":"
            )
            os.environ["RAGBUILD_TEST_AUDIT"], os.environ["RAGBUILD_TEST_RUN"] = str(audit), str(run)
            try:
                outcome = build(load_config(overrides={"course.solutions": True, "tune.min_children": 400}), out=run)
            finally:
                os.environ.clear()
                os.environ.update(before)
            write_report(run)
            write_json(result, summary(outcome))
    return Built(run, audit, read_json(result))

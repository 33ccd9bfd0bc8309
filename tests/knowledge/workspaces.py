"""A small workspace without notebooks, its arrivals, and writers in processes of their own.

Nine documents in both languages are read, chunked and indexed with their parsed files kept, like a build does it, by an
embedder without a model. Processes come from a fork server that has everything imported: they start in milliseconds.
"""

from __future__ import annotations

import base64
import multiprocessing
import os
import shutil
import signal
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from ragbuild.core.config import Config, load_config
from ragbuild.core.errors import RagbuildError
from ragbuild.core.records import Answer, TermEntry
from ragbuild.core.store import Workspace, hash_path, read_json
from ragbuild.core.text import TokenCounter
from ragbuild.index.filters import EVERYTHING
from ragbuild.index.staging import write_version
from ragbuild.index.versions import FILES, SEGMENTS, IndexVersion, version_names
from ragbuild.knowledge import registry_database, snapshot
from ragbuild.knowledge.ingest import Result, ingest
from ragbuild.knowledge.registry import Registry
from ragbuild.knowledge.writer import number
from ragbuild.offline.chunk import Tagger, chunk_document
from ragbuild.offline.parse import image_ids_of, kept_files, parse_corpus, pictures_of, write_parsed
from ragbuild.offline.prompts import load_prompt
from ragbuild.online.pipeline import Pipeline
from tests.conftest import FakeEmbedder

ENGINES = ["rank_bm25", "tantivy"]
STEPS = ["registry", "chunks and vectors", "lexical index", "version", "regression", "CURRENT"]  # in this order
TERMS = [
    TermEntry(standard_term="单点登录", abbreviation="SSO", tag="login"),
    TermEntry(standard_term="idle timeout", tag="session", colloquial=("auto logout",)),
]


def picture(n: int) -> str:
    """A Markdown image with its bytes in it; each `n` is another picture."""
    return f"![figure {n}](data:image/png;base64,{base64.b64encode(b'PNG' + bytes([n]) * 40).decode()})"


def paper(body: str, doc_id: str, version: str, title: str, **fields: str) -> str:
    """A document with front matter. `fields` override kb, language, product_model, status and the rest."""
    front = {"doc_id": doc_id, "doc_version": version, "kb": "manuals", "doc_type": "guide", "language": "en"}
    front |= {"product_model": "all", "title": title} | fields
    return "---\n" + yaml.safe_dump(front, allow_unicode=True) + f"---\n\n# {title}\n\n{body}\n"


def admin(version: str, minutes: int, **fields: str) -> str:
    return paper(
        f"## Sessions\n\nThe idle timeout of a session is {minutes} minutes.\n\n{picture(minutes)}\n\n"
        "## Lockout\n\nAn account is locked after five wrong passwords.",
        "admin", version, "Administrator guide", **fields,
    )  # fmt: skip


def portal(version: str, digits: int, **fields: str) -> str:
    return paper(
        f"## 登录\n\n用户通过单点登录访问门户。\n\n## 验证码\n\n短信验证码为 {digits} 位数字，五分钟内有效。",
        "portal", version, "门户手册", **{"language": "zh"} | fields,
    )  # fmt: skip


def install(model: str, kg: int, version: str = "v1", **fields: str) -> str:
    body = f"## Rack\n\nThe {model} weighs {kg} kg and needs two people."
    return paper(body, "install", version, f"{model} installation", product_model=model, **fields)


DOCUMENTS = {
    "admin-3.md": admin("v3", 10, status="legacy", effective_date="2024-01-01"),
    "admin-4.md": admin("v4", 15, supersedes="manuals/admin/v3/all", effective_date="2025-01-01"),
    "portal-4.zh.md": portal("v4", 4, effective_date="2025-01-01"),
    "install-lg500.md": install("LG-500", 12),
    "backup.md": paper(
        "## Schedule\n\nBackups run every night and are kept for 30 days.\n\n## Restore\n\nRestore on the console.",
        "backup", "v2", "Backup guide", kb="support", effective_date="2025-01-01",
    ),
    "channel.zh.md": paper(
        "## 端口\n\n岚关安全通道使用端口 8443。\n\n## 证书\n\n证书过期后需要重新签发。", "channel", "v1", "通道说明",
        language="zh",
    ),
    "fan.txt": "The fan tray is replaced without tools.\n\nWear a wrist strap.\n",
}  # fmt: skip
ARRIVALS = {
    "admin-5.md": admin("v5", 20, supersedes="manuals/admin/v4/all", effective_date="2026-01-01"),  # legacy
    "portal-5.zh.md": portal("v5", 6, supersedes="manuals/portal/v4/all", effective_date="2026-01-01"),  # replace
    "install-lg700.md": install("LG-700", 21),  # parallel
    "backup.md": DOCUMENTS["backup.md"].replace("30 days", "45 days"),  # correction
    "fan.txt": DOCUMENTS["fan.txt"],  # unchanged
    "channel-special.zh.md": paper(  # waits: its version cannot be ordered
        "## 端口\n\n特别版的端口为 9443。", "channel", "特别版", "通道说明特别版", language="zh"
    ),
    "tunnel.zh.md": paper(  # brings a term: chunks of channel.zh.md are cut in another way
        "## 定义\n\n岚关安全通道（LST）用于加密传输。重启后，岚关安全通道（LST）自动恢复。", "tunnel", "v1", "隧道术语",
        language="zh",
    ),
}  # fmt: skip
CHOICES = {"admin": "legacy", "portal": "replace"}
QUERIES = [
    "How long is the idle timeout of a session?", "短信验证码为几位数字", "SSO 门户", "How long are backups kept?",
    "The weight of the LG-500", "岚关安全通道的端口", "how is the fan tray replaced", "证书过期",
]  # fmt: skip


def config_of(engine: str = "rank_bm25", **others: Any) -> Config:
    return load_config(overrides={"lexical.engine": engine, **others})


def put(folder: Path, files: Mapping[str, str | bytes]) -> Path:
    """Write files into a folder; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


def built(folder: Path, config: Config, documents: Mapping[str, str | bytes] = DOCUMENTS) -> Path:
    """A workspace as a build leaves it: ``config.yaml`` and the first index version, with the parsed texts kept."""
    source, parsed, workspace = put(folder / "source", documents), folder / "parsed", folder / "workspace"
    read = parse_corpus(source, parse=config.parse, corpus=config.corpus)
    assert not read.refused
    write_parsed(read.documents, Workspace(parsed))
    counter, tagger, chunks = TokenCounter(config.chunk.tokenizer), Tagger(TERMS), []
    for e in read.documents:
        images = image_ids_of(pictures_of(e.document, e.parsed), e.document.key)
        chunks += chunk_document(
            e.document, e.parsed.markdown, e.parsed.page_of, config=config.chunk, counter=counter, tagger=tagger,
            image_ids=images,
        ).chunks  # fmt: skip
    write_version(
        workspace / "indexes", chunks, [e.document for e in read.documents], TERMS, config=config,
        encode=FakeEmbedder().encode_documents, embedder={"name": "fake", "dim": FakeEmbedder.dim},
        prompt=load_prompt("initial_prompt").text,
        kept={e.document.key: kept_files(Workspace(parsed), e.document) for e in read.documents},
    )  # fmt: skip
    (workspace / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")), encoding="utf-8")
    shutil.rmtree(parsed)
    return workspace


def fresh(factory: Any, folder: Path, engine: str = "rank_bm25") -> Path:
    """A copy of the workspace of `DOCUMENTS`, which is built once for each engine. `factory`: tmp_path_factory."""
    template = factory.getbasetemp() / f"built-{engine}"
    if not template.exists():
        built(template, config_of(engine))
    shutil.copytree(template / "workspace", folder)
    return folder


def take(workspace: Path, sources: Path | Sequence[Path], config: Config, **options: Any) -> Result:
    """`ingest` with the embedder without a model; a single path is a folder of arrivals or a document. That the folder
    lacks the corpus is no news here: the note is left out."""
    sources = [sources] if isinstance(sources, Path) else list(sources)
    result = ingest(workspace, sources, config, **{"embedder": FakeEmbedder()} | options)
    result.notes = [n for n in result.notes if "are not in the folder" not in n]
    return result


# --- what a workspace holds, and what it answers ----------------------------------------------------------------------


def answer(workspace: Path, query: str, config: Config, **filters: Any) -> Answer:
    """The answer of the version in use."""
    pipeline = Pipeline(IndexVersion(workspace / "indexes"), config, FakeEmbedder())
    return pipeline.ask(query, EVERYTHING.with_(**filters) if filters else None)


def found(workspace: Path, config: Config, name: str | None = None) -> list[Any]:
    """Ids and exact scores of every route for each query, over all documents and over the active ones."""
    pipeline = Pipeline(IndexVersion(workspace / "indexes", name), config, FakeEmbedder())
    out = []
    for where in (None, EVERYTHING):
        for query in QUERIES:
            hits = [c.hit for c in pipeline.retrieve(query, where).ranked]
            out.append([(h.chunk_id, h.score, {r: (v.rank, v.score) for r, v in h.routes.items()}) for h in hits])
    return out


def state(workspace: Path) -> dict[str, Any]:
    """All that the version in use and the registry hold, without times and ids of runs; asserts that both agree, that
    every file is whole, and that nothing lies there which no version names."""
    indexes = workspace / "indexes"
    version, registry = IndexVersion(indexes), Registry.open(workspace)
    try:
        registered = registry.documents(number(version.name)) or sorted(version.documents, key=lambda d: d.key)
        history = [h.model_dump(exclude={"when", "run_id"}) for h in registry.history()]
        queue = [q.key for q in registry.queued()]
    finally:
        registry.close()
    assert snapshot.check(workspace, deep=True) == []
    assert [d.key for d in registered if d.status != "superseded"] == sorted(d.key for d in version.documents)
    assert_tidy(workspace)
    rows = np.argsort(version.ids)
    chunks, tokens = version.children_and_tokens(rows)
    assert len({c.chunk_id for c in chunks}) == len(chunks) == version.manifest["children"]
    parents = sorted(version.all_parents(), key=lambda p: p.chunk_id)
    assert len(parents) == version.manifest["parents"] and sum(map(len, tokens)) == version.manifest["n_tokens"]
    assert {i for p in parents for i in p.child_ids} == {c.chunk_id for c in chunks}
    return {
        "version": version.name, "children": chunks, "parents": parents, "tokens": tokens,
        "vectors": version.dense.vectors(rows).tobytes(), "documents": sorted(version.documents, key=lambda d: d.key),
        "registered": registered, "history": sorted(history, key=str), "queue": sorted(queue),
        "terms": version.entries, "kept": version.kept, "versions": version_names(indexes),
    }  # fmt: skip


def assert_tidy(workspace: Path) -> None:
    """Nothing lies in the workspace which no version names."""
    indexes, segments, files = workspace / "indexes", set(), set()
    for name in version_names(indexes):
        segments |= {s["name"] for s in read_json(indexes / name / "version.json")["segments"]}
        files |= {h for names in read_json(indexes / name / "kept.json").values() for h in names.values()}
    assert {p.name for p in indexes.iterdir()} == {"CURRENT", SEGMENTS, FILES, *version_names(indexes)}
    assert {p.name for p in (indexes / SEGMENTS).iterdir()} == segments
    assert {p.name for p in (indexes / FILES).iterdir()} == files
    own = {"indexes", "config.yaml", "registry.sqlite", ".workspace-id", ".lock"}
    assert {p.name for p in workspace.iterdir()} - own == set()


def published(workspace: Path) -> dict[str, str]:
    """The hash of every file that belongs to a published version, and CURRENT: what a failure must leave as it is."""
    indexes = workspace / "indexes"
    files = [p for p in indexes.rglob("*") if p.is_file() and p.suffix != ".lock"]
    return {str(p.relative_to(indexes)): hash_path(p) for p in files}


def unsynced(patch: Callable[[Any, str, Any], Any]) -> None:
    """Nobody waits for the disk: a killed process loses no page that the system holds."""
    real = registry_database._sqlite_settings

    def settings(connection: Any, record: object) -> None:
        real(connection, record)
        connection.execute("pragma synchronous=off")

    patch(registry_database, "_sqlite_settings", settings)
    patch(os, "fsync", lambda fd: None)


# --- writers in other processes ---------------------------------------------------------------------------------------

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["tests.knowledge.preloaded"])


class Other:
    """`act(workspace, **options)` in a process of its own; `outcome` is what it returned, or its error."""

    def __init__(self, act: Callable[..., Any], workspace: Path, **options: Any) -> None:
        self._mine, theirs = PROCESSES.Pipe(duplex=False)
        environment = {k: os.environ.get(k) for k in ("RAGBUILD_DATABASE_URL", "RAGBUILD_CACHE_DIR")}
        self.process = PROCESSES.Process(target=_run, args=(theirs, environment, act, workspace, options), daemon=True)
        self.process.start()
        self.process_id = self.process.pid
        theirs.close()
        self.messages: list[Any] = []

    def hear(self, timeout: float = 60) -> Any:
        """The next thing that it says; None when it has ended."""
        assert self._mine.poll(timeout), "the other process says nothing"
        try:
            return self._mine.recv()
        except EOFError:
            return None

    def ended(self, timeout: float = 60) -> list[Any]:
        """All that it said, once it has ended."""
        while (message := self.hear(timeout)) is not None:
            self.messages.append(message)
        self.process.join(timeout)
        assert self.process.exitcode is not None
        self._mine.close()
        code = self.process.exitcode
        self.process.close()
        return [*self.messages, ("exit", code)]

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.process_id, signal.SIGKILL)


def _run(pipe: Any, environment: Mapping[str, str | None], act: Callable[..., Any], workspace: Path, options: Any):
    """In the other process: say that it begins, act, say what came of it."""
    for name, value in environment.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    unsynced(setattr)
    pipe.send("begins")
    try:
        pipe.send(("result", act(workspace, **options)))
    except RagbuildError as error:
        pipe.send(("error", error.exit_code, str(error)))
    except OSError as error:
        pipe.send(("error", error.errno, str(error)))
    except BaseException:
        pipe.send(("bug", traceback.format_exc()))


def dying(workspace: Path, sources: Path, step: str, engine: str, **options: Any) -> None:
    """An `ingest` that kills its process when `step` is done."""

    def on_step(done: str) -> None:
        if done == step:
            os.kill(os.getpid(), signal.SIGKILL)

    take(workspace, sources, config_of(engine), on_step=on_step, **options)


def ordinary(workspace: Path, sources: Path | Sequence[Path], engine: str, **options: Any) -> dict[str, Any]:
    """An `ingest`; what came of it."""
    result = take(workspace, sources, config_of(engine), **options)
    return {"version": result.version, "published": result.published, "notes": result.notes, "fates": result.fates}


def holding(workspace: Path, sources: Path, engine: str, go: Path, **options: Any) -> dict[str, Any]:
    """An `ingest` that waits, with the lock in hand, until the file `go` is there."""

    def on_step(done: str) -> None:
        if done == "registry":
            go.with_suffix(".held").touch()
            while not go.exists():
                time.sleep(0.01)

    return ordinary(workspace, sources, engine, on_step=on_step, **options)


@contextmanager
def asked_throughout(workspace: Path, config: Config, query: str, words: Sequence[str]):
    """A reader that opens the version in use and asks, again and again; each answer must hold one of `words`."""
    stop, asked, failed = threading.Event(), [0], list[str]()

    def read() -> None:
        while not stop.is_set():
            try:
                text = answer(workspace, query, config).text
                if not any(w in text for w in words):
                    failed.append(text)
            except BaseException:
                failed.append(traceback.format_exc())
            asked[0] += 1
            stop.wait(0.05)  # the writer needs the processor too

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield asked
    finally:
        stop.set()
        thread.join()
    assert not failed, failed[0]
    assert asked[0]

"""Nothing is lost: writers killed at every step and at any moment, eight at once, full disks, read-only workspaces.

After each failure the version in use answers as before, the next command puts in order what was left and says so, and
the same command again brings exactly what an undisturbed one brings.
"""

from __future__ import annotations

import errno
import gc
import os
import random
import resource
import shutil
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from ragbuild.core import store
from ragbuild.core.errors import InputRefused, WorkspaceLocked
from ragbuild.index import staging
from ragbuild.index.filters import FIELDS
from ragbuild.index.lexical import TantivyIndex
from ragbuild.index.versions import IndexVersion, current_version, version_names
from ragbuild.knowledge import snapshot
from ragbuild.knowledge.registry import Registry
from ragbuild.knowledge.registry_database import Database
from tests.knowledge.workspaces import (
    ARRIVALS,
    CHOICES,
    ENGINES,
    STEPS,
    Other,
    answer,
    asked_throughout,
    config_of,
    dying,
    fresh,
    holding,
    install,
    ordinary,
    paper,
    published,
    put,
    state,
    take,
)

CONFIG = config_of()
LONE = {"lone.md": paper("## A\n\nIt stands alone.", "lone", "v1", "Lone")}
IDLE = "How long is the idle timeout of a session?"
EITHER = ("15 minutes", "20 minutes")  # before and after the arrivals


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The state that one ingest of the arrivals makes, by engine: the same whichever database holds the registry."""
    folder, out = tmp_path_factory.mktemp("undisturbed"), {}
    with pytest.MonkeyPatch.context() as patched:
        patched.delenv("RAGBUILD_DATABASE_URL", raising=False)
        for engine in ENGINES:
            workspace = fresh(tmp_path_factory, folder / engine, engine)
            take(workspace, put(folder / "new", ARRIVALS), config_of(engine), choices=CHOICES)
            out[engine] = state(workspace)
    return out


def takes_all(
    workspace: Path, arrivals: Path, engine: str, expected: dict[str, Any], again: bool = True
) -> list[str]:  # fmt: skip
    """Run the ingest (again); what it put in order. The state is that of an undisturbed run, and answers are new."""
    result = take(workspace, arrivals, config_of(engine), choices=CHOICES)
    assert state(workspace) == expected
    assert "20 minutes" in answer(workspace, IDLE, config_of(engine)).text
    if again:
        more = take(workspace, arrivals, config_of(engine))
        assert not more.published and more.notes == [] and state(workspace) == expected
    return [n for n in result.notes if "so the choice" not in n]


# --- killed -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("engine", "step"), [("rank_bm25", s) for s in STEPS] + [("tantivy", s) for s in STEPS[1:4]])
def test_killed_at_a_step(tmp_path, tmp_path_factory, database, arrivals, undisturbed, engine: str, step: str):
    config = config_of(engine)
    workspace = fresh(tmp_path_factory, tmp_path / "workspace", engine)
    before = published(workspace)
    old_reader = IndexVersion(workspace / "indexes")
    with asked_throughout(workspace, config, IDLE, EITHER):
        victim = Other(dying, workspace, sources=arrivals, step=step, engine=engine, choices=CHOICES, regress=True)
        pid = victim.process_id
        assert victim.ended() == ["begins", ("exit", -9)]
        assert ("20 minutes" if step == "CURRENT" else "15 minutes") in answer(workspace, IDLE, config).text
        after = published(workspace)
        assert before.items() - {("CURRENT", before["CURRENT"])} <= after.items()
        assert (before["CURRENT"] == after["CURRENT"]) == (step != "CURRENT")
        notes = takes_all(workspace, arrivals, engine, undisturbed[engine])
    assert notes[0].startswith(f"took over the lock of process {pid} on {os.uname().nodename} since 20")
    told = "\n".join(notes)
    assert ("v0002 was never published: " in told and f"process {pid}" in told) == (step != "CURRENT"), told
    assert ("half written" in told) == (step in ("chunks and vectors", "lexical index"))
    assert ("removed version v0002, which was never published" in told) == (step in ("version", "regression"))
    registry = Registry.open(workspace)
    outcomes = [(r.command, r.outcome) for r in registry.runs()]
    registry.close()
    killed = [("ingest", "published"), ("ingest", "unchanged")] if step == "CURRENT" else [("ingest", "undone")]
    rest = [] if step == "CURRENT" else [("ingest", "published")]
    assert outcomes == [("build", "published"), *killed, *rest, ("ingest", "unchanged")]
    assert "15 minutes" in "".join(c.content for c in old_reader.children(range(len(old_reader))))


def dying_while_pruning(workspace: Path, sources: Path, engine: str) -> None:
    real = shutil.rmtree

    def rmtree(path: Any, *arguments: Any, **options: Any) -> None:
        if Path(path).name == ".building-v0001" and not options:
            next(p for p in Path(path).iterdir() if p.is_file()).unlink()
            os.kill(os.getpid(), 9)
        real(path, *arguments, **options)

    staging.shutil.rmtree = rmtree
    take(workspace, sources, config_of(engine, **{"knowledge.keep_versions": 1}), choices=CHOICES)


def test_killed_while_an_old_version_is_pruned(tmp_path, workspace, arrivals):
    victim = Other(dying_while_pruning, workspace, sources=arrivals, engine="rank_bm25")
    assert victim.ended() == ["begins", ("exit", -9)]
    assert current_version(workspace / "indexes") == "v0002" and version_names(workspace / "indexes") == ["v0002"]
    assert "20 minutes" in answer(workspace, IDLE, CONFIG).text
    result = take(workspace, arrivals, CONFIG)
    assert not result.published and any(".building-v0001" in n for n in result.notes)
    assert state(workspace)["versions"] == ["v0002"]


def dying_at_a_rename(workspace: Path, sources: Path, engine: str, name: str) -> None:
    real = os.replace

    def replace(source: Any, target: Any) -> None:
        if Path(target).name == name:
            os.kill(os.getpid(), 9)
        real(source, target)

    os.replace = replace
    take(workspace, sources, config_of(engine), choices=CHOICES)


@pytest.mark.parametrize("name", [".lock.holder", "kept.json", "version.json", "v0002", "CURRENT"])
def test_killed_before_a_file_gets_its_name(workspace, arrivals, undisturbed, name: str):
    """Its temporary file is left behind, and swept by the next command."""
    assert Other(dying_at_a_rename, workspace, sources=arrivals, engine="rank_bm25", name=name).ended()[-1] == (
        "exit", -9
    )  # fmt: skip
    assert "15 minutes" in answer(workspace, IDLE, CONFIG).text
    notes = takes_all(workspace, arrivals, "rank_bm25", undisturbed["rank_bm25"])
    assert any(".CURRENT." in n and "half written" in n for n in notes) == (name == "CURRENT"), notes


def test_killed_at_any_moment(tmp_path, tmp_path_factory, database, arrivals, undisturbed):
    """10 moments spread over the run, drawn anew for each; 100 in `make test-long`."""
    moments, seed = (100, random.randrange(2**32)) if os.environ.get("RAGBUILD_TEST_LONG") else (10, 13)
    chance, seen = random.Random(seed), Counter()
    template = fresh(tmp_path_factory, tmp_path / "other")
    begun = Other(ordinary, template, sources=arrivals, engine="rank_bm25", choices=CHOICES)
    begun.hear()
    start = time.monotonic()
    begun.hear()
    whole = time.monotonic() - start
    begun.ended()
    for n in range(moments):
        engine = ENGINES[n % 2]
        workspace = fresh(tmp_path_factory, tmp_path / f"workspace-{n}", engine)
        victim = Other(ordinary, workspace, sources=arrivals, engine=engine, choices=CHOICES)
        victim.hear()
        moment = whole * (n + chance.random()) / moments
        time.sleep(moment)
        victim.kill()
        victim.ended()
        where = f"seed {seed}, killed {n}: after {moment:.4f} of {whole:.4f} s, {engine}"
        try:
            assert any(e in answer(workspace, IDLE, config_of(engine)).text for e in EITHER)
            notes = takes_all(workspace, arrivals, engine, undisturbed[engine], again=False)
        except Exception as error:
            raise AssertionError(where) from error
        seen["put in order" if notes else "nothing to do"] += 1
        shutil.rmtree(workspace)
    assert seen["put in order"] >= moments // 5, (seen, whole)


def test_killed_again_and_again(tmp_path, workspace, arrivals, undisturbed):
    """What is left of several runs, one killed while it was putting in order."""
    for step in ("version", "chunks and vectors", "lexical index", "registry"):
        Other(dying, workspace, sources=arrivals, step=step, engine="rank_bm25", choices=CHOICES).ended()
    notes = takes_all(workspace, arrivals, "rank_bm25", undisturbed["rank_bm25"])
    assert sum("took over" in n for n in notes) == 1 and sum("was never published: " in n for n in notes) == 1


# --- a holder that died, and one that lives ---------------------------------------------------------------------------


def test_a_dead_holders_lock_is_taken_over_and_said(tmp_path, workspace, arrivals):
    go = tmp_path / "go"
    victim = Other(holding, workspace, sources=arrivals, engine="rank_bm25", go=go, choices=CHOICES)
    wait_for(go.with_suffix(".held"))
    pid, host = victim.process_id, os.uname().nodename
    with pytest.raises(WorkspaceLocked) as told:
        take(workspace, arrivals, CONFIG)
    assert f"is being written by process {pid} on {host} since 20" in str(told.value) and told.value.exit_code == 6
    start = time.monotonic()
    with pytest.raises(WorkspaceLocked):
        take(workspace, arrivals, CONFIG, wait=0.3)
    assert time.monotonic() - start >= 0.3
    victim.kill()
    assert victim.ended()[-1] == ("exit", -9)
    result = take(workspace, arrivals, CONFIG, choices=CHOICES)
    assert result.published and result.notes[0].startswith(f"took over the lock of process {pid} on {host} since ")
    assert "which ended without giving it up" in result.notes[0]


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_another_machines_writer_on_the_same_database(tmp_path, workspace, arrivals, database):
    """The file lock does not reach it; PostgreSQL's does, and names it."""

    take(workspace, put(tmp_path / "first", {"i.md": ARRIVALS["install-lg700.md"]}), CONFIG)
    registry = Registry.open(workspace)
    with registry.advisory_lock():
        with pytest.raises(WorkspaceLocked, match=f"process {os.getpid()} on {os.uname().nodename} since 20"):
            take(workspace, arrivals, CONFIG)
        assert current_version(workspace / "indexes") == "v0002"
    registry.close()
    assert take(workspace, arrivals, CONFIG, choices=CHOICES).version == "v0003"


@pytest.mark.parametrize("wait", [-1.0, 0.0])
def test_eight_writers_at_once(tmp_path, workspace, wait: float):
    """With --wait each document goes in, once; without, those that come too late say who holds the workspace."""
    go = tmp_path / "go"
    files = [put(tmp_path / f"new-{n}", {f"d{n}.md": install(f"LG-{n}", n)}) / f"d{n}.md" for n in range(8)]
    with asked_throughout(workspace, CONFIG, IDLE, EITHER) as asked:
        if wait:
            others = [Other(ordinary, workspace, sources=f, engine="rank_bm25", wait=wait) for f in files]
        else:  # the first holds it until all others have tried
            first = Other(holding, workspace, sources=files[0], engine="rank_bm25", go=go)
            wait_for(go.with_suffix(".held"))
            others = [Other(ordinary, workspace, sources=f, engine="rank_bm25") for f in files[1:]]
        ended = [other.ended(120) for other in others]
        if not wait:
            go.touch()
            ended.insert(0, first.ended())
    assert asked[0] > 5 and all(e[-1] == ("exit", 0) for e in ended)
    results = [e[1] for e in ended]
    won = [n for n, (kind, *_) in enumerate(results) if kind == "result"]
    assert won == (list(range(8)) if wait else [0]), results
    for _, code, said in (r for r in results if r[0] == "error"):
        assert code == 6 and f"is being written by process {first.process_id} on {os.uname().nodename} since" in said
    if wait:
        assert sorted(r[1]["version"] for r in results) == [f"v000{n}" for n in range(2, 10)]
    held = state(workspace)
    keys = Counter(c.doc_key for c in held["children"] if "LG-" in c.doc_key)
    expected = {f"manuals/install/v1/LG-{n}" for n in won} | {"manuals/install/v1/LG-500"}
    assert keys == dict.fromkeys(expected, 1)
    for n in set(range(8)) - set(won):
        assert take(workspace, files[n], CONFIG).published
    assert len([d for d in state(workspace)["documents"] if d.doc_id == "install"]) == 9


def wait_for(path: Path, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, f"{path} does not come"
        time.sleep(0.01)


# --- a full disk ------------------------------------------------------------------------------------------------------

WRITES = [
    (store.os, "fsync"), (store.os, "replace"), (store.os, "link"), (store.os, "mkdir"), (store.tempfile, "mkstemp"),
    (store.shutil, "copy2"), (staging.SegmentWriter, "add_children"),
    (staging.TantivyIndex, "build"),
]  # fmt: skip


class Full:
    """Writes succeed `room` times and fail from then on, as those on a full disk do; `done` counts them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, code: int = errno.ENOSPC) -> None:
        self.room, self.done, self.code = 10**9, 0, code
        for owner, name in WRITES:
            monkeypatch.setattr(owner, name, self._limited(getattr(owner, name), name))

    def _limited(self, real: Callable[..., Any], name: str) -> Callable[..., Any]:
        def write(*arguments: Any, **options: Any) -> Any:
            self.done += 1
            if self.done > self.room:
                raise OSError(self.code, os.strerror(self.code), str(arguments[0] if arguments else options["dir"]))
            return None if name == "fsync" else real(*arguments, **options)

        return write

    @contextmanager
    def after(self, room: int) -> Iterator[None]:
        self.room, self.done = room, 0
        try:
            yield
        finally:
            self.room = 10**9


@pytest.mark.parametrize("engine", ENGINES)
def test_the_disk_is_full_at_any_write(tmp_path, tmp_path_factory, monkeypatch, arrivals, undisturbed, engine: str):
    """At each of an ingest's writes in turn; each failure is one that the command line explains."""
    config, expected = config_of(engine), undisturbed[engine]
    workspace = fresh(tmp_path_factory, tmp_path / "workspace", engine)
    monkeypatch.delenv("RAGBUILD_DATABASE_URL", raising=False)
    full, before, room = Full(monkeypatch), published(workspace), 0
    step = 1 if engine == "rank_bm25" or os.environ.get("RAGBUILD_TEST_LONG") else 4
    while True:
        with full.after(room):
            try:
                result = take(workspace, arrivals, config, choices=CHOICES)
                break
            except OSError as error:
                assert error.errno == errno.ENOSPC and error.filename, error
        if current_version(workspace / "indexes") != "v0001":
            break
        assert before.items() <= published(workspace).items()
        if room % 8 == 0:
            assert "15 minutes" in answer(workspace, IDLE, config).text
        room += step
    assert room > 40, "an ingest writes more often than that"
    if current_version(workspace / "indexes") == "v0001":
        result = take(workspace, arrivals, config, choices=CHOICES)
        assert result.published
    assert takes_all(workspace, arrivals, engine, expected) == []


def limited(workspace: Path, sources: Path, engine: str, size: int, cache: Path) -> dict[str, Any]:
    """An `ingest` whose process may write no file beyond `size` bytes: the system refuses, whatever library writes."""
    os.environ["RAGBUILD_CACHE_DIR"] = str(cache)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    return ordinary(workspace, sources, engine, choices=CHOICES)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_system_refuses_to_write_more(tmp_path, tmp_path_factory, database, arrivals, undisturbed, engine: str):
    """Arrow's, tantivy's and SQLite's own writes too: each comes to the user as an error of the system."""
    config, expected, said = config_of(engine), undisturbed[engine], []
    workspace = fresh(tmp_path_factory, tmp_path / "workspace", engine)
    take(workspace, put(tmp_path / "fan", {"fan.txt": ARRIVALS["fan.txt"]}), config)  # the registry is made
    before = published(workspace)
    for size in (0, 60, 300, 1000, 3000, 8000, 20000):
        other = Other(limited, workspace, sources=arrivals, engine=engine, size=size, cache=_cache(tmp_path))
        outcome = other.ended()[1]
        if outcome[0] == "result":
            break
        assert outcome[0] == "error" and outcome[1] in (errno.EFBIG, errno.ENOSPC, errno.EIO), (size, outcome)
        said.append(outcome[2])
        assert before.items() <= published(workspace).items() and current_version(workspace / "indexes") == "v0001"
        assert "15 minutes" in answer(workspace, IDLE, config).text
    assert len(said) >= 5, (size, said)
    takes_all(workspace, arrivals, engine, expected)


def _cache(tmp_path: Path) -> Path:
    """A cache of its own, with jieba's in it, so that no other test finds half of an entry."""
    cache = tmp_path / "cache"
    if not cache.exists():
        cache.mkdir()
        (cache / "jieba").symlink_to(Path(os.environ["RAGBUILD_CACHE_DIR"], "jieba").resolve())
    return cache


def limited_lexical(workspace: Path, size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    TantivyIndex.build(workspace / "new", [(n, ["word"], {f: ["x"] for f in FIELDS}) for n in range(50)])


@pytest.mark.parametrize("size", [0, 100, 1000])
def test_tantivys_writer_meets_a_full_disk(tmp_path, size: int):
    """tantivy calls it a ValueError; to the user it is what the system said, with the file."""
    kind, code, said = Other(limited_lexical, tmp_path, size=size).ended()[1]
    assert (kind, code) == ("error", errno.EFBIG) and f"File too large: '{tmp_path}" in said


def test_the_registrys_database_is_full(tmp_path, tmp_path_factory, monkeypatch, arrivals, undisturbed):
    """SQLite says so itself: no page more than it has."""
    monkeypatch.delenv("RAGBUILD_DATABASE_URL", raising=False)
    workspace = fresh(tmp_path_factory, tmp_path / "workspace")
    take(workspace, put(tmp_path / "fan", {"fan.txt": ARRIVALS["fan.txt"]}), CONFIG)
    file, before = workspace / "registry.sqlite", published(workspace)
    with sqlite3.connect(file) as connection:
        pages = connection.execute("pragma page_count").fetchone()[0]
    connection.close()
    real = Database.__init__

    def small(self: Database, *arguments: Any) -> None:
        real(self, *arguments)
        sa.event.listen(self.engine, "connect", lambda c, _: c.execute(f"pragma max_page_count={pages}"))

    monkeypatch.setattr(Database, "__init__", small)
    many = put(tmp_path / "many", {f"i{n}.md": install(f"LG-{n}", n) for n in range(40)})
    with pytest.raises(OSError, match="no space for the registry") as full:
        take(workspace, many, CONFIG)
    assert full.value.errno == errno.ENOSPC and full.value.filename == str(file)
    assert published(workspace) == before and "15 minutes" in answer(workspace, IDLE, CONFIG).text
    monkeypatch.setattr(Database, "__init__", real)
    takes_all(workspace, arrivals, "rank_bm25", undisturbed["rank_bm25"])


# --- a workspace that can't be written --------------------------------------------------------------------------------


def test_a_read_only_file_system(tmp_path, tmp_path_factory, monkeypatch, arrivals, undisturbed):
    monkeypatch.delenv("RAGBUILD_DATABASE_URL", raising=False)
    expected, workspace = undisturbed["rank_bm25"], fresh(tmp_path_factory, tmp_path / "workspace")
    before = published(workspace)
    with monkeypatch.context() as patched:
        full = Full(patched, errno.EROFS)
        with full.after(0), pytest.raises(OSError, match="Read-only file system") as told:
            take(workspace, arrivals, CONFIG, choices=CHOICES)
        assert told.value.errno == errno.EROFS and str(workspace) in str(told.value.filename)
        assert "15 minutes" in answer(workspace, IDLE, CONFIG).text
    assert published(workspace) == before
    assert takes_all(workspace, arrivals, "rank_bm25", expected) == []


def test_a_folder_that_may_not_be_written(tmp_path, tmp_path_factory, monkeypatch, arrivals):
    """As a user without rights: a process that gives up root's does not get in, and reads all the same."""
    monkeypatch.delenv("RAGBUILD_DATABASE_URL", raising=False)
    workspace = fresh(tmp_path_factory, tmp_path / "workspace")
    before = published(workspace)
    for path in (*workspace.rglob("*"), workspace):
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        outcome = Other(unprivileged, workspace, sources=arrivals, cache=_cache(tmp_path)).ended()[1]
    finally:
        for path in (workspace, *workspace.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
    kind, code, said = outcome
    assert (kind, code) == ("error", errno.EACCES) and str(workspace) in said, outcome
    assert published(workspace) == before and "15 minutes" in answer(workspace, IDLE, CONFIG).text


def unprivileged(workspace: Path, sources: Path, cache: Path) -> None:
    os.environ["RAGBUILD_CACHE_DIR"] = str(cache)
    if os.geteuid() == 0:
        for folder in (cache, *cache.rglob("*")):
            os.chmod(folder, 0o777)
        for folder in workspace.parents:
            if folder.stat().st_uid == 0 and folder != Path("/"):
                os.chmod(folder, folder.stat().st_mode | 0o011)
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
    assert "15 minutes" in answer(workspace, IDLE, CONFIG).text
    take(workspace, sources, CONFIG, choices=CHOICES)


def test_an_index_that_is_damaged_is_not_built_on(tmp_path, workspace, arrivals):
    path = workspace / "indexes" / "v0001" / "documents.jsonl"
    path.write_bytes(path.read_bytes() + b"\n")
    before = published(workspace)
    with pytest.raises(InputRefused, match="was changed after publishing"):
        take(workspace, arrivals, CONFIG)
    assert published(workspace) == before
    gc.collect()


# --- damage by hand, or by a copy that was put back -------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["no CURRENT", "no version.json"])
def test_nothing_is_undone_or_swept_where_current_cannot_be_trusted(tmp_path, workspace, arrivals, damage: str):
    take(workspace, arrivals, config_of(), choices=CHOICES)
    before, indexes = state(workspace), workspace / "indexes"
    lost = indexes / ("CURRENT" if damage == "no CURRENT" else "v0002/version.json")
    held = lost.read_bytes()
    lost.unlink()
    with pytest.raises(InputRefused, match="CURRENT is missing: write the name|v0002 is not there"):
        take(workspace, arrivals, config_of())
    lost.write_bytes(held)
    assert state(workspace) == before


def test_an_old_version_that_is_damaged_stops_nobody(tmp_path, workspace, arrivals):
    assert take(workspace, arrivals, config_of(), choices=CHOICES).published
    (workspace / "indexes" / "v0001" / "kept.json").unlink()
    assert take(workspace, put(tmp_path / "lone", LONE), config_of()).published
    assert [s["version"] for s in snapshot.snapshots(workspace)] == ["v0001", "v0002", "v0003"]
    with pytest.raises(InputRefused, match=r"kept\.json"):
        snapshot.rollback(workspace, "v0001", config_of())
    assert snapshot.check(workspace, deep=True) == []


def test_an_older_copy_of_the_registry_is_brought_up_to_the_index(tmp_path, workspace, arrivals, monkeypatch):
    monkeypatch.delenv("RAGBUILD_DATABASE_URL", raising=False)
    take(workspace, put(tmp_path / "first", LONE), config_of())
    older = (workspace / "registry.sqlite").read_bytes()
    take(workspace, arrivals, config_of(), choices=CHOICES)
    (workspace / "registry.sqlite").write_bytes(older)
    assert snapshot.check(workspace)
    result = take(workspace, arrivals, config_of(), choices=CHOICES)
    assert "the registry did not fit v0003" in " ".join(result.notes) and not result.count("taken")
    assert snapshot.check(workspace) == []
    assert not take(workspace, arrivals, config_of()).notes, "said once"


def test_a_copy_that_shares_a_registry_is_not_written_to(tmp_path, workspace, database):
    """One PostgreSQL, a folder that was copied with its id: what one publishes the other must not undo."""
    take(workspace, put(tmp_path / "one", LONE), config_of())
    copy = shutil.copytree(workspace, tmp_path / "copy")
    take(workspace, put(tmp_path / "two", {"fan.txt": "Another fan tray."}), config_of())
    if database is None:  # the file was copied, too
        assert take(copy, tmp_path / "two", config_of()).published
        return
    with pytest.raises(InputRefused, match=r"v0003 as published.*a copy of another workspace.*Remove .*workspace-id"):
        take(copy, tmp_path / "two", config_of())
    (copy / ".workspace-id").unlink()
    assert take(copy, tmp_path / "two", config_of()).published
    assert snapshot.check(workspace) == snapshot.check(copy) == []


def test_current_set_back_by_hand(tmp_path, workspace, arrivals):
    before = state(workspace)
    take(workspace, arrivals, config_of(), choices=CHOICES)
    (workspace / "indexes" / "CURRENT").write_text("v0001\n")
    result = take(workspace, put(tmp_path / "empty", {}), config_of())
    assert "v0002 was never published" in " ".join(result.notes)
    assert {**state(workspace), "history": [], "queue": []} == {**before, "history": [], "queue": []}

"""Going back and building anew: exact former answers, registry and index together, nothing that is in use removed."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from ragbuild.core.config import stored_config
from ragbuild.core.errors import InputRefused, UsageError, WorkspaceLocked
from ragbuild.core.lock import WriterLock
from ragbuild.core.records import index_text
from ragbuild.core.store import read_json
from ragbuild.index.versions import FILES, IndexVersion, version_names
from ragbuild.knowledge import snapshot
from ragbuild.knowledge.rebuild import rebuild, triggers
from ragbuild.knowledge.registry import Registry
from ragbuild.knowledge.snapshot import rollback, snapshots
from ragbuild.online.pipeline import Pipeline
from tests.conftest import FakeEmbedder
from tests.knowledge.workspaces import (
    ARRIVALS,
    CHOICES,
    DOCUMENTS,
    ENGINES,
    Other,
    answer,
    config_of,
    found,
    fresh,
    install,
    put,
    state,
    take,
)

CONFIG = config_of()
IDLE = "How long is the idle timeout of a session?"
INDEXED = ("children", "parents", "tokens", "vectors", "documents", "terms", "kept")  # what a version holds
QUESTIONS = [IDLE, "短信验证码为几位数字", "How long are backups kept?"]


def same_content(a: dict, b: dict) -> bool:
    return all(a[name] == b[name] for name in (*INDEXED, "registered"))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_rollback_brings_back_the_exact_former_answers(tmp_path, tmp_path_factory, database, arrivals, engine: str):
    config, workspace = config_of(engine), fresh(tmp_path_factory, tmp_path / "workspace", engine)
    take(workspace, put(tmp_path / "first", {"i.md": install("LG-900", 30)}), config)
    before, hits = state(workspace), found(workspace, config)
    answers = [answer(workspace, q, config).text for q in QUESTIONS]
    take(workspace, arrivals, config, choices=CHOICES)
    after, new_hits = state(workspace), found(workspace, config)
    assert new_hits != hits
    name, notes = rollback(workspace, "v0002", config, why="it was better")
    assert (name, notes) == ("v0004", [])
    back = state(workspace)
    assert same_content(back, before) and found(workspace, config) == hits
    assert [answer(workspace, q, config).text for q in QUESTIONS] == answers
    assert back["versions"] == ["v0001", "v0002", "v0003", "v0004"]
    name, _ = rollback(workspace, "v0003", config)  # a rollback of the rollback
    assert same_content(state(workspace), after) and found(workspace, config) == new_hits
    name, _ = rollback(workspace, "v0001", config)  # the build itself
    assert name == "v0006" and found(workspace, config, "v0001") == found(workspace, config)
    assert {d.key for d in state(workspace)["registered"]} == {d.key for d in before["registered"]} - {
        "manuals/install/v1/LG-900"
    }
    result = take(workspace, arrivals, config, choices=CHOICES)  # and forward again, as after any other version
    assert result.version == "v0007" and result.count("taken") == 5
    assert "20 minutes" in answer(workspace, IDLE, config).text


def test_a_rollback_is_in_the_history(tmp_path, workspace, arrivals):
    take(workspace, arrivals, CONFIG, choices=CHOICES)
    rollback(workspace, "v0001", CONFIG, why="wrong values")
    registry = Registry.open(workspace)
    rows = [h for h in registry.history("manuals/portal/v4/all")]
    assert [(h.version, h.from_status, h.to_status, h.decision, h.decided_by) for h in rows] == [
        (1, None, "active", "build", "build"),
        (2, "active", "superseded", "replace", "expert"),
        (3, "superseded", "active", "rollback", "rollback"),
    ]
    left = registry.history("manuals/portal/v5/all")[-1]
    assert (left.to_status, left.decision, left.reason) == (None, "rollback", "the state of v0001")
    run = registry.runs()[-1]
    assert (run.command, run.why, run.outcome, run.note) == (
        "rollback", "wrong values", "published", "content of v0001"
    )  # fmt: skip
    assert registry.documents(2) and len(registry.documents(2)) > len(registry.documents(3))
    registry.close()


def test_what_cannot_be_gone_back_to(tmp_path, workspace, arrivals):
    take(workspace, arrivals, CONFIG, choices=CHOICES)
    before = state(workspace)
    with pytest.raises(UsageError, match="there is no version 'v0009'; 'ragbuild snapshots' lists v0001, v0002"):
        rollback(workspace, "v0009", CONFIG)
    with pytest.raises(UsageError, match="there is no version '../v0001'"):
        rollback(workspace, "../v0001", CONFIG)
    with pytest.raises(UsageError, match="v0002 is in use already; nothing was changed"):
        rollback(workspace, "v0002", CONFIG)
    with WriterLock(workspace), pytest.raises(WorkspaceLocked, match="is being written by process"):
        rollback(workspace, "v0001", CONFIG)
    assert state(workspace) == before


def dying_rollback(workspace: Path, step: str) -> None:
    import os

    rollback(workspace, "v0001", CONFIG, on_step=lambda done: os.kill(os.getpid(), 9) if done == step else None)


@pytest.mark.parametrize("step", ["registry", "version", "CURRENT"])
def test_a_rollback_that_is_killed(tmp_path, workspace, arrivals, step: str):
    take(workspace, arrivals, CONFIG, choices=CHOICES)
    old, new = found(workspace, CONFIG, "v0001"), found(workspace, CONFIG)
    assert Other(dying_rollback, workspace, step=step).ended()[-1] == ("exit", -9)
    assert found(workspace, CONFIG) == (old if step == "CURRENT" else new)
    if step == "CURRENT":
        rollback(workspace, "v0002", CONFIG)
        assert found(workspace, CONFIG) == new
    else:
        name, notes = rollback(workspace, "v0001", CONFIG)
        assert name == "v0003" and any("by rollback undone" in n for n in notes)
        assert found(workspace, CONFIG) == old
    state(workspace)


# --- snapshots and pruning --------------------------------------------------------------------------------------------


def test_snapshots_say_when_why_and_how_much(tmp_path, workspace, arrivals):
    (only,) = snapshots(workspace)
    assert (only["version"], only["current"], only["command"], only["documents"]) == ("v0001", True, "build", 7)
    take(workspace, arrivals, CONFIG, choices=CHOICES, why="second generation")
    rollback(workspace, "v0001", CONFIG)
    rows = snapshots(workspace)
    assert [(r["version"], r["command"], r["why"], r["current"]) for r in rows] == [
        ("v0001", "build", "", False),
        ("v0002", "ingest", "second generation", False),
        ("v0003", "rollback", "back to v0001", True),
    ]
    for row in rows:
        version = IndexVersion(workspace / "indexes", row["version"])
        assert row["children"] == len(version) and row["documents"] == len(version.documents)
        assert 0 < row["own"] < row["size"] and row["segments"] == len(version.manifest["segments"])
    assert all(r["when"][:2] == "20" and r["when"].endswith("+00:00") for r in rows[1:])
    indexes = workspace / "indexes"
    there = sum(p.stat().st_size for p in indexes.rglob("*") if p.is_file() and p.name != "CURRENT")
    assert rows[0]["size"] < there < sum(r["size"] for r in rows)


def test_pruning_keeps_the_last_and_what_is_held(tmp_path, workspace):
    indexes, config = workspace / "indexes", config_of(**{"knowledge.keep_versions": 3})
    reader = IndexVersion(indexes)
    hits = found(workspace, config)
    notes = []
    for n in range(5):
        notes += take(workspace, put(tmp_path / f"n{n}", {"i.md": install(f"LG-{n}", n)}), config).notes
    assert version_names(indexes) == ["v0001", "v0004", "v0005", "v0006"], "v0001 is read by somebody"
    assert notes[-1] == "pruned v0003 (knowledge.keep_versions = 3)"
    pipeline = Pipeline(reader, config, FakeEmbedder())
    assert "15 minutes" in pipeline.ask(IDLE).text and found(workspace, config, "v0001") == hits
    del reader, pipeline
    gc.collect()
    rollback(workspace, "v0004", config)
    assert version_names(indexes) == ["v0005", "v0006", "v0007"]
    one = config_of(**{"knowledge.keep_versions": 1})
    rollback(workspace, "v0006", one)
    gc.collect()
    take(workspace, put(tmp_path / "last", {"i.md": install("LG-99", 9)}), one)
    assert state(workspace)["versions"] == ["v0009"]
    with pytest.raises(UsageError, match="there is no version 'v0001'"):
        rollback(workspace, "v0001", one)


def test_a_registry_that_began_later_than_the_version(tmp_path, workspace, arrivals, database):
    """Its file was lost: the state that a rollback brings is that of the documents which the index names."""
    take(workspace, arrivals, CONFIG, choices=CHOICES)
    old = found(workspace, CONFIG, "v0001")
    if database is None:
        (workspace / "registry.sqlite").unlink()
    else:
        (workspace / ".workspace-id").unlink()
    rollback(workspace, "v0001", CONFIG)
    assert found(workspace, CONFIG) == old and snapshot.check(workspace) == []
    assert {d.key for d in state(workspace)["registered"]} == {
        d.key for d in IndexVersion(workspace / "indexes").documents
    }


# --- built anew -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_a_rebuild_gives_the_same_chunks(tmp_path, tmp_path_factory, database, arrivals, engine: str):
    config, workspace = config_of(engine), fresh(tmp_path_factory, tmp_path / "workspace", engine)
    take(workspace, arrivals, config, choices=CHOICES)
    before = state(workspace)
    result = rebuild(workspace, config, embedder=FakeEmbedder(), why="to see")
    after = state(workspace)
    assert (result.version, result.former, result.published) == ("v0003", "v0002", True)
    assert all(before[n] == after[n] for n in (*INDEXED, "registered", "queue"))
    manifest = IndexVersion(workspace / "indexes").manifest
    assert len(manifest["segments"]) == 1 and manifest["made_by"] == "rebuild"
    assert manifest["built"] == {
        "version": "v0003", "children": manifest["children"], "terms": len(after["terms"]), "terms_changed": 0,
    }  # fmt: skip
    assert "20 minutes" in answer(workspace, IDLE, config).text
    assert not take(workspace, arrivals, config, choices=CHOICES).published


def test_a_rebuild_with_another_model(tmp_path, workspace, arrivals):
    """Searching with the wrong one is refused, before and after; the old version answers until the new one is there."""
    take(workspace, arrivals, CONFIG, choices=CHOICES)
    version = IndexVersion(workspace / "indexes")
    other = FakeEmbedder()
    other.name = f"other-{tmp_path.name}"  # nobody has encoded with it yet
    with pytest.raises(UsageError, match="this index was encoded with 'fake' and can't be searched with 'other-"):
        Pipeline(version, CONFIG, other)
    changed = "embedding model changed"
    assert [t["recommended"] for t in triggers(version, CONFIG) if t["trigger"] == changed] == [False]
    wanted = CONFIG.with_overrides({"embedder.name": other.name})
    row = next(t for t in triggers(version, wanted) if t["trigger"] == changed)
    assert row["recommended"] and row["said"] == f"index: fake; configured: {other.name}"
    seen = []

    def on_step(step: str) -> None:
        seen.append((step, IndexVersion(workspace / "indexes").name, answer(workspace, IDLE, CONFIG).text[:50]))

    def last(step: str) -> None:
        on_step(step) if step != "CURRENT" else None

    rebuild(workspace, wanted, embedder=other, on_step=last)
    assert {(name, "20 minutes" in text) for _, name, text in seen} == {("v0002", True)}
    now = IndexVersion(workspace / "indexes")
    assert now.manifest["embedder"]["name"] == other.name
    assert set(other.encoded) == {index_text(c) for c in now.children(range(len(now)))}, "every text, by the new one"
    assert "20 minutes" in Pipeline(now, wanted, other).ask(IDLE).text
    with pytest.raises(UsageError, match=f"encoded with '{other.name}' and can't be searched with 'fake'"):
        Pipeline(now, CONFIG, FakeEmbedder())
    rollback(workspace, "v0002", CONFIG)
    assert "20 minutes" in answer(workspace, IDLE, CONFIG).text


def test_a_rebuild_without_kept_texts_is_refused(tmp_path, workspace):
    version = IndexVersion(workspace / "indexes")
    from ragbuild.index.staging import write_version

    chunks = [c for p in version.all_parents() for c in (p, *version.children(version.rows_of(p.child_ids)))]
    write_version(
        workspace / "indexes", chunks, version.documents, version.entries, config=CONFIG,
        encode=FakeEmbedder().encode_documents, embedder={"name": "fake", "dim": 64},
    )  # fmt: skip
    with pytest.raises(InputRefused, match="the parsed text of 7 documents was not kept"):
        rebuild(workspace, CONFIG, embedder=FakeEmbedder())
    assert state_names(workspace) == ["v0001", "v0002"]


def state_names(workspace: Path) -> list[str]:
    assert not list((workspace / "indexes").glob(".*"))
    return version_names(workspace / "indexes")


def test_triggers_say_their_present_value(tmp_path, workspace):
    files = {f"i{n}.md": install(f"LG-{n}", n) for n in range(30)}
    take(workspace, put(tmp_path / "many", files), CONFIG)
    recall = {"built": 0.9, "now": 0.84, "n": 50}
    rows = {t["trigger"]: t for t in triggers(IndexVersion(workspace / "indexes"), CONFIG, recall)}
    built = read_json(workspace / "indexes" / "v0001" / "version.json")["children"]
    assert rows["corpus grew"]["value"] == round(30 / built, 4) and rows["corpus grew"]["recommended"]
    assert rows["dictionary changed"]["recommended"], "as many products as there are models"
    assert rows["recall@5 fell"]["value"] == pytest.approx(0.06) and rows["recall@5 fell"]["recommended"]
    assert not rows["embedding model changed"]["recommended"]


def test_files_of_versions_are_shared_and_never_written_again(tmp_path, workspace, arrivals):
    indexes = workspace / "indexes"
    inodes = {p.name: (p.stat().st_ino, p.stat().st_mtime_ns) for p in (indexes / FILES).iterdir()}
    take(workspace, arrivals, CONFIG, choices=CHOICES)
    rebuild(workspace, CONFIG, embedder=FakeEmbedder())
    rollback(workspace, "v0001", CONFIG)
    now = {p.name: (p.stat().st_ino, p.stat().st_mtime_ns) for p in (indexes / FILES).iterdir()}
    assert inodes.items() <= now.items()


def test_a_rollback_brings_back_what_the_index_was_built_with(tmp_path, workspace, arrivals):
    """Two rebuilds, and back behind both: an index that is searched with another model answers nothing."""
    config = config_of()
    for tokens, name in ((100, "first"), (120, "second")):
        embedder = FakeEmbedder()
        embedder.name = name
        anew = config.with_overrides({"chunk.child_tokens": tokens, "embedder.name": name})
        rebuild(workspace, anew, regress=False, embedder=embedder)
    for name, expected in (("v0001", config), ("v0002", None), ("v0003", anew), ("v0004", config)):
        rollback(workspace, name, config)
        stored = stored_config(workspace)
        if expected is not None:
            assert stored == expected
        else:
            assert (stored.chunk.child_tokens, stored.embedder.name) == (100, "first")
        made = IndexVersion(workspace / "indexes").manifest["embedder"]["name"]
        assert made == (stored.embedder.name if name in ("v0002", "v0003") else "fake")


def test_a_damaged_version_in_use_is_left_by_a_rollback(workspace: Path, tmp_path: Path):
    take(workspace, put(tmp_path / "new", {"i.md": install("LG-77", 9)}), CONFIG)
    (workspace / "indexes" / "v0002" / "prompt.md").write_text("damaged")
    with pytest.raises(InputRefused, match="was changed after publishing"):
        take(workspace, put(tmp_path / "more", {"j.md": install("LG-78", 9)}), CONFIG)
    name, notes = rollback(workspace, "v0001", CONFIG)
    assert name == "v0003" and any("was changed after publishing" in note for note in notes)
    assert snapshot.check(workspace) == [] and len(IndexVersion(workspace / "indexes")) > 0


def test_a_superseded_document_comes_back_when_it_is_given_again(workspace: Path, tmp_path: Path):
    newer = put(tmp_path / "new", {"portal-5.zh.md": ARRIVALS["portal-5.zh.md"]})
    take(workspace, newer, CONFIG, choices={"portal": "replace"})
    former = put(tmp_path / "former", {"portal-4.zh.md": DOCUMENTS["portal-4.zh.md"]})
    assert take(workspace, former, CONFIG, choices={}).count("unchanged") == 1, "not by itself"
    assert take(workspace, former, CONFIG, choices={"portal": "legacy"}).published
    status = {d.key: d.status for d in IndexVersion(workspace / "indexes").documents}
    assert status["manuals/portal/v4/all"] == "legacy" and status["manuals/portal/v5/all"] == "active"
    assert snapshot.check(workspace) == []

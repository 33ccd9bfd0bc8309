"""The registry: states by version, history, undo, chains, locks and errors, each on SQLite and on PostgreSQL."""

from __future__ import annotations

import errno
import os
import sqlite3
import subprocess
import sys
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ragbuild.core.config import shown_url
from ragbuild.core.errors import InputRefused, MissingResource, UsageError, WorkspaceLocked
from ragbuild.core.records import Document
from ragbuild.knowledge.registry import Change, Queued, Registry, Run, drift
from ragbuild.knowledge.registry_tables import SchemaRow, StateRow
from tests.conftest import make_document

OLD = make_document("guide", doc_version="v4.2", title="用户手册", product_model=("LG-900", "LG-500"))
NEW = make_document("guide", doc_version="v5.0", supersedes=OLD.key, product_model=("LG-900", "LG-500"))
OTHER = make_document("faq")


def run(number: int, target: int, **fields: object) -> Run:
    base = {"id": f"r{number}", "command": "ingest", "why": "test", "who": "me", "host": "here", "pid": 7}
    return Run.model_validate(
        {**base, "started": "2026-12-01T08:00:00+00:00", "base": target - 1, "target": target} | fields
    )


def change(document: Document, decision: str = "parallel") -> Change:
    return Change(document=document, decision=decision, reason="because", decided_by="expert")


def begun(registry: Registry, number: int, target: int) -> str:
    registry.begin(run(number, target))
    return f"r{number}"


@pytest.fixture
def registry(tmp_path: Path, database: str | None) -> Registry:
    """Two documents in version 1, from a build."""
    out = Registry.open(tmp_path)
    out.adopt([OLD, OTHER], 1, begun(out, 1, 1))
    out.finish("r1", "published", "2026-12-01T08:01:00+00:00")
    yield out
    out.close()


def superseded(document: Document) -> Document:
    return document.model_copy(update={"status": "superseded"})


def test_each_version_keeps_its_own_state(registry: Registry):
    registry.apply([change(NEW, "replace"), change(superseded(OLD), "replace")], 2, begun(registry, 2, 2))
    assert registry.documents(0) == []
    assert registry.documents(1) == [OTHER, OLD]  # default/faq… before default/guide…; every field as it was
    assert registry.documents(2) == registry.documents(99) == [OTHER, superseded(OLD), NEW]
    assert registry.find(2, doc_id="guide") == [superseded(OLD), NEW]
    assert registry.find(1, doc_id="guide") == registry.find(1, content_hash=OLD.content_hash) == [OLD]
    assert registry.find(2, doc_id="faq", content_hash=OLD.content_hash) == []
    assert [(h.key, h.from_status, h.to_status, h.version, h.decision, h.run_id) for h in registry.history()] == [
        (OLD.key, None, "active", 1, "build", "r1"),
        (OTHER.key, None, "active", 1, "build", "r1"),
        (NEW.key, None, "active", 2, "replace", "r2"),
        (OLD.key, "active", "superseded", 2, "replace", "r2"),
    ]
    (row,) = registry.history(NEW.key)
    assert (row.reason, row.decided_by, row.when[-6:]) == ("because", "expert", "+00:00")


def test_a_document_changed_twice_in_one_run_has_one_state_and_two_rows_of_history(registry: Registry):
    registry.apply([change(NEW)], 2, begun(registry, 2, 2))
    later = NEW.model_copy(update={"title": "Second thoughts"})
    registry.apply([change(later, "correction")], 2, "r2")
    assert registry.documents(2) == [OTHER, OLD, later]
    assert [h.decision for h in registry.history(NEW.key)] == ["parallel", "correction"]
    registry.undo(1)
    assert registry.documents(2) == [OTHER, OLD]


def test_a_build_makes_the_state_exactly_its_documents(registry: Registry):
    registry.adopt([OLD, NEW], 2, begun(registry, 2, 2))
    assert registry.documents(2) == [OLD, NEW] and registry.documents(1) == [OTHER, OLD]
    assert [(h.key, h.from_status, h.to_status) for h in registry.history()[2:]] == [
        (OTHER.key, "active", None), (NEW.key, None, "active"),
    ]  # fmt: skip
    registry.adopt([NEW, OLD], 3, begun(registry, 3, 3))
    assert len(registry.history()) == 4, "nothing changed, so nothing is written"


def test_rollback_brings_back_a_former_state_as_a_new_version(registry: Registry):
    registry.apply([change(NEW), change(superseded(OLD))], 2, begun(registry, 2, 2))
    registry.restore(1, 3, begun(registry, 3, 3))
    assert registry.documents(3) == registry.documents(1) == [OTHER, OLD]
    assert registry.documents(2) == [OTHER, superseded(OLD), NEW]
    registry.restore(2, 4, begun(registry, 4, 4))
    assert registry.documents(4) == registry.documents(2)
    (first, second) = registry.history(NEW.key)[1:]
    assert (first.to_status, first.decision, first.decided_by, first.reason) == (
        None, "rollback", "rollback", "the state of v0001",
    )  # fmt: skip
    assert (second.from_status, second.to_status, second.version) == (None, "active", 4)


def test_what_was_never_published_is_undone_and_said(registry: Registry):
    before = registry.documents(1), registry.history()
    registry.apply([change(NEW), change(superseded(OLD))], 2, begun(registry, 2, 2))
    (said,) = registry.undo(1)
    assert (
        "v0002" in said
        and "2 registry change(s)" in said
        and "ingest" in said
        and "r2" in said
        and "process 7 on here" in said
    )
    assert (registry.documents(2), registry.history()) == before and registry.documents(1) == before[0]
    assert [r.outcome for r in registry.runs()] == ["published", "undone"]
    assert registry.undo(1) == []
    registry.apply([change(NEW)], 2, begun(registry, 3, 2))  # the number is free again
    assert registry.documents(2) == [OTHER, OLD, NEW]
    assert registry.undo(2) == [] and registry.runs()[2].outcome == "published", "published, then ended"


def test_states_are_not_written_before_later_ones(registry: Registry):
    registry.apply([change(NEW)], 3, begun(registry, 2, 3))
    with pytest.raises(ValueError, match="undo what was never published"):
        registry.apply([change(NEW)], 2, "r2")


def test_the_chain_goes_from_the_newest_to_the_oldest(registry: Registry):
    newest = make_document("guide", doc_version="v5.1", supersedes=NEW.key)
    registry.apply([change(newest), change(NEW), change(superseded(OLD))], 2, begun(registry, 2, 2))
    assert registry.chain(newest.key, 2) == [newest, NEW, superseded(OLD)]
    assert registry.chain(NEW.key, 2) == [NEW, superseded(OLD)]
    assert registry.chain(newest.key, 1) == [] and registry.chain(OTHER.key, 2) == [OTHER]


def test_dangling_links_and_circles_are_refused_whole(registry: Registry):
    run_id = begun(registry, 2, 2)
    lost = make_document("faq", doc_version="v9", supersedes="default/faq/v8/all")
    with pytest.raises(InputRefused, match=r"default/faq/v9/all supersedes default/faq/v8/all"):
        registry.apply([change(NEW), change(lost)], 2, run_id)
    circle = OLD.model_copy(update={"supersedes": NEW.key})
    with pytest.raises(InputRefused, match="circle.*v4.2.*v5.0|circle.*v5.0.*v4.2"):
        registry.apply([change(NEW), change(circle)], 2, run_id)
    itself = OTHER.model_copy(update={"supersedes": OTHER.key})
    with pytest.raises(InputRefused, match="circle: default/faq/v4.2/all <- default/faq/v4.2/all"):
        registry.apply([change(itself)], 2, run_id)
    with pytest.raises(InputRefused, match=f"two documents have the key {OTHER.key}"):
        registry.apply([change(OTHER), change(OTHER)], 2, run_id)
    with pytest.raises(InputRefused, match="v5.0"):  # the older one is no longer there
        registry.adopt([NEW], 2, run_id)
    assert registry.documents(2) == [OTHER, OLD] and len(registry.history()) == 2


def test_the_database_itself_holds_the_links(registry: Registry):
    """Foreign keys are on: a row that names no registered document is refused by the database."""
    for column in ("supersedes", "key"):
        with pytest.raises(sa.exc.IntegrityError), registry._db.transaction(write=True) as db:
            row = dict(db.execute(sa.select(StateRow.__table__)).mappings().first())
            db.execute(sa.insert(StateRow).values(row | {"valid_from": 9, column: "default/none/v1/all"}))
    with pytest.raises(sa.exc.IntegrityError):
        registry.apply([change(NEW)], 2, "no such run")
    assert registry.documents(2) == [OTHER, OLD]


def test_the_queue(registry: Registry):
    first = Queued(
        key="k/one/v1/all", doc_source="资料.md", content_hash="h", suggestion="expert", reason="无法比较",
        signals={"version order": "特别版 / SB-2026-03"}, since="2026-12-02", run_id="r1",
    )  # fmt: skip
    second = first.model_copy(update={"key": "k/two/v1/all", "since": "2026-12-01"})
    registry.queue([first, second])
    assert registry.queued() == [second, first]
    registry.queue([first.model_copy(update={"since": "2027-01-01", "reason": "still"})])
    assert [(q.since, q.reason) for q in registry.queued()] == [("2026-12-01", "无法比较"), ("2026-12-02", "still")]
    corrected = first.model_copy(update={"since": "2027-01-01", "content_hash": "h2"})
    registry.queue([corrected])
    assert registry.queued() == [second, corrected]
    registry.unqueue([second.key, "unknown"])
    assert registry.queued() == [corrected] and registry.documents(1) == [OTHER, OLD]


def test_opening_it_again_finds_it(registry: Registry, tmp_path: Path, database: str | None):
    registry.apply([change(NEW)], 2, begun(registry, 2, 2))
    registry.finish("r2", "failed", "2026-12-01T09:00:00+00:00", "disk full")
    again = Registry.open(tmp_path)
    assert again.workspace_id == registry.workspace_id and str(uuid.UUID(again.workspace_id)) == again.workspace_id
    assert again.documents(2) == [OTHER, OLD, NEW] and again.history() == registry.history()
    assert again.runs()[1] == run(2, 2, outcome="failed", finished="2026-12-01T09:00:00+00:00", note="disk full")
    assert (tmp_path / "registry.sqlite").exists() == (database is None)


def test_workspaces_do_not_see_each_other(registry: Registry, tmp_path: Path):
    other = Registry.open(_folder(tmp_path / "two"))
    other.adopt([OTHER], 1, begun(other, 1, 1))  # the same keys and run ids
    assert other.documents(1) == [OTHER] and len(other.history()) == 1
    other.undo(0)
    assert other.documents(1) == [] and registry.documents(1) == [OTHER, OLD] and len(registry.runs()) == 1


def test_exists_makes_nothing(tmp_path: Path, database: str | None):
    folder = _folder(tmp_path / "new")
    assert not Registry.exists(folder) and list(folder.iterdir()) == []
    registry = Registry.open(folder)
    registry.begin(run(1, 1))
    assert not Registry.exists(folder), "a run that ended before it registered a document leaves nothing to read"
    registry.adopt([OLD], 1, "r1")
    assert Registry.exists(folder) and not Registry.exists(tmp_path)
    with pytest.raises(InputRefused, match="is no workspace"):
        Registry.open(tmp_path / "missing")
    assert not (tmp_path / "missing").exists()


def test_many_that_open_a_new_registry_at_once_agree(tmp_path: Path, database: str | None):
    with ThreadPoolExecutor(6) as pool:
        ids = set(pool.map(lambda _: Registry.open(tmp_path).workspace_id, range(6)))
    assert len(ids) == 1
    assert {p.name for p in tmp_path.iterdir()} <= {".workspace-id", "registry.sqlite"}


def test_another_schema_version_is_refused(registry: Registry, tmp_path: Path):
    with registry._db.transaction(write=True) as db:
        db.execute(sa.update(SchemaRow).values(version=99))
    with pytest.raises(InputRefused, match="schema version 99, expected version 1; use the ragbuild that wrote it"):
        Registry.open(tmp_path)
    with registry._db.transaction(write=True) as db:
        db.execute(sa.schema.DropTable(SchemaRow.__table__))
    with pytest.raises(InputRefused, match="tables that ragbuild did not make"):
        Registry.open(tmp_path)


def test_a_killed_writer_leaves_the_former_state(registry: Registry, tmp_path: Path):
    """The process ends within the transaction, after the rows were written and before they were committed."""
    code = (
        "import os, sys; from pathlib import Path\n"
        "from tests.knowledge.test_registry import NEW, change\n"
        "from ragbuild.knowledge import registry as module\n"
        "registry = module.Registry.open(Path(sys.argv[1]))\n"
        "with registry._db.transaction(write=True) as db:\n"
        "    registry._write(db, {NEW.key: (NEW, dict(decision='x', reason='x', decided_by='x'))}, 2, 'r2')\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    begun(registry, 2, 2)
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=root, timeout=60, check=False)
    assert done.returncode == -9
    assert registry.documents(2) == [OTHER, OLD] and len(registry.undo(1)) == 1
    registry.apply([change(NEW)], 2, begun(registry, 3, 2))


def test_one_writer_a_workspace_on_postgresql(registry: Registry, tmp_path: Path, database: str | None):
    with registry.advisory_lock():
        again = Registry.open(tmp_path)
        assert again.documents(1) == [OTHER, OLD], "readers don't wait"
        if database is None:
            with again.advisory_lock():
                return
        with (
            pytest.raises(WorkspaceLocked, match=rf"ragbuild, process {os.getpid()} on .* since 20"),
            again.advisory_lock(),
        ):
            pass
        other = Registry.open(_folder(tmp_path / "two"))
        with other.advisory_lock():
            pass
    with again.advisory_lock():
        pass


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.dictionaries(st.sampled_from("abcd"), st.sampled_from(["active", "legacy", "superseded"])), max_size=4)
)
def test_any_series_of_states_can_be_read_back_and_undone(registry: Registry, tmp_path: Path, states: list[dict]):
    """An oracle of plain lists: adopt state n as version n, read all back; undo to any version leaves those before."""
    folder = tmp_path / uuid.uuid4().hex
    folder.mkdir()
    tried, expected = Registry.open(folder), {0: []}
    for version, state in enumerate(states, 1):
        expected[version] = [make_document(name, status=status) for name, status in sorted(state.items())]
        tried.adopt(expected[version], version, begun(tried, version, version))
    assert {version: tried.documents(version) for version in expected} == expected
    for current in range(len(states), -1, -1):
        tried.undo(current)
        assert {v: tried.documents(v) for v in expected} == {v: expected[min(v, current)] for v in expected}


def test_full_and_read_only_disks_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RAGBUILD_DATABASE_URL", raising=False)
    registry = Registry.open(tmp_path)
    registry.adopt([OLD], 1, begun(registry, 1, 1))
    limits = ["max_page_count=1"]  # what sqlite does on a full disk, and then on one that may not be written
    sa.event.listen(registry._db.engine, "connect", lambda c, _: c.execute(f"pragma {limits[0]}"))
    with pytest.raises(OSError, match="no space for the registry") as full:
        registry.apply([change(make_document("long", title="x" * 100_000))], 2, "r1")
    assert full.value.errno == errno.ENOSPC and full.value.filename.endswith("registry.sqlite")
    limits[0] = "query_only=on"
    with pytest.raises(OSError, match="make it and its folder writable") as closed:
        registry.begin(run(2, 2))
    assert closed.value.errno in (errno.EACCES, errno.EROFS)
    assert registry.documents(2) == [OLD] and len(registry.runs()) == 1
    (tmp_path / "registry.sqlite").unlink()
    (tmp_path / "registry.sqlite").mkdir()
    with pytest.raises(OSError, match="cannot be written"):
        Registry.open(tmp_path)


def test_a_file_that_is_no_database_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RAGBUILD_DATABASE_URL", raising=False)
    (tmp_path / "registry.sqlite").write_bytes(b"not a database" * 100)
    with pytest.raises(InputRefused, match="damaged or no registry.*build again with --fresh"):
        Registry.open(tmp_path)
    (tmp_path / "registry.sqlite").unlink()
    with sqlite3.connect(tmp_path / "registry.sqlite") as db:
        db.execute("create table documents (a)")
    db.close()
    with pytest.raises(InputRefused, match="tables that ragbuild did not make"):
        Registry.open(tmp_path)


def test_a_busy_file_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RAGBUILD_DATABASE_URL", raising=False)
    monkeypatch.setattr("ragbuild.knowledge.registry_database._WAIT_S", 0.1)
    registry, other = Registry.open(tmp_path), Registry.open(tmp_path)
    with registry._db.transaction(write=True):
        assert other.runs() == [], "readers don't wait for a writer"
        with pytest.raises(WorkspaceLocked, match="another process"):
            other.begin(run(1, 1))


def test_a_damaged_workspace_id_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RAGBUILD_DATABASE_URL", raising=False)
    (tmp_path / ".workspace-id").write_text("mine")
    with pytest.raises(InputRefused, match="holds no workspace id"):
        Registry.open(tmp_path)


@pytest.mark.parametrize("scheme", ["postgresql", "postgres", "postgresql+psycopg2"])
def test_addresses_as_people_write_them_and_no_secret_in_errors(tmp_path: Path, postgresql: str, scheme: str):
    url = postgresql.format("postgres").replace("postgresql:", f"{scheme}:")
    Registry.open(tmp_path, url).close()
    for wrong in (
        "postgresql://me:s3cret@127.0.0.1:1/db",
        url.replace("/postgres?", "/none?").replace("@", ":s3cret@"),
    ):
        with pytest.raises(MissingResource, match="cannot be reached") as error:
            Registry.open(tmp_path, wrong)
        assert "s3cret" not in str(error.value) and "RAGBUILD_DATABASE_URL" in str(error.value)


@pytest.mark.parametrize("url", ["mysql://me:s3cret@host/db", "s3cret", "postgresql://me:s3cret@host:port/db"])
def test_other_addresses_are_wrong_usage(tmp_path: Path, url: str):
    with pytest.raises(UsageError, match="expected postgresql://") as error:
        Registry.open(tmp_path, url)
    assert "me:" not in str(error.value)


def test_without_the_driver_the_command_that_gets_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(MissingResource, match=r"pip install 'ragbuild\[postgres\]'"):
        Registry.open(tmp_path, "postgresql://me:s3cret@host/db")


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_a_user_who_may_not_write_is_told_so(tmp_path: Path, database: str):
    Registry.open(tmp_path).close()
    read_only = database + "&options=-c%20default_transaction_read_only%3Don"
    with pytest.raises(MissingResource, match="lets its user write nothing"):
        Registry.open(tmp_path, read_only).begin(run(1, 1))


@pytest.mark.parametrize(
    "url, shown",
    [
        ("postgresql://me:pw@host:5432/db?sslmode=on", "postgresql://host:5432/db"),
        ("postgresql+psycopg://me:p/w@x@host/db", "postgresql+psycopg://host/db"),
        ("postgresql://me:p#w@host/db", "postgresql://…"),
        ("postgresql://host/db?password=p@w", "postgresql://…"),
        ("https://host/v1#part", "https://host/v1"),
        ("me:pw@host/db", "host/db"),
        (None, "none"),
    ],
)
def test_an_address_is_shown_without_secrets(url: str | None, shown: str):
    assert shown_url(url) == shown


def test_drift_between_registry_and_chunks():
    fields = ("doc_version", "product_model", "kb", "doc_type", "status", "effective_date", "doc_source", "language")
    held = {d.key: {f: {getattr(d, f)} for f in fields} | {"chunks": 3} for d in (OLD, OTHER)}
    assert drift([OTHER, OLD], held) == []
    assert drift([OLD.model_copy(update={"product_model": ("LG-500", "LG-900")}), OTHER], held) == [], (
        "order is nothing"
    )
    held[OLD.key] |= {"status": {"active", "legacy"}, "effective_date": {"2026-01-01"}}
    assert drift([OTHER, OLD], held) == [
        {"key": OLD.key, "field": "status", "registry": "active", "chunks": "active | legacy"},
        {"key": OLD.key, "field": "effective_date", "registry": "", "chunks": "2026-01-01"},
    ]
    legacy = make_document("older", status="legacy")
    assert drift([superseded(OLD), legacy], {OTHER.key: held[OTHER.key], OLD.key: held[OLD.key]}) == [
        {"key": OTHER.key, "field": "chunks", "registry": "not registered", "chunks": "3"},
        {"key": OLD.key, "field": "status", "registry": "superseded", "chunks": "active | legacy"},
        {"key": OLD.key, "field": "effective_date", "registry": "", "chunks": "2026-01-01"},
        {"key": legacy.key, "field": "chunks", "registry": "legacy", "chunks": "0"},
    ]
    assert drift([superseded(OLD)], {}) == []
    as_built = {OLD.key: {f: {getattr(superseded(OLD), f)} for f in fields} | {"chunks": 3}}
    assert drift([superseded(OLD)], as_built) == [], "a build keeps them, and no search finds them"


def test_a_registry_in_another_place_is_not_passed_over(tmp_path: Path, database: str | None, monkeypatch):
    """A forgotten variable must not start a second registry."""
    Registry.open(tmp_path, database).close()
    monkeypatch.delenv("RAGBUILD_DATABASE_URL", raising=False)
    if database is None:
        with pytest.raises(InputRefused, match=r"in the file registry\.sqlite in it; unset RAGBUILD_DATABASE_URL"):
            Registry.exists(tmp_path, "postgresql://u:p@localhost/other")
    else:
        with pytest.raises(InputRefused, match="in a PostgreSQL database; set RAGBUILD_DATABASE_URL"):
            Registry.open(tmp_path)
        assert not (tmp_path / "registry.sqlite").exists()


def _folder(path: Path) -> Path:
    path.mkdir()
    return path

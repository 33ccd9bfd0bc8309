"""What every command that changes a workspace does first and last: lock, put in order, record the run, publish.

The registry is written for the version to come, then the index; renaming ``CURRENT`` publishes both. Whatever was not
published when a command ends, or when a process was killed, is undone: by the command itself, else by the next one.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ragbuild.core.errors import InputRefused, RagbuildError, WorkspaceLocked
from ragbuild.core.lock import HOLDER, WriterLock
from ragbuild.core.records import Document
from ragbuild.index.staging import discard, next_version, prune
from ragbuild.index.versions import IndexVersion, current_version, publish
from ragbuild.knowledge.registry import Registry
from ragbuild.knowledge.registry_database import ID_FILE
from ragbuild.knowledge.registry_tables import Run

Step = Callable[[str], None]


def number(name: str) -> int:
    """The number of a version: 7 for ``v0007``."""
    return int(name.removeprefix("v"))


class Writer:
    """One writing command on a workspace, as a context. `base` is the version in use, `target` the number of the next.

    `notes` tells what was found and put in order: a dead holder's lock, work that was never published.
    """

    def __init__(
        self, workspace: Path, command: str, *, why: str = "", wait: float = 0.0, on_step: Step = lambda step: None,
        over_damage: bool = False,
    ) -> None:  # fmt: skip
        """`wait`: seconds to wait for another writer; below 0 for ever. `on_step` is told of each part that is done.
        `over_damage`: go on though the version in use cannot be opened (rollback); its `made` is empty then."""
        self._over_damage = over_damage
        self.workspace, self.indexes, self.on_step = workspace, workspace / "indexes", on_step
        self._command, self._why, self._wait = command, why, wait
        self._stack, self.notes = ExitStack(), list[str]()
        self._published = ""

    def __enter__(self) -> Writer:
        """Raises WorkspaceLocked (exit 6), InputRefused when there is no index or registry to work on."""
        end = time.monotonic() + self._wait
        try:
            self._stack.enter_context(WriterLock(self.workspace, self._wait, self._takeover))
            self.registry = Registry.open(self.workspace)
            self._stack.callback(self.registry.close)
            while True:
                try:
                    self._stack.enter_context(self.registry.advisory_lock())
                    break
                except WorkspaceLocked:
                    if self._wait >= 0 and time.monotonic() >= end:
                        raise
                    time.sleep(0.2)
            self.current = current_version(self.indexes) or "v0000"
            self.base_made: dict[str, Any] = {}
            try:
                self.base = IndexVersion(self.indexes)  # first: nothing is undone or swept where it cannot be trusted
            except InputRefused as error:
                if not self._over_damage or not (self.indexes / self.current / "version.json").is_file():
                    raise
                self.notes.append(f"{error}. It is left as it is")
                self.notes += self.registry.undo(number(self.current))
            else:
                self.base_made = self.base.made
                self._put_in_order()
            self.target = number(next_version(self.indexes))
            self.run = self._run(self._command, self._why, number(self.current), self.target)
            self.registry.begin(self.run)
        except BaseException:
            self._stack.close()
            raise
        return self

    @staticmethod
    def _run(command: str, why: str, base: int, target: int) -> Run:
        return Run(
            id=f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(3)}", command=command, why=why,
            who=os.environ.get("USER", ""), host=os.uname().nodename, pid=os.getpid(), started=_now(), base=base,
            target=target,
        )  # fmt: skip

    def _takeover(self, holder: str) -> None:
        self.notes.append(f"took over the lock of {holder}, which ended without giving it up")

    def _put_in_order(self) -> None:
        """Undo what was never published, and take over the documents of a build that the registry has not seen."""
        for leftover in self.workspace.glob(f".{HOLDER}.*.tmp"):  # its writer is dead: the lock is ours
            leftover.unlink()
        version, current = self.base, number(self.base.name)
        for run in self.registry.runs():
            lacking = run.target > current and not (self.indexes / f"v{run.target:04d}").exists()
            if lacking and run.outcome == "published":
                raise InputRefused(
                    f"the registry at {self.registry.place} has v{run.target:04d} as published (by process {run.pid} "
                    f"on {run.host}, {run.finished}), and {self.workspace} has only {version.name}: it is a copy of "
                    f"another workspace, or an older backup. Remove {self.workspace / ID_FILE} to give it a registry "
                    "of its own"
                )
        self.notes += self.registry.undo(current)
        self.notes += discard(self.indexes)
        held, built = self.registry.documents(current), version.manifest["made_by"] == "build"
        keys = {d.key for d in version.documents}
        gone = [] if built else [d for d in held if d.status == "superseded" and d.key not in keys]
        documents, loose = _linked([*version.documents, *gone])
        same = (lambda d: d) if built else (lambda d: d.model_copy(update={"supersedes": None}))  # links may be dropped
        if [same(d) for d in held] != [same(d) for d in sorted(documents, key=lambda d: d.key)]:
            self.notes += [f"{key} supersedes a document that is not there; the link was dropped" for key in loose]
            if not built:
                self.notes.append(
                    f"the registry did not fit {version.name} (it is new, or an older copy): the documents of the "
                    "index were taken over; what else it held of history is not known any more"
                )
            run = self._run("build", "the corpus that was built", current - 1, current)
            self.registry.begin(run)
            self.registry.adopt(documents, current, run.id)
            self.registry.finish(run.id, "published", _now())

    def restore(self, former: IndexVersion) -> None:
        """The registry's state of a former version becomes that of the next one; where the registry did not exist yet
        then, the documents that the index names."""
        if self.registry.documents(number(former.name)):
            self.registry.restore(number(former.name), self.target, self.run.id)
        else:
            self.registry.adopt(_linked(former.documents)[0], self.target, self.run.id)

    def made(self, **more: Any) -> dict[str, Any]:
        """What `made.json` says of a version of this run. Once an index was rebuilt, each version says what settings it
        was made with (``built_with``), and what the versions before the first rebuild were (``first_built_with``)."""
        settings = {k: self.base_made[k] for k in ("built_with", "first_built_with") if k in self.base_made}
        return {
            "command": self._command, "why": self._why, "when": _now(), "run": self.run.id, **settings, **more,
        }  # fmt: skip

    def publish(self, name: str, keep: int, note: str = "") -> None:
        """The commit point, then the run's record, and old versions beyond the last `keep` are removed."""
        publish(self.indexes, name)
        self._published = name
        self.on_step("CURRENT")
        self.registry.finish(self.run.id, "published", _now(), note)
        if hasattr(self, "base"):
            self.base.release()
        removed = prune(self.indexes, keep)
        if removed:
            self.notes.append(f"pruned {', '.join(removed)} (knowledge.keep_versions = {keep})")

    def finish(self, outcome: str, note: str = "") -> None:
        """Say how a run ended that published nothing; what it had written is undone."""
        self.undo()
        self.registry.finish(self.run.id, outcome, _now(), note)

    def undo(self) -> None:
        """Take back what this run has written."""
        discard(self.indexes)
        self.registry.undo(number(current_version(self.indexes) or self.base.name))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        try:
            if error is not None and not self._published:
                with suppress(OSError, RagbuildError):  # a full disk: the next command undoes it
                    self.finish("failed", f"{type(error).__name__}: {str(error)[:500]}")
        finally:
            self._stack.close()


def _linked(documents: Sequence[Document]) -> tuple[list[Document], list[str]]:
    """Documents without links that lead nowhere, and the keys of those that had one."""
    keys = {d.key for d in documents}
    loose = [d.key for d in documents if d.supersedes and d.supersedes not in keys]
    return [d.model_copy(update={"supersedes": None}) if d.key in loose else d for d in documents], loose


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")

"""What the commands share: options, where answers go, workspaces, progress."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from ragbuild.core.errors import InputRefused

WorkspaceOption = Annotated[
    Path | None, typer.Option("--workspace", "-w", help="A run's folder (default outputs/latest).")
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, all else on stderr.")]
ParamOption = Annotated[
    list[str] | None, typer.Option("-p", "--param", help="A configuration key, e.g. retrieve.top_n=30.")
]
ConfigOption = Annotated[Path | None, typer.Option("--config", help="Your own YAML over the profile.")]
ProfileOption = Annotated[str | None, typer.Option("--profile", help="offline (default), standard or qwen.")]


def say(text: str) -> None:
    """To stderr: stdout is for answers."""
    typer.echo(text, err=True)


def emit(data: Any) -> None:
    """One JSON document to stdout."""
    from ragbuild.core.store import _plain

    typer.echo(json.dumps(_plain(data), ensure_ascii=False, indent=1))


def open_workspace(path: Path | None) -> Path:
    """The folder of a workspace, by default the last build's. Raises InputRefused where there is none."""
    from ragbuild.core.store import repository

    root = path or repository() / "outputs" / "latest"
    if not root.exists():
        raise InputRefused(
            f"no workspace at {root}; run 'make build' (or ragbuild build) first, or name one with --workspace"
        )
    return root.resolve()  # a build may move outputs/latest while this command reads


def config_of(workspace: Path, params: list[str] | None) -> Any:
    """The configuration that a workspace was built with, with ``-p`` on top."""
    from ragbuild.core.config import parse_assignments, stored_config

    return stored_config(workspace).with_overrides(parse_assignments(params or []))


@contextmanager
def counted(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal, a plain line at every tenth elsewhere; both on stderr."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console, told = Console(stderr=True), [-1]
    with Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
        console=console, transient=True, disable=not console.is_terminal,
    ) as bar:  # fmt: skip
        task = bar.add_task(what, total=None)

        def step(done: int, total: int, now: str = "") -> None:
            bar.update(task, completed=done, total=total, description=now or what)
            if not console.is_terminal and done * 10 // max(1, total) != told[0]:
                told[0] = done * 10 // max(1, total)
                typer.echo(f"{now or what}: {done} of {total}", err=True)

        yield step

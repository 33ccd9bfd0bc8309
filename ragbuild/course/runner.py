"""The build: the course's notebooks, run headless by papermill, each reused when nothing it depends on has changed.

A step's hash covers its notebook, the files it reads, the configuration it declares, and the package modules it
imports. Runs live in ``outputs/<corpus>-<profile>-NNN``: a build that changes something starts from hard links of the
last complete run, so that run stays whole until the new one has passed; then ``outputs/latest`` moves.
"""

from __future__ import annotations

import ast
import contextlib
import errno
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import yaml

from ragbuild import __version__
from ragbuild.core.config import Config
from ragbuild.core.errors import (
    EXIT_CODES,
    InputRefused,
    NothingToMeasure,
    RagbuildError,
    StepFailed,
    UsageError,
)
from ragbuild.core.lock import WriterLock
from ragbuild.core.store import Workspace, hash_path, link, read_json, repository, sha256, write_json, write_text
from ragbuild.course.step import StepSpec, input_paths
from ragbuild.index.versions import current_version

EVALUATION = "evaluation.json"  # the step that writes it hands its entries to the ledger
OWN_FILES = (".lock*", "*.tmp", "registry.sqlite*", ".workspace-id")  # of one workspace, never taken into a new run
Status = Literal["done", "reused", "failed", "not run"]


@dataclass
class StepResult:
    """What happened to one step; `made` is the notebook's own line."""

    name: str
    status: Status
    seconds: float = 0.0
    made: str = ""
    hash: str = ""
    outputs: dict[str, str] = field(default_factory=dict)


@dataclass
class BuildResult:
    """What a build did: its folder, each step's outcome, whether all steps are there, and the error that stopped it."""

    run: Path
    steps: list[StepResult]
    complete: bool
    error: RagbuildError | None = None
    is_latest: bool = False


def notebooks(folder: Path | None = None) -> list[StepSpec]:
    """The course's steps in the order of their numbers; found by glob, so that none can be forgotten."""
    folder = folder or repository() / "notebooks"
    return [StepSpec.read(p) for p in sorted(folder.glob("[0-9][0-9]_*.ipynb"))]


def select(
    specs: Sequence[StepSpec], only: Sequence[str] = (), start: str = "", skip: Sequence[str] = ()
) -> list[StepSpec]:
    """The steps that the command line names, by number or name."""

    def find(key: str) -> StepSpec:
        found = [s for s in specs if s.name == key or s.name.split("_")[0] == key]
        if not found:
            raise UsageError(f"no notebook '{key}'; there are: {', '.join(s.name for s in specs)}")
        return found[0]

    chosen = [find(k) for k in only] if only else list(specs)
    if start:
        first = specs.index(find(start))
        chosen = [s for s in chosen if specs.index(s) >= first]
    dropped = {find(k).name for k in skip}
    return [s for s in specs if s in chosen and s.name not in dropped]


# --- what a step depends on -------------------------------------------------------------------------------------------


@lru_cache(maxsize=512)
def _imports(path: Path, mtime: int) -> frozenset[str]:
    """Names of ragbuild modules that a Python file imports anywhere, functions included."""
    return _imported(path.read_text(encoding="utf-8"))


def _imported(source: str) -> frozenset[str]:
    out: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            out.update(a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            out.update({node.module, *(f"{node.module}.{a.name}" for a in node.names)})
    return frozenset(name for name in out if name.split(".")[0] == "ragbuild")


def module_files(source: str) -> list[Path]:
    """Files of the package that this code depends on, through all imports, sorted."""
    package = Path(__file__).resolve().parents[1]
    todo, files = set(_imported(source)), {package / "__init__.py"}
    seen: set[str] = set()
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        base = package.joinpath(*name.split(".")[1:])
        for file in (base.with_suffix(".py"), base / "__init__.py"):
            if file.is_file():
                files.add(file)
                todo |= set(_imports(file, file.stat().st_mtime_ns)) - seen
    return sorted(files)


def notebook_source(path: Path) -> tuple[str, str]:
    """(code to analyse, all that counts for the hash: cell sources and the declaration)."""
    data = json.loads(path.read_text(encoding="utf-8"))
    cells = [(c["cell_type"], "".join(c["source"])) for c in data["cells"]]
    code = "\n".join(re.sub(r"^[%!].*$", "", text, flags=re.MULTILINE) for kind, text in cells if kind == "code")
    return code, json.dumps([cells, data["metadata"].get("ragbuild")], sort_keys=True)


def step_hash(spec: StepSpec, workspace: Workspace, config: Config) -> str:
    """Hash of everything the step depends on, except what it writes itself."""
    code, content = notebook_source(spec.path)
    inputs = input_paths(config) if any(r.startswith("input:") for r in spec.reads) else {}
    parts = [content, __version__, config.digest((*spec.config, "profile", "seed", "course"))]
    for name in sorted(set(spec.reads) - set(spec.writes)):
        path = inputs.get(name.removeprefix("input:")) if name.startswith("input:") else workspace.path(name)
        parts.append(f"{name}={fingerprint(path) if path else 'none'}")
    parts += [hash_path(f) for f in module_files(code)]
    return sha256("\n".join(parts))


def fingerprint(path: Path) -> str:
    """Hash of a file or folder; of an index folder, the manifest of the version in use (it names the rest by hash)."""
    current = path / "CURRENT"
    if path.is_dir() and current.is_file():
        return sha256(current.read_text() + hash_path(path / current.read_text().strip() / "version.json"))
    return hash_path(path)


# --- runs -------------------------------------------------------------------------------------------------------------


def relative_to_repository(path: Path) -> str:
    """The folder as the configuration holds it: relative when inside the checkout, however it was named."""
    absolute = path.expanduser().resolve()
    inside = absolute.is_relative_to(repository().resolve())
    return absolute.relative_to(repository().resolve()).as_posix() if inside else str(absolute)


def run_name(config: Config) -> str:
    """The name of a corpus's runs, without their number: ``sample-offline``."""
    corpus = input_paths(config)["corpus"]
    stem = corpus.name if corpus else "corpus"
    stem = "sample" if corpus == (repository() / "data" / "corpus") else stem
    return f"{re.sub(r'[^A-Za-z0-9]+', '-', stem).strip('-').lower() or 'corpus'}-{config.profile}"


def runs_of(name: str, outputs: Path) -> list[Path]:
    """The folders of the runs of this name, oldest first."""
    return sorted(p for p in outputs.glob(f"{name}-[0-9][0-9][0-9]") if p.is_dir() and not p.is_symlink())


def manifest_of(run: Path) -> dict[str, Any]:
    """What the run's manifest.json says; empty where there is none yet. Raises InputRefused when it is damaged."""
    path = run / "manifest.json"
    if not path.is_file():
        return {}
    data = read_json(path)
    steps = data.get("steps", {}) if isinstance(data, dict) else None
    keys = {"status", "seconds", "made", "hash", "outputs"}
    if not isinstance(steps, dict) or not all(isinstance(s, dict) and keys <= s.keys() for s in steps.values()):
        raise InputRefused(f"{path} is damaged; remove it and build again, or build with --fresh")
    return data


def choose_run(config: Config, specs: Sequence[StepSpec], out: str | Path | None, fresh: bool, outputs: Path) -> Path:
    """The folder to build in: the one named, the last run when it can go on or is unchanged, else a new one."""
    if out is not None:
        _refuse_if_taken_in(Path(out), fresh)
        return Path(out)
    name = run_name(config)
    existing = runs_of(name, outputs)
    last = existing[-1] if existing else None
    if last is not None and not fresh:
        _refuse_if_taken_in(last, fresh)
        if not manifest_of(last).get("complete"):
            return last  # go on where it stopped
        if all(_fresh_enough(s, Workspace(last), config) for s in specs):
            return last
    new = outputs / f"{name}-{int(last.name[-3:]) + 1 if last else 1:03d}"
    if last is None or fresh:
        new.mkdir(parents=True)
        return new
    half = outputs / f".{new.name}.tmp"  # a copy that was killed or ran out of space is never taken for a run
    shutil.rmtree(half, ignore_errors=True)
    try:
        own = shutil.ignore_patterns(*OWN_FILES)
        left_out = lambda folder, names: own(folder, names) if Path(folder) == last else ()  # noqa: E731
        shutil.copytree(last, half, copy_function=_linked, ignore=left_out)
    except shutil.Error as error:
        shutil.rmtree(half, ignore_errors=True)
        raise OSError(errno.EIO, f"{last} cannot be copied ({str(error.args[0])[:200]})", str(new)) from error
    write_json(half / "manifest.json", {**manifest_of(half), "complete": False})  # others go on in it, or wait for it
    os.replace(half, new)
    return new


def _refuse_if_taken_in(run: Path, fresh: bool) -> None:
    """A build knows the corpus folder alone: it must not silently drop what came into its workspace since."""
    name = current_version(run / "indexes")
    path = run / "indexes" / (name or "") / "version.json"
    if fresh or name is None or not path.is_file() or read_json(path).get("made_by", "build") == "build":
        return
    raise UsageError(
        f"{run} has taken in documents since it was built ({name}, by {read_json(path)['made_by']}); a build would not "
        "have them. Put them into the corpus folder and build with --fresh, or make the index anew with 'ragbuild "
        "rebuild'"
    )


def _empty(run: Path) -> None:
    """Remove what a workspace holds, but not its lock. Refuses a folder that is no workspace."""
    held = [path for path in run.iterdir() if not path.name.startswith(".lock")]
    if held and not (run / "manifest.json").is_file():
        raise UsageError(f"--fresh would remove {run}, which is no ragbuild workspace (it has no manifest.json)")
    for path in held:
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _linked(source: str, target: str) -> None:
    """Files of a run are replaced, never written in place; a database is, and readers lock a version's manifest."""
    if source.endswith((".sqlite", "version.json", ".lock")):
        shutil.copy2(source, target)
    else:
        link(Path(source), Path(target))


def _fresh_enough(spec: StepSpec, workspace: Workspace, config: Config) -> bool:
    record = manifest_of(workspace.root).get("steps", {}).get(spec.name, {})
    if record.get("status") not in ("done", "reused") or record.get("hash") != step_hash(spec, workspace, config):
        return False
    return all(fingerprint(workspace.path(p)) == value for p, value in record["outputs"].items())


def build(
    config: Config,
    *,
    out: str | Path | None = None,
    only: Sequence[str] = (),
    start: str = "",
    skip: Sequence[str] = (),
    fresh: bool = False,
    on_step: Callable[[int, int, StepResult | str], None] | None = None,
    outputs: Path | None = None,
    folder: Path | None = None,
) -> BuildResult:
    """Run the selected steps in a run folder; see the module's docstring.

    `on_step(done, total, name or result)` is told before and after each step. A failing step stops the build; the
    result names the notebook, the cell, the error and the kept output notebook, with the exit code of its class.
    """
    outputs = outputs or repository() / "outputs"
    specs = notebooks(folder)
    chosen = select(specs, only, start, skip)
    corpus = input_paths(config)["corpus"]
    if corpus is None or not corpus.is_dir():
        raise UsageError(f"the corpus folder {corpus} is not there; --corpus takes a folder of documents")
    if out is None and (outputs / "latest").exists() and not (outputs / "latest").is_symlink():
        raise UsageError(f"{outputs / 'latest'} must be a link that builds may move, and is none; move it away")
    with _one_chooser(outputs) if out is None else contextlib.nullcontext():
        run = choose_run(config, chosen, out, fresh, outputs)
        handle = WriterLock(run).acquire()
    try:
        if fresh and out is not None:
            _empty(run)
        result = _run_steps(run, specs, chosen, config, on_step)
        if result.complete and out is None:
            _point_latest(outputs, run)
            result.is_latest = True
    finally:
        handle.release()
    return result


def ledger_path(run: Path) -> Path:
    """Where a run's evaluations are recorded: in ``outputs/`` for the runs in it, in the workspace itself elsewhere."""
    outputs = repository() / "outputs"
    return (outputs if run.resolve().parent == outputs.resolve() else run) / "ledger.jsonl"


def _record(run: Path, config: Config) -> None:
    """Add the evaluations of this build to the ledger, with the whole configuration that they ran under."""
    from ragbuild.evaluate.ledger import Entry, append

    for data in read_json(run / EVALUATION)["entries"]:
        held = {"config": config.model_dump(mode="json"), "workspace": run.name}
        append(ledger_path(run), Entry.model_validate(data).model_copy(update=held))


def _one_chooser(outputs: Path):  # type: ignore[no-untyped-def]
    """Held for a moment while a run's folder is chosen, so that two builds that start together do not make the same."""
    from filelock import FileLock

    outputs.mkdir(parents=True, exist_ok=True)
    return FileLock(outputs / ".lock")


def _run_steps(
    run: Path, specs: Sequence[StepSpec], chosen: Sequence[StepSpec], config: Config,
    on_step: Callable[[int, int, StepResult | str], None] | None,
) -> BuildResult:  # fmt: skip
    workspace, results = Workspace(run), []
    manifest = {
        "ragbuild": __version__,
        "started": _now(),
        "complete": False,
        "steps": manifest_of(run).get("steps", {}),
    }
    _prune_steps(manifest["steps"], specs)
    write_text(run / "config.yaml", yaml.safe_dump(config.model_dump(mode="json"), allow_unicode=True, sort_keys=False))
    error: RagbuildError | None = None
    for number, spec in enumerate(chosen):
        if error is not None:
            results.append(StepResult(spec.name, "not run"))
            continue
        if on_step:
            on_step(number, len(chosen), spec.name)
        before = fingerprint(run / EVALUATION)
        if _fresh_enough(spec, workspace, config):
            old = manifest["steps"][spec.name]
            result = StepResult(spec.name, "reused", 0.0, old["made"], old["hash"], old["outputs"])
        else:
            result, error = _run_step(spec, workspace, config)
        if EVALUATION in spec.writes and result.status != "reused" and before != fingerprint(run / EVALUATION):
            _record(run, config)
        results.append(result)
        manifest["steps"][spec.name] = {**result.__dict__, "finished": _now()}
        write_json(run / "manifest.json", manifest)
        if on_step:
            on_step(number + 1, len(chosen), result)
    complete = error is None and all(_fresh_enough(s, workspace, config) for s in specs)
    write_json(run / "manifest.json", {**manifest, "complete": complete, "finished": _now()})
    return BuildResult(run, results, complete, error)


def _prune_steps(steps: dict[str, Any], specs: Sequence[StepSpec]) -> None:
    for name in set(steps) - {s.name for s in specs}:
        del steps[name]


def _run_step(spec: StepSpec, workspace: Workspace, config: Config) -> tuple[StepResult, RagbuildError | None]:
    import papermill
    from papermill.exceptions import PapermillExecutionError

    target = workspace.path(f"notebooks/{spec.path.name}")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)  # papermill writes in place, and the file may be linked to an earlier run
    for figure in workspace.path("figures").glob(f"{spec.name}_*.png"):
        figure.unlink()
    sockets = tempfile.mkdtemp(prefix="ragbuild-")
    start, kernels = time.perf_counter(), _local_kernels(sockets)
    before = step_hash(spec, workspace, config)
    error: RagbuildError | None = None
    try:
        with _stoppable(kernels):
            papermill.execute_notebook(
                str(spec.path), str(target), parameters={"run_dir": str(workspace.root.resolve()), "overrides": {}},
                kernel_name="python3", progress_bar=False, cwd=str(repository()), log_output=False,
                kernel_manager_class=kernels,
            )  # fmt: skip
    except PapermillExecutionError as failure:
        error = _failure(spec, target, failure)
        error = None if isinstance(error, NothingToMeasure) else error  # it has written what it declares, all empty
    except Exception as failure:  # the kernel died, or the notebook is no notebook
        error = StepFailed(f"{spec.path.name}: {type(failure).__name__}: {failure}\n  kept: {target}")
    finally:
        shutil.rmtree(sockets, ignore_errors=True)
    seconds = round(time.perf_counter() - start, 2)
    if error is not None:
        return StepResult(spec.name, "failed", seconds, str(error).splitlines()[0]), error
    made = workspace.path(f"reports/steps/{spec.name}.json")
    line = read_json(made)["made"] if made.is_file() else ""
    missing = [w for w in spec.writes if not workspace.exists(w)]
    if missing:
        error = StepFailed(f"{spec.path.name} ended without writing {', '.join(missing)}, which it declares")
        return StepResult(spec.name, "failed", seconds, str(error)), error
    outputs = {w: fingerprint(workspace.path(w)) for w in spec.writes}
    return StepResult(spec.name, "done", seconds, line, before, outputs), None


def _local_kernels(folder: str) -> type:
    """Kernels that are spoken to through sockets in the private `folder`: nothing listens on a TCP port."""
    from jupyter_client.manager import AsyncKernelManager

    class LocalKernelManager(AsyncKernelManager):
        pid: int | None = None  # of the kernel that runs, which leads a process group of its own

        def __init__(self, **settings: Any) -> None:
            super().__init__(**{**settings, "transport": "ipc", "connection_file": f"{folder}/kernel.json"})

        async def _async_pre_start_kernel(self, **settings: Any) -> Any:
            """What cells print goes into the notebook; the rest is what sockets say while the kernel is shut down."""
            command, settings = await super()._async_pre_start_kernel(**settings)
            return command, {**settings, "stderr": subprocess.DEVNULL}

        async def _async_post_start_kernel(self, **settings: Any) -> None:
            await super()._async_post_start_kernel(**settings)
            type(self).pid = getattr(self.provisioner, "pid", None)

        async def _async_interrupt_kernel(self) -> None:
            """Nothing: it is idle when it is shut down, and would report the interrupt as an error."""

    return LocalKernelManager


@contextlib.contextmanager
def _stoppable(kernels: Any) -> Iterator[None]:
    """Ctrl-C and a polite kill end the kernel at once and raise KeyboardInterrupt with the signal's number."""

    def stop(number: int, _: object) -> None:
        if kernels.pid:
            with contextlib.suppress(OSError):
                os.killpg(kernels.pid, signal.SIGKILL)
        raise KeyboardInterrupt(number)

    former = {}
    if threading.current_thread() is threading.main_thread():
        former = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _failure(spec: StepSpec, target: Path, failure: Any) -> RagbuildError:
    """The notebook, cell, error and kept output, as an error with the exit code of the class that was raised."""
    name = str(failure.ename).rsplit(".", 1)[-1]
    message = (
        f"{spec.path.name}, cell {failure.exec_count or failure.cell_index}: {name}: {failure.evalue}\n"
        f"  kept: {target} (open it to see the cell and its traceback)"
    )
    cls = next((c for c in _error_classes() if c.__name__ == name), StepFailed)
    return cls(message)


def _error_classes() -> list[type[RagbuildError]]:
    from ragbuild.core import errors

    return [getattr(errors, name) for name in EXIT_CODES]


def _point_latest(outputs: Path, run: Path) -> None:
    """Move ``outputs/latest`` in one rename."""
    link, temporary = outputs / "latest", outputs / f".latest-{os.getpid()}"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(os.path.relpath(run, outputs), target_is_directory=True)
    os.replace(temporary, link)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def summary(result: BuildResult) -> dict[str, Any]:
    """The build as plain data, for ``--json``."""
    steps: list[Mapping[str, Any]] = [
        {"step": s.name, "status": s.status, "seconds": s.seconds, "made": s.made} for s in result.steps
    ]
    return {
        "run": str(result.run), "complete": result.complete, "latest": result.is_latest, "steps": steps,
        "report": str(result.run / "report.html"), "error": str(result.error) if result.error else None,
    }  # fmt: skip

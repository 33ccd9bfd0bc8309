"""What a notebook opens first: its workspace, the configuration it declared, its inputs, and where its results go.

A notebook's metadata (key ``ragbuild``) names the files it reads and writes and the configuration sections it uses; the
build hashes exactly these, and what is not declared can't be read through the step.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ragbuild.core.config import Config, ConfigView, stored_config
from ragbuild.core.errors import InputRefused, UsageError
from ragbuild.core.records import Answer
from ragbuild.core.show import save_figure, use_style
from ragbuild.core.store import Workspace, repository, write_json, write_text

INPUTS = (
    "corpus",
    "query_log",
    "term_review",
    "eval_set",
    "expert_eval_set",
    "baseline",
)  # what people decide or own: read only, named ``input:<name>``
FOLDERS = ("arrivals", "prospectus", "lessons", "findoc")  # the same, beside a corpus whose folder is named corpus


@dataclass(frozen=True)
class StepSpec:
    """A notebook's declaration."""

    name: str
    path: Path
    title: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    config: tuple[str, ...]

    @classmethod
    def read(cls, path: Path) -> StepSpec:
        """Raises UsageError for a notebook without a declaration."""
        metadata = json.loads(path.read_text(encoding="utf-8")).get("metadata", {}).get("ragbuild")
        if not isinstance(metadata, dict) or {"title", "reads", "writes", "config"} - metadata.keys():
            raise UsageError(f"{path.name}: its metadata needs 'ragbuild' with title, reads, writes and config")
        lists = {key: tuple(metadata[key]) for key in ("reads", "writes", "config")}
        unknown = [s for s in lists["config"] if s not in Config.model_fields]
        if unknown:
            raise UsageError(f"{path.name}: unknown configuration section(s) {', '.join(unknown)}")
        return cls(name=path.stem, path=path, title=metadata["title"], **lists)


def input_paths(config: Config) -> dict[str, Path | None]:
    """Where the inputs lie: the corpus, and the other inputs in it or beside it (None when absent)."""
    corpus = Path(config.corpus.dir).expanduser()
    corpus = corpus if corpus.is_absolute() else repository() / corpus
    out: dict[str, Path | None] = {"corpus": corpus}
    for name in INPUTS[1:]:
        setting = getattr(config.corpus, name)
        file = f"{name}.csv" if name in ("query_log", "term_review") else f"{name}.json"
        places = [corpus / file, corpus.parent / file] if setting == "auto" else [Path(setting)]
        out[name] = next((p for p in places if p.is_file()), None)
        if name == "expert_eval_set" and setting == "auto" and out[name] and not _about(out[name], corpus):
            out[name] = None  # that of another corpus beside this one
        if setting != "auto" and out[name] is None:
            raise UsageError(f"corpus.{name}: no file at {setting}")
    for name in FOLDERS:
        setting = getattr(config.corpus, name, "auto")
        folder = corpus.parent / name if setting == "auto" else Path(setting)
        if setting != "auto" and not folder.is_dir():
            raise UsageError(f"corpus.{name}: no folder at {setting}")
        out[name] = folder if folder.is_dir() and (setting != "auto" or corpus.name == "corpus") else None
    return out


def _about(expert: Path, corpus: Path) -> bool:
    """Does an expert set name a document of this corpus? True, too, for what can't be read: its reader says so."""
    try:
        cases = json.loads(expert.read_bytes())
        cases = cases["cases"] if isinstance(cases, dict) else cases
        named = {ref["doc_source"] for case in cases for ref in case["ground"]}
    except (ValueError, KeyError, TypeError):
        return True
    return not named or any((corpus / name).is_file() for name in named)


class Step:
    """One notebook's run. Reading and writing go through `path`, which knows what was declared."""

    def __init__(self, spec: StepSpec, workspace: Workspace, config: Config) -> None:
        self.spec, self.workspace = spec, workspace
        self.config: ConfigView = config.only((*spec.config, "profile", "seed"))
        self.solutions = config.course.solutions
        self.inputs = input_paths(config) if any(r.startswith("input:") for r in spec.reads) else {}
        self._start = time.perf_counter()

    def input(self, name: str) -> Path | None:
        """The path of a declared input, None when the team has none."""
        if f"input:{name}" not in self.spec.reads:
            raise UsageError(f"{self.spec.name} does not declare input:{name}; add it to the notebook's metadata")
        return self.inputs[name]

    def path(self, relative: str) -> Path:
        """A file of the workspace that this step declared to read or write."""
        declared = [
            d
            for d in (*self.spec.reads, *self.spec.writes)
            if relative == d or relative.startswith(d.rstrip("/") + "/")
        ]
        if not declared:
            raise UsageError(
                f"{self.spec.name} does not declare '{relative}'; add it to the notebook's metadata (reads or writes)"
            )
        return self.workspace.path(relative)

    def report(
        self,
        metrics: Mapping[str, Any] | None = None,
        tables: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
        notes: Sequence[str] = (),
        answers: Sequence[Answer] = (),
    ) -> None:
        """Write ``reports/<step>.json``, which the run's report shows: figures by name, tables by caption, remarks,
        and cited answers."""
        shown = [
            a.model_dump(mode="json", include={"query", "text", "status", "citations", "generator", "warnings"})
            for a in answers
        ]
        data = {
            "title": self.spec.title,
            "metrics": metrics or {},
            "tables": tables or {},
            "notes": list(notes),
            "answers": shown,
        }
        self.workspace.report(self.spec.name, data)

    def figure(self, figure: Any, name: str) -> None:
        """Save a plot as ``figures/<step>_<name>.png``; the report shows it."""
        save_figure(figure, self.workspace.path(f"figures/{self.spec.name}_{name}.png"))

    def done(self, made: str) -> None:
        """Say in one line what this step made; the build's table and the report show it."""
        seconds = round(time.perf_counter() - self._start, 2)
        write_json(self.workspace.path(f"reports/steps/{self.spec.name}.json"), {"made": made, "seconds": seconds})
        print(f"{self.spec.name}: {made}")


def open_step(name: str, run_dir: str = "", overrides: Mapping[str, Any] | None = None) -> Step:
    """The step of notebook `name`. An empty `run_dir` (a notebook opened by hand) means ``outputs/workshop``, which is
    filled from the last build where earlier steps have not been run in it.

    `overrides`: dotted configuration keys. Raises InputRefused when a file of an earlier step is missing.
    """
    use_style()
    spec = StepSpec.read(repository() / "notebooks" / f"{name}.ipynb")
    root = Path(run_dir) if run_dir else repository() / "outputs" / "workshop"
    root = root if root.is_absolute() else repository() / root
    root.mkdir(parents=True, exist_ok=True)
    if not run_dir:
        _fill_workshop(root, spec)
    stored = root / "config.yaml"
    config = stored_config(root).with_overrides(dict(overrides or {}))
    if not stored.is_file():
        write_text(stored, yaml.safe_dump(config.model_dump(mode="json"), allow_unicode=True, sort_keys=False))
    missing = [r for r in spec.reads if not r.startswith("input:") and not (root / r).exists()]
    if missing:
        raise InputRefused(
            f"{name} needs {', '.join(missing)} in {root}, which earlier notebooks write. Run them in order, or "
            "'make build'."
        )
    return Step(spec, Workspace(root), config)


def _fill_workshop(root: Path, spec: StepSpec) -> None:
    """Copy what this notebook reads, and is not there yet, from the last build."""
    latest = root.parent / "latest"
    wanted = [r for r in spec.reads if not r.startswith("input:") and not (root / r).exists()]
    if not latest.exists():
        return
    for relative in [*wanted, *([] if (root / "config.yaml").exists() else ["config.yaml"])]:
        source = latest / relative
        if source.is_dir():
            shutil.copytree(source, root / relative)
        elif source.is_file():
            (root / relative).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, root / relative)
    if wanted:
        print(f"workshop: took {', '.join(wanted)} from the last build ({latest.resolve().name})")

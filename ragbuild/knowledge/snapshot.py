"""Snapshots: every published index version is one. Listing them, going back to one, and comparing the two layers.

A rollback publishes a new version with the content of the old one, so that nothing is lost by it either; registry and
indexes go back together. Only pruning deletes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ragbuild.core.config import Config, stored_config
from ragbuild.core.errors import UsageError
from ragbuild.core.store import read_json
from ragbuild.index.staging import stage_again
from ragbuild.index.versions import FILES, LAYOUT, SEGMENTS, IndexVersion, current_version, version_names
from ragbuild.knowledge.ingest import registered
from ragbuild.knowledge.rebuild import built_with, store_config
from ragbuild.knowledge.registry import drift
from ragbuild.knowledge.writer import Step, Writer, number

COPIED = ("status", "doc_version", "product_model", "kb", "doc_type", "effective_date", "doc_source", "language")


def snapshots(workspace: Path) -> list[dict[str, Any]]:
    """The published versions, oldest first: when and why made, what they hold, what was measured of them, and the
    bytes they name (`size`; versions share most of them) and that no other version names (`own`)."""
    indexes = workspace / "indexes"
    current = current_version(indexes)
    names = [n for n in version_names(indexes) if current and number(n) <= number(current)]
    names = [n for n in names if read_json(indexes / n / "version.json").get("layout") == LAYOUT]
    named = {name: _files(indexes, name) for name in names}
    out = []
    for name in names:
        manifest, others = read_json(indexes / name / "version.json"), [named[n] for n in names if n != name]
        made = indexes / name / "made.json"
        made = read_json(made) if made.is_file() else {}
        sizes = {path: path.stat().st_size for path in named[name] if path.is_file()}
        metrics = made.get("metrics") or {}
        out.append({
            "version": name, "current": name == current, "when": made.get("when", ""),
            "command": manifest["made_by"], "why": made.get("why", ""), "documents": manifest["documents"],
            "children": manifest["children"], "parents": manifest["parents"], "segments": len(manifest["segments"]),
            "metrics": metrics, "size": sum(sizes.values()),
            "own": sum(size for path, size in sizes.items() if not any(path in other for other in others)),
        })  # fmt: skip
    return out


def _files(indexes: Path, name: str) -> set[Path]:
    """Every file that a version names; hard links of one file count as their own."""
    manifest = read_json(indexes / name / "version.json")
    files = {p for p in (indexes / name).rglob("*") if p.is_file()}
    for segment in manifest["segments"]:
        files |= set((indexes / SEGMENTS / segment["name"]).iterdir())
    path = indexes / name / "kept.json"
    kept = read_json(path) if path.is_file() else {}  # damaged: listed all the same
    return files | {indexes / FILES / digest for names in kept.values() for digest in names.values()}


def rollback(
    workspace: Path, name: str, config: Config, *, why: str = "", wait: float = 0.0,
    on_step: Step = lambda step: None,
) -> tuple[str, list[str]]:  # fmt: skip
    """Publish the content of the snapshot `name` anew; returns the new version's name and what there is to say.

    Raises UsageError for a version that is not there, or is in use already; WorkspaceLocked.
    """
    why = why or f"back to {name}"
    with Writer(workspace, "rollback", why=why, wait=wait, on_step=on_step, over_damage=True) as writer:
        names = version_names(writer.indexes)
        if name not in names:
            raise UsageError(f"there is no version '{name}'; 'ragbuild snapshots' lists {', '.join(names)}")
        if name == writer.current:
            raise UsageError(f"{name} is in use already; nothing was changed")
        former = IndexVersion(writer.indexes, name)
        settings = former.made.get("built_with") or writer.base_made.get("first_built_with")
        writer.restore(former)
        on_step("registry")
        made = writer.made(**_measured(former), **({"built_with": settings} if settings else {}))
        tried = stage_again(writer.indexes, former, made)
        on_step("version")
        former.release()
        writer.publish(tried, config.knowledge.keep_versions, f"content of {name}")
        stored = stored_config(workspace)
        if settings and settings != built_with(stored):  # another one was rebuilt with in between
            store_config(workspace, type(stored).model_validate(stored.model_dump(mode="json") | settings))
            writer.notes.append(f"config.yaml has the settings again that {name} was built with")
        return tried, writer.notes


def _measured(former: IndexVersion) -> dict[str, Any]:
    """What was measured of a version holds for another one with the same content."""
    return {name: former.made.get(name) for name in ("metrics", "recall", "recall_built")}


def check(workspace: Path, deep: bool = False) -> list[dict[str, Any]]:
    """Where the registry and the chunks' own copies say different things; empty when they agree. `deep`: also read
    every file of the version in use and compare it with its hash."""
    version = IndexVersion(workspace / "indexes")
    documents = registered(workspace, version)
    rows = drift(documents, held_by_chunks(version))
    if deep:
        rows += [{"key": "", "field": "file", "registry": "", "chunks": what} for what in version.verify()]
    return rows


def held_by_chunks(version: IndexVersion) -> dict[str, dict[str, Any]]:
    """For each document's key: the values that its chunks carry, by field, and how many chunks there are."""
    out: dict[str, dict[str, Any]] = {}
    for start in range(0, len(version), 1024):
        rows = np.arange(start, min(start + 1024, len(version)))
        for chunk in [*version.children(rows), *version.parents_of(rows)]:
            held = out.setdefault(chunk.doc_key, {"chunks": 0, **{name: set() for name in COPIED}})
            held["chunks"] += 1
            for name in COPIED:
                value = getattr(chunk, name)
                held[name].add(tuple(value) if isinstance(value, (list, tuple)) else value)
    return out

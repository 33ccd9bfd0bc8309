"""Triage: what an arriving document means for those that are registered. One decision a document, never a chunk.

The decision is about the **older** of the two: *replace* takes it out of the indexes (superseded), *legacy* keeps it
for those who ask for it, *parallel* leaves it as it is. The machine suggests (`suggest`), an expert confirms by a
choice or by a row of decisions.csv (`Ruling`), `resolve` says what that does to the registry and to the indexes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from ragbuild.core.errors import InputRefused
from ragbuild.core.records import Document, Record, Text
from ragbuild.core.store import error_fields, read_csv, write_csv
from ragbuild.core.text import normalise
from ragbuild.knowledge.doc_versions import compare_versions
from ragbuild.knowledge.registry_tables import Queued
from ragbuild.knowledge.triage_rules import (
    Decision,
    Suggestion,
    demoted,
    model_names,
    order_of,
    overlap,
    same_document,
    suggest,
)

__all__ = [
    "RISKY", "SAFE", "Decision", "Effects", "Ruling", "Suggestion", "compare_versions", "current_twins", "in_order",
    "overlap", "read_decisions", "resolve", "ruling_for", "suggest", "unattended", "unmatched", "write_decisions",
    "write_open_decisions",
]  # fmt: skip

_COLUMNS = ("doc_id", "doc_version", "product_model", "decision", "decided_by", "reason", "suggestion", "why")

# The policy of an unattended run: what it takes, and why that is safe. Nothing that was valid stops being valid, and
# a rollback brings the former state back. ``knowledge.unattended`` chooses among these and the names of RISKY.
SAFE: dict[str, str] = {
    "unchanged": "nothing is written",
    "parallel": "the registered documents stay as they are; the new one is found beside them",
    "correction": "the same version of the same document, with the text or the fields that its source now has",
    "late_legacy": "it calls itself an older version: found only by those who ask for one; the current one stays",
}
RISKY: dict[str, str] = {
    "replace": "the older document leaves the indexes, and nobody has looked whether it is still needed",
    "legacy": "the older document is no longer found by default, and nobody has looked whether it is still valid",
}


class Effects(Record):
    """What a decision does. `document`: the arriving one as it enters the indexes, None when it does not. `changed`:
    rows of the registry with their new state (the arriving one's too when it is recorded without entering the indexes).
    `leave`: keys whose chunks leave the indexes."""

    document: Document | None = None
    changed: tuple[Document, ...] = ()
    leave: tuple[str, ...] = ()


def unattended(suggestion: Suggestion, names: Collection[str] = tuple(SAFE)) -> bool:
    """May a run that nobody watches take it? Never what needs an expert."""
    return suggestion.decision != "expert" and suggestion.policy in names


def in_order(documents: Sequence[Document]) -> list[Document]:
    """Arrivals, those that another one supersedes first, so that each finds what it names registered; else by key."""
    by_key = {d.key: d for d in sorted(documents, key=lambda d: d.key)}
    before = {key: [d.supersedes] if d.supersedes in by_key else [] for key, d in by_key.items()}
    try:
        return [by_key[key] for key in TopologicalSorter(before).static_order()]
    except CycleError:  # triage says which
        return list(by_key.values())


def resolve(suggestion: Suggestion, chosen: Decision, known: Sequence[Document], newer: bool | None = None) -> Effects:
    """What the decision does to the registered documents `known` and to the arriving one.

    The arriving one counts as the older when the versions say so or its own status is not active, else as the newer;
    `newer` says otherwise. Replaced as the older one it is recorded as superseded, without chunks. *unchanged* leaves
    all as it is, and the arriving one out. A link to a version that is not registered is dropped, since the registry
    holds none. Raises InputRefused when the choice makes no sense, with what would.
    """
    document, by_key = suggestion.document, {d.key: d for d in known}
    registered = by_key.get(document.key)
    if newer is None:
        newer = document.status == "active" and suggestion.newer is not False
    about = {*suggestion.others, *(d.key for d in known if same_document(d, document) and overlap(d, document))}
    current = [d for key, d in sorted(by_key.items()) if key in about and d.status == "active" and d != registered]
    fitting = ["unchanged"]
    if suggestion.decision != "unchanged":
        fitting += ["correction"] if registered else ["parallel"]
        older = demoted(document, registered) if registered else bool(current) or not newer
        fitting += ["replace", "legacy"] if older else []
    if chosen not in fitting:
        raise InputRefused(
            f"{document.key}: '{chosen}' makes no sense here ({suggestion.reason}); choose {' or '.join(fitting)}"
        )
    if chosen == "unchanged":
        return Effects()
    link = document.supersedes if _may_follow(document, by_key) else None
    status = {"replace": "superseded", "legacy": "legacy"}.get(chosen, registered.status if registered else "active")
    if registered:  # corrected, its status is what triage once made of it; or no longer current by its own word
        fields = {"status": status, "supersedes": link or registered.supersedes}
        return _enter(document.model_copy(update=fields), leave=(document.key,))
    if chosen == "parallel":
        return _enter(document.model_copy(update={"supersedes": link}))
    if not newer:
        return _enter(document.model_copy(update={"supersedes": link, "status": status}))
    if link not in {d.key for d in current}:
        link = next(d.key for d in current if not any(order_of(other, d) == 1 for other in current))
    return Effects(
        document=document.model_copy(update={"supersedes": link, "status": "active"}),
        changed=tuple(d.model_copy(update={"status": status}) for d in current),
        leave=tuple(d.key for d in current) if chosen == "replace" else (),
    )


def _enter(document: Document, leave: tuple[str, ...] = ()) -> Effects:
    """A superseded document is recorded, and has no chunks."""
    out = document.status == "superseded"
    return Effects(document=None if out else document, changed=(document,) if out else (), leave=leave)


def _may_follow(document: Document, by_key: Mapping[str, Document]) -> bool:
    """Is the older version registered, and does its chain never come back to the document?"""
    key, seen = document.supersedes, {document.key}
    if key not in by_key:
        return False
    while key in by_key and key not in seen:
        seen.add(key)
        key = by_key[key].supersedes
    return key not in seen


def current_twins(document: Document, known: Sequence[Document]) -> list[str]:
    """Keys of other active versions of the same document, for at least one of its models."""
    return [
        d.key for d in known
        if d.key != document.key and d.status == "active" and same_document(d, document) and overlap(d, document)
    ]  # fmt: skip


class Ruling(Record):
    """A row of decisions.csv: what an expert decided about an arriving document. No product_model: whichever it has."""

    doc_id: Text
    doc_version: Text
    product_model: tuple[str, ...] = ()
    decision: Literal["replace", "parallel", "legacy", "correction", "unchanged"]
    decided_by: str = "expert"
    reason: str = ""


def read_decisions(path: str | Path) -> list[Ruling]:
    """The rulings of a CSV (UTF-8 or GB18030); a row without a decision is still open and left out.

    Raises InputRefused with the number of the row (the header is row 1) for a decision that there is not, a row without
    doc_id or doc_version, and two rows that decide differently about one document.
    """
    rulings: dict[tuple[Any, ...], tuple[int, Ruling]] = {}
    for number, row in enumerate(read_csv(path, ("doc_id", "doc_version", "decision")), 2):
        decision = normalise(row["decision"]).strip().lower()
        if not decision:
            continue
        models = tuple(m for m in map(str.strip, row.get("product_model", "").replace("；", ";").split(";")) if m)
        fields = {key: row[key] for key in ("doc_id", "doc_version", "decided_by", "reason") if row.get(key)}
        try:
            ruling = Ruling.model_validate(fields | {"decision": decision, "product_model": models})
        except ValidationError as error:
            raise InputRefused(f"{path}, row {number}: {error_fields(error)}; got decision '{decision}'") from None
        first, former = rulings.setdefault((ruling.doc_id, ruling.doc_version, model_names(models)), (number, ruling))
        if former.decision != ruling.decision:
            raise InputRefused(
                f"{path}, row {number}: '{ruling.decision}' for {ruling.doc_id} {ruling.doc_version}, but row {first} "
                f"says '{former.decision}'; keep one of the two"
            )
    return [ruling for _, ruling in rulings.values()]


def write_decisions(path: str | Path, suggestions: Sequence[Suggestion], rulings: Sequence[Ruling] = ()) -> None:
    """A table for the expert: the rulings that there are (those of a former file too, `rulings` over them), then a row
    for each suggestion that has none, its decision left open, beside what the machine suggests and why."""
    former = [r for r in (read_decisions(path) if Path(path).exists() else []) if not any(_same(r, n) for n in rulings)]
    made = [*former, *rulings]
    rows = [ruling.model_dump() for ruling in made]
    for suggestion in suggestions:
        if ruling_for(suggestion, made) is None:
            fields = suggestion.document.model_dump(include={"doc_id", "doc_version", "product_model"})
            rows.append(fields | {"suggestion": suggestion.decision, "why": suggestion.reason})
    write_csv(path, [row | {"product_model": ";".join(row["product_model"])} for row in rows], _COLUMNS)


def write_open_decisions(path: str | Path, waiting: Sequence[Queued]) -> None:
    """A decisions.csv for those that wait in the registry's queue, its decisions left open; rulings of a former file of
    this name stay."""
    rows = [r.model_dump() for r in (read_decisions(path) if Path(path).exists() else [])]
    held = {(r["doc_id"], r["doc_version"]) for r in rows}
    for one in waiting:
        _, *doc_id, doc_version, models = one.key.split("/")
        if ("/".join(doc_id), doc_version) not in held:
            rows.append({
                "doc_id": "/".join(doc_id), "doc_version": doc_version, "product_model": models.split("+"),
                "suggestion": one.suggestion, "why": one.reason,
            })  # fmt: skip
    write_csv(path, [row | {"product_model": ";".join(row["product_model"])} for row in rows], _COLUMNS)


def ruling_for(suggestion: Suggestion, rulings: Sequence[Ruling]) -> Ruling | None:
    """The expert's word on a suggestion's document; one that names its models goes before one for any."""
    fitting = [ruling for ruling in rulings if _about(ruling, suggestion.document)]
    return min(fitting, key=lambda ruling: not ruling.product_model, default=None)


def unmatched(rulings: Sequence[Ruling], documents: Sequence[Document]) -> list[Ruling]:
    """Rulings about none of the documents (those of the source, and the registered ones): to be reported."""
    return [ruling for ruling in rulings if not any(_about(ruling, document) for document in documents)]


def _about(ruling: Ruling, document: Document) -> bool:
    models = model_names(ruling.product_model)
    named = ruling.doc_id == document.doc_id and models in (frozenset(), model_names(document.product_model))
    return named and compare_versions(ruling.doc_version, document.doc_version) == 0


def _same(a: Ruling, b: Ruling) -> bool:
    return (a.doc_id, a.doc_version, model_names(a.product_model)) == (
        b.doc_id, b.doc_version, model_names(b.product_model)
    )  # fmt: skip

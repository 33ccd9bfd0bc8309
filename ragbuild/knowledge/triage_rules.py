"""What the machine suggests about an arriving document, from what is certain to what is not, with its signals.

A document is known by (kb, doc_id): the same doc_id in another knowledge base is another document.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from typing import Literal

from ragbuild.core.records import Document, Record, Text
from ragbuild.core.text import normalise
from ragbuild.knowledge.doc_versions import compare_versions

Decision = Literal["replace", "parallel", "legacy", "correction", "unchanged", "expert"]


class Suggestion(Record):
    """What the machine makes of an arriving document. `others`: the keys of the registered documents that the decision
    is about. `newer`: the arriving one is the newer; None where nothing is compared or the signals disagree."""

    document: Document
    decision: Decision
    others: tuple[str, ...] = ()
    reason: Text
    signals: dict[str, str]
    newer: bool | None = None

    @property
    def policy(self) -> str:
        """The name under which an unattended run takes it: the decision, or ``late_legacy``."""
        late = self.decision == "legacy" and self.newer is False and self.document.status == "legacy"
        return "late_legacy" if late else self.decision


def overlap(a: Document, b: Document) -> bool:
    """Do the two serve a common model? ``all`` is every model."""
    mine, theirs = model_names(a.product_model), model_names(b.product_model)
    return bool(mine & theirs) or "all" in mine | theirs


def same_document(a: Document, b: Document) -> bool:
    """Are they versions of one document?"""
    return (a.kb, a.doc_id) == (b.kb, b.doc_id)


def order_of(a: Document, b: Document) -> int | None:
    """1 when `a` is the newer by its version (`compare_versions`)."""
    return compare_versions(a.doc_version, b.doc_version)


def suggest(document: Document, known: Sequence[Document]) -> Suggestion:
    """Compare an arriving document with the registered ones (of every status)."""
    known = sorted(known, key=lambda d: d.key)
    same = [d for d in known if same_document(d, document) and d.key != document.key]
    near = [d for d in same if overlap(d, document)]
    registered = next((d for d in known if d.key == document.key), None)
    copies = [d for d in known if d.content_hash == document.content_hash and d.key != document.key]
    decision, about, newer, reason = _decide(document, known, registered, copies, near, bool(same))
    return Suggestion(
        document=document, decision=decision, others=tuple(d.key for d in about), newer=newer, reason=reason,
        signals=_signals(document, known, registered, copies, same, near),
    )  # fmt: skip


_Verdict = tuple[Decision, Sequence[Document], bool | None, str]  # decision, about which, newer, reason


def _decide(
    document: Document, known: Sequence[Document], registered: Document | None, copies: Sequence[Document],
    near: Sequence[Document], seen: bool,
) -> _Verdict:  # fmt: skip
    """From what is certain to what is not. `near`: other keys of the document that serve a common model."""
    rivals = [d for d in near if d.status == "active"]
    if registered is not None:
        fields = _other_fields(document, registered)
        same_text = registered.content_hash == document.content_hash
        if demoted(document, registered):
            return "expert", [registered], None, f"registered as active, and its own status now is {document.status}"
        if same_text and not fields:
            return "unchanged", [registered], None, "registered with the same text"
    if copies:
        what = "versions" if any(same_document(d, document) for d in copies) else "documents"
        return "expert", copies, None, f"the same text under two {what}: it is registered as {_keys(copies)}"
    if registered is None or document.supersedes not in (None, registered.supersedes):
        problem = _supersedes_problem(document, known)
        if problem:
            return "expert", [registered] if registered else rivals, None, problem
    if registered is not None:
        what = f"the same text with other fields ({', '.join(fields)})" if same_text else "another text"
        return "correction", [registered], None, f"the same version of the document with {what}: corrected in place"
    if not near:
        said = "no registered version serves one of its models" if seen else "its doc_id was never seen before"
        return "parallel", [], None, said
    if not rivals:
        return _beside_history(document, near)
    return _against(document, rivals, near)


def _beside_history(document: Document, history: Sequence[Document]) -> _Verdict:
    """No version is current: what is registered for these models is legacy or superseded."""
    if document.status != "active":
        return "parallel", [], None, f"no version is current, and this one is {document.status} by its own fields"
    orders = [order_of(document, d) for d in history]
    if all(o == 1 for o in orders):
        return "parallel", [], True, "newer than every registered version, and none of them is current any more"
    newer = None if None in orders else False
    return "expert", history, newer, f"no version is current, and it is not newer than all of {_keys(history)}"


def _against(document: Document, rivals: Sequence[Document], near: Sequence[Document]) -> _Verdict:
    """Current versions serve the same models: which is the newer, and do the signals agree?"""
    orders = [order_of(document, d) for d in rivals]
    if None in orders:
        unclear = [d for d, o in zip(rivals, orders, strict=True) if o is None]
        return "expert", rivals, None, f"version {document.doc_version} cannot be ordered against {_versions(unclear)}"
    if 0 in orders:
        twins = [d for d, o in zip(rivals, orders, strict=True) if o == 0]
        return "expert", rivals, None, f"the same version under another key: {_keys(twins)}"
    if len(set(orders)) > 1:
        return "expert", rivals, False, f"older than some and newer than others of {_versions(rivals)}, all current"
    newer = orders[0] == 1
    against = [d for d in rivals if (_dates(document, d) or orders[0]) != orders[0]]
    if against:
        said = f"version {document.doc_version} is {'newer' if newer else 'older'} than {_versions(against)}"
        return "expert", rivals, None, f"{said}, but its effective_date is {'earlier' if newer else 'later'}"
    if not newer:
        late = f"an older version than {_versions(rivals)} arrives late"
        if document.status == "legacy":
            return "legacy", rivals, False, f"{late}; its own status says legacy"
        if document.status == "superseded":
            return "legacy", rivals, False, f"{late}; its own status says superseded: for reference, or not at all"
        return "expert", rivals, False, f"{late}, and its own status says that it is current"
    if document.status != "active":
        return "expert", rivals, None, f"newer than {_versions(rivals)}, but its own status is {document.status}"
    if document.supersedes and document.supersedes not in {d.key for d in rivals}:
        said = f"supersedes names {document.supersedes}, which is history already, and not the current"
        return "expert", rivals, True, f"{said} {_versions(rivals)}"
    left = [
        d
        for d in rivals
        if "all" not in model_names(document.product_model)
        and not model_names(d.product_model) <= model_names(document.product_model)
    ]
    if left:
        said = f"newer, but not for every model that {_keys(left)} serves"
        return "expert", rivals, True, f"{said}; those that are left would have no current version"
    bare = [d for d in rivals if d.key != document.supersedes and _dates(document, d) != 1]
    if bare:
        said = f"the version alone says that it is newer than {_versions(bare)}"
        return "expert", rivals, True, f"{said}: supersedes does not name it, and no effective_date confirms it"
    said = f"newer than {_versions(rivals)}, as {'supersedes' if document.supersedes else 'effective_date'} confirms"
    kept = [d for d in near if d.status == "legacy"]
    if kept:
        return "legacy", rivals, True, f"{said}; older generations are kept: {_versions(kept)} is legacy"
    return "replace", rivals, True, f"{said}; no older generation is kept"


def _supersedes_problem(document: Document, known: Sequence[Document]) -> str:
    """What is wrong with the link to the older version; empty when nothing is, or there is no link."""
    if not document.supersedes:
        return ""
    said = f"supersedes names {document.supersedes}"
    target = next((d for d in known if d.key == document.supersedes), None)
    if document.supersedes == document.key:
        return f"{said}: the document itself"
    if target is None:
        return f"{said}, which is not registered"
    if not same_document(target, document):
        return f"{said}, another document: its doc_id is {target.doc_id} in {target.kb}"
    if not overlap(target, document):
        return f"{said}, which serves none of its models"
    order = order_of(document, target)
    if order is None:
        return f"{said}, but version {document.doc_version} cannot be ordered against {target.doc_version}"
    if order < 1:
        return f"{said}, which is {'the same version' if order == 0 else 'newer by its version'}"
    return ""


def _signals(
    document: Document, known: Sequence[Document], registered: Document | None, copies: Sequence[Document],
    same: Sequence[Document], near: Sequence[Document],
) -> dict[str, str]:  # fmt: skip
    """What was compared, and what came out of it."""
    mine, elsewhere = document, {d.kb for d in known if d.doc_id == document.doc_id} - {document.kb}
    every = [*([registered] if registered else []), *same]
    listed = ", ".join(f"{d.doc_version} [{'; '.join(d.product_model)}] ({d.status})" for d in every)
    words = {1: "newer than", 0: "the same as", -1: "older than", None: "cannot be ordered against"}
    days = {1: "later than", 0: "the same as", -1: "earlier than", None: "cannot be compared with"}
    content = f"the same as {_keys(copies)}" if copies else "like no other registered one"
    if registered:
        changed = "the same as" if registered.content_hash == mine.content_hash else "other than"
        content = f"{changed} that of the registered {registered.key}; {content}"
    target = next((d for d in known if d.key == mine.supersedes), None)
    return {
        "doc_id": f"{mine.doc_id} in {mine.kb}: {listed or 'never seen'}"
        + (f"; also in {', '.join(sorted(elsewhere))}, another document" if elsewhere else ""),
        "content_hash": content,
        "version_order": "; ".join(f"{mine.doc_version} {words[order_of(mine, d)]} {d.doc_version}" for d in near)
        or "nothing to compare",
        "product_model": "; ".join(
            f"{', '.join(mine.product_model)} {'overlaps' if d in near else 'shares nothing'} with "
            f"{', '.join(d.product_model)} ({d.doc_version})"
            for d in same
        )
        or "nothing to compare",
        "effective_date": "; ".join(
            f"{mine.effective_date or 'none'} {days[_dates(mine, d)]} {d.effective_date or 'none'} ({d.doc_version})"
            for d in near
        )
        or "nothing to compare",
        "supersedes": f"{mine.supersedes} ({target.status if target else 'not registered'})"
        if mine.supersedes
        else "names none",
        "status": f"arrives as {mine.status}; registered: {', '.join(d.status for d in every) or 'none'}",
    }


def _other_fields(document: Document, registered: Document) -> list[str]:
    """Fields that a person has changed beside the same text. Status and supersedes are triage's own afterwards, and
    where the file lies says nothing; a date that is no longer given is no change."""
    names = [name for name in ("title", "doc_type") if getattr(document, name) != getattr(registered, name)]
    return names + ["effective_date"] * (document.effective_date not in (None, registered.effective_date))


def model_names(models: Sequence[str]) -> frozenset[str]:
    """Product models as they are compared: spelling of case and width aside, in no order."""
    return frozenset(normalise(model).strip().casefold() for model in models)


def demoted(document: Document, registered: Document) -> bool:
    """Does the source now say of a current version that it is no longer current?"""
    return registered.status == "active" and document.status != "active"


def _dates(a: Document, b: Document) -> int | None:
    """1 when `a` is valid from a later day than `b`, 0 from the same, -1 from an earlier; None when one has no date."""
    if not (a.effective_date and b.effective_date):
        return None
    mine, theirs = date.fromisoformat(a.effective_date), date.fromisoformat(b.effective_date)
    return (mine > theirs) - (mine < theirs)


def _keys(documents: Sequence[Document]) -> str:
    return ", ".join(d.key for d in documents)


def _versions(documents: Sequence[Document]) -> str:
    return ", ".join(dict.fromkeys(d.doc_version for d in documents))

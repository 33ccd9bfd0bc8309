"""Taking in documents that come after the build: triage, registry, chunks, dictionary, both indexes, one commit.

Only new or changed texts are encoded; a change of status, or a new term in an old chunk, moves the chunk with the
vector that it has. One document that fails is reported, and the others go on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from pydantic import Field

from ragbuild.core.config import Config
from ragbuild.core.errors import GateFailed, InputRefused, UsageError
from ragbuild.core.records import Chunk, Document, Record, TermEntry, index_text
from ragbuild.core.store import Workspace, read_json, write_json
from ragbuild.core.text import TokenCounter
from ragbuild.evaluate.gates import read_baseline
from ragbuild.evaluate.regression import Regression, recall_at_5, regression
from ragbuild.index.staging import Added, Content, stage_update
from ragbuild.index.versions import IndexVersion
from ragbuild.knowledge import triage
from ragbuild.knowledge.registry import Registry
from ragbuild.knowledge.registry_tables import Change, Queued
from ragbuild.knowledge.writer import Step, Writer, number
from ragbuild.models.embedders import Embedder, VectorCache, load_embedder
from ragbuild.offline.chunk import Tagger, chunk_document
from ragbuild.offline.dictionary import append_terms, read_review
from ragbuild.offline.parse import (
    ParsedEntry,
    image_ids_of,
    kept_files,
    parse_corpus,
    pictures_of,
    write_parsed,
)  # fmt: skip

# Settings that a run may change; the others belong to the index as it was built.
FREE = ("knowledge.", "gates.", "parse.", "corpus.", "evaluate.", "embedder.processes", "embedder.batch_size")


class Fate(Record):
    """What became of one arriving document, and why: taken, unchanged, waiting (for an expert), refused, or held back
    (with a version that was made and not published)."""

    doc_source: str
    key: str = ""
    outcome: str
    decision: str = ""
    decided_by: str = ""
    reason: str = ""
    signals: dict[str, str] = Field(default_factory=dict)
    about: tuple[str, ...] = ()
    chunks: int = 0


@dataclass
class Result:
    """What a run did. `version` is the one in use when it ended; `tried` one that was made and not published."""

    command: str
    version: str
    former: str
    published: bool = False
    tried: str = ""
    fates: list[Fate] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    new_terms: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    regression: Regression | None = None

    def hold_back(self, tried: str) -> None:
        """The version that was made is not published: nothing was taken in."""
        self.tried = tried
        self.fates = [f.model_copy(update={"outcome": "held back"}) if f.outcome == "taken" else f for f in self.fates]

    def count(self, outcome: str) -> int:
        """How many documents ended so."""
        return sum(f.outcome == outcome for f in self.fates)


@dataclass
class _Plan:
    """What triage decided, document by document."""

    known: dict[str, Document]
    entering: dict[str, ParsedEntry] = field(default_factory=dict)
    leave: set[str] = field(default_factory=set)
    changes: dict[str, Change] = field(default_factory=dict)
    waiting: list[triage.Suggestion] = field(default_factory=list)


def ingest(
    workspace: Path,
    sources: Sequence[Path],
    config: Config,
    *,
    rulings: Sequence[triage.Ruling] = (),
    choices: Mapping[str, str] | None = None,
    by: str = "expert",
    why: str = "",
    command: str = "ingest",
    wait: float = 0.0,
    regress: bool = False,
    expert: Path | None = None,
    review: Path | None = None,
    baseline: Path | None = None,
    embedder: Embedder | None = None,
    on_step: Step = lambda step: None,
) -> Result:
    """Take in files, or all files of folders, into a new version of the workspace's index.

    `rulings`: rows of decisions.csv; `choices`: doc_id (or ``*``) to a decision made now, by `by`; what neither decides
    and ``knowledge.unattended`` does not allow waits in the registry's queue. `regress`: the new version is published
    only if no gated metric falls beyond its margin; else the former one stays in use (`raise_if_fell`). `expert`: the
    expert eval set; `review`: term_review.csv; `baseline`: baseline.json.

    Raises WorkspaceLocked, UsageError, InputRefused (nothing could be read).
    """
    start = time.perf_counter()
    with Writer(
        workspace, command, why=why or ", ".join(str(s) for s in sources), wait=wait, on_step=on_step
    ) as writer:
        base = writer.base
        result = Result(command, base.name, base.name, notes=writer.notes)
        known = {d.key: d for d in writer.registry.documents(writer.target) if not _called_back(d, choices or {})}
        entries = _read(sources, config, known, result)
        if any(path.is_dir() for path in sources):
            _compare(entries, known, rulings, result)
        result.seconds["read"] = time.perf_counter() - start
        embedder = _embedder(base, config, embedder)
        start = time.perf_counter()
        chunks = _chunked(entries, config, result)
        plan = _triage(entries, chunks, known, rulings, choices or {}, by, config, result)
        _queue(writer, plan, result)
        terms = _terms(base, plan, config, review)
        result.new_terms = [e.standard_term for e in terms[len(base.entries) :]]
        if not plan.changes and not result.new_terms:
            writer.finish("unchanged")
            _refuse_if_nothing(result)
            return result
        added = _encoded(base, plan, chunks, terms, embedder, result)
        result.seconds["chunk and encode"] = time.perf_counter() - start
        start = time.perf_counter()
        writer.registry.apply(list(plan.changes.values()), writer.target, writer.run.id)
        on_step("registry")
        with TemporaryDirectory(dir=writer.indexes, prefix=".parsed-") as folder:
            kept = {}
            for place, (key, entry) in enumerate(plan.entering.items()):  # two folders may hold files of one name
                own = Workspace(Path(folder) / str(place))
                write_parsed([entry], own)
                kept[key] = kept_files(own, entry.document)
            tried = _stage(writer, plan, terms, added, kept, config)
        result.seconds["index"] = time.perf_counter() - start
        on_step("version")
        if regress and not passes(writer, result, tried, config, expert, baseline, embedder):
            return result
        writer.publish(tried, config.knowledge.keep_versions)
        writer.registry.unqueue(plan.changes)
        result.version, result.published = tried, True
        return result


def preview(
    workspace: Path, sources: Sequence[Path], config: Config, *, rulings: Sequence[triage.Ruling] = (),
    choices: Mapping[str, str] | None = None, by: str = "expert",
) -> Result:  # fmt: skip
    """What `ingest` would do with each document, and why; nothing is written and no lock taken."""
    version = IndexVersion(workspace / "indexes")
    known = {d.key: d for d in registered(workspace, version) if not _called_back(d, choices or {})}
    result = Result("dry run", version.name, version.name)
    entries = _read(sources, config, known, result)
    chunks = _chunked(entries, config, result)
    _triage(entries, chunks, known, rulings, choices or {}, by, config, result)
    return result


def restate(
    workspace: Path, key: str, status: str, config: Config, *, by: str = "expert", why: str = "", wait: float = 0.0,
    on_step: Step = lambda step: None,
) -> Result:  # fmt: skip
    """Give a registered document another status: legacy, active again, or superseded, which takes its chunks out.

    Raises UsageError for a document that is not registered, has this status already, or has no chunks any more.
    """
    with Writer(workspace, "set", why=why or f"{key}: {status}", wait=wait, on_step=on_step) as writer:
        base, known = writer.base, {d.key: d for d in writer.registry.documents(writer.target)}
        if key not in known:
            raise UsageError(f"no document '{key}' is registered; 'ragbuild registry --json' lists keys")
        if known[key].status == status:
            raise UsageError(f"{key} is {status} already; nothing was changed")
        if key not in {d.key for d in base.documents}:
            raise UsageError(f"{key} has no chunks any more; 'ragbuild rollback' brings it back")
        document = known[key].model_copy(update={"status": status})
        if status == "active" and (twins := triage.current_twins(document, list(known.values()))):
            writer.notes.append(f"active beside {', '.join(twins)}: two versions of one document answer now")
        change = Change(document=document, decision=f"set {status}", reason=why, decided_by=by)
        plan = _Plan({**known, key: document}, leave={key} if status == "superseded" else set(), changes={key: change})
        writer.registry.apply([change], writer.target, writer.run.id)
        on_step("registry")
        tried = _stage(writer, plan, base.entries, [], {}, config)
        on_step("version")
        writer.publish(tried, config.knowledge.keep_versions)
        return Result("set", tried, base.name, published=True, notes=writer.notes)


def registered(workspace: Path, version: IndexVersion) -> list[Document]:
    """The registry's documents, or where there is no registry yet those of the index."""
    if not Registry.exists(workspace):
        return version.documents
    registry = Registry.open(workspace)
    try:
        return registry.documents(number(version.name)) or version.documents
    finally:
        registry.close()


def passes(
    writer: Writer, result: Result, tried: str, config: Config, expert: Path | None, baseline: Path | None,
    embedder: Embedder | None,
) -> bool:  # fmt: skip
    """Hold a version that is not published yet to the one in use, and keep with it what it reached. One that fails is
    undone, and the result says so."""
    base, workspace = writer.base, writer.workspace
    found = regression(
        workspace, base.name, tried, config, expert=expert, embedder=embedder,
        baseline=read_baseline(baseline) if baseline is not None else None,
    )  # fmt: skip
    path = writer.indexes / tried / "made.json"
    now = recall_at_5(workspace, tried, config, expert=expert, embedder=embedder)
    built, then = IndexVersion(writer.indexes, tried).manifest["built"]["version"], base.made.get("recall_built")
    if built == tried:
        then = now
    elif then is None and built == base.name:
        then = recall_at_5(workspace, base.name, config, expert=expert, embedder=embedder)
    write_json(path, read_json(path) | {"metrics": found.metrics, "recall": now, "recall_built": then})
    writer.on_step("regression")
    result.regression = found
    if not found.passed:
        result.hold_back(tried)
        writer.finish("failed", f"regression: {found.said}")
    return found.passed


def raise_if_fell(result: Result) -> None:
    """Raises GateFailed (exit code 3) when the new version was not published because a gated metric fell."""
    if result.regression is not None and not result.regression.passed:
        raise GateFailed(
            f"{result.tried} was made and not published; {result.version} stays in use. {result.regression.said}. "
            "Where that is as it should be, the same with --no-regress publishes it"
        )


def check_overrides(keys: Sequence[str]) -> None:
    """Raises UsageError for a setting that the index was built with and that a run cannot change."""
    fixed = [k for k in keys if not k.startswith(FREE)]
    if fixed:
        raise UsageError(
            f"{', '.join(fixed)} cannot be changed while documents are taken in: the index was built with it. "
            "'ragbuild rebuild -p …' makes the index anew."
        )


def _embedder(base: IndexVersion, config: Config, given: Embedder | None) -> Embedder:
    """The one that the index was encoded with: vectors of two models never meet."""
    name = base.manifest["embedder"]["name"]
    if given is not None and given.name == name:
        return given
    wanted = given.name if given is not None else config.embedder.name
    if wanted not in ("auto", name):
        raise UsageError(
            f"the index was encoded with '{name}', and embedder.name is '{wanted}'. "
            "'ragbuild rebuild' encodes every chunk again."
        )
    return load_embedder(name, config.embedder)


# --- reading and triage -----------------------------------------------------------------------------------------------


def _read(
    sources: Sequence[Path], config: Config, known: Mapping[str, Document], result: Result
) -> list[ParsedEntry]:  # fmt: skip
    by_hash = {d.content_hash: d for d in known.values()}

    def skip(source: str, content_hash: str, row: Mapping[str, str]) -> bool:
        document = by_hash.get(content_hash)
        if document is None or _says_otherwise(document, row):
            return False
        result.fates.append(
            Fate(doc_source=source, key=document.key, outcome="unchanged", reason="the same content is registered")
        )
        return True

    groups: dict[Path, list[Path] | None] = {}
    for path in sources:
        if path.is_dir():
            groups[path] = None
        elif path.is_file():
            group = groups.setdefault(path.parent, [])
            if group is not None:
                group.append(path)
        else:
            raise UsageError(f"{path} is not there; give documents, or a folder of them")
    entries: dict[str, ParsedEntry] = {}
    for folder, files in groups.items():
        read = parse_corpus(folder, parse=config.parse, corpus=config.corpus, only=files, skip=skip)
        for entry in read.documents:
            document = entry.document
            if entries.setdefault(document.key, entry) is not entry:
                reason = f"the same key {document.key} as a document of another folder given; keep one of the two"
                result.fates.append(
                    Fate(doc_source=document.doc_source, key=document.key, outcome="refused", reason=reason)
                )
        result.fates += [Fate(outcome="refused", **refused) for refused in read.refused]
        result.notes += read.warnings
    return list(entries.values())


def _compare(
    entries: Sequence[ParsedEntry], known: Mapping[str, Document], rulings: Sequence[triage.Ruling], result: Result
) -> None:
    """Note what a whole folder lacks: files of registered documents, and documents that rulings are about."""
    stale = triage.unmatched(rulings, [*(e.document for e in entries), *known.values()])
    result.notes += [f"decisions.csv: {r.doc_id} {r.doc_version} is about no document here" for r in stale]
    seen = {f.key for f in result.fates} | {e.document.key for e in entries}
    gone = [d.doc_source for key, d in known.items() if key not in seen and d.status != "superseded"]
    if gone:
        result.notes.append(
            f"{len(gone)} registered documents are not in the folder ({', '.join(gone[:3])}{' …' * (len(gone) > 3)}); "
            "they stay: 'ragbuild registry set KEY superseded' takes one out"
        )


def _called_back(document: Document, choices: Mapping[str, str]) -> bool:
    """Is it a document whose chunks once left, and which is now given again with a decision of its own?"""
    return document.status == "superseded" and choices.get(document.doc_id) in ("legacy", "parallel")


def _says_otherwise(document: Document, row: Mapping[str, str]) -> bool:
    """Does the sidecar now say something else of a registered document? What triage made of its status stays."""
    held = document.model_dump(mode="json") | {"product_model": ";".join(document.product_model)}
    if row.get("status", "active") != "active" and document.status == "active":
        return True
    return any(str(held[name] or "") != value for name, value in row.items() if name not in ("status", "supersedes"))


def _triage(
    entries: Sequence[ParsedEntry], chunks: Mapping[str, list[Chunk]], known: dict[str, Document],
    rulings: Sequence[triage.Ruling], choices: Mapping[str, str], by: str, config: Config, result: Result,
) -> _Plan:  # fmt: skip
    """Decide about each document that has chunks, those that others supersede first; what is decided holds for the
    next."""
    plan, by_key = _Plan(dict(known)), {e.document.key: e for e in entries}
    unknown = set(choices) - {"*"} - {e.document.doc_id for e in entries}
    unknown -= {known[f.key].doc_id for f in result.fates if f.key in known}  # decided and done in an earlier run
    if unknown:
        raise UsageError(
            f"--decision names {', '.join(sorted(unknown))}, but the documents that changed are: "
            f"{', '.join(sorted({e.document.doc_id for e in entries})) or 'none'}"
        )
    done = {known[f.key].doc_id: f.key for f in result.fates if f.key in known}
    result.notes += [
        f"{done[doc_id]} was taken in before as it is, so the choice '{decision}' changes nothing; 'ragbuild registry "
        "set' changes a document's status"
        for doc_id, decision in choices.items() if doc_id in done
    ]  # fmt: skip
    for document in triage.in_order([e.document for e in entries if e.document.key in chunks]):
        suggestion = triage.suggest(document, list(plan.known.values()))
        decision, who, reason = _decided(suggestion, rulings, choices, by, config)
        told: dict[str, Any] = {
            "doc_source": document.doc_source, "key": document.key, "decision": decision, "decided_by": who,
            "reason": reason, "signals": suggestion.signals, "about": suggestion.others,
        }  # fmt: skip
        if not who:
            plan.waiting.append(suggestion)
            result.fates.append(Fate(outcome="waiting", **told))
            continue
        try:
            effects = triage.resolve(suggestion, decision, list(plan.known.values()))  # type: ignore[arg-type]
        except InputRefused as error:
            result.fates.append(Fate(outcome="refused", **(told | {"reason": str(error)})))
            continue
        entered = effects.document
        moved = [d for d in (entered, *effects.changed) if d is not None]
        result.fates.append(Fate(outcome="taken" if moved else "unchanged", **told))
        plan.leave |= set(effects.leave)
        for key in effects.leave:
            plan.entering.pop(key, None)
        if entered is not None:
            plan.entering[entered.key] = ParsedEntry(entered, by_key[document.key].parsed)
        for d in moved:
            plan.known[d.key] = d
            if d.key in plan.entering:  # taken in by this run, and history by the next document of it
                plan.entering[d.key] = ParsedEntry(d, plan.entering[d.key].parsed)
            plan.changes[d.key] = Change(document=d, decision=decision, reason=reason, decided_by=who)
    return plan


def _decided(
    suggestion: triage.Suggestion, rulings: Sequence[triage.Ruling], choices: Mapping[str, str], by: str, config: Config
) -> tuple[str, str, str]:
    """(decision, who decided, why); nobody when it has to wait."""
    document = suggestion.document
    chosen = choices.get(document.doc_id) or choices.get("*")
    if chosen:
        return chosen, by, f"chosen for this run; the machine suggested {suggestion.decision}: {suggestion.reason}"
    ruling = triage.ruling_for(suggestion, rulings)
    if ruling is not None and suggestion.decision != "unchanged":
        return ruling.decision, ruling.decided_by, ruling.reason or "decisions.csv"
    if triage.unattended(suggestion, config.knowledge.unattended):
        return suggestion.decision, "policy", suggestion.reason
    return suggestion.decision, "", suggestion.reason


def _queue(writer: Writer, plan: _Plan, result: Result) -> None:
    """Those that wait for an expert are kept in the registry; those that need not wait any more leave it."""
    now = writer.run.started
    writer.registry.queue([
        Queued(
            key=s.document.key, doc_source=s.document.doc_source, content_hash=s.document.content_hash,
            suggestion=s.decision, reason=s.reason, signals=s.signals, since=now, run_id=writer.run.id,
        )
        for s in plan.waiting
    ])  # fmt: skip
    writer.registry.unqueue([f.key for f in result.fates if f.outcome == "unchanged"])


def _refuse_if_nothing(result: Result) -> None:
    if result.fates and all(f.outcome == "refused" for f in result.fates):
        told = "\n".join(f"  {f.doc_source}: {f.reason}" for f in result.fates)
        raise InputRefused(f"none of the documents could be taken in; the version in use is kept:\n{told}")


# --- chunks, dictionary, indexes --------------------------------------------------------------------------------------


def _terms(base: IndexVersion, plan: _Plan, config: Config, review: Path | None) -> list[TermEntry]:
    """The dictionary of the index, longer by what the new documents and the expert bring; the same list if nothing."""
    rows = read_review(review) if review is not None else []
    if not config.knowledge.append_terms or not (plan.entering or rows):
        return base.entries
    documents = [(e.document, e.parsed.markdown) for e in plan.entering.values()]
    terms = append_terms(base.entries, documents, config=config.dictionary, review=rows)
    return base.entries if len(terms) == len(base.entries) else terms


def _chunked(entries: Sequence[ParsedEntry], config: Config, result: Result) -> dict[str, list[Chunk]]:
    """The chunks of each document, by its key; status and tags come later. One that gives no chunk is refused here,
    before anything is decided about it."""
    counter, out = TokenCounter(config.chunk.tokenizer), {}
    for document, parsed in ((e.document, e.parsed) for e in entries):
        made = chunk_document(
            document, parsed.markdown, parsed.page_of, config=config.chunk, counter=counter,
            image_ids=image_ids_of(pictures_of(document, parsed), document.key),
        )  # fmt: skip
        if made.chunks:
            out[document.key] = made.chunks
            result.notes += [f"{r['doc_source']}: {r['reason']}" for r in made.refused]
        else:
            reason = "; ".join(["holds no text to chunk", *dict.fromkeys(r["reason"] for r in made.refused)])
            result.fates.append(
                Fate(doc_source=document.doc_source, key=document.key, outcome="refused", reason=reason)
            )
    return out


def _encoded(
    base: IndexVersion, plan: _Plan, chunks: Mapping[str, list[Chunk]], terms: Sequence[TermEntry], embedder: Embedder,
    result: Result,
) -> list[Added]:  # fmt: skip
    """The chunks of what enters, with their status and tags, cut into tokens and encoded."""
    tagger, tokenizer = Tagger(terms), base.tokenizer_on(terms)
    encode, out = VectorCache(embedder).encode, []
    for key, entry in plan.entering.items():
        made = [_labelled(c, entry.document.status, tagger) for c in chunks[key]]
        texts = [index_text(c) for c in made if not c.is_parent]
        place = next(i for i, f in enumerate(result.fates) if f.key == key and f.outcome == "taken")
        result.fates[place] = result.fates[place].model_copy(update={"chunks": len(texts)})
        out.append(Added(made, [tokenizer(t) for t in texts], encode(texts)))
    return out


def _labelled(chunk: Chunk, status: str, tagger: Tagger) -> Chunk:
    tag = tagger(chunk.content) or tagger(f"{chunk.chapter}\n{chunk.section}")
    return chunk.model_copy(update={"status": status, "tag": tag})


def _stage(
    writer: Writer, plan: _Plan, terms: list[TermEntry], added: Sequence[Added],
    kept: Mapping[str, Mapping[str, Path]], config: Config,
) -> str:  # fmt: skip
    base = writer.base
    held = {d.key: d for d in base.documents}
    leaving = _rows(base, [held[k] for k in plan.leave if k in held])
    restated = {k: c.document for k, c in plan.changes.items() if k in held and k not in plan.leave}
    restated = {k: d for k, d in restated.items() if d.status != held[k].status}
    moving = _rows(base, [held[k] for k in restated])
    tokenizer = base.tokenizer_on(terms) if terms is not base.entries else None
    if tokenizer is not None:
        moving = np.union1d(moving, _holding(base, terms[len(base.entries) :], tokenizer))
    moving = np.setdiff1d(moving, leaving)
    documents = [plan.changes[k].document if k in plan.changes else d for k, d in held.items() if k not in plan.leave]
    documents += [e.document for e in plan.entering.values() if e.document not in documents]
    content = Content(documents, terms, base.prompt, kept, writer.made())
    again = [_moved(base, moving, restated, tokenizer, Tagger(terms))] if len(moving) else []
    return stage_update(
        writer.indexes, base, content, config=config, gone=np.concatenate([leaving, moving]), added=[*again, *added],
        on_step=writer.on_step,
    )  # fmt: skip


def _rows(base: IndexVersion, documents: Sequence[Document]) -> np.ndarray:
    found = [base.rows_of_document(d) for d in documents]
    return np.sort(np.concatenate(found)) if found else np.zeros(0, np.int64)


def _holding(base: IndexVersion, new: Sequence[TermEntry], tokenizer: Callable[[str], list[str]]) -> np.ndarray:
    """Rows of the families in which a chunk is cut in another way now that these terms are known."""
    rows: set[int] = set()
    for form in {f for entry in new for f in entry.forms}:
        tokens = set(base.tokenizer(form))
        found = [set(base.lexical.rows_with(t).tolist()) for t in tokens]
        rows |= set.intersection(*found) if found else set()
    ordered = np.array(sorted(rows), np.int64)
    chunks, held = base.children_and_tokens(ordered)
    other = [tokenizer(index_text(c)) != tokens for c, tokens in zip(chunks, held, strict=True)]
    return base.families(ordered[np.array(other, bool)])


def _moved(
    base: IndexVersion, rows: np.ndarray, restated: Mapping[str, Document],
    tokenizer: Callable[[str], list[str]] | None, tagger: Tagger,
) -> Added:  # fmt: skip
    """Chunks that are in the index, as they enter it again: with their vectors, another status, other tokens."""

    def now(chunk: Chunk) -> Chunk:
        status = restated[chunk.doc_key].status if chunk.doc_key in restated else chunk.status
        return chunk.model_copy(update={"status": status}) if tokenizer is None else _labelled(chunk, status, tagger)

    children, tokens = base.children_and_tokens(rows)
    children = [now(c) for c in children]
    if tokenizer is not None:
        tokens = [tokenizer(index_text(c)) for c in children]
    return Added([*(now(p) for p in base.parents_of(rows)), *children], tokens, base.dense.vectors(rows))

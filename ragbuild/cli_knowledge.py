"""Commands for knowledge that changes: ingest, sync, registry, snapshots, rollback, rebuild."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from ragbuild.cli_shared import JsonOption, ParamOption, WorkspaceOption, config_of, emit, open_workspace, say
from ragbuild.core.errors import GateFailed, UsageError

WaitOption = Annotated[bool, typer.Option("--wait", help="Wait while another writer holds the workspace.")]
TimeoutOption = Annotated[float | None, typer.Option(help="Wait, but at most this many seconds.", min=0)]
WhyOption = Annotated[str, typer.Option(help="Why, for the history.")]
DecisionsOption = Annotated[Path | None, typer.Option(help="The expert's decisions.csv (default: beside the source).")]
ByOption = Annotated[str, typer.Option("--by", help="Who decided, for the history.")]
RegressOption = Annotated[
    bool, typer.Option("--regress/--no-regress", help="Publish only if no gated metric falls on the eval sets.")
]

registry_app = typer.Typer(help="The documents and their states: list, status, history, queue, check, set.")


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command()(ingest)
    app.command()(sync)
    app.add_typer(registry_app, name="registry", invoke_without_command=True)
    app.command()(snapshots)
    app.command()(rollback)
    app.command()(rebuild)


def ingest(
    documents: Annotated[list[Path], typer.Argument(help="Documents, or folders of them.")],
    workspace: WorkspaceOption = None,
    decision: Annotated[
        list[str] | None,
        typer.Option(
            "--decision", help="replace, parallel, legacy, correction or unchanged; doc_id=replace for one of several."
        ),
    ] = None,
    decisions: DecisionsOption = None,
    by: ByOption = "expert",
    why: WhyOption = "",
    regress: RegressOption = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be done, and why.")] = False,
    wait: WaitOption = False,
    timeout: TimeoutOption = None,
    param: ParamOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take in new documents or new versions of documents, into a new version of the index."""
    from ragbuild.knowledge import ingest as knowledge

    root, config, rulings, inputs = _opened(workspace, param, documents, decisions)
    choices = dict(_choice(text) for text in decision or [])
    if dry_run:
        result = knowledge.preview(root, documents, config, rulings=rulings, choices=choices, by=by)
    else:
        result = knowledge.ingest(
            root, documents, config, rulings=rulings, choices=choices, by=by, why=why, regress=regress,
            wait=_seconds(wait, timeout), expert=inputs["expert_eval_set"], review=inputs["term_review"],
            baseline=inputs["baseline"], on_step=_step,
        )  # fmt: skip
    _tell(result, as_json)
    knowledge.raise_if_fell(result)


def sync(
    source: Annotated[Path, typer.Argument(help="The folder that holds the documents.")],
    workspace: WorkspaceOption = None,
    decisions: DecisionsOption = None,
    why: WhyOption = "scheduled",
    regress: RegressOption = True,
    wait: WaitOption = False,
    timeout: TimeoutOption = None,
    param: ParamOption = None,
    as_json: JsonOption = False,
) -> None:
    """The scheduled task: take in what changed in a folder, and publish it only if no gated metric falls."""
    from ragbuild.knowledge import ingest as knowledge

    if not source.is_dir():
        raise UsageError(f"{source} is no folder; 'ragbuild ingest' takes single documents")
    root, config, rulings, inputs = _opened(workspace, param, [source], decisions)
    result = knowledge.ingest(
        root, [source], config, rulings=rulings, why=why, command="sync", regress=regress, wait=_seconds(wait, timeout),
        expert=inputs["expert_eval_set"], review=inputs["term_review"],
            baseline=inputs["baseline"], on_step=_step,
    )  # fmt: skip
    _tell(result, as_json)
    knowledge.raise_if_fell(result)


def _opened(
    workspace: Path | None, param: list[str] | None, sources: list[Path], decisions: Path | None
) -> tuple[Path, Any, list[Any], dict[str, Path | None]]:
    """The workspace, its configuration, the expert's rulings, and the inputs beside the corpus."""
    from ragbuild.core.config import parse_assignments
    from ragbuild.course.step import input_paths
    from ragbuild.knowledge.ingest import check_overrides
    from ragbuild.knowledge.triage import read_decisions

    root = open_workspace(workspace)
    check_overrides(list(parse_assignments(param or [])))
    config = config_of(root, param)
    setting = config.knowledge.decisions
    if decisions is None and setting != "auto":
        decisions = Path(setting)
    if decisions is not None and not decisions.is_file():
        raise UsageError(f"there is no file {decisions}")
    if decisions is None:
        folders = [s if s.is_dir() else s.parent for s in sources]
        places = [p for f in folders for p in (f / "decisions.csv", f.parent / "decisions.csv")]
        decisions = next((p for p in places if p.is_file()), None)
    return root, config, read_decisions(decisions) if decisions else [], input_paths(config)


def _choice(text: str) -> tuple[str, str]:
    """``doc_id=replace``, or ``replace`` for whatever is given."""
    doc_id, sign, decision = text.rpartition("=")
    fitting = ("replace", "parallel", "legacy", "correction", "unchanged")
    if decision not in fitting or (sign and not doc_id):
        raise UsageError(f"--decision takes {', '.join(fitting)}, or doc_id=decision; got '{text}'")
    return doc_id or "*", decision


def _seconds(wait: bool, timeout: float | None) -> float:
    return timeout if timeout is not None else -1.0 if wait else 0.0


def _step(name: str) -> None:
    say(f"  {name}: done")


def _tell(result: Any, as_json: bool) -> None:
    for note in result.notes:
        say(f"note: {note}")
    if as_json:
        emit({**result.__dict__, "regression": result.regression})
        return
    dry = result.command == "dry run"
    for f in result.fates:
        size = f" ({f.chunks} children)" if f.chunks else ""
        outcome = "would be taken" if dry and f.outcome == "taken" else f.outcome
        typer.echo(f"{outcome:10} {f.key or f.doc_source}{size}")
        decided = f"{f.decision}{f' by {f.decided_by}' if f.decided_by else ''}"
        about = f" of {', '.join(f.about)}" if f.about else ""
        typer.echo(f"{'':10} {decided}{about}: {f.reason}" if f.decision else f"{'':10} {f.reason}")
    if result.new_terms:
        typer.echo(f"new terms: {', '.join(result.new_terms)}")
    if result.regression is not None and result.regression.passed:
        typer.echo(f"regression: {result.regression.said}")
    if dry:
        typer.echo(f"Nothing was written; {result.version} is in use.")
    elif result.published:
        typer.echo(f"{result.version} is published; 'ragbuild rollback {result.former}' goes back.")
    else:
        typer.echo(f"{result.version} stays in use.")
    if result.count("waiting") and not dry:
        typer.echo(
            f"{result.count('waiting')} wait for an expert: decide with --decision, or have decisions.csv filled in "
            "('ragbuild registry queue --csv FOLDER/decisions.csv' makes it) and run again."
        )


# --- the registry -----------------------------------------------------------------------------------------------------


@registry_app.callback()
def registry(context: typer.Context, workspace: WorkspaceOption = None, as_json: JsonOption = False) -> None:
    """The documents and their states; without a command, list them."""
    if context.invoked_subcommand is not None:
        return
    from ragbuild.index.versions import IndexVersion
    from ragbuild.knowledge.writer import number

    root = open_workspace(workspace)
    version = IndexVersion(root / "indexes")
    found = _registry(root)
    documents = found.documents(number(version.name)) if found else []
    if found:
        found.close()
    documents = documents or version.documents
    if as_json:
        emit({"documents": documents})
        return
    for d in documents:
        typer.echo(
            f"{d.doc_id:20} {d.doc_version:14} {d.status:10} {d.kb:8} {'+'.join(d.product_model):14} {d.doc_source}"
        )


def _registry(root: Path) -> Any:
    """The registry, or None where no command has made one yet (the documents are then those of the build)."""
    from ragbuild.knowledge.registry import Registry

    return Registry.open(root) if Registry.exists(root) else None


@registry_app.command()
def status(
    workspace: WorkspaceOption = None,
    measure: Annotated[bool, typer.Option("--measure", help="Measure recall@5 now (takes a while).")] = False,
    param: ParamOption = None,
    as_json: JsonOption = False,
) -> None:
    """Documents by status, who waits, who writes, and what speaks for a full rebuild."""
    from collections import Counter

    from ragbuild.core.lock import HOLDER
    from ragbuild.course.step import input_paths
    from ragbuild.index.versions import IndexVersion
    from ragbuild.knowledge.rebuild import recall_then_and_now, triggers
    from ragbuild.knowledge.writer import number

    root = open_workspace(workspace)
    config, version = config_of(root, param), IndexVersion(root / "indexes")
    found = _registry(root)
    documents = (found.documents(number(version.name)) if found else []) or version.documents
    waiting = found.queued() if found else []
    if found:
        found.close()
    holder = root / HOLDER
    recall = recall_then_and_now(root, version, config, input_paths(config)["expert_eval_set"], measure)
    rows = triggers(version, config, recall)
    facts = {
        "version": version.name, "documents": dict(Counter(d.status for d in documents)), "chunks": len(version),
        "waiting": len(waiting), "writer": holder.read_text() if holder.is_file() else "nobody",
        "registry": found.place if found else "none yet: the first ingest or sync makes it",
    }  # fmt: skip
    if as_json:
        emit({**facts, "triggers": rows})
        return
    for key, value in facts.items():
        typer.echo(f"{key}: {json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else value}")
    for r in rows:
        now = "not measured" if r["value"] is None else f"{r['value']:.3f}"
        mark = "RECOMMENDED" if r["recommended"] else "no"
        typer.echo(f"full rebuild? {r['trigger']:24} {now:>12} (limit {r['limit']:g})  {mark:12} {r['said']}")
    if any(r["recommended"] for r in rows):
        typer.echo("A full rebuild is recommended: 'ragbuild rebuild' makes it while this version answers.")


@registry_app.command()
def history(
    document: Annotated[str, typer.Argument(help="A document's key or doc_id; all when left out.")] = "",
    runs: Annotated[bool, typer.Option("--runs", help="The commands that were run, instead of changes.")] = False,
    workspace: WorkspaceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Every change of a document's state: when, why, who decided, in which run."""
    root = open_workspace(workspace)
    found = _registry(root)
    rows: list[Any] = []
    if found:
        every = found.runs() if runs else found.history()
        rows = [r for r in every if runs or document in ("", r.key, "/".join(r.key.split("/")[1:-2]))]
        found.close()
    if document and not rows:
        raise UsageError(f"the registry knows no '{document}'; 'ragbuild registry' lists keys and doc_ids")
    if as_json:
        emit({"runs" if runs else "history": rows})
        return
    for r in rows:
        if runs:
            typer.echo(
                f"{r.started}  {r.command:9} v{r.base:04d} -> v{r.target:04d}  {r.outcome or '?':10} {r.why}  {r.note}"
            )
        else:
            change = f"{r.from_status or '-'} -> {r.to_status or '-'}"
            typer.echo(f"{r.when}  v{r.version:04d}  {change:22} {r.decision} by {r.decided_by}  {r.key}  {r.reason}")
    if not found:
        say("There is no registry yet; the first ingest or sync makes it.")


@registry_app.command("set")
def set_status(
    key: Annotated[str, typer.Argument(help="The document's key: kb/doc_id/doc_version/models.")],
    status: Annotated[str, typer.Argument(help="active, legacy or superseded (its chunks leave the index).")],
    workspace: WorkspaceOption = None,
    by: ByOption = "expert",
    why: WhyOption = "",
    wait: WaitOption = False,
    timeout: TimeoutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Give a registered document another status, without a new document."""
    from ragbuild.knowledge.ingest import restate

    if status not in ("active", "legacy", "superseded"):
        raise UsageError(f"a status is active, legacy or superseded; got '{status}'")
    root = open_workspace(workspace)
    result = restate(
        root, key, status, config_of(root, None), by=by, why=why, wait=_seconds(wait, timeout), on_step=_step
    )  # fmt: skip
    _tell(result, as_json)


@registry_app.command()
def queue(
    workspace: WorkspaceOption = None,
    csv: Annotated[Path | None, typer.Option(help="Write a decisions.csv for the expert to fill in.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Documents that wait for an expert, with what the machine suggests and why."""
    from ragbuild.knowledge.triage import write_open_decisions

    root = open_workspace(workspace)
    found = _registry(root)
    rows = found.queued() if found else []
    if found:
        found.close()
    if csv is not None:
        write_open_decisions(csv, rows)
        say(f"{csv}: fill in the column 'decision' (replace, parallel, legacy, correction, unchanged)")
    if as_json:
        emit({"queue": rows})
        return
    for r in rows:
        typer.echo(f"{r.since}  {r.suggestion:10} {r.key:44} {r.doc_source}  {r.reason}")
        for name, said in r.signals.items():
            typer.echo(f"      {name}: {said}")


@registry_app.command()
def check(
    workspace: WorkspaceOption = None,
    deep: Annotated[bool, typer.Option("--deep", help="Also read every file and compare its hash.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Compare the registry with the chunks' own copies of its fields. Exit code 3 when they differ."""
    from ragbuild.knowledge.snapshot import check as compare

    rows = compare(open_workspace(workspace), deep)
    if as_json:
        emit({"drift": rows})
    for r in rows if not as_json else []:
        typer.echo(f"{r['key']:44} {r['field']:14} registry: {r['registry']}  chunks: {r['chunks']}")
    if rows:
        raise GateFailed(
            f"{len(rows)} differences; 'ragbuild rebuild' makes the chunks anew from the registry's documents"
        )
    if not as_json:
        typer.echo("registry and chunks agree" + (", and every file has its hash" if deep else ""))


# --- versions ---------------------------------------------------------------------------------------------------------


def snapshots(workspace: WorkspaceOption = None, as_json: JsonOption = False) -> None:
    """The published versions: when and why made, documents, chunks, metrics, size. Each can be gone back to."""
    from ragbuild.knowledge.snapshot import snapshots as listed

    rows = listed(open_workspace(workspace))
    if as_json:
        emit({"snapshots": rows})
        return
    for r in rows:
        metrics = f"recall@5 {r['metrics']['recall@5']:.3f}" if "recall@5" in r["metrics"] else "not measured"
        size = f"{r['size'] / 1e6:.1f} MB ({r['own'] / 1e6:.1f} own)"
        mark, held = "*" if r["current"] else " ", f"{r['documents']:4} documents {r['children']:6} chunks"
        typer.echo(
            f"{mark} {r['version']}  {r['when'] or '-':25} {r['command']:9} {held}  {size:22} {metrics}  {r['why']}"
        )


def rollback(
    version: Annotated[str, typer.Argument(help="A version that 'ragbuild snapshots' lists, such as v0003.")],
    workspace: WorkspaceOption = None,
    why: WhyOption = "",
    wait: WaitOption = False,
    timeout: TimeoutOption = None,
    param: ParamOption = None,
    as_json: JsonOption = False,
) -> None:
    """Go back to a snapshot: registry and indexes together, as a new version, so that nothing is lost by it."""
    from ragbuild.knowledge.snapshot import rollback as go_back

    root = open_workspace(workspace)
    former = version if version.startswith("v") else f"v{int(version):04d}" if version.isdigit() else version
    name, notes = go_back(
        root, former, config_of(root, param), why=why, wait=_seconds(wait, timeout), on_step=_step
    )  # fmt: skip
    for note in notes:
        say(f"note: {note}")
    emit({"version": name, "content_of": former, "notes": notes}) if as_json else typer.echo(
        f"{name} is published, with the content of {former}."
    )


def rebuild(
    workspace: WorkspaceOption = None,
    why: WhyOption = "",
    regress: RegressOption = True,
    wait: WaitOption = False,
    timeout: TimeoutOption = None,
    param: ParamOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make the whole index anew from the texts that it keeps; the old version answers until the new one is done.

    -p changes what the index is built with, such as embedder.name or chunk.child_tokens.
    """
    from ragbuild.course.step import input_paths
    from ragbuild.knowledge.ingest import raise_if_fell
    from ragbuild.knowledge.rebuild import rebuild as make_anew

    root = open_workspace(workspace)
    config = config_of(root, param)
    inputs = input_paths(config)
    result = make_anew(
        root, config, why=why, regress=regress, wait=_seconds(wait, timeout), expert=inputs["expert_eval_set"],
        baseline=inputs["baseline"], on_step=_step,
    )  # fmt: skip
    _tell(result, as_json)
    raise_if_fell(result)

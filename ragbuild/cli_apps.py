"""The three smaller systems and the service: ``evidence``, ``recall``, ``extract``, ``serve``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from ragbuild.cli_shared import (
    ConfigOption,
    JsonOption,
    ParamOption,
    ProfileOption,
    WorkspaceOption,
    config_of,
    emit,
    open_workspace,
    say,
)  # fmt: skip


def register(app: typer.Typer) -> None:
    """Add these commands to the main one. `recall` reads its own arguments, so that a wrong option is JSON too."""
    app.command()(evidence)
    app.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True}, add_help_option=False)(
        recall
    )
    app.command()(extract)
    app.command()(serve)


def evidence(
    documents: Annotated[list[Path], typer.Argument(help="The company's documents, or folders of them.")],
    outline: Annotated[Path, typer.Option(help="The report's outline (YAML): sections, keywords, must_terms.")],
    out: Annotated[Path, typer.Option(help="Where report.md, report.html and evidence.json go.")],
    company: Annotated[str, typer.Option("--company", help="company_id (default: the outline's).")] = "",
    section: Annotated[list[str] | None, typer.Option("--section", help="Only this section of the outline.")] = None,
    config: ConfigOption = None,
    profile: ProfileOption = None,
    param: ParamOption = None,
    as_json: JsonOption = False,
) -> None:
    """Gather scored evidence for each section of a report, word for word, with figures and sources."""
    from ragbuild.apps.evidence_report import build_report
    from ragbuild.core.config import load_config, parse_assignments

    settings = load_config(profile, config, parse_assignments(param or []))
    report = build_report(documents, outline, company, out, settings, only=section or [])
    for refused in report.refused:
        say(f"refused {refused['doc_source']}: {refused['reason']}")
    summary = report.summary()
    if as_json:
        emit(summary)
        return
    for row in summary["sections"]:
        held = f"evidence {len(row['evidence'])}, figures {len(row['images'])}"
        typer.echo(f"{row['title']} [{row['section_id'] or 'no section'}]: {held}")
        if not row["evidence"]:
            typer.echo(f"  {row['message']}")
    if (left := summary["images_left_out"]) and not section:
        say(f"{len(left)} figure(s) stand outside of the outline's sections")
    typer.echo(str(out / "report.html"))


def recall(context: typer.Context) -> None:
    """The notes of a folder that fit a query best, read and ranked in one call; JSON only (--help: options)."""
    from ragbuild.apps.recall import main

    raise typer.Exit(main(context.args))


def extract(
    query: Annotated[str, typer.Argument(help="The question, in Chinese or English; - reads it from stdin.")],
    top_k: Annotated[int, typer.Option(help="How many chunks are looked at (1 to 10).")] = 3,
    minimum_confidence: Annotated[
        float | None, typer.Option(help="Abstain below this (0 to 1; default from the tuning questions).")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Folder with chunks.jsonl, 10-k/ or statements/ (default data/findoc).")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """The best chunk of financial disclosures, word for word, or none; the status is part of the output."""
    from ragbuild.apps.extractive import Lab, checked
    from ragbuild.core.store import repository

    asked = {"query": sys.stdin.read() if query == "-" else query, "topK": top_k}
    ask = checked(asked if minimum_confidence is None else {**asked, "minimumConfidence": minimum_confidence})
    outcome = Lab.load(data or repository() / "data" / "findoc").ask(ask)
    if as_json:
        return emit(outcome)
    typer.echo(outcome.answer if outcome.answer is not None else f"({outcome.status})")
    if outcome.citation:
        where = outcome.citation
        typer.echo(f"— {where.title}, {where.section}, page {where.page} ({where.source})")
    say(f"{outcome.status}: {outcome.gate.explanation}")
    for reason in outcome.injections:
        say(f"the query {reason}")
    for e in outcome.evidencePack:
        say(f"{e.rank}. {e.score:.3f}  {e.chunkId}: {' '.join(e.text.split())[:90]}")


def serve(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes any free one.", min=0, max=65535)] = 8000,
    workspace: WorkspaceOption = None,
    data: Annotated[
        Path | None, typer.Option(help="Folder with chunks.jsonl, 10-k/ or statements/ (default data/findoc).")
    ] = None,
    allow_remote: Annotated[
        bool, typer.Option("--allow-remote", help="Let other machines in; nobody is asked who.")
    ] = False,
    param: ParamOption = None,
) -> None:
    """Serve extractive QA with its page, and ask and retrieve on a workspace (outputs/latest where there is one)."""
    from ragbuild.apps.extractive import Lab
    from ragbuild.apps.service import Latest, is_loopback
    from ragbuild.apps.service import serve as run
    from ragbuild.core.config import parse_assignments
    from ragbuild.core.store import repository

    lab = Lab.load(data or repository() / "data" / "findoc")
    root = workspace or repository() / "outputs" / "latest"  # not resolved: a new build moves latest, and is taken then
    latest = None
    if workspace or root.exists():
        open_workspace(root)
        config_of(root, param)  # a wrong -p or a damaged config.yaml is refused now
        latest = Latest(root, parse_assignments(param or []))
    if allow_remote and not is_loopback(host):
        say(f"warning: other machines can reach {host}; put a proxy that asks who they are in front")

    def ready(address: str) -> None:
        typer.echo(address)
        say(f"page: {address}/ · workspace: {root if latest else 'none (--workspace DIR names one)'} · Ctrl-C ends it")

    run(host, port, lab=lab, workspace=latest, allow_remote=allow_remote, on_ready=ready)

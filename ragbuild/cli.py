"""The command line. Exit codes: 0 done, 1 failed, 2 wrong usage, 3 a gate failed, 4 input refused, 5 a model, service
or package is missing, 6 the workspace is locked.

Heavy modules are imported inside the commands, so that ``ragbuild --help`` is there at once.
"""

from __future__ import annotations

import errno
import json
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ragbuild import __version__, cli_apps, cli_evaluate, cli_knowledge
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
from ragbuild.core.errors import RagbuildError, UsageError

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)

QueryArgument = Annotated[str, typer.Argument(help="The question, in Chinese or English; - reads it from stdin.")]
FilterOptions = Annotated[
    list[str] | None, typer.Option("--filter", help="field=value, e.g. product_model=LG-500; repeatable.")
]


def _version(show: bool) -> None:
    if show:
        typer.echo(f"ragbuild {__version__}")
        raise typer.Exit


@app.callback()
def _main(version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True)] = False) -> None:
    """Build and run a domain-adaptive RAG system, in Chinese and English."""


def _filter(pairs: list[str] | None, old: bool) -> Any:
    from ragbuild.index.filters import FIELDS, Filter

    where = Filter(status=("active", "legacy") if old else ("active",))
    for pair in pairs or []:
        field, sign, value = pair.partition("=")
        if not sign or field not in FIELDS or not value:
            raise UsageError(f"--filter takes field=value with a field of {', '.join(FIELDS)}; got '{pair}'")
        where = where.with_(**{field: tuple(value.split(","))})
    return where


@app.command()
def build(
    corpus: Annotated[Path | None, typer.Option(help="Folder of documents (default data/corpus).")] = None,
    profile: ProfileOption = None,
    config: ConfigOption = None,
    template: Annotated[
        Path | None, typer.Option(help="A former project's records (its run's sediment/): settings, and prompt.md.")
    ] = None,
    param: ParamOption = None,
    out: Annotated[Path | None, typer.Option(help="Build in this folder; outputs/latest is left alone.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Only these notebooks, by number or name.")] = None,
    start: Annotated[str, typer.Option("--from", help="This notebook and those after it.")] = "",
    skip: Annotated[list[str] | None, typer.Option(help="Not these notebooks.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Reuse nothing of earlier runs.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Run the course headless: from raw documents to cited answers, reusing every step that nothing has changed."""
    from ragbuild.core.config import load_config, parse_assignments
    from ragbuild.course.report import write_report
    from ragbuild.course.runner import build as run_build
    from ragbuild.course.runner import relative_to_repository, summary

    overrides = parse_assignments(param or [])
    if corpus is not None:
        overrides["corpus.dir"] = relative_to_repository(corpus)
    if template is not None:
        from ragbuild.knowledge.sediment import check_template

        check_template(template)
    resolved = load_config(profile, config, overrides, template)
    try:
        with _Progress() as progress:
            result = run_build(
                resolved, out=out, only=only or (), start=start, skip=skip or (), fresh=fresh, on_step=progress.step
            )
    except KeyboardInterrupt as stop:
        say("ragbuild: interrupted. Finished steps are kept; the same command goes on from there.")
        raise typer.Exit(128 + (stop.args[0] if stop.args else signal.SIGINT)) from None
    report = write_report(result.run)
    if as_json:
        emit(summary(result))
    else:
        _build_table(result, report)
    if result.error:
        raise result.error


class _Progress:
    """A bar on a terminal, plain lines elsewhere; both on stderr."""

    def __enter__(self) -> _Progress:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        console = Console(stderr=True)
        self._bar = None
        if console.is_terminal:
            columns = (
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
            )
            self._bar = Progress(*columns, console=console, transient=True)
            self._bar.start()
            self._task = self._bar.add_task("build", total=None)
        return self

    def step(self, done: int, total: int, what: Any) -> None:
        name = what if isinstance(what, str) else what.name
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total, description=name)
        elif not isinstance(what, str):
            say(
                f"[{done}/{total}] {what.name}: {what.status}"
                + (f" in {what.seconds:.1f} s" if what.status == "done" else "")
            )

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def _build_table(result: Any, report: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("step", "status", "seconds", "what it made", box=None, header_style="bold", pad_edge=False)
    colours = {"done": "green", "reused": "cyan", "failed": "red", "not run": "yellow"}
    for step in result.steps:
        table.add_row(
            step.name, f"[{colours[step.status]}]{step.status}[/]", f"{step.seconds:.1f}", _plain_markup(step.made)
        )
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(table)
    reused = sum(s.status == "reused" for s in result.steps)
    if reused == len(result.steps):
        console.print(f"Nothing changed: all {reused} steps were reused.")
    elif reused:
        console.print(f"{reused} of {len(result.steps)} steps were reused.")
    console.print(f"run:    {result.run}" + ("  (outputs/latest)" if result.is_latest else ""), soft_wrap=True)
    console.print(f"report: {report}", soft_wrap=True)
    if not result.complete and not result.error:
        console.print("Not complete: some notebooks were not run in this folder; outputs/latest was left alone.")


def _plain_markup(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def _question(query: str) -> str:
    """The question as given, or from stdin: an argument has a limit of its own."""
    return sys.stdin.read().rstrip("\n") if query == "-" else query


@app.command()
def ask(
    query: QueryArgument,
    workspace: WorkspaceOption = None,
    old: Annotated[bool, typer.Option("--old", help="Let older (legacy) versions in.")] = False,
    filters: FilterOptions = None,
    param: ParamOption = None,
    as_json: JsonOption = False,
) -> None:
    """Answer a question with citations, or say that the documents do not answer it."""
    from ragbuild.online.pipeline import Pipeline

    root = open_workspace(workspace)
    answer = Pipeline.open(root, config_of(root, param)).ask(_question(query), _filter(filters, old))
    for warning in answer.warnings:
        say(f"note: {warning}")
    if as_json:
        emit(answer.model_dump(mode="json", exclude={"parents"}))
        return
    typer.echo(answer.text)
    for c in {(c.number, c.page): c for c in answer.citations}.values():
        typer.echo(
            f"  [{c.number}] {c.title} ({c.doc_version}, {c.status}) · {c.place} · page {c.page} · {c.doc_source}"
        )


@app.command()
def retrieve(
    query: QueryArgument,
    workspace: WorkspaceOption = None,
    top: Annotated[int, typer.Option(help="How many to show.", min=1)] = 10,
    old: Annotated[bool, typer.Option("--old", help="Let older (legacy) versions in.")] = False,
    filters: FilterOptions = None,
    param: ParamOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what retrieval finds: each child with its rank per route, fused and after reranking."""
    from ragbuild.online.pipeline import Pipeline, trace

    root = open_workspace(workspace)
    pipeline = Pipeline.open(root, config_of(root, param))
    question = _question(query)
    found = pipeline.retrieve(question, _filter(filters, old))
    for warning in found.warnings:
        say(f"note: {warning}")
    if as_json:
        hits = [
            {**c.hit.model_dump(), "rerank_score": c.score, "chunk": c.chunk.model_dump(mode="json")}
            for c in found.ranked[:top]
        ]
        emit({"query": question, "hits": hits, "trace": trace(found, pipeline)})
        return
    for r in found.rewritten.rewrites:
        say(f"rewrite ({r.kind}): {r.before} -> {r.after}  [{r.reason}]")
    for d in found.routing.decisions:
        say(f"route: {d.layer} = {', '.join(d.values)}  [{d.reason}]")
    for rank, c in enumerate(found.ranked[:top], 1):
        routes = " ".join(f"{name} {hit.rank}" for name, hit in c.hit.routes.items())
        where = f"{c.chunk.breadcrumb}  p{c.chunk.page}  {c.chunk.doc_source}"
        typer.echo(f"{rank:3}  {c.score:7.4f}  fused {c.hit.rank:2}  {routes:22}  {where}")


@app.command()
def inspect(
    what: Annotated[
        str, typer.Argument(help="A chunk id, a document's id or file name, a term, or 'index'.")
    ] = "index",
    workspace: WorkspaceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Look inside the index: the version in use, a document, a chunk, or a term of the dictionary."""
    from ragbuild.index.versions import IndexVersion

    version = IndexVersion(open_workspace(workspace) / "indexes")
    emit(version.inspect(what)) if as_json else _print_facts(version.inspect(what))


def _print_facts(data: dict[str, Any]) -> None:
    for key, value in data.items():
        shown = json.dumps(value, ensure_ascii=False) if isinstance(value, (dict, list, tuple)) else value
        typer.echo(f"{key}: {shown}")


@app.command()
def prompt(
    name: Annotated[str, typer.Argument(help="A packaged prompt's name or a Markdown file.")] = "initial_prompt",
    history: Annotated[bool, typer.Option("--history", help="Versions: what changed and why.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show a prompt after checking its six elements, or its history."""
    from ragbuild.offline.prompts import history as prompt_history
    from ragbuild.offline.prompts import load_prompt

    if history:
        versions = prompt_history()
        emit({"versions": versions}) if as_json else [
            typer.echo(f"{v.version}  {v.date}  {v.what}  ({v.why})") for v in versions
        ]
        return
    template = load_prompt(name)
    emit(template) if as_json else typer.echo(template.text)


@app.command()
def models(as_json: JsonOption = False) -> None:
    """The models that each profile uses, and which of them are on this machine."""
    from ragbuild.doctor import model_status

    rows = model_status()
    if as_json:
        emit({"models": rows})
        return
    for row in rows:
        here = "here" if row["here"] else "not here"
        typer.echo(f"{row['profile']:10} {row['role']:10} {row['model']:34} {here:8}  {row['how']}")


@app.command()
def doctor(as_json: JsonOption = False) -> None:
    """Check this machine (Python, Java, fonts, models, endpoints) and name the command that gets what is missing."""
    from ragbuild.doctor import check

    checks = check()
    if as_json:
        emit({"checks": checks})
    else:
        for c in checks:
            mark = "ok     " if c["ok"] else "missing" if c["needed"] else "absent "
            typer.echo(f"{mark}  {c['name']:18} {c['found']}" + ("" if c["ok"] else f"\n         -> {c['fix']}"))
    if any(c["needed"] and not c["ok"] for c in checks):
        raise typer.Exit(5)


@app.command()
def plan(
    domain: Annotated[str | None, typer.Option(help="What the documents are about.")] = None,
    document_types: Annotated[str | None, typer.Option(help="Kinds of documents, comma-separated.")] = None,
    knowledge_bases: Annotated[int | None, typer.Option(help="How many knowledge bases.")] = None,
    generator: Annotated[str | None, typer.Option(help="extractive or openai.")] = None,
    eval_set: Annotated[bool | None, typer.Option("--eval-set/--no-eval-set", help="Is there an eval set?")] = None,
    image_queries: Annotated[
        bool | None, typer.Option("--image-queries/--no-image-queries", help="Do users search by picture?")
    ] = None,
    profile: ProfileOption = None,
    config: ConfigOption = None,
    out: Annotated[
        Path, typer.Option(help="Where the confirmed plan is written, to be given to build --config.")
    ] = Path("ragbuild.yaml"),
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Confirm without being asked.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Print the plan of offline, online and evaluation steps before anything is built, and ask for confirmation."""
    from ragbuild.core.config import load_config
    from ragbuild.course.plan import ask_requirements, plan_rows, write_plan

    types = [t.strip() for t in document_types.split(",")] if document_types else None
    given = {
        "plan.domain": domain, "plan.document_types": types,
        "plan.knowledge_bases": knowledge_bases, "plan.eval_set": eval_set, "plan.image_queries": image_queries,
        "generate.generator": generator,
    }  # fmt: skip
    overrides = {k: v for k, v in given.items() if v is not None}
    interactive = sys.stdin.isatty() and not yes and not as_json
    if interactive:
        overrides = ask_requirements(overrides, load_config(profile, config, overrides))
    resolved = load_config(profile, config, overrides)
    rows = plan_rows(resolved)
    if as_json:
        emit({"requirements": resolved.plan, "steps": rows})
    else:
        for row in rows:
            on = "on" if row["on"] else "off"
            typer.echo(f"{on:3}  {row['phase']:10}  {row['step']:26}  {row['notebook']:4}  {row['why']}")
    if interactive and not typer.confirm("Build with these modules?"):
        say("Nothing was written.")
        raise typer.Exit(0)
    if interactive or yes:
        write_plan(out, overrides)
        say(
            f"Plan written to {out}. Build with: ragbuild build --config {out}"
            + (f" --profile {profile}" if profile else "")
        )


cli_evaluate.register(app)
cli_knowledge.register(app)
cli_apps.register(app)


def main() -> None:
    """Entry point: errors become one message on stderr and the documented exit code."""
    try:
        app(standalone_mode=True)
    except RagbuildError as error:
        say(f"ragbuild: {error}")
        sys.exit(error.exit_code)
    except OSError as error:
        what = f"{error.strerror or error}" + (f": {error.filename}" if error.filename else "")
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        todo = "Free some space" if full else "Change the permissions or choose another folder"
        say(f"ragbuild: {what}. Files that were there before are whole. {todo}, and run the same command again.")
        sys.exit(1)


if __name__ == "__main__":
    main()

"""The command line's part that measures: ``eval``, ``sweep``, ``tune``, ``bench``, ``corpus``."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from ragbuild.cli_shared import (
    ConfigOption,
    JsonOption,
    ParamOption,
    ProfileOption,
    WorkspaceOption,
    config_of,
    counted,
    emit,
    open_workspace,
    say,
)  # fmt: skip
from ragbuild.core.errors import InputRefused, RagbuildError, StepFailed, UsageError

Option = typer.Option
SetOption = Annotated[
    list[str] | None, Option("--set", help="expert, generated or a file; default: both where there are both.")
]
HalfOption = Annotated[str, Option(help="all, tuning or test: by document; thresholds are set on tuning.")]
LabelOption = Annotated[str, Option(help="A name for this run in the ledger.")]
QuietOption = Annotated[bool, Option("--no-ledger", help="Do not add this run to the ledger.")]

evaluate = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Measure, judge, compare.")


def register(app: typer.Typer) -> None:
    """Add these commands to the main one."""
    app.add_typer(evaluate, name="eval")
    for command in (sweep, tune, bench, corpus):
        app.command()(command)


# --- shared -----------------------------------------------------------------------------------------------------------


def _opened(workspace: Path | None, param: list[str] | None) -> tuple[Path, Any, Any]:
    """(folder, configuration, pipeline) of a workspace."""
    from ragbuild.online.pipeline import Pipeline

    root = open_workspace(workspace)
    config = config_of(root, param)
    return root, config, Pipeline.open(root, config)


def _sets(root: Path, config: Any, pipeline: Any, wanted: list[str] | None, half: str) -> list[Any]:
    from dataclasses import replace

    from ragbuild.course.step import input_paths
    from ragbuild.evaluate.runs import SETS, load_sets

    if half not in ("all", "tuning", "test"):
        raise UsageError(f"--half takes all, tuning or test; got '{half}'")
    sets = load_sets(pipeline.version, root, input_paths(config)["expert_eval_set"], wanted or SETS)
    for s in sets:
        if s.lost:
            say(f"note: {s.name}: {len(s.lost)} case(s) have their place in no chunk and are left out")
    if half != "all":
        sets = [replace(s, cases=[c for c in s.cases if c.half == half], hash=f"{s.hash}:{half}") for s in sets]
    if not any(s.cases for s in sets):
        which = "" if half == "all" else f" in the {half} half"
        raise InputRefused(f"no case{which} of the {' or '.join(s.name for s in sets)} set is about this index")
    return sets


@contextmanager
def _recorded(root: Path, entry: Any, no_ledger: bool) -> Iterator[None]:
    """Add a run to the ledger once its figures are shown: where that fails they are not lost."""
    from ragbuild.course.runner import ledger_path
    from ragbuild.evaluate import ledger

    try:
        yield
    finally:
        if not no_ledger:
            ledger.append(ledger_path(root), entry)
            say(f"run {entry.id} added to {ledger_path(root)}")


def _table(title: str, rows: list[dict[str, Any]], columns: list[str] | None = None) -> None:
    """Rows as a table on stdout; nothing where there is no row."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from ragbuild.core.show import clip

    if not rows:
        return
    columns = columns or list(rows[0])
    table = Table(box=None, pad_edge=False, header_style="bold")
    for n, column in enumerate(columns):  # in a narrow terminal no digit is cut off
        table.add_column(column, overflow="fold", no_wrap=n == 0)
    for row in rows:
        table.add_row(*(escape(clip(row.get(c, ""), 60)) for c in columns))
    console = Console(width=None if sys.stdout.isatty() else 180)
    console.print(f"\n[bold]{escape(title)}[/]", highlight=False)
    console.print(table)


# --- eval -------------------------------------------------------------------------------------------------------------


@evaluate.command()
def offline(
    workspace: WorkspaceOption = None, param: ParamOption = None, label: LabelOption = "",
    no_ledger: QuietOption = False, as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Layer 1, raw retrieval: indexes, chunks, dictionary, recall. A gate: exit code 3 below the thresholds."""
    from ragbuild.course.step import input_paths
    from ragbuild.evaluate.gates import raise_if_failed
    from ragbuild.evaluate.runs import entry, measure_offline

    started = time.perf_counter()
    root, config, pipeline = _opened(workspace, param)
    inputs = input_paths(config)
    report, sets = measure_offline(pipeline, root, config, inputs["query_log"], inputs["expert_eval_set"])
    run = entry("offline", report.per_query, sets, pipeline, config, label=label, workspace=root.name, started=started)
    with _recorded(root, run, no_ledger):
        if as_json:
            emit({"run": run.id, **report.as_json()})
        else:
            for title, rows in (
                ("Index completeness", report.checks), ("Raw recall", report.recall), ("Chunking", report.chunking),
                ("Dictionary", report.dictionary),
            ):  # fmt: skip
                _table(title, rows)
            for row in report.diagnosis:
                typer.echo(f"\n{row['finding']}\n  {row['evidence']}\n  next: {row['try']}")
            typer.echo("")
            for gate in report.gates:
                state = {True: "passed", False: "FAILED", None: "no say"}[gate.passed]
                typer.echo(f"{state}  {gate.name}: {gate.said}")
    raise_if_failed(report.gates)


@evaluate.command()
def qdoc(
    workspace: WorkspaceOption = None, sets: SetOption = None, half: HalfOption = "all", param: ParamOption = None,
    label: LabelOption = "", no_ledger: QuietOption = False, as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Layer 2, Q-DOC: retrieval stage by stage, with rewriting and routing on and off."""
    from ragbuild.evaluate.runs import entry, measure_retrieval, retrieval_values

    started = time.perf_counter()
    root, config, pipeline = _opened(workspace, param)
    chosen = _sets(root, config, pipeline, sets, half)
    with counted("Q-DOC") as step:
        reports = measure_retrieval(pipeline, chosen, config.evaluate.cutoffs, step)
    values = retrieval_values(reports)
    run = entry("qdoc", values, chosen, pipeline, config, label=label, workspace=root.name, started=started)
    deepest = max(config.evaluate.cutoffs)
    shown = ["stage", "n", "recall@1", "recall@10", f"recall@{deepest}", "precision@10", "ndcg@10", "mrr", "hit@10",
             "authenticity@10"]  # fmt: skip
    with _recorded(root, run, no_ledger):
        if as_json:
            emit({"run": run.id, "reranker": pipeline.reranker.name, "stand_in": pipeline.reranker.stand_in,
                   "sets": {name: {"stages": r.rows(), "routing": r.routing, "errors": r.errors, "advice": r.advice(),
                                   **{what: r.by(what, "reranked", [f"recall@{deepest}", "ndcg@10"]) for what in
                                      ("query_type", "language", "kind", "half", "document")}}
                            for name, r in reports.items()}})  # fmt: skip
            return
        for name, report in reports.items():
            columns = [c for c in shown if c in report.rows()[0]]
            _table(f"{name}: {len(report.answerable)} answerable questions", report.rows(), columns)
            for what in ("query_type", "language", "kind"):
                _table(f"{name}, reranked, by {what}", report.by(what, "reranked", [f"recall@{deepest}", "ndcg@10"]))
            acted, cases, right = (report.routing[k] for k in ("acted", "cases", "right"))
            typer.echo(f"routing acted on {acted} of {cases}, kept the right document in {right}")
            for remark in [*report.advice(), *(f"{e['id']} failed: {e['error']}" for e in report.errors)]:
                typer.echo(f"- {remark}")
        if pipeline.reranker.stand_in:
            typer.echo(f"The reranker '{pipeline.reranker.name}' is a stand-in for a cross-encoder.")


@evaluate.command()
def qdoca(
    workspace: WorkspaceOption = None, sets: SetOption = None, half: HalfOption = "all", param: ParamOption = None,
    label: LabelOption = "", no_ledger: QuietOption = False, as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Layer 3, Q-DOC-A: answers in six dimensions, refusals, wrong versions; each failed case classified."""
    from ragbuild.evaluate.answers import refusals, summary
    from ragbuild.evaluate.badcases import bad_cases, counts
    from ragbuild.evaluate.judge import make_judge
    from ragbuild.evaluate.runs import answer_values, entry, measure_answers, measure_retrieval

    started = time.perf_counter()
    root, config, pipeline = _opened(workspace, param)
    chosen = _sets(root, config, pipeline, sets, half)
    judge = make_judge(config, root / "reports" / "judged.jsonl")
    with counted("Q-DOC-A") as step:
        traces = measure_answers(pipeline, chosen, judge, step)
    reports = measure_retrieval(pipeline, chosen, config.evaluate.cutoffs)
    run = entry("qdoca", answer_values(traces), chosen, pipeline, config, judge=judge.name, label=label,
                workspace=root.name, started=started)  # fmt: skip
    out = {}
    for name, some in traces.items():
        bad = bad_cases(reports[name], some, pipeline.version, config.rerank.top_m)
        out[name] = {
            "dimensions": summary(some, ("half", "language", "kind"), config.evaluate.bootstrap, config.seed),
            "refusals": refusals(some),
            "wrong_version": [t.case.id for t in some if t.wrong_version],
            "errors": [{"id": t.case.id, "error": t.error} for t in some if t.error],
            "bad_cases": [b.row() for b in bad], "counts": counts(bad),
        }  # fmt: skip
    with _recorded(root, run, no_ledger):
        if as_json:
            emit({"run": run.id, "judge": judge.name, "generator": pipeline.generator.name,
                   "stand_ins": _stand_ins(pipeline, judge), "sets": out})  # fmt: skip
            return
        for name, found in out.items():
            for title, what in (("dimensions", "dimensions"), ("refusals", "refusals"), ("bad cases", "counts")):
                _table(f"{name}: {title}", found[what])
            wrong = found["wrong_version"]
            typer.echo(f"{name}: wrong-version answers: {len(wrong)} {' '.join(wrong)}")
        for what in _stand_ins(pipeline, judge):
            typer.echo(f"{what} is a stand-in.")


def _stand_ins(pipeline: Any, judge: Any) -> list[str]:
    parts = {"reranker": pipeline.reranker, "generator": pipeline.generator, "judge": judge}
    return [f"{what} '{part.name}'" for what, part in parts.items() if part.stand_in]


@evaluate.command()
def judge(
    human: Annotated[Path | None, Option(help="A file of judged answers; default: the expert eval set.")] = None,
    workspace: WorkspaceOption = None, profile: ProfileOption = None, param: ParamOption = None,
    as_json: JsonOption = False,
) -> None:  # fmt: skip
    """How far a judge agrees with people: kappa, its interval, base rates, confusion; query by query with --json."""
    from ragbuild.core.config import load_config, parse_assignments
    from ragbuild.core.store import cache_dir
    from ragbuild.evaluate.human import judge_file
    from ragbuild.evaluate.judge import make_judge

    if human is None:
        _judge_expert(workspace, param, as_json)
        return
    config = load_config(profile, None, parse_assignments(param or []))
    with counted("judging") as step:
        report = judge_file(human, make_judge(config, cache_dir("judged") / f"{human.stem}.jsonl"), progress=step)
    for line in report.refused:
        typer.echo(f"note: {line}", err=True)
    if as_json:
        told = ("confusion", "human_base", "judge_base", "rows")
        rows = [{**d.row(), **{k: getattr(d.alignment, k) for k in told}} for d in report.dimensions]
        held = {"judge": report.judge, "stand_in": report.stand_in, "refused": report.refused, "alone": report.alone}
        emit({"file": str(human), **held, "dimensions": rows})
        return
    rows = [d.row() for d in report.dimensions]
    shown = [k for k in (rows[0] if rows else ()) if k not in ("verdict", "beside")]
    _table(f"{human.name}: judge '{report.judge}'{' (a stand-in)' if report.stand_in else ''}", rows, shown)
    for row in rows:
        typer.echo(f"- {row['human']}: " + " ".join(row[k] for k in ("verdict", "beside") if row.get(k)))
    for name in report.alone:
        typer.echo(f"- {name}: none of our dimensions is about this")


def _judge_expert(workspace: Path | None, param: list[str] | None, as_json: bool) -> None:
    from ragbuild.course.step import input_paths
    from ragbuild.evaluate.align import align_expert
    from ragbuild.evaluate.completeness import grown
    from ragbuild.evaluate.judge import make_judge
    from ragbuild.evaluate.runs import chunk_map
    from ragbuild.offline.evalset import load_expert

    _, config, pipeline = _opened(workspace, param)
    path = input_paths(config)["expert_eval_set"]
    if path is None:
        raise UsageError("there is no expert_eval_set.json beside the corpus; name a file with --human")
    by = make_judge(config)
    chunks, lost = chunk_map(pipeline.version), [] if grown(pipeline.version) else None
    found = align_expert(load_expert(path), by, chunks, config.evaluate.bootstrap, config.seed, lost)
    if lost:
        say(f"note: expert: {len(lost)} case(s) have their place in no chunk and are left out")
    if as_json:
        emit({"judge": by.name, "stand_in": by.stand_in, **found})
        return
    for half, one in found.items():
        typer.echo(f"judge '{by.name}'{' (a stand-in)' if by.stand_in else ''}, {half} (n = {one.n}): {one.verdict}")
    rows = [{"people": i, **{str(j): n for j, n in enumerate(row)}} for i, row in enumerate(found["all"].confusion)]
    _table("Confusion (people in rows, the judge in columns)", rows)
    shown = ["id", "half", "human", "judge", "score", "query", "judge_reason"]  # all of it with --json
    _table("Disagreements, worst first", list(found["all"].disagreements)[:15], shown)


@evaluate.command()
def compare(
    before: Annotated[str, typer.Argument(help="A run's id, its label, or last, last-1 …")],
    after: Annotated[str, typer.Argument(help="The run to hold against it.")],
    metric: Annotated[str, Option(help="The headline, named before looking (default: the run's first).")] = "",
    workspace: WorkspaceOption = None, as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Two runs of the ledger: differences with intervals; no improvement unless exactly one component changed."""
    from ragbuild.evaluate import ledger

    entries = _entries(workspace)
    found = ledger.compare(ledger.find(entries, before), ledger.find(entries, after), headline=metric)
    emit(found) if as_json else typer.echo(str(found))


@evaluate.command("round")
def prompt_round(
    after: Annotated[str, typer.Argument(help="The Q-DOC-A run of the new prompt version.")],
    before: Annotated[str, Option(help="That of the version last kept; without one a series begins.")] = "",
    metric: Annotated[str, Option(help="What decides.")] = "expert/overall",
    workspace: WorkspaceOption = None, as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Record a round of loop 2: what the new prompt fixed and broke, whether it is kept, and when to stop."""
    from ragbuild.core.store import Workspace
    from ragbuild.evaluate import ledger, loops

    root, entries = open_workspace(workspace), _entries(workspace)
    old = ledger.find(entries, before, "qdoca") if before else None
    made = loops.record_round(Workspace(root), old, ledger.find(entries, after, "qdoca"), metric)
    stop = loops.should_stop(loops.prompt_rounds(Workspace(root)))
    if as_json:
        emit({**made.model_dump(), "stop": stop})
        return
    typer.echo(f"prompt {made.prompt_version}: {'kept' if made.kept else 'not kept'}; {made.reason}")
    for what in ("fixed", "broken"):
        if getattr(made, what):
            typer.echo(f"{what}: {', '.join(getattr(made, what))}")
    if stop:
        typer.echo(f"The last two rounds gained under {loops.LEAST_PP} points each: stop.")


@evaluate.command()
def runs(workspace: WorkspaceOption = None, as_json: JsonOption = False) -> None:
    """The runs in the ledger, oldest first."""
    rows = []
    for e in _entries(workspace):
        metric, figure = next(iter(e.metrics.items()), ("", None))
        rows.append({**e.model_dump(include={"id", "kind", "label", "workspace"}), "headline": metric,
                     "value": figure and figure.value})  # fmt: skip
    if as_json:
        emit({"runs": rows})
    elif rows:
        _table("Runs", rows)
    else:
        say("no run yet: 'ragbuild eval qdoc' makes one")


def _entries(workspace: Path | None) -> list[Any]:
    from ragbuild.core.store import repository
    from ragbuild.course.runner import ledger_path
    from ragbuild.evaluate import ledger

    path = ledger_path(open_workspace(workspace)) if workspace else repository() / "outputs" / "ledger.jsonl"
    entries, notes = ledger.read(path)
    for note in notes:
        typer.echo(f"note: {note}", err=True)
    return entries


@evaluate.command()
def baseline(
    out: Annotated[Path | None, Option(help="Where to write it (default: baseline.json beside the corpus).")] = None,
    run: Annotated[list[str] | None, Option(help="Runs of the ledger (default: the build's own).")] = None,
    workspace: WorkspaceOption = None, as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Accept what a run reached as the baseline that later builds are held to."""
    from ragbuild.core.store import read_json
    from ragbuild.course.step import input_paths
    from ragbuild.evaluate import ledger
    from ragbuild.evaluate.gates import write_baseline
    from ragbuild.evaluate.runs import GATED, own_margins

    root = open_workspace(workspace)
    config = config_of(root, None)
    if run:
        entries = [ledger.find(_entries(workspace), name) for name in run]
    else:
        entries = [ledger.Entry.model_validate(e) for e in read_json(root / "evaluation.json")["entries"]]
    gated = {e.kind: [m for m in GATED.get(e.kind, ()) if m in e.metrics] for e in entries}
    target = out or (input_paths(config)["corpus"] or root).parent / "baseline.json"
    made = write_baseline(target, entries, gated, config.gates.margin, own_margins(entries, config.gates.margin))
    if as_json:
        emit(made)
    else:
        for name, figure in made.metrics.items():
            typer.echo(f"{name:40} {figure.value:.4f}  n = {figure.n}")
        typer.echo(f"{target} written: a build fails when one of these falls by more than its margin ({made.margin:g})")


# --- sweep, tune, bench, corpus ---------------------------------------------------------------------------------------


def sweep(
    workspace: WorkspaceOption = None,
    on: Annotated[str, Option(help="own (the workspace), python-docs, or a folder of documents.")] = "own",
    out: Annotated[Path | None, Option(help="Write what is recommended as YAML for build --config.")] = None,
    param: ParamOption = None,
    as_json: JsonOption = False,
) -> None:
    """Recall and reranking time over Top-N, parents and tokens over Top-M; the plateau, and what to set."""
    from dataclasses import replace

    from ragbuild.course.step import input_paths
    from ragbuild.evaluate.sweep import ROUTES, write_choice
    from ragbuild.evaluate.tuning import open_corpus

    root, config, _ = _opened(workspace, param)
    opened = open_corpus(
        config.with_overrides({"tune.corpus": on}), root, input_paths(config)["expert_eval_set"], say
    )  # fmt: skip
    found = opened.sweep(say)
    first, second = found.recommend()
    facts, now, tuning = found.facts, found.setting(), found.of("tuning")
    curves = {r: found.recall_curve(facts["top_n"], replace(now, routes=(r,)), "tuning") for r in ROUTES}
    curves["fused"] = found.recall_curve(facts["top_n"], now, "tuning")
    by_n = [
        {"top_n": n, **{f"recall {r}": round(float(c[i]), 4) for r, c in curves.items()},
         "rerank_ms": round(1000 * facts["seconds"][i], 3)}
        for i, n in enumerate(facts["top_n"])
    ]  # fmt: skip
    chosen = replace(now, top_n=first.value, top_m=second.value)
    within = found.parent_recall(chosen, facts["top_m"])[:, tuning].mean(1)
    tokens = found.context_tokens(chosen, facts["top_m"])[:, tuning].mean(1)
    by_m = [
        {"top_m": m, "parent_recall": round(float(within[i]), 4), "context_tokens": round(float(tokens[i])),
         "answer_score": round(sum(found.answers[m]) / len(found.answers[m]), 4) if m in found.answers else None}
        for i, m in enumerate(facts["top_m"])
    ]  # fmt: skip
    about = {"corpus": on, "children": facts["children"], "questions": int(tuning.sum()), "half": "tuning"}
    stand_in = f"{facts['reranker']}{' (stand-in)' if facts['stand_in'] else ''}"
    remarks = [f"Top-N {first.value}: {first.reason}", f"Top-M {second.value}: {second.reason}"]
    if out:
        write_choice(out, chosen, [f"ragbuild sweep on {on}, {facts['children']:,} children", *remarks])
        say(f"{out} written: ragbuild build --config {out}")
    if as_json:
        recommended = {"retrieve.top_n": first.value, "rerank.top_m": second.value}
        emit({**about, "reranker": stand_in, "top_n": by_n, "top_m": by_m, "recommended": recommended, "why": remarks})
        return
    asked = f"{about['children']:,} children, {about['questions']} questions of the tuning half"
    _table(f"Top-N on {on} ({asked}; {stand_in})", by_n)
    _table("Top-M (answers: extractive generator and rubric judge, stand-ins)", by_m)
    for remark in remarks:
        typer.echo(f"- {remark}")


def tune(
    workspace: WorkspaceOption = None,
    on: Annotated[str, Option(help="own (the workspace), python-docs, or a folder of documents.")] = "own",
    port: Annotated[
        int, Option(help="Where the page listens, on this machine only (0: any free port).", min=0, max=65535)
    ] = 8866,
    no_browser: Annotated[bool, Option("--no-browser", help="Only print the address.")] = False,
) -> None:
    """Open the sliders of notebook 20 as a page: Top-N, Top-M, RRF k, routes, filters."""
    from ragbuild.course.page import tune as open_page

    open_page(open_workspace(workspace), port=port, open_browser=not no_browser, on=on)


def bench(
    beir: Annotated[list[Path], Option("--beir", help="A set in BEIR's layout, or a folder of them; repeatable.")],
    routes: Annotated[str, Option(help="Which to measure.")] = "lexical,dense,hybrid,rerank",
    spans: Annotated[bool, Option("--spans", help="Score chunkers by spans instead.")] = False,
    runs: Annotated[Path | None, Option(help="Write TREC run files and qrels here.")] = None,
    profile: ProfileOption = None, config: ConfigOption = None, param: ParamOption = None, as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Retrieval on public sets: nDCG, recall, MRR, speed and memory of every route, side by side."""
    from rich.console import Console

    from ragbuild.core.config import load_config, parse_assignments
    from ragbuild.evaluate.bench import bench as measure
    from ragbuild.evaluate.bench import margins, print_bench
    from ragbuild.evaluate.spans import score_chunkers

    resolved = load_config(profile, config, parse_assignments(param or []))
    wanted = [r.strip() for r in routes.split(",") if r.strip()]
    folders = [f for path in beir for f in _benchmarks(path, "spans.jsonl" if spans else "corpus.jsonl")]
    if runs and (spans or len({f.name for f in folders}) < len(folders)):
        raise UsageError("--runs takes sets of different names, and no --spans")
    if runs:
        runs.mkdir(parents=True, exist_ok=True)  # what can't be written is said before anything is measured
    results: list[dict[str, Any]] = []
    failed: dict[str, RagbuildError] = {}
    with counted("bench") as step:
        if spans:
            for folder in folders:
                results += score_chunkers(folder, resolved, progress=step)
        elif len(folders) == 1:
            results.append(measure(folders[0], resolved, wanted, step, runs))
        else:
            for number, folder in enumerate(folders):
                step(number, len(folders), folder.name)
                try:
                    results.append(_apart(measure, folder, resolved, wanted, None, runs))
                except RagbuildError as error:  # the other sets are measured all the same
                    failed[folder.name] = error
    if failed and not results:
        raise next(iter(failed.values()))
    for name, error in failed.items():
        say(f"not measured: {name}: {error}")
    if as_json:
        one = len(results) == 1 and len(folders) == 1
        emit(
            results[0]
            if one and not spans
            else {"results": results, **({} if spans else {"margins": margins(results)})}
        )
    elif spans:
        _table("Chunkers by spans", results, [k for k in results[0] if k != "intervals"] if results else None)
    elif results:
        Console(width=None if sys.stdout.isatty() else 160).print(print_bench(results))
        if (m := margins(results)) and len(results) > 1:
            typer.echo(f"pipeline minus its best single route, nDCG@10: mean {m['mean']:+.4f}, worst {m['worst']:+.4f}")


def _apart(work: Callable[..., Any], *arguments: Any) -> Any:
    """In a process of its own, so that memory is measured from the same start for every set."""
    from concurrent.futures import ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool
    from multiprocessing import get_context

    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        try:
            return pool.submit(work, *arguments).result()
        except BrokenProcessPool:
            raise StepFailed("its process was killed; is there enough memory?") from None


def _benchmarks(path: Path, file: str) -> list[Path]:
    """The set itself, or the sets in a folder: those that hold `file`."""
    if (path / file).is_file() or not path.is_dir():
        return [path]
    return sorted(p for p in path.iterdir() if (p / file).is_file()) or [path]


def corpus(
    name: Annotated[str, typer.Argument(help="python-docs: Markdown from the docstrings of installed libraries.")],
    out: Annotated[Path, Option(help="The folder to write to.")],
    min_children: Annotated[int, Option(help="At least so many child chunks.", min=1)] = 5000,
    as_json: JsonOption = False,
) -> None:
    """Make a larger real corpus without any download."""
    from ragbuild.offline.python_docs import write_python_docs

    if name != "python-docs":
        raise UsageError(f"corpus takes python-docs, got '{name}'")
    if out.exists() and any(out.iterdir()):
        raise UsageError(f"{out} is not empty; name a new folder")
    summary = write_python_docs(out, min_children)
    if as_json:
        emit(summary)
    else:
        typer.echo("\n".join(f"{key}: {value}" for key, value in summary.items()))
        typer.echo(f"Build with it: ragbuild build --corpus {out} --out outputs/python-docs")

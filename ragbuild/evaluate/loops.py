"""The loops of the method: one change to the pipeline, kept or reverted (loop 3), and the record of prompt versions
(loop 2). Both work with any generator, the extractive one included."""

from __future__ import annotations

from collections.abc import Sequence

from ragbuild.core.errors import UsageError
from ragbuild.core.records import Record
from ragbuild.core.store import Workspace, read_records, write_records
from ragbuild.evaluate.ledger import Comparison, Entry, compare, locked

ROUNDS = "reports/prompt_rounds.json"
LEAST_PP = 0.5  # a round that gains less has gained nothing (method A15)


class Loop3(Record):
    """Whether the one change stays, and why."""

    keep: bool
    reason: str
    comparison: Comparison


def loop3(before: Entry, after: Entry, metric: str, bootstrap: int = 2000, seed: int = 13) -> Loop3:
    """Keep a change only when `metric` shows an improvement; what can't be told from chance is reverted."""
    found = compare(before, after, bootstrap, seed, metric)
    keep = found.verdict == "improvement"
    why = f"{metric}: {found.verdict}" + (f" ({'; '.join(found.reasons)})" if found.reasons else "")
    return Loop3(keep=keep, reason=f"{'keep' if keep else 'revert'}: {why}", comparison=found)


class Regression(Record):
    """Case ids: wrong before and right now, right before and wrong now, and those not measured in both runs."""

    fixed: tuple[str, ...]
    broken: tuple[str, ...]
    unmeasured: tuple[str, ...]


def regression(before: Entry, after: Entry, metric: str, right: float = 0.8) -> Regression:
    """Case by case: a score from `right` on is level 2 of the human scale.

    Raises UsageError when a run does not hold the metric by case.
    """
    for entry in (before, after):
        if metric not in entry.per_query:
            raise UsageError(f"run {entry.id} has no '{metric}' by case; it has {', '.join(entry.per_query)}")
    old, new = before.per_query[metric], after.per_query[metric]
    both = {c: (old[c], new[c]) for c in sorted(old) if old[c] is not None and new.get(c) is not None}
    return Regression(
        fixed=tuple(c for c, (x, y) in both.items() if x < right <= y),
        broken=tuple(c for c, (x, y) in both.items() if y < right <= x),
        unmeasured=tuple(sorted((old.keys() | new.keys()) - both.keys())),
    )


class PromptRound(Record):
    """A prompt version's Q-DOC-A run. `gain_pp`: over the version it was to replace, in percentage points, over the
    cases measured in both; None begins a series."""

    prompt_version: str
    entry_id: str
    metric: str
    score: float | None
    gain_pp: float | None = None
    fixed: tuple[str, ...] = ()
    broken: tuple[str, ...] = ()
    kept: bool
    reason: str


def prompt_rounds(workspace: Workspace) -> list[PromptRound]:
    """The rounds that a workspace recorded, oldest first."""
    return read_records(workspace.path(ROUNDS), PromptRound) if workspace.exists(ROUNDS) else []


def record_round(
    workspace: Workspace, before: Entry | None, after: Entry, metric: str, max_broken: int = 0
) -> PromptRound:
    """Record a prompt's run; kept when it gains, breaks at most `max_broken` formerly right cases, and no case was
    measured in one of the two runs only.

    `before`: the run of the version last kept, None to begin a series. Raises UsageError when anything but the prompt
    differs between the two, or they are no Q-DOC-A runs.
    """
    version = str(after.components.get("prompt", {}).get("version", ""))
    if {e.kind for e in (before, after) if e} != {"qdoca"}:
        raise UsageError("loop 2 takes Q-DOC-A runs ('ragbuild eval qdoca')")
    fields = {"prompt_version": version, "entry_id": after.id, "metric": metric}
    if before is None:
        regression(after, after, metric)  # raises when it was not measured
        new = PromptRound(**fields, score=after.metrics[metric].value, kept=True, reason="the first of a series")
    else:
        moved = regression(before, after, metric)
        found = compare(before, after, 100, 0, metric)
        if set(found.changed) != {"prompt"} or found.reasons:
            raise UsageError(f"a round changes the prompt and nothing else; changed: {found.changed or 'nothing'}"
                             + "".join(f"; {reason}" for reason in found.reasons))  # fmt: skip
        row = next(r for r in found.metrics if r.headline)
        gain = round(100 * (row.difference or 0.0), 6)
        kept = gain > 0 and len(moved.broken) <= max_broken and not row.verdict.startswith("refused")
        reason = f"{gain:+.2f} pp at n = {row.n}, {len(moved.fixed)} fixed, {len(moved.broken)} broken, "
        reason += f"{len(moved.unmeasured)} not measured in both: {row.verdict}"
        new = PromptRound(
            **fields, score=row.after, gain_pp=gain, fixed=moved.fixed, broken=moved.broken, kept=kept, reason=reason
        )
    path = workspace.path(ROUNDS)
    with locked(path):
        write_records(path, [*prompt_rounds(workspace), new])
    return new


def should_stop(rounds: Sequence[PromptRound]) -> bool:
    """True when the last two rounds of a series each gained under 0.5 percentage points."""
    last = rounds[-2:]
    return len(last) == 2 and all(r.gain_pp is not None and r.gain_pp < LEAST_PP for r in last)

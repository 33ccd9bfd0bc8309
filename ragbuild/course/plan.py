"""The plan, before anything is built: which steps of the method are on for these requirements, and why."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from ragbuild.core.config import Config
from ragbuild.core.store import write_text

# phase, step, notebook, which condition turns it on ("" = always), why
_STEPS = (
    ("offline", "1 term dictionary", "01", "", "words of questions meet words of documents"),
    ("offline", "2 parse and chunk", "02", "", "parents for the generator, children for retrieval"),
    ("offline", "3 lexical and dense index", "03", "", "one lexical index, one dense index"),
    ("offline", "3.5 image index", "04", "images", "users search by picture"),
    ("offline", "4 prompt", "05", "", "six elements, versioned"),
    ("offline", "5 eval set", "06", "", "before anything is tuned"),
    ("offline", "6 offline evaluation", "07", "", "a gate: raw retrieval before all else"),
    ("online", "1 query rewriting", "10", "", "completion, sub-questions, fallback"),
    ("online", "2 routing", "11", "routing", "knowledge base, model, version"),
    ("online", "3 hybrid retrieval", "12", "", "both routes, RRF"),
    ("online", "4 reranking", "13", "", "Top-N to Top-M, mapped to parents"),
    ("online", "5 generation", "14", "", "an answer with citations"),
    ("online", "6 multimodal query", "15", "images", "users search by picture"),
    ("evaluation", "Top-N / Top-M tuning", "20", "", "a sweep to the plateau"),
    ("evaluation", "Q-DOC, Q-DOC-A, judge", "21", "", "every decision is backed by a report"),
    ("evaluation", "bad cases and loops", "22", "", "one change at a time"),
    ("evaluation", "embedding fine-tuning", "23", "never", "last resort: only after loop 3 has ruled out the rest"),
    ("operations", "sedimentation", "30", "", "what the next knowledge base takes over, free of this one's data"),
    ("operations", "registry and triage", "31", "", "documents arrive: replace, parallel or legacy; on a copy"),
    ("operations", "lock, snapshot, rollback", "32", "", "a failed update leaves nothing broken; on a copy"),
    ("beside it", "report evidence", "40", "", "evidence and figures for each section of a report, never invented"),
    ("beside it", "zero-index recall", "41", "", "notes ranked in one call: no index, no store, no model that writes"),
    ("beside it", "extractive QA with a gate", "42", "", "the best chunk word for word, or none"),
)


def plan_rows(config: Config) -> list[dict[str, Any]]:
    """Every step of the method with phase, notebook, whether it is on for these requirements, and why."""
    from ragbuild.core.store import repository

    present = {p.name[:2] for p in (repository() / "notebooks").glob("[0-9][0-9]_*.ipynb")}
    wanted = {"": True, "images": config.plan.image_queries, "routing": config.route.enabled, "never": False}
    rows = []
    for phase, step, notebook, condition, why in _STEPS:
        on = wanted[condition]
        if condition and not on:
            why = {"images": "off: nobody searches by picture", "routing": "off: route.enabled is false"}.get(
                condition, why
            )
        if on and notebook not in present:
            on, why = False, f"its notebook is not part of this version of the course yet ({why})"
        rows.append({"phase": phase, "step": step, "notebook": notebook, "on": on, "why": why})
    if not config.plan.eval_set:
        for row in rows:
            if row["notebook"] == "06":
                row["why"] += "; you have no eval set, so one is generated"
    return rows


def ask_requirements(given: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """Ask on a terminal for the requirements that the command line did not give."""
    import typer

    out = dict(given)
    questions: list[tuple[str, str, Any, Any]] = [
        ("plan.domain", "Domain (what are the documents about?)", config.plan.domain or "product manuals", str),
        ("plan.document_types", "Document types (comma-separated)", "manuals, FAQ", str),
        ("plan.knowledge_bases", "How many knowledge bases?", config.plan.knowledge_bases, int),
        ("generate.generator", "Generator: extractive, or openai (an endpoint)?", config.generate.generator, str),
        ("plan.eval_set", "Is there an eval set?", config.plan.eval_set, bool),
        ("plan.image_queries", "Will users search by picture?", config.plan.image_queries, bool),
    ]
    for key, text, default, kind in questions:
        if key in out:
            continue
        if kind is bool:
            out[key] = typer.confirm(text, default=default)
        else:
            out[key] = typer.prompt(text, default=default, type=kind)
        if key == "plan.document_types":
            out[key] = [t.strip() for t in out[key].split(",") if t.strip()]
    return out


def write_plan(path: Path, overrides: Mapping[str, Any]) -> None:
    """The confirmed requirements as a YAML file that ``ragbuild build --config`` takes."""
    nested: dict[str, Any] = {}
    for key, value in overrides.items():
        section, _, name = key.partition(".")
        nested.setdefault(section, {})[name] = value
    write_text(path, yaml.safe_dump(nested, allow_unicode=True, sort_keys=False))

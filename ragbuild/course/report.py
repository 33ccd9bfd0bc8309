"""``report.html``: one run at a glance, in one file that loads nothing from outside.

All text is escaped, a content security policy forbids scripts and remote loads, and plots are embedded.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from ragbuild.core.errors import RagbuildError
from ragbuild.core.show import clip
from ragbuild.core.store import read_json, write_text
from ragbuild.course.runner import manifest_of, notebooks
from ragbuild.index.versions import IndexVersion

ROWS = 40  # of a table that are shown; the JSON file beside has them all


def write_report(run: Path) -> Path:
    """Write ``<run>/report.html`` from the manifest, the steps' reports and figures; returns its path."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(loader=PackageLoader("ragbuild", "course"), autoescape=True, undefined=StrictUndefined)
    environment.filters["cell"] = lambda value: clip(value, 220)
    manifest = manifest_of(run)
    version = _version(run)
    html = environment.get_template("report.html.j2").render(
        run=run.name, manifest=manifest, config=_config(run), version=version,
        steps=[_step(run, spec.name, spec.title, manifest.get("steps", {}).get(spec.name, {})) for spec in notebooks()],
        rows=ROWS,
    )  # fmt: skip
    target = run / "report.html"
    write_text(target, html)
    return target


def _step(run: Path, name: str, title: str, record: dict[str, Any]) -> dict[str, Any]:
    path = run / "reports" / f"{name}.json"
    empty: dict[str, Any] = {"metrics": {}, "tables": {}, "notes": [], "answers": []}
    data = {**empty, **(read_json(path) if path.is_file() else {})}
    for answer in data["answers"]:  # a line for each place that is cited, not for each quotation from it
        places = {(c["number"], c["page"]): c for c in reversed(answer["citations"])}
        answer["citations"] = [places[place] for place in sorted(places)]
    figures = [
        {"name": f.stem.removeprefix(f"{name}_").replace("_", " "), "data": base64.b64encode(f.read_bytes()).decode()}
        for f in sorted((run / "figures").glob(f"{name}_*.png"))
    ]
    status = {
        "status": record.get("status", "not run"),
        "seconds": record.get("seconds", 0.0),
        "made": record.get("made", ""),
    }
    return {"name": name, **data, "title": title, **status, "figures": figures}


def _config(run: Path) -> dict[str, Any]:
    import yaml

    path = run / "config.yaml"
    return yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _version(run: Path) -> dict[str, Any]:
    try:
        return IndexVersion(run / "indexes").manifest
    except RagbuildError:  # none yet, or damaged: whoever asks it a question is told
        return {}

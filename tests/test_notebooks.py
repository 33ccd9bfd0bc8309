"""The notebooks: one build shared by all tests that need one, with the exercises' solutions; and their form."""

from __future__ import annotations

import json
import re
from pathlib import Path

import nbformat
import pytest

from ragbuild.core.config import Config
from ragbuild.course.runner import notebooks

ROOT = Path(__file__).resolve().parents[1]
PATHS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SPECS = {spec.name: spec for spec in notebooks()}
IDS = [p.stem for p in PATHS]


def cells(path: Path, kind: str) -> list[dict]:
    return [c for c in json.loads(path.read_text(encoding="utf-8"))["cells"] if c["cell_type"] == kind]


def test_every_notebook_of_the_folder_is_a_step() -> None:
    assert {p.stem for p in PATHS} - {"_template"} == set(SPECS)


@pytest.mark.parametrize("path", PATHS, ids=IDS)
def test_form(path: Path) -> None:
    nbformat.validate(nbformat.read(path, as_version=4))
    code = cells(path, "code")
    assert all(not c["outputs"] and c["execution_count"] is None for c in code), "outputs are stripped in git"
    tagged = [c for c in code if "parameters" in c["metadata"].get("tags", [])]
    assert len(tagged) == 1, "exactly one parameters cell"
    assert "".join(tagged[0]["source"]).split("\n") == ['run_dir = ""', "overrides = {}"]
    for cell in code:
        lines = [line for line in "".join(cell["source"]).splitlines() if line.strip()]
        assert len(lines) <= 30, f"a cell is one idea: {len(lines)} lines"
        assert not any(line.lstrip().startswith(("!", "%pip")) for line in lines)


@pytest.mark.parametrize("path", PATHS, ids=IDS)
def test_opens_with_a_chinese_summary_and_has_exercises(path: Path) -> None:
    text = ["".join(c["source"]) for c in cells(path, "markdown")]
    chinese = [line for line in text[0].splitlines() if line.startswith(">") and re.search("[\u4e00-\u9fff]", line)]
    assert len(chinese) == 2, "two lines in Chinese at the top"
    assert any("## Exercises" in t for t in text)
    assert any("solutions" in c["metadata"].get("tags", []) for c in cells(path, "code"))


def test_the_course_ran_and_is_complete(built) -> None:
    assert built.result["error"] is None
    assert [s["step"] for s in built.result["steps"]] == list(SPECS)
    assert all(s["status"] == "done" and s["made"] for s in built.result["steps"])
    assert built.result["complete"]


@pytest.mark.parametrize("name", SPECS)
def test_a_notebook_reads_and_writes_only_what_it_declares(name: str, built) -> None:
    """Opened files come from an audit hook inside the kernel, so a notebook can't get past it."""
    spec = SPECS[name]
    always = ("config.yaml", ".lock", "reports/steps", f"reports/{name}.json", "figures/", f"notebooks/{name}")
    undeclared = {
        (mode, path)
        for mode, path in built.opened(name)
        if not any(path == d or path.startswith((d.rstrip("/") + "/", d)) for d in (*always, *spec.writes))
        and not (mode == "r" and any(path == d or path.startswith(d.rstrip("/") + "/") for d in spec.reads))
        and not Path(path).name.startswith(".")  # the temporary name of an atomic write
    }
    assert not undeclared


@pytest.mark.parametrize("name", SPECS)
def test_a_notebook_uses_the_configuration_it_declares(name: str) -> None:
    assert set(SPECS[name].config) <= set(Config.model_fields)
    source = "\n".join("".join(c["source"]) for c in cells(SPECS[name].path, "code"))
    used = set(re.findall(r"step\.config\.(\w+)", source)) - {"with_overrides", "only"}
    assert used <= {*SPECS[name].config, "profile", "seed"}


def test_executed_notebooks_and_figures_are_kept(built) -> None:
    for name in SPECS:
        kept = nbformat.read(built.run / "notebooks" / f"{name}.ipynb", as_version=4)
        assert not any(o.get("output_type") == "error" for c in kept.cells for o in c.get("outputs", []))
    assert list((built.run / "figures").glob("*.png"))


def test_prose_holds_no_measured_figure(built) -> None:
    """A number typed into prose goes stale: the prose after the results may name none with a decimal or per cent."""
    for path in PATHS:
        for text in ("".join(c["source"]) for c in cells(path, "markdown")):
            if "## What we saw" in text:
                seen = text.split("## What we saw")[1].split("## Exercises")[0]
                assert not re.search(r"\d+\.\d+|\d+ ?%", seen), f"{path.name}: a figure in 'What we saw'"

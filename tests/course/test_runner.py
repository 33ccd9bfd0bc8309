"""The runner on tiny notebooks of its own: reuse, what a change reruns, failures and exit codes, locks, latest."""

from __future__ import annotations

import json
from pathlib import Path

import nbformat
import pytest

from ragbuild.core.config import load_config
from ragbuild.core.errors import GateFailed, InputRefused, StepFailed, UsageError, WorkspaceLocked
from ragbuild.core.lock import WriterLock
from ragbuild.course import runner

STEP = """
import json, pathlib
from ragbuild.core.store import write_json, write_text
run = pathlib.Path(run_dir)
{body}
write_json(run / "reports/steps/{name}.json", {{"made": "{name} made", "seconds": 0.0}})
"""


def write_notebook(folder: Path, name: str, body: str, reads=(), writes=(), config=()) -> None:
    notebook = nbformat.v4.new_notebook()
    parameters = nbformat.v4.new_code_cell('run_dir = ""\noverrides = {}', metadata={"tags": ["parameters"]})
    notebook.cells = [parameters, nbformat.v4.new_code_cell(STEP.format(body=body, name=name))]
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook.metadata["ragbuild"] = dict(title=name, reads=list(reads), writes=list(writes), config=list(config))
    nbformat.write(notebook, folder / f"{name}.ipynb")


@pytest.fixture
def course(tmp_path: Path):
    """Three steps: 01 counts the corpus's files, 02 doubles, 03 is apart and uses a setting."""
    folder, corpus = tmp_path / "notebooks", tmp_path / "docs"
    folder.mkdir()
    corpus.mkdir()
    (corpus / "a.md").write_text("# A\n\ntext\n", encoding="utf-8")
    count = f'write_text(run / "a.txt", str(len(list(pathlib.Path({str(corpus)!r}).glob("*.md")))))'
    write_notebook(folder, "01_count", count, ["input:corpus"], ["a.txt"])
    write_notebook(
        folder, "02_double", 'write_text(run / "b.txt", (run / "a.txt").read_text() * 2)', ["a.txt"], ["b.txt"]
    )
    write_notebook(folder, "03_apart", 'write_text(run / "c.txt", "c")', [], ["c.txt"], ["retrieve"])

    def go(overrides=None, **options):  # type: ignore[no-untyped-def]
        config = load_config(overrides={"corpus.dir": str(corpus), **(overrides or {})})
        return runner.build(config, folder=folder, outputs=tmp_path / "outputs", **options)

    return go, folder, corpus, tmp_path / "outputs"


def statuses(result: runner.BuildResult) -> list[str]:
    return [s.status for s in result.steps]


def test_reuse_and_what_a_change_reruns(course) -> None:
    go, _, corpus, outputs = course
    first = go()
    assert statuses(first) == ["done"] * 3 and first.complete and first.is_latest
    assert (outputs / "latest").resolve() == first.run.resolve()
    again = go()
    assert statuses(again) == ["reused"] * 3 and again.run == first.run
    changed = go({"retrieve.top_n": 30})
    assert statuses(changed) == ["reused", "reused", "done"]
    assert changed.run != first.run and (first.run / "c.txt").exists()
    (corpus / "a.md").write_text("# A\n\nother text, same number of files\n", encoding="utf-8")
    cut_off = go({"retrieve.top_n": 30})
    assert statuses(cut_off) == ["done", "reused", "reused"], "02 reads a.txt, whose content did not change"
    (corpus / "b.md").write_text("# B\n", encoding="utf-8")
    assert statuses(go({"retrieve.top_n": 30})) == ["done", "done", "reused"]


def test_a_lost_or_damaged_output_is_made_again(course) -> None:
    go, *_ = course
    first = go()
    (first.run / "b.txt").unlink()
    (first.run / "c.txt").write_text("damaged")
    result = go()
    assert statuses(result) == ["reused", "done", "done"]
    assert (result.run / "c.txt").read_text() == "c"


@pytest.mark.parametrize(
    ("line", "error", "code"),
    [
        ("raise ValueError('no')", StepFailed, 1),
        ("from ragbuild.core.errors import GateFailed; raise GateFailed('recall below')", GateFailed, 3),
        ("from ragbuild.core.errors import InputRefused; raise InputRefused('all of it')", InputRefused, 4),
    ],
)
def test_a_failing_cell_stops_the_build_and_keeps_its_exit_code(course, line, error, code) -> None:
    go, folder, _, outputs = course
    good = go()
    write_notebook(folder, "02_double", line, ["a.txt"], ["b.txt"])
    failed = go()
    assert statuses(failed) == ["reused", "failed", "not run"]
    assert isinstance(failed.error, error) and failed.error.exit_code == code
    kept = failed.run / "notebooks" / "02_double.ipynb"
    assert "02_double.ipynb, cell" in str(failed.error) and str(kept) in str(failed.error) and kept.exists()
    assert not failed.complete and not failed.is_latest
    assert (outputs / "latest").resolve() == good.run.resolve(), "latest stays on the last complete build"
    assert (good.run / "b.txt").read_text() == "11", "the former run is whole"


def test_a_build_goes_on_where_it_stopped(course) -> None:
    go, folder, *_ = course
    write_notebook(folder, "02_double", "raise ValueError('no')", ["a.txt"], ["b.txt"])
    failed = go()
    write_notebook(folder, "02_double", 'write_text(run / "b.txt", "b")', ["a.txt"], ["b.txt"])
    mended = go()
    assert mended.run == failed.run and statuses(mended) == ["reused", "done", "done"] and mended.complete


def test_a_step_that_does_not_write_what_it_declares_fails(course) -> None:
    go, folder, *_ = course
    write_notebook(folder, "03_apart", "pass", [], ["c.txt"])
    result = go()
    assert "c.txt" in str(result.error) and result.error.exit_code == 1


def test_selection(course) -> None:
    go, folder, *_ = course
    only = go(only=["01"])
    assert [s.name for s in only.steps] == ["01_count"] and not only.complete
    rest = go(start="02")
    assert [s.name for s in rest.steps] == ["02_double", "03_apart"] and rest.complete
    assert [s.name for s in runner.select(runner.notebooks(folder), skip=["02"])] == ["01_count", "03_apart"]
    with pytest.raises(UsageError, match="no notebook '77'"):
        go(only=["77"])


def test_out_leaves_latest_alone_and_fresh_removes_only_workspaces(course, tmp_path) -> None:
    go, _, _, outputs = course
    result = go(out=tmp_path / "mine")
    assert result.complete and not (outputs / "latest").exists()
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("keep")
    with pytest.raises(UsageError, match="no ragbuild workspace"):
        go(out=tmp_path / "precious", fresh=True)
    assert (tmp_path / "precious" / "file").exists()
    assert statuses(go(out=tmp_path / "mine", fresh=True)) == ["done"] * 3


def test_a_second_writer_is_refused_and_told_who_holds_the_lock(course) -> None:
    go, *_ = course
    first = go()
    held = WriterLock(first.run).acquire()
    try:
        with pytest.raises(WorkspaceLocked, match=r"process \d+ on") as error:
            go()
        assert error.value.exit_code == 6
    finally:
        held.release()


def test_missing_corpus(course) -> None:
    go, *_ = course
    with pytest.raises(UsageError, match="is not there"):
        go({"corpus.dir": "/nowhere/at/all"})


def test_the_hash_covers_the_modules_a_notebook_imports() -> None:
    files = {f.name for f in runner.module_files("from ragbuild.online.retrieve import rrf")}
    assert {"retrieve.py", "versions.py", "lexical.py", "text.py", "embedders.py"} <= files
    assert "runner.py" not in files and "dictionary.py" not in files


def test_manifest_is_plain_data(course) -> None:
    go, *_ = course
    manifest = json.loads((go().run / "manifest.json").read_text())
    assert manifest["complete"] and set(manifest["steps"]) == {"01_count", "02_double", "03_apart"}
    assert all(step["hash"] and step["seconds"] >= 0 for step in manifest["steps"].values())

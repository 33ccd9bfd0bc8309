"""Workspaces to practise on: what is linked, what is copied, and what arrives."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import pytest
import yaml

from ragbuild.course.figures import draw_snapshots, draw_states, draw_triggers
from ragbuild.course.practice import FACTS, copied, deliver, later
from tests.conftest import make_document


@pytest.mark.parametrize(
    ("version", "after"),
    [("v4.2", "v4.3"), ("v2.9", "v2.10"), ("2024版", "2025版"), ("Rev. C", "v2"), ("特别版", "v2"), ("", "v2")],
)
def test_the_version_after_this_one(version: str, after: str) -> None:
    assert later(version) in (after, "v2")
    if any(character.isdigit() for character in version):
        assert later(version) == after


def test_a_copy_shares_index_files_and_nothing_that_is_written(tmp_path: Path) -> None:
    source, target = tmp_path / "run", tmp_path / "practice"
    (source / "indexes" / "v0001").mkdir(parents=True)
    for name in ("config.yaml", "eval_set.json", "other.json", "indexes/v0001/rows.npy", "indexes/v0001/version.json"):
        (source / name).write_text(name)
    target.mkdir()
    (target / "of-before").write_text("goes")
    assert copied(source, target, ["eval_set.json"]) == target
    same = {p.relative_to(target).as_posix(): p.samefile(source / p.relative_to(target)) for p in target.rglob("*.*")}
    assert same == {
        "config.yaml": False, "eval_set.json": False, "indexes/v0001/rows.npy": True,
        "indexes/v0001/version.json": False,
    }  # fmt: skip
    assert not (target / "of-before").exists()


def test_a_document_is_delivered_as_another_one_with_changes(tmp_path: Path) -> None:
    like = make_document("guide", product_model=["P1"], supersedes="default/guide/v4.1/P1")
    path = deliver(tmp_path, "newer", "# Text", like, doc_version="v5", supersedes=None)
    _, head, text = path.read_text(encoding="utf-8").split("---\n")
    said = yaml.safe_load(head)
    assert (said["doc_id"], said["doc_version"], said["product_model"]) == ("guide", "v5", ["P1"])
    assert not {"supersedes", "doc_source", "content_hash", "status"} & said.keys()
    assert text == "\n# Text\n"


def test_facts_hold_what_is_asked_for() -> None:
    for facts in FACTS.values():
        assert all(value in sentence and value not in question for sentence, question, value in facts)


def test_the_plots_are_drawn() -> None:
    trigger = {"trigger": "corpus grew", "value": 0.5, "limit": 1.0}
    unknown = {"trigger": "corpus grew", "value": None, "limit": 1.0}
    snap = {"version": "v0001", "own": 1e6, "size": 2e6, "children": 5, "current": True, "command": "build"}
    figures = [
        draw_states([("kb/a/v1/all", ["active", "legacy"], "legacy"), ("kb/b/v1/all", [None, "active"], "")], "ab"),
        draw_snapshots([snap | {"documents": 1}]),
        draw_triggers([trigger], [unknown], "other"),
    ]
    texts = [t.get_text() for ax in figures[2].axes for t in ax.texts]
    assert texts == ["50 %", "not measured"], "what was not measured is said, and is not drawn as nothing"
    for figure in figures:
        plt.close(figure)

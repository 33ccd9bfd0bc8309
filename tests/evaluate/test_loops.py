"""Loops: a change stays only when it is shown to help, and a prompt's rounds are kept and come to an end."""

from __future__ import annotations

from pathlib import Path

import pytest

from ragbuild.core.errors import UsageError
from ragbuild.core.store import Workspace
from ragbuild.evaluate.ledger import Entry
from ragbuild.evaluate.loops import PromptRound, loop3, prompt_rounds, record_round, regression, should_stop
from tests.evaluate.test_ledger import HIGH, LOW, RERANK, cases, run


@pytest.mark.parametrize(
    ("after", "keep", "why"),
    [
        (run(HIGH, **RERANK), True, "improvement"),
        (run(LOW, **RERANK), False, "no difference at n = 8"),
        (run(LOW | {"q1": 1}, **RERANK), False, "not significant at n = 8"),
        (run(HIGH, fusion={"top_n": 20}, **RERANK), False, "2 components changed: fusion (top_n: 50 -> 20); rerank"),
        (run(HIGH), False, "not deterministic"),
    ],
    ids=["better", "same", "chance", "two changes", "none"],
)
def test_loop_3_keeps_what_is_shown_to_help(after: Entry, keep: bool, why: str):
    found = loop3(run(LOW), after, "recall@10")
    assert found.keep is keep and why in found.reason
    assert found.reason.startswith("keep" if keep else "revert")


def test_regression_names_each_case_that_crossed_the_line():
    before, after = run(cases(0.8, 0.79, 1, 0, None, 1)), run(cases(0.79, 0.8, 0.9, 0.5, 1, None))
    found = regression(before, after, "recall@10")
    assert (found.broken, found.fixed, found.unmeasured) == (("q1",), ("q2",), ("q5", "q6"))
    with pytest.raises(UsageError, match="no 'accuracy'"):
        regression(before, after, "accuracy")


def prompt(version: str, *values: float | None) -> Entry:
    return run(cases(*values), kind="qdoca", prompt={"version": version})


def test_rounds_are_recorded_with_what_they_fixed_and_broke(tmp_path: Path):
    workspace = Workspace(tmp_path)
    one = prompt("1.0", 1, 0.5, 0, 0)
    two, three = prompt("1.1", 1, 0.9, 0.5, 0), prompt("1.2", 0.5, 1, 1, 1)
    four = prompt("1.3", 1, 0.9, 1, None)
    made = [record_round(workspace, old, new, "recall@10") for old, new in ((None, one), (one, two))]
    assert prompt_rounds(workspace) == made
    made += [record_round(workspace, two, new, "recall@10") for new in (three, four)]
    assert prompt_rounds(workspace) == made
    assert [r.prompt_version for r in made] == ["1.0", "1.1", "1.2", "1.3"]
    assert [r.gain_pp for r in made[:3]] == [None, 22.5, 27.5]  # 0.375, 0.6, 0.875 of four cases
    assert [r.kept for r in made] == [True, True, False, False]  # 1.2 breaks q1; of 1.3 a case was not measured
    assert (made[1].fixed, made[2].broken) == (("q2",), ("q1",))
    assert record_round(workspace, two, three, "recall@10", max_broken=1).kept
    same = record_round(workspace, two, prompt("1.4", 1, 0.9, 0.5, 0), "recall@10")
    assert (same.gain_pp, same.kept) == (0.0, False), "what gains nothing replaces nothing"


def test_a_round_is_a_changed_prompt_and_nothing_else(tmp_path: Path):
    workspace, one = Workspace(tmp_path), prompt("1.0", 1, 0)
    other = run(cases(1, 1), kind="qdoca", prompt={"version": "1.1"}, **RERANK)
    with pytest.raises(UsageError, match="nothing else; changed: .*rerank"):
        record_round(workspace, one, other, "recall@10")
    with pytest.raises(UsageError, match="changed: nothing"):
        record_round(workspace, one, prompt("1.0", 1, 0), "recall@10")
    with pytest.raises(UsageError, match="eval sets differ"):
        new = run(cases(1, 1), kind="qdoca", prompt={"version": "1.1"}, eval_sets={"expert": "e2"})
        record_round(workspace, one, new, "recall@10")
    with pytest.raises(UsageError, match="Q-DOC-A"):
        record_round(workspace, None, run(cases(1)), "recall@10")
    with pytest.raises(UsageError, match="no 'expert/overall'"):
        record_round(workspace, None, one, "expert/overall")
    assert prompt_rounds(workspace) == []


@pytest.mark.parametrize(
    ("gains", "stop"),
    [
        ([], False),
        ([None, 0.2], False),
        ([None, 3.0, 0.4, 0.0], True),
        ([None, 0.4, -2.0], True),
        ([None, 0.4, 0.5], False),
        ([None, 0.1, 3.0, 0.1], False),
        ([0.1, None, 0.1], False),
    ],
    ids=str,
)
def test_two_rounds_in_a_row_under_half_a_point_stop(gains: list[float | None], stop: bool):
    rounds = [
        PromptRound(prompt_version=str(i), entry_id=str(i), metric="m", score=0.5, gain_pp=gain, kept=True, reason="")
        for i, gain in enumerate(gains)
    ]
    assert should_stop(rounds) is stop

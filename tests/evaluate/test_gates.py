"""Gates: what fails, by how much, what to try; a baseline that can't be got around; fine-tuning by the rule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragbuild.core.config import GatesConfig
from ragbuild.core.errors import GateFailed, InputRefused, UsageError
from ragbuild.core.store import read_json, write_json
from ragbuild.evaluate.gates import (
    Baseline,
    check_baseline,
    decide_finetune,
    offline_gate,
    raise_if_failed,
    read_baseline,
    write_baseline,
)
from ragbuild.evaluate.ledger import Entry, Figure
from tests.evaluate.test_ledger import cases, run

GATES = GatesConfig()


def outcome(figures: dict[str, Figure], gates: GatesConfig = GATES) -> dict[str, bool | None]:
    return {r.name: r.passed for r in offline_gate(figures, gates)}


def test_a_tiny_set_does_not_fail_by_chance_and_a_large_one_does():
    # 6 of 10 against 0.8: Wilson's upper end is (0.6 + 0.192 + 1.96 sqrt(0.024 + 0.0096)) / 1.384 = 0.832
    assert outcome({"lexical_recall_at_50": Figure(value=0.6, n=10)})["lexical_recall_at_50"] is True
    # 600 of 1000: at most 0.63
    assert outcome({"lexical_recall_at_50": Figure(value=0.6, n=1000)})["lexical_recall_at_50"] is False
    assert outcome({"terms_kept_whole": Figure(value=1.0, n=3)}, GatesConfig(terms_kept_whole=1.0))["terms_kept_whole"]


def test_a_hard_check_has_no_tolerance():
    figures = {"index_completeness": Figure(value=595 / 596, n=596)}
    assert outcome(figures)["index_completeness"] is False
    assert outcome({"index_completeness": Figure(value=1.0, n=596)})["index_completeness"] is True


def test_missing_does_not_apply_and_unmeasurable_fails():
    found = outcome({"dense_recall_at_50": Figure(value=None, n=0, unmeasured=40)})
    assert found["dense_recall_at_50"] is False and found["fused_recall_at_50"] is None
    off = outcome({"dense_recall_at_50": Figure(value=0.0, n=400)}, GatesConfig(enabled=False))
    assert set(off.values()) == {None}


def test_a_failed_gate_says_by_how_much_and_what_to_try():
    figures = {"lexical_recall_at_50": Figure(value=0.2, n=400), "dense_recall_at_50": Figure(value=0.9, n=400)}
    with pytest.raises(GateFailed) as error:
        raise_if_failed(offline_gate(figures, GATES))
    assert error.value.exit_code == 3
    text = str(error.value)
    # (0.2 + 0.0048 + 1.96 sqrt(0.0004 + 0.00000575…)) / 1.0096 = 0.242: 0.558 below 0.8
    assert "1 of 4 gates failed" in text and "at most 0.242" in text and "0.558 too low" in text
    assert "tokenizer or dictionary" in text and "dense_recall" not in text
    with pytest.raises(GateFailed, match="embedding or index completeness"):
        raise_if_failed(offline_gate({"dense_recall_at_50": Figure(value=0.1, n=400)}, GATES))
    raise_if_failed(offline_gate({}, GATES))


@given(st.floats(0, 1), st.floats(0, 1), st.integers(1, 500))
def test_a_better_figure_never_fails_where_a_worse_one_passes(a: float, b: float, n: int):
    low, high = (outcome({"fused_recall_at_50": Figure(value=v, n=n)})["fused_recall_at_50"] for v in sorted((a, b)))
    assert high or not low


# --- baseline ---------------------------------------------------------------------------------------------------------

TEN = cases(*[1] * 8, 0, 0)  # 0.8


def made(tmp_path: Path, *entries: Entry, margin: float = 0.1) -> Baseline:
    entries = entries or (run(TEN),)
    write_baseline(tmp_path / "baseline.json", entries, {e.kind: list(e.per_query) for e in entries}, margin)
    return read_baseline(tmp_path / "baseline.json")


@pytest.mark.parametrize(("right", "passed"), [(10, True), (8, True), (7, True), (6, False)])
def test_a_metric_may_fall_by_its_margin_and_no_more(tmp_path: Path, right: int, passed: bool):
    (result,) = check_baseline(made(tmp_path), run(cases(*[1] * right, *[0] * (10 - right))))
    assert (result.name, result.passed, result.n) == ("qdoc/recall@10", passed, 10)
    assert result.threshold == 0.7
    if not passed:
        with pytest.raises(GateFailed, match=r"0\.6000 .* against 0\.8000 .* a change of -0\.2000; may fall by 0\.1"):
            raise_if_failed([result])


def test_margins_own_then_given_then_the_baselines(tmp_path: Path):
    base, fell = made(tmp_path), run(cases(*[1] * 7, *[0] * 3))
    assert check_baseline(base, fell, 0.05)[0].passed is False
    data = read_json(tmp_path / "baseline.json")
    data["metrics"]["qdoc/recall@10"]["margin"] = 0.2
    write_json(tmp_path / "own.json", data)
    assert check_baseline(read_baseline(tmp_path / "own.json"), fell, 0.05)[0].passed is True


def test_a_case_that_is_not_measured_any_more_counts_as_zero(tmp_path: Path):
    (result,) = check_baseline(made(tmp_path), run(cases(*[1] * 6, *[None] * 4)))  # 6 of 6, but 6 of the former 10
    assert result.passed is False and result.value == 0.6 and "4 case(s) not measured" in result.said
    (gone,) = check_baseline(made(tmp_path), run({"other": TEN}))
    assert gone.passed is False and "not measured any more" in gone.said


def test_a_changed_eval_set_fails_and_says_how_to_renew(tmp_path: Path):
    (result,) = check_baseline(made(tmp_path), run(cases(1), eval_sets={"expert": "e2"}))
    assert result.passed is False and "(expert)" in result.said and "ragbuild eval baseline" in result.what_to_try


def test_another_judge_or_fewer_dimensions_fail_since_a_better_score_would_mean_nothing(tmp_path: Path):
    base = made(tmp_path)
    for judge in ({"name": "openai:m"}, {"name": "rubric", "dimensions": ["expression_quality"]}):
        (result,) = check_baseline(base, run(cases(*[1] * 10), judge=judge))
        assert (result.name, result.passed) == ("qdoc/judge", False) and "ragbuild eval baseline" in result.what_to_try


def test_another_corpus_or_profile_is_not_checked_and_that_is_said(tmp_path: Path):
    base, bad = made(tmp_path), cases(*[0] * 10)
    (corpus,) = check_baseline(base, run(bad, corpus_hash="c2"))
    entry = run(bad)
    (profile,) = check_baseline(base, entry.model_copy(update={"config": entry.config | {"profile": "qwen"}}))
    for result in (corpus, profile):
        assert result.passed is None and result.said.startswith("NOT CHECKED")
        raise_if_failed([result])


def test_retrieval_and_answers_have_figures_and_sets_of_their_own(tmp_path: Path):
    answers = run(cases(1, 0), kind="qdoca", eval_sets={"expert": "e1", "generated": "g1"})
    base = made(tmp_path, run(TEN), answers)
    assert set(base.metrics) == {"qdoc/recall@10", "qdoca/recall@10"}
    assert [r.passed for e in (run(TEN), answers) for r in check_baseline(base, e)] == [True, True]
    assert check_baseline(base, run(TEN, kind="offline")) == []


def test_a_baseline_is_of_one_corpus_and_of_what_was_measured(tmp_path: Path):
    for entries in ([run(TEN), run(TEN, kind="qdoca", corpus_hash="c2")], [run(TEN), run(TEN)], [], [run(cases(None))]):
        with pytest.raises(UsageError, match="baseline"):
            write_baseline(tmp_path / "no.json", entries, {"qdoc": ["recall@10"]}, 0.02)
    assert not (tmp_path / "no.json").exists()
    write_json(tmp_path / "bad.json", {"profile": "offline"})
    with pytest.raises(InputRefused, match="is no baseline: corpus_hash"):
        read_baseline(tmp_path / "bad.json")


# --- fine-tuning ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "rounds", "action", "stop"),
    [
        (0.80, 0.85, [], "deploy", False),  # in floats 0.85 - 0.80 is a little under 5 pp
        (0.80, 0.8499, [], "do not deploy", False),
        (0.80, 0.78, [], "revert", False),
        (0.80, 0.7801, [], "do not deploy", False),
        (0.80, 0.83, [1.5], "do not deploy", True),
        (0.80, 0.83, [6.0], "do not deploy", False),
        (0.80, 0.70, [4.9], "revert", True),
        (0.80, 0.90, [1.0], "deploy", False),
    ],
)
def test_fine_tuning_follows_the_method(before: float, after: float, rounds: list[Any], action: str, stop: bool):
    found = decide_finetune(before, after, rounds)
    assert (found.action, found.stop) == (action, stop)


def test_recall_in_percent_is_refused():
    with pytest.raises(UsageError, match="0 to 1"):
        decide_finetune(80, 85)

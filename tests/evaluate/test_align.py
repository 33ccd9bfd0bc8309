"""Judge against people: kappa by hand and by scikit-learn, degenerate cases, files of judged answers."""

from __future__ import annotations

import json
import warnings

import numpy as np
import pytest
from sklearn.metrics import cohen_kappa_score

from ragbuild.core.errors import InputRefused
from ragbuild.core.records import ExpertCase, PageRef
from ragbuild.evaluate.align import align, align_expert, confusion, kappa, level
from ragbuild.evaluate.human import judge_file
from ragbuild.evaluate.judge import RubricJudge
from ragbuild.evaluate.rubric import Score
from ragbuild.offline.evalset import ChunkMap, half_of
from tests.conftest import SHARED, make_chunks, make_document


class Fixed:
    """Gives the same value in every dimension: what stands in the answer (``none``: unmeasured)."""

    name, stand_in = "fixed", True

    def __call__(self, judged):
        value = None if judged.answer == "none" else float(judged.answer)
        return {d: Score(value=value, reason="so it is") for d in ("content_accuracy", "credibility")}


def test_levels():
    assert [level(v) for v in (0, 0.39, 0.4, 0.79, 0.8, 1)] == [0, 0, 1, 1, 2, 2]


def test_kappa_by_hand():
    counts = confusion([0, 0, 1, 1, 2], [0, 0, 1, 2, 2])
    assert counts.tolist() == [[2, 0, 0], [0, 1, 1], [0, 0, 1]]
    # agreement 4/5; chance (2*2 + 2*1 + 1*2)/25 = 8/25
    assert kappa(counts) == pytest.approx((20 / 25 - 8 / 25) / (17 / 25))
    # quadratic: off = 1 (one pair, one apart); expected = sum (i-j)^2 row_i col_j / 5
    # rows 2, 2, 1 and columns 2, 1, 2: (0,1) 2 + (0,2) 4*4 + (1,0) 4 + (1,2) 4 + (2,0) 4*2 + (2,1) 1
    expected = (2 + 16 + 4 + 4 + 8 + 1) / 5
    assert kappa(counts, quadratic=True) == pytest.approx(1 - 1 / expected)


def test_kappa_agrees_with_scikit_learn():
    rng = np.random.default_rng(5)
    for _ in range(50):
        a, b = rng.integers(0, 3, (2, 40))
        b = np.where(rng.random(40) < 0.5, a, b)
        for quadratic in (False, True):
            expected = cohen_kappa_score(a, b, labels=[0, 1, 2], weights="quadratic" if quadratic else None)
            assert kappa(confusion(a, b), quadratic) == pytest.approx(expected, abs=1e-12)


def test_align_shows_agreement_query_by_query():
    info = [{"id": i} for i in "abcdef"]
    result = align([2, 2, 1, 0, 0, 1], [0.9, 0.1, 0.5, 0.0, 0.39, None], info)
    assert (result.n, result.unmeasured, result.agreement) == (5, 1, 0.8)
    assert [(r["id"], r["human"], r["judge"], r["agree"]) for r in result.rows] == [
        ("a", 2, 2, True), ("b", 2, 0, False), ("c", 1, 1, True), ("d", 0, 0, True), ("e", 0, 0, True),
        ("f", 1, None, False),
    ]  # fmt: skip
    assert result.confusion == ((2, 0, 0), (0, 1, 0), (1, 0, 1))
    assert (result.human_base, result.judge_base) == ((0.4, 0.2, 0.4), (0.6, 0.2, 0.2))
    assert [r["id"] for r in result.disagreements] == ["b", "f"]
    assert result.kappa == pytest.approx(cohen_kappa_score([2, 2, 1, 0, 0], [2, 0, 1, 0, 0]))
    assert result.low < result.kappa < result.high
    assert "1 could not be judged" in result.verdict
    assert result == align([2, 2, 1, 0, 0, 1], [0.9, 0.1, 0.5, 0.0, 0.39, None], info)  # seeded


def test_the_interval_covers_what_resampling_by_scikit_learn_gives():
    rng = np.random.default_rng(1)
    people = rng.integers(0, 3, 60)
    judge = np.where(rng.random(60) < 0.6, people, rng.integers(0, 3, 60))
    result = align(people.tolist(), (judge / 2).tolist(), n_resamples=4000)
    draws = []
    for _ in range(1000):
        at = rng.integers(0, 60, 60)
        draws.append(cohen_kappa_score(people[at], judge[at], labels=[0, 1, 2]))
    assert [result.low, result.high] == pytest.approx(np.percentile(draws, (2.5, 97.5)).tolist(), abs=0.03)


def test_verdicts():
    same = [0, 1, 2] * 20
    assert align(same, [v / 2 for v in same]).verdict == "kappa 1.00 at n = 60 reaches 0.6."
    poor = align(same, [1.0] * 60)
    assert poor.kappa == 0.0 and "not to be trusted at scale" in poor.verdict
    fair = align([0, 1, 2] * 12, [v / 2 for v in [0, 1, 2, 0, 1, 2, 1, 2, 0] * 4])  # 2/3 agree, 1/3 by chance
    assert fair.kappa == pytest.approx(0.5) and "below 0.6: this judge is not to be trusted" in fair.verdict
    few = align([0, 1, 2, 2], [0.0, 0.5, 1.0, 0.5])
    assert few.kappa >= 0.6 > few.low and "interval reaches down" in few.verdict


@pytest.mark.parametrize("scores", [[1.0, 1.0, 1.0], [1.0, 0.0, 0.5], [None, None, None]])
def test_one_level_only_leaves_kappa_undefined_and_says_so(scores):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = align([2, 2, 2], scores)
    assert (result.kappa, result.low, result.quadratic) == (None, None, None)
    assert "undefined" in result.verdict
    assert align([], []).verdict.startswith("kappa is undefined")


def test_expert_cases_by_half():
    document = make_document("guide")
    chunks = ChunkMap(make_chunks(["The idle timeout is 15 minutes.", "The lid is blue."], document))

    def expert(name: str, given: str, score: int | None) -> ExpertCase:
        return ExpertCase(
            case_id=name, query="What is the idle timeout?", language="en", reference_answer="15 minutes.",
            ground=(PageRef(doc_source="guide.md", pages=(1,), quotes=("idle timeout",)),), given_answer=given,
            gt_keywords=("15 minutes",), wrong_keywords=("30 minutes",), human_score=score, human_reason="why",
        )  # fmt: skip

    cases = [
        expert("right", "The idle timeout is 15 minutes. ^7^", 2),  # ^7^ was another system's number
        expert("old", "The idle timeout is 30 minutes.", 0),
        expert("cheap", "The idle timeout is 15 minutes.", 1),
        expert("unjudged", "", None),
    ]
    left = expert("left", "It is 5.", 0).model_copy(update={"ground": (PageRef(doc_source="gone.md", pages=(1,)),)})
    lost: list[str] = []
    found = align_expert([left, *cases], RubricJudge(), chunks, lost=lost)
    assert lost == ["left"], "its document is not in the index any more"
    assert (found["all"].n, found["tuning"].n + found["test"].n) == (3, 3)
    assert found[half_of("guide")].n == 3 and {r["half"] for r in found["all"].rows} == {half_of("guide")}
    assert [(r["id"], r["human"], r["judge"]) for r in found["all"].rows] == [
        ("right", 2, 2),
        ("old", 0, 0),
        ("cheap", 1, 2),
    ]
    off = found["all"].disagreements
    assert [(r["id"], r["human_reason"]) for r in off] == [("cheap", "why")]
    assert "wrong 30 minutes" in found["all"].rows[1]["judge_reason"]
    assert found == align_expert(cases, RubricJudge(), chunks)


def write(path, rows) -> None:
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows), encoding="utf-8")


def row(score: float | str, human: object, raw: dict | None = None) -> dict:
    return {"query": "q", "answer": str(score), "human": human, "human_raw": raw or {}, "extra": "is left alone"}


def test_a_file_with_several_people(tmp_path):
    path = tmp_path / "human.jsonl"
    scale = {1: 0, 2: 0, 3: 1, 4: 2}
    a, b = [1, 2, 3, 4, 4, 3], [1, 3, 3, 4, 3, 3]
    judge = [0.0, 0.2, 0.5, 0.9, 0.9, 0.9]
    write(path, [
        row(j, {"faithfulness": float(np.median([x, y])), "odd": 2}, {"faithfulness": {"ann": x, "bob": y}})
        for x, y, j in zip(a, b, judge, strict=True)
    ])  # fmt: skip
    report = judge_file(path, Fixed())
    assert (report.judge, report.stand_in, report.refused, report.alone) == ("fixed", True, [], ["odd"])
    (faith,) = report.dimensions
    assert (faith.human, faith.ours, faith.annotators) == ("faithfulness", "credibility", 2)
    levels_a, levels_b = [scale[v] for v in a], [scale[v] for v in b]
    judged = [level(v) for v in judge]
    # medians 1, 2.5, 3, 4, 3.5, 3 are (v - 1) / 3 = 0, 0.5, 0.67, 1, 0.83, 0.67
    assert [r["human"] for r in faith.alignment.rows] == [0, 1, 1, 2, 2, 1]
    assert faith.human_kappa == pytest.approx(cohen_kappa_score(levels_a, levels_b))
    both = [cohen_kappa_score(judged, levels_a), cohen_kappa_score(judged, levels_b)]
    assert faith.judge_kappa == pytest.approx(np.mean(both))
    assert "annotators with each other" in faith.row()["beside"]


def test_malformed_rows_are_named_with_their_line_and_the_others_go_on(tmp_path):
    path = tmp_path / "human.jsonl"
    write(path, [
        row(1, "ok"), "{broken", "", {"query": "q"}, row(0, "maybe"), row(0, {"faithfulness": 5}), row(0, 3),
        row(0, {"faithfulness": float("nan")}), row(0, "hallucinated"), row("none", "ok"),
        row(0, {"faithfulness": 2}, {"faithfulness": {"ann": 9}}), row(0.5, "ok"),
    ])  # fmt: skip
    report = judge_file(path, Fixed())
    assert [r.split(":")[0] for r in report.refused] == [f"line {n}" for n in (2, 4, 5, 6, 7, 8, 11)]
    (faith,) = report.dimensions
    # 0.5 is no "ok": the two labels are told apart at 0.8
    assert [(r["human"], r["judge"]) for r in faith.alignment.rows] == [(2, 2), (0, 0), (2, None), (2, 0)]
    assert (faith.alignment.n, faith.alignment.unmeasured) == (3, 1)
    assert faith.human_kappa is None and "not known" in faith.row()["beside"]


def test_a_list_with_one_score_for_the_whole_answer(tmp_path):
    path = tmp_path / "human.json"
    path.write_text(json.dumps([row(1, 2), row(0, 0), row(0.5, 1)]), encoding="utf-8")
    (whole,) = judge_file(path, Fixed()).dimensions
    assert (whole.ours, whole.alignment.kappa) == ("overall", 1.0)


def test_a_pair_of_people_weighs_as_much_as_the_answers_that_both_judged(tmp_path):
    levels = {"ann": [1, 4, 1, 4, 1, 4], "bob": [1, 4, 1, 4, 1, 1], "eve": [4, 1]}
    given = [{who: some[i] for who, some in levels.items() if i < len(some)} for i in range(6)]
    write(tmp_path / "h.jsonl", [row(0.9, {"faithfulness": 1}, {"faithfulness": each}) for each in given])
    (faith,) = judge_file(tmp_path / "h.jsonl", Fixed()).dimensions
    # ann and bob agree on 5 of 6, 1/2 by chance; eve contradicts both, on two answers each
    assert faith.human_kappa == pytest.approx((6 * (5 / 6 - 1 / 2) / (1 / 2) + 2 * -1 + 2 * -1) / 10)


def test_what_cannot_be_answered_is_judged_as_such(tmp_path):
    answers = [row("The documents do not say.", {"appropriateness": 4}) | {"answerability": a} for a in
               ("UNANSWERABLE", "unanswerable", "ANSWERABLE", "")]  # fmt: skip
    write(tmp_path / "h.jsonl", answers)
    (found,) = judge_file(tmp_path / "h.jsonl", RubricJudge()).dimensions
    assert [r["judge"] for r in found.alignment.rows] == [2, 2, 0, 0]


@pytest.mark.parametrize("text", ["", "not json", "[1, 2", '{"query": "q"}'])
def test_a_file_without_a_judged_answer_is_refused(tmp_path, text):
    (tmp_path / "x.jsonl").write_text(text, encoding="utf-8")
    with pytest.raises(InputRefused, match="x.jsonl"):
        judge_file(tmp_path / "x.jsonl", Fixed())
    with pytest.raises(InputRefused, match="cannot be read"):
        judge_file(tmp_path / "none.jsonl", Fixed())


@pytest.mark.parametrize(("name", "dimensions"), [("mtrag", 4), ("uhgeval-zh", 1)])
def test_public_files_of_judged_answers(name, dimensions, tmp_path):
    path = SHARED / "judge" / name / "human.jsonl"
    if not path.is_file():
        pytest.skip(f"no shared/judge/{name} beside the checkout")
    write(tmp_path / "some.jsonl", path.read_text(encoding="utf-8").split("\n")[:120])
    report = judge_file(tmp_path / "some.jsonl", RubricJudge(), n_resamples=200)
    assert report.refused == [] and len(report.dimensions) == dimensions
    for found in report.dimensions:
        assert found.alignment.n + found.alignment.unmeasured == 120
        assert (found.human_kappa is None) is (name == "uhgeval-zh")
        assert found.alignment.verdict

"""Metrics by hand, at the edges, as properties, and against ranx."""

from __future__ import annotations

from itertools import product
from math import isnan, log2, nan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragbuild.evaluate.metrics import bootstrap_ci, mean, paired_test, per_query, ranked, wilson

TRUTH = {"a": 2.0, "b": 1.0, "c": 1.0, "z": 0.0}
IDEAL = 2 + 1 / log2(3) + 1 / log2(4)


def one(ranking, truth=TRUTH, cutoffs=(1, 3, 10)):
    return {name: float(values[0]) for name, values in per_query([ranking], [truth], cutoffs).items()}


@pytest.mark.parametrize(
    ("ranking", "expected"),
    [
        (["a", "b", "c"], {"recall@3": 1, "precision@3": 1, "precision@10": 0.3, "ndcg@10": 1, "mrr": 1, "hit@1": 1}),
        (["a", "x"], {"recall@1": 1 / 3, "precision@1": 1, "ndcg@1": 1, "ndcg@3": 2 / IDEAL, "recall@10": 1 / 3}),
        (
            ["x", "a", "z", "b"],
            {
                "recall@1": 0, "hit@1": 0, "mrr@1": 0, "ndcg@1": 0, "recall@3": 1 / 3, "precision@3": 1 / 3,
                "mrr@3": 1 / 2, "mrr": 1 / 2, "ndcg@3": 2 / log2(3) / IDEAL, "recall@10": 2 / 3,
                "ndcg@10": (2 / log2(3) + 1 / log2(5)) / IDEAL,
            },
        ),
        (["x"] + [f"y{i}" for i in range(9)] + ["a"], {"mrr": 1 / 11, "mrr@10": 0, "hit@10": 0, "ndcg@10": 0}),
        (["x", "y"], dict.fromkeys(("recall@10", "precision@10", "ndcg@10", "hit@10", "mrr@10", "mrr"), 0)),
        ([], dict.fromkeys(("recall@1", "precision@1", "ndcg@1", "hit@1", "mrr@1", "mrr"), 0)),
        (["x", "x", "a", "a", "b"], {"mrr": 1 / 2, "recall@3": 2 / 3, "precision@3": 2 / 3}),  # equal ids count once
    ],
)  # fmt: skip
def test_by_hand(ranking, expected):
    figures = one(ranking)
    assert {name: figures[name] for name in expected} == pytest.approx(expected, abs=1e-12)


def test_names_and_shapes():
    figures = per_query([["a"], []], [TRUTH, TRUTH], (10, 3))
    kinds = ("recall", "precision", "hit", "mrr", "ndcg")
    assert set(figures) == {"mrr", *(f"{kind}@{k}" for kind, k in product(kinds, (3, 10)))}
    assert all(values.shape == (2,) and values.dtype == np.float64 for values in figures.values())
    assert all(values.shape == (0,) for values in per_query([], [], (5,)).values())


@pytest.mark.parametrize("truth", [{}, {"a": 0.0}, {"a": -1.0}])
def test_a_query_without_relevant_documents_is_unmeasured(truth):
    figures = per_query([["a"], ["a"]], [truth, TRUTH], (1, 3))
    assert all(isnan(values[0]) and not isnan(values[1]) for values in figures.values())
    assert mean(figures["hit@1"]) == (1.0, 1, 1)
    assert mean([]) == pytest.approx((nan, 0, 0), nan_ok=True)
    assert mean([nan, nan]) == pytest.approx((nan, 0, 2), nan_ok=True)


@pytest.mark.parametrize(
    ("rankings", "truths", "cutoffs"),
    [([["a"]], [], (1,)), ([["a"]], [TRUTH], ()), ([["a"]], [TRUTH], (0, 1)), ([["a"]], [{"a": nan}], (1,))],
)
def test_what_cannot_be_measured_is_refused(rankings, truths, cutoffs):
    with pytest.raises(ValueError):
        per_query(rankings, truths, cutoffs)


def test_ties_go_to_the_smaller_id_and_nan_has_no_place():
    assert ranked({"b": 0.5, "c": 0.9, "a": 0.5, "十": 0.5}) == ["c", "a", "b", "十"]
    with pytest.raises(ValueError, match="NaN"):
        ranked({"a": nan, "b": 1.0})


ids = st.sampled_from("abcdefghij")
cases = st.lists(st.tuples(st.lists(ids, max_size=12), st.dictionaries(ids, st.integers(0, 3))), max_size=6)


@given(cases)
def test_recall_and_hits_never_fall_with_k_and_all_lie_between_0_and_1(rows):
    rankings, truths = [r for r, _ in rows], [t for _, t in rows]
    figures = per_query(rankings, truths, range(1, 15))
    for kind in ("recall", "hit", "mrr"):
        steps = np.diff([figures[f"{kind}@{k}"] for k in range(1, 15)], axis=0)
        assert (np.isnan(steps) | (steps >= 0)).all()
    assert all((np.isnan(v) | ((v >= 0) & (v <= 1 + 1e-12))).all() for v in figures.values())


@given(cases)
def test_queries_are_independent_and_two_runs_are_identical(rows):
    rankings, truths = [r for r, _ in rows], [t for _, t in rows]
    together, again = per_query(rankings, truths, (1, 5, 10)), per_query(rankings, truths, (1, 5, 10))
    for name, values in together.items():
        assert values.tobytes() == again[name].tobytes()
        apart = [one(r, t, (1, 5, 10))[name] for r, t in rows]
        assert values.tolist() == pytest.approx(apart, abs=0, nan_ok=True)


@given(st.permutations("abcd"), st.dictionaries(st.sampled_from("abcd"), st.integers(1, 3), min_size=1))
def test_the_ideal_order_and_only_one_as_good_has_ndcg_1(order, truth):
    assert one(ranked({k: float(v) for k, v in truth.items()}), truth)["ndcg@10"] == 1.0
    grades = [truth.get(i, 0) for i in order]
    assert (one(list(order), truth)["ndcg@10"] > 1 - 1e-12) == (grades == sorted(grades, reverse=True))


@pytest.fixture(scope="module")
def random_runs():
    """Scores of one decimal, so that most tie; grades 0 to 3, some ids unjudged, some relevant ids not retrieved."""
    rng = np.random.default_rng(5)
    runs, truths = {}, {}
    for number in range(60):
        retrieved = rng.permutation(60)[: rng.integers(1, 40)]
        runs[f"q{number:02}"] = {f"d{i:04}": round(float(rng.random()), 1) for i in retrieved}
        truths[f"q{number:02}"] = {f"d{i:04}": int(rng.integers(0, 4)) for i in rng.permutation(60)[:15]} | {"d0060": 1}
    return runs, truths


@pytest.mark.parametrize("order", ["ours", "trec_eval"])
def test_agrees_with_ranx_on_runs_with_ties(random_runs, order):
    """ranx sorts by score and leaves the order of ties open, so it gets scores made strict in a stated order: ours,
    (-score, id), or that of trec_eval and pytrec_eval, where among equal scores the larger id comes first."""
    from ranx import Qrels, Run, evaluate

    runs, truths = random_runs
    assert sum(len(run) - len(set(run.values())) for run in runs.values()) > 300, "many ties"
    if order == "ours":
        rankings = {q: ranked(run) for q, run in runs.items()}
    else:
        rankings = {q: sorted(run, key=lambda i, run=run: (run[i], i), reverse=True) for q, run in runs.items()}
    strict = Run({q: {i: 1.0 / rank for rank, i in enumerate(r, 1)} for q, r in rankings.items()})
    cutoffs, theirs = (1, 3, 10, 100), {"hit": "hit_rate"}
    ours = per_query(list(rankings.values()), list(truths.values()), cutoffs)
    names = {
        name: theirs.get(name.split("@")[0], name.split("@")[0]) + "".join(name.partition("@")[1:]) for name in ours
    }
    expected = evaluate(Qrels(truths), strict, list(names.values()), return_mean=False)
    for name, its in names.items():
        assert ours[name] == pytest.approx(expected[its], abs=1e-9), name


def test_wilson_by_hand():
    # p = 0.9, n = 10, z = 1.959964: (0.9 + 0.19207 ± 1.959964 sqrt(0.009 + 0.0096036)) / 1.384146
    assert wilson(9, 10) == pytest.approx((0.595850, 0.982124), abs=1e-6)
    assert wilson(0, 10) == pytest.approx((0, 0.277533), abs=1e-6)
    assert wilson(10, 10) == pytest.approx((0.722467, 1), abs=1e-6)
    assert wilson(0, 0) == (0, 1)
    assert wilson(2.5, 5) == pytest.approx((0.5 - wilson(2.5, 5)[1] + 0.5, wilson(2.5, 5)[1]))  # symmetric about 0.5
    for successes, n in ((-1, 3), (4, 3)):
        with pytest.raises(ValueError):
            wilson(successes, n)


def test_bootstrap_interval():
    values = [0.0, 1.0] * 200 + [nan]
    low, high = bootstrap_ci(values, 4000, seed=3)
    # standard error 0.5 / sqrt(400) = 0.025
    assert (low, high) == pytest.approx((0.5 - 1.96 * 0.025, 0.5 + 1.96 * 0.025), abs=0.005)
    assert bootstrap_ci(values, 4000, seed=3) == (low, high) != bootstrap_ci(values, 4000, seed=4)
    assert bootstrap_ci([0.25] * 5) == (0.25, 0.25)
    assert all(map(isnan, bootstrap_ci([0.25])))
    assert not bootstrap_ci([])[0] > 0


def test_paired_test_by_hand():
    # differences 1, 1, 1: of 8 sign patterns only +++ and --- have a mean as large, so p is 2 in 8
    difference, low, high, p = paired_test([1, 1, 1, nan], [0, 0, 0, 0], 20_000)
    assert (difference, low, high) == (1, 1, 1)
    assert p == pytest.approx(2 / 8, abs=0.02)
    assert paired_test([1] * 40, [0] * 40, 500)[3] == 1 / 501, "p is never 0: no flip at all is one of the flips"
    # one query says nothing: both patterns are as large
    assert paired_test([0.7], [0.2])[3] == 1
    assert isnan(paired_test([0.7], [0.2])[1])
    assert paired_test([], [])[3] == 1 and paired_test([nan], [1.0])[3] == 1
    assert paired_test([0.5, 0.2], [0.5, 0.2]) == (0, 0, 0, 1)
    with pytest.raises(ValueError, match="same queries"):
        paired_test([1.0], [1.0, 2.0])


def test_paired_test_agrees_with_an_exact_permutation_test_and_is_antisymmetric():
    rng = np.random.default_rng(2)
    a, b = rng.random(12), rng.random(12) - 0.15
    d = a - b
    exact = np.mean([abs((np.array(s) * d).mean()) >= abs(d.mean()) - 1e-12 for s in product((-1, 1), repeat=12)])
    difference, low, high, p = paired_test(a, b, 20_000)
    assert p == pytest.approx(exact, abs=0.01)
    assert low < difference < high
    assert paired_test(b, a, 20_000)[0] == -difference and paired_test(b, a, 20_000)[3] == p
    assert paired_test(a, b, 20_000) == (difference, low, high, p)

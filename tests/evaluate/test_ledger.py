"""The ledger: nothing written is lost, and no comparison is called what it is not."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from ragbuild.core.config import load_config
from ragbuild.core.errors import UsageError
from ragbuild.core.records import TermEntry
from ragbuild.evaluate.ledger import Entry, Figure, append, compare, components_of, corpus_hash, find, new_entry, read
from ragbuild.index.staging import write_version
from ragbuild.index.versions import IndexVersion
from ragbuild.offline.prompts import load_prompt
from tests.conftest import FakeEmbedder, make_chunks, make_document

ROOT = Path(__file__).resolve().parents[2]
CONFIG = load_config()
PARTS = {
    "fusion": {"rrf_k": 60, "top_n": 50}, "rerank": {"model": "features"}, "prompt": {"version": "1.0"},
    "judge": {"name": "rubric"}, "code": {"online": "aa", "evaluate": "bb"},
}  # fmt: skip
scores = st.dictionaries(st.text("abcdef", min_size=1, max_size=2), st.none() | st.floats(0, 1), max_size=12)


def cases(*values: float | None) -> dict[str, float | None]:
    return {f"q{i}": v for i, v in enumerate(values, 1)}


def run(values: dict[str, Any] | None = None, **changes: Any) -> Entry:
    """A run with one metric, recall@10, unless `values` holds several; `changes`: fields, or a component's values."""
    values = cases(1, 0) if values is None else values
    per_query = values if values and isinstance(next(iter(values.values())), dict) else {"recall@10": values}
    parts = PARTS | {name: PARTS[name] | changes.pop(name) for name in set(changes) & set(PARTS)}
    kind = changes.pop("kind", "qdoc")
    fields = {"corpus_hash": "c1", "eval_sets": {"expert": "e1"}, "components": parts} | changes
    return new_entry(kind, CONFIG, per_query, **fields)


# --- entries and the file ---------------------------------------------------------------------------------------------


def test_nan_becomes_unmeasured_and_takes_no_part_in_the_mean():
    entry = run(cases(1, 0.5, math.nan, None))
    assert entry.metrics["recall@10"] == Figure(value=0.75, n=2, unmeasured=2)  # (1 + 0.5) / 2
    assert entry.per_query["recall@10"]["q3"] is None
    assert "NaN" not in entry.model_dump_json()
    assert run({"recall@10": {}}).metrics["recall@10"] == Figure(value=None, n=0)


def test_an_entry_that_miscounts_or_holds_nan_is_refused():
    data = run(cases(1, None)).model_dump()
    wrong = [{"value": 1.0, "n": 2, "unmeasured": 0}, {"value": math.nan, "n": 1, "unmeasured": 1}]
    wrong += [{"value": value, "n": 1, "unmeasured": 1} for value in (0.99, None)]  # not the mean of its cases
    for figure in wrong:
        with pytest.raises(ValidationError):
            Entry.model_validate(data | {"metrics": {"recall@10": figure}})


def test_what_was_appended_is_read_again_and_former_bytes_stay(tmp_path: Path):
    path = tmp_path / "out" / "ledger.jsonl"
    assert read(path) == ([], [])
    first, second = run(label="一\u2028二"), run(cases(1, None), label="two")
    append(path, first)
    before = path.read_bytes()
    append(path, second)
    assert path.read_bytes().startswith(before)
    assert read(path) == ([first, second], [])


def test_a_crash_in_the_middle_of_an_append_loses_nothing_that_was_written(tmp_path: Path):
    whole = tmp_path / "whole.jsonl"
    old, torn, new = run(label="old"), run(label="torn"), run(label="new")
    append(whole, old)
    start = whole.stat().st_size
    append(whole, torn)
    data = whole.read_bytes()
    for cut in (start, start + 1, start + 200, len(data) - 2, len(data) - 1, len(data)):
        path = tmp_path / f"{cut}.jsonl"
        path.write_bytes(data[:cut])
        append(path, new)
        entries, notes = read(path)
        complete = cut >= len(data) - 1  # all but the line end was written
        assert [e.label for e in entries] == (["old", "torn", "new"] if complete else ["old", "new"])
        assert len(notes) == (not complete and cut > start)
        assert all("line 2 is left out" in note for note in notes)
        assert path.read_bytes().startswith(data[:cut])


def test_two_processes_append_at_the_same_time(tmp_path: Path):
    path, template = tmp_path / "ledger.jsonl", tmp_path / "entry.json"
    template.write_text(run(cases(*[0.5] * 300)).model_dump_json(), encoding="utf-8")
    code = (
        "import sys; from pathlib import Path; from ragbuild.evaluate.ledger import Entry, append\n"
        "entry = Entry.model_validate_json(Path(sys.argv[2]).read_text())\n"
        "for i in range(20): append(Path(sys.argv[1]), entry.model_copy(update={'id': f'{sys.argv[3]}{i}'}))"
    )
    command = [sys.executable, "-c", code, str(path), str(template)]
    both = [subprocess.Popen([*command, name], cwd=ROOT) for name in "ab"]
    assert [process.wait(timeout=100) for process in both] == [0, 0]
    entries, notes = read(path)
    assert not notes and sorted(e.id for e in entries) == sorted(f"{n}{i}" for n in "ab" for i in range(20))
    for name in "ab":
        assert [e.id for e in entries if e.id[0] == name] == [f"{name}{i}" for i in range(20)]


def test_runs_are_found_by_id_beginning_label_and_place():
    one, two, three = (run(id_, label=label) for id_, label in ((None, "base"), (None, "try"), (None, "base")))
    one, two = one.model_copy(update={"id": "aa11"}), two.model_copy(update={"id": "ab22", "kind": "qdoca"})
    three = three.model_copy(update={"id": "ac33"})
    runs = [one, two, three]
    wanted = {"aa11": one, "ab": two, "last": three, "last-0": three, "last-2": one, "base": three, "try": two}
    assert {name: find(runs, name).id for name in wanted} == {name: e.id for name, e in wanted.items()}
    assert find(runs, "last-1", kind="qdoc") is one
    for name in ("a", "zz", "last-3", "last-", ""):
        with pytest.raises(UsageError, match="ab22  qdoca  try"):
            find(runs, name)
    with pytest.raises(UsageError, match="empty"):
        find([], "last")


def test_components_are_those_of_the_index_and_the_configuration(tmp_path: Path):
    def version(name: str, terms: list[TermEntry], prompt: str) -> IndexVersion:
        embedder = {"name": "fake", "dim": 64, "why": "configured"}
        write_version(tmp_path / name, make_chunks(["one", "two"]), [make_document()], terms, config=CONFIG,
                      encode=FakeEmbedder().encode_documents, embedder=embedder, prompt=prompt)  # fmt: skip
        return IndexVersion(tmp_path / name)

    prompt = load_prompt("initial_prompt").text
    plain = version("a", [], prompt)
    base = components_of(CONFIG, plain, "rubric")
    assert base == json.loads(json.dumps(base)) == components_of(CONFIG, plain, "rubric")

    def changed(other: dict[str, Any]) -> list[str]:
        return [name for name in base if base[name] != other[name]]

    def with_(**override: Any) -> dict[str, Any]:
        return components_of(
            CONFIG.with_overrides({k.replace("__", "."): v for k, v in override.items()}), plain, "rubric"
        )

    termed = version("b", [TermEntry(standard_term="OAuth")], prompt)
    assert changed(components_of(CONFIG, termed, "rubric")) == ["dictionary"]
    assert changed(components_of(CONFIG, version("c", [], prompt + "\nOne more.\n"), "rubric")) == ["prompt"]
    assert changed(components_of(CONFIG, plain, "openai")) == ["judge"]
    assert changed(with_(retrieve__rrf_k=30)) == ["fusion"]
    assert changed(with_(generate__generator="openai")) == ["generator"]
    assert changed(with_(llm__model="other")) == ["llm"]
    assert changed(with_(evaluate__bootstrap=100, gates__margin=0.1)) == []
    assert changed(with_(evaluate__dimensions=["credibility"])) == ["judge"], "with fewer, the worst of them is better"
    assert base["embedder"]["name"] == "fake" and base["dictionary"]["terms"] == 0


def test_the_corpus_hash_is_of_contents_and_states_in_any_order():
    a, b = make_document("a"), make_document("b")
    assert corpus_hash([a, b]) == corpus_hash([b, a])
    assert corpus_hash([a, b]) != corpus_hash([a, b.model_copy(update={"status": "legacy"})])
    assert corpus_hash([a, b]) != corpus_hash([a, b.model_copy(update={"content_hash": "other"})])


# --- comparing --------------------------------------------------------------------------------------------------------

LOW, HIGH = cases(*[0.25] * 8), cases(*[0.75] * 8)
RERANK = {"rerank": {"model": "none"}}


def test_one_change_that_helps_everywhere_is_an_improvement_and_the_other_way_a_loss():
    up = compare(run(LOW), run(HIGH, **RERANK))
    row = up.metrics[0]
    assert up.changed == {"rerank": "model: features -> none"} and not up.reasons
    assert (up.verdict, row.n, row.before, row.after, row.difference) == ("improvement", 8, 0.25, 0.75, 0.5)
    assert (row.low, row.high) == (0.5, 0.5) and row.p < 0.03  # all 8 signs alike: 2 of 256 flips, p = 0.008
    assert compare(run(HIGH), run(LOW, **RERANK)).verdict == "loss"
    assert "0.2500 -> 0.7500 (+0.5000" in str(up)
    assert "p < 0.001, n = 40" in str(compare(run(cases(*[0] * 40)), run(cases(*[1] * 40), **RERANK))), "never 0.000"


def test_few_cases_are_not_significant_and_n_is_said():
    few = compare(run(cases(0, 0, 0, 0)), run(cases(1, 1, 1, 1), **RERANK))  # 2 of 16 flips: p = 0.125
    assert few.verdict == "not significant at n = 4" and few.metrics[0].difference == 1
    assert compare(run(cases(0)), run(cases(1), **RERANK)).verdict == "not significant at n = 1"
    mixed = compare(run(cases(*[0, 1] * 20)), run(cases(*[1, 0] * 20), **RERANK))
    assert mixed.verdict == "not significant at n = 40"


def test_two_changed_components_are_refused_and_both_named():
    found = compare(run(LOW), run(HIGH, fusion={"rrf_k": 30}, **RERANK))
    assert found.verdict == "refused" == found.metrics[0].verdict
    assert "2 components changed: fusion (rrf_k: 60 -> 30); rerank (model: features -> none)" in found.reasons[0]
    new = run(HIGH, components=PARTS | {"rerank": {"model": "none"}, "translation": {"model": "m"}})
    assert "rerank (model: features -> none); translation (model: none -> m)" in compare(run(LOW), new).reasons[0]
    assert compare(new, run(LOW)).verdict == "refused", "one that is gone is a change too"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"eval_sets": {"expert": "e2"}}, "eval sets differ (expert: e1 -> e2)"),
        ({"corpus_hash": "c2"}, "corpora differ"),
        ({"judge": {"name": "openai"}}, "another judge scored them (name: rubric -> openai)"),
        ({"code": {"evaluate": "cc"}}, "code that measures changed"),
    ],
    ids=str,
)
def test_what_was_not_measured_in_the_same_way_is_refused(change: dict[str, Any], reason: str):
    found = compare(run(LOW), run(HIGH, **change))
    assert found.verdict == "refused" and reason in found.reasons[0]


def test_retrieval_and_answer_figures_are_never_subtracted():
    found = compare(run(LOW), run(HIGH, kind="qdoca"))
    assert found.verdict == "refused" and not found.metrics and "never subtracted" in found.reasons[0]


def test_other_cases_are_refused_and_unmeasured_ones_too():
    found = compare(run(LOW), run(HIGH | {"q9": 1}, **RERANK))
    assert found.verdict == "refused" and "1 (q9) in one run only" in found.reasons[0]
    assert found.metrics[0].n == 8 == compare(run(HIGH | {"q9": 1}), run(LOW, **RERANK)).metrics[0].n
    found = compare(run(cases(*[0.25] * 8, 0)), run(cases(*[0.75] * 8, None), **RERANK))  # the bad case was not judged
    assert found.verdict == "refused: 1 (q9) case(s) measured in one run only"
    both = compare(run(cases(*[0.25] * 8, None)), run(cases(*[0.75] * 8, math.nan), **RERANK))
    assert both.verdict == "improvement" and both.metrics[0].n == 8
    assert compare(run(cases(None)), run(cases(None), **RERANK)).verdict == "unmeasured"


def test_the_same_thing_twice_must_give_the_same_values():
    assert compare(run(LOW), run(LOW)).verdict == "no difference at n = 8"
    found = compare(run(LOW), run(LOW | {"q3": 0.5}))
    assert found.verdict == "refused" and not found.changed
    assert found.reasons == (
        "no component changed, yet 1 (q3) case(s) were scored otherwise: the run is not deterministic",
    )


def test_the_headline_is_named_before_and_the_others_are_exploratory():
    names = [f"m{i}" for i in range(10)]
    one, two = run({m: LOW for m in names}), run({m: HIGH for m in names}, **RERANK)
    first, *others = compare(one, two).metrics
    assert first.verdict == "improvement" and first.p_adjusted is None
    # the same values: 9 tests at p = 0.008 each
    assert {m.verdict for m in others} == {"not significant at n = 8"}
    assert all(m.p_adjusted == pytest.approx(9 * m.p) for m in others)
    assert compare(one, two, headline="m3").metrics[3].verdict == "improvement"
    pair = compare(run({"a": LOW, "b": LOW}), run({"a": HIGH, "b": HIGH, "c": HIGH}, **RERANK)).metrics
    assert pair[1].verdict == "improvement (exploratory)"
    assert pair[2].verdict == "refused: 8 (q1, q2, q3, q4, q5 …) case(s) measured in one run only"
    with pytest.raises(UsageError, match="'recall@5' is not measured"):
        compare(one, two, headline="recall@5")


@given(scores)
def test_a_run_against_itself_shows_no_difference(values: dict[str, float | None]):
    one = run({"recall@10": values})
    found = compare(one, one, 100)
    assert found.verdict in ("unmeasured", f"no difference at n = {one.metrics['recall@10'].n}")
    assert Entry.model_validate_json(one.model_dump_json()) == one


@given(scores, st.randoms())
def test_the_order_of_the_cases_changes_nothing(values: dict[str, float | None], random: Any):
    order = list(values)
    random.shuffle(order)
    other = {case: None if v is None else 1 - v for case, v in values.items()}
    one, two = run({"m": values}), run({"m": other}, **RERANK)
    mixed = two.model_copy(update={"per_query": {"m": {case: other[case] for case in order}}})
    assert compare(one, two, 100) == compare(one, mixed, 100)

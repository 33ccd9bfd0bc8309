"""Eval sets: bad rows named, spans and pages turned into chunk ids, halves, sets that survive re-chunking."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragbuild.core.config import ChunkConfig
from ragbuild.core.errors import InputRefused
from ragbuild.core.records import EvalPair, ExpertCase, GroundSpan, PageRef
from ragbuild.core.store import write_json, write_records
from ragbuild.offline.chunk import chunk_document
from ragbuild.offline.evalset import (
    ChunkMap,
    expert_cases,
    half_of,
    load_expert,
    load_pairs,
    pair_cases,
    set_hash,
)
from tests.conftest import make_chunks, make_document

GUIDE = make_document("guide", doc_source="guide.md")
TEXTS = ["The lid is blue and 3 mm thick.", "Open the lid with key 7.", "Close the lid again."]
KEY = GUIDE.key


def pair(start: int, end: int, *more: tuple[int, int], **fields) -> EvalPair:
    spans = [GroundSpan(doc_key=KEY, start=a, end=b) for a, b in ((start, end), *more)]
    base = {
        "pair_id": "q-1", "query": "How thick is the lid?", "gt_answer": "3 mm", "gt_keywords": ["3 mm"],
        "query_type": "factual", "gen_source": "single_chunk", "language": "en", "gt_spans": spans,
    }  # fmt: skip
    return EvalPair.model_validate(base | fields)


def case(**fields) -> ExpertCase:
    base = {"case_id": "en-1", "query": "lid thickness?", "language": "en", "reference_answer": "3 mm"}
    return ExpertCase.model_validate(base | {"ground": [PageRef(doc_source="guide.md", pages=(1,))]} | fields)


# --- reading --------------------------------------------------------------------------------------------------------


def test_a_set_comes_back_as_it_was_written(tmp_path: Path):
    write_records(tmp_path / "set.json", [pair(0, 5), pair(6, 9, pair_id="q-2")])
    assert [p.pair_id for p in load_pairs(tmp_path / "set.json")] == ["q-1", "q-2"]
    write_json(tmp_path / "expert.json", {"cases": [case().model_dump(mode="json")]})
    assert load_expert(tmp_path / "expert.json") == [case()]
    assert set_hash(tmp_path / "set.json") != set_hash(tmp_path / "expert.json")


def test_every_bad_row_is_named(tmp_path: Path):
    good = pair(0, 5).model_dump(mode="json")
    rows = [good, good | {"query_type": "funny"}, {"pair_id": "q-3"}, good, "text", good | {"pair_id": ""}]
    (tmp_path / "set.json").write_text(json.dumps(rows), encoding="utf-8")
    with pytest.raises(InputRefused) as error:
        load_pairs(tmp_path / "set.json")
    said = str(error.value)
    assert "5 bad row(s)" in said
    assert "row 2 (q-1): query_type" in said and "row 3 (q-3)" in said and "row 4: pair_id q-1 stands twice" in said
    assert "row 5 (no pair_id)" in said and "row 6 (no pair_id)" in said


@pytest.mark.parametrize("text", ["{}", '"no list"', "[1,", ""])
def test_a_file_that_is_no_set_is_refused(tmp_path: Path, text: str):
    (tmp_path / "set.json").write_text(text, encoding="utf-8")
    with pytest.raises(InputRefused):
        load_pairs(tmp_path / "set.json")


def test_an_answerable_case_needs_ground_and_a_judged_one_its_answer(tmp_path: Path):
    row = case().model_dump(mode="json")
    write_json(tmp_path / "x.json", {"cases": [row | {"ground": []}, row | {"case_id": "en-2", "human_score": 1}]})
    with pytest.raises(InputRefused, match=r"(?s)needs ground truth.*given_answer and human_score go together"):
        load_expert(tmp_path / "x.json")


# --- places ---------------------------------------------------------------------------------------------------------


def test_a_span_in_two_overlapping_children_is_one_group_deepest_first():
    """[0, 40) and [20, 60): a span [22, 30) lies 2 deep in the second and 10 deep in the first."""
    chunks = make_chunks(["x" * 80], GUIDE)
    parent, child = chunks
    first, second = (
        child.model_copy(update={"chunk_id": i, "content": "x" * 40, "span": span})
        for i, span in (("c-1", (0, 40)), ("c-2", (20, 60)))
    )
    found = ChunkMap([parent, first, second])
    assert found.holding(GroundSpan(doc_key=KEY, start=22, end=30)) == [("c-1", "c-2")]
    assert found.holding(GroundSpan(doc_key=KEY, start=0, end=20)) == [("c-1",)]
    assert found.holding(GroundSpan(doc_key=KEY, start=10, end=50)) == [("c-1",), ("c-2",)]  # no child holds all of it
    assert found.holding(GroundSpan(doc_key=KEY, start=60, end=70)) == []
    assert found.holding(GroundSpan(doc_key="kb/other/v1/all", start=0, end=5)) == []


CUTS = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 30)), min_size=1, max_size=6)


def cut(cuts, document=GUIDE) -> list:
    """A parent of 100 characters and children [start, start + length), named by their number."""
    parent, child = make_chunks(["x" * 100], document)
    spans = [(a, a + n) for a, n in cuts]
    prefix = document.doc_id
    return [parent, *(child.model_copy(update={"chunk_id": f"{prefix}-{i}", "span": s, "content": "x" * (s[1] - s[0])})
                      for i, s in enumerate(spans))]  # fmt: skip


@given(CUTS, st.integers(0, 90), st.integers(1, 40))
def test_whatever_the_chunks_a_group_holds_all_of_the_span_or_groups_each_a_part(cuts, start: int, length: int):
    found, span = ChunkMap(cut(cuts)), GroundSpan(doc_key=KEY, start=start, end=start + length)
    inside = {f"guide-{i}" for i, (a, n) in enumerate(cuts) if a <= span.start and span.end <= a + n}
    touching = {f"guide-{i}" for i, (a, n) in enumerate(cuts) if a < span.end and span.start < a + n}
    groups = found.holding(span)
    assert [set(g) for g in groups] == [inside] if inside else {g[0] for g in groups} == touching
    assert all(len(g) == len(set(g)) for g in groups) and (inside or all(len(g) == 1 for g in groups))


@given(CUTS, CUTS, st.lists(st.integers(0, 40), min_size=2, max_size=2), st.lists(st.integers(0, 1), max_size=3))
def test_other_places_only_widen_the_group_that_they_stand_for(cuts, others, starts, of):
    """A pair with two ground spans and other places for either: no group narrower, nothing else in it."""
    other = make_document("faq", doc_source="faq.md")
    chunks = ChunkMap([*cut(cuts), *cut(others, other)])
    spans = [GroundSpan(doc_key=KEY, start=s, end=s + 1) for s in starts]
    also = [GroundSpan(doc_key=other.key, start=5 * n, end=5 * n + 1) for n in range(len(of))]
    plain = pair(0, 1, gt_spans=spans, gt_keywords=[])
    (without, lost), (wide, _) = (
        pair_cases([p], chunks)
        for p in (plain, plain.model_copy(update={"also_spans": tuple(also), "also_of": tuple(of)}))
    )
    if lost:
        assert lost == ["q-1"] and not without and not wide
        return
    own, alternatives = ({i for x in some for g in chunks.holding(x) for i in g} for some in (spans, also))
    assert {i for g in wide[0].groups for i in g} <= own | alternatives
    assert all(any(set(group) <= set(w) or set(w) <= set(group) for w in wide[0].groups) for group in without[0].groups)
    assert {s.doc_key for s in also} <= set(wide[0].documents)


def test_another_place_of_one_half_is_no_place_of_the_other():
    other = make_document("faq", doc_source="faq.md")
    chunks = ChunkMap([*make_chunks(TEXTS, GUIDE), *make_chunks(["It is 3 mm."], other)])
    also = [GroundSpan(doc_key=other.key, start=0, end=11)]
    for of, groups in (
        ((0,), (("c-guide-000", "c-faq-000"), ("c-guide-001",))),
        ((1,), (("c-guide-000",), ("c-guide-001", "c-faq-000"))),
        ((), (("c-guide-000",), ("c-guide-001",))),
    ):  # fmt: skip
        (found,), _ = pair_cases([pair(0, 31, (33, 50), also_spans=also, also_of=of, gt_keywords=["3 mm"])], chunks)
        assert found.groups == groups and found.documents == (KEY, other.key)


def test_pages_and_quotes():
    chunks = make_chunks(TEXTS, GUIDE)
    chunks[2] = chunks[2].model_copy(update={"page": 2, "page_end": 2})
    found = ChunkMap(chunks)
    whole = found.spans_of(PageRef(doc_source="guide.md", pages=(2,)))
    assert [(s.start, s.end) for s in whole] == [(33, 57)]
    quoted = found.spans_of(PageRef(doc_source="guide.md", pages=(1,), quotes=("3 mm\n thick",)))  # line breaks differ
    assert [(s.start, s.end) for s in quoted] == [(20, 30)]
    for ref, why in (
        (PageRef(doc_source="other.md", pages=(1,)), "no document 'other.md'"),
        (PageRef(doc_source="guide.md", pages=(3,)), r"no chunk on page 3 \(its last page is 2\)"),
        (PageRef(doc_source="guide.md", pages=(1,), quotes=("key 7",)), "does not hold the quote 'key 7'"),
    ):
        with pytest.raises(InputRefused, match=why):
            found.spans_of(ref)


def test_pairs_whose_place_is_gone_or_holds_another_text_are_lost():
    chunks = ChunkMap(make_chunks(TEXTS, GUIDE))
    moved = pair(33, 50, pair_id="moved")  # the span holds "Open the lid …" by now
    gone = pair(4000, 4005, pair_id="gone")
    half = pair(0, 31, (4000, 4005), pair_id="half")
    cases, lost = pair_cases([pair(0, 31), moved, gone, half], chunks)
    assert [c.id for c in cases] == ["q-1"] and lost == ["moved", "gone", "half"]
    assert cases[0].groups == (("c-guide-000",),) and cases[0].parents == ("p-guide",)


def test_other_places_of_the_answer_count_as_right_too():
    other = make_document("faq", doc_source="faq.md")
    chunks = ChunkMap([*make_chunks(TEXTS, GUIDE), *make_chunks(["It is 3 mm."], other)])
    also = [GroundSpan(doc_key=other.key, start=0, end=11)]
    (found,), lost = pair_cases([pair(0, 31, also_spans=also)], chunks)
    assert not lost and found.groups == (("c-guide-000", "c-faq-000"),)
    assert found.documents == (KEY, other.key) and found.truth == ("c-guide-000",)
    assert found.parent_groups == (("p-guide", "p-faq"),)


def test_a_pair_of_two_documents_is_for_tuning_if_one_of_them_is():
    tuning, test = (next(i for i in map(str, range(50)) if half_of(i) == half) for half in ("tuning", "test"))
    docs = [make_document(i) for i in (test, tuning)]
    chunks = ChunkMap([c for d in docs for c in make_chunks(["3 mm here"], d)])
    spans = [GroundSpan(doc_key=d.key, start=0, end=4) for d in docs]
    for chosen, half in ((spans, "tuning"), (spans[:1], "test")):
        (found,), _ = pair_cases([pair(0, 4, gt_spans=chosen)], chunks)
        assert found.half == half
    grounds = [PageRef(doc_source=d.doc_source, pages=(1,)) for d in docs]
    for chosen, half in ((grounds, "tuning"), (grounds[:1], "test")):
        (found,) = expert_cases([case(ground=chosen)], chunks)
        assert found.half == half
    nested = make_document(f"folder/{test}")  # an id made from a path: the half is by all of it
    (found,), _ = pair_cases(
        [pair(0, 4, gt_spans=[GroundSpan(doc_key=nested.key, start=0, end=4)])],
        ChunkMap(make_chunks(["3 mm here"], nested)),
    )
    assert found.half == half_of(f"folder/{test}")


@given(
    st.sets(st.text("abcdef/-", min_size=1, max_size=8).filter(lambda t: t == t.strip("/- ")), min_size=1, max_size=6)
)
def test_the_test_half_never_holds_a_document_of_the_tuning_half(names: set[str]):
    docs = [make_document(n) for n in sorted(names)]
    chunks = ChunkMap([c for d in docs for c in make_chunks(["3 mm here"], d)])
    spans = [GroundSpan(doc_key=d.key, start=0, end=4) for d in docs]
    (found,), _ = pair_cases([pair(0, 4, gt_spans=spans)], chunks)
    assert (found.half == "test") == all(half_of(d.doc_id) == "test" for d in docs)


def test_the_half_is_the_same_for_all_versions_and_stays():
    assert {half_of(f"doc-{i}") for i in range(40)} == {"tuning", "test"}
    assert (half_of("admin-guide"), half_of("faq-en")) == ("tuning", "test"), "as it was when thresholds were set"


# --- expert cases ---------------------------------------------------------------------------------------------------


def test_expert_cases_get_chunk_ids_and_their_alternatives():
    other = make_document("faq", doc_source="faq.md")
    chunks = ChunkMap([*make_chunks(TEXTS, GUIDE), *make_chunks(["It is 3 mm."], other)])
    quoted = PageRef(doc_source="guide.md", pages=(1,), quotes=("3 mm thick",))
    also = PageRef(doc_source="faq.md", pages=(1,))
    two = PageRef(doc_source="guide.md", pages=(1,), quotes=("3 mm thick", "key 7"))
    one, both, none = expert_cases(
        [
            case(ground=[quoted], also=[also], gt_keywords=["3 mm|3 millimetres"]),
            case(case_id="en-2", ground=[two], also=[also]),
            case(case_id="en-3", ground=[], answerable=False, kind="close_miss", near="guide.md"),
        ],
        chunks,
    )
    assert one.groups == (("c-guide-000", "c-faq-000"),) and one.keywords == ("3 mm|3 millimetres",)
    assert both.groups == (("c-guide-000",), ("c-guide-001",)) and both.parent_groups == (("p-guide",),)
    assert both.documents == (KEY, other.key)  # of which of the two the other place is, is not known
    assert not none.answerable and not none.groups and none.half == half_of("guide")


def test_cases_that_cannot_be_mapped_are_an_error_that_names_each():
    gone, far = (PageRef(doc_source=s, pages=(p,)) for s, p in (("gone.md", 1), ("guide.md", 9)))
    bad = [case(ground=[gone]), case(case_id="en-2", ground=[far])]
    with pytest.raises(InputRefused, match=r"(?s)2 expert case\(s\).*en-1: no document 'gone.md'.*en-2: .*page 9"):
        expert_cases(bad, ChunkMap(make_chunks(TEXTS, GUIDE)))


def test_cases_whose_document_has_left_are_lost_where_that_is_no_mistake():
    gone, here = (PageRef(doc_source=s, pages=(1,)) for s in ("gone.md", "guide.md"))
    lost: list[str] = []
    chunks = ChunkMap(make_chunks(TEXTS, GUIDE))
    (found,) = expert_cases([case(ground=[gone]), case(case_id="en-2", ground=[here], also=[gone])], chunks, lost)
    assert lost == ["en-1"] and found.id == "en-2" and found.documents == (KEY,), "the other place is not needed"
    spans = [GroundSpan(doc_key=key, start=0, end=5) for key in (KEY, "default/gone/v1/all")]
    (found,), _ = pair_cases([pair(0, 31, also_spans=spans[1:])], chunks)
    assert found.documents == (KEY,), "and a document that is not there is none that may be cited"


def test_of_two_versions_with_one_file_name_the_one_that_holds_the_quote_is_meant():
    old = GUIDE.model_copy(update={"doc_version": "v3.4", "status": "legacy"})
    chunks = ChunkMap([*make_chunks(["The lid is 2 mm thick."], old, "old"), *make_chunks(TEXTS, GUIDE)])

    def keys(*quotes: str) -> set[str]:
        return {s.doc_key for s in chunks.spans_of(PageRef(doc_source="guide.md", pages=(1,), quotes=quotes))}

    assert keys("2 mm thick") == {old.key} and keys("3 mm thick") == {KEY}
    assert keys("mm thick") == keys() == {KEY}, "both hold it: the one that a search finds by itself"
    with pytest.raises(InputRefused, match="does not hold the quote '9 mm'"):
        keys("9 mm")


# --- re-chunking, versions ------------------------------------------------------------------------------------------


class Words:
    name = "words"

    def count(self, texts):
        return [len(text.split()) for text in texts]


MARKDOWN = "# Guide\n\n" + "\n\n".join(
    f"## Part {n}\n\n" + " ".join(f"Item {n}.{k} weighs {n * 10 + k} kg." for k in range(12)) for n in range(1, 6)
)


@given(st.integers(20, 60), st.integers(16, 30), st.integers(1, 5), st.integers(0, 11))
def test_a_set_survives_re_chunking(parent: int, child: int, n: int, k: int):
    """Whatever the sizes, the first child of a group holds the very sentence, or its parts together do."""
    config = ChunkConfig(parent_tokens=max(parent, 32, child), child_tokens=child, overlap_tokens=4)
    result = chunk_document(GUIDE, MARKDOWN, lambda offset: 1, config=config, counter=Words())
    sentence = f"Item {n}.{k} weighs {n * 10 + k} kg."
    start = MARKDOWN.index(sentence)
    chunks = ChunkMap(result.chunks)
    cases, lost = pair_cases([pair(start, start + len(sentence), gt_keywords=[f"{n * 10 + k} kg"])], chunks)
    assert not lost
    assert all(f"Item {n}.{k}" in chunks.child[i].content or "kg." in chunks.child[i].content for i in cases[0].truth)


def test_the_wrong_version_never_counts_as_right():
    old = make_document("guide", doc_version="v3", doc_source="guide-3.md", status="legacy")
    chunks = ChunkMap([*make_chunks(TEXTS, GUIDE), *make_chunks(TEXTS, old, parent="old")])
    (found,), _ = pair_cases([pair(0, 31)], chunks)
    assert found.truth == ("c-guide-000",) and found.documents == (KEY,)

"""Chunkers scored by characters: measures by hand, the plain splitter, a small set from end to end, faults named."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragbuild.core.config import load_config
from ragbuild.core.errors import InputRefused
from ragbuild.core.text import TokenCounter
from ragbuild.evaluate import bench as bench_module
from ragbuild.evaluate.spans import fixed_windows, precision_omega, score_chunkers, span_scores
from tests.conftest import FakeEmbedder


def test_measures_by_hand():
    # 20 characters wanted, of which [10, 20) is found; 60 + 30 retrieved
    excerpts = [("a", 10, 20), ("a", 100, 110)]
    retrieved = [("a", 0, 60), ("b", 100, 130)]
    assert span_scores(excerpts, retrieved) == pytest.approx((10 / 20, 10 / 90, 10 / (90 + 20 - 10)))
    # two chunks that overlap are counted twice below the line, what they find once above it
    assert span_scores(excerpts, [("a", 0, 20), ("a", 10, 30)]) == pytest.approx((10 / 20, 10 / 40, 10 / (40 + 10)))
    assert span_scores(excerpts, [("a", 10, 20), ("a", 100, 110)]) == (1, 1, 1)
    assert span_scores(excerpts, [("b", 10, 20)]) == (0, 0, 0)
    assert span_scores(excerpts, []) == (0, 0, 0)
    assert span_scores([("a", 0, 10), ("a", 5, 15)], [("a", 0, 15)]) == (1, 1, 1)  # excerpts may overlap too


def test_precision_omega_by_hand():
    chunks = [("a", 0, 15), ("a", 15, 40), ("a", 40, 90), ("b", 0, 50)]
    assert precision_omega([("a", 10, 20)], chunks) == 10 / 40
    assert precision_omega([("a", 0, 15)], chunks) == 1  # the next chunk only touches it
    assert precision_omega([("a", 85, 95)], chunks) == 5 / 55  # the last five lie in no chunk
    assert precision_omega([("c", 0, 5)], chunks) == 0


places = st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 40), st.integers(1, 20)), max_size=5).map(
    lambda rows: [(d, start, start + length) for d, start, length in rows]
)


@given(places.filter(bool), places, places)
def test_recall_never_falls_with_more_chunks_and_iou_is_the_least(excerpts, some, more):
    recall, precision, iou = span_scores(excerpts, some)
    assert 0 <= iou <= min(recall, precision) <= 1
    assert span_scores(excerpts, some + more)[0] >= recall
    assert 0 <= precision_omega(excerpts, some) <= 1


@pytest.mark.parametrize("text", ["The pump stops when it rains. " * 60, "过滤网堵塞时水泵会停机，请清洗。" * 40])
def test_windows_hold_as_many_tokens_as_fit_and_overlap(text):
    counter = TokenCounter()
    for size, overlap in ((40, 0), (40, 12)):
        windows = fixed_windows(text, size, overlap, counter)
        counts = counter.count([text[a:b] for a, b in windows])
        assert max(counts) <= size and min(counts[:-1]) > size - 6
        assert windows[0][0] == 0 and windows[-1][1] == len(text.rstrip())
        for (_, end), (start, _) in pairwise(windows):
            if overlap:
                assert 0 < counter.count([text[start:end]])[0] <= overlap
            else:
                assert start >= end and not text[end:start].strip()
    assert fixed_windows("", 40, 0, counter) == [] == fixed_windows(" \n", 40, 0, counter)
    assert fixed_windows("x" * 400, 16, 4, counter) == [(0, 400)]  # a word is not cut


@given(st.text(alphabet="ab 水泵\n", max_size=80), st.integers(2, 9), st.integers(0, 4))
def test_windows_go_on_and_leave_nothing_out(text, size, overlap):
    counter = type("Letters", (), {"count": lambda self, texts: [len(t.replace(" ", "")) for t in texts]})()
    windows = fixed_windows(text, size, min(overlap, size // 2), counter)
    held = {i for a, b in windows for i in range(a, b)}
    assert {i for i, c in enumerate(text) if not c.isspace()} <= held
    assert windows == sorted(set(windows))


GUIDE = (
    "# Pumps\n\nThe pump stops when the filter is clogged. Clean it with water.\n\n"
    "# Remote\n\nThe battery lasts a year.\n"
)
ZH = "# 水泵\n\n过滤网堵塞时水泵停机。\n\n# 遥控器\n\n电池可用一年。\n"


def write_set(folder: Path, spans: str | None = None) -> Path:
    rows = {
        "full_documents": [{"_id": "guide", "title": "Guide", "text": GUIDE}, {"_id": "指南", "text": ZH}],
        "queries": [
            {"_id": "q1", "text": "battery lasts"},
            {"_id": "q2", "text": "水泵 停机"},
            {"_id": "x", "text": "-"},
        ],
    }
    for name, items in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(i) + "\n" for i in items), encoding="utf-8")
    battery, stops = "The battery lasts a year.", "过滤网堵塞时水泵停机。"
    wanted = [("q1", "guide", GUIDE, battery), ("q2", "指南", ZH, stops)]
    lines = [
        {"_id": q, "corpus": d, "references": [
            {"content": part, "start_index": text.index(part), "end_index": text.index(part) + len(part)}
        ]} for q, d, text, part in wanted
    ]  # fmt: skip
    text = "".join(json.dumps(line) + "\n" for line in lines) if spans is None else spans
    (folder / "spans.jsonl").write_text(text, encoding="utf-8")
    return folder


def test_a_small_set(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_module, "load_embedder", lambda name, config: FakeEmbedder())
    config = load_config(overrides={"chunk.child_tokens": 16, "chunk.parent_tokens": 32, "chunk.overlap_tokens": 4})
    told = []
    rows = score_chunkers(write_set(tmp_path), config, k=1, progress=lambda *what: told.append(what))
    assert [row["chunker"] for row in rows] == ["parent-child 32/16/4", "fixed 16/0", "fixed 16/4"]
    assert {what for _, _, what in told} == {row["chunker"] for row in rows}
    own, plain, _ = rows
    assert (own["queries"], own["k"], own["embedder"]) == (2, 1, "fake")
    # each excerpt is a section's whole text under its heading, and that child is found first
    assert own["recall"] == 1 and own["chunks"] >= 4
    expected = (25 / len("# Remote\n\nThe battery lasts a year.") + 11 / len("# 水泵\n\n过滤网堵塞时水泵停机。")) / 2
    assert own["precision"] == own["iou"] == pytest.approx(expected, abs=1e-4) == own["precision_omega"]
    assert plain["precision_omega"] < own["precision_omega"]  # windows run over the headings
    assert all(low <= row[m] <= high for row in rows for m, (low, high) in row["intervals"].items())
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows


@pytest.mark.parametrize(
    ("spans", "named"),
    [
        ("{", "spans.jsonl, line 1"),
        ('{"_id": "q1", "corpus": "guide", "references": []}\n', "line 1.*references"),
        (
            '{"_id": "q1", "corpus": "other", "references": [{"content": "x", "start_index": 0, "end_index": 1}]}',
            "other",
        ),
        (
            '{"_id": "q1", "corpus": "guide", "references": [{"content": "x", "start_index": 0, "end_index": 1}]}',
            "at 0",
        ),
        ("\n", "no excerpts"),
    ],
)
def test_a_malformed_set_is_refused_with_file_and_line(tmp_path, spans, named):
    with pytest.raises(InputRefused, match=named):
        score_chunkers(write_set(tmp_path, spans), load_config())

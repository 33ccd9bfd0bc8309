"""Sets in BEIR's layout: figures by hand on a tiny set, files for other tools, faults named, advice from intervals."""

from __future__ import annotations

import io
import json
from math import log2
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest

from ragbuild.core.config import load_config
from ragbuild.core.errors import InputRefused, UsageError
from ragbuild.evaluate import bench as module
from ragbuild.evaluate.beir import write_runs
from ragbuild.evaluate.bench import advise, bench, margins, print_bench
from tests.conftest import SHARED, FakeEmbedder

CORPUS = [
    {"_id": "doc 1", "title": "Pumps", "text": "The pump stops when the filter is clogged."},
    {"_id": "doc 2", "title": "", "text": "Replace the battery of the remote control."},
    {"_id": "三 号", "title": "水泵", "text": "过滤网堵塞时水泵停机。"},
    {"_id": "50%20off", "title": None, "text": "Prices are half off in May."},
    {"_id": "empty", "text": ""},
]
QUERIES = [
    {"_id": "q 1", "text": "why does the pump stop"},
    {"_id": "q2", "text": "水泵 停机"},
    {"_id": "q3", "text": "half off prices"},
    {"_id": "none relevant", "text": "battery"},
    {"_id": "unjudged", "text": "filter"},
]
QRELS = [
    ("q 1", "doc 1", 2),
    ("q 1", "gone", 1),
    ("q2", "三 号", 1),
    ("q3", "50%20off", 1),
    ("none relevant", "doc 2", 0),
]


def write_set(folder: Path, corpus=CORPUS, queries=QUERIES, qrels=QRELS, name: str = "qrels.tsv") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for file, rows in (("corpus", corpus), ("queries", queries)):
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (folder / f"{file}.jsonl").write_text(text, encoding="utf-8")
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    lines = ["query-id\tcorpus-id\tscore", *("\t".join(map(str, row)) for row in qrels)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


@pytest.fixture
def embedder(monkeypatch) -> FakeEmbedder:
    fake = FakeEmbedder()
    monkeypatch.setattr(module, "load_embedder", lambda name, config: fake)
    return fake


def test_figures_of_a_tiny_set_by_hand(tmp_path, embedder):
    told = []
    result = bench(write_set(tmp_path / "tiny"), load_config(), progress=lambda *what: told.append(what))
    assert (result["set"], result["documents"], result["queries"], result["unjudged"]) == ("tiny", 5, 4, 1)
    assert (result["unmeasured"], result["relevant_not_in_corpus"]) == (1, 1)
    assert (result["embedder"], result["reranker"], result["stand_in"]) == ("fake", "features", True)
    # q 1: the first of two relevant documents, the other is nowhere; q2 and q3: first; the fourth has no relevant one
    ndcg = (2 / (2 + 1 / log2(3)) + 1 + 1) / 3
    expected = {"ndcg@10": ndcg, "recall@10": 2.5 / 3, "recall@100": 2.5 / 3, "mrr@10": 1}
    assert list(result["routes"]) == ["lexical", "dense", "hybrid", "rerank"]
    assert all(figures == pytest.approx(expected, abs=1e-4) for figures in result["routes"].values())
    assert set(result["queries_per_second"]) == set(result["routes"]) and min(result["queries_per_second"].values()) > 0
    assert result["memory_mb"] >= 0
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    assert {what.partition(": ")[2] for _, _, what in told} == {"documents", *result["routes"]}


def test_a_second_run_is_identical_and_encodes_no_document(tmp_path, embedder):
    folder = write_set(tmp_path / "twice", [*CORPUS, {"_id": "new", "text": "Something no other test has encoded 42."}])
    first = bench(folder, load_config(), runs=tmp_path / "a")
    embedder.encoded.clear()
    second = bench(folder, load_config(), runs=tmp_path / "b")
    assert set(embedder.encoded) <= {q["text"] for q in QUERIES} | {"warm up 预热"}
    assert {k: first[k] for k in ("routes", "advice")} == {k: second[k] for k in ("routes", "advice")}
    files = sorted(p.name for p in (tmp_path / "a" / "twice").iterdir())
    assert files == ["dense.trec", "hybrid.trec", "lexical.trec", "qrels.trec", "rerank.trec"]
    for name in files:
        assert (tmp_path / "a/twice" / name).read_bytes() == (tmp_path / "b/twice" / name).read_bytes()


def test_beir_s_own_place_of_the_judgements_and_a_mark_at_the_start(tmp_path, embedder):
    here = bench(write_set(tmp_path / "a"), load_config())
    there = write_set(tmp_path / "b", name="qrels/test.tsv")
    for name in ("corpus.jsonl", "queries.jsonl", "qrels/test.tsv"):
        text = (there / name).read_text(encoding="utf-8")
        (there / name).write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode() + b"\r\n")
    assert bench(there, load_config())["routes"] == here["routes"]


def test_the_lexical_route_alone_needs_no_model(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "load_embedder", lambda name, config: pytest.fail("no model is needed"))
    result = bench(write_set(tmp_path / "tiny"), load_config(), routes=("lexical",))
    assert list(result["routes"]) == ["lexical"] and result["embedder"] is None and result["reranker"] is None
    assert "To advise" in result["advice"]["text"]
    only = load_config(overrides={"retrieve.routes": ["lexical"]})
    both = bench(tmp_path / "tiny", only, routes=("lexical", "hybrid"))
    assert both["routes"]["lexical"] == both["routes"]["hybrid"] == result["routes"]["lexical"]


def test_run_files_are_read_by_ranx_to_the_same_figures(tmp_path, embedder):
    """Ids with blanks and with % stay apart and can be had back.

    ranx compiles itself anew for each length of the longest id: it is 5 here, as in test_metrics.
    """
    from ranx import Qrels, Run, evaluate

    names = [f"{'%' if i < 3 else 'd '}{chr(65 + i)}" for i in range(40)]
    corpus = [{"_id": name, "text": f"word{i % 7} common word{i % 3} text"} for i, name in enumerate(names)]
    queries = [{"_id": f"q {i}", "text": f"word{i} common word{i % 3}"} for i in range(7)]
    qrels = [(f"q {i}", names[j], 1 + j % 2) for i in range(7) for j in range(i, 40, 9)]
    folder = write_set(tmp_path / "ties", corpus, queries, qrels)
    result = bench(folder, load_config(), runs=tmp_path / "runs")
    judged = Qrels.from_file(str(tmp_path / "runs/ties/qrels.trec"), kind="trec")
    for route, figures in result["routes"].items():
        run = Run.from_file(str(tmp_path / f"runs/ties/{route}.trec"), kind="trec")
        theirs = evaluate(judged, run, list(figures), return_mean=True)
        assert {name: round(float(value), 4) for name, value in theirs.items()} == pytest.approx(figures, abs=1e-4)
    first = (tmp_path / "runs/ties/lexical.trec").read_text(encoding="utf-8").splitlines()[0].split()
    assert len(first) == 6 and unquote(first[0]) == "q 0" and unquote(first[2]) in names


def test_run_files_keep_the_order_and_all_judgements(tmp_path):
    write_runs(tmp_path, ["q\t1"], {"lexical": [["b", "a　c"]]}, [{"b": 2.0, "x": 0.0}])
    assert (tmp_path / "lexical.trec").read_text(encoding="utf-8") == (
        "q%091 Q0 b 1 1.000000000 ragbuild-lexical\nq%091 Q0 a%E3%80%80c 2 0.500000000 ragbuild-lexical\n"
    )
    assert (tmp_path / "qrels.trec").read_text(encoding="utf-8") == "q%091 0 b 2\nq%091 0 x 0\n"


@pytest.mark.parametrize(
    ("file", "content", "named"),
    [
        ("corpus.jsonl", None, "corpus.jsonl is missing"),
        ("queries.jsonl", None, "queries.jsonl is missing"),
        ("qrels.tsv", None, "qrels.tsv is missing"),
        ("corpus.jsonl", b"", "holds no row"),
        ("queries.jsonl", b"\n \n", "holds no row"),
        ("corpus.jsonl", b'{"_id": "a", "text": "x"}\n\n{"_id": "b", "text"\n', "corpus.jsonl, line 3"),
        ("corpus.jsonl", b'{"_id": "a", "text": "x"}\n{"_id": "a", "text": "y"}\n', "line 2: the id 'a' stands twice"),
        ("corpus.jsonl", b'{"_id": 7, "text": "x"}\n', "line 1.*_id"),
        ("corpus.jsonl", b'{"_id": " ", "text": "x"}\n', "line 1.*_id"),
        ("corpus.jsonl", b'{"_id": "a", "text": null}\n', "line 1.*text"),
        ("corpus.jsonl", b'["a", "x"]\n', "corpus.jsonl, line 1"),
        ("corpus.jsonl", b'{"_id": "a", "text": "\\ud800"}\n', "corpus.jsonl, line 1"),
        ("queries.jsonl", b'{"_id": "q", "text": "\xff"}\n', "queries.jsonl, line 1: not UTF-8"),
        ("queries.jsonl", b'{"_id": "q"}\n', "queries.jsonl, line 1.*text"),
        ("qrels.tsv", b"", "qrels.tsv: expected the columns"),
        ("qrels.tsv", b"q2\ta\t1\n", "qrels.tsv, line 1: expected the columns"),
        ("qrels.tsv", b"query-id\tcorpus-id\tscore\nq2\ta\n", "qrels.tsv, line 2"),
        ("qrels.tsv", b"query-id\tcorpus-id\tscore\nq2\ta\t1\nq2\tb\thigh\n", "qrels.tsv, line 3"),
        ("qrels.tsv", b"query-id\tcorpus-id\tscore\nq2\ta\tnan\n", "qrels.tsv, line 2"),
        ("qrels.tsv", b"query-id\tcorpus-id\tscore\nother\ta\t1\n", "no query of queries.jsonl is judged"),
    ],
)
def test_a_malformed_set_is_refused_with_file_and_line(tmp_path, file, content, named):
    folder = write_set(tmp_path / "bad")
    (folder / file).unlink() if content is None else (folder / file).write_bytes(content)
    with pytest.raises(InputRefused, match=named):
        bench(folder, load_config(), routes=("lexical",))


def test_an_unknown_route_is_wrong_usage(tmp_path):
    for routes in (("lexical", "sparse"), ()):
        with pytest.raises(UsageError, match="lexical, dense, hybrid, rerank"):
            bench(tmp_path, load_config(), routes=routes)


def scores(**means: float) -> dict[str, np.ndarray]:
    """Values of 80 queries: the same noise for all routes, a little of their own, and their means."""
    rng = np.random.default_rng(1)
    shared = rng.normal(0, 0.1, 80)
    return {name: value + shared + rng.normal(0, 0.02, 80) for name, value in means.items()}


def test_advice_where_the_dense_route_is_too_weak():
    values = scores(lexical=0.7, dense=0.3, hybrid=0.55, rerank=0.65, alone=0.72)
    alone = values.pop("alone")
    asked = []
    advice = advise(values, load_config(), lambda route: asked.append(route) or alone)
    assert asked == ["lexical"] and advice["best_route"] == "lexical"
    assert advice["recommended"] == {"retrieve.routes": ["lexical"]}
    assert "the dense route is too weak to help" in advice["text"].lower()
    assert "Set retrieve.routes=[lexical]." in advice["text"] and "n = 80" in advice["text"]
    difference = advice["differences"]["rerank"]
    assert difference["low"] < difference["difference"] < difference["high"] < 0 and difference["p"] < 0.05


def test_advice_where_even_one_route_is_better_without_the_reranker():
    values = scores(lexical=0.7, dense=0.3, hybrid=0.55, rerank=0.5, alone=0.6)
    alone = values.pop("alone")
    advice = advise(values, load_config(), lambda route: alone)
    assert advice["recommended"] == {"retrieve.routes": ["lexical"], "rerank.model": "none"}


def test_advice_leaves_routes_alone_that_help_or_are_not_told_apart():
    def never(route):
        pytest.fail("nothing more is to be measured")

    advice = advise(scores(lexical=0.6, dense=0.6, hybrid=0.7, rerank=0.75), load_config(), never)
    assert advice["recommended"] == {} and "is above" in advice["text"] and "Keep the routes" in advice["text"]
    advice = advise(scores(lexical=0.6, dense=0.5, hybrid=0.6, rerank=0.6), load_config(), never)
    assert advice["recommended"] == {} and "does not differ significantly" in advice["text"]
    # one query says nothing, whatever it says
    advice = advise(
        {r: np.array([v]) for r, v in (("lexical", 1.0), ("dense", 0.0), ("rerank", 0.0))}, load_config(), never
    )
    assert advice["recommended"] == {} and "n = 1" in advice["text"]


def test_advice_keeps_a_route_that_the_reranker_makes_use_of():
    values = scores(lexical=0.7, dense=0.5, hybrid=0.65, rerank=0.8, alone=0.72)
    alone = values.pop("alone")
    advice = advise(values, load_config(), lambda route: alone)
    assert advice["recommended"] == {} and "makes use of the dense route" in advice["text"]


def test_margins_and_the_table():
    from rich.console import Console

    def result(name, lexical, dense, rerank):
        routes = {
            r: {m: v for m in module.METRICS} for r, v in (("lexical", lexical), ("dense", dense), ("rerank", rerank))
        }
        return {
            "set": name, "documents": 1, "queries": 1, "embedder": "minilm", "reranker": "features", "stand_in": True,
            "routes": routes, "queries_per_second": {"lexical": 10.0}, "memory_mb": 1.0, "advice": {"text": "Keep."},
            "unmeasured": 3 * (name == "b"), "relevant_not_in_corpus": 2 * (name == "b"),
        }  # fmt: skip

    results = [result("[b]a[/b]", 0.5, 0.4, 0.52), result("b", 0.5, 0.6, 0.57)]
    assert margins(results) == {"sets": {"[b]a[/b]": 0.02, "b": -0.03}, "mean": -0.005, "worst": -0.03}
    assert margins([{"set": "x", "routes": {"lexical": {"ndcg@10": 0.5}}}]) == {}
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(print_bench(results))
    text = console.export_text()
    assert "[b]a[/b]" in text and "0.5200" in text and "-0.0300" in text and "stand-in" in text and "b: Keep." in text
    assert "b: 3 queries have no" in text and "b: 2 relevant documents are not" in text and ": 0 " not in text


def test_a_public_set(embedder):
    if not (SHARED / "bench").is_dir():
        pytest.skip("no public sets beside the checkout")
    result = bench(SHARED / "bench" / "docs-support", load_config(), routes=("lexical",))
    assert (result["documents"], result["queries"]) == (232, 100)
    assert result["routes"]["lexical"]["ndcg@10"] > 0.7

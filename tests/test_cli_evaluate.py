"""The commands that measure, as a user types them: JSON on stdout, exit codes, the ledger, gates that fail a build."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import pytest

from ragbuild.core.store import read_json, write_json
from tests.test_cli import ragbuild


@pytest.fixture(scope="module")
def workspace(built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the shared build, whose ledger is its own."""
    return shutil.copytree(built.run, tmp_path_factory.mktemp("evaluate") / "run")


def measured(workspace: Path, *arguments: str) -> dict:
    done = ragbuild("eval", *arguments, "-w", workspace, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_qdoc_measures_every_stage_of_both_sets(workspace: Path) -> None:
    out = measured(workspace, "qdoc", "--label", "first")
    for found in out["sets"].values():
        stages = {row["stage"]: row for row in found["stages"]}
        assert {"raw_lexical", "lexical", "dense", "fused", "reranked", "parents", "no_routing_fused"} <= stages.keys()
        recall = [v for k, v in sorted(stages["fused"].items(), key=lambda i: int(i[0].rpartition("@")[2] or 0)
                                       if "@" in i[0] else 0) if k.startswith("recall@")]  # fmt: skip
        assert recall == sorted(recall), "recall@K does not fall as K grows"
        assert not found["errors"] and found["language"] and found["document"]
    assert out["stand_in"] is True
    listed = json.loads(ragbuild("eval", "runs", "-w", workspace, "--json").stdout)["runs"]
    assert listed[-1]["label"] == "first" and listed[-1]["kind"] == "qdoc"


def test_the_same_run_twice_is_the_same_and_no_improvement(workspace: Path) -> None:
    for label in ("one", "two"):
        measured(workspace, "qdoc", "--set", "expert", "--half", "test", "--label", label)
    done = ragbuild("eval", "compare", "one", "two", "-w", workspace, "--json")
    found = json.loads(done.stdout)
    assert not found["changed"] and not found["reasons"]
    assert all(row["difference"] == 0 for row in found["metrics"]) and "no difference" in found["verdict"]


def test_two_changes_at_once_are_no_improvement(workspace: Path) -> None:
    measured(workspace, "qdoc", "--set", "expert", "--half", "test", "--label", "before")
    measured(workspace, "qdoc", "--set", "expert", "--half", "test", "--label", "after", "-p", "retrieve.rrf_k=10",
             "-p", "rerank.model=none")  # fmt: skip
    found = json.loads(ragbuild("eval", "compare", "before", "after", "-w", workspace, "--json").stdout)
    assert {"fusion", "rerank"} <= found["changed"].keys()
    assert "refused" in found["verdict"] and "Change one at a time" in " ".join(found["reasons"])


def test_qdoca_scores_with_n_and_classifies(workspace: Path) -> None:
    out = measured(workspace, "qdoca", "--set", "expert", "--half", "test", "--no-ledger")
    found = out["sets"]["expert"]
    assert {"keyword_hit_rate", "content_accuracy", "credibility", "content_completeness", "expression_quality",
            "logical_coherence", "overall"} == {row["dimension"] for row in found["dimensions"]}  # fmt: skip
    assert all(row["n"] + row["unmeasured"] + row["not_applicable"] > 0 for row in found["dimensions"])
    assert found["wrong_version"] == [] and sum(c["cases"] for c in found["counts"]) == len(found["bad_cases"])
    assert any("judge" in name for name in out["stand_ins"])


def test_judge_on_a_file_and_on_the_expert_set(workspace: Path, tmp_path: Path) -> None:
    asked = {"query": "How long?", "reference": "15 minutes", "contexts": ["15 minutes"]}
    rows = [{**asked, "answer": "15 minutes.", "human": 2}, {**asked, "answer": "30 days.", "human": 0}]
    path = tmp_path / "judged.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n{broken\n", encoding="utf-8")
    done = ragbuild("eval", "judge", "--human", path, "--json")
    out = json.loads(done.stdout)
    assert done.returncode == 0 and out["dimensions"][0]["n"] == 2 and len(out["refused"]) == 1
    assert "line 3" in done.stderr
    assert measured(workspace, "judge")["all"]["n"] >= 60


def test_offline_is_a_gate_and_a_baseline_can_be_accepted(workspace: Path, tmp_path: Path) -> None:
    assert measured(workspace, "offline")["gates"]
    strict = ragbuild("eval", "offline", "-w", workspace, "-p", "gates.dense_recall_at_50=1.0", "--no-ledger")
    assert strict.returncode == 3 and "dense_recall_at_50" in strict.stderr, "the dense route misses some question"
    target = tmp_path / "baseline.json"
    made = ragbuild("eval", "baseline", "-w", workspace, "--out", target)
    assert made.returncode == 0 and read_json(target)["metrics"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["qdoc", "--set", "/nowhere.json"], 4, "no /nowhere.json eval set"),
        (["qdoc", "--half", "third"], 2, "--half takes"),
        (["compare", "nothing", "last"], 2, "no run"),
        (["judge", "--human", "/nowhere.jsonl"], 4, "cannot be read"),
    ],
)
def test_wrong_usage(workspace: Path, arguments: list[str], code: int, message: str) -> None:
    own = [] if "--human" in arguments else ["-w", workspace]
    done = ragbuild("eval", *arguments, *own)
    assert done.returncode == code and message in done.stderr and "Traceback" not in done.stderr


def test_a_bad_row_of_an_eval_set_is_named(workspace: Path, tmp_path: Path) -> None:
    rows = read_json(workspace / "eval_set.json")[:3]
    rows[1]["query_type"] = "opinion"
    del rows[2]["gt_answer"]
    path = tmp_path / "set.json"
    write_json(path, rows)
    done = ragbuild("eval", "qdoc", "--set", path, "-w", workspace)
    assert done.returncode == 4 and "row 2" in done.stderr and "row 3" in done.stderr and "query_type" in done.stderr


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"[]", "no case"),
        ('[{"case_id": "重启"}]'.encode("gb18030"), "not UTF-8"),
        (b'[{"pair_id": "a"', "not valid JSON"),
        (b'[{"pair_id": "a", "gt_spans": [{"doc_key": "d", "start": 9, "end": 4}]}]', "ends after it starts"),
    ],
)
def test_a_set_that_says_nothing_is_refused(workspace: Path, tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "set.json"
    path.write_bytes(data)
    done = ragbuild("eval", "qdoc", "--set", path, "-w", workspace)
    assert done.returncode == 4 and message in done.stderr and "Traceback" not in done.stderr


def test_figures_are_shown_where_the_ledger_cannot_be_written(built, tmp_path: Path) -> None:
    workspace = shutil.copytree(built.run, tmp_path / "run")
    (workspace / "ledger.jsonl").unlink(missing_ok=True)
    (workspace / "ledger.jsonl").mkdir()
    done = ragbuild("eval", "qdoc", "--set", "expert", "--half", "test", "-w", workspace, "--json")
    assert done.returncode == 1 and "ledger.jsonl" in done.stderr and json.loads(done.stdout)["sets"]["expert"]


def test_a_narrow_terminal_loses_no_figure(workspace: Path) -> None:
    from ragbuild.cli_evaluate import _table

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdout", shown := Terminal())
        patch.setenv("COLUMNS", "40")
        _table("stages", [{"stage": "no_rewrite_reranked", **{f"ndcg@{k}": 0.8765 for k in range(1, 5)}}])
    text = "".join(shown.getvalue().split())
    assert "no_rewrite_reranked" in text and text.count("65") >= 4 and "…" not in text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_bench_says_when_no_set_could_be_measured(tmp_path: Path) -> None:
    for name, judged in (("one", "q1\tmissing\t1"), ("two", "q1\td1\tmuch")):
        folder = tmp_path / "sets" / name
        folder.mkdir(parents=True)
        (folder / "corpus.jsonl").write_text('{"_id": "d1", "text": "a"}\n', encoding="utf-8")
        (folder / "queries.jsonl").write_text('{"_id": "q1", "text": "a"}\n', encoding="utf-8")
        (folder / "qrels.tsv").write_text(f"query-id\tcorpus-id\tscore\n{judged}\n", encoding="utf-8")
    done = ragbuild("bench", "--beir", tmp_path / "sets", "--routes", "lexical", "--json")
    assert done.returncode == 4 and not done.stdout and "do their ids agree" in done.stderr
    spans = ragbuild("bench", "--beir", tmp_path / "sets", "--spans")
    assert spans.returncode == 4 and "spans.jsonl" in spans.stderr
    same = ragbuild("bench", "--beir", folder, "--beir", folder, "--runs", tmp_path / "runs")
    assert same.returncode == 2 and not (tmp_path / "runs").exists()


def test_bench_writes_the_form_that_was_promised(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    corpus = [{"_id": "d1", "title": "", "text": "reset the password"}, {"_id": "d2", "title": "", "text": "备份 恢复"}]
    queries = [{"_id": "q1", "text": "password"}, {"_id": "q2", "text": "恢复"}]
    for name, rows in (("corpus", corpus), ("queries", queries)):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    (folder / "qrels.tsv").write_text("query-id\tcorpus-id\tscore\nq1\td1\t1\nq2\td2\t1\n", encoding="utf-8")
    done = ragbuild("bench", "--beir", folder, "--json", "--routes", "lexical", "--runs", tmp_path / "runs")
    out = json.loads(done.stdout)
    assert done.returncode == 0 and out["routes"]["lexical"] == {
        "ndcg@10": 1.0, "recall@10": 1.0, "recall@100": 1.0, "mrr@10": 1.0
    }  # fmt: skip
    assert list((tmp_path / "runs").rglob("*"))
    assert ragbuild("bench", "--beir", tmp_path / "nowhere").returncode == 4
    assert ragbuild("bench", "--beir", folder, "--routes", "magic").returncode == 2


def test_a_corpus_from_docstrings(tmp_path: Path) -> None:
    done = ragbuild("corpus", "python-docs", "--out", tmp_path / "docs", "--min-children", 200, "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["documents"] > 0
    assert list((tmp_path / "docs").rglob("*.md"))
    assert ragbuild("corpus", "python-docs", "--out", tmp_path / "docs").returncode == 2
    assert ragbuild("corpus", "perl-docs", "--out", tmp_path / "other").returncode == 2


def test_a_broken_tokenizer_ends_the_build_with_3_and_is_named(tmp_path: Path) -> None:
    done = ragbuild(
        "build", "--out", tmp_path / "run", "-p", "lexical.tokenizer=whitespace", "--skip", "10", "--skip", "11",
        "--skip", "12", "--skip", "13", "--skip", "14", "--skip", "20", "--skip", "21", "--skip", "22",
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    assert "tokenizer or dictionary" in done.stderr and "Traceback" not in done.stderr
    assert (tmp_path / "run" / "offline_evaluation.json").is_file(), "the report is there all the same"


def test_a_corpus_without_a_question_is_built_and_says_that_it_is_not_evaluated(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "note.md").write_text("# メモ\n\n本日は晴天なり。\n", encoding="utf-8")
    done = ragbuild(
        "build", "--corpus", corpus, "--out", tmp_path / "run", "--skip", "20", "--skip", "30", "-p", "tune.corpus=own"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("NOT EVALUATED") == 2
    assert read_json(tmp_path / "run" / "evaluation.json") == {"entries": []}
    assert not (tmp_path / "run" / "ledger.jsonl").exists()

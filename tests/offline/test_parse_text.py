"""Markdown, HTML and plain text: encodings, headings, tables, code, boilerplate; and how a file's kind is found."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragbuild.core.config import CorpusConfig, ParseConfig
from ragbuild.core.errors import DocumentRefused
from ragbuild.offline.parse import ParsedDocument, parse_file
from ragbuild.offline.parse.base import decode, detect, pipe_table, read_head, safe_name, tidy
from ragbuild.offline.parse.text import heading_level

SHARED = Path(__file__).resolve().parents[3] / "shared" / "documents"


def parse(folder: Path, name: str, content: str | bytes) -> ParsedDocument:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return parse_file(path, ParseConfig(), CorpusConfig())


def test_front_matter_is_taken_out_and_stays_strings(tmp_path: Path) -> None:
    text = "---\ndoc_version: 4.10\nproduct_model: [LG-200, LG-500]\nsupersedes: null\n---\n# Guide\n\nText.\n"
    parsed = parse(tmp_path, "a.md", text)
    assert parsed.markdown == "# Guide\n\nText.\n"
    assert parsed.metadata == {"doc_version": "4.10", "product_model": "LG-200;LG-500"}  # not 4.1, no null


def test_broken_front_matter_is_text_with_a_warning(tmp_path: Path) -> None:
    parsed = parse(tmp_path, "a.md", "---\ntitle: [open\n---\n# Guide\n")
    assert "title: [open" in parsed.markdown and parsed.metadata == {}
    assert "front matter is broken" in parsed.warnings[0]


def test_setext_and_html_headings_become_atx_but_code_stays(tmp_path: Path) -> None:
    text = "Title\n=====\n\nPart\n----\n\n<h3 align='center'>\n  <b>Small</b> part\n</h3>\n\n"
    text += "```\nNot\n===\n<h1>no</h1>\n```\n"
    markdown = parse(tmp_path, "a.md", text).markdown
    assert markdown.startswith("# Title\n\n## Part\n\n### Small part\n\n```\nNot\n===\n<h1>no</h1>\n```")


def test_a_placeholder_is_no_html(tmp_path: Path) -> None:
    text = "# A\n\n<div>Open <b>https://<address>:9443</b></div> <!-- internal -->\n"
    assert "https://<address>:9443" in parse(tmp_path, "a.md", text).markdown
    assert "internal" not in parse(tmp_path, "a.md", text).markdown


def test_embedded_picture_becomes_a_file(tmp_path: Path) -> None:
    parsed = parse(tmp_path, "a.md", "# A\n\n![a dot](data:image/png;base64,iVBORw0KGgo=)\n")
    assert "![a dot](images/a.md_1_1.png)" in parsed.markdown
    assert parsed.images[0].data == b"\x89PNG\r\n\x1a\n" and parsed.images[0].caption == "a dot"


PAGE = """<!DOCTYPE html><html><head><title>Ports | Portal</title><meta charset="{charset}"></head><body>
<div class="cookie-notice">We use cookies.</div><header class="site-header"><a>Home</a><nav>Menu</nav></header>
<aside class="sidebar">Side</aside><main><article><h1>Ports</h1><p>Open <code>TCP 443</code>：端口。</p>
<table><tr><th rowspan="2">Port</th><th colspan="2">Use</th></tr><tr><th>from</th><th>to</th></tr>
<tr><td>443</td><td>a|b</td><td>one<br>two</td></tr><tr><td colspan="3">All rows</td></tr></table>
<pre><code class="language-bash">run &lt;x&gt;
  --now</code></pre><ol start="3"><li>third</li></ol></article></main><footer>© 2026</footer></body></html>"""


def test_html_without_its_boilerplate(tmp_path: Path) -> None:
    parsed = parse(tmp_path, "a.html", PAGE.replace("{charset}", "utf-8"))
    assert parsed.markdown == (
        "# Ports\n\nOpen `TCP 443`：端口。\n\n"
        "| Port | Use | Use |\n| --- | --- | --- |\n| Port | from | to |\n"
        "| 443 | a\\|b | one<br>two |\n| All rows |  |  |\n\n"
        "```bash\nrun <x>\n  --now\n```\n\n3. third\n"
    )
    assert parsed.metadata == {"title": "Ports | Portal"} and parsed.page_starts == (0,)


@pytest.mark.parametrize(
    ("charset", "encoding"),
    [("gb2312", "gb18030"), ("utf-8", "utf-16"), ("iso-8859-1x", "gb18030"), ("big5", "big5")],
)
def test_html_in_any_encoding(tmp_path: Path, charset: str, encoding: str) -> None:
    page = PAGE.replace("{charset}", charset).replace(
        "端口", "端口說明" if encoding == "big5" else "端口说明与备份步骤"
    )
    data = page.replace("©", "(c)").encode(encoding)
    assert ("端口說明" if encoding == "big5" else "端口说明与备份步骤") in parse(tmp_path, "a.html", data).markdown


def test_wikipedia_page() -> None:
    if not SHARED.is_dir():
        pytest.skip("../shared/documents is not there")
    markdown = parse_file(SHARED / "en_wiki_duck.html", ParseConfig(), CorpusConfig()).markdown
    assert markdown.startswith("# Duck\n") and "\n## Taxonomy\n" in markdown and "\n### Feeding\n" in markdown
    assert "| Kingdom: | Animalia |" in markdown
    for boilerplate in ("Jump to", "[edit", "Retrieved from", "languages\n", "Main menu", "upload.wikimedia.org"):
        assert boilerplate not in markdown
    japanese = parse_file(SHARED / "ja_steel_utf16.html", ParseConfig(), CorpusConfig()).markdown
    assert "Chemical composition 成分 % of grade" in japanese and "| C | Si | Mn |" in japanese


CHINESE = """备份与恢复手册

1 适用范围

本手册适用于运行新版本的全部型号，供设备管理员使用。

4.1 时间

设备每天自动做一次完整备份。
"""


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "gb18030", "utf-16", "utf-16-le", "utf-16-be"])
def test_plain_text_in_any_encoding(tmp_path: Path, encoding: str) -> None:
    parsed = parse(tmp_path, "a.txt", CHINESE.encode(encoding))
    assert parsed.markdown.startswith("# 备份与恢复手册\n\n## 1 适用范围\n\n本手册适用于")
    assert "\n### 4.1 时间\n" in parsed.markdown and parsed.metadata == {"title": "备份与恢复手册"}


def test_plain_text_lists_commands_and_tables(tmp_path: Path) -> None:
    text = (
        "Guide\n\nSteps:\n\n    1. Connect the cable.\n    2. Run:\n\n"
        "           backup create --full\n\n    3. Wait.\n\n"
        "Model     Ports\nLG-200    4\nLG-500    10\n\n"
        "1.1 Q: How long?\nA: Five minutes.\nNo more.\n"
    )
    assert parse(tmp_path, "a.txt", text).markdown == (
        "# Guide\n\nSteps:\n\n1. Connect the cable.\n2. Run:\n\n```\nbackup create --full\n```\n\n3. Wait.\n\n"
        "```\nModel     Ports\nLG-200    4\nLG-500    10\n```\n\n### 1.1 Q: How long?\n\nA: Five minutes.\nNo more.\n"
    )


@pytest.mark.parametrize(
    ("line", "level"),
    [
        ("1 Overview", 2), ("1.1 Scope", 3), ("2.3.1 Details", 4), ("第一章 总则", 2), ("第三节 范围", 3),
        ("一、概述", 2),
        ("（二）步骤", 3), ("Chapter 2 Setup", 2), ("1. Connect the cable.", 0), ("1. Connect", 0),
        ("2026 was a good year", 0),
        ("3 persons are needed.", 0), ("第一步 接线。", 0), ("10 Mbit/s: too slow:", 0), ("一个例子", 0),
        ("1 " + "x" * 90, 0),
    ],
)  # fmt: skip
def test_numbered_headings_of_plain_text(line: str, level: int) -> None:
    assert heading_level(line) == level


def test_kind_by_content_not_by_name(tmp_path: Path) -> None:
    def kind(name: str, content: bytes) -> str:
        (tmp_path / name).write_bytes(content)
        return detect(read_head(tmp_path / name), tmp_path / name)

    assert kind("a.txt", b"%PDF-1.4\n") == "pdf"
    assert kind("a.docx", b"<!doctype html><p>x</p>") == "html"
    assert kind("b.pdf", b"\xef\xbb\xbf  <HTML><body>x") == "html"
    assert kind("a.bin", b"# One\n\ntext\n\n## Two\n\ntext\n") == "markdown"
    assert kind("b.txt", b"# a comment\nx = 1\n") == "text"
    assert kind("c.md", b"just words") == "markdown"
    long = ("规" * 40000).encode()  # the first bytes end in the middle of a character
    assert kind("d.txt", long) == "text"


def test_mislabelled_file_is_read_with_a_warning(tmp_path: Path) -> None:
    parsed = parse(tmp_path, "manual.pdf", PAGE.replace("{charset}", "utf-8"))
    assert parsed.parser == "html" and "mislabelled: named .pdf but its content is html" in parsed.warnings[0]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty"), (b" \r\n\t ", "empty"), (b"\xef\xbb\xbf\n", "empty"),
        (b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 9, "binary"),
        (b"{\\rtf1 x}", "RTF"), (b"\xd0\xcf\x11\xe0" + b"\0" * 600, "old binary Office"),
        (b"---\n...", "no text"),
        (b"\xd0\xcf\x11\xe0" + "EncryptedPackage".encode("utf-16-le"), "encrypted Office"),
        (b"PK\x03\x04 cut", "truncated"),
    ],
)  # fmt: skip
def test_what_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    with pytest.raises(DocumentRefused, match=reason):
        parse(tmp_path, "file.md", content)


def test_too_large(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("word " * 500_000)
    with pytest.raises(DocumentRefused, match="max_file_mb"):
        parse_file(tmp_path / "a.txt", ParseConfig(), CorpusConfig(max_file_mb=1))


def test_a_few_broken_bytes_cost_a_few_characters() -> None:
    for text, encoding in (
        ("备份口令至少十六个字符。\n" * 50, "utf-8"),
        ("备份口令至少十六个字符。\n" * 50, "gb18030"),
        ("abc\n" * 50, "utf-8"),
    ):
        data = bytearray(text.encode(encoding))
        data[101] = 0xFF
        assert sum(a == b for a, b in zip(decode(bytes(data)), text, strict=False)) > 0.05 * len(text)
        assert len(set(decode(bytes(data))) - set(text)) <= 3


def test_page_of_and_small_helpers() -> None:
    parsed = ParsedDocument("aaabbbccc", (0, 3, 3, 6))  # page 2 is empty
    assert [parsed.page_of(i) for i in (0, 2, 3, 5, 6, 100)] == [1, 1, 3, 3, 4, 4]
    assert pipe_table([["a", "b"], ["1 | 2"], ["", ""]]) == "| a | b |\n| --- | --- |\n| 1 \\| 2 |  |"
    assert pipe_table([]) == "" and pipe_table([[""]]) == ""
    assert tidy("a  \n\n\n\nb\n```\nx  \n\n\n```\n") == "a\n\nb\n```\nx  \n\n\n```\n"
    assert safe_name("guide.pdf") == "guide.pdf"
    assert safe_name("a/b.pdf") != safe_name("a_b.pdf") and "/" not in safe_name("a/b.pdf")
    assert safe_name("../../etc/passwd").startswith("_")


@given(st.text(max_size=60))
def test_safe_names_are_one_folder_deep_and_short(source: str) -> None:
    name = safe_name(source)
    assert name and "/" not in name and name not in (".", "..") and len(name.encode()) < 200
    assert safe_name(source) == name


@given(st.text(alphabet=st.characters(categories=["Lu", "Ll", "Lo", "Nd", "Zs", "Po"]), max_size=200))
def test_utf8_is_read_as_written(text: str) -> None:
    assert decode(text.encode()) == text

"""PDF: reading order, headings, tables, pages; and what is refused. The Java process runs once for all samples."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from ragbuild.core.config import CorpusConfig, ParseConfig
from ragbuild.core.errors import DocumentRefused
from ragbuild.offline.parse import ParsedDocument, ParseOptions, parse_file
from ragbuild.offline.parse.pdf import PdfParser
from ragbuild.offline.parse.pdf_blocks import _in_columns
from ragbuild.offline.parse.pdf_headings import heading_number, mark_headings
from ragbuild.offline.parse.pdf_lines import Line, join_lines, rows
from ragbuild.offline.parse.pdf_render import to_markdown, without_running
from ragbuild.offline.parse.pdf_tables import CAPTION, Block, aligned_tables

CORPUS = Path(__file__).resolve().parents[2] / "data" / "corpus"
SHARED = Path(__file__).resolve().parents[3] / "shared" / "documents"
OWN = ("service-bulletin-SB-2026-03.pdf", "security-hardening.zh.pdf", "spec-lg-series.pdf")
REAL = (
    "en_federal_register.pdf", "en_senate_expenditures.pdf", "en_borderless_invoice.pdf", "zh_duplicate_chars.pdf",
    "en_warn_report_table.pdf", "en_copy_protected.pdf", "ko_tables.pdf",
)  # fmt: skip


@pytest.fixture(scope="module")
def parsed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, ParsedDocument]]:
    """The samples, all laid out by one Java process, with one broken file among them."""
    broken = tmp_path_factory.mktemp("pdf") / "broken.pdf"
    broken.write_bytes(b"%PDF-1.4\nnot really\n%%EOF\n")
    paths = [CORPUS / name for name in OWN] + [SHARED / name for name in REAL if SHARED.is_dir()]
    parser = PdfParser()
    parser.prepare([*paths[:1], broken, *paths[1:]], ParseConfig())
    yield {path.name: parser.parse(path, ParseOptions(path.name)) for path in paths}
    parser.close()


def real(parsed: dict[str, ParsedDocument], name: str) -> ParsedDocument:
    if name not in parsed:
        pytest.skip("../shared/documents is not there")
    return parsed[name]


def test_headings_lists_code_notes_and_tables(parsed: dict[str, ParsedDocument]) -> None:
    markdown = parsed["service-bulletin-SB-2026-03.pdf"].markdown
    assert markdown.startswith(
        "# Service Bulletin SB-2026-03: LG-500 fan 2 stops at low inlet temperature\n\n## 1 Summary\n"
    )
    assert "| Bulletin | SB-2026-03, 2026-05-18 |\n| Replaces | SB-2025-11 |" in markdown
    assert "- Fan 2 stands still while the other fans turn.\n\nTo confirm it from the command line:\n\n" in markdown
    assert "```\nlog tail --level error\nhw firmware show\n```" in markdown
    assert "> Warning: Do not cover the air inlet" in markdown
    assert "![Figure 1: Fan tray of the LG-500](images/service-bulletin-SB-2026-03.pdf_1_1.png)" in markdown
    steps = markdown[markdown.index("1. Lay the new") :].split("\n")[:4]
    assert [step[:2] for step in steps] == [
        "1.",
        "2.",
        "3.",
        "4.",
    ]  # one list, though the page ends after its first item


def test_pages_are_exact_and_pictures_are_there(parsed: dict[str, ParsedDocument]) -> None:
    bulletin = parsed["service-bulletin-SB-2026-03.pdf"]
    assert len(bulletin.page_starts) == 3
    for text, page in (("## 2 Affected", 1), ("## 3 How", 2), ("1. Lay", 2), ("2. Loosen", 3), ("## 7 Questions", 3)):
        assert bulletin.page_of(bulletin.markdown.index(text)) == page
    (image,) = bulletin.images
    assert image.data.startswith(b"\x89PNG") and image.page == 1 and image.caption.startswith("Figure 1")
    assert "Page 2" not in bulletin.markdown and "Langate Networks" not in bulletin.markdown  # footers


def test_chinese_headings_do_not_swallow_text(parsed: dict[str, ParsedDocument]) -> None:
    markdown = parsed["security-hardening.zh.pdf"].markdown
    titles = [line for line in markdown.split("\n") if line.startswith("#")]
    assert titles[:4] == ["# 安全加固指南", "## 1 使用方法", "### 1.1 加固的次序", "### 1.2 需要事先评估的项目"]
    assert "### 4.5 会话绑定客户端证书\n\n会话可以绑定到客户端证书：" in markdown and "## 4 管理员登录" in titles
    assert "收紧网络" in markdown  # a line ends after 网
    assert "7. 按第 10 章的检查表逐项签字。\n\n每完成一步" in markdown  # the text after a list is no part of it
    source = (CORPUS.parent / "sources" / "security-hardening.zh.md").read_text(encoding="utf-8")
    assert titles == [line for line in source.split("\n") if line.startswith("#")]


def test_two_columns(parsed: dict[str, ParsedDocument]) -> None:
    markdown = parsed["spec-lg-series.pdf"].markdown
    numbers = [int(line.split()[1]) for line in markdown.split("\n") if line.startswith("## ")]
    assert numbers == list(range(1, 15))
    assert "raises E8004; an LG-200 with many" in markdown  # goes on in the next column


def test_three_columns(parsed: dict[str, ParsedDocument]) -> None:
    markdown = real(parsed, "en_federal_register.pdf").markdown
    in_order = [
        "This section of the FEDERAL REGISTER", "AGENCY: Federal", "ADDRESSES: You may send",
        "## Examining the AD Docket",
        "The FAA invites you to participate in this rulemaking", "## Confidential Business", "## Background",
        "accident after takeoff from Soekarno-Hatta International Airport",
    ]  # fmt: skip
    places = [markdown.index(text) for text in in_order]
    assert places == sorted(places)
    assert "DSKJLSW7X2PROD" not in markdown  # a stamp written upwards in the margin


def test_tables_without_rules(parsed: dict[str, ParsedDocument]) -> None:
    senate = real(parsed, "en_senate_expenditures.pdf").markdown  # on a page turned by 90 degrees
    assert "| OBLIGATION/SERVICE DATES START | OBLIGATION/SERVICE DATES END | DESCRIPTION | AMOUNT ($) |" in senate
    assert "|  |  | BAIN, J MATTHEW |  |  | DISTRICT DIRECTOR | 37,499.96 |" in senate
    assert "STAFF TRANSPORTATION AIRFARE FOR E JOHNSON KANSAS CITY TO WASHINGTON DC AND RETURN | 920.68 |" in senate
    invoice = real(parsed, "en_borderless_invoice.pdf").markdown
    assert "| Product Code | Location | Expected | Actual | Variance | Status |" in invoice
    assert "|  | B-07 |  | 289 | -23 |  |" in invoice


def test_one_table_over_sixteen_pages(parsed: dict[str, ParsedDocument]) -> None:
    warn = real(parsed, "en_warn_report_table.pdf")
    assert warn.markdown.count("| Notice Date |") == 1 and warn.markdown.count("\n| ---") == 2
    assert len(warn.page_starts) == 16
    assert "| September 2015 | 76 |" in warn.markdown  # the first row of a page
    for start in warn.page_starts[1:]:
        assert warn.markdown[start] == "|" and warn.markdown[start - 1] == "\n"


def test_bold_characters_drawn_twice_and_other_scripts(parsed: dict[str, ParsedDocument]) -> None:
    doubled = real(parsed, "zh_duplicate_chars.pdf").markdown
    assert "计算机 2019年12月\n" in doubled and "计算机科学与技术（应用技术） 本科" in doubled
    korean = real(parsed, "ko_tables.pdf").markdown
    assert "| 주유 | 모든 주유소 |" in korean
    paper = real(parsed, "en_copy_protected.pdf").markdown  # may be read, not copied
    assert "# LayoutParser: A Unified Toolkit for Deep Learning Based Document Image Analysis" in paper
    assert "the easy reuse of important innovations" in paper  # im-portant


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("en_password_protected.pdf", "needs a password"), ("en_rotated90_scan.pdf", "no text layer on 1 page"),
        ("en_empty.pdf", "empty"),
    ],
)  # fmt: skip
def test_refused(name: str, reason: str) -> None:
    if not SHARED.is_dir():
        pytest.skip("../shared/documents is not there")
    with pytest.raises(DocumentRefused, match=reason):
        parse_file(SHARED / name, ParseConfig(), CorpusConfig())


def test_truncated_damaged_and_slow(tmp_path: Path) -> None:
    data = (CORPUS / OWN[0]).read_bytes()
    (tmp_path / "cut.pdf").write_bytes(data[: len(data) // 2])
    (tmp_path / "bad.pdf").write_bytes(b"%PDF-1.4\nnothing\n%%EOF")
    shutil.copy(CORPUS / OWN[0], tmp_path / "slow.pdf")
    for name, reason in (("cut.pdf", "truncated PDF"), ("bad.pdf", "damaged PDF"), ("slow.pdf", "not laid out within")):
        with pytest.raises(DocumentRefused, match=reason):
            parse_file(tmp_path / name, ParseConfig(timeout_s=0.05), CorpusConfig())


def line(x: float, y: float, text: str, size: float = 10, bold: bool = False) -> Line:
    return Line((x, y, x + 5 * len(text), y + size), size, bold, False, text)


def block(page: int, *lines: Line, kind: str = "text", hint: str = "paragraph") -> Block:
    x0, y0, x1, y1 = zip(*(item.box for item in lines), strict=True)
    return Block(kind, page, (min(x0), min(y0), max(x1), max(y1)), list(lines), hint=hint)


def test_joining_lines() -> None:
    words = frozenset({"open-source", "important", "high", "dimensional", "with", "out", "without"})
    assert join_lines(["收紧网", "络，配置"]) == "收紧网络，配置"
    assert join_lines(["预装", "LangateOS 4.2。", "单机"]) == "预装 LangateOS 4.2。单机"
    assert join_lines(["im-", "portant open-", "source high-", "dimensional with-", "out end"], words) == (
        "important open-source high-dimensional without end"
    )
    assert join_lines(["Soekarno-", "Hatta 2018–", "23 https://a.b/", "c"]) == "Soekarno-Hatta 2018–23 https://a.b/c"


def test_superscripts_join_their_line_and_columns_stay_apart() -> None:
    small = Line((101, 705, 104, 710), 5, False, False, "1")
    texts = [[item.text for item in row] for row in rows([line(50, 700, "some words"), small, line(50, 688, "next")])]
    assert texts == [["some words", "1"], ["next"]]


def test_running_headers_go_and_headings_stay() -> None:
    pages = [(600.0, 800.0)] * 4
    blocks = []
    for page in (1, 2, 3, 4):
        blocks += [block(page, line(50, 780, f"Guide v4 {page * 3}")), block(page, line(50, 760, f"{page} Topic", 14))]
        blocks += [block(page, line(50, 400, "Body text.")), block(page, line(300, 20, str(page)))]
    kept = [b.text for b in without_running(blocks, pages, 10)]
    assert kept == [text for page in (1, 2, 3, 4) for text in (f"{page} Topic", "Body text.")]


def test_heading_levels_follow_numbers_then_sizes() -> None:
    texts = [
        ("Guide", 20),
        ("1 Scope", 14),
        ("1.1 Models", 12),
        ("Remarks", 12),
        ("2 Use", 14),
        ("10 persons are needed.", 10),
    ]
    blocks = [block(1, line(50, 700 - 40 * i, text, size, size > 10)) for i, (text, size) in enumerate(texts)]
    levels = [(b.text, b.level) for b in mark_headings(blocks, 10) if b.kind == "heading"]
    assert levels == [("Guide", 1), ("1 Scope", 2), ("1.1 Models", 3), ("Remarks", 3), ("2 Use", 2)]
    assert [heading_number(t) for t in ("3.1.2 A", "第三章 总则", "IV. RESULTS", "A.1 Tables", "3 persons")] == [
        3,
        1,
        1,
        2,
        1,
    ]


def test_a_sentence_about_a_figure_is_no_caption() -> None:
    for text in ("图 5-1 所示，公司", "图5-1所示", "图 12 表示", "Figure 1-2 shows that", "Figure 12 is"):
        assert not CAPTION.match(text), text
    for text in ("图 5-1 结构", "Figure 1-2: Flow", "Fig. 3", "图 A-1：流程"):
        assert CAPTION.match(text), text


def test_a_caption_is_no_heading_and_dotted_leaders_no_text() -> None:
    blocks = [
        block(1, line(50, 700, "Figure 3-1: A box", 14, True), hint="heading"),
        block(1, line(50, 600, "1 Scope . . . . . . . . 12", 14, True), hint="heading"),
    ]
    blocks = mark_headings(blocks, 10)
    assert to_markdown(blocks, 1, frozenset())[0] == "Figure 3-1: A box\n\n1 Scope … 12\n"


def test_paragraph_and_table_go_on_over_a_page() -> None:
    first = block(1, line(50, 100, "The gateway keeps the config-"), line(50, 88, "uration while the other node"))
    rest = block(2, line(50, 700, "takes over."))
    markdown, starts = to_markdown([first, rest], 2, frozenset())
    assert markdown == "The gateway keeps the configuration while the other node takes over.\n"
    assert markdown[starts[1] :].startswith("takes over")
    top = Block("table", 1, (50, 50, 300, 200), table=[["A", "B"], ["1", "2"]], columns=(50, 100))
    below = Block("table", 2, (50, 600, 300, 700), table=[["A", "B"], ["3", "4"]], columns=(51, 101))
    markdown, starts = to_markdown([top, below], 3, frozenset())
    assert markdown == "| A | B |\n| --- | --- |\n| 1 | 2 |\n| 3 | 4 |\n"
    assert markdown[starts[1] :] == "| 3 | 4 |\n" and starts[2] == len(markdown) - 1


def test_columns_are_read_one_after_the_other() -> None:
    def column(x: float, top: float, name: str) -> Block:
        return block(1, *(line(x, top - 12 * i, name + " word word word word") for i in range(5)))

    title = block(1, line(50, 780, "A title across both of the columns of this page, " * 2))
    blocks = [title, column(50, 700, "L1"), column(310, 700, "R1"), column(50, 600, "L2"), column(310, 600, "R2")]
    assert [b.text[:2] for b in _in_columns(blocks)] == ["A ", "L1", "L2", "R1", "R2"]


def test_prose_in_columns_is_no_table() -> None:
    cells = [line(x, 700 - 12 * i, f"c{x}r{i}") for i in range(4) for x in (50, 150, 250)]
    (table,) = aligned_tables(cells, 1)
    assert table.table[1] == ["c50r1", "c150r1", "c250r1"]
    prose = [line(x, 700 - 12 * i, "a line of running text in a column") for i in range(6) for x in (50, 250, 450)]
    assert aligned_tables(prose, 1) == []

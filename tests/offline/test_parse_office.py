"""DOCX, PPTX and XLSX: structure kept, pictures taken out, and archives that mean harm refused."""

from __future__ import annotations

import datetime
import io
import zipfile
from pathlib import Path

import pytest

from ragbuild.core.config import CorpusConfig, ParseConfig
from ragbuild.core.errors import DocumentRefused
from ragbuild.offline.parse import ParsedDocument, parse_file

CORPUS = Path(__file__).resolve().parents[2] / "data" / "corpus"


def parse(path: Path, **parse_config: object) -> ParsedDocument:
    return parse_file(path, ParseConfig(**parse_config), CorpusConfig())


def png() -> bytes:
    image = pytest.importorskip("PIL.Image")
    out = io.BytesIO()
    image.new("RGB", (40, 40), "red").save(out, "PNG")
    return out.getvalue()


def test_docx_structure(tmp_path: Path) -> None:
    docx = pytest.importorskip("docx", reason="python-docx makes the file")
    word = docx.Document()
    word.core_properties.title = "Installation"
    word.add_heading("Mounting", 1)
    word.add_paragraph("Lift it.", style="List Number")
    word.add_paragraph().add_run("rack show --all").font.name = "Consolas"
    word.add_paragraph("Push it.", style="List Number")
    table = word.add_table(2, 2)
    for cell, text in zip(
        (c for row in table.rows for c in row.cells), ("Model", "Weight", "LG-500", "8.4 kg"), strict=True
    ):
        cell.text = text
    word.add_picture(io.BytesIO(png()))
    word.add_paragraph("Figure 1: Front", style="Caption")
    word.sections[0].header.paragraphs[0].text = "RUNNING HEADER"
    word.save(tmp_path / "a.docx")
    parsed = parse(tmp_path / "a.docx")
    assert parsed.markdown == (
        "# Mounting\n\n1. Lift it.\n\n```\nrack show --all\n```\n\n2. Push it.\n\n"
        "| Model | Weight |\n| --- | --- |\n| LG-500 | 8.4 kg |\n\n![Figure 1: Front](images/a.docx_1_1.png)\n"
    )
    assert parsed.metadata["title"] == "Installation"
    assert [(i.name, i.data == png(), i.caption) for i in parsed.images] == [
        ("a.docx_1_1.png", True, "Figure 1: Front")
    ]
    assert parse(tmp_path / "a.docx", images=False).images == ()


def test_pptx_a_slide_is_a_page(tmp_path: Path) -> None:
    pptx = pytest.importorskip("pptx")
    show = pptx.Presentation()
    for title, lines in (("Upgrade", ["first", "second"]), ("步骤", ["1. 执行检查", "3.4 不再支持"])):
        slide = show.slides.add_slide(show.slide_layouts[1])
        slide.shapes.title.text = title
        slide.placeholders[1].text = "\n".join(lines)
        slide.notes_slide.notes_text_frame.text = f"Say: {title}"
    table = slide.shapes.add_table(2, 2, 0, 6000000, 3000000, 500000).table
    for i, text in enumerate(("项目", "值", "端口", "9443")):
        table.cell(i // 2, i % 2).text = text
    slide.shapes.add_picture(io.BytesIO(png()), 0, 7000000)
    show.save(tmp_path / "a.pptx")
    parsed = parse(tmp_path / "a.pptx")
    second = parsed.page_starts[1]
    assert parsed.markdown[:second] == "## Upgrade\n\n- first\n- second\n\nSay: Upgrade\n\n"
    assert parsed.markdown[second:] == (
        "## 步骤\n\n1. 执行检查\n- 3.4 不再支持\n\n| 项目 | 值 |\n| --- | --- |\n| 端口 | 9443 |\n\n"
        "![](images/a.pptx_2_1.png)\n\nSay: 步骤\n"
    )
    assert parsed.page_of(second) == 2 and parsed.images[0].page == 2


def test_xlsx_values_dates_and_notes(tmp_path: Path) -> None:
    openpyxl = pytest.importorskip("openpyxl")
    book = openpyxl.Workbook()
    book.properties.title = "Matrix"
    sheet = book.active
    sheet.title = "Ports"
    for row in (
        ["Port", "Since", "Share"],
        [443, datetime.datetime(2026, 2, 10), 0.1 + 0.2],
        ["a\nb", True, None],
        [],
        ["A note."],
    ):
        sheet.append(row)
    book.create_sheet("Old").sheet_state = "hidden"
    book.save(tmp_path / "a.xlsx")
    parsed = parse(tmp_path / "a.xlsx")
    assert parsed.markdown == (
        "# Matrix\n\n## Ports\n\n| Port | Since | Share |\n| --- | --- | --- |\n| 443 | 2026-02-10 | 0.3 |\n"
        "| a<br>b | TRUE |  |\n\nA note.\n"
    )
    assert "sheet 'Old' is hidden" in parsed.warnings[0]


def test_sample_documents_keep_what_matters() -> None:
    guide = parse(CORPUS / "install-lg200.zh.docx").markdown
    assert (
        "3. 执行下面的命令，换成规划好的值：\n\n```\nnetwork set mgmt 10.20.30.5/24 gw 10.20.30.1\n```\n\n4. 再次"
        in guide
    )
    assert "| 系统 | `system status` | 无错误 |" in guide
    slides = parse(CORPUS / "upgrade-training.zh.pptx")
    at = slides.markdown.index("## 已知问题")
    assert slides.page_of(at) == len([s for s in slides.page_starts if s <= at]) > 5
    assert "- 4.2.0：推送服务内存泄漏" in slides.markdown


def archive(path: Path, entries: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as out:
        for name, data in entries.items():
            out.writestr(name, data)
    return path


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        ({"word/document.xml": b"<w/>", "../../evil.txt": b"x"}, "leads outside"),
        ({"word/document.xml": b"<w/>", "/etc/passwd": b"x"}, "leads outside"),
        ({"xl/workbook.xml": b"0" * 3_000_000}, "expands to more than 1 MB"),
        ({"word/document.xml": b'<?xml version="1.0"?><!DOCTYPE a [<!ENTITY b "c">]><a>&b;</a>'}, "document type"),
        ({"word/document.xml": b"no xml"}, "cannot be read as docx"),
        ({"readme.txt": b"x"}, "no DOCX, PPTX or XLSX"),
    ],
)
def test_harmful_and_broken_archives(tmp_path: Path, entries: dict[str, bytes], reason: str) -> None:
    path = archive(tmp_path / "a.docx", entries)
    with pytest.raises(DocumentRefused, match=reason):
        parse_file(path, ParseConfig(), CorpusConfig(max_unzipped_mb=1))


def test_truncated_and_corrupt_archive(tmp_path: Path) -> None:
    data = (CORPUS / "port-matrix.xlsx").read_bytes()
    (tmp_path / "cut.xlsx").write_bytes(data[: len(data) // 2])
    broken = bytearray(data)
    broken[400:420] = bytes(20)
    (tmp_path / "broken.xlsx").write_bytes(bytes(broken))
    for name in ("cut.xlsx", "broken.xlsx"):
        with pytest.raises(DocumentRefused, match="truncated or damaged"):
            parse(tmp_path / name)


def test_a_file_that_declares_less_than_it_holds(tmp_path: Path) -> None:
    """The declared sizes lie: what is really read counts."""
    path = archive(tmp_path / "a.xlsx", {"xl/workbook.xml": b"0" * 3_000_000})
    data = path.read_bytes()
    path.write_bytes(data.replace((3_000_000).to_bytes(4, "little"), (100).to_bytes(4, "little")))
    with pytest.raises(DocumentRefused, match="expands to more than|damaged"):
        parse_file(path, ParseConfig(), CorpusConfig(max_unzipped_mb=1))

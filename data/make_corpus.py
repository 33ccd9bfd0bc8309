"""Make the binary documents of the sample corpus from the texts in data/sources.

    python data/make_corpus.py                      # everything, and data/corpus/documents.csv
    python data/make_corpus.py --only sb-2026-03    # one document, by the name of its source or output

A .md source has YAML front matter (document fields, `output`, `format`) above its Markdown; texts that cannot
carry it have their fields in PLAIN below. The same input gives the same bytes. Needed to remake the
files, not to use them: `pip install reportlab python-docx matplotlib` and
`apt-get install fonts-liberation fonts-wqy-zenhei`.
"""

from __future__ import annotations

import argparse
import csv
import io
import re
import zipfile
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any

import docx
import openpyxl
import pptx
import yaml
from corpus_pdf import Block, Doc, PdfMaker, Run, draw, is_wide, plain
from docx.oxml import OxmlElement
from docx.oxml.ns import qn
from docx.shared import Cm, RGBColor
from docx.shared import Pt as DocPt
from markdown_it import MarkdownIt
from markdown_it.tree import SyntaxTreeNode
from openpyxl.styles import Alignment, Font, PatternFill
from pptx.util import Emu, Pt

SOURCES, CORPUS = Path(__file__).resolve().parent / "sources", Path(__file__).resolve().parent / "corpus"
FIELDS = "doc_id doc_version product_model kb doc_type status supersedes effective_date title language".split()
# Texts that carry no front matter: file name, format (md: already in the corpus), then FIELDS.
PLAIN = """\
faq-en.txt|txt-utf16|faq-en|2026-06|all|support|faq|active||2026-06-01|Langate Administrator FAQ|en
faq.zh.txt|txt-gb18030|faq-zh|2026-06|all|support|faq|active||2026-06-01|岚关身份网关常见问题|zh
backup-recovery-3.4.zh.txt|txt-gb18030|backup-guide|v3.4|all|manuals|backup_guide|legacy||2024-05-14|备份与恢复手册|zh
release-notes-4.2.md|md|release-notes|v4.2.2|all|manuals|release_notes|active||2026-07-15|LangateOS 4.2 Release Notes|en
directory-radius.zh.md|md|directory-guide|v4.2|all|manuals|integration_guide|active||2026-02-24|目录与 RADIUS 集成指南|zh
"""  # noqa: E501
ENCODINGS = {"txt-gb18030": "gb18030", "txt-utf16": "utf-16", "txt-utf8": "utf-8"}
MD = MarkdownIt("commonmark").enable("table")


def inline(node: SyntaxTreeNode, style: str = "") -> list[Run]:
    out: list[Run] = []
    for child in node.children:
        if child.type in ("text", "code_inline") and child.content:
            out.append((child.content, style + ("c" if child.type == "code_inline" else "")))
        elif child.type == "hardbreak":
            out.append(("\n", style))
        elif child.type == "softbreak" and not (out and is_wide(out[-1][0][-1])):
            out.append((" ", style))
        elif child.children:
            out += inline(child, style + {"strong": "b", "em": "i"}.get(child.type, ""))
    return out


def flatten(nodes: list[SyntaxTreeNode], depth: int = -1, mark: str = "") -> list[Block]:
    """The Markdown tree as a flat list, with the depth noted on what stands in lists."""
    out: list[Block] = []
    for node in nodes:
        if node.type == "heading":
            out.append(Block("heading", inline(node.children[0]), min(int(node.tag[1]), 3)))
        elif node.type == "paragraph":
            first = node.children[0].children[0]
            if first.type == "image":
                out.append(Block("figure", inline(first), text=str(first.attrs["src"]).removeprefix("figure:")))
            else:
                kind = "para" if depth < 0 else "item"
                out.append(Block(kind, inline(node.children[0]), max(depth, 0), mark))
                mark = ""
        elif node.type in ("bullet_list", "ordered_list"):
            for number, item in enumerate(node.children, int(node.attrs.get("start", 1))):
                out += flatten(item.children, depth + 1, f"{number}." if node.type == "ordered_list" else "•")
        elif node.type in ("fence", "code_block"):
            out.append(Block("code", level=depth + 1, text=node.content.rstrip("\n")))
        elif node.type == "blockquote":
            runs = [run for part in flatten(node.children) for run in [("\n", ""), *part.runs]]
            out.append(Block("note", runs[1:], depth + 1))
        elif node.type == "table":
            rows = [row for part in node.children for row in part.children]
            out.append(Block("table", rows=[[inline(c.children[0]) for c in row.children] for row in rows]))
    return out


def load() -> list[Doc]:
    docs = []
    for line in PLAIN.strip().splitlines():
        output, kind, *values = line.split("|")
        meta = {"output": output, "format": kind, **dict(zip(FIELDS, values, strict=True))}
        path = (CORPUS if kind == "md" else SOURCES) / output
        if path.exists():
            docs.append(Doc({**meta, "product_model": [meta["product_model"]]}, path.read_text(encoding="utf-8")))
        else:
            print(f"missing: {path}")
    for path in sorted(SOURCES.glob("*.md")):
        if path.read_text(encoding="utf-8").startswith("---"):
            docs.append(read(path))
    return docs


def read(path: Path) -> Doc:
    """A Markdown source with its front matter."""
    _, front, body = re.split(r"^---[ \t]*\n", path.read_text(encoding="utf-8"), maxsplit=2, flags=re.M)
    meta = {**yaml.safe_load(front), "source": path.stem}
    return Doc(meta, body, flatten(SyntaxTreeNode(MD.parse(body)).children))


def write_fields(folder: Path, docs: list[Doc]) -> None:
    """documents.csv, with the fields of all `docs`."""
    with (folder / "documents.csv").open("w", encoding="utf-8-sig", newline="") as sheet:
        rows = csv.writer(sheet, lineterminator="\n")
        rows.writerow(["doc_source", *FIELDS])
        for doc in docs:
            values = {**doc.meta, "product_model": ";".join(doc.meta["product_model"])}
            rows.writerow([doc.meta["output"], *(values[name] or "" for name in FIELDS)])


def freeze(data: bytes, meta: dict[str, Any]) -> bytes:
    """An Office file with one date, in the entries of its zip and in its properties."""
    when, out = datetime.fromisoformat(str(meta["effective_date"])), io.BytesIO()
    stamp = when.strftime("%Y-%m-%dT%H:%M:%SZ").encode()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            content = old.read(name)
            if name == "docProps/core.xml":
                content = re.sub(rb"(<dcterms:(?:created|modified)[^>]*>)[^<]*", rb"\g<1>" + stamp, content)
            info = zipfile.ZipInfo(name, when.timetuple()[:6])
            info.compress_type = zipfile.ZIP_DEFLATED
            new.writestr(info, content)
    return out.getvalue()


# Word


def shade(properties: Any, fill: str) -> None:
    mark = OxmlElement("w:shd")
    mark.set(qn("w:val"), "clear")
    mark.set(qn("w:fill"), fill)
    properties.append(mark)


def write(paragraph: Any, runs: list[Run], bold: bool = False) -> Any:
    for text, style in runs:
        run = paragraph.add_run(text)
        run.bold, run.italic = bold or "b" in style or None, "i" in style or None
        if "c" in style:
            run.font.name, run.font.size = "Consolas", DocPt(9.5)
    return paragraph


def list_number(word: Any, paragraph: Any, lists: dict[int, int], block: Block) -> None:
    """Put the item into the list of its level; an item "1." begins a list of its own."""
    if block.mark == "1." or block.level not in lists:
        numbering = word.part.numbering_part.element
        shared = numbering.num_having_numId(paragraph.style.element.pPr.numPr.numId.val)
        own = numbering.add_num(shared.abstractNumId.val)
        own.add_lvlOverride(ilvl=0).add_startOverride(int(block.mark.rstrip(".")))
        lists[block.level] = own.numId
    paragraph._p.get_or_add_pPr().get_or_add_numPr().get_or_add_numId().val = lists[block.level]


def make_docx(doc: Doc) -> bytes:
    word = docx.Document()
    word.core_properties.title, word.core_properties.author = str(doc.meta["title"]), "Langate Networks"
    for name in ("Normal", "Heading 1", "Heading 2", "Heading 3", "Caption"):
        font = word.styles[name].font
        font.name, font.color.rgb = "Arial", RGBColor(0x1F, 0x29, 0x33)
        fonts = word.styles[name].element.get_or_add_rPr().get_or_add_rFonts()
        fonts.set(qn("w:eastAsia"), "Microsoft YaHei")
    word.styles["Normal"].font.size = DocPt(10.5)
    page, number = word.sections[0], OxmlElement("w:fldSimple")
    page.page_width, page.page_height, page.left_margin, page.right_margin = (
        Cm(21),
        Cm(29.7),
        Cm(2.2),
        Cm(2.2),
    )
    page.header.paragraphs[0].text = f"{doc.meta['title']}\t\t{doc.meta['doc_version']}"
    number.set(qn("w:instr"), "PAGE")
    page.footer.paragraphs[0]._p.append(number)
    lists: dict[int, int] = {}
    for block in doc.blocks:
        if block.kind == "heading":
            write(word.add_heading("", block.level), block.runs)
        elif block.kind == "item":
            kind = "List Bullet" if block.mark == "•" else "List Number" if block.mark else "List Continue"
            item = word.add_paragraph(style=kind + (f" {min(block.level, 2) + 1}" if block.level else ""))
            write(item, block.runs)
            if kind == "List Number":
                list_number(word, item, lists, block)
        elif block.kind == "table":
            table = word.add_table(len(block.rows), len(block.rows[0]), style="Table Grid")
            table.rows[0]._tr.get_or_add_trPr().append(OxmlElement("w:tblHeader"))
            for r, row in enumerate(block.rows):
                for cell, runs in zip(table.rows[r].cells, row, strict=True):
                    write(cell.paragraphs[0], runs, bold=r == 0)
                    if r == 0:
                        shade(cell._tc.get_or_add_tcPr(), "EEF2F6")
            word.add_paragraph()
        elif block.kind == "figure":
            word.add_picture(io.BytesIO(draw(block.text, doc.zh)), width=Cm(12.4))
            word.paragraphs[-1].paragraph_format.keep_with_next = True
            write(word.add_paragraph(style="Caption"), block.runs)
        else:
            paragraph = write(word.add_paragraph(), block.runs or [(block.text, "c")])
            if block.kind in ("code", "note"):
                shade(paragraph._p.get_or_add_pPr(), "F5F7FA" if block.kind == "code" else "FDF1EF")
                paragraph.paragraph_format.left_indent = Cm(0.6 * (1 + block.level))
    out = io.BytesIO()
    word.save(out)
    return freeze(out.getvalue(), doc.meta)


# Slides and sheets


def make_pptx(doc: Doc) -> bytes:
    show = pptx.Presentation()
    show.core_properties.title, show.core_properties.author = str(doc.meta["title"]), "Langate Networks"
    cover = show.slides.add_slide(show.slide_layouts[0])
    cover.shapes.title.text = str(doc.meta["title"])
    cover.placeholders[1].text = f"{'岚关网络' if doc.zh else 'Langate Networks'}  {doc.meta['effective_date']}"
    for title, blocks in doc.sections():
        slide = show.slides.add_slide(show.slide_layouts[1])
        slide.shapes.title.text = title or str(doc.meta["title"])
        slide.shapes.title.text_frame.paragraphs[0].runs[0].font.size = Pt(32)
        body, tables = slide.placeholders[1], [b.rows for b in blocks if b.kind == "table"]
        left, top, wide = body.left, Emu(1371600), body.width
        for rows in tables:
            frame = slide.shapes.add_table(len(rows), len(rows[0]), left, top, wide, Emu(380000 * len(rows)))
            for cells, row in zip(frame.table.rows, rows, strict=True):
                for cell, runs in zip(cells.cells, row, strict=True):
                    cell.text = plain(runs)
                    cell.text_frame.paragraphs[0].runs[0].font.size = Pt(14)
            top = Emu(top + 380000 * len(rows) + 150000)
        body.left, body.top, body.width, body.height = left, top, wide, Emu(6700000 - top)
        lines = [(b.mark + " " if b.mark[:1].isdigit() else "") + plain(b.runs) for b in blocks if b.runs]
        long = sum(1 + sum(1 + is_wide(c) for c in line) // 62 for line in lines)
        for i, line in enumerate(lines):
            paragraph = body.text_frame.paragraphs[0] if i == 0 else body.text_frame.add_paragraph()
            paragraph.text = line
            if line[:1].isdigit() and ". " in line[:4]:
                paragraph._p.get_or_add_pPr().append(paragraph._p.makeelement(qn("a:buNone"), {}))
            paragraph.runs[0].font.size = Pt(20 if long <= 10 and not tables else 16)
    out = io.BytesIO()
    show.save(out)
    return freeze(out.getvalue(), doc.meta)


def make_xlsx(doc: Doc) -> bytes:
    book = openpyxl.Workbook()
    book.remove(book.active)
    book.properties.title, book.properties.creator = str(doc.meta["title"]), "Langate Networks"
    for title, blocks in doc.sections():
        sheet = book.create_sheet(re.sub(r"[\[\]:*?/\\]", " ", title or "About")[:31])
        for rows in (block.rows for block in blocks if block.kind == "table"):
            for row in rows:
                sheet.append([int(text) if (text := plain(cell)).isdigit() else text for cell in row])
            for cell in sheet[1]:
                cell.font, cell.fill = Font(bold=True), PatternFill("solid", fgColor="DCE6F0")
            for letter, *texts in (
                (chr(65 + i), *map(plain, column)) for i, column in enumerate(zip(*rows, strict=True))
            ):
                sheet.column_dimensions[letter].width = min(max(map(len, texts)) + 3, 52)
            sheet.freeze_panes = "A2"
        for block in blocks:
            if block.kind != "table":
                sheet.append([])
                sheet.append([plain(block.runs) or block.text])
        for cells in sheet.iter_rows():
            for cell in cells:
                cell.alignment = Alignment(wrap_text=True, vertical="top")
    out = io.BytesIO()
    book.save(out)
    return freeze(out.getvalue(), doc.meta)


# Pages of the support portal

PORTAL = {
    "en": {
        "name": "Langate Support",
        "menu": "Home|Knowledge base|Downloads|Security bulletins|Community|My cases",
        "side": "Getting started|Administration|Sign-in and SSO|Directories|Clusters|Backup and recovery|API",
        "foot": "Terms of use|Privacy notice|Imprint|Contact support|Cookie settings",
        "related": "Related articles",
        "links": "Opening a support case|Finding the serial number|LangateOS download page|Training dates",
        "cookie": "We use cookies to keep you signed in and to count visits. Read our cookie policy.",
        "accept": "Accept all|Only necessary",
        "search": "Search articles",
        "useful": "Was this article helpful?|Yes|No",
        "updated": "Last updated",
        "legal": "© 2026 Langate Networks. All rights reserved.",
    },
    "zh": {
        "name": "岚关技术支持",
        "menu": "首页|知识库|软件下载|安全公告|用户社区|我的工单",
        "side": "快速入门|系统管理|登录与单点登录|目录集成|集群|备份与恢复|接口开发",
        "foot": "使用条款|隐私声明|法律信息|联系支持|Cookie 设置",
        "related": "相关文章",
        "links": "如何提交工单|在哪里查看序列号|LangateOS 下载页面|培训日程",
        "cookie": "本网站使用 Cookie 保持登录状态并统计访问量。继续浏览即表示您同意我们的 Cookie 政策。",
        "accept": "全部接受|仅必要项",
        "search": "搜索文章",
        "useful": "本文对您有帮助吗？|有帮助|没有帮助",
        "updated": "最近更新",
        "legal": "© 2026 岚关网络 版权所有",
    },
}
PAGE = """<!DOCTYPE html>
<html lang="{lang}">
<head>
<meta charset="utf-8">
<title>{title} | {name}</title>
<link rel="stylesheet" href="/assets/portal.css">
<script>window.portal = {{"page": "{doc_id}", "lang": "{lang}"}};</script>
</head>
<body>
<div class="cookie-notice" role="dialog"><p>{cookie}</p>{accept}</div>
<header class="site-header"><a class="logo" href="/">{name}</a>
<form role="search"><input type="search" placeholder="{search}"></form>
<nav class="main-menu"><ul>{menu}</ul></nav></header>
<nav class="breadcrumb"><ol>{crumbs}</ol></nav>
<aside class="sidebar"><ul>{side}</ul></aside>
<main><article>
{article}</article></main>
<section class="feedback"><p>{useful}</p></section>
<aside class="related"><h2>{related}</h2><ul>{links}</ul></aside>
<footer><p>{updated}: {date}</p><ul>{foot}</ul><p>{legal}</p></footer>
</body>
</html>
"""


def make_html(doc: Doc) -> bytes:
    words = PORTAL["zh" if doc.zh else "en"]
    fill = {key: escape(text) for key, text in words.items()}
    for key in ("menu", "side", "foot", "links"):
        links = enumerate(words[key].split("|"), 1)
        fill[key] = "".join(f'<li><a href="/{key}/{i}">{escape(text)}</a></li>' for i, text in links)
    fill["accept"] = "".join(f"<button>{text}</button>" for text in words["accept"].split("|"))
    question, *answers = words["useful"].split("|")
    fill["useful"] = question + "".join(f" <button>{text}</button>" for text in answers)
    title, (home, base, *_) = escape(str(doc.meta["title"])), words["menu"].split("|")
    crumbs = "".join(f"<li>{text}</li>" for text in (home, base, title))
    facts = {
        "lang": "zh-CN" if doc.zh else "en",
        "title": title,
        "crumbs": crumbs,
        "doc_id": doc.meta["doc_id"],
    }
    return PAGE.format(**fill, **facts, date=doc.meta["effective_date"], article=MD.render(doc.text)).encode()


def make_text(doc: Doc) -> bytes:
    return doc.text.encode(ENCODINGS[doc.meta["format"]])


MAKERS = {"pdf": lambda doc: PdfMaker(doc).make(), "docx": make_docx, "html": make_html, "txt": make_text}
MAKERS |= {"pptx": make_pptx, "xlsx": make_xlsx}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="name of a source or an output")
    only = [Path(name).name for name in parser.parse_args().only]
    docs = sorted(load(), key=lambda doc: str(doc.meta["output"]))
    CORPUS.mkdir(exist_ok=True)
    made = 0
    for doc in docs:
        output, kind = str(doc.meta["output"]), str(doc.meta["format"]).split("-")[0]
        names = {output, Path(output).stem, doc.meta.get("source"), f"{doc.meta.get('source')}.md"}
        if kind != "md" and (not only or names & set(only)):
            data = MAKERS[kind](doc)
            (CORPUS / output).write_bytes(data)
            made += 1
            print(f"{output}: {len(data) / 1024:.0f} KB")
    if not made:
        parser.error(f"no source or output is named {' or '.join(only)}")
    write_fields(CORPUS, docs)


if __name__ == "__main__":
    main()

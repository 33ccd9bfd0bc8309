"""Report evidence: sections by name, scores, no snippet twice, every figure once, nothing made up."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from ragbuild.apps.evidence import Evidence, Ledger, find_evidence, holds, own_text, points
from ragbuild.apps.evidence_build import Source, build_store
from ragbuild.apps.evidence_figures import figure_block, images_in, insert_images
from ragbuild.apps.evidence_outline import Need, Outline, get_chapter_map, load_outline, match_name, section_of
from ragbuild.apps.evidence_report import Report, build_report, quotation
from ragbuild.apps.evidence_store import IndexStore, Snippet
from ragbuild.apps.evidence_tables import CompanyDocument, Figure, caption_of, figure_rows, numbered, section_rows
from ragbuild.core.config import EvidenceConfig, load_config
from ragbuild.core.errors import GateFailed, InputRefused, UsageError
from ragbuild.core.store import read_json
from ragbuild.offline.parse import ParsedDocument, ParsedEntry, ParsedImage
from tests.conftest import FakeEmbedder, make_document

CONFIG = load_config()
SAMPLE = Path(__file__).resolve().parents[2] / "data" / "prospectus"


def picture(alt: str, n: int) -> str:
    return f"![{alt}](data:image/png;base64,{base64.b64encode(b'PNG' + bytes([n]) * 40).decode()})"


PROSPECTUS = f"""# 云岭仪器股份有限公司招股说明书

## 目录

第五节 业务和技术 … 3

## 第五节 业务和技术

### 一、主营业务

云岭仪器的主营业务是光谱仪的研发和销售，产品结构如图 5-1 所示。

{picture("pic", 1)}

图 5-1 光谱仪的结构

### 二、主要客户

前五大客户的销售占比为 45.27%。

{picture("厂房", 2)}

## 第六节 财务会计信息与管理层分析

### 一、营业收入

2025 年营业收入为 120 万元，毛利率为 40%。

2024 年营业收入为 100 万元，毛利率为 38%。
"""
OTHER = """# 海湾仪器年报

## 一、主营业务

海湾仪器的主营业务是光谱仪的租赁。前五大客户的销售占比为 99.99%。
"""
ENGLISH = f"""# Northwind annual report

## Chapter 1 Business

### 1.1 Products

Northwind sells spectrometers. The design is shown in Figure 1.

Figure 1 The design

{picture("x", 3)}

### 1.2 Customers

The five largest customers account for 45.27 % of revenue. <script>alert(1)</script>

## Chapter 2 Risks

Currency risk: revenue in euro is 7 % of the total.
"""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> IndexStore:
    """Three companies in one store; `yunling` has the Chinese prospectus."""
    folder = tmp_path_factory.mktemp("evidence")
    sources = []
    for company, text in {"yunling": PROSPECTUS, "haiwan": OTHER, "northwind": ENGLISH}.items():
        (folder / f"{company}.md").write_text(text, encoding="utf-8")
        sources.append(Source(company, [folder / f"{company}.md"]))
    return build_store(folder / "store", sources, CONFIG, FakeEmbedder())


def need(title: str = "t", **fields: object) -> Need:
    return Need.model_validate({"title": title, "keywords": ["主营业务"]} | fields)


def company_document(**fields: object) -> CompanyDocument:
    base = {"company_id": "c", "task_id": "c", "doc_key": "k", "doc_source": "招股书.pdf", "title": "招股书"}
    return CompanyDocument.model_validate(base | {"language": "zh", "uploaded_pdf": True} | fields)


def figure(n: int, page: int, caption: str = "", number: str = "", source: str = "招股书.pdf") -> Figure:
    return Figure(
        company_id="c", doc_key="k", source=source, page_no=page, img_url=f"images/{n}.png", caption=caption,
        figure_number=number, at=n,
    )  # fmt: skip


class Fixed:
    """A store at the edge that gives these texts, whatever is asked."""

    def __init__(
        self, *texts: str, source: str = "a.pdf", uploaded: bool = True, sources: tuple[str, ...] = ()
    ) -> None:
        self.hits = [
            Snippet(
                snippet_id=f"s{i}", content=text, page_no=i + 1, page_end=i + 1, relevance=0.5, section=None,
                document=company_document(doc_source=(sources or (source,) * 99)[i], uploaded_pdf=uploaded),
            ) for i, text in enumerate(texts)
        ]  # fmt: skip

    def search(self, company_id, terms, k, *, section=None, skip=(), images=False):  # type: ignore[no-untyped-def]
        return [h for h in self.hits if h.snippet_id not in skip][:k]


# --- sections, captions -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heading", "expected"),
    [
        ("第五节 业务和技术", ("5", "业务和技术")), ("第十二章　附则", ("12", "附则")),
        ("二十、其他", ("20", "其他")),
        ("（三）应收账款", ("3", "应收账款")), ("2.5 Customers", ("2.5", "Customers")),
        ("Item 7. Risks", ("7", "Risks")),
        ("业务和技术", ("", "业务和技术")), ("一体化方案", ("", "一体化方案")), ("2025 年收入", ("", "2025 年收入")),
        ("30 万台扩产项目", ("30", "万台扩产项目")), ("5", ("5", "")), ("第五节", ("5", "")),
    ],
)  # fmt: skip
def test_the_number_before_a_heading(heading: str, expected: tuple[str, str]) -> None:
    assert numbered(heading) == expected


def test_sections_come_from_the_headings_with_their_pages() -> None:
    parts = [
        "# 公司\n\n# 招股说明书\n\n", "## 目录\n\n第一节 概览 … 3\n\n",
        "## 第一节 概览\n\n前言。\n\n### 一、甲\n\n甲文。\n\n",
        "续文。\n\n### 二、乙\n\n乙文。\n\n#### 细目\n\n丙文。\n\n", "## 第二节 风险\n\n风险文。\n",
    ]  # fmt: skip
    starts = tuple(sum(map(len, parts[:i])) for i in range(5))
    rows = section_rows(company_document(), ParsedDocument("".join(parts), starts))
    shown = [(r.section_id, r.names[-1], r.page_start, r.page_end, r.is_chapter) for r in rows]
    assert shown == [
        ("sec_1", "概览", 3, 4, True), ("sec_1_1", "甲", 3, 4, False), ("sec_1_2", "乙", 4, 4, False),
        ("sec_2", "风险", 5, 5, True),
    ]  # fmt: skip
    assert rows[1].chapter_title == "第一节 概览" and rows[1].names == ("一、甲", "甲")


def test_a_document_without_headings_is_one_chapter_and_a_number_is_not_given_twice() -> None:
    (row,) = section_rows(company_document(), ParsedDocument("只有正文。\n"))
    assert (row.section_id, row.names, row.is_chapter) == ("sec_x1", ("招股书",), True)
    twice = section_rows(company_document(), ParsedDocument("## 1 A\n\na\n\n## 1 B\n\nb\n"), prefix="d2_")
    assert [r.section_id for r in twice] == ["sec_d2_1", "sec_d2_x2"]


@pytest.mark.parametrize(
    ("line", "caption"),
    [
        ("图 5-1 结构", "图 5-1 结构"), ("图5-4 流程", "图5-4 流程"), ("**Figure 2. Flow**", "Figure 2. Flow"),
        ("图 5-1 所示，公司……", ""), ("Figure 2 shows the flow", ""), ("图 5-1 为股权结构", ""), ("图 3 中，灰色", ""),
        ("图 5-1 和图 5-2", ""), ("图 3 中国市场", "图 3 中国市场"), ("图 4 和田基地", "图 4 和田基地"),
        ("表 3 收入", ""), ("厂房照片", ""), ("图纸", ""),
        ("", ""), ("图 1 " + "长" * 200, ""),
    ],
)  # fmt: skip
def test_a_caption_begins_with_a_figure_and_its_number(line: str, caption: str) -> None:
    assert caption_of(line) == caption


@pytest.mark.parametrize("above", [False, True])
def test_a_caption_is_the_line_at_the_figure_and_serves_one(above: bool) -> None:
    links = [f"![图](images/d_{i}_1.png)" for i in (1, 2)]
    pairs = [(f"图 {i} 名称", link) if above else (link, f"图 {i} 名称") for i, link in enumerate(links, 1)]
    markdown = "\n\n".join(line for pair in pairs for line in pair) + "\n\n正文。\n\n![照片](images/d_3_1.png)\n"
    images = tuple(ParsedImage(f"d_{i}_1.png", b"x", i) for i in (1, 2, 3))
    entry = ParsedEntry(make_document(), ParsedDocument(markdown, images=images))
    figures = figure_rows(company_document(), entry)
    assert [(f.caption, f.figure_number) for f in figures] == [("图 1 名称", "1"), ("图 2 名称", "2"), ("", "")]


# --- names ------------------------------------------------------------------------------------------------------------


def rows(*titles: str, document: str = "k"):  # type: ignore[no-untyped-def]
    text = "".join(f"## {title}\n\n正文。\n\n" for title in titles)
    return section_rows(company_document(doc_key=document), ParsedDocument(text))


CHAPTERS = rows(
    "第四节 发行人基本情况", "第五节 业务和技术", "第六节 财务会计信息与管理层分析", "第七节 募集资金运用",
    "第八节 业务发展目标",
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("业务和技术", "第五节 业务和技术"), ("第五节 业务和技术", "第五节 业务和技术"),
        ("财务会计信息", "第六节 财务会计信息与管理层分析"),
        ("业务与技术", "第五节 业务和技术"), ("二、业务和技术", "第五节 业务和技术"),
        ("发行人基本概况", "第四节 发行人基本情况"),
    ],
)  # fmt: skip
def test_a_name_is_matched_by_substring_then_by_likeness(name: str, title: str) -> None:
    assert match_name(name, CHAPTERS).chapter_title == title


def test_an_ambiguous_name_lists_its_candidates() -> None:
    with pytest.raises(UsageError, match="several titles.*第五节 业务和技术.*第八节 业务发展目标"):
        match_name("业务", CHAPTERS)


@pytest.mark.parametrize("name", ["第五节", "5", "五、"])
def test_a_number_alone_names_no_chapter(name: str) -> None:
    with pytest.raises(UsageError, match="only a number.*第五节 业务和技术"):
        match_name(name, CHAPTERS)


def test_an_unknown_name_lists_what_there_is() -> None:
    with pytest.raises(UsageError, match="none of the titles.*第四节 发行人基本情况"):
        match_name("量子计算", CHAPTERS)


def test_a_title_of_the_main_document_goes_first() -> None:
    both = [*rows("第八节 公司治理与独立性"), *rows("八、公司治理", document="annual")]
    assert match_name("公司治理", both).doc_key == "k"


def test_the_chapter_map(store: IndexStore) -> None:
    chapters = [(c.chapter_title, c.chapter_code, c.page_start, c.page_end) for c in get_chapter_map(store, "yunling")]
    assert chapters == [("第五节 业务和技术", "5", 1, 1), ("第六节 财务会计信息与管理层分析", "6", 1, 1)]


def test_a_need_names_a_section_by_id_or_by_words(store: IndexStore) -> None:
    def found(**fields: object) -> str | None:
        row = section_of(store, "yunling", need(**fields))
        return row.section_id if row else None

    assert found(section_id="sec_5_2") == "sec_5_2"
    assert found(chapter="业务和技术", section="客户") == "sec_5_2"
    assert found(section="营业收入") == "sec_6_1"
    assert found(chapter="财务会计信息") == "sec_6"
    assert found() is None
    with pytest.raises(UsageError, match="'sec_9_9'.*sec_5_1"):
        found(section_id="sec_9_9")
    with pytest.raises(UsageError, match="none of the titles"):
        found(chapter="业务和技术", section="营业收入")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sections: []", "title"), ("title: x\nsections: [{title: a}]", "at least one keyword"),
        ("title: x\nsections: [{title: a, keywords: [k], colour: red}]", "sections.0.colour"),
        ("title: x\nsections: [{title: a, keywords: [k], limit_chapter: 5}]", "filter by chapter code finds the wrong"),
        ("- a\n b: [", "no outline"),
        ("title: x\nsections: [{title: a, keywords: [k]}, {title: a, keywords: [k]}]", "two sections are called 'a'"),
    ],
)  # fmt: skip
def test_an_outline_that_is_none_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "o.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(InputRefused, match=message):
        load_outline(tmp_path / "o.yaml")
    with pytest.raises(InputRefused, match="cannot be read"):
        load_outline(tmp_path / "none.yaml")


# --- scores -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "uploaded", "expected"),
    [
        ("毛利率和存货", False, 6 + 2 + 2), ("毛利率，毛利率，毛利率", True, 6 + 2 + 1),
        ("存货跌价", True, 2 + 1), ("必有甲与必有乙", False, 6), ("无关", True, 1), ("无关", False, 0),
        ("Gross margins", False, 2), ("grossly", False, 0),
    ],
)  # fmt: skip
def test_points_by_hand(text: str, uploaded: bool, expected: int) -> None:
    """6 once for a must_term, 2 for each keyword, 1 for an uploaded PDF; a keyword given twice counts once."""
    wanted = need(keywords=["毛利率", "存货", "存货 ", "gross margin"], must_terms=["毛利率", "必有甲", "必有乙"])
    assert points(text, wanted, uploaded)[0] == expected


def test_terms_are_found_as_they_stand() -> None:
    assert holds("公司的ＥＢＩＴＤＡ为", "EBITDA") and holds("税率", "税") and not holds("taxing", "tax")
    assert not holds("任何文字", " ")


def test_below_two_is_dropped_and_ties_keep_their_order() -> None:
    texts = ["无关一", "存货甲", "毛利率乙", "存货丙", "毛利率和存货丁", "无关二"]
    found = find_evidence(
        Fixed(*texts), "c", need(keywords=["毛利率", "存货"]), settings=EvidenceConfig(rag=6, top_n=3)
    )
    assert [i.content for i in found.items] == ["毛利率和存货丁", "存货甲", "毛利率乙"]
    assert (found.retrieved, found.below) == (6, 2)
    assert [i.points for i in found.items] == [5, 3, 3]


@given(st.lists(st.sampled_from(["毛利率", "存货", "毛利率和存货", "无关"]), max_size=8))
def test_order_is_points_then_rank(texts: list[str]) -> None:
    texts = [f"{text}{chr(0x4E00 + 7 * i) * 3}" for i, text in enumerate(texts)]
    found = find_evidence(
        Fixed(*texts), "c", need(keywords=["毛利率", "存货"]), settings=EvidenceConfig(rag=8, top_n=8)
    )
    expected = sorted((t for t in texts if "无关" not in t), key=lambda t: -("毛利率" in t) - ("存货" in t))
    assert [i.content for i in found.items] == expected


def test_repeated_text_of_one_source_counts_once() -> None:
    long = "报告期内公司存货余额持续上升，主要系备货增加所致，与同行业公司的变动趋势一致。"
    texts = [long, long.replace("，", " , "), long.replace("公司存货", "本公司存货"), long + "2025", long + "2024"]
    found = find_evidence(Fixed(*texts), "c", need(keywords=["存货"]))
    assert [i.snippet_id for i in found.items] == ["s0", "s3", "s4"], "other numbers are other facts"
    assert found.duplicates == 2
    other = find_evidence(Fixed(long, long, sources=("a.pdf", "b.pdf")), "c", need(keywords=["存货"]))
    assert [i.source for i in other.items] == ["a.pdf", "b.pdf"], "two sources are two pieces of evidence"


def test_a_snippet_is_handed_to_one_section_only() -> None:
    source, ledger = Fixed("存货甲", "存货乙甲乙", "存货甲。"), Ledger()
    one = EvidenceConfig(rag=1)
    first = find_evidence(source, "c", need("A", keywords=["存货"]), ledger=ledger, settings=one)
    second = find_evidence(source, "c", need("B", keywords=["存货"]), ledger=ledger, settings=one)
    third = find_evidence(source, "c", need("C", keywords=["存货"]), ledger=ledger, settings=one)
    assert [i.snippet_id for i in first.items + second.items] == ["s0", "s1"]
    assert not third.items and third.handed_out == 1, "the same words of the same source, under another id"
    assert ledger.owner == {"s0": "A", "s1": "B"}


def test_limit_chapter_is_refused_with_the_reason(store: IndexStore) -> None:
    with pytest.raises(UsageError, match="mean other chapters.*section_id"):
        find_evidence(store, "yunling", need(), limit_chapter="5")
    report = Report(store, "yunling", [need()])
    with pytest.raises(UsageError, match="limit_chapter is not taken"):
        report.retrieve("t", limit_chapter="5")


def test_only_a_pdf_by_its_content_that_the_company_uploaded_counts_as_one(store: IndexStore) -> None:
    assert not any(d.uploaded_pdf for d in store.documents.values()), "Markdown files"


# --- the store --------------------------------------------------------------------------------------------------------


def test_company_and_section_are_applied_before_ranking(store: IndexStore) -> None:
    found = find_evidence(store, "yunling", need(keywords=["光谱仪", "前五大客户"]))
    assert {i.source for i in found.items} == {"yunling.md"} and len(found.items) == 2
    assert all("目录" not in i.breadcrumb and 0 <= i.score <= 1 for i in found.items)
    row = section_of(store, "yunling", need(section_id="sec_5_2"))
    inside = find_evidence(store, "yunling", need(keywords=["光谱仪", "前五大客户"]), section=row)
    assert [(i.section_id, i.chapter_code, i.breadcrumb) for i in inside.items] == [
        ("sec_5_2", "5", "正文 > 第五节 业务和技术 > 二、主要客户")
    ]
    with pytest.raises(UsageError, match="no document of company 'nobody'; it has haiwan, northwind, yunling"):
        find_evidence(store, "nobody", need())


def test_nothing_found_is_an_empty_result_that_says_so(store: IndexStore) -> None:
    found = find_evidence(store, "yunling", need(keywords=["火星基地"]))
    assert found.items == () and found.message.startswith("no evidence found for 火星基地 in all documents")


def test_captioned_figures_can_be_searched_and_others_cannot(store: IndexStore) -> None:
    found = find_evidence(store, "yunling", need(keywords=["结构", "厂房"]), images=True)
    images = [i for i in found.items if i.type == "image"]
    assert [(i.caption, i.figure_number, i.section_id) for i in images] == [("图 5-1 光谱仪的结构", "5-1", "sec_5_1")]
    assert store.image(images[0].img_url) == b"PNG" + bytes([1]) * 40
    with pytest.raises(InputRefused, match="no picture"):
        store.image("images/../store.json")


def test_the_tables_lie_beside_the_index(store: IndexStore) -> None:
    table = read_json(store.folder / "sections.json")
    row = next(r for r in table if r["section_id"] == "sec_5_1")
    assert row["company_id"] == row["task_id"] == "yunling" and row["names"] == ["一、主营业务", "主营业务"]
    assert {d["company_id"] for d in read_json(store.folder / "documents.json")} == {"yunling", "haiwan", "northwind"}


def test_a_store_is_made_again_only_when_something_changed(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("# A\n\n## 一、业务\n\n主营业务是甲。\n", encoding="utf-8")
    source = [Source("a", [tmp_path / "a.md"])]
    build_store(tmp_path / "s", source, CONFIG, FakeEmbedder())
    embedder = FakeEmbedder()
    assert build_store(tmp_path / "s", source, CONFIG, embedder).version.name == "v0001" and not embedder.encoded
    (tmp_path / "a.md").write_text("# A\n\n## 一、业务\n\n主营业务是乙。\n", encoding="utf-8")
    store = build_store(tmp_path / "s", source, CONFIG, embedder)
    assert store.version.name == "v0002" and "乙" in find_evidence(store, "a", need()).items[0].content
    assert not (tmp_path / "s/indexes/v0001").exists()


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("# A\n\n主营业务。\n", encoding="utf-8")
    (tmp_path / "b.pdf").write_bytes(b"%PDF-1.7 cut off")
    store = build_store(tmp_path / "s", [Source("a", [tmp_path / "a.md", tmp_path / "b.pdf"])], CONFIG, FakeEmbedder())
    assert [r["doc_source"] for r in store.refused] == ["b.pdf"]
    with pytest.raises(InputRefused, match="no document can be read.*truncated"):
        build_store(tmp_path / "t", [Source("a", [tmp_path / "b.pdf"])], CONFIG, FakeEmbedder())
    with pytest.raises(UsageError, match="not there"):
        build_store(tmp_path / "t", [Source("a", [tmp_path / "none.pdf"])], CONFIG, FakeEmbedder())


# --- figures in a text ------------------------------------------------------------------------------------------------

TEXT = """## 业务

> 甲段，如图 5-2 所示。

*来源：招股书.pdf P13 · 正文*

> 乙段。

*来源：招股书.pdf P16 · 正文*
"""


def test_figures_go_to_the_paragraph_that_names_them_or_is_nearest() -> None:
    named, near, bare = figure(1, 20, "图 5-2 产业链", "5-2"), figure(2, 17, "图 5-3 规模", "5-3"), figure(3, 14)
    text = insert_images(TEXT, [bare, near, named])
    expected = TEXT.replace(
        "*来源：招股书.pdf P13 · 正文*",
        "*来源：招股书.pdf P13 · 正文*\n\n![图表 p14](images/3.png)\n\n*来源：招股书.pdf P14*\n\n"
        "![图 5-2 产业链](images/1.png)\n\n*来源：招股书.pdf P20*",
    )
    assert text == expected + "\n![图 5-3 规模](images/2.png)\n\n*来源：招股书.pdf P17*\n"


def test_a_number_is_not_the_beginning_of_another() -> None:
    text = "甲，见图 5-12。第 3 页\n\n乙，见图 5-1。第 9 页\n"
    assert insert_images(text, [figure(1, 3, "图 5-1 甲", "5-1")]).index("![") > text.index("乙")


def test_each_url_once_and_again_changes_nothing() -> None:
    twice = [figure(1, 13, "图 5-2 甲", "5-2"), figure(1, 16, "图 5-2 甲", "5-2"), figure(2, 16)]
    once = insert_images(TEXT, twice)
    assert images_in(once) == ["images/1.png", "images/2.png"]
    assert insert_images(once, twice) == once


@pytest.mark.parametrize(
    "bad", ["![x](images/9.png)", "<img src='images/1.png'>", "![x][r]\n\n[r]: http://a.b/c.png", "> ![x](a.png)"]
)
def test_a_picture_that_is_not_in_the_list_is_refused(bad: str) -> None:
    with pytest.raises(GateFailed, match="not in the section's list"):
        insert_images(f"{TEXT}\n{bad}\n", [figure(1, 13)])


def test_text_without_paragraphs_and_odd_names() -> None:
    assert insert_images("## 空\n", [figure(1, 2)]) == "## 空\n\n![图表 p2](images/1.png)\n\n*来源：招股书.pdf P2*\n"
    odd = figure(1, 2, "图 1 [a] *b*", "1", source="报告*.pdf").model_copy(update={"img_url": "images/a (1).png"})
    block = figure_block(odd)
    assert images_in(block) == ["images/a%20(1).png"] and "\\[a\\]" in block and "报告\\*.pdf" in block
    with pytest.raises(UsageError, match="plain name"):
        figure_block(odd.model_copy(update={"img_url": "a>b.png"}))


BLOCKS = [
    "## 标题", "甲段 P3", "> 引文\n> 二行", "```\ncode\n\nmore\n```", "| a |\n| --- |\n| b |", "- 一\n- 二",
    "*来源：招股书.pdf P5*", "见图 2。",
]  # fmt: skip


@given(st.lists(st.sampled_from(BLOCKS), max_size=8), st.lists(st.integers(1, 5), max_size=6))
def test_every_figure_once_and_the_text_stays(parts: list[str], numbers: list[int]) -> None:
    text = "\n\n".join(parts) or "空"
    figures = [figure(n, n, f"图 {n} 名" if n % 2 else "", str(n) if n % 2 else "") for n in numbers]
    out = insert_images(text, figures)
    assert sorted(images_in(out)) == sorted({f.img_url for f in figures})
    rest = out
    for f in {f.img_url: f for f in figures}.values():
        rest = rest.replace(figure_block(f), "", 1)
    assert [line for line in rest.split("\n") if line] == [line for line in text.split("\n") if line]


# --- the report -------------------------------------------------------------------------------------------------------

NEEDS = [
    Need(title="业务", chapter="业务和技术", keywords=("主营业务", "前五大客户"), must_terms=("光谱仪",)),
    Need(title="财务", chapter="财务会计信息", keywords=("营业收入", "毛利率")),
    Need(title="全文", keywords=("火星基地",)),
]


@pytest.fixture
def report(store: IndexStore) -> Report:
    return Report(store, "yunling", NEEDS, "价值报告")


def test_fetching_gives_every_figure_of_the_pages_captioned_or_not(report: Report) -> None:
    fetched = report.fetch_section("sec_5", need_img=True)
    assert [f.caption for f in fetched.images] == ["图 5-1 光谱仪的结构", ""]
    assert fetched.text.startswith("## 第五节") and "主要客户" in fetched.text
    assert report.fetch_section("sec_5_2").images == fetched.images[1:]
    assert report.fetch_section("sec_5", need_img=False).images == ()


def test_a_figure_on_a_shared_page_belongs_to_the_section_it_stands_in() -> None:
    parts = ["## 1 A\n\n甲。\n\n![a](images/d_2_1.png)\n\n## 2 B\n\n乙。\n\n![b](images/d_2_2.png)\n"]
    images = tuple(ParsedImage(f"d_2_{i}.png", b"x", 2) for i in (1, 2))
    parsed = ParsedDocument(parts[0], (0, 0), images)
    first, second = section_rows(company_document(), parsed)
    store = IndexStore.__new__(IndexStore)
    store.documents = {"k": company_document()}
    store._figures = figure_rows(company_document(), ParsedEntry(make_document(), parsed))
    assert (first.page_start, first.page_end, second.page_start) == (2, 2, 2)
    assert [f.img_url[-7:] for f in store.figures("c", first)] == ["2_1.png"]
    assert [f.img_url[-7:] for f in store.figures("c", second)] == ["2_2.png"]


def test_a_draft_is_not_saved_before_its_figures_were_fetched(report: Report) -> None:
    with pytest.raises(GateFailed, match=r"fetch_section\('sec_5', need_img=True\)"):
        report.save("业务", "## 业务\n")
    report.fetch_section("sec_5", need_img=False)
    with pytest.raises(GateFailed, match="not fetched"):
        report.draft("业务")


def test_a_draft_is_saved_only_with_all_figures_each_once_and_its_source(report: Report) -> None:
    images = report.fetch_section("sec_5").images
    with pytest.raises(GateFailed, match=r"lacks 2 figure\(s\): 图 5-1 光谱仪的结构.*no caption \(p1"):
        report.save("业务", "## 业务\n\n文。\n")
    good = report.draft("业务")
    with pytest.raises(GateFailed, match=r"lacks 1 figure\(s\): no caption"):
        report.save("业务", good.replace(f"]({images[1].img_url})", "](x)").replace("![图表 p1](x)", ""))
    with pytest.raises(GateFailed, match="not in the section's list"):
        report.save("业务", good + "\n![假](images/fake.png)\n")
    with pytest.raises(GateFailed, match="more than once"):
        report.save("业务", good + "\n" + figure_block(images[0]) + "\n")
    with pytest.raises(GateFailed, match="no line with its source"):
        report.save("业务", good.replace("*来源：yunling.md P1*", ""))
    report.save("业务", good)
    assert report.drafts["业务"] == good and images_in(good) == [f.img_url for f in images]


def test_a_quotation_that_is_no_evidence_is_refused(report: Report) -> None:
    report.fetch_section("sec_6")
    good = report.draft("财务")
    with pytest.raises(GateFailed, match="not among its evidence: 营业收入为 999 万元"):
        report.save("财务", good + "\n> 营业收入为 999 万元\n")
    with pytest.raises(GateFailed, match="not among its evidence"):
        report.save("财务", good + "\n- > 营业收入为 999 万元\n")
    report.save("财务", good)


def test_the_report_says_where_nothing_was_found_and_what_is_not_done(report: Report) -> None:
    report.write_section("业务")
    report.write_section("全文")
    text = report.markdown()
    assert "*未检索到证据：火星基地（检索到 0 条，无一可用）*" in text
    assert "## 财务\n\n*尚未完成*" in text
    assert text.startswith("# 价值报告\n\n*本稿只引文件原文，不作推断。证据 2 条，图 2 幅。*")
    with pytest.raises(UsageError, match="no section '附录'; it has 业务, 财务, 全文"):
        report.write_section("附录")


def test_a_figure_stands_in_one_section_also_when_two_use_its_pages(store: IndexStore) -> None:
    pair = [need("A", chapter="业务和技术", keywords=["主营业务"]), need("B", chapter="业务和技术", keywords=["客户"])]
    report = Report(store, "yunling", pair)
    report.write_section("A")
    report.write_section("B")
    assert len(images_in(report.drafts["A"])) == 2 and images_in(report.drafts["B"]) == []
    report.write_section("A")
    assert len(images_in(report.drafts["A"])) == 2, "written again, it keeps its figures"


def test_every_figure_has_a_source_line_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text(
        f"# A\n\n## 一、业务\n\n主营业务。\n\n{picture('x', 1)}\n\n{picture('y', 2)}\n", "utf-8"
    )
    store = build_store(tmp_path / "s", [Source("a", [tmp_path / "a.md"])], CONFIG, FakeEmbedder())
    report = Report(store, "a", [need("业务", chapter="业务")], "报告")
    report.write_section("业务")
    with pytest.raises(GateFailed, match="no line with its source"):
        report.save("业务", report.drafts["业务"].replace("\n\n*来源：a.md P1*", "", 1))


def test_the_sections_of_another_companys_task_are_not_given(store: IndexStore) -> None:
    with pytest.raises(UsageError, match="no section has the id"):
        Report(store, "yunling", [need(keywords=["客户"])], task_id="haiwan").fetch_section("sec_1")
    with pytest.raises(UsageError, match="none of the titles"):
        Report(store, "yunling", [need(chapter="主营业务")], task_id="haiwan")


def test_what_a_document_links_to_is_no_picture_of_the_report(tmp_path: Path) -> None:
    text = (
        "# A\n\n## 一、业务\n\n主营业务见 ![图][r]、![a [b]](http://evil/1.png)、![c](i/a(1).png)，另见 [1]。\n\n"
        "## 二、附注\n\n附注之一。\n\n- [r]: http://evil/2.png\n\n[1]: http://evil/3\n"
    )
    (tmp_path / "a.md").write_text(text, encoding="utf-8")
    store = build_store(tmp_path / "s", [Source("a", [tmp_path / "a.md"])], CONFIG, FakeEmbedder())
    report = Report(store, "a", [need("业务", chapter="业务"), need("附注", chapter="附注", keywords=["附注"])], "报告")
    for title in report.needs:
        report.write_section(title)
    assert images_in(report.markdown()) == [] and "href" not in report.html() and "<img" not in report.html()
    assert "evil/3" in report.html() and all(found.items for found in report.found.values())
    report.save("业务", "![x][q]\n")
    with pytest.raises(GateFailed, match="not in the section's list"):
        report.save("附注", "[q]: http://evil/4.png\n")


def test_an_unknown_company_is_named_with_those_there_are(store: IndexStore) -> None:
    with pytest.raises(UsageError, match="no document of company 'nobody'; it has haiwan, northwind, yunling"):
        Report(store, "nobody", NEEDS)


def test_all_bad_names_of_an_outline_are_told_at_once(store: IndexStore) -> None:
    with pytest.raises(UsageError, match="section 'A'.*量子(.|\n)*section 'B'.*only a number"):
        Report(store, "yunling", [need("A", chapter="量子"), need("B", chapter="第五节")])


def test_english_works_alike_and_text_never_becomes_markup(store: IndexStore) -> None:
    needs = [
        Need(title="Products", chapter="Business", section="Products", keywords=("spectrometer",)),
        Need(title="Customers <i>", section="Customers", keywords=("five largest customers", "revenue")),
        Need(title="Risk", chapter="Risks", keywords=("currency risk",)),
    ]
    report = Report(store, "northwind", needs, "Northwind <script>")
    for item in needs:
        report.write_section(item.title)
    text, html = report.markdown(), report.html()
    assert "![Figure 1 The design](images/northwind_northwind.md_1_1.png)\n\n*Source: northwind.md P1*" in text
    assert [len(report.found[n.title].items) for n in needs] == [1, 1, 1]
    assert "Body > Chapter 1 Business > 1.2 Customers" in text
    assert "<script>" not in html and "&lt;script&gt;" in html and "<i>" not in html
    assert "default-src 'none'" in html and html.count('src="data:image/png;base64,') == 1 and "http" not in html[700:]


def test_evidence_is_the_documents_own_text_without_headings_and_pictures() -> None:
    content = "### 标题\n\n文字 ![图](images/a.png)。\n\n```\n# no heading\n```"
    assert own_text(content) == "文字 。\n\n```\n# no heading\n```"
    item = Evidence(
        snippet_id="s", content="| 1 |\n\n<b>x</b> a<br>b", table_header="| a |\n| --- |", source="s", page_no=1,
        page_end=1, score=0, points=2,
    )  # fmt: skip
    assert quotation(item) == "> | a |\n> | --- |\n> | 1 |\n>\n> &lt;b>x&lt;/b> a<br>b"


def test_build_report_from_files(tmp_path: Path) -> None:
    (tmp_path / "招股说明书.md").write_text(PROSPECTUS, encoding="utf-8")
    outline = {"title": "报告", "sections": [n.model_dump(mode="json") for n in NEEDS]}
    (tmp_path / "outline.yaml").write_text(yaml.safe_dump(outline, allow_unicode=True), encoding="utf-8")
    args = ([tmp_path / "招股说明书.md"], tmp_path / "outline.yaml")
    with pytest.raises(UsageError, match="names no company_id"):
        build_report(*args, "", tmp_path / "out", CONFIG, embedder=FakeEmbedder())
    with pytest.raises(UsageError, match="no section 'x'; it has 业务"):
        build_report(*args, "y", tmp_path / "out", CONFIG, only=["x"], embedder=FakeEmbedder())
    report = build_report(*args, "y", tmp_path / "out", CONFIG, embedder=FakeEmbedder())
    data = read_json(tmp_path / "out" / "evidence.json")
    assert data == json.loads(json.dumps(report.summary()))
    assert [(s["saved"], len(s["images"])) for s in data["sections"]] == [(True, 2), (True, 0), (True, 0)]
    for url in images_in((tmp_path / "out" / "report.md").read_text(encoding="utf-8")):
        assert (tmp_path / "out" / url).is_file() or "%" in url
    (tmp_path / "older.yml").write_bytes(args[1].read_bytes())
    (tmp_path / "out" / "images" / "mine.png").write_bytes(b"x")
    one = build_report(*args, "y", tmp_path / "out", CONFIG, only=["财务"], embedder=FakeEmbedder())
    assert [p.name for p in (tmp_path / "out" / "images").iterdir()] == ["mine.png"], "only its own pictures go"
    again = build_report([tmp_path], args[1], "y", tmp_path / "out", CONFIG, embedder=FakeEmbedder())
    assert [d.doc_source for d in again.store.documents.values()] == ["招股说明书.md"], (
        "neither report nor outline is evidence"
    )
    assert list(one.drafts) == ["财务"] and [f.page_no for f in one.left_out()] == [1, 1]


# --- the sample -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Report:
    out = tmp_path_factory.mktemp("sample")
    return build_report([SAMPLE], SAMPLE / "outline.yaml", "", out, CONFIG, embedder=FakeEmbedder())


def test_every_section_of_the_sample_gets_its_evidence(sample: Report) -> None:
    outline: Outline = load_outline(SAMPLE / "outline.yaml")
    assert len(outline.sections) == 8 == len(sample.drafts)
    ids = [i.snippet_id for f in sample.found.values() for i in f.items]
    assert all(f.items for f in sample.found.values()) and len(ids) == len(set(ids))
    for title, found in sample.found.items():
        row = sample.sections[title]
        for item in found.items:
            assert item.source == row.doc_source and row.page_start <= item.page_no <= row.page_end
            assert item.points >= 3 and 0 <= item.score <= 1, "an uploaded PDF"
            markdown = sample.store.version.markdown(row.doc_key)
            assert all(line in markdown for line in item.content.split("\n")), "word for word"


def test_every_figure_of_the_sample_is_placed_once_and_none_is_invented(sample: Report) -> None:
    text = sample.markdown()
    seen = images_in(text)
    pages = [f.page_no for f in sample.store.figures("lanyue") if f.source == "prospectus.pdf"]
    assert pages == [6, 10, 13, 14, 14, 15, 16, 17, 19, 20, 20, 23, 24, 25]
    assert sorted(seen) == sorted({f"images/lanyue_prospectus.pdf_{p}_{n}.png" for p in pages for n in (1, 2)
                                   if n <= pages.count(p)})  # fmt: skip
    captions = [f.caption for f in sample.store.figures("lanyue") if f.source == "prospectus.pdf"]
    assert captions.count("") == 4 == text.count("![图表 p") and "图5-4 谐波减速器生产工艺流程" in captions
    assert {f.source for f in sample.left_out()} == {"annual-report-2025.pdf"}, "no section is about it"


def test_another_companys_document_beside_it_serves_for_nothing(sample: Report) -> None:
    assert {d.company_id for d in sample.store.documents.values()} == {"lanyue", "shuoluan"}
    assert not any(value in sample.markdown() for value in ("朔峦", "71.85%", "23,480.60"))
    found = find_evidence(sample.store, "lanyue", need(keywords=["朔峦", "商誉", "光伏组件"]))
    assert not found.items and found.message.startswith("no evidence")


def test_sections_that_share_a_page_do_not_share_its_figures(sample: Report) -> None:
    held = {
        s: [f.page_no for f in sample.fetch_section(s).images] for s in ("sec_5_7", "sec_5_8", "sec_6_1", "sec_6_2")
    }
    assert held == {"sec_5_7": [], "sec_5_8": [17], "sec_6_1": [19, 20], "sec_6_2": [20]}


def test_names_of_the_sample(sample: Report) -> None:
    chapters = [r for r in sample.store.sections("lanyue") if r.is_chapter]
    shown = [(c.chapter_title, c.page_start, c.page_end) for c in get_chapter_map(sample.store, "lanyue")[1:10]]
    assert shown[0] == ("第一节 释义", 5, 5) and shown[4] == ("第五节 业务和技术", 13, 18) and len(shown) == 9
    assert match_name("业务与技术", chapters).section_id == "sec_5"
    with pytest.raises(UsageError, match="several titles.*第六节.*第八节"):
        match_name("与", chapters)
    with pytest.raises(UsageError, match="none of the titles"):
        match_name("可比公司估值", chapters)

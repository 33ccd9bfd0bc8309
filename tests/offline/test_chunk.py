"""Chunking: exact spans, limits, boundaries, overlap, stable ids, refusals; hand-worked and property tests."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ragbuild.core.config import ChunkConfig
from ragbuild.core.records import Document, TermEntry, index_text
from ragbuild.core.text import TokenCounter
from ragbuild.offline.chunk import ChunkResult, Tagger, chunk_corpus, chunk_document
from ragbuild.offline.sections import place, read_units

SP = TokenCounter()  # the tokenizer of all profiles
SMALL = ChunkConfig(parent_tokens=80, child_tokens=30, overlap_tokens=8)


class Words:
    """One token a word, so that expectations can be counted by hand."""

    name = "words"

    def count(self, texts):
        return [len(text.split()) for text in texts]


def document(**fields) -> Document:
    base = {"doc_id": "guide", "doc_source": "guide.md", "title": "Guide", "language": "en", "content_hash": "abc"}
    return Document(**(base | fields))


def chunk(markdown: str, config: ChunkConfig = SMALL, counter=None, **options) -> ChunkResult:
    doc = options.pop("doc", document())
    page_of = options.pop("page_of", lambda offset: 1)
    return chunk_document(doc, markdown, page_of, config=config, counter=counter or Words(), **options)


def parents_of(result: ChunkResult) -> list:
    return [c for c in result.chunks if c.is_parent]


def children_of(result: ChunkResult) -> list:
    return [c for c in result.chunks if not c.is_parent]


def words(n: int, mark: str = "w") -> str:
    """A sentence of n words."""
    return "A" + "".join(f" {mark}{i}" for i in range(1, n)) + "."


# --- hand-worked examples -------------------------------------------------------------------------------------------


def test_a_small_document():
    md = "# Guide\n\nWelcome here.\n\n## Backup ##\n\n### Weekly `full` **run**\n\nDo it. Then rest.\n"
    result = chunk(md)
    parent, child, second, _ = result.chunks
    assert [c.content for c in parents_of(result)] == [
        "# Guide\n\nWelcome here.",
        "### Weekly `full` **run**\n\nDo it. Then rest.",
    ]
    assert (parent.chapter, parent.section, parent.breadcrumb) == ("Guide", "", "Guide")
    assert (second.chapter, second.section) == ("Backup", "Weekly full run")
    assert second.breadcrumb == "Guide > Backup > Weekly full run"
    assert parent.child_ids == (child.chunk_id,) and child.parent_id == parent.chunk_id
    assert parent.chunk_id[:2] == "p-" and child.chunk_id[:2] == "c-" and len(child.chunk_id) == 18
    assert child.n_tokens == 4  # "#", "Guide", "Welcome", "here."
    assert result.stats["heading_only_sections"] == 1  # Backup: its word is in the breadcrumb of what follows
    assert (result.stats["parents"], result.stats["children"], result.refused) == (2, 2, [])
    assert result.stats["child_tokens"] == [4, 8]


def test_sentences_are_packed_evenly_and_the_last_ones_repeated():
    # 7 + 6 * 6 = 43 words in one paragraph; limit 30, overlap 8: two children, the second repeats one sentence (6)
    md = " ".join([words(7), *(words(6, f"s{k}") for k in range(6))])
    result = chunk(md)
    first, second = children_of(result)
    assert (first.span[0], second.span[1]) == (0, len(md))
    repeated = md[second.span[0] : first.span[1]]
    assert len(repeated.split()) == 6 and repeated.startswith("A s") and repeated.endswith(".")
    assert (first.n_tokens, second.n_tokens) == (25, 24)  # 7 + 3*6, and 6 repeated + 3*6
    assert result.stats["overlaps"] == [6]


def test_a_long_last_sentence_is_repeated_whole_up_to_twice_the_overlap():
    def overlaps(length: int) -> list[int]:
        return chunk(f"{words(14)}\n\n{words(length, 'x')}\n\n{words(13, 'z')}").stats["overlaps"]

    # 14 + length + 13 > 30: the break comes before the last sentence, the first two fit together
    assert overlaps(8) == [8]
    assert overlaps(16) == [16]
    assert overlaps(17) == []


def test_no_overlap_when_configured_so():
    config = ChunkConfig(parent_tokens=80, child_tokens=30, overlap_tokens=0)
    result = chunk(" ".join(words(6, f"s{k}") for k in range(12)), config)
    assert result.stats["overlaps"] == []
    assert all(a.span[1] <= b.span[0] for a, b in pairwise(children_of(result)))


def test_a_continued_table_has_its_header_in_the_index_text_only():
    head = "| code | cause |\n|---|---|"
    rows = [f"| E{100 + i} | bad thing {i} |" for i in range(12)]  # 7 words each
    result = chunk("# Guide\n\n" + "\n".join([head, *rows]) + "\n\nAfter it.")
    children = children_of(result)
    assert len(children) > 2
    assert children[0].table_header == "" and head in children[0].content
    for child in children[1:]:
        assert child.table_header == head and head not in child.content
        assert index_text(child).startswith(f"Guide\n{head}\n| E1")
    assert parents_of(result)[1].table_header == head
    assert all(line.startswith("| E") and line.endswith("|") for c in children[1:-1] for line in c.content.split("\n"))


def test_a_header_wider_than_half_a_child_is_not_repeated():
    head = "| " + " | ".join(f"h{i}" for i in range(8)) + " |\n|" + "---|" * 8  # 17 + 1 words
    result = chunk(head + "".join(f"\n| {words(8)} |" for _ in range(8)))
    assert {c.table_header for c in result.chunks} == {""} and result.stats["wide_table_headers"] == 1


def test_table_and_code_tails_are_not_repeated_before_other_text():
    md = "```\n" + "\n".join(words(5) for _ in range(5)) + "\n```\n\n" + words(14)
    first, second = children_of(chunk(md))
    assert first.content.endswith("```") and second.content == words(14)


def test_an_introduction_stays_with_its_list_and_a_heading_with_its_text():
    md = f"## Steps\n\n{words(20)}\n\nDo this now:\n\n1. {words(8)}\n2. {words(8)}\n"
    first, second = children_of(chunk(md, ChunkConfig(parent_tokens=80, child_tokens=30, overlap_tokens=0)))
    assert first.content == f"## Steps\n\n{words(20)}"
    assert second.content.startswith("Do this now:\n\n1. A")


def test_headings_in_fences_and_without_a_space_are_text():
    md = "# T\n\n```bash\n# no heading\n```\n\n#tag is text\n\n~~~\n## still open\n\ntext"
    result = chunk(md, ChunkConfig())
    assert [c.content for c in parents_of(result)] == [md]
    assert result.stats["heading_only_sections"] == 0


def test_an_inline_span_of_three_backticks_opens_no_fence():
    assert len(parents_of(chunk("```a``` is code\n\n# Next\n\ntext"))) == 2


def test_chapters_without_h2_with_several_h1_and_without_headings():
    assert place({1: "Only", 3: "Part"}, False, "Only, 2nd edition") == (
        "Only",
        "Part",
        "Only, 2nd edition > Part",
    )
    assert place({1: "One", 2: "Two", 4: "Four"}, True, "Book") == ("One", "Two > Four", "Book > One > Two > Four")
    assert place({1: "One", 2: "Two"}, False, "Book") == ("Two", "", "Book > Two")
    assert place({2: "", 3: "x"}, False, "Book") == ("Book", "x", "Book > x")
    result = chunk("just text")
    assert (result.chunks[0].chapter, result.chunks[0].section) == ("Guide", "")
    result = chunk("# One\n\na\n\n# Two\n\n## Deep\n\nb")
    assert [c.breadcrumb for c in parents_of(result)] == ["Guide > One", "Guide > Two > Deep"]


def test_chinese_sentences_lists_and_headings():
    md = "# 指南\n\n## 备份\n\n设备每天备份一次。口令至少十六位！丢了怎么办？\n\n步骤：\n\n"
    md += "1、登录。\n2、运行 `backup run`。\n"
    units = [md[u.start : u.end] for u in read_units(md)]
    assert units[:5] == ["# 指南", "## 备份", "设备每天备份一次。", "口令至少十六位！", "丢了怎么办？"]
    assert units[5:] == ["步骤：", "1、登录。", "2、运行 `backup run`。"]
    result = chunk(md, ChunkConfig(), SP, doc=document(title="指南", language="zh"))
    assert parents_of(result)[0].breadcrumb == "指南 > 备份"


def test_units_of_lists_soft_wrapped_lines_images_and_crlf():
    md = (
        "Version 4 was released in\r\n2026. It is good.\r\n\r\n- one. Two is\r\n  longer\r\n- three\r\n\r\n"
        "![Figure 1](images/a.png)\r\n\r\n> **Note:** mind. This too."
    )
    units = read_units(md)
    assert [md[u.start : u.end] for u in units] == [
        "Version 4 was released in\r\n2026.", "It is good.", "- one.", "Two is\r\n  longer", "- three",
        "![Figure 1](images/a.png)", "> **Note:** mind.", "This too.",
    ]  # fmt: skip
    assert [u.kind for u in units][5] == "image"


def test_an_overlong_sentence_is_cut_at_a_clause_and_counted():
    clause = "one two three four five six seven eight nine ten,"
    result = chunk("Start " + " ".join([clause] * 6) + " end.")
    assert result.stats["cut_sentences"] == 1
    assert all(c.n_tokens <= 30 for c in children_of(result))
    assert all(c.content.endswith((",", ".")) for c in children_of(result))
    assert result.stats["overlaps"] == []  # an overlap would start inside the sentence


def test_an_overlong_row_is_cut_between_cells_and_an_overlong_code_line_is_counted():
    row = "|" + " one two three four five six seven eight nine ten |" * 5
    result = chunk(f"| a | b |\n|---|---|\n{row}")
    assert (result.stats["cut_rows"], result.stats["cut_sentences"]) == (1, 0)
    assert all(c.content.endswith("|") for c in children_of(result))
    assert chunk("```\n" + "x " * 50 + "\n```").stats["cut_code"] == 1


def test_pages_and_images_come_from_the_maps():
    md = "# T\n\nfirst page\n\nsecond page"
    edge = md.index("second")
    result = chunk(
        md,
        page_of=lambda offset: 1 + (offset >= edge),
        image_ids=lambda start, end: ("img-1",) if start <= edge < end else (),
    )
    assert {(c.page, c.page_end, c.image_ids) for c in result.chunks} == {(1, 2, ("img-1",))}


def test_the_fields_of_the_document_are_copied():
    doc = document(
        doc_version="v2", product_model=("LG-500",), kb="manuals", status="legacy", effective_date="2026-02-10"
    )
    for c in chunk("text", doc=doc).chunks:
        assert c.doc_key == doc.key and c.status == "legacy" and c.effective_date == "2026-02-10"
        assert (c.doc_type, c.doc_source, c.language) == ("document", "guide.md", "en")


def test_what_lacks_metadata_is_refused_with_its_reason_and_its_parent():
    result = chunk("# A\n\none\n\n# B\n\ntwo", page_of=lambda offset: 0 if offset > 8 else 1)
    assert [c.content for c in parents_of(result)] == ["# A\n\none"]
    assert len(result.refused) == 2 and all(r["doc_source"] == "guide.md" for r in result.refused)
    assert "page" in result.refused[0]["reason"] and result.refused[1]["reason"] == "all its children were refused"

    def no_page(offset: int) -> int:
        raise IndexError("beyond the last page")

    assert "beyond the last page" in chunk("text", page_of=no_page).refused[0]["reason"]


def test_children_of_a_refused_parent_are_refused():
    md = " ".join(words(10, f"s{k}") for k in range(7))  # one parent of 70 words, several children
    images = lambda start, end: () if end - start < 200 else (1,)  # noqa: E731  an id that is no text
    result = chunk(md, image_ids=images)
    assert result.chunks == []
    assert {r["reason"] for r in result.refused[1:]} == {"its parent was refused"}


@pytest.mark.parametrize("md", ["", " \n\t\r\n", "# Only\n\n## Headings\n", "#\n"])
def test_nothing_to_chunk(md):
    result = chunk(md)
    assert (result.chunks, result.refused) == ([], [])


def test_a_count_that_is_higher_than_the_sum_of_its_units_is_respected():
    class Surprising(Words):
        """Counts what is joined by white space dearer than its parts."""

        def count(self, texts):
            return [len(t.split()) + 2 * t.strip().count(". ") for t in texts]

    result = chunk(" ".join(words(5, f"s{k}") for k in range(40)), counter=Surprising())
    assert all(c.n_tokens <= 30 for c in children_of(result)) and all(c.n_tokens <= 80 for c in parents_of(result))
    assert [c.n_tokens for c in result.chunks] == Surprising().count([c.content for c in result.chunks])


# --- ids --------------------------------------------------------------------------------------------------------------


def test_ids_depend_on_bytes_key_and_settings_only():
    md = "# T\n\n" + " ".join(words(6, f"s{k}") for k in range(20))

    def ids(config=SMALL, **fields):
        return [c.chunk_id for c in chunk(md, config, doc=document(**fields)).chunks]

    base = ids()
    assert base == ids() == ids(title="Another title", status="legacy") and len(set(base)) == len(base)
    other = ChunkConfig(parent_tokens=80, child_tokens=30, overlap_tokens=9)
    for changed in (ids(content_hash="abd"), ids(doc_version="v2"), ids(product_model=("X",)), ids(other)):
        assert not set(base) & set(changed)


def test_a_corpus_in_any_order_and_a_document_given_twice():
    one, two = document(), document(doc_id="other", doc_source="other.md", content_hash="x")
    items = [(one, "# A\n\nfirst", lambda o: 1), (two, "# B\n\nsecond", lambda o: 1, lambda a, b: ("i",))]
    done: list[str] = []
    forward = chunk_corpus(items, config=SMALL, counter=Words(), progress=done.append)
    backward = chunk_corpus(reversed(items), config=SMALL, counter=Words())
    assert {c.chunk_id: c for c in forward.chunks} == {c.chunk_id: c for c in backward.chunks}
    assert done == ["guide.md", "other.md"] and forward.chunks[-1].image_ids == ("i",)
    assert (forward.stats["documents"], forward.stats["parents"], forward.stats["child_tokens"]) == (2, 2, [3, 3])
    assert (forward.stats["orphan_parents"], forward.stats["orphan_children"]) == (0, 0)
    twice = chunk_corpus([*items, items[0], (document(doc_id="e"), " ", lambda o: 1)], config=SMALL, counter=Words())
    assert len(twice.chunks) == 4 and "given twice" in twice.refused[0]["reason"]
    assert twice.stats["documents_without_chunks"] == ["guide.md"]
    assert chunk_corpus([], config=SMALL, counter=Words()).stats["parents"] == 0


# --- tags -------------------------------------------------------------------------------------------------------------

TERMS = [
    TermEntry(standard_term="Single Sign-On", abbreviation="SSO", tag="access"),
    TermEntry(standard_term="单点登录", tag="access"),
    TermEntry(standard_term="单点登录服务器", tag="server"),
    TermEntry(standard_term="backup", tag="backup"),
    TermEntry(standard_term="cluster", tag="cluster"),
    TermEntry(standard_term="audit log", tag="audit"),
    TermEntry(standard_term="untagged term"),
]


def test_tagger():
    tag = Tagger(TERMS)
    assert tag("The sso and single\nsign-on; one BACKUP, ssorry") == ("access", "backup")
    assert tag("启用SSO后，单点登录服务器不可用") == ("access", "server")  # the longest form, once
    assert tag("cluster, audit log, backup, SSO; cluster") == ("cluster", "access", "audit")  # at most three
    assert tag("untagged term") == tag("") == ()


def test_a_chunk_without_a_term_has_the_tags_of_its_headings():
    result = chunk("# T\n\n## Backup\n\nIt takes an hour.\n\n### Other\n\nSSO is on.", tagger=Tagger(TERMS))
    assert [c.tag for c in parents_of(result)] == [("backup",), ("access",)]
    two = children_of(chunk(f"## Backup\n\n{words(24)} {words(20)}", tagger=Tagger(TERMS)))
    assert [c.tag for c in two] == [("backup",), ("backup",)]


# --- any Markdown -----------------------------------------------------------------------------------------------------

EN = st.lists(st.sampled_from("the gateway backup restores LG-500 v2.0.1 only, e.g. node; (once)".split()), min_size=1)
SENTENCE = st.one_of(
    EN.map(lambda ws: "Then " + " ".join(ws) + "."),
    st.lists(st.sampled_from("设备备份恢复口令，集群节点、升级（一）"), min_size=3, max_size=60).map(
        lambda cs: "".join(cs) + "。"
    ),
)
CELL = st.text("ab设备 -:`", min_size=1, max_size=30)
HEADING = st.tuples(st.integers(1, 5), st.sampled_from(["Backup", "集群 升级", "", "C# #", "`x` [y](z)"])).map(
    lambda h: [("heading", "#" * h[0] + (" " + h[1] if h[1] else ""))]
)
PARAGRAPH = st.tuples(st.lists(SENTENCE, min_size=1, max_size=6), st.sampled_from([" ", "\n"])).map(
    lambda p: [("sentence", s + p[1]) for s in p[0]]
)
ITEMS = st.lists(SENTENCE, min_size=1, max_size=5).map(lambda ss: [("sentence", f"- {s}\n") for s in ss])
TABLE = st.lists(st.tuples(CELL, CELL), min_size=1, max_size=9).map(
    lambda rows: [("row", "| k | v |\n|---|---|\n"), *(("row", f"| {a} | {b} |\n") for a, b in rows)]
)
CODE = st.lists(st.sampled_from(["# comment", "x = 1", "    y: [1, 2]", "", "if a | b:", "~~~"]), max_size=12).map(
    lambda lines: [("code", "```\n"), *(("code", f"{line}\n") for line in lines), ("code", "```\n")]
)
OTHER = st.sampled_from(["![图 1](images/a.png)", "---", "> quote\n> goes on", "\u3000", "<b>x</b>", "#tag", "\ufeff"])
BLOCK = st.one_of(HEADING, PARAGRAPH, ITEMS, TABLE, CODE, OTHER.map(lambda t: [("other", t)]))


class Characters:
    """White space counts too, as in byte-level tokenizers."""

    name = "characters"

    def count(self, texts):
        return [len(text) for text in texts]


CONFIGS = st.sampled_from(
    [
        ChunkConfig(),
        ChunkConfig(parent_tokens=64, child_tokens=32, overlap_tokens=8),
        ChunkConfig(parent_tokens=32, child_tokens=16, overlap_tokens=0),
        ChunkConfig(parent_tokens=200, child_tokens=200, overlap_tokens=60),
    ]
)


def write(blocks, newline: str) -> tuple[str, list[tuple[str, int, int]]]:
    """The Markdown of generated blocks and (kind, start, end) of each of its parts."""
    text, parts = "", []
    for block in blocks:
        for kind, piece in block:
            piece = piece.replace("\n", newline)
            lead = len(piece) - len(piece.lstrip())
            if piece.strip():
                parts.append((kind, len(text) + lead, len(text) + len(piece.rstrip())))
            text += piece
        text += newline * 2
    return text, parts


def check(result: ChunkResult, md: str, config: ChunkConfig, counter, headings: list[tuple[int, int]]) -> None:
    """Every rule that holds for any text."""
    parents, children = parents_of(result), children_of(result)
    by_id = {c.chunk_id: c for c in result.chunks}
    assert len(by_id) == len(result.chunks)
    assert all(c.content == md[slice(*c.span)] == c.content.strip() for c in result.chunks)
    assert [c.n_tokens for c in result.chunks] == counter.count([c.content for c in result.chunks])
    assert all(c.n_tokens <= config.child_tokens for c in children)
    assert all(c.n_tokens <= config.parent_tokens for c in parents)
    assert all(a.span[1] <= b.span[0] for a, b in pairwise(parents))
    order = [c.chunk_id for p in parents for c in (p, *(by_id[i] for i in p.child_ids))]
    assert order == [c.chunk_id for c in result.chunks]
    for parent in parents:
        own = [by_id[i] for i in parent.child_ids]
        assert own and all(c.parent_id == parent.chunk_id for c in own)
        assert all(parent.span[0] <= c.span[0] and c.span[1] <= parent.span[1] for c in own)
        for a, b in pairwise(own):
            assert a.span[0] < b.span[0] and a.span[1] < b.span[1]
            shared = md[b.span[0] : a.span[1]]
            assert counter.count([shared])[0] <= 2 * config.overlap_tokens
    for start, _ in headings:
        assert not any(c.span[0] < start < c.span[1] for c in result.chunks)
    wanted = {i for i, char in enumerate(md) if not char.isspace()}
    wanted -= {i for a, b in headings for i in range(a, b)}
    wanted -= {i for r in result.refused for i in range(*r["span"])}
    for group in (parents, children):
        assert not wanted - {i for c in group for i in range(*c.span)}


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(BLOCK, max_size=10), CONFIGS, st.sampled_from(["\n", "\r\n"]), st.sampled_from([SP, Characters()]))
def test_rules_hold_for_generated_markdown(blocks, config, newline, counter):
    md, parts = write(blocks, newline)
    result = chunk(md, config, counter)
    check(result, md, config, counter, [(a, b) for kind, a, b in parts if kind == "heading"])
    # only a text of tokens that the tokenizer drops altogether (a byte order mark) has none and is refused
    assert all("n_tokens" in r["reason"] or "refused" in r["reason"] for r in result.refused)
    for kind, count in (("sentence", "cut_sentences"), ("row", "cut_rows"), ("code", "cut_code")):
        if not result.stats[count]:
            edges = {edge for c in result.chunks for edge in c.span}
            inside = [(a, b) for k, a, b in parts if k == kind and not md[a:b].startswith("| k |")]
            assert not [e for e in edges for a, b in inside if a < e < b]


@settings(max_examples=150, deadline=None)
@given(st.text(st.sampled_from("ab 设。.!|-#`~>*1\n\r\t\u3000()[]"), max_size=300), CONFIGS)
def test_rules_hold_for_any_text(md, config):
    result = chunk(md, config, SP)
    units = read_units(md)
    check(result, md, config, SP, [(u.start, u.end) for u in units if u.kind == "heading"])
    assert "".join(md[u.start : u.end] for u in units).split() or not md.split()
    assert all(a.end <= b.start for a, b in pairwise(units))


@pytest.mark.parametrize(
    "md",
    ["a" * 200_000, "备份恢复" * 50_000, "." * 200_000 + "a", "word " * 40_000, "#" * 200_000, "`" * 200_000,
     "![" * 100_000, "# " + "[" * 100_000 + "\n\nx", "|" * 100_000 + "\n|---|\n" + "|a|b|\n" * 10_000,
     "```\n" + "x=1\n" * 30_000],
    ids=["a", "zh", "dots", "words", "hashes", "ticks", "images", "brackets", "table", "code"],
)  # fmt: skip
def test_long_runs_are_cut_in_linear_time(md):
    config = ChunkConfig()
    result = chunk(md, config, SP)  # some tenths of a second; this would not return if anything were quadratic
    assert result.chunks and not result.refused
    assert max(c.n_tokens for c in children_of(result)) <= 256
    assert max(len(c.content) for c in children_of(result)) <= 256 * 16
    assert max(len(c.table_header) for c in result.chunks) < 1000


def test_the_sample_corpus_is_chunked_well():
    folder = Path(__file__).resolve().parents[2] / "data" / "corpus"
    if not folder.is_dir():
        pytest.skip("data/corpus is not there")
    texts = [path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.md"))]
    texts = [t.split("\n---\n", 1)[1] if t.startswith("---\n") else t for t in texts]
    items = [(document(doc_id=f"d{i}", content_hash=str(i)), t, lambda offset: 1) for i, t in enumerate(texts)]
    config = ChunkConfig()
    result = chunk_corpus(items, config=config, counter=SP)
    assert not result.refused and sum(result.stats[k] for k in ("cut_sentences", "cut_rows", "cut_code")) == 0
    tokens = sorted(result.stats["child_tokens"])
    assert tokens[len(tokens) // 2] >= 140 and sum(n < 64 for n in tokens) <= 0.05 * len(tokens)

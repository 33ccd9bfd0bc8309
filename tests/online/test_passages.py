"""Passages: spans of the very text they quote, and how a person reads them."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ragbuild.online.passages import Passage, passages, readable

MANUAL = """\
# Recovery

Stop the service. Then take these steps:

1. Open the **console**.
2. Log in as `rescue`
   with the code from the sheet.
3. Restart.

![figure](images/a.png)

| Port | Use |
| --- | --- |
| 443 | portal |
| 8443 | console \\| API |

```
lg reset --admin
```

> Keep the sheet.

- one thing
- 另一件事。
"""


def found(content: str, *kinds: str) -> list[str]:
    return [content[p.start : p.end] for p in passages(content) if not kinds or p.kind in kinds]


def read(content: str, kind: str) -> list[str]:
    return [readable(content, p) for p in passages(content) if p.kind == kind]


def test_sentences():
    assert found(MANUAL, "sentence")[:2] == ["Stop the service.", "Then take these steps:"]
    assert found("重启设备。等待完成！然后登录。", "sentence") == ["重启设备。", "等待完成！", "然后登录。"]
    assert not any("Recovery" in text or "figure" in text for text in found(MANUAL)), "headings and images are none"


def test_a_list_comes_as_its_items_and_whole_with_what_leads_into_it():
    items = [text for text in found(MANUAL, "item") if text[0].isdigit()]
    assert items == [
        "1. Open the **console**.",
        "2. Log in as `rescue`\n   with the code from the sheet.",
        "3. Restart.",
    ]
    whole = next(p for p in passages(MANUAL) if p.kind == "list" and p.steps)
    text = MANUAL[whole.start : whole.end]
    assert text.startswith("Then take these steps:") and text.endswith("3. Restart.")
    assert whole.steps == 3
    bullets = [p for p in passages(MANUAL) if p.kind == "list"][-1]
    assert bullets.steps == 0 and MANUAL[bullets.start : bullets.end] == "- one thing\n- 另一件事。"


def test_one_item_is_no_list():
    assert [p.kind for p in passages("- alone")] == ["item"]


def test_chinese_numbering():
    content = "操作步骤：\n\n1、打开控制台。\n2、重启设备。\n"
    assert found(content, "item") == ["1、打开控制台。", "2、重启设备。"]
    (whole,) = [p for p in passages(content) if p.kind == "list"]
    assert whole.steps == 2 and content[whole.start : whole.end] == content.strip()


def test_rows_of_a_table_know_their_header():
    rows = [p for p in passages(MANUAL) if p.kind == "row"]
    assert [MANUAL[p.start : p.end] for p in rows] == ["| 443 | portal |", "| 8443 | console \\| API |"]
    assert {p.header for p in rows} == {"| Port | Use |"}
    assert all("443" in text and "portal" in text and "Port" in text for text in read(MANUAL, "row")[:1])
    assert "console | API" in read(MANUAL, "row")[1], "an escaped bar is text"


@pytest.mark.parametrize(
    ("table", "cells"),
    [
        ("| a | b | c |\n| --- | --- | --- |\n| x | y | |", {"x", "y"}),
        ("| a | b | c |\n| --- | --- | --- |\n| | y | z |", {"y", "z"}),
        ("| a | b | c |\n| --- | --- | --- |\n||y|z|", {"y", "z"}),
        ("| a | b | c |\n| --- | --- | --- |\n|x|y||", {"x", "y"}),
        ("| a | b |\n| --- | --- |\n| x | y | z |", {"x", "y", "z"}),
        ("| x | y |", {"x", "y"}),
    ],
)
def test_no_cell_is_lost_or_named_wrongly(table: str, cells: set[str]):
    names = {"x": "a", "y": "b", "z": "c"}
    (row,) = read(table, "row")
    for cell in cells:
        assert cell in row
        for name in "abc":
            assert f"{name}: {cell}" not in row or names[cell] == name


def test_code_is_one_passage_and_stays_as_it_is():
    (code,) = [p for p in passages(MANUAL) if p.kind == "code"]
    assert MANUAL[code.start : code.end].strip() == "```\nlg reset --admin\n```"
    assert "lg reset --admin" in readable(MANUAL, code)
    assert found("```\n- no item\n| no | row |\n# no heading. No sentence.\n```") == [
        "```\n- no item\n| no | row |\n# no heading. No sentence.\n```"
    ]


def test_code_without_an_end_runs_to_the_end():
    assert [p.kind for p in passages("Run it.\n\n```\nlg reset\n\nlg start")] == ["sentence", "code"]


def test_what_a_person_reads():
    assert read(MANUAL, "item")[0] == "Open the console."
    assert not any(
        "**" in text or text.startswith((">", "|")) for text in (readable(MANUAL, p) for p in passages(MANUAL))
    )
    quote = next(p for p in passages(MANUAL) if "Keep the sheet" in MANUAL[p.start : p.end])
    assert readable(MANUAL, quote) == "Keep the sheet."


@pytest.mark.parametrize("content", ["", "\n\n", "# only a heading", "---", "![a](b.png)", "| --- |", "| | |"])
def test_nothing_to_quote(content: str):
    assert not [p for p in passages(content) if p.kind not in ("sentence", "row")]


LINES = """# Heading|Text. More text|句子。下一句|- item|1. step|2、步骤|   more|```|~~~|    ```|> note|>|![i](x)"""
ODD_LINES = [
    "Steps:",
    "步骤：",
    "| a | b |",
    "| --- | --- |",
    "|||",
    "| ** | |",
    "* ** |",
    "| a | |",
    " ",
    "A: yes",
    "Q: why",
    "**",
    "x\x85y",
    "\u2028",
]
lines = st.sampled_from([*LINES.split("|"), *ODD_LINES])


@example(["| a | b |", "| --- | --- |", "| ** | |"])
@given(st.lists(lines, max_size=14))
def test_every_passage_of_any_content_is_a_span_with_text(parts: list[str]):
    content = "\n".join(parts)
    previous: dict[str, Passage] = {}
    for passage in passages(content):
        text = content[passage.start : passage.end]
        assert 0 <= passage.start < passage.end <= len(content) and text.strip()
        assert isinstance(readable(content, passage), str)
        if passage.kind in previous:
            assert passage.start >= previous[passage.kind].end, "passages of one kind do not overlap, and come in order"
        previous[passage.kind] = passage

"""Tables, answers and plots: readable, and nothing in a document becomes markup."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from ragbuild.core.records import Answer, Citation
from ragbuild.core.show import PALETTE, answer_html, clip, save_figure, table, use_style

EVIL = "<script>alert(1)</script>"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.123456, "0.1235"), (1234567.0, "1.235e+06"), (3, "3"), (None, ""), (("a", "b"), "a, b"), (["a"], "a"),
        ("two\n li\t x", "two li x"), ("x" * 12, "xxxxxxxxx…"), ("x" * 10, "xxxxxxxxxx"), ("", ""),
        (np.float64(0.5), "0.5"), (True, "True"), (set(), ""),
    ],
)  # fmt: skip
def test_clip(value, shown: str):
    assert clip(value, 10) == shown


def test_a_table_for_a_notebook_is_escaped():
    shown = table([{"term": EVIL, EVIL: 1.23456}], caption=EVIL)
    html = shown._repr_html_()
    assert "<script" not in html and html.count("&lt;script&gt;") == 3
    assert "1.235" in html


def test_a_table_for_a_terminal():
    rows = [{"term": "单点登录", "count": 3}, {"term": "SSO", "count": 12}]
    text = repr(table(rows, columns=["term"], caption="Terms"))
    assert text.splitlines()[0] == "Terms" and "单点登录" in text and "12" not in text
    assert repr(table(pd.DataFrame(rows))) == repr(table(rows))
    assert repr(table([], caption="Nothing")) == "Nothing\n(no rows)"


def test_a_table_shows_every_row_and_long_cells_up_to_their_width():
    html = table([{"n": i, "text": "y" * 90} for i in range(150)])._repr_html_()
    assert html.count("<tr") == 151 and "y" * 90 in html


def test_an_answer_for_a_notebook_is_escaped():
    citation = Citation(
        number=2, chunk_id="p-1", doc_id="g", doc_version=EVIL, title=EVIL, doc_source="g.md", status="active",
        chapter=EVIL, section=EVIL, page=3, quote=EVIL,
    )  # fmt: skip
    answer = Answer(query=EVIL, text=f"{EVIL}\nline ^2^", status="answered", citations=(citation,), warnings=(EVIL,))
    html = answer_html(answer).data
    assert "<script" not in html
    assert "<li value='2'>" in html and "page 3" in html and "line ^2^" in html and "<br>" in html
    assert "status: answered" in html


def test_plots_use_colours_that_can_be_told_apart(tmp_path, capsys):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    use_style()
    said = capsys.readouterr().out
    assert len(set(PALETTE)) == 8
    assert matplotlib.rcParams["axes.prop_cycle"].by_key()["color"] == list(PALETTE)
    assert ("No font with Chinese glyphs" in said) == (len(matplotlib.rcParams["font.family"]) == 1)
    figure, axes = pyplot.subplots()
    axes.plot([1, 2], [1, 2])
    path = save_figure(figure, tmp_path / "figures" / "a.png")
    pyplot.close(figure)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [p.name for p in path.parent.iterdir()] == ["a.png"]

"""Tables and plots for notebooks and the report: readable, labelled, colour-blind-safe, Chinese glyphs where a font is.

Text of documents and queries is escaped: nothing in it becomes markup.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragbuild.core.store import write_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito (2008): told apart with any colour vision.
BLUE, ORANGE, GREEN, PINK, YELLOW, SKY, RED, BLACK = (
    "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#F0E442", "#56B4E9", "#D55E00", "#000000",
)  # fmt: skip
PALETTE = (BLUE, ORANGE, GREEN, PINK, SKY, RED, YELLOW, BLACK)
CJK_FONTS = (
    "Noto Sans CJK SC", "Noto Sans SC", "Source Han Sans SC", "Source Han Sans CN", "WenQuanYi Zen Hei",
    "WenQuanYi Micro Hei", "PingFang SC", "Hiragino Sans GB", "Heiti SC", "STHeiti", "Songti SC", "Microsoft YaHei",
    "SimHei", "Droid Sans Fallback", "Arial Unicode MS",
)  # fmt: skip
NO_CJK_FONT = (
    "No font with Chinese glyphs was found, so Chinese labels in plots show as boxes. "
    "Debian/Ubuntu: apt install fonts-noto-cjk; macOS has PingFang SC."
)


@lru_cache(maxsize=1)
def cjk_font() -> str | None:
    """A font family on this machine that has Chinese glyphs, or None."""
    from matplotlib import font_manager

    known = {f.name for f in font_manager.fontManager.ttflist}
    found = next((name for name in CJK_FONTS if name in known), None)
    if found is None:  # installed after matplotlib wrote its list of fonts
        for path in font_manager.findSystemFonts():
            if any(mark in Path(path).name.lower() for mark in ("cjk", "wqy", "droidsansfallback", "sourcehan")):
                font_manager.fontManager.addfont(path)
                return font_manager.fontManager.ttflist[-1].name
    return found


def use_style() -> None:
    """Set matplotlib's look for this course; says once when no font has Chinese glyphs."""
    import logging
    import warnings

    import matplotlib

    # some Chinese fonts have one weight only, and matplotlib would say so under every plot
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
    font = cjk_font()
    matplotlib.rcParams.update(
        {
            "figure.figsize": (8, 3.6), "figure.dpi": 110, "savefig.dpi": 110, "figure.constrained_layout.use": True,
            "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25,
            "axes.titlesize": 12, "axes.titleweight": "bold", "axes.titlelocation": "left", "axes.unicode_minus": False,
            "font.family": [*([font] if font else []), "DejaVu Sans"],
            "axes.prop_cycle": matplotlib.cycler(color=PALETTE),
        }
    )  # fmt: skip
    if font is None:
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # said once, below, and not under every plot
        print(NO_CJK_FONT)


def save_figure(figure: Figure, path: str | Path) -> Path:
    """Write a PNG whole or not at all."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    write_bytes(path, buffer.getvalue())
    return Path(path)


def table(
    rows: Sequence[Mapping[str, Any]] | Any, columns: Sequence[str] | None = None, caption: str = "", width: int = 100
) -> Any:
    """Rows (mappings or a DataFrame) as a table for a notebook; long cells are cut at `width` characters, all escaped.

    Returns an object that Jupyter displays as HTML and a terminal as text.
    """
    import pandas as pd

    frame = (
        rows
        if isinstance(rows, pd.DataFrame)
        else pd.DataFrame(list(rows), columns=list(columns) if columns else None, dtype=object)  # None stays None
    )
    shown = frame.map(lambda value: clip(value, width))
    return Table(shown, caption)


def clip(value: Any, width: int) -> str:
    """A cell's text: floats with four digits, sequences joined, long text cut."""
    if isinstance(value, float):
        text = f"{value:.4g}"
    elif isinstance(value, (list, tuple, set, frozenset)):
        text = ", ".join(map(str, value))
    else:
        text = "" if value is None else " ".join(str(value).split())
    return text if len(text) <= width else text[: width - 1] + "…"


class Table:
    """A small table with a caption."""

    def __init__(self, frame: Any, caption: str = "") -> None:
        self.frame, self.caption = frame, caption

    def _repr_html_(self) -> str:
        from html import escape

        cells = self.frame.to_html(index=False, escape=True, border=0, justify="left")
        for tag in ("th", "td"):  # inline, since Jupyter's own style sheet aligns all cells right
            cells = cells.replace(f"<{tag}>", f"<{tag} style='text-align:left'>")
        style = "caption-side:top;text-align:left;font-weight:bold;white-space:nowrap"
        head = f"<caption style='{style}'>{escape(self.caption)}</caption>"
        return cells.replace("<thead>", head + "<thead>", 1) if self.caption else cells

    def __repr__(self) -> str:
        text = self.frame.to_string(index=False) if len(self.frame) else "(no rows)"
        return f"{self.caption}\n{text}" if self.caption else text


def answer_html(answer: Any) -> Any:
    """An `Answer` as a person reads it: text, then each citation with document, version, section and page."""
    from html import escape

    from IPython.display import HTML

    body = escape(answer.text).replace("\n", "<br>")
    grouped: dict[tuple[int, int], list[Any]] = {}
    for c in answer.citations:
        grouped.setdefault((c.number, c.page), []).append(c)
    items = ""
    for (number, page), same in sorted(grouped.items(), key=lambda item: item[0]):
        head = escape(f"{same[0].doc_version} · {same[0].place} · page {page}")
        quotes = escape(" … ".join(f"“{clip(c.quote, 160)}”" for c in same))
        items += f"<li value='{number}'><b>{escape(same[0].title)}</b> · {head}"
        items += f"<br><span style='color:#555'>{quotes}</span></li>"
    notes = "".join(f"<p style='color:#D55E00'>{escape(w)}</p>" for w in answer.warnings)
    foot = f"<p style='color:#777'>status: {answer.status} · generator: {escape(answer.generator)}</p>"
    return HTML(
        f"<div style='border-left:4px solid {BLUE};padding:4px 12px'><p><b>{escape(answer.query)}</b></p><p>{body}</p>"
        f"<ol>{items}</ol>{notes}{foot}</div>"
    )

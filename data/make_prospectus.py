"""Make the PDFs of data/prospectus, and its documents.csv, from the texts in data/sources/prospectus.

    python data/make_prospectus.py

A figure `![图 5-1 …](figure:NAME)` is a chart of charts.yaml or a drawing of figures.txt; without a text it has no
caption. A source with `cover` in its front matter gets a cover, a table of contents, and each chapter on a new page.
The same input gives the same bytes. It needs what make_corpus.py needs.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import corpus_pdf
import yaml
from corpus_pdf import CHINESE, Doc, PdfMaker, find_font
from make_corpus import read, write_fields
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from PIL import Image
from reportlab import platypus as rl
from reportlab.pdfbase.pdfmetrics import stringWidth

HERE = Path(__file__).resolve().parent
SOURCES, OUT = HERE / "sources" / "prospectus", HERE / "prospectus"
CHARTS = yaml.safe_load((SOURCES / "charts.yaml").read_text(encoding="utf-8"))
COLOURS = ["#0072b2", "#e69f00", "#009e73", "#9aa5b1"]  # Okabe and Ito's, which colour-blind people can tell apart
corpus_pdf.STROKES = SOURCES / "figures.txt"


def chart(spec: dict[str, Any]) -> bytes:
    """The PNG of an entry of charts.yaml, with a number at each value."""
    font = FontProperties(fname=find_font(*CHINESE), size=8)
    figure = Figure(figsize=(4.9, 2.3), dpi=150, layout="constrained")
    axes, labels, series, kind = figure.subplots(), spec["labels"], spec["series"], spec["kind"]
    if kind == "pie":
        (values,) = series.values()
        names = [f"{label}\n{value:,} {spec['unit']}" for label, value in zip(labels, values, strict=True)]
        axes.pie(values, labels=names, colors=COLOURS, startangle=60, textprops={"fontproperties": font})
    else:
        base, wide = [0.0] * len(labels), 0.7 / (len(series) if kind == "bar" else 1)
        for n, (name, values) in enumerate(series.items()):
            how = {"label": name, "color": COLOURS[n]}
            if kind == "line":
                axes.plot(range(len(labels)), values, marker="o", **how)
                for x, y in enumerate(values):
                    axes.annotate(f"{y:g}", (x, y), (0, 4), textcoords="offset points", ha="center", size=6)
                continue
            at = [x + (n * wide if kind == "bar" else 0) for x in range(len(labels))]
            bars = axes.bar(at, values, wide * 0.95, bottom=base if kind == "stack" else None, **how)
            inside = {"label_type": "center", "color": "white"} if kind == "stack" else {}
            axes.bar_label(bars, fmt="{:,.2f}" if max(values) > 1000 else "{:g}", fontsize=6.5, **inside)
            base = [low + value for low, value in zip(base, values, strict=True)]
        axes.set_xticks([x + wide * (len(series) - 1) / 2 * (kind == "bar") for x in range(len(labels))], labels)
        axes.set_ylabel(spec["unit"], fontproperties=font)
        axes.margins(x=0.06, y=0.12)
        for label in (*axes.get_xticklabels(), *axes.get_yticklabels()):
            label.set_fontproperties(font)
        figure.legend(prop=font, frameon=False, loc="outside upper center", ncols=4)
    drawn, out = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png")
    Image.open(drawn).convert("RGB").save(out, format="png", optimize=True)
    return out.getvalue()


class ReportMaker(PdfMaker):
    """A chapter in 16.5 points and what is under it in 13.5, so that a parser tells them from the text."""

    indent, gap, leading = 21.0, 9.0, 1.8

    def __init__(self, doc: Doc) -> None:
        super().__init__(doc)
        self.size, self.cover, self.pages = 10.5, doc.meta.get("cover", []), list[int]()
        self.heads = {1: (20, 0), 2: (16.5, 0), 3: (13.5, 12)} if self.cover else {1: (20, 0), 2: (14, 12)}

    def picture(self, name: str) -> bytes:
        return chart(CHARTS[name]) if name in CHARTS else super().picture(name)

    def story(self) -> list[Any]:
        body = super().story()
        if not self.cover:
            return body
        headings = [part for part in body if hasattr(part, "outline")]
        for part, page in zip(headings, self.pages or [0] * len(headings), strict=True):
            part.page = page
            level, text = part.outline
            part.outline = (level - 1, text)
        self.headings, out = headings, []
        for part in body:  # a chapter begins on a new page, so needs no break that depends on the room left
            if getattr(part, "outline", (0,))[0] == 1:
                out[-1:] = [rl.PageBreak()]
            out.append(part)
        second = next(i for i, part in enumerate(out) if getattr(part, "outline", ("", ""))[1].startswith("第一节"))
        return [*self.front(), *out[: second - 1], *self.table_of_contents(), *out[second - 1 :]]

    def front(self) -> list[Any]:
        def line(text: str, size: float, **how: Any) -> Any:
            return self.paragraph([(text, "")], size, alignment=1, leading=size * 1.4, **how)

        big = [line(text, size, spaceAfter=30) for text, size in zip(self.cover, (24, 20, 28), strict=True)]
        small = [line(text, 11, spaceAfter=16) for text in self.doc.meta["cover_lines"]]
        return [rl.Spacer(0, 130), *big, rl.Spacer(0, 210), *small]

    def table_of_contents(self) -> list[Any]:
        """On the first of two passes without page numbers, but as long as in the second."""
        head = self.paragraph([("目录", "")], 16.5, alignment=1, spaceAfter=8)
        head.outline = (1, "目录")
        out = [rl.PageBreak(), head]
        for part in self.headings:
            level, text = part.outline
            left, page, face = 18 * (level - 1), str(part.page), self.faces[0]
            room = self.column - left - stringWidth(text + page, face, 10.5) - 8
            dots = "." * int(room / stringWidth(".", face, 10.5))
            out.append(self.paragraph([(f"{text} {dots} {page}", "")], 10.5, leftIndent=left, leading=15.6))
        return out

    def furniture(self, canvas: Any, template: Any) -> None:
        if not (self.cover and template.page == 1):
            super().furniture(canvas, template)

    def make(self) -> bytes:
        if self.cover:  # the pages of the headings are known after a first pass
            super().make()
            self.pages = [part.page for part in self.headings]
        return super().make()


def main() -> None:
    docs = [read(path) for path in sorted(SOURCES.glob("*.md"))]
    OUT.mkdir(exist_ok=True)
    for doc in docs:
        data = ReportMaker(doc).make()
        (OUT / doc.meta["output"]).write_bytes(data)
        print(f"{doc.meta['output']}: {len(data) / 1024:.0f} KB")
    write_fields(OUT, docs)


if __name__ == "__main__":
    main()

"""For make_corpus.py: the blocks of a document, its figures (strokes in sources/figures.txt) and its PDF."""

from __future__ import annotations

import io
import re
import unicodedata
from dataclasses import dataclass, field
from html import escape
from itertools import groupby
from math import cos, sin, tau
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.patches import Circle, FancyBboxPatch
from PIL import Image
from reportlab import platypus as rl
from reportlab import rl_config
from reportlab.lib.colors import HexColor
from reportlab.lib.pagesizes import A4
from reportlab.lib.styles import ParagraphStyle
from reportlab.lib.units import mm
from reportlab.pdfbase import pdfmetrics
from reportlab.pdfbase.ttfonts import TTFont
from reportlab.platypus.paragraph import ParaLines, _handleBulletWidth, cjkU, makeCJKParaLine

STROKES = Path(__file__).resolve().parent / "sources" / "figures.txt"
LIBERATION = "liberation/Liberation{}.ttf"
CHINESE = ["wqy/wqy-zenhei.ttc", "droid/DroidSansFallbackFull.ttf", "droid/DroidSansFallback.ttf"]
INK, RULE, PALE, ACCENT = "#1f2933", "#9aa5b1", "#eef2f6", "#12497a"
Run = tuple[str, str]  # a text and its style: some of "b" bold, "i" italic, "c" code


def plain(runs: list[Run]) -> str:
    return "".join(text for text, _ in runs)


def is_wide(char: str) -> bool:
    return unicodedata.east_asian_width(char) in "WF"


@dataclass
class Block:
    kind: str  # heading, para, item, code, table, note, figure
    runs: list[Run] = field(default_factory=list)
    level: int = 0  # of a heading from 1, of a list item from 0
    mark: str = ""  # of a list item: "3." or "•", or nothing on its further paragraphs
    text: str = ""  # the code, or the name of the figure
    rows: list[list[list[Run]]] = field(default_factory=list)


@dataclass
class Doc:
    meta: dict[str, Any]
    text: str
    blocks: list[Block] = field(default_factory=list)

    @property
    def zh(self) -> bool:
        return self.meta["language"] == "zh"

    def sections(self) -> list[tuple[str, list[Block]]]:
        """The blocks under each `##` heading; those before the first stand under the title."""
        found: list[tuple[str, list[Block]]] = [("", [])]
        for block in self.blocks:
            if block.kind == "heading" and block.level <= 2:
                found.append((plain(block.runs), []))
            else:
                found[-1][1].append(block)
        return [part for part in found if part[1]]


def find_font(*names: str) -> str:
    for path in (Path("/usr/share/fonts/truetype", name) for name in names):
        if path.exists():
            return str(path)
    raise SystemExit(f"No font {' or '.join(names)}; run: apt-get install fonts-liberation fonts-wqy-zenhei")


def draw(name: str, zh: bool, size: float = 6.8) -> bytes:
    """The PNG of a figure in figures.txt; the head of that file explains the strokes."""
    part = re.search(rf"^= {name} (\d+)\n([^=]*)", STROKES.read_text(encoding="utf-8"), re.M)
    if part is None:
        raise SystemExit(f"figures.txt has no figure {name!r}")
    high, face = float(part[1]), find_font(*CHINESE) if zh else find_font(LIBERATION.format("Sans-Regular"))
    font = FontProperties(fname=face, size=size)
    figure = Figure(figsize=(4.9, 0.049 * high), dpi=150)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, 100), ylim=(0, high), aspect="equal")
    axes.axis("off")

    def write(x: float, y: float, label: str, **how: Any) -> None:
        text = label.replace("\\n", "\n")
        axes.text(x, y, text, **{"ha": "center", "va": "center", "color": INK, "fontproperties": font, **how})

    def rectangle(x: float, y: float, w: float, h: float, **how: Any) -> None:
        shape = "round,pad=0,rounding_size=0.5"
        axes.add_patch(FancyBboxPatch((x, y), w, h, shape, **{"fc": "white", "ec": INK, "lw": 0.9, **how}))

    for line in part[2].splitlines():
        words = re.match(r"(\w+)([-\d. ]*):? ?(.*)", line)
        if words is None:
            continue
        stroke, n, label = words[1], [float(word) for word in words[2].split()], words[3]
        label = label.split("|")[-1 if zh else 0].strip()
        if stroke in ("box", "grey", "dash"):
            how = {"grey": {"fc": PALE}, "dash": {"ls": (0, (4, 3)), "fc": "#fafbfc", "lw": 0.7}}.get(stroke, {})
            rectangle(*n[:4], **how)
            x, y = n[0] + n[2] / 2, n[1] + n[3] / 2
            write(x, n[1] + n[3] - 2.2 if stroke == "dash" else y, label, weight="normal")
        elif stroke == "row":  # x y w h step count first: numbered ports
            for i in range(int(n[5])):
                rectangle(n[0] + i * n[4], n[1], n[2], n[3], lw=0.7)
                write(n[0] + i * n[4] + n[2] / 2, n[1] + n[3] / 2, str(int(n[6]) + i))
        elif stroke in ("disc", "fan"):
            x, y, r = n
            axes.add_patch(Circle((x, y), r, fc="#2e9d5b" if label == "green" else "white", ec=INK, lw=0.8))
            for turn in range(9 if stroke == "fan" else 0):
                a, b = turn * tau / 9, turn * tau / 9 + 0.5
                near, far = (
                    (x + r * 0.3 * cos(a), x + r * 0.93 * cos(b)),
                    (y + r * 0.3 * sin(a), y + r * 0.93 * sin(b)),
                )
                axes.plot(near, far, color=INK, lw=0.7)
            if stroke == "fan":
                axes.add_patch(Circle((x, y), r * 0.3, fc=PALE, ec=INK, lw=0.8))
        elif stroke == "slots":  # x y w h count: a grille
            for i in range(int(n[4])):
                rectangle(n[0] + i * n[2] / n[4], n[1], n[2] / n[4] * 0.45, n[3], lw=0.4, fc=PALE)
        elif stroke in ("line", "arrow", "both", "ban"):
            points = list(zip(n[::2], n[1::2], strict=True))
            how = {"color": "#c0392b" if stroke == "ban" else INK, "lw": 0.9}
            axes.plot(n[::2], n[1::2], ls="--" if stroke == "ban" else "-", **how)
            ends = [] if stroke == "line" else [points[:-3:-1], points[:2]][: 2 if stroke == "both" else 1]
            for (x, y), (far_x, far_y) in ends:
                start, arrow = (x + (far_x - x) * 0.03, y + (far_y - y) * 0.03), {"arrowstyle": "-|>", **how}
                axes.annotate("", (x, y), start, arrowprops={**arrow, "mutation_scale": 7, "shrinkA": 0, "shrinkB": 0})
        elif stroke == "call":  # x y to [shift]: a leader from (x, y) to the label at height `to`
            x = n[0] + (n[3] if len(n) > 3 else 0)
            axes.plot([n[0], x], n[1:3], color="#616e7c", lw=0.6)
            write(x, n[2] + (0.6 if n[2] > n[1] else -0.6), label, va="bottom" if n[2] > n[1] else "top")
        else:  # text
            write(n[0], n[1], label)
    drawn, out = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png")
    Image.open(drawn).convert("RGB").save(out, format="png", optimize=True)
    return out.getvalue()


# PDF


class Outlined(rl.BaseDocTemplate):
    def afterFlowable(self, flowable: Any) -> None:
        if hasattr(flowable, "outline"):
            level, text = flowable.outline
            flowable.page = self.page
            key = f"h{self.seq.nextf('heading')}"
            self.canv.bookmarkPage(key)
            self.canv.addOutlineEntry(text, key, level - 1, closed=level > 1)


def may_break(before: str, after: str) -> bool:
    if before in "（《「『“‘([{" or after in "，。、；：？！）》」』”’%…·)]},.;:!? ":
        return False
    return before == " " or is_wide(before) or is_wide(after)


class ChineseParagraph(rl.Paragraph):
    """Breaks lines between Chinese characters, not inside Latin words and not at the wrong side of a mark."""

    def breakLinesCJK(self, maxWidths: Any) -> Any:
        if getattr(self, "_splitpara", 0):
            return self.blPara
        widths = list(maxWidths) if isinstance(maxWidths, list | tuple) else [maxWidths]
        _handleBulletWidth(self.bulletText, self.style, widths)
        chars = [cjkU(char, frag, "utf8") for frag in self.frags for char in (frag.text or [""])]
        lines: list[Any] = []
        start = 0
        while start < len(chars):
            room, end, used, forced = widths[min(len(lines), len(widths) - 1)], start, 0.0, False
            while end < len(chars) and not forced and used + chars[end].width <= room:
                used, forced, end = used + chars[end].width, hasattr(chars[end].frag, "lineBreak"), end + 1
            if end < len(chars) and not forced:
                cuts = (i for i in range(end, start, -1) if may_break(chars[i - 1], chars[i]))
                end = next(cuts, max(end, start + 1))
            used = sum(char.width for char in chars[start:end])
            lines.append(makeCJKParaLine(chars[start:end], room, used, room - used, forced, False))
            start = end
        return ParaLines(kind=1, lines=lines)


class PdfMaker:
    indent, gap, leading = 0.0, 6.0, 1.55  # of a paragraph: its first line, the space after it, its lines in Chinese

    def __init__(self, doc: Doc) -> None:
        self.doc, self.zh, self.two = doc, doc.zh, doc.meta["format"] == "pdf-two-column"
        self.company = str(doc.meta.get("company", "岚关网络" if self.zh else "Langate Networks"))
        rl_config.useA85 = 0
        for name in ("Sans-Regular", "Sans-Bold", "Sans-Italic", "Mono-Regular"):
            pdfmetrics.registerFont(TTFont(name, find_font(LIBERATION.format(name))))
        pdfmetrics.registerFont(TTFont("CJK", find_font(*CHINESE)))
        pdfmetrics.registerFontFamily("Sans-Regular", "Sans-Regular", "Sans-Bold", "Sans-Italic", "Sans-Bold")
        for name in ("Mono-Regular", "CJK"):
            pdfmetrics.registerFontFamily(name, name, name, name, name)
        self.faces = ["CJK", "Sans-Regular"] if self.zh else ["Sans-Regular", "CJK"]
        self.margin, gap = (17 * mm, 8 * mm) if self.two else (22 * mm, 0)
        self.wide = A4[0] - 2 * self.margin
        self.column = (self.wide - gap) / 2 if self.two else self.wide
        self.step = self.column + gap
        self.size = 9.0 if self.two else 10.0
        self.heads = {1: (20, 0), 2: (14, 12), 3: (11.5, 7)}  # of a heading: its size and the space before it

    def face(self, char: str, faces: list[str]) -> str:
        for face in faces:
            if ord(char) in pdfmetrics.getFont(face).face.charToGlyph:
                return face
        print(f"{self.doc.meta['output']}: no glyph for {char!r}")
        return faces[0]

    def xml(self, runs: list[Run], size: float = 0.0) -> str:
        """Runs as Paragraph markup, every character in the first of its fonts that has it."""
        out = ""
        for text, style in runs:
            faces = ["Mono-Regular", "CJK"] if "c" in style else self.faces
            grouped = groupby(text, lambda char: "" if char == "\n" else self.face(char, faces))  # noqa: B023
            for face, chars in grouped:
                part = escape("".join(chars))
                for tag in style.replace("c", ""):
                    part = f'<font color="{ACCENT}">{part}</font>' if self.zh else f"<{tag}>{part}</{tag}>"
                smaller = f' size="{size * 0.93:.2f}"' if "c" in style and size else ""
                out += f'<font face="{face}"{smaller}>{part}</font>' if face else "<br/>" * len(part)
        return out

    def paragraph(self, runs: list[Run], size: float = 0.0, bullet: str | None = None, **how: Any) -> Any:
        size = size or self.size
        how = {"leading": size * (self.leading if self.zh else 1.38), "wordWrap": "CJK" if self.zh else None, **how}
        style = ParagraphStyle("", fontName=self.faces[0], fontSize=size, textColor=HexColor(INK), **how)
        kind = ChineseParagraph if self.zh else rl.Paragraph
        return kind(self.xml(runs, size), style, bulletText=bullet)

    def boxed(self, content: Any, edge: str, fill: str, bar: float, indent: float = 0) -> Any:
        table = rl.Table([[content]], [self.column - indent], spaceBefore=4, spaceAfter=9)
        table.hAlign = "RIGHT"
        table.setStyle(
            [
                ("BOX", (0, 0), (0, 0), 0.5, HexColor(edge)),
                ("LINEBEFORE", (0, 0), (0, 0), bar, HexColor(edge)),
            ]
        )
        table.setStyle([("BACKGROUND", (0, 0), (0, 0), HexColor(fill)), ("LEFTPADDING", (0, 0), (0, 0), 6 + bar)])
        table.setStyle([("TOPPADDING", (0, 0), (0, 0), 5), ("BOTTOMPADDING", (0, 0), (0, 0), 6)])
        return table

    def code(self, block: Block) -> Any:
        indent, longest = 16.0 * block.level, max(map(len, block.text.split("\n")))
        size = max(min(self.size - 1.5, (self.column - indent - 14) / (longest * 0.601)), 6.0)
        room, lines = int((self.column - indent - 14) / (size * 0.601) + 0.01), [""]
        for line in block.text.split("\n"):
            for char in line:
                if sum(1 + is_wide(c) for c in lines[-1] + char) > room:
                    lines.append("")
                lines[-1] += char
            lines.append("")
        marked = "\n".join(self.xml([(line, "c")]) for line in lines[:-1])
        text = rl.XPreformatted(marked, ParagraphStyle("", fontName="Mono-Regular", fontSize=size, leading=size * 1.35))
        return self.boxed(text, RULE, "#f5f7fa", 0.5, indent)

    def widths(self, rows: list[list[list[Run]]], size: float) -> list[float]:
        """Columns as wide as their text, shrunk towards their longest word where the page is too narrow."""
        want, least = [], []
        for cells in zip(*rows, strict=True):
            texts = [plain(cell) for cell in cells]
            words = [w for text in texts for w in re.findall(r"[!-\u2dff]+|[\u2e80-\uffef]{1,4}", text)]
            for out, parts in ((want, texts), (least, words)):
                out.append(11 + max((sum(size * (1 if is_wide(c) else 0.58) for c in p) for p in parts), default=0))
        if sum(want) <= self.column:
            return [w * self.column / sum(want) for w in want]
        least = [min(m, self.column * 0.45) for m in least]
        share = [max(w - m, 0.01) ** 0.6 for w, m in zip(want, least, strict=True)]
        spare = max(self.column - sum(least), 0) / sum(share)
        widths = [m + spare * s for m, s in zip(least, share, strict=True)]
        return [w * self.column / sum(widths) for w in widths]

    def table(self, rows: list[list[list[Run]]]) -> Any:
        size = self.size - 1.2
        rows = [[[(t, s + "b") for t, s in cell] for cell in rows[0]], *rows[1:]]
        cells = [[self.paragraph(cell, size, leading=size * 1.35) for cell in row] for row in rows]
        table = rl.Table(cells, self.widths(rows, size), repeatRows=1, spaceBefore=4, spaceAfter=9)
        every = ((0, 0), (-1, -1))
        table.setStyle([("GRID", *every, 0.5, HexColor(RULE)), ("BACKGROUND", (0, 0), (-1, 0), HexColor(PALE))])
        table.setStyle([("VALIGN", *every, "TOP"), ("LEFTPADDING", *every, 5), ("RIGHTPADDING", *every, 5)])
        return table

    def picture(self, name: str) -> bytes:
        return draw(name, self.zh, 8 if self.two else 6.8)

    def flow(self, block: Block, after: Block | None) -> Any:
        if block.kind == "heading":
            size, before = self.heads[block.level]
            bold = [(text, style + "b") for text, style in block.runs]
            head = self.paragraph(bold, size, leading=size * 1.3, spaceBefore=before, spaceAfter=size / 3)
            head.outline = (block.level, plain(block.runs))
            return head
        if block.kind == "table":
            return self.table(block.rows)
        if block.kind == "code":
            return self.code(block)
        if block.kind == "note":
            alarm = plain(block.runs).startswith(("Warning", "Caution", "Danger", "警告", "危险", "注意"))
            edge, fill = ("#c0392b", "#fdf1ef") if alarm else ("#2f6f9f", "#eef5fa")
            text = self.paragraph(block.runs, self.size - 0.5)
            return self.boxed(text, edge, fill, 3, 16.0 * block.level)
        if block.kind == "figure":
            picture = rl.Image(io.BytesIO(self.picture(block.text)))
            scale = min(72 / 150, self.column / picture.imageWidth)
            picture.drawWidth, picture.drawHeight = picture.imageWidth * scale, picture.imageHeight * scale
            caption = self.paragraph(block.runs, self.size - 1, alignment=1, spaceBefore=5)
            return rl.KeepTogether([rl.Spacer(0, 5), picture, caption, rl.Spacer(0, 9)])
        how: dict[str, Any] = {"spaceAfter": self.gap, "allowWidows": 0, "allowOrphans": 0}
        if block.kind == "item":
            left = 16 * (block.level + 1)
            how |= {"leftIndent": left, "bulletIndent": left - 15, "bulletFontName": "Sans-Regular"}
            how |= {"bulletFontSize": self.size, "spaceAfter": 3 if after and after.kind == "item" else 6}
        else:
            how["firstLineIndent"] = self.indent
        return self.paragraph(block.runs, bullet=block.mark or None, **how)

    def story(self) -> list[Any]:
        """The blocks, each behind a page break if it, or what it leads to, would not fit on the page."""
        blocks, out, need = self.doc.blocks, [], 0.0
        for block, after in zip(reversed(blocks), [None, *reversed(blocks[1:])], strict=True):
            flowable = self.flow(block, after)
            high = flowable.wrap(self.column, 9999)[1] if block.kind != "figure" else 150.0
            follows = after.kind if after else ""
            leads = (
                block.kind == "heading"
                or (block.kind == "para" and all("b" in style for _, style in block.runs))
                or (follows == "code" and after.level > 0)
                or (follows in ("table", "code", "item") and block.kind == "para" and high < 45)
            )
            lines = min(high, max(32.0, 2 * self.size * self.leading)) + self.gap
            part = {"heading": high + 22, "para": lines, "item": lines}
            part["table"] = high + 8 if high < 200 else 90.0
            need = part.get(block.kind, high + 13) + (need if leads else 0)
            out = [rl.CondPageBreak(need if len(out) < 2 * len(blocks) - 2 else 0), flowable, *out]
        return out

    def furniture(self, canvas: Any, template: Any) -> None:
        canvas.setFont(self.faces[0], 8)
        canvas.setFillColor(HexColor("#52606d"))
        canvas.setStrokeColor(HexColor(RULE))
        left, right, top = self.margin, A4[0] - self.margin, A4[1] - 13 * mm
        canvas.drawString(left, top, str(self.doc.meta["title"]))
        canvas.drawRightString(right, top, str(self.doc.meta["doc_version"]))
        canvas.line(left, top - 2 * mm, right, top - 2 * mm)
        canvas.drawString(left, 11 * mm, self.company)
        canvas.drawRightString(right, 11 * mm, ("第 {} 页" if self.zh else "Page {}").format(template.page))

    def make(self) -> bytes:
        story = self.story()
        top, bottom, bare = A4[1] - 19 * mm, 18 * mm, dict.fromkeys(("leftPadding", "rightPadding"), 0)
        bare |= dict.fromkeys(("topPadding", "bottomPadding"), 0)

        def page(name: str, deep: float) -> Any:
            frames = [rl.Frame(self.margin, top - deep, self.wide, deep, **bare)] if deep else []
            for i in range(1 + self.two):
                frames.append(rl.Frame(self.margin + i * self.step, bottom, self.column, top - deep - bottom, **bare))
            return rl.PageTemplate(name, frames, onPage=self.furniture)

        pages = [page("later", 0)]
        if self.two:  # the title runs across, the columns begin under it
            pages.insert(0, page("first", story[1].wrap(self.wide, 999)[1] + 12))
            story[2:2] = [rl.NextPageTemplate("later"), rl.FrameBreak()]
        out = io.BytesIO()
        Outlined(
            out,
            pagesize=A4,
            pageTemplates=pages,
            invariant=1,
            title=str(self.doc.meta["title"]),
            author=self.company,
            lang=self.doc.meta["language"],
        ).build(story)
        return out.getvalue()

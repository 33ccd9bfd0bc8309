"""Sliders for Top-N, Top-M, RRF k, routes and filter: in notebook 20, and as a page of its own (``ragbuild tune``).

All that is shown is of the tuning half, one figure apart: who chooses by looking must not look at the test half.
A slider's move is arithmetic on the sweep's arrays: nothing is searched. Plots are SVG written here, since drawing one
with matplotlib takes longer than a person waits for a slider.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from ragbuild.core.config import stored_config
from ragbuild.core.show import BLUE, GREEN, ORANGE, RED
from ragbuild.core.store import inside
from ragbuild.course.step import input_paths
from ragbuild.evaluate.sweep import ROUTES, Choice, Setting, Sweep, write_choice
from ragbuild.evaluate.tuning import open_corpus

CHOSEN = "tuned_by_hand.yaml"
_ROUTES = {"both": ROUTES, "lexical": ("lexical",), "dense": ("dense",)}
_FLIPS = 12  # questions listed


class TuningPanel:
    """The controls and what they show. `widget` is what a notebook displays; `figures` holds the numbers shown last."""

    def __init__(self, sweep: Sweep, folder: Path) -> None:
        """`folder`: where the button writes its YAML."""
        import ipywidgets as w

        self.sweep, self.folder = sweep, folder
        self.choice = choice = sweep.recommend()
        self.base = sweep.setting()
        self.curve, self.within = lru_cache(64)(self._curve), lru_cache(64)(self._within)
        now, style = self.base, {"description_width": "90px"}
        steps = sorted({*sweep.facts["top_n"], choice[0].value, now.top_n})
        ks = sorted({1, 5, 10, 20, 30, 60, 100, 200, now.rrf_k})
        most = max(*sweep.facts["top_m"], now.top_m, choice[1].value)
        routes = next(name for name, value in _ROUTES.items() if set(value) == set(now.routes))
        wide = {"style": style, "layout": w.Layout(width="420px")}
        self.top_n = w.SelectionSlider(options=steps, value=choice[0].value, description="Top-N", **wide)
        self.top_m = w.IntSlider(min=1, max=most, value=choice[1].value, description="Top-M", **wide)
        self.rrf_k = w.SelectionSlider(options=ks, value=now.rrf_k, description="RRF k", **wide)
        self.routes = w.ToggleButtons(options=list(_ROUTES), value=routes, description="routes", style=style)
        self.filter = w.Dropdown(options=sweep.facts["filters"], description="filter", **wide)
        self.write = w.Button(description="write YAML", button_style="primary")
        self.note, self.shown = w.HTML(), w.HTML()
        controls = [self.top_n, self.top_m, self.rrf_k, self.routes, self.filter]
        for control in controls:
            control.observe(self.update, "value")
        self.write.on_click(self.save)
        self.widget = w.VBox([w.HTML(_about(sweep, choice)), *controls, w.HBox([self.write, self.note]), self.shown])
        self.figures: dict[str, float] = {}
        self.update()

    @property
    def setting(self) -> Setting:
        """What the controls say."""
        routes = _ROUTES[self.routes.value]
        return Setting(self.top_n.value, self.top_m.value, self.rrf_k.value, routes, self.filter.value)

    def _curve(self, rrf_k: int, routes: tuple[str, ...], where: str) -> np.ndarray:
        """Mean recall at each swept Top-N."""
        setting = Setting(rrf_k=rrf_k, routes=routes, filter=where)
        return self.sweep.recall_curve(self.sweep.facts["top_n"], setting, "tuning")

    def _within(self, setting: Setting) -> tuple[np.ndarray, np.ndarray]:
        """Parent recall and context tokens at each Top-M, (M, Q) each."""
        steps, mine = range(1, self.top_m.max + 1), self.sweep.of("tuning")
        return self.sweep.parent_recall(setting, steps)[:, mine], self.sweep.context_tokens(setting, steps)[:, mine]

    def update(self, _: Any = None) -> None:
        """Work out the setting's figures and show them."""
        sweep, s, facts = self.sweep, self.setting, self.sweep.facts
        within, tokens = self.within(Setting(s.top_n, 1, s.rrf_k, s.routes, s.filter))
        recall, test = sweep.recall(s), sweep.of("test")
        seconds = float(np.interp(s.top_n, facts["top_n"], facts["seconds"]))
        self.figures = {
            "recall": float(recall[sweep.of("tuning")].mean()),
            "test": float(recall[test].mean()) if test.any() else float("nan"),
            "parents": float(within[s.top_m - 1].mean()), "tokens": float(tokens[s.top_m - 1].mean()),
            "ms": 1000 * seconds,
        }  # fmt: skip
        flips = sweep.flips(self.base, s, "tuning")
        names = {
            "recall": f"recall of {s.top_n} candidates", "test": "the same, test half",
            "parents": f"right parents in Top-{s.top_m}", "tokens": "tokens of context",
            "ms": f"ms to rerank ({facts['reranker']}{', a stand-in' * facts['stand_in']})",
        }  # fmt: skip
        boxes = "".join(
            f"<div style='margin-right:28px'><b class='figure-{key}' style='font-size:22px'>{_number(key, value)}</b>"
            f"<br>{escape(names[key])}</div>" for key, value in self.figures.items()
        )  # fmt: skip
        lines = {"fused": (self.curve(s.rrf_k, s.routes, s.filter), GREEN)} if len(s.routes) > 1 else {}
        for route, colour in zip(ROUTES, (BLUE, ORANGE), strict=True):
            if route in s.routes:
                lines[route] = (self.curve(s.rrf_k, (route,), s.filter), colour)
        m = within.mean(1)
        plots = svg_lines("recall of the candidates", facts["top_n"], lines, s.top_n, "Top-N") + svg_lines(
            "right parents in the context", range(1, len(m) + 1), {"parent recall": (m, GREEN)}, s.top_m, "Top-M"
        )
        self.shown.value = (
            f"<div style='display:flex;margin:8px 0'>{boxes}</div><div>{plots}</div>{_flip_table(flips, self.base)}"
        )

    def save(self, _: Any = None) -> Path:
        """Write the setting as a YAML and say where it is."""
        path, s, shown = inside(self.folder, CHOSEN), self.setting, self.figures
        first, second = (choice.value for choice in self.choice)
        write_choice(path, s, [
            f"chosen by hand on {self.sweep.facts['corpus']}, {self.sweep.of('tuning').sum()} questions of the tuning "
            f"half, filter: {s.filter}",
            f"recall of the candidates {shown['recall']:.3f}, right parents {shown['parents']:.3f}",
            f"recommended was Top-N {first}, Top-M {second}",
        ])  # fmt: skip
        self.note.value = f"written: <code>{escape(str(path))}</code>; <code>ragbuild build --config</code> takes it"
        return path


def _about(sweep: Sweep, choice: tuple[Choice, Choice]) -> str:
    """What the figures are about, and what is recommended."""
    facts, (first, second) = sweep.facts, choice
    limit = max(1, int(facts["max_share"] * facts["children"]))
    name = "this workspace" if facts["corpus"] == "own" else facts["corpus"]
    return (
        f"<p><b>{escape(name)}</b>: {facts['children']:,} children, {sweep.of('tuning').sum()} questions "
        f"of the tuning half; embedder {escape(facts['embedder'])}.<br>Top-N {first.value}: {escape(first.reason)} "
        f"(more than {limit} is never recommended).<br>Top-M {second.value}: {escape(second.reason)}.</p>"
    )


def _number(key: str, value: float) -> str:
    if np.isnan(value):
        return "–"
    return f"{value:,.0f}" if key == "tokens" else f"{value:.1f}" if key == "ms" else f"{value:.3f}"


def _flip_table(rows: Sequence[Mapping[str, Any]], base: Setting) -> str:
    """The questions that a setting wins or loses against what is configured."""
    count = {now: sum(r["now"] == now for r in rows) for now in ("gained", "lost")}
    counts = ", ".join(f"<b class='figure-{now}'>{n}</b> {now}" for now, n in count.items())
    head = (
        f"<p>Questions against the configured Top-N {base.top_n}, Top-M {base.top_m}, RRF k {base.rrf_k}: {counts}.</p>"
    )
    shown = [r for now in count for r in [r for r in rows if r["now"] == now][: _FLIPS // 2]]
    body = "".join(
        f"<tr><td style='color:{GREEN if r['now'] == 'gained' else RED};padding-right:12px'>{r['now']}</td>"
        f"<td style='text-align:left'>{escape(r['question'])}</td></tr>" for r in shown
    )  # fmt: skip
    return head + (f"<table>{body}</table>" if body else "")


def svg_lines(
    title: str, xs: Sequence[int], lines: Mapping[str, tuple[Sequence[float], str]], chosen: float, label: str
) -> str:
    """A plot of shares (0 to 1) over `xs`, evenly spaced, the chosen value marked; `lines`: name -> (ys, colour)."""
    xs, (left, top, width, height) = list(xs), (40, 28, 340, 180)
    values = np.concatenate([np.asarray(ys, float) for ys, _ in lines.values()])
    low, high = (np.floor(values.min() * 10) / 10, np.ceil(values.max() * 10) / 10) if len(values) else (0, 1)
    high = max(high, low + 0.1)

    def x(value: float) -> float:
        return left + width * float(np.interp(value, xs, np.linspace(0, 1, len(xs)) if len(xs) > 1 else [0.5]))

    def y(value: float) -> float:
        return top + height * (high - value) / (high - low)

    out = [f"<text x='{left}' y='16' font-weight='bold'>{escape(title)}</text>"]
    for share in np.arange(low, high + 1e-9, 0.02 if high - low < 0.15 else 0.05 if high - low < 0.35 else 0.1):
        out.append(f"<path d='M{left} {y(share):.1f}h{width}' stroke='#ddd'/>")
        out.append(f"<text x='{left - 6}' y='{y(share) + 4:.1f}' text-anchor='end'>{share:.2f}</text>")
    for value in xs:
        out.append(f"<text x='{x(value):.1f}' y='{top + height + 16}' text-anchor='middle'>{value}</text>")
    out.append(f"<path d='M{x(chosen):.1f} {top}v{height}' stroke='{RED}' stroke-dasharray='4 3'/>")
    for n, (name, (ys, colour)) in enumerate(lines.items()):
        points = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in zip(xs, ys, strict=True))
        out.append(f"<polyline points='{points}' fill='none' stroke='{colour}' stroke-width='2.5'/>")
        at = y(float(np.interp(chosen, xs, ys)))
        out.append(f"<circle cx='{x(chosen):.1f}' cy='{at:.1f}' r='5' fill='{colour}'/>")
        out.append(f"<text x='{left + width + 8}' y='{top + 14 + 16 * n}' fill='{colour}'>{escape(name)}</text>")
    out.append(f"<text x='{left + width / 2}' y='{top + height + 34}' text-anchor='middle'>{escape(label)}</text>")
    size = f"width='{left + width + 100}' height='{top + height + 42}'"
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' {size} font-family='sans-serif' font-size='12'>{''.join(out)}</svg>"
    )


def open_panel(workspace: str | Path, on: str = "") -> TuningPanel:
    """The panel of a workspace, on its documents or what else `on` (or its ``tune.corpus``) names; what was computed
    before is reused."""
    root = Path(workspace)
    config = stored_config(root).with_overrides({"tune.corpus": on} if on else {})
    corpus = open_corpus(config, root, input_paths(config)["expert_eval_set"])
    return TuningPanel(corpus.sweep(), root)

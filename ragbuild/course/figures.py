"""The larger plots of notebooks 31 and 32; what they show is computed in the notebooks, only the drawing is here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ragbuild.core import show

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STATUS_COLOURS = {"active": show.GREEN, "legacy": show.ORANGE, "superseded": "#AAAAAA"}


def draw_states(rows: Sequence[tuple[str, Sequence[str | None], str]], versions: Sequence[str]) -> Figure:
    """One line a document: (key, its status in each version or None, a remark); `versions` name the columns."""
    import matplotlib.pyplot as plt

    fig, ax = plt.subplots(figsize=(9, 1.3 + 0.36 * len(rows)))
    for y, (_, states, remark) in enumerate(rows):
        for x, status in enumerate(states):
            if status is not None:
                ax.barh(y, 0.97, left=x, color=STATUS_COLOURS[status], height=0.62, align="center")
        ax.text(len(versions) + 0.02, y, remark, va="center", fontsize=8)
    for status, colour in STATUS_COLOURS.items():
        ax.barh(0, 0, color=colour, label=status)
    ax.set_yticks(range(len(rows)), [show.clip(key, 48) for key, *_ in rows], fontsize=8)
    ax.set_xticks([x + 0.485 for x in range(len(versions))], versions)
    ax.set(xlim=(0, len(versions) + 0.9), ylim=(len(rows) - 0.4, -0.6), title="States of the documents concerned")
    fig.legend(loc="outside lower center", ncols=3, frameon=False)
    ax.grid(visible=False)
    return fig


def draw_regression(rows: Sequence[Any], title: str) -> Figure:
    """One line a gated figure (a `regression.Row`): the version in use, how far it may fall, and the new version."""
    import matplotlib.pyplot as plt

    fig, ax = plt.subplots(figsize=(8, 1.6 + 0.55 * len(rows)))
    for y, r in enumerate(rows):
        ax.barh(y, r.margin, left=r.former - r.margin, color=show.BLUE, alpha=0.25, height=0.6)
        ax.plot([r.former] * 2, [y - 0.3, y + 0.3], color=show.BLUE, lw=3)
        ax.plot(r.now, y, "o", color=show.RED if r.fell else show.GREEN, ms=9)
        ax.text(1.03, y, f"n = {r.n}", va="center", fontsize=9)
    ax.barh(0, 0, color=show.BLUE, alpha=0.25, label="may fall so far")
    ax.plot([], [], color=show.BLUE, lw=3, label="version in use")
    ax.plot([], [], "o", color=show.RED, label="new version, fell")
    ax.plot([], [], "o", color=show.GREEN, label="new version, passes")
    ax.set_yticks(range(len(rows)), [r.metric for r in rows])
    ax.set(xlim=(0, 1.02), ylim=(len(rows) - 0.4, -0.6), xlabel="share (0 to 1)", title=title)
    fig.legend(loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    ax.grid(axis="y", visible=False)
    return fig


def draw_snapshots(snaps: Sequence[Mapping[str, Any]]) -> Figure:
    """The index versions (rows of `snapshots`): children in each, and its disk space, shared or its own."""
    import matplotlib.pyplot as plt

    names = [s["version"] for s in snaps]
    own, size = ([s[key] / 1e6 for s in snaps] for key in ("own", "size"))
    shared = [all_of_it - part for all_of_it, part in zip(size, own, strict=True)]
    fig, (top, low) = plt.subplots(2, 1, figsize=(8, 5.4), sharex=True)
    top.step(range(len(snaps)), [s["children"] for s in snaps], where="mid", color=show.BLUE, lw=2)
    for x, s in enumerate(snaps):
        top.plot(x, s["children"], "o", color=show.ORANGE if s["current"] else show.BLUE, ms=9)
        said = f"{s['command']}\n{s['documents']} documents"
        place = {"xytext": (0, 9), "textcoords": "offset points", "ha": "center"}
        top.annotate(said, (x, s["children"]), fontsize=8, **place)
    top.margins(x=0.08, y=0.35)
    top.set(ylabel="children", title="Versions (the one in use is marked)")
    low.bar(names, shared, 0.6, color=show.SKY, label="shared with others")
    low.bar(names, own, 0.6, bottom=shared, color=show.RED, label="its own")
    low.set(ylabel="MB on disk", xlabel="index version")
    handles, labels = low.get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    low.grid(axis="x", visible=False)
    low.margins(y=0.15)
    return fig


def draw_triggers(now: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]], called: str) -> Figure:
    """How near each trigger of a full rebuild is to its limit, today and in the version `called`."""
    import matplotlib.pyplot as plt

    fig, ax = plt.subplots(figsize=(8, 3.3))
    for y, pair in enumerate(zip(now, other, strict=True)):
        for r, offset, colour in zip(pair, (-0.19, 0.19), (show.BLUE, show.ORANGE), strict=True):
            if r["value"] is not None:  # a changed model has no limit to come near to: changed or not
                share = max(0.0, r["value"] / r["limit"] if r["limit"] else 1.2 * r["value"])
                end = min(share, 1.2)
                ax.barh(y + offset, end, 0.34, color=colour)
                ax.text(end + 0.02, y + offset, f"{100 * share:.0f} %", va="center", fontsize=8)
            else:
                ax.text(0.02, y + offset, "not measured", va="center", fontsize=8, color="#777777")
    ax.axvline(1, color=show.RED, ls="--")
    ax.barh(0, 0, color=show.BLUE, label="today")
    ax.barh(0, 0, color=show.ORANGE, label=called)
    ax.set_yticks(range(len(now)), [r["trigger"] for r in now])
    said = "share of the limit (from the line on a rebuild is recommended; bars end at 120 %)"
    ax.set(xlabel=said, title="How near is a full rebuild?", xlim=(0, 1.4), ylim=(len(now) - 0.5, -0.5))
    fig.legend(loc="outside lower center", ncols=2, frameon=False)
    ax.grid(axis="y", visible=False)
    return fig

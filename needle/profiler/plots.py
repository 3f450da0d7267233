"""Pictures of profiles. Every function takes the plain data that JSON holds and returns a matplotlib figure."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from needle.files import write_file

try:
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
except ImportError:
    raise ImportError(
        "[profile] pictures need matplotlib, got none: pip install jinja2 matplotlib, which is the extra report."
    ) from None

# Eight hues, then the same lighter; all names after these share the last.
COLORS = (
    *("#3b6ea5", "#d08c3f", "#5b9a68", "#a65b8b", "#7a6fb5", "#4fa3a5", "#c2605a", "#8c8c4a"),
    *("#86abd3", "#e8bd8a", "#9ac9a4", "#cf9dbe", "#b3abdc", "#94cccd", "#e2a29e", "#bdbd85"),
    "#888888",
)
INK, GREY, GRID, PAGE = "#1f2933", "#666666", "#e6e6e6", "#ffffff"
ON_PAGES = {INK: "var(--ink)", GREY: "var(--dim)", GRID: "var(--line)", PAGE: "var(--page)"}  # light or dark
DPI = 110
WIDE = 10.4  # inches: what fits into the page
LABEL = 44  # characters of a bar's name
Shades = Mapping[str, str]  # the colour of an op, one for all charts of a page


def canvas(width: float, height: float) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)
    axes.tick_params(labelsize=9, which="both", color=GREY, labelcolor=INK)
    axes.xaxis.label.set_color(INK)
    axes.yaxis.label.set_color(INK)
    return figure, axes


def drawn(figure: Figure, kind: str = "png", **more: Any) -> bytes:
    data = io.BytesIO()
    figure.savefig(data, format=kind, dpi=DPI, **more)
    return data.getvalue()


def save(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Draw it in the format that the ending of the path names, PNG without one."""
    write_file(path, drawn(figure, Path(path).suffix[1:] or "png"))


def inline(figure: Figure, name: str) -> str:
    """The picture as SVG for a page, in whose colours it is drawn; name: of its own on the page, for its ids."""
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        text = drawn(figure, "svg", transparent=True, metadata=nothing).decode()
    text = text[text.index("<svg") :]
    return re.sub("|".join(ON_PAGES), lambda found: ON_PAGES[found[0]], text)


def colors(names: Sequence[str]) -> dict[str, str]:
    """One colour a name in the order of first appearance; what is left when all are given shares grey."""
    return {n: COLORS[min(i, len(COLORS) - 1)] for i, n in enumerate(dict.fromkeys(names))}


def shades_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The colours of the ops of rows, which may be those of several profiles: those that take longest are apart."""
    total: dict[str, float] = {}
    for r in rows:
        total[r["op"]] = total.get(r["op"], 0.0) + r["seconds"]
    return colors(sorted(total, key=lambda op: -total[op]))


def key(shade: Shades, names: Iterable[str], most: int = 12) -> list[Patch]:
    """What the colours mean, in the order of `shade`."""
    used = set(names)
    return [Patch(color=c, label=n) for n, c in shade.items() if n in used][:most]


def below(figure: Figure, handles: Sequence[Any]) -> None:
    """A legend under the picture, where it hides nothing."""
    place: dict[str, Any] = {"loc": "outside lower center", "ncols": min(4, max(1, len(handles))), "frameon": False}
    figure.legend(handles=handles, fontsize=8, labelcolor=INK, **place)


def note(axes: Any, text: str, at: tuple[float, float], color: str) -> None:
    """Text that ends just above a point."""
    place = {"xytext": (0, 2), "textcoords": "offset points", "ha": "right", "va": "bottom"}
    axes.annotate(text, at, fontsize=8, color=color, **place)


def bars(
    names: Sequence[str],
    values: Sequence[float],
    spread: Sequence[tuple[float, float]],
    texts: Sequence[str],
    unit: str,
) -> Figure:
    """Horizontal bars from the top down, with the least and the largest value as a whisker."""
    figure, axes = canvas(WIDE, 0.6 + 0.38 * len(names))
    places = range(len(names))[::-1]
    errors = [[v - low for v, (low, _) in zip(values, spread, strict=True)]]
    errors.append([high - v for v, (_, high) in zip(values, spread, strict=True)])
    shades = [COLORS[0] if n.startswith("needle") else "#a9a9a9" for n in names]
    axes.barh(places, values, color=shades, height=0.65)
    axes.errorbar(values, places, xerr=errors, fmt="none", ecolor=INK, elinewidth=1.2, capsize=4, capthick=1.2)
    axes.set_yticks(places, names)
    largest = max(high for _, high in spread)
    for y, (_, high), text in zip(places, spread, texts, strict=True):
        axes.text(high + 0.012 * largest, y, text, va="center", fontsize=9, color=INK)
    axes.set_xlim(0, 1.14 * largest)
    axes.set_xlabel(unit)
    return figure


def operator_times(rows: Sequence[dict[str, Any]], limit: int = 15, shade: Shades | None = None) -> Figure:
    """The slowest rows as horizontal bars, coloured by op."""
    top = sorted(rows, key=lambda r: -r["seconds"])[:limit]
    shade = shade or shades_of(rows)
    figure, axes = canvas(WIDE, 1.1 + 0.27 * len(top))
    places = range(len(top))[::-1]
    axes.barh(places, [r["ms"] for r in top], color=[shade[r["op"]] for r in top], height=0.72)
    axes.set_yticks(places, [r["name"] if len(r["name"]) <= LABEL else "…" + r["name"][-LABEL + 1 :] for r in top])
    largest = max((r["ms"] for r in top), default=1) or 1
    for y, r in zip(places, top, strict=True):
        text = f"{r['ms']:.3f} ({100 * r['share']:.1f} %)"
        axes.text(r["ms"] + 0.01 * largest, y, text, va="center", fontsize=8, color=INK)
    axes.set_xlim(0, 1.2 * largest)
    axes.set_xlabel("ms in one run (share of all rows)")
    below(figure, key(shade, (r["op"] for r in top)))
    return figure


def roofline(rows: Sequence[dict[str, Any]], machine: dict[str, Any], shade: Shades | None = None) -> Figure:
    """Operations per second against operations per byte, under the roofs of memory, cache and the FMA units.

    A step may lie above the roofs: Winograd does an op with fewer multiplications than it has by definition.
    """
    shown = [r for r in rows if r["gflops"] and r["intensity"]]
    shade = shade or shades_of(rows)
    figure, axes = canvas(WIDE, 4.6)
    peak = machine["peak_gflops"]
    points = [r["intensity"] for r in shown] or [1.0]
    rates = [r["gflops"] for r in shown]
    left = min(*points, 0.1) / 2
    right = max(*points, 4 * peak / machine["bandwidth_gbs"]) * 2
    handles: list[Any] = []
    for rate, name, style in ((machine["bandwidth_gbs"], "memory", "-"), (machine["cache_gbs"], "cache", "--")):
        where = [left, peak / rate, right], [left * rate, peak, peak]
        handles += axes.plot(*where, style, color=GREY, lw=1.2, zorder=1, label=f"{rate:.0f} GB/s from {name}")
    note(axes, f"{peak:.0f} GF/s", (right, peak), GREY)
    longest = max((r["seconds"] for r in shown), default=1)
    for r in sorted(shown, key=lambda r: -r["seconds"]):  # small points lie on large ones
        size, color = 20 + 180 * r["seconds"] / longest, shade[r["op"]]
        axes.scatter(r["intensity"], r["gflops"], s=size, color=color, alpha=0.8, edgecolor=PAGE, lw=0.6, zorder=2)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(left, right)
    axes.set_ylim(min([*rates, left * machine["bandwidth_gbs"]]) / 2, 2 * max([*rates, peak]))
    axes.set_xlabel("operations per byte")
    axes.set_ylabel("GF/s (area: time)")
    axes.grid(True, which="major", color=GRID, lw=0.6, zorder=0)
    below(figure, handles + key(shade, (r["op"] for r in shown)))
    return figure


def memory_plan(memory: dict[str, Any], shade: Shades | None = None) -> Figure:
    """The arena: steps to the right, offsets upwards, one rectangle a buffer; a line for the peak of live bytes."""
    figure, axes = canvas(WIDE, 4.2)
    buffers = memory["buffers"]
    shade = shade or colors([b["kind"] for b in sorted(buffers, key=lambda b: -b["nbytes"])])
    for b in buffers:
        place = (b["first"] - 0.5, b["nbytes"] / 1e6, b["last"] - b["first"] + 1, b["offset"] / 1e6)
        axes.bar(*place, align="edge", color=shade[b["kind"]], edgecolor=PAGE, lw=0.7, alpha=0.85)
    axes.step(range(memory["steps"]), [n / 1e6 for n in memory["live"]], where="mid", color=INK, lw=1)
    axes.axhline(memory["peak"] / 1e6, color="#c2605a", lw=1, ls="--")
    text = f"peak {memory['peak'] / 1e6:.2f} MB in use, arena {memory['arena'] / 1e6:.2f} MB"
    note(axes, text, (memory["steps"] - 0.5, memory["peak"] / 1e6), "#c2605a")
    axes.set_xlim(-0.5, memory["steps"] - 0.5)
    axes.set_ylim(0, 1.1 * memory["arena"] / 1e6 or 1)
    axes.set_xlabel("step of the plan")
    axes.set_ylabel("MB of the arena (line: in use)")
    below(figure, key(shade, (b["kind"] for b in buffers)))
    return figure


def memory_line(timeline: Sequence[dict[str, Any]]) -> Figure:
    """Bytes of results that are alive during one eager run."""
    figure, axes = canvas(WIDE, 2.6)
    axes.step([1e3 * e["start"] for e in timeline], [e["live"] / 1e6 for e in timeline], where="post", color=COLORS[0])
    axes.set_xlabel("ms")
    axes.set_ylabel("MB of results alive")
    axes.set_ylim(bottom=0)
    return figure

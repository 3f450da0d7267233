"""Pictures of profiles. Every function takes the plain data that JSON holds and returns a matplotlib figure."""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from needle.files import write_file

try:
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
except ImportError:
    raise ImportError("[profile] pictures need matplotlib: in a checkout, pip install '.[report]'.") from None

COLORS = ("#3b6ea5", "#d08c3f", "#5b9a68", "#a65b8b", "#7a6fb5", "#4fa3a5", "#c2605a", "#8c8c4a", "#888888")
GREY = "#666666"
DPI = 110
WIDE = 10.4  # inches: what fits into the page
LABEL = 44  # characters of a bar's name


def canvas(width: float, height: float) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9)
    return figure, axes


def drawn(figure: Figure, kind: str = "png") -> bytes:
    data = io.BytesIO()
    figure.savefig(data, format=kind, dpi=DPI)
    return data.getvalue()


def save(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Draw it in the format that the ending of the path names, PNG without one."""
    write_file(path, drawn(figure, Path(path).suffix[1:] or "png"))


def inline(figure: Figure) -> str:
    """The picture as a data URL."""
    return "data:image/png;base64," + base64.b64encode(drawn(figure)).decode()


def colors(names: Sequence[str]) -> dict[str, str]:
    """One colour a name in the order of first appearance; all after the eighth share grey."""
    return {n: COLORS[min(i, len(COLORS) - 1)] for i, n in enumerate(dict.fromkeys(names))}


def below(figure: Figure, handles: Sequence[Any]) -> None:
    """A legend under the picture, where it hides nothing."""
    figure.legend(handles=handles, fontsize=8, loc="outside lower center", ncols=min(4, len(handles)), frameon=False)


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
    shades = [COLORS[0] if n.startswith("needle") else "#b3b3b3" for n in names]
    axes.barh(places, values, xerr=errors, color=shades, ecolor=GREY, capsize=3, height=0.65)
    axes.set_yticks(places, names)
    largest = max(high for _, high in spread)
    for y, (_, high), text in zip(places, spread, texts, strict=True):
        axes.text(high + 0.012 * largest, y, text, va="center", fontsize=9)
    axes.set_xlim(0, 1.14 * largest)
    axes.set_xlabel(unit)
    return figure


def operator_times(rows: Sequence[dict[str, Any]], limit: int = 15) -> Figure:
    """The slowest rows as horizontal bars, coloured by op."""
    top = sorted(rows, key=lambda r: -r["seconds"])[:limit]
    shade = colors([r["op"] for r in top])
    figure, axes = canvas(WIDE, 0.8 + 0.27 * len(top))
    places = range(len(top))[::-1]
    axes.barh(places, [r["ms"] for r in top], color=[shade[r["op"]] for r in top], height=0.72)
    axes.set_yticks(places, [r["name"] if len(r["name"]) <= LABEL else "…" + r["name"][-LABEL + 1 :] for r in top])
    largest = max((r["ms"] for r in top), default=1) or 1
    for y, r in zip(places, top, strict=True):
        axes.text(r["ms"] + 0.01 * largest, y, f"{r['ms']:.3f} ({100 * r['share']:.1f} %)", va="center", fontsize=8)
    axes.set_xlim(0, 1.2 * largest)
    axes.set_xlabel("ms in one run (share of all rows)")
    axes.legend(
        handles=[Patch(color=c, label=n) for n, c in shade.items()], fontsize=8, loc="lower right", frameon=False
    )
    return figure


def roofline(rows: Sequence[dict[str, Any]], machine: dict[str, Any]) -> Figure:
    """Operations per second against operations per byte, under the roofs of memory, cache and the FMA units."""
    shown = [r for r in rows if r["gflops"] and r["intensity"]]
    figure, axes = canvas(WIDE, 4.6)
    peak = machine["peak_gflops"]
    points = [r["intensity"] for r in shown] or [1.0]
    left = min(*points, 0.1) / 2
    right = max(*points, 4 * peak / machine["bandwidth_gbs"]) * 2
    handles: list[Any] = []
    for rate, name, style in ((machine["bandwidth_gbs"], "memory", "-"), (machine["cache_gbs"], "cache", "--")):
        where = [left, peak / rate, right], [left * rate, peak, peak]
        handles += axes.plot(*where, style, color=GREY, lw=1.2, zorder=1, label=f"{rate:.0f} GB/s from {name}")
    note(axes, f"{peak:.0f} GF/s ", (right, peak), GREY)
    shade = colors([r["op"] for r in sorted(shown, key=lambda r: -r["seconds"])])
    longest = max((r["seconds"] for r in shown), default=1)
    for op, color in shade.items():
        mine = [r for r in shown if r["op"] == op]
        sizes = [20 + 180 * r["seconds"] / longest for r in mine]
        where = [r["intensity"] for r in mine], [r["gflops"] for r in mine]
        axes.scatter(*where, s=sizes, color=color, alpha=0.75, edgecolor="white", lw=0.6, zorder=2)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(left, right)
    axes.set_ylim(min([r["gflops"] for r in shown] + [left * machine["bandwidth_gbs"]]) / 2, 2 * peak)
    axes.set_xlabel("operations per byte")
    axes.set_ylabel("GF/s (area: time)")
    axes.grid(True, which="major", color="#e6e6e6", lw=0.6, zorder=0)
    handles += [Patch(color=c, label=n) for n, c in list(shade.items())[:9]]
    below(figure, handles)
    return figure


def memory_plan(memory: dict[str, Any]) -> Figure:
    """The arena: steps to the right, offsets upwards, one rectangle a buffer; a line for the peak of live bytes."""
    figure, axes = canvas(WIDE, 4.2)
    buffers = memory["buffers"]
    shade = colors([b["kind"] for b in sorted(buffers, key=lambda b: -b["nbytes"])])
    for b in buffers:
        place = (b["first"] - 0.5, b["nbytes"] / 1e6, b["last"] - b["first"] + 1, b["offset"] / 1e6)
        axes.bar(*place, align="edge", color=shade[b["kind"]], edgecolor="white", lw=0.7, alpha=0.85)
    axes.step(range(memory["steps"]), [n / 1e6 for n in memory["live"]], where="mid", color="#222222", lw=1)
    axes.axhline(memory["peak"] / 1e6, color="#c2605a", lw=1, ls="--")
    text = f"peak {memory['peak'] / 1e6:.2f} MB in use, arena {memory['arena'] / 1e6:.2f} MB"
    note(axes, text, (memory["steps"] - 0.5, memory["peak"] / 1e6), "#c2605a")
    axes.set_xlim(-0.5, memory["steps"] - 0.5)
    axes.set_ylim(0, 1.1 * memory["arena"] / 1e6 or 1)
    axes.set_xlabel("step of the plan")
    axes.set_ylabel("offset in the arena, MB (line: bytes in use)")
    below(figure, [Patch(color=c, label=f"filled by {n}") for n, c in list(shade.items())[:9]])
    return figure


def memory_line(timeline: Sequence[dict[str, Any]]) -> Figure:
    """Bytes of results that are alive during one eager run."""
    figure, axes = canvas(WIDE, 2.6)
    axes.step([1e3 * e["start"] for e in timeline], [e["live"] / 1e6 for e in timeline], where="post", color=COLORS[0])
    axes.set_xlabel("ms")
    axes.set_ylabel("MB of results alive")
    axes.set_ylim(bottom=0)
    return figure

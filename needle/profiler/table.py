"""The columns of a profile's table, and the table as text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

WIDTH = 120  # columns of a table


def short(x: Any) -> str:
    """Three significant digits without exponents; "-" for None."""
    if x is None:
        return "-"
    if x == 0:
        return "0"
    digits = 0 if abs(x) >= 100 else 1 if abs(x) >= 10 else 2 if abs(x) >= 1 else 3
    return f"{x:.{digits}f}"


class Column(NamedTuple):
    key: str  # in a row of Profile.to_dict()
    title: str
    text: Callable[[Any], str]
    note: str


# The columns of every table, as text and as HTML.
COLUMNS = (
    Column("name", "node", str, "module path or node"),
    Column("op", "op", str, "kernel of a plan's step, or op of an eager call"),
    Column("shape", "output", lambda s: "x".join(map(str, s)), "shape of the output"),
    Column("calls", "n", str, "calls in one run"),
    Column("ms", "ms", lambda x: f"{x:.3f}", "median milliseconds in one run"),
    Column("share", "share", lambda x: f"{100 * x:.1f}%", "share of the time of all rows"),
    Column("mflop", "MFLOP", short, "millions of floating-point operations, a multiply-add as two"),
    Column("mb", "MB", short, "megabytes read and written"),
    Column("gflops", "GF/s", short, "operations per second"),
    Column("gbs", "GB/s", short, "bytes per second"),
    Column("intensity", "F/B", short, "operations per byte"),
    Column("roofline", "roof", lambda x: "-" if x is None else f"{100 * x:.0f}%", "least time of the op over measured"),
    Column("memory_mb", "out", short, "megabytes of new memory for the output"),
)
UNSTEADY = 1.3  # largest over least time of rounds from which on a reader is warned
TEXTS = 3  # the first columns are text, the others numbers


def unsteady(spreads: Mapping[str, Mapping[str, float]]) -> str:
    """A sentence about times whose rounds differ much (by name, with `min` and `max`), or nothing."""
    ratios = {name: s["max"] / s["min"] for name, s in spreads.items() if s["min"] > 0}
    wide = [f"{name} by {ratio:.1f}x" for name, ratio in ratios.items() if ratio >= UNSTEADY]
    if not wide:
        return ""
    return (
        f"Rounds differ much ({', '.join(wide)}): the machine did other work, too, so read the spread, not the median."
    )


def cut(text: str, width: int) -> str:
    """Text of at most `width` characters; of a path the end says more."""
    return text if len(text) <= width else "…" + text[len(text) - width + 1 :]


def text_table(rows: Sequence[dict[str, Any]], total: int) -> str:
    """Numbers take the room that they need, outputs and ops up to theirs, and names are cut to what is left."""
    cells = [[c.text(r[c.key]) for c in COLUMNS] for r in rows]
    widths = [max(len(c.title), *(len(r[i]) for r in cells), 0) for i, c in enumerate(COLUMNS)]
    rest = WIDTH - sum(widths[TEXTS:]) - len(widths) + 1
    for i, least in ((2, 14), (1, 16), (0, 20)):  # what the columns after it must keep: 16 for ops, 20 for names
        others = sum(min(widths[j], (20, 16)[j]) for j in range(i))
        widths[i] = max(min(widths[i], rest - others), min(widths[i], least))
        rest -= widths[i]
    cells = [[cut(v, w) for v, w in zip(r[:TEXTS], widths, strict=False)] + r[TEXTS:] for r in cells]

    def line(values: Sequence[str]) -> str:
        padded = (v.ljust(w) if i < TEXTS else v.rjust(w) for i, (v, w) in enumerate(zip(values, widths, strict=True)))
        return " ".join(padded).rstrip()

    lines = [line([c.title for c in COLUMNS]), line(["-" * w for w in widths]), *map(line, cells)]
    if total > len(rows):
        lines.append(f"... and {total - len(rows)} more rows")
    return "\n".join(lines)

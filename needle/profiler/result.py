"""A profile: rows, a timeline and peaks; as text, JSON, Chrome trace and HTML."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .files import write_file
from .peaks import Gpu, Peaks
from .trace import chrome_events

WIDTH = 120  # columns of a table


class Row(NamedTuple):
    """What one operator took in one run of the model. A row may stand for several calls at the same place and shape."""

    name: str  # module path or node
    op: str  # kernel (compiled) or op (eager)
    shape: tuple[int, ...]  # of the output
    calls: int
    seconds: float  # median over rounds, all calls together
    flops: int
    read: int  # bytes
    written: int
    memory: int  # bytes of the output that are new memory


class Event(NamedTuple):
    """One step on the timeline of a run."""

    name: str
    op: str
    start: float  # seconds
    seconds: float
    live: int  # bytes in use while it ran
    row: int | None  # its row


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
TEXTS = 3  # the first columns are text, the others numbers


@dataclasses.dataclass(frozen=True)
class Profile:
    """Where the time of a model goes. `print` it, or see `table`, `to_json`, `chrome_trace`, `html`."""

    kind: str  # eager or compiled
    model: str
    inputs: list[tuple[int, ...]]
    rounds: int
    times: list[float]  # seconds of whole runs without timers inside
    rows: list[Row]
    timeline: list[Event]
    peaks: Peaks | Gpu
    memory: dict[str, Any]  # eager: peak; compiled: MemoryReport.timeline()
    decomposed: dict[str, int] = dataclasses.field(default_factory=dict)  # ops of a run for which a GPU has no kernel

    @property
    def seconds(self) -> float:
        """Median seconds of a whole run."""
        return statistics.median(self.times)

    def libraries(self) -> dict[str, float]:
        """Share of the rows' time in every other library, whose calls are named library.function."""
        total = sum(r.seconds for r in self.rows)
        shares: dict[str, float] = {}
        for r in self.rows:
            library, dot, _ = r.op.partition(".")
            if dot:
                shares[library] = shares.get(library, 0.0) + (r.seconds / total if total else 0.0)
        return shares

    def by_op(self) -> Profile:
        """The same with one row for each op or kernel."""
        groups: dict[str, list[Row]] = {}
        for r in self.rows:
            groups.setdefault(r.op, []).append(r)
        merged = [
            Row(f"{len(g)} places", op, (), *(sum(column) for column in zip(*(r[3:] for r in g), strict=True)))
            for op, g in groups.items()
        ]
        return dataclasses.replace(self, rows=merged)

    def _record(self, r: Row, total: float) -> dict[str, Any]:
        nbytes, seconds = r.read + r.written, r.seconds
        least = self.peaks.seconds(r.flops, nbytes)
        return {
            **r._asdict(),
            "shape": list(r.shape),
            "ms": 1e3 * seconds,
            "share": seconds / total if total else 0.0,
            "mflop": r.flops / 1e6,
            "mb": nbytes / 1e6,
            "gflops": r.flops / seconds / 1e9 if seconds else None,
            "gbs": nbytes / seconds / 1e9 if seconds else None,
            "intensity": r.flops / nbytes if nbytes else None,
            "roofline": least / seconds if seconds and least else None,
            "memory_mb": r.memory / 1e6,
        }

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data: what the JSON holds and the page shows."""
        total = sum(r.seconds for r in self.rows)
        return {
            "kind": self.kind,
            "model": self.model,
            "inputs": [list(s) for s in self.inputs],
            "rounds": self.rounds,
            "machine": self.peaks.to_dict(),
            "seconds": {"median": self.seconds, "min": min(self.times), "max": max(self.times)},
            "seconds_in_rows": total,
            "rows": [self._record(r, total) for r in self.rows],
            "timeline": [e._asdict() for e in self.timeline],
            "memory": self.memory,
            "decomposed": self.decomposed,
        }

    def table(self, sort: str = "ms", limit: int | None = None) -> str:
        """The rows as text of at most 120 columns. sort: "order" (of execution) or a column of `to_dict()["rows"]`."""
        rows = self.to_dict()["rows"]
        if sort != "order":
            if rows and sort not in rows[0]:
                raise ValueError(f"[profile] sort expects order or one of {', '.join(rows[0])}, got {sort}.")
            text = isinstance(rows[0][sort], str) if rows else False
            rows.sort(key=lambda r: r[sort] if text else -1.0 if r[sort] is None else r[sort], reverse=not text)
        return text_table(rows[:limit], len(rows))

    def __str__(self) -> str:
        inputs = ", ".join("x".join(map(str, s)) for s in self.inputs)
        spread = f"{1e3 * min(self.times):.3f}-{1e3 * max(self.times):.3f}"
        inside = 1e3 * sum(r.seconds for r in self.rows)
        head = (
            f"{self.model} {self.kind}, input {inputs}: {1e3 * self.seconds:.3f} ms ({spread}) in {self.rounds} rounds"
        )
        head += f"; {inside:.3f} ms in {len(self.rows)} rows"
        head += "".join(f"; {100 * share:.1f}% of it in {library}" for library, share in self.libraries().items())
        if self.decomposed:
            head += "\nwithout a kernel, run as other ops: " + ", ".join(
                f"{k} {n}x" for k, n in self.decomposed.items()
            )
        return f"{self.peaks}\n{head}\n{self.table(limit=30)}"

    def to_json(self, path: str | os.PathLike[str]) -> None:
        write_file(path, json.dumps(self.to_dict(), indent=1))

    def chrome_trace(self, path: str | os.PathLike[str]) -> None:
        """Trace events for chrome://tracing or ui.perfetto.dev: steps on a timeline, bytes in use as a counter."""
        write_file(path, json.dumps(chrome_events({self.kind: self.to_dict()})))

    def html(self, path: str | os.PathLike[str]) -> None:
        """One self-contained page with tables and plots; needs matplotlib and jinja2."""
        from .page import profile_page  # the extra [report] is needed for pages only

        write_file(path, profile_page(self.to_dict()))


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

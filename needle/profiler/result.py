"""A profile: rows, a timeline and peaks; as text, JSON, Chrome trace and HTML."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
from typing import Any, NamedTuple

from needle.files import write_file
from needle.shown import Shown

from .peaks import Gpu, Peaks
from .table import text_table, unsteady
from .trace import chrome_events


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


@dataclasses.dataclass(frozen=True, repr=False)
class Profile(Shown):
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
        warning = unsteady({"whole runs": {"min": min(self.times), "max": max(self.times)}})
        return "\n".join([head, str(self.peaks), *([warning] if warning else []), self.table(limit=30)])

    def to_json(self, path: str | os.PathLike[str]) -> None:
        write_file(path, json.dumps(self.to_dict(), indent=1))

    def chrome_trace(self, path: str | os.PathLike[str]) -> None:
        """Trace events for chrome://tracing or ui.perfetto.dev: steps on a timeline, bytes in use as a counter."""
        write_file(path, json.dumps(chrome_events({self.kind: self.to_dict()})))

    def html(self, path: str | os.PathLike[str]) -> None:
        """One self-contained page with tables and plots; needs matplotlib and jinja2."""
        from .page import profile_page  # the extra [report] is needed for pages only

        write_file(path, profile_page(self.to_dict()))

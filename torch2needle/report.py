"""What a conversion found: one row per kind of unsupported call, flags, notes. Holds text only, so copies are cheap."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from tqdm import tqdm

from needle.autograd import Op, Unsupported
from needle.graph import Node
from needle.ops import TupleGetItem
from needle.shown import Shown

BAR_DELAY = 2.0  # seconds before a bar shows
STATUSES = ("native", "decomposed", "free", "unsupported")


def progress(text: str, total: int | None = None) -> tqdm:
    """A bar for work that takes long, on a terminal only; without a total it counts."""
    return tqdm(total=total, desc=text, delay=BAR_DELAY, leave=False, disable=None)


@dataclass
class Row:
    """Calls of one target from one source line."""

    op: str
    status: str  # native: one needle layer or op; decomposed: several; free: nothing is left to compute; unsupported
    count: int
    paths: list[str]  # modules that make the call
    location: str  # the user's file:line
    reason: str = ""
    nearest: str = ""
    stub: str = ""


@dataclass(frozen=True)
class Call:
    """One captured node and what stands for it in the needle graph."""

    step: int
    kind: str  # fx's: placeholder, get_attr, call_module, call_function, call_method, output
    name: str  # of the fx node
    target: str
    args: str
    needle: str  # the layer's class, the ops, or what else became of it
    shape: tuple[int, ...] | None  # of the result, where an example is known
    path: str  # the module that makes the call
    location: str  # the user's file:line
    rule: str
    nodes: list[str]  # of the needle graph, parameters left out


@dataclass(repr=False)
class Report(Shown):
    """`ok` when every call has a rule that takes it; `str` gives the table."""

    capture: str = ""  # which capture made the graph, and why not the other
    rows: list[Row] = field(default_factory=list)
    follows_mode: list[str] = field(default_factory=list)  # flags that follow net.train() and net.eval()
    constant_flags: list[str] = field(default_factory=list)  # flags that stay as captured
    notes: list[str] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)  # every captured node, in order

    @property
    def unsupported(self) -> list[Row]:
        return [r for r in self.rows if r.status == "unsupported"]

    @property
    def ok(self) -> bool:
        return not self.unsupported

    def __bool__(self) -> bool:
        return self.ok

    def add(self, row: Row) -> None:
        for r in self.rows:
            if (r.op, r.status, r.location, r.reason) == (row.op, row.status, row.location, row.reason):
                r.count += row.count
                r.paths += [p for p in row.paths if p not in r.paths]
                return
        self.rows.append(row)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def json(self) -> str:
        """The report without the captured calls, as a JSON object with `ok` beside the report's fields."""
        fields = {"rows": [dataclasses.asdict(r) for r in self.rows]}
        fields |= {k: getattr(self, k) for k in ("capture", "follows_mode", "constant_flags", "notes")}
        return json.dumps({"ok": self.ok, **fields}, indent=2)

    def remedies(self) -> list[str]:
        """For each unsupported row its reason and, where a rule is missing, the lines that would add one."""
        lines: list[str] = []
        shown: set[str] = set()  # a second rule for one operation would be an error
        for r in self.unsupported:
            lines += ["", f"{r.op} ({r.count}x) in {short(r.paths)}, {r.location}", f"  {r.reason}."]
            lines += [f"  nearest rule: {r.nearest}"] if r.nearest else []
            if r.stub:
                above = [f"  to add one: as above, for {r.op}"]
                lines += (
                    above if r.op in shown else ["  to add one:", *(f"    {t}".rstrip() for t in r.stub.splitlines())]
                )
                shown.add(r.op)
        return lines

    def __str__(self) -> str:
        counts: Counter[str] = Counter()
        for r in self.rows:
            counts[r.status] += r.count
        total = f"{sum(counts.values())} calls of {len({r.op for r in self.rows})} operations"
        lines = [f"{total}: {', '.join(f'{counts[s]} {s}' for s in STATUSES if counts[s])}"] if self.rows else []
        lines += [f"captured by {self.capture}"] if self.capture else []
        lines += overview(self.rows)
        lines += [f"follows train()/eval(): {t}" for t in self.follows_mode]
        lines += [f"stays constant: {t}" for t in self.constant_flags]
        return "\n".join(lines + [f"note: {t}" for t in self.notes] + self.remedies())


def overview(rows: list[Row]) -> list[str]:
    """A line for each row, without columns that are empty in all."""
    head = ["status", "op", "count", "module", "source", "nearest rule"]
    cells = [[r.status, r.op, str(r.count), short(r.paths), r.location, r.nearest] for r in rows]
    keep = [i for i in range(len(head)) if any(c[i] for c in cells)]
    return table([head[i] for i in keep], [[c[i] for i in keep] for c in cells]) if cells else []


def status_of(nodes: Sequence[Node]) -> str:
    """The status of a call that recorded these nodes of the needle graph."""
    work = [n for n in nodes if n.kind in ("op", "module") and not isinstance(n.target, TupleGetItem)]
    if not work:
        return "free"
    one = len(work) == 1 and not (isinstance(work[0].target, Op) and not work[0].target.has_kernel())
    return "native" if one else "decomposed"


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """Lines of aligned columns."""
    widths = [max(len(r[i]) for r in [head, *rows]) for i in range(len(head))]
    return ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in [head, *rows]]


def dotted(*parts: str) -> str:
    """The path of what is below a module, whose own path may be empty."""
    return ".".join(p for p in parts if p)


def reason_of(e: Exception) -> str:
    """What an exception says, in its first line and without the full stop."""
    return str(e).split("\n")[0].rstrip(".")


def short(paths: list[str]) -> str:
    """At most two paths, and how many more there are."""
    shown = [p or "(model)" for p in paths[:2]]
    return ", ".join(shown) + (f" and {len(paths) - 2} more" if len(paths) > 2 else "")


class ConversionError(Unsupported):
    """Every call that cannot be converted, each with its place, its reason and a remedy; `report` has them as data."""

    def __init__(self, report: Report) -> None:
        self.report = report
        bad = report.unsupported
        head = f"[convert] expects operations with rules, got {sum(r.count for r in bad)} calls of {len(bad)} kinds without."
        super().__init__("\n".join([head, "", *overview(bad), *report.remedies()]))

    def __reduce__(self) -> tuple[type[ConversionError], tuple[Report]]:
        return type(self), (self.report,)  # of which processes make it again

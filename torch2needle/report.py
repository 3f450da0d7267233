"""What a conversion found: one row per kind of unsupported call, flags, notes. Holds text only, so copies are cheap."""

from __future__ import annotations

from dataclasses import dataclass, field

from needle.autograd import Unsupported


@dataclass
class Row:
    """Calls of one target from one source line."""

    op: str
    status: str  # converted | unsupported
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


@dataclass
class Report:
    """`ok` when every call has a rule that takes it; `str` gives the table."""

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

    def __str__(self) -> str:
        head = ["status", "op", "count", "module", "source", "reason"]
        lines = table(head, [[r.status, r.op, str(r.count), short(r.paths), r.location, r.reason] for r in self.rows])
        lines += [f"follows train()/eval(): {t}" for t in self.follows_mode]
        lines += [f"stays constant: {t}" for t in self.constant_flags]
        return "\n".join(lines + [f"note: {t}" for t in self.notes])


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """Lines of aligned columns."""
    widths = [max(len(r[i]) for r in [head, *rows]) for i in range(len(head))]
    return ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in [head, *rows]]


def short(paths: list[str]) -> str:
    """At most two paths, and how many more there are."""
    shown = [p or "(model)" for p in paths[:2]]
    return ", ".join(shown) + (f" and {len(paths) - 2} more" if len(paths) > 2 else "")


class ConversionError(Unsupported):
    """Every call that cannot be converted, each with its place, its reason and a remedy; `report` has them as data."""

    def __init__(self, report: Report) -> None:
        self.report = report
        bad = report.unsupported
        lines = [
            f"[convert] expects operations with rules, got {sum(r.count for r in bad)} calls of {len(bad)} kinds without."
        ]
        for r in bad:
            lines += ["", f"{r.op} ({r.count}x) in {short(r.paths)}, {r.location}", f"  {r.reason}."]
            lines += [f"  nearest rule: {r.nearest}"] if r.nearest else []
            lines += ["  to add one:", *(f"    {line}" for line in r.stub.splitlines())] if r.stub else []
        super().__init__("\n".join(lines))

"""What rewriting did: one line per rule that fired and per near miss, as data and as a table."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from typing import Any, NamedTuple

from needle.files import write_file
from needle.shown import Shown


class Vertex(NamedTuple):
    """A step of a graph as it is drawn; inputs: names of those that it reads."""

    name: str
    op: str
    path: str
    inputs: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Fired:
    """A pattern that became `op`: `node_out` stands for the nodes `nodes_in` of the modules at `module_paths`."""

    pattern: str
    nodes_in: list[str]
    node_out: str
    op: str
    module_paths: list[str]
    why: str = ""
    checks: list[str] = dataclasses.field(default_factory=list)  # the pattern's conditions, all of which held
    delta: float | None = None  # largest difference to the steps, relative to their largest value, if it was measured

    def lines(self, verb: str) -> list[str]:
        """What happened, why it may, and how far it changes numbers."""
        where = f" ({', '.join(self.module_paths)})" if self.module_paths else ""
        found = [f"{', '.join(self.nodes_in)}{where} {verb} {self.node_out} ({self.op}) by {self.pattern}."]
        found += [f"  why: {self.why}."] if self.why else []
        checks = ["no step is read elsewhere or is an output", *self.checks]
        found.append(f"  checked: {'; '.join(checks)}.")
        if self.delta is not None:
            found.append(f"  largest difference to the unfused steps: {self.delta:.1e} of their largest value.")
        return found


@dataclasses.dataclass(frozen=True)
class NearMiss:
    """A pattern that was found at `node`, but refused."""

    pattern: str
    node: str
    nodes: list[str]
    reason: str


@dataclasses.dataclass(frozen=True, repr=False)
class FusionReport(Shown):
    fired: list[Fired]
    near_misses: list[NearMiss]
    nodes_before: int  # layer calls and ops
    nodes_after: int
    nodes: dict[str, tuple[str, str, str]]  # name -> module path, op or kind, the ops that read it
    dry_run: bool = False
    graphs: tuple[list[Vertex], list[Vertex]] | None = None  # before and after; a plan's report has none
    title: str = "Plan"  # the model

    @property
    def counts(self) -> dict[str, int]:
        """Fusions by pattern, most frequent first."""
        return dict(Counter(f.pattern for f in self.fired).most_common())

    def patterns_because(self, why: str) -> list[str]:
        """The patterns that fired for one reason."""
        return list(dict.fromkeys(f.pattern for f in self.fired if f.why == why))

    def explain(self, name: str) -> str:
        """What happened to a node, by its name or its module's path, or to all nodes below a path."""
        names = {n for n, (path, _, _) in self.nodes.items() if name == n or f"{path}.".startswith(f"{name}.")}
        names |= {n for f in self.fired if f.node_out == name for n in f.nodes_in}
        if not names:
            raise KeyError(f"[explain] expects a node's name or a module's path, got {name}.")
        verb = "would become" if self.dry_run else "became"
        lines = [line for f in self.fired if names.intersection(f.nodes_in) for line in f.lines(verb)]
        missed = [m for m in self.near_misses if names.intersection(m.nodes)]
        lines += [f"{m.pattern} did not apply at {m.node}: {m.reason}." for m in missed]
        mentioned = {n for f in self.fired for n in f.nodes_in} | {n for m in self.near_misses for n in m.nodes}
        for n in (n for n in self.nodes if n in names - mentioned):
            _, kind, users = self.nodes[n]
            lines.append(f"{n} is {kind}, read by {users or 'nothing'}: no pattern has these steps.")
        return "\n".join(lines)

    def html(self, path: str | os.PathLike[str], profile: Any = None) -> None:
        """One self-contained page: the graph before and after, what fired, what nearly did and why not.

        profile: of the fused model (`needle.profile`), for the time of each fusion. Needs matplotlib and jinja2.
        """
        from needle.profiler.fusion import fusion_page  # the extra [report] is needed for pages only

        write_file(path, fusion_page(self, self.title, profile))

    def __str__(self) -> str:
        verb = " would apply" if self.dry_run else ""
        title = f"{len(self.fired)} fusions{verb}, {self.nodes_before} -> {self.nodes_after} calls"
        lines = [title, *(f"  {n:4d}  {pattern}" for pattern, n in self.counts.items())]
        if self.fired:
            head = ["pattern", "node", "difference", "stands for"]
            rows = [[f.pattern, f.node_out, delta(f.delta), short(f.nodes_in)] for f in self.fired]
            measured = any(f.delta is not None for f in self.fired)
            keep = [i for i in range(4) if measured or i != 2]
            lines += ["", *table([head[i] for i in keep], [[r[i] for i in keep] for r in rows])]
            reasons = {f.why: f.pattern for f in reversed(self.fired) if f.why}
            lines += ["", *(f"why {', '.join(self.patterns_because(w))}: {w}." for w in reversed(reasons))]
        if self.near_misses:
            rows = [[m.pattern, m.node, m.reason] for m in self.near_misses]
            lines += ["", f"{len(rows)} near misses", *table(["pattern", "node", "reason"], rows)]
        return "\n".join(lines)


def delta(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"


def short(names: list[str], most: int = 5) -> str:
    """All of a few names, or the first and last of many."""
    if len(names) <= most:
        return ", ".join(names)
    return f"{', '.join(names[:2])}, ... {len(names) - 3} more, {names[-1]}"


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    widths = [max(len(r[i]) for r in [head, *rows]) for i in range(len(head))]
    rule = ["-" * w for w in widths]
    return ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in [head, rule, *rows]]

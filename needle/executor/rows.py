"""Rows that nobody reads are not computed: a classifier that looks at x[:, 0] needs one row of what its last layers make.

Where a slice is all that is read of an op whose rows depend on the same rows of its inputs alone (`Op.sources`), the op runs
on those. It goes up to where all rows are needed: of a transformer's last layer keys and values stay, the rest is one row.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any, NamedTuple

from needle.autograd import no_grad
from needle.graph import Node, Recorder, Symbol, map_structure


class Rows(NamedTuple):
    """A stretch of one axis."""

    axis: int
    start: int
    stop: int


ALL = Rows(-1, 0, 0)


def sources(node: Node, rows: Rows) -> list[Rows] | None:
    """What of every input makes these rows of an op's result, None where that is not known."""
    if node.kind != "op" or node.target.n_out > 1:
        return None
    axes = node.target.sources(rows.axis, node.meta["spec"], *(a.meta["spec"] for a in node.args))
    return axes and [ALL if axis is None else rows._replace(axis=axis) for axis in axes]


def needed(nodes: Iterable[Node], results: Iterable[Node]) -> dict[Node, Rows]:
    """What has to be computed of every node that the results need."""
    read: dict[Node, set[Rows]] = {n: {ALL} for n in results}
    found = {}
    for node in reversed([*nodes]):
        if node not in read:
            continue
        rows = next(iter(read[node])) if len(read[node]) == 1 else ALL
        wanted = None if rows is ALL else sources(node, rows)
        if wanted is None:
            taken = node.target.taken(*(a.meta["spec"] for a in node.args)) if node.kind == "op" else None
            rows, wanted = ALL, [Rows(*taken)] if taken else [ALL] * len(node.args)
        found[node] = rows
        for n, part in zip(node.args, wanted, strict=True):
            read.setdefault(n, set()).add(part)
    return found


class Narrowing:
    """A recorded call, with those ops again that have fewer rows than before, and what reads them.

    known: the symbols that gradients pass through, by node. changed: the new ones; several where an op has several results.
    """

    def __init__(self, recorder: Recorder, results: list[Symbol]) -> None:
        self.recorder, self.known, self.changed = recorder, dict[Node, Symbol](), dict[Node, Any]()
        is_clear, left = True, list(results)
        while left:
            symbol = left.pop()
            other = self.known.get(symbol.node)
            if other is None:
                self.known[symbol.node] = symbol
                left += symbol.inputs  # type: ignore[arg-type]
            elif other is not symbol:
                is_clear &= other.op is symbol.op and other.requires_grad == symbol.requires_grad
        nodes = [*recorder.graph.nodes]
        self.rows = needed(nodes, [s.node for s in results])
        if is_clear:  # no value is detached in one place and not in another
            for node in nodes:
                self.again(node)

    def part(self, node: Node, rows: Rows) -> Any:
        """These rows of a node's value."""
        found = next((m[node] for m in (self.changed, self.known) if node in m), None)
        whole = Symbol(node, self.recorder, node.meta["spec"]) if found is None else found
        is_there = rows is ALL or self.rows[node] == rows
        return whole if is_there else whole[(slice(None),) * rows.axis + (slice(rows.start, rows.stop),)]

    def again(self, node: Node) -> None:
        """Record an op anew if it or what it reads has changed."""
        rows = self.rows.get(node)
        if node.kind != "op" or rows is None or (rows is ALL and self.changed.keys().isdisjoint(node.args)):
            return
        first, op = node.args[0], node.target
        if op.is_item:
            self.changed[node] = self.changed[first][op.index]
            return
        if rows is ALL and self.rows[first] is not ALL:  # it takes the rows that are there now
            made, axis = self.changed[first], self.rows[first].axis
            self.changed[node] = made if made.ndim == node.meta["spec"].ndim else made[(slice(None),) * axis + (0,)]
            return
        wanted = [ALL] * len(node.args) if rows is ALL else sources(node, rows)
        has_gradient = node in self.known and self.known[node].op is not None
        with nullcontext() if has_gradient else no_grad():
            parts = [self.part(a, w) for a, w in zip(node.args, wanted or (), strict=True)]
            self.changed[node] = self.recorder.record(op, parts)

    def moved(self, x: Any) -> Any:
        return self.changed.get(x.node, x) if isinstance(x, Symbol) else x


def narrowed(value: Any, recorder: Recorder) -> Any:
    """What a recorded call returned, from as few rows as it needs; the recorder's writes, effects and guards likewise."""
    results: list[Any] = []
    map_structure(value, results.append)
    results += [v for _, v in (*recorder.writes.values(), *recorder.effects, *recorder.guards)]
    made = Narrowing(recorder, [x for x in results if isinstance(x, Symbol)])
    if not made.changed:
        return value
    recorder.writes = {i: (tensor, made.moved(v)) for i, (tensor, v) in recorder.writes.items()}
    recorder.effects[:] = [(effect, made.moved(v)) for effect, v in recorder.effects]
    recorder.guards = [(guard, made.moved(v)) for guard, v in recorder.guards]
    value = map_structure(value, made.moved)
    read = {x.node for x in map(made.moved, results) if isinstance(x, Symbol)}
    for node in reversed(recorder.graph.nodes):
        read.update(node.inputs() if node in read else ())
    read |= {n for n in recorder.graph if n.kind != "op" or (n.target.is_item and n.args[0] in read)}  # gradients may
    recorder.graph.nodes = [n for n in recorder.graph if n in read]
    return value

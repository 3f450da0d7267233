"""A plan's steps for the engine that rewrites graphs: several as one kernel, so that what lies between them stays in a core's
cache or registers.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from needle.backend_ndarray.ndarray import NDArray
from needle.backend_ndarray.strides import runs_of
from needle.graph import Graph, Node
from needle.graph.engine import Fusion, Rewriting
from needle.graph.matcher import Match
from needle.graph.report import Fired, NearMiss
from needle.graph.steps import Step as GraphStep
from needle.graph.steps import Steps

from .step import JOIN, ZERO_HALO, Step
from .verify_plan import region


def same_elements(a: NDArray, b: NDArray) -> bool:
    """Whether two arrays are views of the same elements in the same order, in whatever shape."""
    if a is b:
        return True
    if a._handle is not b._handle or a._offset != b._offset or a._dtype != b._dtype:
        return False
    if a._shape == b._shape and a._strides == b._strides:
        return True
    return a.size == b.size and runs_of(a._shape, a._strides) == runs_of(b._shape, b._strides)


def overlap(a: NDArray, b: NDArray) -> bool:
    """Whether two arrays may share a byte, by where they begin and end in one memory."""
    one, other = (region(x) if x.size else None for x in (a, b))
    return one is not None and other is not None and one.start < other.stop and other.start < one.stop


class PlanSteps(Steps):
    """A plan's steps for the engine that rewrites graphs: the op of each is its kernel's name, its inputs the makers of its `x`
    and `y`. Who reads what a step makes, whole or in part, is its user.

    fixed: numbers of steps that do not become part of another kernel.
    """

    def __init__(self, steps: Sequence[Step], fixed: Collection[int]) -> None:
        dict.__init__(self)
        self.taken = {}
        self.net, self.graph, self.steps, self.fixed = None, Graph(), steps, fixed
        touching: dict[int, list[int]] = defaultdict(list)  # by buffer
        for i, s in enumerate(steps):
            for buffer in {id(a._handle) for a in (*s.outs, *s.ins)}:
                touching[buffer].append(i)
        self.touching = touching
        self.chains: Any = None  # what a rule over many steps finds once
        outside = Node("input", None, (), "")
        nodes: list[Node] = []
        for i, s in enumerate(steps):
            makers = [self._maker(i, s.inputs[name]) for name in ("x", "y") if name in s.inputs]
            node = Node("op", s, tuple(outside if j is None else nodes[j] for j in makers), s.label)
            node.meta["plan"] = self
            nodes.append(node)
            self[node] = GraphStep(node, s.kernel, node.args)
        self.graph.nodes = nodes
        self.order = {n: i for i, n in enumerate(nodes)}
        output = Node("output", None, (), "output")
        self.read_by = [[self._readers(i, a) for a in s.outs] for i, s in enumerate(steps)]  # of every output
        self.users = {
            n: [output if j is None else nodes[j] for found in self.read_by[i] for j in found]
            for n, i in self.order.items()
        }

    def _maker(self, i: int, x: NDArray) -> int | None:
        """The last step before step i that writes what it reads as x, if it writes all of it."""
        touching = self.touching[id(x._handle)]
        for j in reversed(touching[: bisect_left(touching, i)]):
            if self.steps[j].kernel != ZERO_HALO:
                for a in self.steps[j].outs:
                    if overlap(a, x):
                        return j if same_elements(a, x) else None
        return None

    def _readers(self, i: int, made: NDArray) -> list[int | None]:
        """The steps that read what step i makes before others have made it anew; None: who reads the plan's results."""
        found: list[int | None] = []
        touching = self.touching[id(made._handle)]
        for j in touching[bisect_right(touching, i) :]:
            step = self.steps[j]
            if step.kernel != ZERO_HALO:
                if any(overlap(a, made) for a in step.ins):
                    found.append(j)
                if any(same_elements(a, made) for a in step.outs):
                    return found
        kept = made._handle.is_output or made._handle.is_state
        return [*found, None] if kept else found


def next_to_each_other(match: Match) -> str | None:
    """Nothing but zeroed halos between the steps."""
    plan = match.root.meta["plan"]
    places = [plan.order[n] for n in match.nodes]
    others = (plan.steps[i] for i in range(places[0], places[-1]) if i not in places)
    return next((f"{s.label} runs between them" for s in others if s.kernel != ZERO_HALO), None)


def keeps_its_algorithm(match: Match) -> str | None:
    """A layer that has a choice of algorithms stays a step that can be timed."""
    first, plan = match.nodes[0], match.root.meta["plan"]
    return f"{first.name} has a choice of algorithms" if plan.order[first] in plan.fixed else None


class Merged(NamedTuple):
    """A plan's steps after its rules, by each old step's number its new one, and what fired or nearly did."""

    steps: list[Step]
    number: list[int]
    fired: list[Fired]
    misses: list[NearMiss]


def merge(steps: Sequence[Step], fixed: Collection[int], rules: Collection[Fusion]) -> Merged:
    plan = PlanSteps(steps, fixed)
    found = Rewriting(plan, rules)
    merged: dict[int, Step] = {}
    number = list(range(len(steps)))
    made = {}
    for fusion, match in found.fired:
        places = [plan.order[n] for n in match.nodes]
        last = places[-1]
        label = JOIN.join(dict.fromkeys(steps[i].label for i in places))
        merged[last] = fusion.replacement(match)._replace(label=label)
        made[match.root] = (label, merged[last].kernel)
        for j in places:
            number[j] = last
    left = {i: merged.get(i, s) for i, s in enumerate(steps) if number[i] == i}
    used = {id(a._handle) for s in left.values() if s.kernel != ZERO_HALO for a in (*s.outs, *s.ins)}
    kept = [i for i, s in left.items() if s.kernel != ZERO_HALO or id(s.outs[0]._handle) in used]
    place = [bisect_left(kept, i) for i in number]  # of a step that is gone, what comes after it
    return Merged([left[i] for i in kept], place, found.lines(made), found.misses)

"""Steps of a plan, and pairs of them as one kernel: what lies between the two stays in a core's cache or registers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from needle.backend_ndarray.ndarray import NDArray
from needle.graph import Graph, Node
from needle.graph.engine import Fusion, Rewriting
from needle.graph.matcher import Match
from needle.graph.report import Fired, NearMiss
from needle.graph.steps import Step as GraphStep
from needle.graph.steps import Steps

JOIN = " + "  # between the labels of a merged step
ZERO_HALO = "zero_halo"  # the kernel that writes around its result

Halo = tuple[int, int, int, int]  # zero rows and columns around an image: top, left, bottom, right
NO_HALO: Halo = (0, 0, 0, 0)
NO_HALOS: Mapping[str, Halo] = {}


class Step(NamedTuple):
    """One kernel call of a plan."""

    kernel: str
    outs: Sequence[NDArray]
    inputs: dict[str, NDArray]  # by the kernel's names, without those that are absent
    attrs: dict[str, float]
    label: str  # the graph node that it computes
    halos: Mapping[str, Halo] = NO_HALOS  # what it reads around its inputs, where it reads around one

    @property
    def ins(self) -> list[NDArray]:
        return list(self.inputs.values())


class PlanSteps(Steps):
    """A plan's steps for the engine that rewrites graphs: the op of each is its kernel's name, its input the maker of its `x`.

    fixed: numbers of steps that do not become part of another kernel.
    """

    def __init__(self, steps: Sequence[Step], fixed: Collection[int]) -> None:
        dict.__init__(self)
        self.net, self.graph, self.steps, self.fixed = None, Graph(), steps, fixed
        touching: dict[int, list[int]] = defaultdict(list)  # by buffer
        for i, s in enumerate(steps):
            for buffer in {id(a._handle) for a in (*s.outs, *s.ins)}:
                touching[buffer].append(i)
        self.touching = touching
        nodes: list[Node] = []
        for i, s in enumerate(steps):
            makers = self._makers(i, s.inputs["x"]) if "x" in s.inputs else ()
            node = Node("op", s, tuple(nodes[j] for j in makers)[:1], s.label)
            node.meta["plan"] = self
            nodes.append(node)
            self[node] = GraphStep(node, s.kernel, node.args)
        self.graph.nodes = nodes
        self.order = {n: i for i, n in enumerate(nodes)}
        self.users = {
            n: [nodes[j] for j in self.sharing(i) if steps[j].kernel != ZERO_HALO] for n, i in self.order.items()
        }

    def _makers(self, i: int, x: NDArray) -> Iterator[int]:
        """The steps before step i that make what it reads as x."""
        for j in self.touching[id(x._handle)]:
            if j < i and self.steps[j].kernel != ZERO_HALO and self.steps[j].outs[0].is_same_view(x):
                yield j

    def sharing(self, i: int) -> list[int]:
        """The other steps that read or write the memory of what step i makes."""
        return [j for j in self.touching[id(self.steps[i].outs[0]._handle)] if j != i]


def next_to_each_other(match: Match) -> str | None:
    """Nothing but zeroed halos between the two."""
    plan = match.root.meta["plan"]
    first, second = (plan.order[n] for n in match.nodes)
    between = (s for s in plan.steps[first + 1 : second] if s.kernel != ZERO_HALO)
    return next((f"{s.label} runs between them" for s in between), None)


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
        first, last = (plan.order[n] for n in match.nodes)
        label = f"{steps[first].label}{JOIN}{steps[last].label}"
        merged[last] = fusion.replacement(match)._replace(label=label)
        made[match.root] = (label, merged[last].kernel)
        for j in (first, *plan.sharing(first)):
            number[j] = last
    kept = [i for i in range(len(steps)) if number[i] == i]
    place = {old: new for new, old in enumerate(kept)}
    return Merged([merged.get(i, steps[i]) for i in kept], [place[i] for i in number], found.lines(made), found.misses)

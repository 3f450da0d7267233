"""Memory for time: a training step's graph that computes most of its forward pass a second time, when its gradients need it.

Chen et al., Training Deep Nets with Sublinear Memory Cost (arXiv 1604.06174). The forward pass is cut into segments; only what
crosses a cut stays in memory, and the last segment. Where the first gradient asks for a value of another segment, the ops
that lead to it run again. Random numbers are inputs of the graph, and effects belong to the first run, so both runs agree.
"""

from __future__ import annotations

import itertools
import math
from collections import ChainMap
from collections.abc import Sequence

from needle.autograd import Spec
from needle.backend_ndarray.ndarray import itemsize
from needle.graph import Graph, Node


def nbytes(node: Node) -> int:
    """New memory that a value takes: none for views, and for tuples, whose items are nodes of their own."""
    spec = node.meta["spec"]
    shares = node.target.is_view and not node.target.is_item
    return 0 if shares or not isinstance(spec, Spec) else math.prod(spec.shape) * itemsize(spec.dtype)


class Forward:
    """The ops of a forward pass in their order, by their numbers."""

    def __init__(self, graph: Graph, boundary: int) -> None:
        self.nodes = [n for n in graph.nodes[:boundary] if n.kind == "op"]
        self.number = {n: i for i, n in enumerate(self.nodes)}
        self.bytes = [nbytes(n) for n in self.nodes]
        self.last = list(range(len(self.nodes)))  # reader in the forward pass
        self.saved = [False] * len(self.nodes)  # whether gradients read it
        for node in graph.nodes[:boundary]:
            for i in self.among(node.inputs()):
                self.last[i] = max(self.last[i], self.number.get(node, 0))
        for node in graph.nodes[boundary:]:
            for i in self.among(node.inputs()):
                self.saved[i] = True
        self.results = set(self.among(graph.output.inputs()))
        change = [0] * (len(self.nodes) + 1)
        for i, last in enumerate(self.last):
            change[i + 1] += self.bytes[i]
            change[last + 1] -= self.bytes[i]
        self.across = list(itertools.accumulate(change))  # by op: bytes of what crosses a cut before it

    def among(self, nodes: Sequence[Node]) -> list[int]:
        return [self.number[n] for n in nodes if n in self.number]

    def crossing(self, cut: int) -> set[int]:
        """What is computed before op `cut` and read by it or later."""
        return {i for i in range(cut) if self.last[i] >= cut}

    def cuts(self, count: int) -> list[int]:
        """`count` places to cut, near equal shares of what gradients read, each where little crosses."""
        weights = [b * s for b, s in zip(self.bytes, self.saved, strict=True)]
        total, found, at, below = sum(weights), [], 0, 0
        for k in range(1, count + 1):
            middle, reach = total * k / (count + 1), total / (4 * count)
            places = []
            while at < len(self.nodes) and below <= middle + reach:
                if below >= middle - reach and not self.nodes[at].target.is_item:
                    places.append(at)
                below += weights[at]
                at += 1
            if places:
                found.append(min(places, key=self.across.__getitem__))
        return found

    def kept(self, cuts: Sequence[int]) -> set[int]:
        """Values that stay: what crosses, the last segment, results; and what these are views or items of."""
        last = range(cuts[-1] if cuts else 0, len(self.nodes))
        kept = self.results.union(last, *map(self.crossing, cuts))
        for i in sorted(kept, reverse=True):
            while self.nodes[i].target.is_view and (of := self.among(self.nodes[i].args[:1])):
                i = of[0]
                kept.add(i)
        return kept

    def peak(self, cuts: Sequence[int]) -> int:
        """About how many bytes are in use at once."""
        kept = self.kept(cuts)
        ends = [0, *cuts, len(self.nodes)]
        lost = [sum(self.bytes[i] for i in range(a, b) if i not in kept) for a, b in itertools.pairwise(ends)]
        return sum(self.bytes[i] for i in kept) + max(lost)


def recomputed(graph: Graph, boundary: int) -> tuple[Graph, int]:
    """A graph whose first `boundary` nodes are the forward pass, in less memory; and how many ops run twice in it."""
    forward = Forward(graph, boundary)
    counts = range(1, 2 * math.isqrt(len(forward.nodes)) + 1)
    cuts = min([[], *map(forward.cuts, counts)], key=forward.peak)
    kept = forward.kept(cuts)
    lost = {n for i, n in enumerate(forward.nodes) if i not in kept}
    new, done, again = Graph(), dict[Node, Node](), dict[Node, Node]()
    for place, node in enumerate(graph.nodes):
        if place < boundary:
            done[node] = new.copy_node(node, done)
            continue
        wanted, missing = node.inputs(), set[Node]()
        while wanted:
            n = wanted.pop()
            if n in lost and n not in again and n not in missing:
                missing.add(n)
                wanted += n.inputs()
        for n in sorted(missing, key=forward.number.__getitem__):
            again[n] = new.copy_node(n, ChainMap(again, done))
        done[node] = new.copy_node(node, ChainMap(again, done))
    return new, len(again)

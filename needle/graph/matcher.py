"""Patterns: chains of steps, and what they find."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

from needle.ops.math.elementwise import EWiseAdd, EWiseMul

from .graph import Node
from .steps import Step, Steps


@dataclasses.dataclass(frozen=True)
class Link:
    label: str
    op: Any  # a class of ops, for its subclasses too; in a plan a kernel's name
    commutes: bool = False  # the step before may be either of its two inputs


@dataclasses.dataclass(frozen=True)
class Pattern:
    """A chain of steps, each the first input of the next: Pattern.op("conv", Conv2d).then("bn", BatchNorm)."""

    links: tuple[Link, ...]

    @staticmethod
    def op(label: str, op: Any) -> Pattern:
        return Pattern((Link(label, op),))

    def then(self, label: str, op: Any, commutes: bool = False) -> Pattern:
        if any(link.label == label for link in self.links):
            raise ValueError(f"[fuse] a pattern names each step once, got {label} twice.")
        return Pattern((*self.links, Link(label, op, commutes)))

    def __len__(self) -> int:
        return len(self.links)

    def matches(self, root: Node, steps: Steps) -> Iterator[Match]:
        """Every way in which the chain ends at `root`."""
        for found in self._walk(len(self.links) - 1, root, steps):
            yield Match(found)

    def _walk(self, index: int, node: Node, steps: Steps) -> Iterator[dict[str, Step]]:
        link, step = self.links[index], steps.get(node)
        if step is None or not (step.op == link.op if type(link.op) is str else isinstance(step.op, link.op)):
            return
        if index == 0:
            yield {link.label: step}
            return
        for source in dict.fromkeys(step.inputs[: 2 if link.commutes else 1]):
            for found in self._walk(index - 1, source, steps):
                yield {**found, link.label: step}


@dataclasses.dataclass(frozen=True)
class Tree:
    """A step and the steps that make its first inputs: trees, names of values (one name is one value), or lists of either to
    choose from. Sums and products take their inputs in any order.
    """

    op: Any  # a class of ops, or several
    inputs: tuple[Any, ...]
    label: str = ""
    optional: bool = False  # a step of one input that may be left out, such as a cast

    def __len__(self) -> int:
        return 1 + sum(most(i) for i in self.inputs)

    def matches(self, root: Node, steps: Steps) -> Iterator[Match]:
        """Every way in which the tree ends at `root`."""
        for found in self.walk(root, steps, Found({}, {}, ())):
            nodes = sorted(set(found.nodes), key=steps.order.__getitem__)
            yield TreeMatch({n.name: steps[n] for n in nodes}, found)

    def walk(self, node: Node, steps: Steps, found: Found) -> Iterator[Found]:
        step = steps.get(node)
        if step is None or not isinstance(step.op, self.op) or len(step.inputs) < len(self.inputs):
            if self.optional:
                yield from walk(self.inputs[0], node, steps, found)
            return
        labels = found.labels | ({self.label: step} if self.label else {})
        begun = Found(found.values, labels, (*found.nodes, node))
        inputs = step.inputs[: len(self.inputs)]
        orders = [inputs, inputs[::-1]] if isinstance(step.op, EWiseAdd | EWiseMul) else [inputs]
        for order in orders:
            yield from walk_all(list(zip(self.inputs, order, strict=True)), steps, begun)


class Found(NamedTuple):
    """What a tree has met so far: values by name, steps by label, and all of its nodes."""

    values: dict[str, Node]
    labels: dict[str, Step]
    nodes: tuple[Node, ...]


def most(wanted: Any) -> int:
    """The largest number of steps that an input of a tree stands for."""
    if isinstance(wanted, list):
        return max(map(most, wanted))
    return 0 if isinstance(wanted, str) else len(wanted)


def walk(wanted: Any, node: Node, steps: Steps, found: Found) -> Iterator[Found]:
    if isinstance(wanted, list):
        for choice in wanted:
            yield from walk(choice, node, steps, found)
    elif not isinstance(wanted, str):
        yield from wanted.walk(node, steps, found)
    elif found.values.get(wanted, node) is node:
        yield found._replace(values={**found.values, wanted: node})


def walk_all(pairs: list[tuple[Any, Node]], steps: Steps, found: Found) -> Iterator[Found]:
    if not pairs:
        yield found
        return
    for first in walk(*pairs[0], steps, found):
        yield from walk_all(pairs[1:], steps, first)


class Match:
    """The steps that a pattern found, by label, in the chain's order.

    closed: the match accounts for every use of its values inside itself; a chain's step has one user, the next step
    problem: why what was found may not be fused, as far as the pattern itself knows
    """

    closed = False
    problem = ""

    def __init__(self, steps: dict[str, Step]) -> None:
        self.steps = steps

    def __getitem__(self, label: str) -> Step:
        return self.steps[label]

    def __contains__(self, label: str) -> bool:
        return label in self.steps

    @property
    def nodes(self) -> list[Node]:
        return [s.node for s in self.steps.values()]

    @property
    def root(self) -> Node:
        return self.nodes[-1]

    @property
    def outputs(self) -> list[Node]:
        """The nodes that the fused op's results stand for."""
        return [self.root]

    @property
    def paths(self) -> list[str]:
        return [s.path for s in self.steps.values() if s.path]

    def residual(self, label: str = "add") -> Node:
        """The other input of a commuting step. The engine refuses a step that reads its source twice."""
        labels = list(self.steps)
        before = self.steps[labels[labels.index(label) - 1]].node
        a, b = self.steps[label].inputs
        return b if a is before else a


class TreeMatch(Match):
    """What a tree found: `values` by name, and by label the steps."""

    closed = True

    def __init__(self, steps: dict[str, Step], found: Found) -> None:
        super().__init__(steps)
        self.values, self.labels = found.values, found.labels

    def __getitem__(self, label: str) -> Step:
        return self.labels[label]

    def __contains__(self, label: str) -> bool:
        return label in self.labels

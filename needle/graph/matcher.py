"""Patterns: chains of steps, and what they find."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

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

"""Linear layers that read the same input, such as the projections of query, key and value."""

from __future__ import annotations

from collections.abc import Iterator

from needle.autograd import Op
from needle.graph import Node
from needle.graph.matcher import Match
from needle.graph.steps import Step, Steps
from needle.ops.fused.linears import FusedLinears
from needle.ops.linalg.basic import Linear


def is_linear(step: Step | None) -> bool:
    return step is not None and isinstance(step.op, Linear) and step.op.layout_of_weight == "torch"


class SiblingMatch(Match):
    """Several layers side by side; each one's result is needed, and the fused op stands where the first one stood."""

    closed = True

    @property
    def root(self) -> Node:
        return self.nodes[0]

    @property
    def outputs(self) -> list[Node]:
        return self.nodes


class SiblingPattern:
    """Two or more linear layers of one input. Its length lets every pattern that a layer could be part of go first."""

    def __len__(self) -> int:
        return 1

    def matches(self, root: Node, steps: Steps) -> Iterator[Match]:
        if not is_linear(steps.get(root)):
            return
        x = steps[root].inputs[0]
        found = [n for n in dict.fromkeys(steps.users[x]) if is_linear(steps.get(n)) and steps[n].inputs[0] is x]
        if len(found) > 1 and found[0] is root:
            yield SiblingMatch({n.name: steps[n] for n in found})


def fused_linears(match: Match) -> tuple[Op, list[Node]]:
    steps = list(match.steps.values())
    weights = [s.inputs[1] for s in steps]
    biases = [b for s in steps for b in s.inputs[2:]]
    return FusedLinears(len(steps), bool(biases)), [steps[0].inputs[0], *weights, *biases]


def same_biases(match: Match) -> str | None:
    """Either all layers have a bias, or none has."""
    counts = {len(s.inputs) for s in match.steps.values()}
    return "some of the layers have a bias and some have not" if len(counts) > 1 else None

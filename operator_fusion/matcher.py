"""Steps and patterns: every graph node that is one op, whichever way it was spelled, and chains of such steps."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

from needle import nn
from needle.autograd import Op, Tensor
from needle.graph import GraphModule, Mode, Node, Recorder, Symbol, map_structure
from needle.ops.norm import BatchNorm


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """A graph node read as one op. A layer's step has the op that its forward records, its parameters among the inputs.

    inputs: nodes of the graph, or of the layer's own recording: its parameters and what is computed from them alone
    layer, path: of a module node; mode: the layer's training flag where the op depends on it, else False
    count: the parameter node of num_batches_tracked, if the layer has one
    """

    node: Node
    op: Op
    inputs: tuple[Node, ...]
    layer: nn.Module | None = None
    path: str = ""
    mode: Any = False
    count: Node | None = None


def find_steps(net: GraphModule) -> dict[Node, Step]:
    """The step of every node that is one op; other nodes have none."""
    paths: dict[int, str] = {}
    for path, tensor in net.named_tensors():
        paths.setdefault(id(tensor), path)
    steps = {}
    for node in net.graph:
        step = None
        if node.kind == "op" and node.target.n_out == 1:
            step = Step(node, node.target, node.args)
        elif node.kind == "module":
            step = layer_step(node, net.get_submodule(node.target), paths)
        if step is not None:
            steps[node] = step
    return steps


def layer_step(node: Node, layer: nn.Module, paths: dict[int, str]) -> Step | None:
    """The call of a layer as a step, from what its forward records in evaluation; None when that is not one op."""
    if any(layer.named_children()):
        return None
    mode = Mode(layer, node.target) if layer.mode_dependent else False
    recorder = Recorder(static=True)
    recorder.param_paths = paths
    outer: dict[Node, Node] = {}

    def enter(x: Any) -> Any:
        if not isinstance(x, Node):
            return x
        symbol = recorder.input(x.name, x.meta.get("spec"))
        outer[symbol.node] = x
        return symbol

    args = map_structure(node.args, enter)
    kwargs = args[-1] if args and isinstance(args[-1], dict) else {}
    if lacks_statistics(layer, args):
        return Step(node, BatchNorm(layer.eps), (node.args[0],), layer, node.target, mode)  # type: ignore
    stand_in = copy.copy(layer)
    stand_in.training = False
    for name, value in layer.__dict__.items():
        if isinstance(value, Tensor):  # recorded, so that what the layer computes from its weights is, too
            stand_in.__dict__[name] = recorder.param(value)
    try:
        result = stand_in.forward(*(args[:-1] if kwargs else args), **kwargs)
    except Exception:  # it needs sizes or values, so it is more than one op
        return None
    if not isinstance(result, Symbol) or result.node.kind != "op":
        return None
    last = result.node
    if not all(n is last or n in outer or of_parameters(n) for n in recorder.graph):
        return None
    if mode and not isinstance(last.target, BatchNorm):
        return None  # in training it is another op
    tracked = getattr(layer, "num_batches_tracked", None)
    count = None if tracked is None else recorder.param(tracked).node
    return Step(node, last.target, tuple(outer.get(n, n) for n in last.args), layer, node.target, mode, count)


def lacks_statistics(layer: nn.Module, args: tuple) -> bool:
    """True for a batch norm that always takes the batch's statistics."""
    if isinstance(layer, nn.FunctionalBatchNorm):
        return len(args) < 3 or args[1] is None or args[2] is None
    return isinstance(layer, nn.BatchNorm2d) and layer.running_mean is None


def of_parameters(node: Node) -> bool:
    return node.kind == "param" or (node.kind == "op" and all(of_parameters(n) for n in node.inputs()))


@dataclasses.dataclass(frozen=True)
class Link:
    label: str
    op: type[Op]
    commutes: bool = False  # the step before may be either of its two inputs


@dataclasses.dataclass(frozen=True)
class Pattern:
    """A chain of steps, each the first input of the next: Pattern.op("conv", Conv2d).then("bn", BatchNorm)."""

    links: tuple[Link, ...]

    @staticmethod
    def op(label: str, op: type[Op]) -> Pattern:
        return Pattern((Link(label, op),))

    def then(self, label: str, op: type[Op], commutes: bool = False) -> Pattern:
        if any(link.label == label for link in self.links):
            raise ValueError(f"[fuse] a pattern names each step once, got {label} twice.")
        return Pattern((*self.links, Link(label, op, commutes)))

    def __len__(self) -> int:
        return len(self.links)

    def matches(self, root: Node, steps: dict[Node, Step]) -> Iterator[Match]:
        """Every way in which the chain ends at `root`."""
        for found in self._walk(len(self.links) - 1, root, steps):
            yield Match(found)

    def _walk(self, index: int, node: Node, steps: dict[Node, Step]) -> Iterator[dict[str, Step]]:
        link, step = self.links[index], steps.get(node)
        if step is None or type(step.op) is not link.op:
            return
        if index == 0:
            yield {link.label: step}
            return
        for source in dict.fromkeys(step.inputs[: 2 if link.commutes else 1]):
            for found in self._walk(index - 1, source, steps):
                yield {**found, link.label: step}


class Match:
    """The steps that a pattern found, by label, in the chain's order."""

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
    def paths(self) -> list[str]:
        return [s.path for s in self.steps.values() if s.path]

    def residual(self, label: str = "add") -> Node:
        """The other input of a commuting step. The engine refuses a step that reads its source twice."""
        labels = list(self.steps)
        before = self.steps[labels[labels.index(label) - 1]].node
        a, b = self.steps[label].inputs
        return b if a is before else a

"""Rewrites of a plan's graph that serve every target: batch norms folded into the weights before them, parts joined."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from needle.graph import Graph, Node
from needle.graph.engine import Fusion, Rules
from needle.graph.matcher import Match, Pattern
from needle.graph.steps import Steps, of_parameters
from needle.op import Op, Spec
from needle.ops.common import Layer
from needle.ops.fused.layer import FusedLayer
from needle.ops.math.elementwise import EWiseAdd
from needle.ops.nn.norm import BatchNorm
from needle.ops.shape.indexing import GetItem, ScatterItem
from needle.ops.shape.join import Concat

FOLDS, INSIDE = Rules(), "FusedFoldedBatchNorm"
WHY = "in evaluation a batch norm is a scale and a shift per channel, which the weights before it take"


@dataclasses.dataclass(frozen=True)
class Fused:
    """One fused layer of which `where` holds."""

    where: Callable[[FusedLayer], bool]

    def __len__(self) -> int:
        return 1

    def matches(self, root: Node, steps: Steps) -> Iterator[Match]:
        step = steps.get(root)
        if step is not None and isinstance(step.op, FusedLayer) and self.where(step.op):
            yield Match({"layer": step})


def has_norm_inside(op: Any) -> bool:
    """A fused layer that no kernel is for, unless its batch norm goes into its weights."""
    return isinstance(op, FusedLayer) and op.base is not None and op.eps is not None


def folded(match: Match) -> tuple[Op, list[Node]]:
    step = match["layer"]
    fused, inputs = step.op, list(step.inputs)
    if "bn" in match:
        _, mean, var, weight, bias = match["bn"].inputs
        fused = FusedLayer(fused, eps=match["bn"].op.eps, has_bias=len(inputs) > 2)
        inputs += [weight, bias, mean, var]
    return fused.folded(inputs, lambda op, args: Node("op", op, tuple(args), f"{step.node.name}_{op.name}"))


def weights_do_not_depend_on_the_input(match: Match) -> str | None:
    for step in match.steps.values():
        for i, node in enumerate(step.inputs):
            if step.op.is_weight(i) and not of_parameters(node):
                return f"{node.name} depends on the input"
    return None


def channels_are_the_layers(match: Match) -> str | None:
    """A batch norm is over axis 1, the output of a linear layer over the last."""
    last, layer = match.root.meta["spec"], match["layer"].op
    base = layer.base if isinstance(layer, FusedLayer) else layer
    return None if base.takes_norm(last) else f"{match.root.name} normalises another axis"


def uncounted(match: Match) -> tuple[Op, list[Node]]:
    step = match["layer"]
    return dataclasses.replace(step.op, has_count=False), list(step.inputs[:-1])


CONDITIONS = (weights_do_not_depend_on_the_input, channels_are_the_layers)
FAMILY: dict[str, Any] = {"family": "FoldedBatchNorm", "why": WHY, "suffix": ""}
FOLDS.register(Fusion(INSIDE, Fused(has_norm_inside), folded, CONDITIONS, **FAMILY))
FOLDS.register(
    Fusion("LayerFoldedBatchNorm", Pattern.op("layer", Layer).then("bn", BatchNorm), folded, CONDITIONS, **FAMILY)
)


FOLDS.register(
    Fusion(
        "UncountedBatchNorm",
        Fused(lambda op: op.base is None and op.has_count),
        uncounted,
        why="only training counts batches",
        suffix="",
    )
)


def parts_beside(found: list[Node], shape: tuple[int, ...]) -> tuple[int, list[Node]] | None:
    """The axis along which the values that `found` puts into zeros lie one behind the other, and these in order."""
    taken = [(n, GetItem(n.target.index).taken(Spec(n.target.shape))) for n in found]
    rows = {n: at for n, at in taken if at is not None and n.target.shape == shape}
    if len(rows) < len(found):  # also where one is added twice
        return None
    order = sorted(rows, key=rows.__getitem__)
    axis, ends = rows[order[0]][0], [0, *(rows[n][2] for n in order)]
    lie = all(rows[n][:2] == (axis, start) for n, start in zip(order, ends, strict=False))
    parts = [n.args[0] for n in order]
    whole = lie and ends[-1] == shape[axis] and all(p.meta["spec"].ndim == len(shape) for p in parts)
    return (axis, parts) if whole else None


def joined_parts(graph: Graph) -> Graph:
    """A sum of parts that lie in zeros is those parts joined, once all are there: gradients of a weight that was split."""
    leaves: dict[Node, list[Node]] = {}  # of a sum of nothing else: what lies in zeros
    sums: dict[Node, list[tuple[Node, int, list[Node]]]] = {}  # by its last part
    order = {n: i for i, n in enumerate(graph)}
    for node in graph:
        if node.kind == "op" and isinstance(node.target, ScatterItem):
            leaves[node] = [node]
        elif node.kind == "op" and isinstance(node.target, EWiseAdd) and all(a in leaves for a in node.args):
            leaves[node] = [n for a in node.args for n in leaves[a]]
            beside = parts_beside(leaves[node], node.meta["spec"].shape)
            if beside is not None:
                sums.setdefault(max(leaves[node], key=order.__getitem__), []).append((node, *beside))
    made: dict[Node, Node] = {}

    def replace(node: Node, new: Graph, done: dict[Node, Node]) -> Node | None:
        for root, axis, parts in sums.get(node, ()):
            made[root] = new.add("op", Concat(axis), tuple(done[p] for p in parts), root.name)
            made[root].meta = dict(root.meta)
        return made.get(node)

    return graph.copy(replace).prune() if sums else graph


def nest_concats(graph: Graph) -> Graph:
    """cat(a, b, c) reads cat(a, b) where the graph has it: so the planner keeps a list that grows in one memory (DenseNet)."""
    known: dict[tuple, Node] = {}  # (axis, inputs) -> concat, all of the old graph

    def replace(node: Node, new: Graph, done: dict[Node, Node]) -> Node | None:
        if node.kind != "op" or not isinstance(node.target, Concat):
            return None
        args = node.args
        same = known.setdefault((node.target.axis, args), node)
        if same is not node:
            return done[same]
        for n in range(len(args) - 1, 0, -1):
            shorter = known.get((node.target.axis, args[:n]))
            if shorter is not None:
                joined = new.add("op", node.target, tuple(done[a] for a in (shorter, *args[n:])), node.name)
                joined.meta = dict(node.meta)
                return joined
        return None

    return graph.copy(replace)

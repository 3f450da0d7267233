"""Rewrites of a plan's graph that serve every target: batch norms folded into the weights before them, parts joined."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

from needle.graph import Graph, Node
from needle.graph.engine import Fusion, Rules
from needle.graph.matcher import Match, Pattern
from needle.graph.steps import Steps, of_parameters
from needle.op import Op, Spec
from needle.ops.common import Layer
from needle.ops.fused.layer import FusedLayer
from needle.ops.linalg.basic import Linear
from needle.ops.math.elementwise import EWiseAdd, EWiseMul, MulScalar
from needle.ops.nn.norm import BatchNorm
from needle.ops.shape.basic import Reshape
from needle.ops.shape.indexing import GetItem, ScatterItem
from needle.ops.shape.join import Concat
from needle.targets.images import main_op

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


def ends_in_sums(match: Match) -> str | None:
    by = match["layer"].op
    finished = isinstance(by, FusedLayer) and (by.base is None or by.activation != "none" or by.has_residual)
    return f"{match['layer'].node.name} is finished already" if finished else None


def scales_channels(match: Match) -> str | None:
    """A result is multiplied with one constant, or one for each of the layer's channels."""
    base: Any = main_op(match["layer"].op)
    step, out = match["scale"], match.root.meta["spec"]
    if isinstance(step.op, MulScalar):
        few = isinstance(step.op.scalar, int | float) and 1e-6 < abs(step.op.scalar) < 1e6
        return None if few else f"{match.root.name} may leave few digits of the weights"
    scale, layer = match.residual("scale"), match["layer"].node
    spec, axis = scale.meta["spec"], out.ndim - 1 if isinstance(base, Linear) else 1
    shape = (*(1,) * (out.ndim - spec.ndim), *spec.shape)
    if out != layer.meta["spec"] or spec.dtype != out.dtype or math.prod(shape) not in (1, shape[axis]):
        return f"{scale.name} is no number for each channel of {layer.name}"
    if base.channel_axis == 1 and getattr(base, "groups", 1) > 1:
        return f"{layer.name} has groups of output channels"
    return None if of_parameters(scale) else f"{scale.name} depends on the input"


def scaled(match: Match) -> tuple[Op, list[Node]]:
    """The layer with what its result is multiplied with in its weight and bias."""
    step = match["layer"]

    def make(op: Op, *args: Node) -> Node:
        return Node("op", op, args, f"{step.node.name}_{op.name}")

    op: Any
    op, inputs = folded(match) if "bn" in match or has_norm_inside(step.op) else (step.op, list(step.inputs))
    x, *values = inputs
    if isinstance(match["scale"].op, MulScalar):
        return op, [x, *(make(match["scale"].op, v) for v in values)]
    scale, axis = match.residual("scale"), op.channel_axis
    weight = step.inputs[1].meta["spec"]
    along = tuple(-1 if a == axis else 1 for a in range(weight.ndim))
    product = [make(EWiseMul(), values[0], make(Reshape(along), scale))]
    for bias in values[1:]:
        product.append(make(EWiseMul(), make(Reshape((-1,)), bias), make(Reshape((-1,)), scale)))
    return op, [x, *product]


SCALE: dict[str, Any] = {
    "family": "FoldedScale",
    "why": "a number for each channel is a factor of the weights before it",
    "suffix": "",
}
for multiply in (EWiseMul, MulScalar):
    commutes = multiply is EWiseMul
    plain = Pattern.op("layer", (Layer, FusedLayer)).then("scale", multiply, commutes)
    behind_norm = Pattern.op("layer", Layer).then("bn", BatchNorm).then("scale", multiply, commutes)
    name = f"Folded{multiply.__name__}"
    FOLDS.register(Fusion(f"Layer{name}", plain, scaled, (CONDITIONS[0], ends_in_sums, scales_channels), **SCALE))
    FOLDS.register(Fusion(f"BatchNorm{name}", behind_norm, scaled, (*CONDITIONS, scales_channels), **SCALE))


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

"""Fusions of what transformers spell out in small steps: norms by root mean square, rotary embedding, gates, shared keys."""

from __future__ import annotations

from typing import Any

import numpy as np

from needle import nn, ops
from needle.autograd import Op, Spec, Tensor
from needle.graph import Node, symbolic
from needle.graph.engine import Fusion
from needle.graph.matcher import Match, Tree
from needle.ops.fused.linears import GatedLinear
from needle.ops.linalg.basic import Linear
from needle.ops.math.activation import ACTIVATIONS
from needle.ops.math.elementwise import AddScalar, Cast, EWiseAdd, EWiseDiv, EWiseMul, Negate
from needle.ops.math.maths import Rsqrt, Sqrt
from needle.ops.math.power import PowerScalar
from needle.ops.nn.attention import ScaledDotProductAttention
from needle.ops.nn.layer_norm import RMSNorm
from needle.ops.nn.rotary import GroupedAttention, Rotary
from needle.ops.reduce.basic import Mean
from needle.ops.shape.basic import BroadcastTo, Reshape, Unsqueeze
from needle.ops.shape.indexing import GetItem
from needle.ops.shape.join import Concat

from .fuse import register


def shape_of(node: Node) -> tuple[int, ...] | None:
    """A node's shape, where it is known as numbers."""
    spec = node.meta.get("spec")
    return tuple(spec.shape) if spec is not None and all(isinstance(n, int) for n in spec.shape) else None


def known(net: nn.Module, *shape: int) -> tuple[nn.Module, tuple[int, ...]]:
    """A sample whose graph knows the shapes of its values, as a converted model's does."""
    return symbolic(net, (Spec(shape),)), shape


# -- x * rsqrt(mean(x ** 2) + eps) * weight --------------------------------------------------------------------------------

SQUARE = [Tree(PowerScalar, ("x",), "square"), Tree(EWiseMul, ("x", "x"))]
BELOW = Tree(AddScalar, (Tree(Mean, (SQUARE,), "mean"),), "eps")
NORMAL = [
    Tree(EWiseMul, ("x", [Tree(Rsqrt, (BELOW,)), Tree(PowerScalar, (BELOW,), "root")])),
    Tree(EWiseDiv, ("x", Tree(Sqrt, (BELOW,)))),
]
WEIGHTED = Tree(EWiseMul, ("weight", Tree(Cast, (NORMAL,), "cast", optional=True)))


def is_over_the_last_axis(match: Match) -> str | None:
    mean: Any = match["mean"].op
    axes = (mean.axes,) if isinstance(mean.axes, int) else mean.axes
    shape = shape_of(match["mean"].inputs[0])
    last = axes is not None and tuple(axes) in ((-1,), *([] if shape is None else [(len(shape) - 1,)]))
    return None if last and mean.keepdims else f"{match['mean'].node.name} is not over the last axis alone"


def is_a_root_of_squares(match: Match) -> str | None:
    for label, exponent in (("square", 2), ("root", -0.5)):
        if label in match and match[label].op.scalar != exponent:
            return f"{match[label].node.name} has another exponent than {exponent}"
    return None


def keeps_its_dtype(match: Match) -> str | None:
    spec = match.values["x"].meta.get("spec")  # type: ignore[attr-defined]
    if "cast" in match and (spec is None or match["cast"].op.dtype != spec.dtype):
        return f"{match['cast'].node.name} makes another dtype"
    return None


def has_a_weight_per_feature(match: Match) -> str | None:
    x, weight = (match.values[n] for n in ("x", "weight"))  # type: ignore[attr-defined]
    shapes, specs = (shape_of(x), shape_of(weight)), (x.meta.get("spec"), weight.meta.get("spec"))
    if None in shapes or shapes[1] != shapes[0][-1:] or specs[0].dtype != specs[1].dtype:  # type: ignore[index]
        return f"{weight.name} has not one value for each feature"
    return None


def fused_norm(match: Any) -> tuple[Op, list[Node]]:
    weight = [match.values["weight"]] if "weight" in match.values else []
    return RMSNorm(1, float(match["eps"].op.scalar), bool(weight)), [match.values["x"], *weight]


class NormSample(nn.Module):
    """A root-mean-square norm as language models write it."""

    container = True

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(ops.cast(Tensor(np.linspace(0.5, 1.5, 6)), "float32"))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * ops.rsqrt(ops.mean(x**2, -1, keepdims=True) + 1e-6))


# -- x * cos + turned(x) * sin ---------------------------------------------------------------------------------------------

TURNED = Tree(Concat, (Tree(Negate, (Tree(GetItem, ("x",), "high"),)), Tree(GetItem, ("x",), "low")), "join")
TURN = Tree(EWiseAdd, (Tree(EWiseMul, ("x", "cos")), Tree(EWiseMul, (TURNED, "sin"))))


def turns_halves(match: Any) -> str | None:
    """The slices are the halves of the last axis, found by taking them of position numbers."""
    shape, join = shape_of(match.values["x"]), match["join"].op
    if shape is None or not shape or shape[-1] % 2:
        return f"{match.values['x'].name} has no known even number of features"
    numbers = np.arange(shape[-1]).reshape((1,) * (len(shape) - 1) + (-1,))
    low, high = np.split(numbers, 2, -1)
    halves = all(
        np.array_equal(match[label].op.resolve(lambda d: None).reference(numbers), half)
        for label, half in (("low", low), ("high", high))
    )
    return None if halves and join.axis in (-1, len(shape) - 1) else "other parts than the halves of the last axis turn"


def angles_broadcast(match: Any) -> str | None:
    shape = shape_of(match.values["x"])
    for name in ("cos", "sin"):
        angles = shape_of(match.values[name])
        try:
            fits = shape is not None and angles is not None and np.broadcast_shapes(shape, angles) == shape
        except ValueError:
            fits = False
        if not fits:
            return f"{match.values[name].name} is not known to broadcast to {shape}"
    return None


def fused_turn(match: Any) -> tuple[Op, list[Node]]:
    return Rotary(), [match.values[n] for n in ("x", "cos", "sin")]


class TurnSample(nn.Module):
    """Rotary embedding as language models write it."""

    container = True

    def forward(self, x: Tensor) -> Tensor:
        angles = Tensor(np.linspace(0, 3, 5 * 8).reshape(5, 8).astype("float32"))
        turned = ops.concat((-x[..., 4:], x[..., :4]), -1)
        return x * ops.cos(angles) + turned * ops.sin(angles)


# -- activation(gate(x)) * up(x) -------------------------------------------------------------------------------------------

GATES = tuple(ACTIVATIONS.values())
GATED = Tree(EWiseMul, (Tree(GATES, (Tree(Linear, ("x",), "gate"),), "act"), Tree(Linear, ("x",), "up")))


def two_alike(match: Match) -> str | None:
    gate, up = match["gate"], match["up"]
    shapes = {shape_of(s.inputs[1]) for s in (gate, up)}
    if any(s.op.layout_of_weight != "torch" for s in (gate, up)) or None in shapes or len(shapes) > 1:
        return f"{gate.node.name} and {up.node.name} have weights of other shapes or orders"
    if len(gate.inputs) != len(up.inputs):
        return "one of the layers has a bias and one has not"
    return None


def fused_gate(match: Any) -> tuple[Op, list[Node]]:
    gate, up, act = match["gate"], match["up"], match["act"].op
    alpha = act.alpha if act.has_alpha else 0.0
    biases = [*gate.inputs[2:], *up.inputs[2:]]
    return GatedLinear(act.kernel, alpha, bool(biases)), [match.values["x"], gate.inputs[1], up.inputs[1], *biases]


class GateSample(nn.Module):
    container = True

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(6, 5, layout="torch"), nn.Linear(6, 5, layout="torch")

    def forward(self, x: Tensor) -> Tensor:
        return ops.silu(self.gate(x)) * self.up(x)


# -- attention of repeated keys and values ---------------------------------------------------------------------------------


def repeated(name: str) -> Tree:
    wide = Tree(BroadcastTo, (Tree(Unsqueeze, (name,), f"{name} axis"),), f"{name} wide")
    return Tree(Reshape, (wide,), f"{name} heads")


SHARED = Tree(ScaledDotProductAttention, ("q", repeated("k"), repeated("v")), "attention")


def repeats_heads(match: Any) -> str | None:
    for name in ("k", "v"):
        shape, wide, heads = (
            shape_of(n) for n in (match.values[name], *(match[f"{name} {w}"].node for w in ("wide", "heads")))
        )
        q = shape_of(match.values["q"])
        if shape is None or wide is None or q is None or len(shape) != 4 or len(q) != 4:
            return f"the shape of {match.values[name].name} is not known"
        if wide != (*shape[:2], wide[2], *shape[2:]) or heads != (shape[0], q[1], *shape[2:]):
            return f"{match.values[name].name} is repeated along another axis than its heads"
    return None


def fused_groups(match: Any) -> tuple[Op, list[Node]]:
    step = match["attention"]
    return GroupedAttention(step.op), [*(match.values[n] for n in "qkv"), *step.inputs[3:]]


class GroupsSample(nn.Module):
    container = True

    def forward(self, x: Tensor) -> Tensor:
        heads = ops.reshape(ops.broadcast_to(ops.unsqueeze(x[:, :2], 2), (2, 2, 2, 5, 8)), (2, 4, 5, 8))
        return ops.scaled_dot_product_attention(
            x, heads, ops.reshape(ops.broadcast_to(ops.unsqueeze(x[:, 2:] * 2.0, 2), (2, 2, 2, 5, 8)), (2, 4, 5, 8))
        )


NORMS = (is_over_the_last_axis, is_a_root_of_squares)
ONE_PASS = "a row is read once for its squares and once, from cache, for the result"
register(
    Fusion(
        "RMSNorm",
        WEIGHTED,
        fused_norm,
        (*NORMS, keeps_its_dtype, has_a_weight_per_feature),
        "rms_norm",
        ONE_PASS,
        lambda: known(NormSample(), 2, 4, 6),
    )
)
register(
    Fusion(
        "RotaryEmbedding",
        TURN,
        fused_turn,
        (turns_halves, angles_broadcast),
        why="both halves of a row are in registers when they turn",
        sample=lambda: known(TurnSample(), 2, 3, 5, 8),
    )
)
register(
    Fusion(
        "GatedLinear",
        GATED,
        fused_gate,
        (two_alike,),
        why="products of one input with two matrices are one product with the matrices side by side",
        sample=lambda: known(GateSample(), 4, 6),
    )
)
register(
    Fusion(
        "GroupedAttention",
        SHARED,
        fused_groups,
        (repeats_heads,),
        "attention",
        "keys and values that heads share are read where they lie",
        lambda: known(GroupsSample(), 2, 4, 5, 8),
    )
)

"""The fusions: families as tables over needle's activations. Each entry is one Fusion object."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from needle import nn
from needle.autograd import Op, Tensor
from needle.graph import Node
from needle.ops.activation import ACTIVATIONS, Activation, apply_activation
from needle.ops.conv import Conv2d
from needle.ops.elementwise import EWiseAdd
from needle.ops.fused import FusedConv2dActivation, FusedConvBatchNorm2d, FusedLinearActivation, FusedLinearBatchNorm
from needle.ops.fused_norm import FusedBatchNormActivation
from needle.ops.linalg import Linear
from needle.ops.norm import BatchNorm
from needle.ops.shape import Permute

from .engine import Fusion, register
from .matcher import Match, Pattern, Step

# -- what the steps of a match contribute to the fused op ------------------------------------------------------------


def activation_attributes(match: Match) -> dict[str, Any]:
    if "act" not in match:
        return {"activation": "none"}
    op: Any = match["act"].op
    return {"activation": op.kernel, "alpha": op.alpha if op.has_alpha else 0.0}


def batch_norm_attributes(bn: Step) -> dict[str, Any]:
    # FunctionalBatchNorm follows torch's rule; an op node has fixed statistics, so that its momentum is never used.
    layer = bn.layer
    return {
        "eps": bn.op.eps,  # type: ignore[attr-defined]
        "momentum": getattr(layer, "momentum", 0.1),
        "training": bn.mode,
        "unbiased": getattr(layer, "unbiased", True),
        "has_count": bn.count is not None,
    }


def batch_norm_inputs(bn: Step) -> tuple[list[Node], list[Node]]:
    """[weight, bias, running mean, running variance], [num_batches_tracked?]."""
    _, mean, var, weight, bias = bn.inputs
    return [weight, bias, mean, var], [] if bn.count is None else [bn.count]


def conv_batch_norm(match: Match) -> tuple[Op, list[Node]]:
    conv, bn = match["conv"], match["bn"]
    residual = [match.residual()] if "add" in match else []
    values, count = batch_norm_inputs(bn)
    attributes = {**conv.op.attributes(), **batch_norm_attributes(bn), **activation_attributes(match)}
    attributes |= {"has_bias": len(conv.inputs) > 2, "has_residual": bool(residual)}
    return FusedConvBatchNorm2d(**attributes), [*conv.inputs, *values, *residual, *count]


def conv_activation(match: Match) -> tuple[Op, list[Node]]:
    conv = match["conv"]
    residual = [match.residual()] if "add" in match else []
    attributes = {**conv.op.attributes(), **activation_attributes(match)}
    attributes |= {"has_bias": len(conv.inputs) > 2, "has_residual": bool(residual)}
    return FusedConv2dActivation(**attributes), [*conv.inputs, *residual]


def linear_batch_norm(match: Match) -> tuple[Op, list[Node]]:
    linear, bn = match["linear"], match["bn"]
    x, weight, *bias = linear.inputs
    if linear.op.layout_of_weight == "needle":  # type: ignore[attr-defined]
        weight = Node("op", Permute((1, 0)), (weight,), f"{weight.name}_transposed")  # type: ignore[call-arg]
    values, count = batch_norm_inputs(bn)
    attributes = {**batch_norm_attributes(bn), **activation_attributes(match), "has_bias": bool(bias)}
    return FusedLinearBatchNorm(**attributes), [x, weight, *bias, *values, *count]


def linear_activation(match: Match) -> tuple[Op, list[Node]]:
    linear = match["linear"]
    return FusedLinearActivation(**linear.op.attributes(), **activation_attributes(match)), list(linear.inputs)


def batch_norm_activation(match: Match) -> tuple[Op, list[Node]]:
    bn = match["bn"]
    values, count = batch_norm_inputs(bn)
    op = FusedBatchNormActivation(**batch_norm_attributes(bn), **activation_attributes(match))
    return op, [bn.inputs[0], *values, *count]


# -- conditions ------------------------------------------------------------------------------------------------------


def has_running_statistics(match: Match) -> str | None:
    return f"{match['bn'].node.name} has no running statistics" if len(match["bn"].inputs) < 5 else None


def normalises_features(match: Match) -> str | None:
    """A batch norm after a linear layer has the linear's outputs as channels only when there are two axes."""
    spec = match["linear"].inputs[0].meta.get("spec")
    if spec is not None and spec.ndim != 2:
        return f"{match['linear'].node.name} has an input of {spec.ndim} axes, of which {match['bn'].node.name} takes another"
    return None


def residual_has_same_shape(match: Match) -> str | None:
    """Where shapes are known; elsewhere the fused op looks, and runs its unfused form on shapes that broadcast."""
    residual, before = match.residual().meta.get("spec"), match["conv"].node.meta.get("spec")
    if residual is not None and before is not None and tuple(residual.shape) != tuple(before.shape):
        return f"{match['add'].node.name} broadcasts {tuple(residual.shape)} against {tuple(before.shape)}"
    return None


# -- samples ---------------------------------------------------------------------------------------------------------


class Apply(nn.Module):
    """The functional spelling of an activation, for those that have no layer."""

    container = True

    def __init__(self, kernel: str) -> None:
        super().__init__()
        self.kernel = kernel

    def forward(self, x: Tensor) -> Tensor:
        return apply_activation(self.kernel, x, 0.3)


def sample(parts: tuple[str, ...], cls: type[Activation] | None, image: bool = True) -> Callable:
    """A net with one match: `parts` of conv, linear, bn, add, then the activation."""

    def build() -> tuple[nn.Module, tuple[int, ...]]:
        make = {
            "conv": lambda: nn.Conv(4, 4, 3, bias="bn" not in parts),
            "linear": lambda: nn.Linear(4, 4),
            "bn": lambda: nn.BatchNorm2d(4, count_batches=True) if image else nn.BatchNorm1d(4),
        }
        net: nn.Module = nn.Sequential(*(make[p]() for p in parts if p != "add"))
        if "add" in parts:
            net = nn.Residual(net)
        if cls is not None:
            layer = getattr(nn, cls.__name__, None)
            net = nn.Sequential(net, layer() if layer else Apply(str(cls.kernel)))
        return net, (3, 4, 6, 5) if image else (6, 4)

    return build


# -- the tables ------------------------------------------------------------------------------------------------------

STEPS: dict[str, tuple] = {"conv": (Conv2d,), "linear": (Linear,), "bn": (BatchNorm,), "add": (EWiseAdd, True)}

# family, name before the activation's, steps, with an activation or without, replacement, conditions
BN, ADD, FEATURES = (has_running_statistics,), (residual_has_same_shape,), (normalises_features,)
FAMILIES: list[tuple[str, str, tuple[str, ...], bool, Callable, tuple]] = [
    ("conv_bn_add_act", "ConvBatchNorm2dAdd", ("conv", "bn", "add"), True, conv_batch_norm, BN + ADD),
    ("conv_bn_add", "ConvBatchNorm2dAdd", ("conv", "bn", "add"), False, conv_batch_norm, BN + ADD),
    ("conv_bn_act", "ConvBatchNorm2d", ("conv", "bn"), True, conv_batch_norm, BN),
    ("conv_bn", "ConvBatchNorm2d", ("conv", "bn"), False, conv_batch_norm, BN),
    ("conv_add_act", "ConvAdd", ("conv", "add"), True, conv_activation, ADD),
    ("conv_act", "Conv", ("conv",), True, conv_activation, ()),
    ("linear_bn_act", "LinearBatchNorm", ("linear", "bn"), True, linear_batch_norm, BN + FEATURES),
    ("linear_bn", "LinearBatchNorm", ("linear", "bn"), False, linear_batch_norm, BN + FEATURES),
    ("linear_act", "Linear", ("linear",), True, linear_activation, ()),
    ("bn_act", "BatchNorm", ("bn",), True, batch_norm_activation, BN),
]


def declare(
    family: str,
    prefix: str,
    parts: tuple[str, ...],
    cls: type[Activation] | None,
    replacement: Callable,
    conditions: tuple,
) -> None:
    pattern = Pattern(())
    for part in parts:
        pattern = pattern.then(part, *STEPS[part])
    if cls is not None:
        pattern = pattern.then("act", cls)
    name = prefix + (cls.__name__ if cls else "")
    image = "linear" not in parts
    register(Fusion(name, pattern, replacement, conditions, family, sample(parts, cls, image)))


for family, prefix, parts, with_activation, replacement, conditions in FAMILIES:
    for cls in ACTIVATIONS.values() if with_activation else (None,):
        declare(family, prefix, parts, cls, replacement, conditions)

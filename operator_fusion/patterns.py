"""The fusions: families as tables over needle's activations. Each entry is one Fusion object."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from needle.autograd import Op
from needle.graph import Node
from needle.ops.activation import ACTIVATIONS, Activation
from needle.ops.conv import Conv2d, ConvTranspose2d
from needle.ops.elementwise import EWiseAdd
from needle.ops.fused import FusedConv2dActivation, FusedConvBatchNorm2d
from needle.ops.fused_linear import FusedLinearActivation, FusedLinearBatchNorm
from needle.ops.fused_norm import FusedBatchNormActivation
from needle.ops.fused_transpose import FusedConvTranspose2dActivation, FusedConvTransposeBatchNorm2d
from needle.ops.linalg import Linear
from needle.ops.norm import BatchNorm
from needle.ops.shape import Permute

from .attention import AttentionPattern, CorePattern, fused_attention, fused_core
from .engine import Fusion, register
from .matcher import Match, Pattern
from .samples import AttentionSample, CoreSample, Siblings, sample
from .siblings import SiblingPattern, fused_linears, same_biases
from .steps import Step

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


def transpose_batch_norm(match: Match) -> tuple[Op, list[Node]]:
    conv, bn = match["conv"], match["bn"]
    values, count = batch_norm_inputs(bn)
    attributes = {**conv.op.attributes(), **batch_norm_attributes(bn), **activation_attributes(match)}
    return FusedConvTransposeBatchNorm2d(**attributes, has_bias=len(conv.inputs) > 2), [*conv.inputs, *values, *count]


def transpose_activation(match: Match) -> tuple[Op, list[Node]]:
    conv = match["conv"]
    return FusedConvTranspose2dActivation(**conv.op.attributes(), **activation_attributes(match)), list(conv.inputs)


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


def has_momentum(match: Match) -> str | None:
    """A cumulative average (momentum=None) depends on the layer's count of batches."""
    layer = match["bn"].layer
    return f"{match['bn'].node.name} averages over all batches" if getattr(layer, "momentum", 0.1) is None else None


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


# -- the tables ------------------------------------------------------------------------------------------------------

# step of a family -> label in the pattern, its op, whether the step before may be either of its inputs
STEPS: dict[str, tuple] = {
    "conv": ("conv", Conv2d),
    "transpose": ("conv", ConvTranspose2d),
    "linear": ("linear", Linear),
    "bn": ("bn", BatchNorm),
    "add": ("add", EWiseAdd, True),
}

# family, name before the activation's, steps, with an activation or without, replacement, conditions
BN, ADD, FEATURES = (has_running_statistics, has_momentum), (residual_has_same_shape,), (normalises_features,)
FAMILIES: list[tuple[str, str, tuple[str, ...], bool, Callable, tuple]] = [
    ("conv_bn_add_act", "ConvBatchNorm2dAdd", ("conv", "bn", "add"), True, conv_batch_norm, BN + ADD),
    ("conv_bn_add", "ConvBatchNorm2dAdd", ("conv", "bn", "add"), False, conv_batch_norm, BN + ADD),
    ("conv_bn_act", "ConvBatchNorm2d", ("conv", "bn"), True, conv_batch_norm, BN),
    ("conv_bn", "ConvBatchNorm2d", ("conv", "bn"), False, conv_batch_norm, BN),
    ("conv_add_act", "ConvAdd", ("conv", "add"), True, conv_activation, ADD),
    ("conv_act", "Conv", ("conv",), True, conv_activation, ()),
    ("transpose_bn_act", "ConvTransposeBatchNorm2d", ("transpose", "bn"), True, transpose_batch_norm, BN),
    ("transpose_bn", "ConvTransposeBatchNorm2d", ("transpose", "bn"), False, transpose_batch_norm, BN),
    ("transpose_act", "ConvTranspose", ("transpose",), True, transpose_activation, ()),
    ("linear_bn_act", "LinearBatchNorm", ("linear", "bn"), True, linear_batch_norm, BN + FEATURES),
    ("linear_bn", "LinearBatchNorm", ("linear", "bn"), False, linear_batch_norm, BN + FEATURES),
    ("linear_act", "Linear", ("linear",), True, linear_activation, ()),
    ("bn_act", "BatchNorm", ("bn",), True, batch_norm_activation, BN),
]

# why a family's fused op equals its steps
FOLDED = "in evaluation the batch norm is a scale and a shift per channel, which the weights before it take"
FINISHED = "the kernel finishes its sums with what follows while they are in registers"


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
        pattern = pattern.then(*STEPS[part])
    if cls is not None:
        pattern = pattern.then("act", cls)
    name = prefix + (cls.__name__ if cls else "")
    image = "linear" not in parts
    why = FOLDED if "bn" in parts[1:] else FINISHED
    if "bn" in parts[1:] and len(pattern) > 2:
        why = f"{FOLDED}; {FINISHED}"
    register(Fusion(name, pattern, replacement, conditions, family, why, sample(parts, cls, image)))


for family, prefix, parts, with_activation, replacement, conditions in FAMILIES:
    for cls in ACTIVATIONS.values() if with_activation else (None,):
        declare(family, prefix, parts, cls, replacement, conditions)


register(
    Fusion(
        "MultiHeadAttention",
        AttentionPattern(),
        fused_attention,
        family="attention",
        why="heads are views of the projections, and one kernel keeps a block of scores in cache between its products",
        sample=lambda: (AttentionSample(), (2, 5, 8)),
    )
)
register(
    Fusion(
        "ScaledDotProductAttention",
        CorePattern(),
        fused_core,
        family="attention",
        why="one kernel keeps a block of scores in cache between its two products",
        sample=lambda: (CoreSample(), (2, 5, 8)),
    )
)
register(
    Fusion(
        "MergedLinears",
        SiblingPattern(),
        fused_linears,
        (same_biases,),
        family="merged_linears",
        why="products of one input with several matrices are one product with the matrices side by side",
        sample=lambda: (Siblings(), (4, 6)),
    )
)

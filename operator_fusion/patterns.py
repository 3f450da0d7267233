"""The fusions: families as tables over needle's activations. Each entry is one Fusion object."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from needle import nn
from needle.autograd import Op
from needle.graph import Node
from needle.graph.engine import Fusion
from needle.graph.matcher import Match, Pattern
from needle.graph.steps import Step
from needle.ops.fused.layer import FusedLayer
from needle.ops.linalg.basic import Linear
from needle.ops.math.activation import ACTIVATIONS, Activation
from needle.ops.math.elementwise import EWiseAdd
from needle.ops.nn.conv import Conv2d, ConvTranspose2d
from needle.ops.nn.norm import BatchNorm

from .attention import AttentionPattern, CorePattern, fused_attention, fused_core
from .fuse import register
from .samples import AttentionSample, CoreSample, Siblings, sample
from .siblings import SiblingPattern, fused_linears, same_biases

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


def fused_layer(match: Match) -> tuple[Op, list[Node]]:
    """The layer of a match, or its batch norm where it has none, with what follows."""
    layer = match.steps.get("layer")
    inputs = list(layer.inputs if layer else match["bn"].inputs[:1])
    attributes = {"base": layer and layer.op, "has_bias": len(inputs) > 2, **activation_attributes(match)}
    count: list[Node] = []
    if "bn" in match:
        values, count = batch_norm_inputs(match["bn"])
        attributes |= batch_norm_attributes(match["bn"])
        inputs += values
    if "add" in match:
        attributes["has_residual"] = True
        inputs.append(match.residual())
    return FusedLayer(**attributes), [*inputs, *count]


# -- conditions ------------------------------------------------------------------------------------------------------


def has_running_statistics(match: Match) -> str | None:
    return f"{match['bn'].node.name} has no running statistics" if len(match["bn"].inputs) < 5 else None


def has_momentum(match: Match) -> str | None:
    """A cumulative average (momentum=None) depends on the layer's count of batches."""
    layer = match["bn"].layer
    return f"{match['bn'].node.name} averages over all batches" if getattr(layer, "momentum", 0.1) is None else None


def normalises_features(match: Match) -> str | None:
    """A batch norm after a linear layer has the linear's outputs as channels only when there are two axes."""
    spec = match["layer"].inputs[0].meta.get("spec")
    if spec is not None and spec.ndim != 2:
        return f"{match['layer'].node.name} has an input of {spec.ndim} axes, of which {match['bn'].node.name} takes another"
    return None


def residual_has_same_shape(match: Match) -> str | None:
    """Where shapes are known; elsewhere the fused op looks, and runs its unfused form on shapes that broadcast."""
    residual, before = match.residual().meta.get("spec"), match["layer"].node.meta.get("spec")
    if residual is not None and before is not None and tuple(residual.shape) != tuple(before.shape):
        return f"{match['add'].node.name} broadcasts {tuple(residual.shape)} against {tuple(before.shape)}"
    return None


# -- the tables ------------------------------------------------------------------------------------------------------

# step of a family -> label in the pattern, its op, whether the step before may be either of its inputs
STEPS: dict[str, tuple] = {
    "conv": ("layer", Conv2d),
    "transpose": ("layer", ConvTranspose2d),
    "linear": ("layer", Linear),
    "bn": ("bn", BatchNorm),
    "add": ("add", EWiseAdd, True),
}
# what makes a layer with or without bias for a family's sample
LAYERS: dict[str, Callable[[bool], nn.Module]] = {
    "conv": lambda bias: nn.Conv(4, 4, 3, bias=bias),
    "transpose": lambda bias: nn.ConvTranspose2d(4, 4, 2, stride=2, bias=bias),
    "linear": lambda bias: nn.Linear(4, 4),
}

# family, name before the activation's, steps, with an activation or without, conditions
BN, ADD, FEATURES = (has_running_statistics, has_momentum), (residual_has_same_shape,), (normalises_features,)
FAMILIES: list[tuple[str, str, tuple[str, ...], bool, tuple]] = [
    ("conv_bn_add_act", "ConvBatchNorm2dAdd", ("conv", "bn", "add"), True, BN + ADD),
    ("conv_bn_add", "ConvBatchNorm2dAdd", ("conv", "bn", "add"), False, BN + ADD),
    ("conv_bn_act", "ConvBatchNorm2d", ("conv", "bn"), True, BN),
    ("conv_bn", "ConvBatchNorm2d", ("conv", "bn"), False, BN),
    ("conv_add_act", "ConvAdd", ("conv", "add"), True, ADD),
    ("conv_act", "Conv", ("conv",), True, ()),
    ("transpose_bn_act", "ConvTransposeBatchNorm2d", ("transpose", "bn"), True, BN),
    ("transpose_bn", "ConvTransposeBatchNorm2d", ("transpose", "bn"), False, BN),
    ("transpose_act", "ConvTranspose", ("transpose",), True, ()),
    ("linear_bn_act", "LinearBatchNorm", ("linear", "bn"), True, BN + FEATURES),
    ("linear_bn", "LinearBatchNorm", ("linear", "bn"), False, BN + FEATURES),
    ("linear_act", "Linear", ("linear",), True, ()),
    ("bn_act", "BatchNorm", ("bn",), True, BN),
]

# why a family's fused op equals its steps
FOLDED = "in evaluation the batch norm is a scale and a shift per channel, which the weights before it take"
FINISHED = "the kernel finishes its sums with what follows while they are in registers"


def declare(
    family: str,
    prefix: str,
    parts: tuple[str, ...],
    cls: type[Activation] | None,
    conditions: tuple,
) -> None:
    pattern = Pattern(())
    for part in parts:
        pattern = pattern.then(*STEPS[part])
    if cls is not None:
        pattern = pattern.then("act", cls)
    name = prefix + (cls.__name__ if cls else "")
    why = FOLDED if "bn" in parts[1:] else FINISHED
    if "bn" in parts[1:] and len(pattern) > 2:
        why = f"{FOLDED}; {FINISHED}"
    register(Fusion(name, pattern, fused_layer, conditions, family, why, sample(LAYERS.get(parts[0]), parts, cls)))


for family, prefix, parts, with_activation, conditions in FAMILIES:
    for cls in ACTIVATIONS.values() if with_activation else (None,):
        declare(family, prefix, parts, cls, conditions)


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

"""Layers on GPUs: their kernels take weights as they are."""

from __future__ import annotations

import math
from collections.abc import Sequence

from needle.backend_ndarray import NDArray, call
from needle.backend_ndarray.strides import reshaped_strides
from needle.executor.builder import Builder
from needle.executor.step import Step
from needle.graph.matcher import Match
from needle.ops.linalg.basic import Linear
from needle.ops.nn.conv import Conv2d
from needle.ops.nn.layer_norm import GroupNorm
from needle.ops.nn.spatial import window_attributes
from needle.targets.chains import chains
from needle.targets.finishes import Finishes, added
from needle.targets.layers import NOTHING, Finish, join_rows, operands

from .target import GPU


def channels_last(w: NDArray) -> NDArray:
    """A weight (O, I, KH, KW) as (O, KH, KW, I), the order in which a kernel meets an image's pixels."""
    return w.permute((0, 2, 3, 1)).compact()


@GPU.lowers(Conv2d)
def conv(builder: Builder, op: Conv2d, ins: list[NDArray], out: NDArray, finish: Finish = NOTHING) -> None:
    x, w, bias = operands(ins)
    if x.strides[1] == 1 < w.shape[1] and w.shape[2] * w.shape[3] > 1 and builder.is_constant(w):
        w = builder.derive("channels_last", channels_last, w).permute((0, 3, 1, 2))
    named = {"x": x, "weight": w, "bias": bias, "residual": finish.residual}
    attrs = {"groups": op.groups, "precision": builder.precision, **finish.attrs}
    call("conv2d_fused", [out], **named, **window_attributes(op), **attrs)


@GPU.lowers(GroupNorm)
def group_norm(builder: Builder, op: GroupNorm, ins: list[NDArray], out: NDArray, finish: Finish = NOTHING) -> None:
    x, weight, bias = op.split(ins)
    if x.dtype != "float32":
        op.into(out, *ins)
        return
    whole = (*x.shape[:2], math.prod(x.shape[2:]))
    groups = x.shape[1] if op.groups is None else op.groups
    attrs = {"groups": groups, "eps": op.eps, **finish.attrs}
    call("group_norm", [out.viewed(whole)], x=x.viewed(whole), weight=weight, bias=bias, **attrs)


@GPU.lowers_joined
def joined(builder: Builder, x: NDArray, out: NDArray, weights: Sequence[NDArray], biases: Sequence[NDArray]) -> None:
    layer = [builder.derive("join_rows", join_rows, *parts) for parts in (weights, biases) if parts]
    Linear().into(out, x, *layer)


def as_result(x: NDArray, layer: Step) -> NDArray | None:
    """An array in the shape of a layer's result, if that moves nothing: kernels write any strides."""
    shape = layer.outs[0].shape
    strides = reshaped_strides(x.shape, x.strides, shape) if x.size == layer.outs[0].size else None
    return None if strides is None else x.strided(shape, strides)


def adds_another(match: Match) -> str | None:
    """Convolutions of vendors' libraries do not write over what they add."""
    layer, last = match.nodes[0].target, match.root.target
    if "add" not in match or layer.kernel == "matmul_fused" or added(match)._handle is not last.outs[0]._handle:
        return None
    return f"{last.label} goes where it adds from"


ACTIVATED = ("conv_transpose2d_fused", "group_norm")
Finishes(("matmul_fused", "conv2d_fused"), ACTIVATED, as_result, (adds_another,)).register(GPU.rules)
GPU.rules.register(chains(0, "elements go through all of the maps before they return to memory"))

"""Layers on GPUs: their kernels take weights as they are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from needle.autograd import Spec
from needle.backend_ndarray import NDArray, call
from needle.backend_ndarray.strides import reshaped_strides
from needle.executor.builder import Builder
from needle.executor.step import Step
from needle.graph.matcher import Match
from needle.ops.linalg.basic import Linear, MatMul
from needle.ops.nn.conv import Conv2d, Conv2dWeightGrad, ConvTranspose2d
from needle.ops.nn.layer_norm import GroupNorm
from needle.ops.nn.norm import BatchNormTrain, BatchNormTrainGrad
from needle.ops.nn.spatial import window_attributes
from needle.targets.chains import chains
from needle.targets.finishes import Finishes, added
from needle.targets.layers import NOTHING, Finish, join_rows, operands

from .target import GPU

SMALL = 16  # rows and columns of matrices that are not worth a copy


def channels_last(w: NDArray) -> NDArray:
    """A weight (O, I, KH, KW) as (O, KH, KW, I), the order in which a kernel meets an image's pixels."""
    return w.permute((0, 2, 3, 1)).compact()


def as_image(builder: Builder, w: NDArray, x: NDArray) -> NDArray:
    """The weight of a layer of `x` with its elements in the image's order."""
    if x.strides[1] == 1 < w.shape[1] and w.shape[2] * w.shape[3] > 1:
        return builder.derive("channels_last", channels_last, w).permute((0, 3, 1, 2))
    return w


@GPU.lowers(Conv2d)
def conv(builder: Builder, op: Conv2d, ins: list[NDArray], out: NDArray, finish: Finish = NOTHING) -> None:
    x, w, bias = operands(ins)
    named = {"x": x, "weight": as_image(builder, w, x), "bias": bias, "residual": finish.residual}
    attrs = {"groups": op.groups, "precision": builder.precision, **finish.attrs}
    call("conv2d_fused", [out], **named, **window_attributes(op), **attrs)


@GPU.lowers(ConvTranspose2d)
def conv_transpose(
    builder: Builder, op: ConvTranspose2d, ins: list[NDArray], out: NDArray, finish: Finish = NOTHING
) -> None:
    x, w, bias = operands(ins)
    alone = finish.alone()
    attrs = {"groups": op.groups, "precision": builder.precision, **alone.attrs}
    call(
        "conv_transpose2d_fused",
        [out],
        x=x,
        weight=as_image(builder, w, x),
        bias=bias,
        **window_attributes(op),
        **attrs,
    )
    if alone is not finish:
        finish.add(out)


@GPU.lowers(Conv2dWeightGrad)
def weight_gradient(builder: Builder, op: Conv2dWeightGrad, ins: list[NDArray], out: NDArray) -> None:
    """Between images whose channels are neighbours the gradient lies like them, too, before it goes to the parameter's order."""
    x, dy = ins
    made = out
    if x.strides[1] == dy.strides[1] == 1 < out.shape[1] and out.shape[2] * out.shape[3] > 1:
        o, i, height, width = out.shape
        made = NDArray.empty((o, height, width, i)).permute((0, 3, 1, 2))
    attrs = {"groups": op.groups, "precision": builder.precision, **window_attributes(op)}
    call("conv2d_weight_grad_fused", [made], x=x, dy=dy, **attrs)
    if made is not out:
        call("copy", [out], x=made)


@GPU.lowers(BatchNormTrain, makes=True)
@GPU.lowers(BatchNormTrainGrad, makes=True)
def trained_norm(builder: Builder, op: BatchNormTrain | BatchNormTrainGrad, ins: list[NDArray]) -> Any:
    """The image lies as the one that is read."""
    x = ins[0]
    return op.onto(builder.target.memory(op, Spec(x.shape, x.dtype), ins, False), *ins)


@GPU.lowers(MatMul, makes=True)
def product(builder: Builder, op: MatMul, ins: list[NDArray]) -> NDArray:
    return op.compute(*map(in_one_batch, ins))


def in_one_batch(x: NDArray) -> NDArray:
    """Matrices one behind the other, as vendors' libraries know them; heads lie inside of rows and are copied apart."""
    batch, sizes = x.shape[:-2], x.shape[-2:]
    if len(batch) < 2 or 0 in x.strides[: len(batch)] or min(sizes) < SMALL:
        return x
    if reshaped_strides(x.shape, x.strides, (math.prod(batch), *sizes)) is not None:
        return x
    turned = (*range(len(batch)), len(batch) + 1, len(batch))
    return x.compact() if x.strides[-1] == 1 else x.permute(turned).compact().permute(turned)


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

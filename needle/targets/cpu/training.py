"""What trains images in blocks: batch norms pass by pass, gradients of weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from needle.autograd import Spec, Tensor
from needle.backend_ndarray import NDArray, call
from needle.executor.builder import Builder
from needle.executor.step import Halo
from needle.ops.common import check_axes
from needle.ops.nn.conv import Conv2dWeightGrad
from needle.ops.nn.image_parts import (
    BatchNormGradApply,
    BatchNormGradSums,
    BatchNormMoments,
    ChannelSlice,
    ChannelSums,
)
from needle.ops.nn.norm import BatchNorm, BatchNormTrain, BatchNormTrainGrad, dense
from needle.ops.nn.spatial import window_attributes
from needle.ops.reduce.basic import Summation
from needle.ops.shape.indexing import GetItem, decode_index

from .convolution import conv_halo, kept, taps_inside, with_taps
from .target import CPU, HALOS, PARTS, copy_channels, is_blocked


def normalised(op: BatchNormTrain, x: Spec) -> Callable[..., Any]:
    def parts(x: Tensor, weight: Tensor, bias: Tensor) -> Any:
        mean, var, inverse = BatchNormMoments(op.eps)(x)
        return BatchNorm(op.eps)(x, mean, var, weight, bias), mean, var, inverse

    return parts


def gradients(op: BatchNormTrainGrad, x: Spec) -> Callable[..., Any]:
    def parts(x: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor, dy: Tensor) -> Any:
        dweight, dbias = BatchNormGradSums()(x, mean, inverse, dy)
        return BatchNormGradApply()(x, mean, inverse, weight, dy, dweight, dbias), dweight, dbias

    return parts


def per_channel(op: Summation, x: Spec) -> Callable[..., Any] | None:
    return ChannelSums() if check_axes(op.label, op.axes, x.shape) == (0, 2, 3) and not op.keepdims else None


def channels(op: GetItem, x: Spec) -> Callable[..., Any] | None:
    index = decode_index(op.index)
    if len(index) < 2 or index[0] != slice(None) or any(i != slice(None) for i in index[2:]):
        return None
    if not isinstance(index[1], slice):
        return None
    start, stop, step = index[1].indices(x.shape[1])
    return ChannelSlice(start, stop) if step == 1 and start < stop else None


PARTS.update({BatchNormTrain: normalised, BatchNormTrainGrad: gradients, Summation: per_channel, GetItem: channels})


@CPU.lowers(ChannelSlice)
def channel_slice(builder: Builder, op: ChannelSlice, ins: list[NDArray], out: NDArray) -> None:
    if is_blocked(out):
        copy_channels(out, 0, ins[0], op.start, op.stop - op.start)
    else:
        call("copy", [out], x=ins[0][:, op.start : op.stop])


@CPU.lowers(ChannelSums)
def channel_sums(builder: Builder, op: ChannelSums, ins: list[NDArray], out: NDArray) -> None:
    call("sum_channels", [out], x=ins[0])


@CPU.lowers(BatchNormMoments, makes=True)
def moments(builder: Builder, op: BatchNormMoments, ins: list[NDArray]) -> Any:
    (x,) = ins
    outs = tuple(NDArray.empty(s.shape) for s in builder.result)
    call("batch_norm_moments", outs, x=x, eps=op.eps)
    return outs


@CPU.lowers(BatchNormGradSums, makes=True)
def sums(builder: Builder, op: BatchNormGradSums, ins: list[NDArray]) -> Any:
    x, mean, inverse, dy = ins
    outs = (NDArray.empty(mean.shape), NDArray.empty(mean.shape))
    mean, inverse = dense(mean, inverse)
    call("batch_norm_grad_sums", outs, x=x, dy=dy, y=None, mean=mean, inverse=inverse, activation=0, alpha=0)
    return outs


@CPU.lowers(BatchNormGradApply)
def apply(builder: Builder, op: BatchNormGradApply, ins: list[NDArray], out: NDArray) -> None:
    x, mean, inverse, weight, dy, dweight, dbias = ins
    names = ("mean", "inverse", "weight", "dweight", "dbias")
    vectors = dict(zip(names, dense(mean, inverse, weight, dweight, dbias), strict=True))
    call("batch_norm_grad_apply", [out], x=x, dy=dy, y=None, **vectors, activation=0, alpha=0)


@CPU.lowers(Conv2dWeightGrad, makes=True)
def weight_gradient(builder: Builder, op: Conv2dWeightGrad, ins: list[NDArray]) -> Any:
    x, dy = ins
    if not is_blocked(x):
        return op.compute(x, dy)
    out = NDArray.empty(builder.result.shape)
    taps = taps_inside(op, dy.shape, x.shape, out.shape)
    part = kept(out, taps)
    if part.shape != out.shape:
        out.fill(0.0)
    window = window_attributes(with_taps(op, taps))
    call("conv2d_weight_grad_blocked", [part], x=x, dy=dy, groups=op.groups, **window)
    return out


def weight_gradient_halo(op: Conv2dWeightGrad, out: Spec, x: Spec, dy: Spec) -> Halo:
    return conv_halo(op, dy, x, out)


HALOS[Conv2dWeightGrad] = weight_gradient_halo

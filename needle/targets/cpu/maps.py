"""Ops that follow images in blocks and look at more than one element at a time."""

from __future__ import annotations

from needle.autograd import Spec
from needle.backend_ndarray import NDArray, call
from needle.executor.builder import Builder
from needle.ops.nn.norm import BatchNorm, dense
from needle.ops.reduce.basic import Reduction
from needle.ops.shape.basic import Pad
from needle.ops.shape.join import Concat
from needle.targets.layers import NOTHING, Finish

from .target import BLOCK, CPU, copy_channels, is_blocked


@CPU.lowers(BatchNorm)
def batch_norm(builder: Builder, op: BatchNorm, ins: list[NDArray], out: NDArray, finish: Finish = NOTHING) -> None:
    x, *values = ins
    if not is_blocked(x):
        finish.plainly(op, out, ins)
        return
    named = dict(zip(("mean", "var", "weight", "bias"), dense(*values), strict=True))
    call("batch_norm", [out], x=x, **named, eps=op.eps, **finish.alone().attrs)
    finish.add(out)


@CPU.lowers(Concat)
def concat(builder: Builder, op: Concat, ins: list[NDArray], out: NDArray) -> None:
    if not is_blocked(out):
        op.write(out, ins, op.axis)
        return
    start = 0
    for x, spec in zip(ins, builder.given, strict=True):
        copy_channels(out, start, x, 0, spec.shape[1])
        start += spec.shape[1]


@CPU.lowers(Pad)
def pad(builder: Builder, op: Pad, ins: list[NDArray], out: NDArray) -> None:
    (x,) = ins
    op.write(out, x, *op.regions(Spec(x.shape[:4]) if is_blocked(x) else x))


@CPU.lowers(Reduction, makes=True)
def reduction(builder: Builder, op: Reduction, ins: list[NDArray]) -> NDArray:
    (x,) = ins
    if not is_blocked(x):
        return op.compute(x)
    batch, channels = builder.given[0].shape[:2]
    of_blocks = x.reduce(op.row, (2, 3), False).reshape((batch, x.shape[1] * BLOCK))
    return of_blocks[:, :channels].reshape(builder.result.shape)

"""Ops that follow images in blocks and look at more than one element at a time."""

from __future__ import annotations

from needle.autograd import Spec
from needle.backend_ndarray import NDArray, call
from needle.executor.builder import Builder
from needle.ops.nn.norm import BatchNorm, dense
from needle.ops.shape.basic import Pad
from needle.ops.shape.join import Concat
from needle.targets.layers import NOTHING, Finish

from .target import CPU, is_blocked


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
    op.write(out, ins, 1 if is_blocked(out) else op.axis)


@CPU.lowers(Pad)
def pad(builder: Builder, op: Pad, ins: list[NDArray], out: NDArray) -> None:
    (x,) = ins
    op.write(out, x, *op.regions(Spec(x.shape[:4]) if is_blocked(x) else x))

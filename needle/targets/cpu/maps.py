"""Ops that follow images in blocks and look at more than one element at a time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from needle.autograd import Spec
from needle.backend_ndarray import NDArray, call
from needle.backend_ndarray.kernels import call_map
from needle.executor.builder import Builder
from needle.ops.nn.norm import BatchNorm, dense
from needle.ops.nn.pool import MaxPool2d
from needle.ops.nn.pool_nd import DepthPool
from needle.ops.nn.volumes import DepthTaps, FramesOfChannels
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


@CPU.lowers(DepthTaps)
def depth_taps(builder: Builder, op: DepthTaps, ins: list[NDArray], out: NDArray) -> None:
    """Where windows over the depth are no view of their frames: copied volume by volume, tap by tap."""
    (x,), count, blocks = ins, op.windows(), ins[0].shape[1]
    if out._handle is x._handle:
        return
    for n, tap in itertools.product(range(x.shape[0] // op.depth), range(op.taps)):
        first = tap - op.padding[0]  # the frame of the first window
        start = min(count, max(0, -(first // op.stride)))
        stop = max(start, min(count, (op.depth - 1 - first) // op.stride + 1))
        to = out[n * count : (n + 1) * count, tap * blocks : (tap + 1) * blocks]
        at = n * op.depth + first
        for outside in (to[:start], to[stop:]):
            if outside.size:
                call("fill", [outside], value=0)
        if stop > start:
            call("copy", [to[start:stop]], x=x[at + start * op.stride : at + (stop - 1) * op.stride + 1 : op.stride])


@CPU.lowers(FramesOfChannels, makes=True)
def frames_of_channels(builder: Builder, op: FramesOfChannels, ins: list[NDArray], out: Any = None) -> Any:
    (x,) = ins
    if out is None:
        return op.compute(x)
    if out._handle is not x._handle:  # where they become a part of something else
        blocks = out.shape[1]
        for part in range(op.parts):
            call("copy", [out[part :: op.parts]], x=x[:, part * blocks : (part + 1) * blocks])
    return out


@CPU.lowers(DepthPool)
def depth_pool(builder: Builder, op: DepthPool, ins: list[NDArray], out: NDArray) -> None:
    (x,), windows = ins, op.windows()
    fold = "maximum" if isinstance(op.pool, MaxPool2d) else "add"
    for n in range(x.shape[0] // op.depth):
        to, frames = (a[n * size : (n + 1) * size] for a, size in ((out, len(windows)), (x, op.depth)))
        for tap in range(max(len(f) for f, _ in windows)):
            for at, of in runs([(w, f[tap]) for w, (f, _) in enumerate(windows) if tap < len(f)]):
                if tap == 0:
                    call("copy", [to[at]], x=frames[of])
                else:
                    call_map(fold, to[at], [to[at], frames[of]])
        for divisor, group in itertools.groupby(enumerate(windows), lambda item: item[1][1]):
            same = [w for w, _ in group]
            if divisor != 1:
                part = to[same[0] : same[-1] + 1]
                call_map("div_scalar", part, [part], (divisor,))


def runs(pairs: list[tuple[int, int]]) -> Iterator[tuple[slice, slice]]:
    """Pairs of ascending places as slices of the ones and of the others."""
    start = 0
    while start < len(pairs):
        at, of = pairs[start]
        step = max(1, pairs[start + 1][1] - of) if start + 1 < len(pairs) else 1
        stop = start + 1
        while stop < len(pairs) and pairs[stop] == (at + stop - start, of + step * (stop - start)):
            stop += 1
        count = stop - start
        yield slice(at, at + count), slice(of, of + step * (count - 1) + 1, step)
        start = stop


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

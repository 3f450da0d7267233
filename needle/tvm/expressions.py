"""Ops as tensor expressions: an op class registers here what it is in TVM, where that is more than its `reference` says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import singledispatch
from typing import Any

import numpy as np
from tvm import te, tirx, topi

from needle import ops
from needle.ops.common import Elementwise
from needle.ops.shape.indexing import decode_index, indexed_shape

from .arrays import Array, converted, elementwise, plain, whole_index


@singledispatch
def as_te(op: Any, out: Any, *inputs: Any) -> Any:
    """The op on te.Tensors; out: the result's Spec, with expressions for sizes that are free, or a list of them.

    By default its numpy `reference` on arrays that record.
    """
    made = op.reference(*map(Array, inputs))
    return [a.tensor for a in made] if isinstance(made, tuple) else made.tensor


for cls in (Elementwise, ops.Bitwise):  # bitwise ones decompose, but not of integers
    as_te.register(cls, lambda op, out, *inputs: elementwise(op.reference, out.shape, inputs, out.dtype))
for cls in (ops.Reshape, ops.Flatten, ops.Squeeze, ops.Unsqueeze):
    as_te.register(cls, lambda op, out, x: topi.reshape(x, out.shape))
as_te.register(ops.BroadcastTo, lambda op, out, x: topi.broadcast_to(x, out.shape))
as_te.register(ops.AdaptiveAvgPool2d, lambda op, out, x: topi.nn.adaptive_pool(x, out.shape[2:], "avg"))


def number(x: Any, dtype: Any) -> Any:
    """A size or count as a number of `dtype`."""
    return converted(x, str(dtype)) if hasattr(x, "ty") else tirx.const(x, str(dtype))


def zero(x: Any) -> Any:
    return tirx.const(0, str(x.dtype))


def over(names: str, sizes: Sequence[Any]) -> list[Any]:
    """Axes to reduce, by name."""
    return [te.reduce_axis((0, n), name=k) for k, n in zip(names.split(), sizes, strict=True)]


def inside(pairs: Any) -> Any:
    """Whether 0 <= index < size for all pairs."""
    return tirx.all(*[c for i, n in pairs for c in (i >= 0, i < n)])


def on_grid(at: Sequence[Any], stride: Sequence[Any], size: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Whether places are among `size` points a stride apart, and which points those are."""
    steps = list(zip(at, stride, size, strict=True))
    hit = tirx.all(*[c for a, s, n in steps for c in (a >= 0, a < n * s, tirx.EQ(a % s, 0))])
    return hit, [a // s for a, s, _ in steps]


def padded(x: Any, before: Sequence[Any], size: Sequence[Any], value: Any) -> Any:
    """x with its last axes shifted by `before` (negative crops) and of `size`; `value` where x has nothing."""
    n = len(size)
    if not any(before) and all(isinstance(a, int) and a == b for a, b in zip(plain(x.shape[-n:]), size, strict=True)):
        return x

    def compute(*i: Any) -> Any:
        place = [a - b for a, b in zip(i[-n:], before, strict=True)]
        return tirx.if_then_else(inside(zip(place, x.shape[-n:], strict=True)), x(*i[:-n], *place), value)

    return te.compute((*x.shape[:-n], *size), compute, name="pad")


@as_te.register(ops.Pad)
def pad(op: Any, out: Any, x: Any) -> Any:
    before = [0] * (len(x.shape) - len(op.pads)) + [int(b) for b, _ in op.pads]
    return padded(x, before, out.shape, tirx.const(op.value, out.dtype))


# -- windows -------------------------------------------------------------------------------------------------------------


def windows(op: Any, x: Any, size: Sequence[Any], kernel: Sequence[Any], value: Any) -> Callable[..., Any]:
    """f(n, c, y, z, ky, kx): x at an element of the window at (y, z), of `size` windows; `value` where x has nothing."""
    (sh, sw), (dh, dw) = steps = op.stride, getattr(op, "dilation", (1, 1))
    reach = [s * (o - 1) + d * (k - 1) + 1 for o, k, s, d in zip(size, kernel, *steps, strict=True)]
    wide = padded(x, op.padding[:2], reach, value)
    return lambda n, c, y, z, ky, kx: wide(n, c, y * sh + ky * dh, z * sw + kx * dw)


def channel(op: Any, o: Any, c: Any, outputs: int, inner: int) -> Any:
    """The input channel that is number c of the `inner` ones in the group of an output channel."""
    return c if op.groups == 1 else o // (outputs // op.groups) * inner + c


def plus_bias(out: Any, bias: Any) -> Any:
    return out if bias is None else te.compute(out.shape, lambda *i: out(*i) + bias(i[1]), name="add_bias")


@as_te.register(ops.Conv2d)
def conv2d(op: Any, out: Any, x: Any, w: Any, bias: Any = None) -> Any:
    (_, outputs, *size), (_, inner, *kernel) = out.shape, plain(w.shape)
    read = windows(op, x, size, kernel, zero(x))
    c, ky, kx = axes = over("c ky kx", (inner, *kernel))

    def compute(n: Any, o: Any, y: Any, z: Any) -> Any:
        return te.sum(read(n, channel(op, o, c, outputs, inner), y, z, ky, kx) * w(o, c, ky, kx), axis=axes)

    return plus_bias(te.compute(out.shape, compute, name="conv2d"), bias)


@as_te.register(ops.ConvTranspose2d)
def conv_transpose2d(op: Any, out: Any, x: Any, w: Any, bias: Any = None) -> Any:
    """Convolution of the image with zeros between its pixels."""
    (_, outputs, *size), (channels, per_group, *kernel) = out.shape, plain(w.shape)
    inner, (dh, dw) = channels // op.groups, op.dilation
    ends = [d * (k - 1) for d, k in zip(op.dilation, kernel, strict=True)]

    def spread(n: Any, i: Any, *place: Any) -> Any:
        at = [p - e + b for p, e, b in zip(place, ends, op.padding[:2], strict=True)]
        hit, pixel = on_grid(at, op.stride, x.shape[2:])
        return tirx.if_then_else(hit, x(n, i, *pixel), zero(x))

    wide = te.compute((*x.shape[:2], *[o + e for o, e in zip(size, ends, strict=True)]), spread, name="spread")
    c, ky, kx = axes = over("c ky kx", (inner, *kernel))

    def compute(n: Any, o: Any, y: Any, z: Any) -> Any:
        own = o if op.groups == 1 else o % per_group
        i = channel(op, o, c, outputs, inner)
        return te.sum(wide(n, i, y + ends[0] - ky * dh, z + ends[1] - kx * dw) * w(i, own, ky, kx), axis=axes)

    return plus_bias(te.compute(out.shape, compute, name="conv_transpose2d"), bias)


@as_te.register(ops.Conv2dWeightGrad)
def conv2d_weight_grad(op: Any, out: Any, x: Any, dy: Any) -> Any:
    """Sums over images and places of x under each kernel element times the output's gradient."""
    (outputs, inner, *kernel), (images, _, *size) = out.shape, dy.shape
    read = windows(op, x, size, kernel, zero(x))
    n, y, z = axes = over("n y z", (images, *size))

    def compute(o: Any, c: Any, ky: Any, kx: Any) -> Any:
        return te.sum(read(n, channel(op, o, c, outputs, inner), y, z, ky, kx) * dy(n, o, y, z), axis=axes)

    return te.compute(out.shape, compute, name="conv2d_weight_grad")


def pooled(op: Any, out: Any, x: Any, reduce: Callable[..., Any], value: Any, name: str) -> Any:
    """Every window of x as one value."""
    read = windows(op, x, out.shape[2:], op.kernel_size, value)
    axes = over("ky kx", op.kernel_size)
    return te.compute(out.shape, lambda *i: reduce(read(*i, *axes), axis=axes), name=name)


@as_te.register(ops.MaxPool2d)
def max_pool2d(op: Any, out: Any, x: Any) -> Any:
    return pooled(op, out, x, te.max, tirx.min_value(str(x.dtype)), "max_pool2d")


def divisor(op: Any, size: Sequence[Any], place: Sequence[Any]) -> Any:
    """By what the sum of the window at `place` of an average pooling is divided."""
    if op.divisor_override:
        return op.divisor_override
    count: Any = 1
    for i, n, k, s, p in zip(place, size, op.kernel_size, op.stride, op.padding, strict=True):
        start = i * s - p
        stop = tirx.min(start + k, n + p)
        if not op.count_include_pad:
            start, stop = tirx.max(start, number(0, "int64")), tirx.min(stop, number(n, "int64"))
        count = count * (stop - start)
    return count


@as_te.register(ops.AvgPool2d)
def avg_pool2d(op: Any, out: Any, x: Any) -> Any:
    total = pooled(op, out, x, te.sum, zero(x), "window_sum")
    mean = lambda *i: total(*i) / number(divisor(op, x.shape[2:], i[2:]), x.dtype)  # noqa: E731
    return te.compute(out.shape, mean, name="avg_pool2d")


def sum_over_windows(op: Any, out: Any, size: Sequence[Any], value: Callable[..., Any]) -> Any:
    """For every pixel the sum of value(n, c, window, kernel element) over the windows of `size` that hold it."""
    ky, kx = axes = over("ky kx", op.kernel_size)
    dilation = getattr(op, "dilation", (1, 1))

    def compute(n: Any, c: Any, *place: Any) -> Any:
        at = [p + b - k * d for p, b, k, d in zip(place, op.padding, axes, dilation, strict=True)]
        hit, window = on_grid(at, op.stride, size)
        part = value(n, c, window, ky * op.kernel_size[1] + kx)
        return te.sum(tirx.if_then_else(hit, part, tirx.const(0, out.dtype)), axis=axes)

    return te.compute(out.shape, compute, name="sum_over_windows")


@as_te.register(ops.MaxPool2dGrad)
def max_pool2d_grad(op: Any, out: Any, x: Any, dy: Any) -> Any:
    """Every gradient goes to the first largest pixel of its window."""
    best = max_pool2d(op, dy, x)
    read = windows(op, x, dy.shape[2:], op.kernel_size, tirx.min_value(str(x.dtype)))
    ky, kx = axes = over("ky kx", op.kernel_size)
    none = tirx.const(op.kernel_size[0] * op.kernel_size[1], "int32")

    def winner(n: Any, c: Any, y: Any, z: Any) -> Any:
        equal = tirx.EQ(read(n, c, y, z, ky, kx), best(n, c, y, z))
        return te.min(tirx.Select(equal, (ky * op.kernel_size[1] + kx).astype("int32"), none), axis=axes)

    first = te.compute(dy.shape, winner, name="first")

    def value(n: Any, c: Any, at: Any, element: Any) -> Any:
        won = tirx.EQ(first(n, c, *at), element.astype("int32"))
        return tirx.Select(won, dy(n, c, *at), zero(dy))

    return sum_over_windows(op, out, dy.shape[2:], value)


@as_te.register(ops.AvgPool2dGrad)
def avg_pool2d_grad(op: Any, out: Any, dy: Any) -> Any:
    share = lambda n, c, at, _: dy(n, c, *at) / number(divisor(op.pool, out.shape[2:], at), dy.dtype)  # noqa: E731
    return sum_over_windows(op.pool, out, dy.shape[2:], share)


@as_te.register(ops.AdaptiveAvgPool2dGrad)
def adaptive_avg_pool2d_grad(op: Any, out: Any, dy: Any) -> Any:
    axes = over("i j", dy.shape[2:])

    def compute(n: Any, c: Any, *place: Any) -> Any:
        share: Any = dy(n, c, *axes)
        for p, i, size, o in zip(place, axes, out.shape[2:], dy.shape[2:], strict=True):
            start, stop = i * size // o, ((i + 1) * size + o - 1) // o
            held = tirx.all(p >= start, p < stop)
            share = tirx.Select(held, share / number(stop - start, dy.dtype), zero(dy))
        return te.sum(share, axis=axes)

    return te.compute(out.shape, compute, name="adaptive_avg_pool2d_grad")


# -- images of another size ----------------------------------------------------------------------------------------------


def source(op: Any, place: Any, size: Any, scale: float) -> list[tuple[Any, Any]]:
    """(row, weight) of the input that an output row is made of; weight None is one."""
    at = place.astype("float64")
    last = number(size - 1, "int64")
    if op.mode == "nearest":
        step = tirx.const(float(np.float32(scale)), "float64")
        return [(tirx.min((at * step).astype("int64"), last), None)]
    step, half = tirx.const(scale, "float64"), tirx.const(0.5, "float64")
    x = at * step if op.align_corners else tirx.max((at + half) * step - half, tirx.const(0.0, "float64"))
    low = tirx.min(x.astype("int64"), last)
    part = x - low.astype("float64")
    return [(low, tirx.const(1.0, "float64") - part), (tirx.min(low + 1, last), part)]


@as_te.register(ops.Interpolate)
def interpolate(op: Any, out: Any, x: Any) -> Any:
    sizes = plain(x.shape[2:])
    scales = op._scales(sizes, out.shape[2:])

    def compute(n: Any, c: Any, y: Any, z: Any) -> Any:
        rows, columns = (source(op, p, s, f) for p, s, f in zip((y, z), sizes, scales, strict=True))
        pixels = [(x(n, c, row, column), a, b) for row, a in rows for column, b in columns]
        return sum(v if a is None else v * (a * b).astype(str(x.dtype)) for v, a, b in pixels)

    return te.compute(out.shape, compute, name="interpolate")


@as_te.register(ops.InterpolateGrad)
def interpolate_grad(op: Any, out: Any, dy: Any) -> Any:
    axes, scales = over("i j", dy.shape[2:]), op._scales(out.shape[2:], plain(dy.shape[2:]))
    none, one = tirx.const(0.0, "float64"), tirx.const(1.0, "float64")

    def compute(n: Any, c: Any, *place: Any) -> Any:
        share: Any = dy(n, c, *axes)
        for p, i, size, f in zip(place, axes, out.shape[2:], scales, strict=True):
            rows = [(tirx.EQ(row, number(p, "int64")), one if a is None else a) for row, a in source(op, i, size, f)]
            share = share * sum(tirx.Select(hit, a, none) for hit, a in rows).astype(str(dy.dtype))
        return te.sum(share, axis=axes)

    return te.compute(out.shape, compute, name="interpolate_grad")


# -- by numbers ----------------------------------------------------------------------------------------------------------


@as_te.register(ops.BatchNorm)
def batch_norm(op: Any, out: Any, x: Any, mean: Any, var: Any, weight: Any, bias: Any) -> Any:
    """In one expression, so that it fuses with what comes before."""
    scale = lambda c: weight(c) / tirx.sqrt(var(c) + tirx.const(op.eps, str(x.dtype)))  # noqa: E731
    normal = lambda *i: (x(*i) - mean(i[1])) * scale(i[1]) + bias(i[1])  # noqa: E731
    return te.compute(out.shape, normal, name="batch_norm")


def rows(out: Any, x: Any, axis: int, rank: int, index: Callable[..., Any], name: str, wrap: bool = False) -> Any:
    """x read along an axis at index(*place), NaN or 0 where it has no such row; rank: the index's axes; wrap: -1 is the last."""
    size, nothing = x.shape[axis], tirx.const(float("nan") if "float" in str(x.dtype) else 0, str(x.dtype))

    def compute(*i: Any) -> Any:
        at = index(*i).astype("int64")
        at = tirx.Select(at < 0, at + size, at) if wrap else at
        return tirx.if_then_else(inside([(at, size)]), x(*i[:axis], at, *i[axis + rank :]), nothing)

    return te.compute(out.shape, compute, name=name)


@as_te.register(ops.Embedding)
def embedding(op: Any, out: Any, index: Any, weight: Any) -> Any:
    rank = len(index.shape)
    return rows(out, weight, 0, rank, lambda *i: index(*i[:rank]), "take")


@as_te.register(ops.Take)
def take(op: Any, out: Any, x: Any, index: Any) -> Any:
    axis, rank = op.axis % len(x.shape), len(index.shape)
    return rows(out, x, axis, rank, lambda *i: index(*i[axis : axis + rank]), "take", wrap=True)


@as_te.register(ops.CrossEntropy)
def cross_entropy(op: Any, out: Any, logits: Any, labels: Any) -> Any:
    x = Array(logits).astype(out.dtype)
    shifted = x - x.max(1, keepdims=True)
    total = np.log(np.exp(shifted).sum(1)).tensor
    picked = rows(out, shifted.tensor, 1, 0, labels, "pick")
    return te.compute(out.shape, lambda *i: total(*i) - picked(*i), name="cross_entropy")


def scatter(shape: Sequence[Any], index: tuple, x: Any, otherwise: Callable[..., Any]) -> Any:
    """x at a basic index (slices with steps, integers) of an array of `shape`; otherwise(*place) everywhere else."""
    whole = whole_index(decode_index(index), len(shape))

    def compute(*place: Any) -> Any:
        conditions, inner, axes = [], [], zip(place, shape, strict=True)
        for i in whole:
            if i is None:  # adds an axis to x only
                inner.append(0)
                continue
            p, size = next(axes)
            if i == slice(None):
                inner.append(p)
            elif isinstance(i, slice):
                numbers = range(*i.indices(size))
                first, step = (numbers[0], numbers.step) if numbers else (size, 1)
                offset = (p - first) if step > 0 else (first - p)
                conditions += [offset >= 0, offset < len(numbers) * abs(step), tirx.EQ(offset % abs(step), 0)]
                inner.append(offset // abs(step))
            else:
                conditions.append(tirx.EQ(p, i if i >= 0 else size + i))
        value = x(*inner)
        return tirx.if_then_else(tirx.all(*conditions), value, otherwise(*place)) if conditions else value

    return te.compute(shape, compute, name="scatter")


as_te.register(ops.ScatterItem, lambda op, out, x: scatter(out.shape, op.index, x, lambda *_: zero(x)))


SCATTERED = {"set": "update", "sum": "add", "prod": "mul", "amax": "max", "amin": "min"}  # TVM's names


@as_te.register(ops.Scatter)
def scatter_elements(op: Any, out: Any, x: Any, index: Any, source: Any) -> Any:
    if not source.shape:
        source = te.compute(index.shape, lambda *_: source(), name="wide")
    axis = op.axis % len(out.shape)
    return topi.scatter_elements(x, index, part(source, index.shape), axis, SCATTERED[op.reduce])


def part(x: Any, shape: Sequence[Any]) -> Any:
    return te.compute(shape, lambda *i: x(*i), name="part")


@as_te.register(ops.IndexCopy)
def index_copy(op: Any, out: Any, x: Any, index: Any, source: Any) -> Any:
    axis = op.axis % len(out.shape)
    wide = te.compute(source.shape, lambda *i: index(i[axis]), name="wide")
    return topi.scatter_elements(x, wide, source, axis, SCATTERED[op.reduce])


@as_te.register(ops.SetItem)
def set_item(op: Any, out: Any, x: Any, *part: Any) -> Any:
    want = indexed_shape(plain(x.shape), op.index)
    if part:
        value = topi.reshape(part[0], part[0].shape[max(0, len(part[0].shape) - len(want)) :])
        value = topi.broadcast_to(value, want)
    else:
        value = te.compute(want, lambda *_: tirx.const(op.value, str(x.dtype)), name="value")
    return scatter(out.shape, op.index, value, x)

"""Tensor expressions of ops over windows and by numbers, for their `te`; `t` holds TVM's namespaces (see `Op.te`)."""

from __future__ import annotations

from typing import Any


def inside(t: Any, pairs: Any) -> Any:
    """Whether 0 <= index < size for all pairs."""
    return t.tirx.all(*[c for i, n in pairs for c in (i >= 0, i < n)])


def zero(t: Any, x: Any) -> Any:
    return t.tirx.const(0, str(x.dtype))


def padded(t: Any, x: Any, before: Any, size: Any, value: Any, name: str = "pad") -> Any:
    """x with its last axes shifted by `before` (negative crops) and of `size`; `value` where x has nothing."""
    n = len(size)
    if not any(before) and all(isinstance(a, int) and a == b for a, b in zip(t.plain(x.shape[-n:]), size, strict=True)):
        return x

    def compute(*i: Any) -> Any:
        place = [a - b for a, b in zip(i[-n:], before, strict=True)]
        pairs = [(p, s) for p, s in zip(place, x.shape[-n:], strict=True)]
        return t.tirx.if_then_else(inside(t, pairs), x(*i[:-n], *place), value)

    return t.te.compute((*x.shape[:-n], *size), compute, name=name)


def reach(size: Any, kernel: Any, stride: Any, dilation: Any) -> list[Any]:
    """Rows and columns of padded input that all windows read."""
    return [s * (o - 1) + d * (k - 1) + 1 for o, k, s, d in zip(size, kernel, stride, dilation, strict=True)]


def plus_bias(t: Any, out: Any, bias: Any) -> Any:
    if bias is None:
        return out
    return t.te.compute(out.shape, lambda *i: out(*i) + bias(i[1]), name="add_bias")


def conv2d(t: Any, op: Any, out: Any, x: Any, w: Any, bias: Any = None) -> Any:
    """Convolution of NCHW images with OIHW weights, with the attributes of Conv2d."""
    (_, outputs, *size), (_, inner, *kernel) = out.shape, t.plain(w.shape)
    (sh, sw), (dh, dw) = op.stride, op.dilation
    wide = padded(t, x, op.padding[:2], reach(size, kernel, op.stride, op.dilation), zero(t, x))
    c, ky, kx = (t.te.reduce_axis((0, n), name=k) for n, k in zip((inner, *kernel), ("c", "ky", "kx"), strict=True))
    per_group = outputs // op.groups

    def compute(n: Any, o: Any, y: Any, z: Any) -> Any:
        channel = c if op.groups == 1 else o // per_group * inner + c
        return t.te.sum(wide(n, channel, y * sh + ky * dh, z * sw + kx * dw) * w(o, c, ky, kx), axis=[c, ky, kx])

    return plus_bias(t, t.te.compute(out.shape, compute, name="conv2d"), bias)


def conv_transpose2d(t: Any, op: Any, out: Any, x: Any, w: Any, bias: Any = None) -> Any:
    """Convolution of the image with zeros between its pixels: NCHW images, IOHW weights."""
    (_, _, *size), (channels, per_group, *kernel) = out.shape, t.plain(w.shape)
    inner, (dh, dw) = channels // op.groups, op.dilation
    ends = [d * (k - 1) for d, k in zip(op.dilation, kernel, strict=True)]

    def spread(n: Any, i: Any, *place: Any) -> Any:
        at = [p - e + b for p, e, b in zip(place, ends, op.padding[:2], strict=True)]
        pairs = list(zip(at, op.stride, x.shape[2:], strict=True))
        hit = t.tirx.all(*[c for a, s, m in pairs for c in (a >= 0, a < m * s, t.tirx.EQ(a % s, 0))])
        return t.tirx.if_then_else(hit, x(n, i, *[a // s for a, s, _ in pairs]), zero(t, x))

    wide = t.te.compute((*x.shape[:2], *[o + e for o, e in zip(size, ends, strict=True)]), spread, name="spread")
    c, ky, kx = (t.te.reduce_axis((0, n), name=k) for n, k in zip((inner, *kernel), ("c", "ky", "kx"), strict=True))

    def compute(n: Any, o: Any, y: Any, z: Any) -> Any:
        channel = c if op.groups == 1 else o // per_group * inner + c
        own = o if op.groups == 1 else o % per_group
        value = wide(n, channel, y + ends[0] - ky * dh, z + ends[1] - kx * dw)
        return t.te.sum(value * w(channel, own, ky, kx), axis=[c, ky, kx])

    return plus_bias(t, t.te.compute(out.shape, compute, name="conv_transpose2d"), bias)


def conv2d_weight_grad(t: Any, op: Any, out: Any, x: Any, dy: Any) -> Any:
    """Sums over images and places of x under each kernel element times the output's gradient."""
    (outputs, inner, *kernel), (images, _, *size) = out.shape, dy.shape
    (sh, sw), (dh, dw) = op.stride, op.dilation
    wide = padded(t, x, op.padding[:2], reach(size, kernel, op.stride, op.dilation), zero(t, x))
    n, y, z = (t.te.reduce_axis((0, s), name=k) for s, k in zip((images, *size), ("n", "y", "z"), strict=True))
    per_group = outputs // op.groups

    def compute(o: Any, c: Any, ky: Any, kx: Any) -> Any:
        channel = c if op.groups == 1 else o // per_group * inner + c
        return t.te.sum(wide(n, channel, y * sh + ky * dh, z * sw + kx * dw) * dy(n, o, y, z), axis=[n, y, z])

    return t.te.compute(out.shape, compute, name="conv2d_weight_grad")


def window_axes(t: Any, kernel: Any) -> list[Any]:
    return [t.te.reduce_axis((0, k), name=n) for k, n in zip(kernel, ("ky", "kx"), strict=True)]


def max_pool2d(t: Any, op: Any, out: Any, x: Any) -> Any:
    lowest = t.tirx.min_value(str(x.dtype))
    wide = padded(t, x, op.padding, reach(out.shape[2:], op.kernel_size, op.stride, op.dilation), lowest)
    ky, kx = window_axes(t, op.kernel_size)
    (sh, sw), (dh, dw) = op.stride, op.dilation
    at = lambda n, c, y, z: wide(n, c, y * sh + ky * dh, z * sw + kx * dw)  # noqa: E731
    return t.te.compute(out.shape, lambda *i: t.te.max(at(*i), axis=[ky, kx]), name="max_pool2d")


def divisor(t: Any, op: Any, size: Any, place: Any) -> Any:
    """By what the sum of the window at `place` of an average pooling is divided."""
    if op.divisor_override:
        return op.divisor_override
    count = 1
    for i, n, k, s, p in zip(place, size, op.kernel_size, op.stride, op.padding, strict=True):
        start = i * s - p
        stop = t.tirx.min(start + k, n + p)
        count = count * (
            stop - start if op.count_include_pad else t.tirx.min(stop, t.index(n)) - t.tirx.max(start, t.index(0))
        )
    return count


def avg_pool2d(t: Any, op: Any, out: Any, x: Any) -> Any:
    wide = padded(t, x, op.padding, reach(out.shape[2:], op.kernel_size, op.stride, (1, 1)), zero(t, x))
    ky, kx = window_axes(t, op.kernel_size)
    sh, sw = op.stride
    at = lambda n, c, y, z: wide(n, c, y * sh + ky, z * sw + kx)  # noqa: E731
    total = t.te.compute(out.shape, lambda *i: t.te.sum(at(*i), axis=[ky, kx]), name="window_sum")
    mean = lambda *i: total(*i) / t.number(divisor(t, op, x.shape[2:], i[2:]), x.dtype)  # noqa: E731
    return t.te.compute(out.shape, mean, name="avg_pool2d")


def sum_over_windows(t: Any, out: Any, op: Any, dilation: Any, size: Any, value: Any) -> Any:
    """For every pixel the sum of value(n, c, window, kernel element) over the windows of `size` that hold it."""
    ky, kx = window_axes(t, op.kernel_size)

    def compute(n: Any, c: Any, *place: Any) -> Any:
        at = [p + b - k * d for p, b, k, d in zip(place, op.padding, (ky, kx), dilation, strict=True)]
        pairs = list(zip(at, op.stride, size, strict=True))
        hit = t.tirx.all(*[k for a, s, m in pairs for k in (a >= 0, a < m * s, t.tirx.EQ(a % s, 0))])
        part = value(n, c, [a // s for a, s, _ in pairs], ky * op.kernel_size[1] + kx)
        return t.te.sum(t.tirx.if_then_else(hit, part, t.tirx.const(0, out.dtype)), axis=[ky, kx])

    return t.te.compute(out.shape, compute, name="sum_over_windows")


def max_pool2d_grad(t: Any, op: Any, out: Any, x: Any, dy: Any) -> Any:
    best = max_pool2d(t, op, dy, x)
    lowest = t.tirx.min_value(str(x.dtype))
    wide = padded(t, x, op.padding, reach(dy.shape[2:], op.kernel_size, op.stride, op.dilation), lowest)
    ky, kx = window_axes(t, op.kernel_size)
    (sh, sw), (dh, dw) = op.stride, op.dilation
    none = t.tirx.const(op.kernel_size[0] * op.kernel_size[1], "int32")

    def winner(n: Any, c: Any, y: Any, z: Any) -> Any:
        equal = t.tirx.EQ(wide(n, c, y * sh + ky * dh, z * sw + kx * dw), best(n, c, y, z))
        return t.te.min(t.tirx.Select(equal, (ky * op.kernel_size[1] + kx).astype("int32"), none), axis=[ky, kx])

    first = t.te.compute(dy.shape, winner, name="first")

    def value(n: Any, c: Any, at: Any, number: Any) -> Any:
        won = t.tirx.EQ(first(n, c, *at), number.astype("int32"))
        return t.tirx.Select(won, dy(n, c, *at), zero(t, dy))

    return sum_over_windows(t, out, op, op.dilation, dy.shape[2:], value)


def avg_pool2d_grad(t: Any, pool: Any, out: Any, dy: Any) -> Any:
    share = lambda n, c, at, _: dy(n, c, *at) / t.number(divisor(t, pool, out.shape[2:], at), dy.dtype)  # noqa: E731
    return sum_over_windows(t, out, pool, (1, 1), dy.shape[2:], share)


def adaptive_avg_pool2d_grad(t: Any, out: Any, dy: Any) -> Any:
    axes = [t.te.reduce_axis((0, n), name=k) for n, k in zip(dy.shape[2:], ("i", "j"), strict=True)]

    def compute(n: Any, c: Any, *place: Any) -> Any:
        share: Any = dy(n, c, *axes)
        for p, i, size, o in zip(place, axes, out.shape[2:], dy.shape[2:], strict=True):
            start, stop = i * size // o, ((i + 1) * size + o - 1) // o
            held = t.tirx.all(p >= start, p < stop)
            share = t.tirx.Select(held, share / t.number(stop - start, dy.dtype), zero(t, dy))
        return t.te.sum(share, axis=axes)

    return t.te.compute(out.shape, compute, name="adaptive_avg_pool2d_grad")


def source(t: Any, place: Any, size: Any, op: Any, scale: float) -> list[tuple[Any, Any]]:
    """(row, weight) of the input that an output row is made of; weight None is one."""
    at = place.astype("float64")
    last = t.index(size - 1)
    if op.mode == "nearest":
        step = t.tirx.const(t.float32(scale), "float64")
        return [(t.tirx.min((at * step).astype("int64"), last), None)]
    step, half = t.tirx.const(scale, "float64"), t.tirx.const(0.5, "float64")
    x = at * step if op.align_corners else t.tirx.max((at + half) * step - half, t.tirx.const(0.0, "float64"))
    low = t.tirx.min(x.astype("int64"), last)
    part = x - low.astype("float64")
    return [(low, t.tirx.const(1.0, "float64") - part), (t.tirx.min(low + 1, last), part)]


def interpolate(t: Any, op: Any, out: Any, x: Any, scales: Any) -> Any:
    def compute(n: Any, c: Any, y: Any, z: Any) -> Any:
        rows, columns = (source(t, p, s, op, f) for p, s, f in zip((y, z), t.plain(x.shape[2:]), scales, strict=True))
        total = None
        for row, a in rows:
            for column, b in columns:
                value = x(n, c, row, column)
                value = value if a is None else value * (a * b).astype(str(x.dtype))
                total = value if total is None else total + value
        return total

    return t.te.compute(out.shape, compute, name="interpolate")


def interpolate_grad(t: Any, op: Any, out: Any, dy: Any, scales: Any) -> Any:
    axes = [t.te.reduce_axis((0, n), name=k) for n, k in zip(dy.shape[2:], ("i", "j"), strict=True)]

    def compute(n: Any, c: Any, *place: Any) -> Any:
        share: Any = dy(n, c, *axes)
        for p, i, size, f in zip(place, axes, out.shape[2:], scales, strict=True):
            none, weight = t.tirx.const(0.0, "float64"), t.tirx.const(0.0, "float64")
            for row, a in source(t, i, size, op, f):
                weight = weight + t.tirx.Select(
                    t.tirx.EQ(row, t.number(p, "int64")), t.tirx.const(1.0, "float64") if a is None else a, none
                )
            share = share * weight.astype(str(dy.dtype))
        return t.te.sum(share, axis=axes)

    return t.te.compute(out.shape, compute, name="interpolate_grad")


def batch_norm(t: Any, op: Any, out: Any, x: Any, mean: Any, var: Any, weight: Any, bias: Any) -> Any:
    """In one expression, so that it fuses with what comes before."""
    eps = t.tirx.const(op.eps, str(x.dtype))

    def compute(*i: Any) -> Any:
        c = i[1]
        return (x(*i) - mean(c)) * (weight(c) / t.tirx.sqrt(var(c) + eps)) + bias(c)

    return t.te.compute(out.shape, compute, name="batch_norm")


def rows(t: Any, out: Any, x: Any, index: Any, axis: int, wrap: bool) -> Any:
    """x at the numbers of `index` along an axis; `wrap`: negative ones count from the end. NaN (or 0) for what is no number."""
    rank, size = len(index.shape), x.shape[axis]
    nothing = t.tirx.const(float("nan") if "float" in str(x.dtype) else 0, str(x.dtype))

    def compute(*i: Any) -> Any:
        number = index(*i[axis : axis + rank]).astype("int64")
        number = t.tirx.Select(number < 0, number + size, number) if wrap else number
        value = x(*i[:axis], number, *i[axis + rank :])
        return t.tirx.if_then_else(inside(t, [(number, size)]), value, nothing)

    return t.te.compute(out.shape, compute, name="take")


def cross_entropy(t: Any, out: Any, logits: Any, labels: Any) -> Any:
    x = t.array(logits).astype(out.dtype)
    shifted = x - x.max(1, keepdims=True)
    total = t.numpy.log(t.numpy.exp(shifted).sum(1)).tensor
    picked = rows_of_each(t, out, shifted.tensor, labels)
    return t.te.compute(out.shape, lambda *i: total(*i) - picked(*i), name="cross_entropy")


def rows_of_each(t: Any, out: Any, x: Any, numbers: Any) -> Any:
    """x[i, numbers[i, j], j]; NaN for what is no column."""
    nothing = t.tirx.const(float("nan"), str(x.dtype))

    def compute(*i: Any) -> Any:
        number = numbers(*i).astype("int64")
        return t.tirx.if_then_else(inside(t, [(number, x.shape[1])]), x(i[0], number, *i[1:]), nothing)

    return t.te.compute(out.shape, compute, name="pick")


def scatter(t: Any, shape: Any, index: Any, x: Any, otherwise: Any) -> Any:
    """x at a basic index (slices with steps, integers) of an array of `shape`; otherwise(*place) everywhere else."""
    full = [i for i in index if i is not None]  # None adds an axis to x only
    used = sum(not isinstance(i, str) for i in full)
    at = next((k for k, i in enumerate(full) if isinstance(i, str)), len(full))
    full = [*full[:at], *[(None, None, None)] * (len(shape) - used), *full[at + 1 :]]

    def compute(*place: Any) -> Any:
        conditions, inner = [], []
        for p, i, size in zip(place, full, shape, strict=True):
            if i == (None, None, None):
                inner.append(p)
            elif isinstance(i, tuple):
                numbers = range(*slice(*i).indices(size))
                first, step = (numbers[0], numbers.step) if numbers else (size, 1)
                offset = (p - first) if step > 0 else (first - p)
                conditions += [offset >= 0, offset < len(numbers) * abs(step), t.tirx.EQ(offset % abs(step), 0)]
                inner.append(offset // abs(step))
            else:
                conditions.append(t.tirx.EQ(p, i if i >= 0 else size + i))
        axes = iter(inner)
        kept = [0 if i is None else next(axes) for i in expand(index, len(inner)) if i is None or not is_number(i)]
        value = x(*kept)
        return t.tirx.if_then_else(t.tirx.all(*conditions), value, otherwise(*place)) if conditions else value

    return t.te.compute(shape, compute, name="scatter")


def is_number(i: Any) -> bool:
    return isinstance(i, int)


def expand(index: Any, axes: int) -> list[Any]:
    """The index with ... as the slices it stands for; `axes`: those that the result keeps."""
    present = sum(isinstance(i, tuple) for i in index)
    more = [(None, None, None)] * (axes - present)
    at = next((k for k, i in enumerate(index) if isinstance(i, str)), len(index))
    return [*index[:at], *more, *index[at + 1 :]]

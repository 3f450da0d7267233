"""Ops that move elements, as nodes of ONNX: shapes, slices, and places by number."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from needle import ops
from needle.autograd import Unsupported
from needle.ops.shape.creation import Full
from needle.ops.shape.indexing import decode_index

from .operators import register

if TYPE_CHECKING:
    from .export import Nodes, Value

MOST = np.iinfo("int64").max  # an end beyond all others, as ONNX's slices take it


for cls in (ops.Reshape, ops.Flatten, ops.Squeeze, ops.Unsqueeze):
    register(cls, lambda op, at, out, x: at.reshaped(x, out.shape))


@register(ops.SplitHeads)
def _(op: Any, at: Nodes, out: Any, x: Value) -> Value:
    split = at.reshaped(x, (*x.shape[:-1], op.heads, x.shape[-1] // op.heads))
    return at("Transpose", split, perm=list(op._order(len(x.shape))))


@register(ops.MergeHeads)
def _(op: Any, at: Nodes, out: Any, x: Value) -> Value:
    return at.reshaped(at("Transpose", x, perm=list(op._order(len(x.shape)))), out.shape)


@register(ops.Permute)
def _(op: Any, at: Nodes, out: Any, x: Value) -> Value:
    order = range(len(x.shape))[::-1] if op.axes is None else op.axes
    if not x.shape:
        return x
    return at("Transpose", x, perm=[a % len(x.shape) for a in order])


@register(ops.Transpose)
def _(op: Any, at: Nodes, out: Any, x: Value) -> Value:
    order = list(range(len(x.shape)))
    if not order:
        return x
    a, b = (-2, -1) if op.axes is None else op.axes
    order[a], order[b] = order[b], order[a]
    return at("Transpose", x, perm=order)


@register(ops.BroadcastTo)
def _(op: Any, at: Nodes, out: Any, x: Value) -> Value:
    return at("Expand", x, at.sizes(out.shape))


@register(Full)
def _(op: Any, at: Nodes, out: Any, like: Value) -> Value:
    return at("Expand", at.number(op.value, out.dtype), at.sizes(out.shape))


@register(ops.Concat)
def _(op: Any, at: Nodes, out: Any, *xs: Value) -> Value:
    return at("Concat", *(at.cast(x, out.dtype) for x in xs), axis=op.axis)


@register(ops.Stack)
def _(op: Any, at: Nodes, out: Any, *xs: Value) -> Value:
    axis = at.constant(np.array([op.axis % len(out.shape)], "int64"))
    return at("Concat", *(at("Unsqueeze", at.cast(x, out.dtype), axis) for x in xs), axis=op.axis)


@register(ops.Split)
def _(op: Any, at: Nodes, out: Any, x: Value) -> tuple[Value, ...]:
    axis = op.axis % len(x.shape)
    return tuple(at("Gather", x, at.number(i, "int64"), axis=axis) for i in range(op.parts))


@register(ops.Pad)
def _(op: Any, at: Nodes, out: Any, x: Value) -> Value:
    pads = op.all_pads(x)
    both = np.array([p[0] for p in pads] + [p[1] for p in pads], "int64")
    return at("Pad", x, at.constant(both), at.number(op.value, x.dtype))


@register(ops.Flip)
def _(op: Any, at: Nodes, out: Any, x: Value) -> Value:
    return at.sliced(x, [(a, -1, -MOST, -1) for a in op.axes]) if x.shape else x


@register(ops.GetItem)
def _(op: Any, at: Nodes, out: Any, x: Value) -> Value:
    index, ndim = decode_index(op.index), len(x.shape)
    real = sum(i is not None and i is not Ellipsis for i in index)
    place = index.index(Ellipsis) if Ellipsis in index else len(index)
    index = (*index[:place], *[slice(None)] * (ndim - real), *index[place + 1 :])
    cuts: list[tuple[int, Any, Any, int]] = []
    places: list[tuple[int, Any]] = []
    for axis, i in enumerate(i for i in index if i is not None):
        if isinstance(i, slice):
            step = i.step or 1
            if not isinstance(step, int):
                raise Unsupported("[onnx] get_item has a step that follows the batch; export the model for one.")
            first = (0 if step > 0 else MOST) if i.start is None else i.start
            last = (MOST if step > 0 else -MOST) if i.stop is None else i.stop
            cuts += [(axis, first, last, step)] if i != slice(None) else []
        elif isinstance(i, int):
            cuts.append((axis, i, MOST if i == -1 else i + 1, 1))
        else:  # it follows the batch, and may be negative
            places.append((axis, i))
    y = at.sliced(x, cuts)
    for axis, i in places:
        y = at("Gather", y, at.sizes((i,)), axis=axis, dtype=x.dtype)
    return y if all(isinstance(i, slice) for i in index) else at.reshaped(y, out.shape)


@register(ops.Diagonal)
def _(op: Any, at: Nodes, out: Any, x: Value) -> Value:
    rows = np.arange(out.shape[-1]) + max(0, -op.offset)
    columns = np.arange(out.shape[-1]) + max(0, op.offset)
    flat = at.reshaped(x, (*x.shape[:-2], x.shape[-2] * x.shape[-1]))
    return at("Gather", flat, at.constant((rows * x.shape[-1] + columns).astype("int64")), axis=-1)


# -- by numbers ----------------------------------------------------------------------------------------------------------


@register(ops.Take)
def _(op: Any, at: Nodes, out: Any, x: Value, index: Value) -> Value:
    return at("Gather", at.row(x), at.cast(index, "int64"), axis=op.axis)


@register(ops.Wrapped)
def _(op: Any, at: Nodes, out: Any, index: Value) -> Value:
    numbers, size = at.cast(index, "int64"), at.number(op.size, "int64")
    behind = at("Less", numbers, at.number(0, "int64"))
    return at.cast(at("Where", behind, at("Add", numbers, size), numbers, dtype="int64"), out.dtype)


@register(ops.Embedding)
def _(op: Any, at: Nodes, out: Any, index: Value, weight: Value) -> Value:
    return at("Gather", weight, at.cast(index, "int64"), axis=0)


REDUCTIONS = {"set": "none", "sum": "add", "prod": "mul", "amax": "max", "amin": "min"}


@register(ops.Scatter)
def _(op: Any, at: Nodes, out: Any, x: Value, index: Value, source: Value) -> Value:
    if source.shape:
        kept = at.sliced(source, [(a, 0, n, 1) for a, n in enumerate(index.shape) if n != source.shape[a]])
    else:
        kept = at("Expand", source, at.sizes(index.shape), dtype=source.dtype)
    return scattered(at, x, index, kept, op.axis, REDUCTIONS[op.reduce])


def scattered(at: Nodes, x: Value, index: Value, source: Value, axis: int, reduction: str) -> Value:
    if not x.shape:
        raise Unsupported("[onnx] scatter expects at least one axis, got shape ().")
    inputs = x, at.cast(index, "int64"), at.cast(source, x.dtype)
    return at("ScatterElements", *inputs, axis=axis, reduction=reduction)


@register(ops.GatherGrad)
def _(op: Any, at: Nodes, out: Any, grad: Value, index: Value) -> Value:
    if not op.shape:
        return grad
    zeros = at("Expand", at.number(0, grad.dtype), at.sizes(op.shape), dtype=grad.dtype)
    return scattered(at, zeros._replace(shape=op.shape), index, grad, op.axis, "add")


def by_slices(op: Any, at: Nodes, x: Value, index: Value, source: Value, reduction: str) -> Value:
    axis = op.axis % max(len(x.shape), 1)
    number = at.reshaped(index, [-1 if a == axis else 1 for a in range(len(x.shape))])
    number = at("Expand", at.cast(number, "int64"), at.sizes(source.shape), dtype="int64")
    return scattered(at, x, number, source, axis, reduction)


for cls, how in {ops.IndexCopy: "none", ops.IndexAdd: "add"}.items():
    register(cls, lambda op, at, out, x, index, source, how=how: by_slices(op, at, x, index, source, how))


@register(ops.SetItem)
def _(op: Any, at: Nodes, out: Any, x: Value, part: Value | None = None) -> Value:
    part = at.number(op.value, x.dtype) if part is None else at.cast(part, x.dtype)
    return written(op, at, x, part, out.shape)


@register(ops.ScatterItem)
def _(op: Any, at: Nodes, out: Any, part: Value) -> Value:
    zeros = at("Expand", at.number(0, out.dtype), at.sizes(out.shape))
    return written(op, at, zeros, part, out.shape)


def written(op: Any, at: Nodes, x: Value, part: Value, shape: Any) -> Value:
    """x, whose shape is known, with `part` at an index: flat places that are constants."""
    if not all(isinstance(s, int) for s in shape):
        raise Unsupported(f"[onnx] {op.label} writes at places that follow the batch; export the model for one.")
    places = np.arange(math.prod(shape), dtype="int64").reshape(shape)[decode_index(op.index)]
    wanted = places.shape
    lead = len(part.shape) - len(wanted)
    part = at.reshaped(part, part.shape[lead:]) if lead > 0 else part
    values = at.reshaped(at("Expand", part, at.sizes(wanted)), (-1,))
    flat = at("ScatterElements", at.reshaped(x, (-1,)), at.constant(places.ravel()), values, axis=0)
    return at.reshaped(flat, shape)

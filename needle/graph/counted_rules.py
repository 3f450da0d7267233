"""What of counted rows (`counted.py`) leaves out those that are not: writes, sums, means, variances, maxima, exponentials."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from needle import ops
from needle.autograd import Tensor
from needle.backend_ndarray import FLOATS
from needle.ops.common import check_axes
from needle.ops.nn.class_loss import Weighing
from needle.ops.nn.ctc_loss import CtcLoss
from needle.ops.reduce.basic import Extreme, Mean, Product, Summation, Variance
from needle.ops.reduce.softmax import LogSoftmax, LogSumExp, RowOp, Softmax
from needle.ops.reduce.sorting import MaxAlong
from needle.ops.shape.gather import Wrapped, one_number
from needle.ops.shape.masked import MaskedPut
from needle.ops.shape.scatter import IndexAdd, IndexCopy, IndexPut, Scatter

from .graph import Node


class Alike:
    """`alike(node)`: a number that values made alike share. Keys hold the numbers of what a value is made from, so that a loop
    that reads what it made twice is no tree of its own size."""

    def __init__(self) -> None:
        self.numbers, self.nodes = dict[Any, int](), dict[Node, int]()

    def __call__(self, node: Node) -> int:
        todo = [node]
        while todo:
            n = todo[-1]
            made = n.kind == "op" and not n.target.deferred()
            if missing := [a for a in n.args if made and a not in self.nodes]:
                todo += missing
                continue
            attributes = repr(sorted(n.target.attributes().items())) if made else None
            key = (type(n.target), attributes, *(self.nodes[a] for a in n.args)) if made else n
            self.nodes[n] = self.numbers.setdefault(key, len(self.numbers))
            todo.pop()
        return self.nodes[node]


class Count(NamedTuple):
    """Which of all rows are counted: `mask`, of any shape, and flat, `valid`; `some`: whether any is; `safe`: of each its place,
    of others the first counted one's."""

    alike: Alike
    mask: Any
    valid: Any
    some: Any
    safe: Any


class Rows(NamedTuple):
    """An axis of a value that has rows of a count. column: of `nonzero`'s result, that of these numbers."""

    of: Count
    axis: int
    column: int | None = None


class Beside(NamedTuple):
    """A value that a rule made, with rows along an axis."""

    value: Any
    axis: int


def ones_but(numbers: Any, axis: int, rank: int) -> Any:
    """An array of one axis, or a tensor, as `axis` of `rank`."""
    return numbers.reshape((1,) * axis + (numbers.shape[0],) + (1,) * (rank - axis - 1))


# (op, its inputs, their rows, the count) -> the result, of as many rows as ever; NotImplemented where PLACES may know


def put(op: Any, inputs: list[Any], rows: list[Any], count: Count) -> Any:
    """x[..., i, j, ...] = values at counted numbers: rows that are not counted go behind x, which is cut off."""
    x, values, *index = inputs
    if rows[0] or not all(r and r.axis == 0 and len(i.shape) == 1 for i, r in zip(index, rows[2:], strict=True)):
        return NotImplemented
    axis, n, rest = op.axis % len(x.shape), count.valid.shape[0], len(x.shape) - op.axis % len(x.shape) - len(index)
    at = axis + len(values.shape) - (len(x.shape) - len(index) + 1)  # of values, the axis of rows
    if (rows[1].axis != at) if rows[1] else (at >= 0 and values.shape[at] != 1):
        return NotImplemented
    found = [r.column for r in rows[2:]]
    if axis == 0 and not op.accumulate and found == [*range(len(count.mask.shape))] and at_mask(x, count):
        return masked(x, values, count)
    sizes = x.shape[axis : axis + len(index)]
    flat = ops.reshape(x, (*x.shape[:axis], math.prod(sizes), *x.shape[axis + len(index) :]))
    values = ops.broadcast_to(ops.cast(values, x.dtype), (*x.shape[:axis], n, *x.shape[len(x.shape) - rest :]))
    write = IndexAdd if op.accumulate else IndexCopy
    return ops.reshape(written(write(axis), flat, one_number(index, sizes), values, count), x.shape)


def at_mask(x: Any, count: Count) -> bool:
    return tuple(x.shape[: len(count.mask.shape)]) == tuple(count.mask.shape)


def masked(x: Any, values: Any, count: Count) -> Any:
    """x with values, of each row or the same for all, where the mask holds."""
    lead = count.mask.shape
    rest = x.shape[len(lead) :]
    if len(values.shape) == len(rest) + 1:
        own = values.shape[0] == count.valid.shape[0]
        values = ops.reshape(values, (*(lead if own else (1,) * len(lead)), *values.shape[1:]))
    mask = ops.reshape(count.mask, (*lead, *(1,) * len(rest)))
    return ops.where(mask, ops.cast(values, x.dtype), x)


def put_masked(op: Any, inputs: list[Any], rows: list[Any], count: Count) -> Any:
    x, mask, values = inputs
    same = rows[2] and rows[2].axis == 0 and count.alike(mask.node) == count.alike(count.mask.node)
    if rows[0] or rows[1] or not same or len(values.shape) != len(x.shape) - len(mask.shape) + 1:
        return NotImplemented
    return masked(x, values, count)


def write(op: Any, inputs: list[Any], rows: list[Any], count: Count) -> Any:
    x, index, source = inputs
    axis = op.axis % max(len(x.shape), 1)
    if rows[0] or not rows[1] or not rows[2] or rows[2].axis != axis or rows[1].axis != axis * (index.ndim > 1):
        return NotImplemented
    return written(op, x, index, source, count)


def written(op: Any, x: Any, index: Any, source: Any, count: Count) -> Any:
    axis = op.axis % len(x.shape)
    size = x.shape[axis]
    room = Tensor(np.zeros([1 if i == axis else s for i, s in enumerate(x.shape)]), dtype=x.dtype, requires_grad=False)
    valid = ones_but(count.valid, axis, index.ndim) if index.ndim > 1 else count.valid
    number = ops.where(valid, Wrapped(size)(index), size)
    return ops.getitem(op(ops.concat([x, room], axis), number, source), (*(slice(None),) * axis, slice(0, size)))


def summed(op: Any, inputs: list[Any], rows: list[Any], count: Count) -> Any:
    """Sums, means, products and extremes over rows are of those that are counted."""
    x, axis = inputs[0], rows[0].axis
    axes, keep = op._arguments(x)
    if axis not in axes:
        return NotImplemented
    valid = ones_but(count.valid, axis, len(x.shape))
    if isinstance(op, Extreme):
        return (
            op(ops.where(valid, x, -math.inf if op.row == "max" else math.inf)) if x.dtype in FLOATS else NotImplemented
        )
    if isinstance(op, Product):
        return op(ops.where(valid, x, 1))
    total = ops.summation(ops.where(valid, x, 0), axes, keep)
    if isinstance(op, Summation):
        return total
    others = math.prod(x.shape[a] for a in axes if a != axis)
    total = ops.cast(total, op.result_dtype(x))
    return total / ops.cast(ops.summation(count.valid) * others, total.dtype)


def spread(op: Any, inputs: list[Any], rows: list[Any], count: Count) -> Any:
    """A variance over rows is of those that are counted."""
    x, axis = inputs[0], rows[0].axis
    axes = check_axes(op.label, op.axes, x.shape)
    if axis not in axes:
        return NotImplemented
    far = x - summed(Mean(axes, True), inputs, rows, count)
    number = ops.summation(count.valid) * math.prod(x.shape[a] for a in axes if a != axis)
    left = ops.clamp_min(ops.cast(number, x.dtype) - op.correction, 0)
    return ops.summation(ops.where(ones_but(count.valid, axis, len(x.shape)), far * far, 0), axes, op.keepdims) / left


def over_rows(op: Any, inputs: list[Any], rows: list[Any], count: Count) -> Any:
    """Maxima, and what exponentials of rows add up to, are of those that are counted."""
    x, axis = inputs[0], rows[0].axis
    axes = check_axes(op.label, op.axes if isinstance(op, LogSumExp) else (op.axis,), x.shape)
    if axis not in axes or x.dtype not in FLOATS:
        return NotImplemented
    valid = ones_but(count.valid, axis, len(x.shape))
    stays = isinstance(op, RowOp)
    made = op(ops.where(ops.logical_or(valid, ops.eq(count.some, False)) if stays else valid, x, -math.inf))
    return Beside(ops.where(valid, made, 0), axis) if stays else made


def weighed(op: Any, inputs: list[Any], rows: list[Any], count: Count) -> Any:
    """A loss of classes ignores the labels of rows that are not counted."""
    x, labels, *weight = inputs
    if len(x.shape) < 2 or len(labels.shape) != len(x.shape) - 1 or any(rows[2:]) or not (rows[0] and rows[1]):
        return NotImplemented
    if rows[0].axis or rows[1].axis:
        return NotImplemented
    valid = ones_but(count.valid, 0, len(labels.shape))
    if op.reduction == "none":
        return NotImplemented
    return op(x, ops.where(valid, labels, op.ignore_index), *weight)


def written_out(op: Any, inputs: list[Any], rows: list[Any], count: Count) -> Any:
    """A CTC loss of counted labels: those come first, in one row."""
    labels = inputs[1]
    if rows[0] or any(rows[2:]) or len(labels.shape) != 1:
        return NotImplemented
    valid, number = count.valid, count.valid.shape[0]
    place = ops.where(valid, ops.cumsum(ops.cast(valid, "int64"), 0) - 1, number)
    row = ops.scatter(ops.full_like(labels, op.blank, (number + 1,)), 0, place, labels)
    return op(inputs[0], row[:number], *inputs[2:])


RULES: dict[type, Callable[[Any, list[Any], list[Any], Count], Any]] = {
    IndexPut: put,
    IndexCopy: write,
    Scatter: write,
    Extreme: summed,
    MaskedPut: put_masked,
    Summation: summed,
    Mean: summed,
    Product: summed,
    Variance: spread,
    **dict.fromkeys((LogSumExp, MaxAlong, Softmax, LogSoftmax), over_rows),
    Weighing: weighed,
    CtcLoss: written_out,
}

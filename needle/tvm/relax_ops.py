"""Ops as operators of Relax, for an export without tensor expressions, and for what would be slow as one."""

from __future__ import annotations

import math
from functools import singledispatch
from typing import Any

from tvm import relax

from needle import ops
from needle.ops.common import Elementwise, check_axes
from needle.ops.reduce.basic import Reduction

from .arrays import dtype_of, plain

r, nn, const = relax.op, relax.op.nn, relax.const
RELAX_ONLY = (ops.ArgSort, ops.EmbeddingGrad, ops.TakeGrad)  # slow as tensor expressions


@singledispatch
def as_relax(op: Any, out: Any, *inputs: Any) -> Any:
    """The op on Relax expressions, None where no operator does it; out: the result's Spec, or a list of them."""
    return None


for cls in (ops.Reshape, ops.Flatten, ops.Squeeze, ops.Unsqueeze):
    as_relax.register(cls, lambda op, out, x: r.reshape(x, out.shape))
as_relax.register(ops.BroadcastTo, lambda op, out, x: r.broadcast_to(x, out.shape))
as_relax.register(ops.MatMul, lambda op, out, a, b: r.matmul(a, b))
as_relax.register(ops.Softmax, lambda op, out, x: nn.softmax(x, op.axis))
as_relax.register(ops.LogSoftmax, lambda op, out, x: nn.log_softmax(x, op.axis))


def sizes(x: Any) -> tuple[Any, ...]:
    return plain(x.ty.shape)


@as_relax.register(ops.ArgSort)
def argsort(op: Any, out: Any, x: Any) -> Any:
    numbers = r.argsort(x, op.axis, op.descending, "int64")
    if op.count is None:
        return numbers
    return r.strided_slice(numbers, axes=[op.axis % len(sizes(x))], begin=[0], end=[int(op.count)])


@as_relax.register(Elementwise)
def by_name(op: Any, out: Any, *inputs: Any) -> Any:
    """By the operator that has the name of the kernel or of numpy's function, where all is of one dtype."""
    found = getattr(r, getattr(op.ufunc, "__name__", ""), None) or getattr(nn, op.label, None)
    mixed = out.dtype == "bool" or {dtype_of(x) for x in inputs} != {out.dtype}
    if found is None or mixed or set(vars(op)) - {"scalar"}:
        return None
    return found(*inputs, *(const(v, out.dtype) for v in vars(op).values()))


@as_relax.register(Reduction)
def reduction(op: Any, out: Any, x: Any) -> Any:
    axes = list(check_axes(op.label, op.axes, sizes(x)))
    return getattr(r, op.row)(x, axes, op.keepdims) if dtype_of(x) == out.dtype else None


@as_relax.register(ops.Permute)
def permute(op: Any, out: Any, x: Any) -> Any:
    rank = len(sizes(x))
    return r.permute_dims(x, [a % rank for a in (reversed(range(rank)) if op.axes is None else op.axes)])


@as_relax.register(ops.Conv2d)
def conv2d(op: Any, out: Any, x: Any, w: Any, bias: Any = None) -> Any:
    made = nn.conv2d(x, w, op.stride, op.padding, op.dilation, op.groups)
    return made if bias is None else r.add(made, r.reshape(bias, (1, -1, 1, 1)))


def column(index: Any) -> Any:
    """All numbers of an index, as scatter_nd takes them."""
    return r.reshape(r.astype(index, "int64"), (math.prod(sizes(index)), 1))


@as_relax.register(ops.EmbeddingGrad)
def embedding_grad(op: Any, out: Any, indices: Any, out_grad: Any) -> Any:
    count, width = math.prod(sizes(indices)), out.shape[1]
    numbers, rows = column(indices), r.reshape(out_grad, (count, width))
    if op.skip >= 0:
        rows = r.multiply(rows, r.astype(r.not_equal(numbers, const(op.skip, "int64")), out.dtype))
    return r.scatter_nd(r.zeros(out.shape, out.dtype), numbers, rows, "add")


@as_relax.register(ops.TakeGrad)
def take_grad(op: Any, out: Any, g: Any, index: Any) -> Any:
    count, stop = math.prod(sizes(index)), op.axis + len(sizes(index))
    kept = (*sizes(g)[: op.axis], *sizes(g)[stop:])
    first = [*range(op.axis, stop), *range(op.axis), *range(stop, len(sizes(g)))]
    numbers = column(index)
    below = r.astype(r.less(numbers, const(0, "int64")), "int64")
    numbers = r.add(numbers, r.multiply(below, const(op.size, "int64")))
    rows = r.reshape(r.permute_dims(g, first), (count, *kept))
    total = r.scatter_nd(r.zeros((op.size, *kept), out.dtype), numbers, rows, "add")
    axes = range(1, len(out.shape))
    return r.permute_dims(total, [*axes[: op.axis], 0, *axes[op.axis :]])

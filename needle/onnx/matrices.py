"""Systems of equations as nodes of ONNX, which has no operator for them: elimination row by row, for small matrices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from needle import ops
from needle.autograd import Unsupported
from needle.ops.linalg.solving import Inverse, Solve, SolveTriangular, SolveVector

from .operators import register

if TYPE_CHECKING:
    from .export import Nodes, Value

MOST_ROWS = 32  # a row takes some 15 nodes


def rows_of(op: Any, shape: Sequence[Any]) -> int:
    n = shape[-1]
    if not isinstance(n, int) or n > MOST_ROWS:
        told = ", ".join(map(str, shape))
        raise Unsupported(f"[onnx] {op.label} expects matrices of at most {MOST_ROWS} rows, got shape ({told}).")
    return n


def one_hot(at: Nodes, k: int, n: int, shape: tuple[int, ...]) -> Value:
    return at.constant((np.arange(n) == k).reshape(shape))


def eliminated(at: Nodes, m: Value, n: int, dtype: str) -> tuple[Value, Value, Value]:
    """Gauss and Jordan's elimination of (..., n, n + columns) with pivots of a column's largest number: the columns behind,
    the sign of the determinant, the log of its size. A singular matrix leaves nothing that is finite."""
    zero, one = at.number(0, dtype), at.number(1, dtype)
    places = at.constant(np.arange(n).reshape(n, 1))
    second, last = (at.constant(np.array([a], "int64")) for a in (-2, -1))
    sign, logs = one, zero
    for k in range(n):
        own = one_hot(at, k, n, (n, 1))
        column = at("Gather", m, at.constant(np.array([k], "int64")), axis=-1)  # (..., n, 1)
        left = at("Where", at.constant((np.arange(n) < k).reshape(n, 1)), at.number(-1, dtype), at("Abs", column))
        found = at("ArgMax", left, axis=-2, keepdims=1)
        chosen = at("Equal", places, found)
        pick = lambda mask, m=m: at("ReduceSum", at("Where", mask, m, zero), second, keepdims=1)  # noqa: E731
        row, old = pick(chosen), pick(own)
        m = at("Where", own, row, at("Where", chosen, old, m))
        pivot = at("Gather", row, at.constant(np.array([k], "int64")), axis=-1)  # (..., 1, 1)
        moved = at("Equal", found, at.constant(np.array(k, "int64")))
        sign = at("Mul", sign, at("Where", moved, at("Sign", pivot), at("Neg", at("Sign", pivot))))
        logs = at("Add", logs, at("Log", at("Abs", pivot)))
        row = at("Div", row, pivot)
        factors = at("Gather", m, at.constant(np.array([k], "int64")), axis=-1)
        m = at("Where", own, row, at("Sub", m, at("Mul", factors, row)))
    flat = [at("Squeeze", v, at.constant(np.array([-2, -1], "int64"))) for v in (sign, logs)]
    solved = at("Slice", m, at.constant(np.array([n])), at.constant(np.array([np.iinfo("int64").max])), last)
    return solved, flat[0], flat[1]


def solved(op: Any, at: Nodes, out: Any, a: Value, b: Value, columns: Any) -> Value:
    """out: of the solution as (..., N, columns)."""
    n = rows_of(op, a.shape)
    if not isinstance(columns, int):
        raise Unsupported(f"[onnx] {op.label} has as many columns as the batch; export the model for one.")
    batch = tuple(out[:-2])
    both = [at("Expand", at.cast(v, a.dtype), at.sizes((*batch, n, width))) for v, width in ((a, n), (b, columns))]
    return eliminated(at, at("Concat", *both, axis=-1), n, a.dtype)[0]


@register(Solve)
def _(op: Any, at: Nodes, out: Any, a: Value, b: Value) -> Value:
    return solved(op, at, out.shape, at.cast(a, out.dtype)._replace(shape=a.shape), b, out.shape[-1])


@register(SolveVector)
def _(op: Any, at: Nodes, out: Any, a: Value, b: Value) -> Value:
    a = at.cast(a, out.dtype)._replace(shape=a.shape)
    if not op.is_vector(a, b):
        return solved(op, at, out.shape, a, b, out.shape[-1])
    columns = at("Unsqueeze", b, at.constant(np.array([-1], "int64")), dtype=b.dtype)
    return at.reshaped(solved(op, at, (*out.shape, 1), a, columns, 1), out.shape)


@register(SolveTriangular)
def _(op: Any, at: Nodes, out: Any, a: Value, b: Value) -> Value:
    n = rows_of(op, a.shape)
    kept = np.triu(np.ones((n, n), bool), op.unit) if op.upper else np.tril(np.ones((n, n), bool), -int(op.unit))
    rest = at.constant(np.eye(n, dtype=out.dtype) * op.unit)
    triangle = at("Where", at.constant(kept), at.cast(a, out.dtype), rest, dtype=out.dtype)._replace(shape=a.shape)
    return solved(op, at, out.shape, triangle, b, out.shape[-1])


@register(Inverse)
def _(op: Any, at: Nodes, out: Any, a: Value) -> Value:
    n = rows_of(op, a.shape)
    return solved(op, at, out.shape, a, at.constant(np.eye(n, dtype=out.dtype)), n)


@register(ops.Slogdet)
def _(op: Any, at: Nodes, out: Any, a: Value) -> tuple[Value, Value]:
    n = rows_of(op, a.shape)
    _, sign, logs = eliminated(at, a, n, out[0].dtype)
    singular = at("Not", at("Greater", logs, at.number(-math.inf, out[0].dtype)))
    singular = at("Or", singular, at("Equal", sign, at.number(0, out[0].dtype)))
    nothing = at(
        "And", singular, at("Not", at("IsNaN", at("ReduceSum", a, at.constant(np.array([-2, -1])), keepdims=0)))
    )
    return (
        at("Where", nothing, at.number(0, out[0].dtype), sign),
        at("Where", nothing, at.number(-math.inf, out[0].dtype), logs),
    )


@register(ops.Cholesky)
def _(op: Any, at: Nodes, out: Any, a: Value) -> tuple[Value, Value]:
    """Column by column; info as the kernel gives it, and NaN where a minor is not positive."""
    n, dtype = rows_of(op, a.shape), out[0].dtype
    zero, m = at.number(0, dtype), a
    columns, info = [], at.number(0, "int32")
    for k in range(n):
        place = at.constant(np.array([k], "int64"))
        column = at("Gather", m, place, axis=-1)
        square = at("Gather", column, place, axis=-2)
        good = at("Greater", square, zero)
        first = at("And", at("Equal", info, at.number(0, "int32")), at("Not", good))
        info = at("Where", first, at.number(k + 1, "int32"), info)
        below = at("Where", at.constant((np.arange(n) < k).reshape(n, 1)), zero, at("Div", column, at("Sqrt", square)))
        columns.append(below)
        turned = at("Transpose", below, perm=[*range(len(a.shape) - 2), len(a.shape) - 1, len(a.shape) - 2])
        m = at("Sub", m, at("Mul", below, turned))
    bad = at("Greater", info, at.number(0, "int32"))
    factor = at("Where", bad, at.number(math.nan, dtype), at("Concat", *columns, axis=-1))
    return factor, at("Squeeze", info, at.constant(np.array([-2, -1], "int64")))

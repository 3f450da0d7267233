"""Products, maxima and logarithms of sums of all elements up to each along an axis."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from needle.autograd import Op, Spec, Tensor, op, tensor_method
from needle.backend_ndarray import FLOATS, NDArray, call
from needle.ops.common import check_axis, constant, gradient_of_decomposition, with_axis
from needle.ops.dtypes import cast_array, float_dtype
from needle.ops.families import no_gradient, samples_of
from needle.ops.math.arithmetic import logaddexp
from needle.ops.math.comparison import eq, gt
from needle.ops.math.elementwise import cast, maximum, where
from needle.ops.math.logic import isnan, logical_or
from needle.ops.math.maths import exp, log
from needle.ops.reduce.sorting import mirrored
from needle.ops.shape.basic import broadcast_to, flip
from needle.ops.shape.creation import full_like
from needle.ops.shape.gather import gather
from needle.ops.shape.indexing import getitem
from needle.ops.shape.join import concat

__all__ = ["cummax", "cummin", "cumprod", "logcumsumexp"]


def part(x: Tensor, axis: int, start: int | None, stop: int | None) -> Tensor:
    return getitem(x, (*(slice(None),) * axis, slice(start, stop)))


@op
class CumProd(Op):
    """Products of all elements up to each along an axis, in float64 inside. Integers and bools multiply to int64.

    Devices without the kernel multiply one after the other: in pairs, products that nobody asked for could overflow.
    """

    axis: int

    def infer(self, x: Any) -> Any:
        check_axis("cumprod", self.axis, x.shape)
        return Spec(tuple(x.shape), str(x.dtype) if x.dtype in FLOATS else "int64")

    def compute(self, x: NDArray) -> Any:
        shape, dtype = self.infer(x)
        out = NDArray.empty(shape or (1,), dtype)
        call("cumprod", [out], x=with_axis(x).as_dtype(dtype), axis=self.axis % out.ndim)
        return out.reshape(shape)

    def reference(self, x: np.ndarray) -> Any:
        return np.cumprod(x.reshape(x.shape or (1,)), self.axis).reshape(x.shape)

    def decompose(self, x: Tensor) -> Tensor:
        total = cast(x, self.infer(x).dtype)
        if not x.shape or x.shape[self.axis] < 2:
            return total
        axis = self.axis % len(x.shape)
        products = [part(total, axis, 0, 1)]
        for i in range(1, x.shape[axis]):
            products.append(products[-1] * part(total, axis, i, i + 1))
        return concat(products, axis)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        x = node.inputs[0]
        return CumProdGrad(self.axis)(x, out_grad) if x.shape and x.shape[self.axis] > 1 else out_grad

    samples = samples_of(
        ({"axis": 1}, [(3, 5, 4)]),
        ({"axis": -1}, [(2, 1)]),
        ({"axis": 0}, [Spec((5, 2), "int32")]),
        ({"axis": 0}, [(6, 20)]),
    )


@op
class CumProdGrad(Op):
    """The gradient of x from that of CumProd(x): s[k] = g[k] + x[k + 1] s[k + 1], times the product before k, in float64
    inside. No division, which zeros would not stand."""

    axis: int

    def infer(self, x: Any, g: Any) -> Any:
        check_axis(self.label, self.axis, x.shape)
        if tuple(x.shape) != tuple(g.shape) or x.dtype != g.dtype:
            given = f"{x.dtype} {tuple(x.shape)} and {g.dtype} {tuple(g.shape)}"
            raise ValueError(f"[{self.label}] expects x and a gradient of its shape and dtype, got {given}.")
        return Spec(tuple(x.shape), str(x.dtype))

    def compute(self, x: NDArray, g: NDArray) -> Any:
        out = NDArray.empty(x.shape or (1,), x.dtype)
        call("cumprod_grad", [out], x=with_axis(x), dy=with_axis(g), axis=self.axis % out.ndim)
        return out.reshape(x.shape)

    def reference(self, x: np.ndarray, g: np.ndarray) -> Any:
        rows, slopes = (np.moveaxis(t.reshape(t.shape or (1,)), self.axis, 0) for t in (x, g))
        before, behind, out = np.ones_like(rows), np.zeros_like(rows[0]), np.empty_like(rows)
        before[1:] = np.cumprod(rows, 0)[:-1]
        for k in reversed(range(len(rows))):
            behind = slopes[k] + (rows[k + 1] * behind if k + 1 < len(rows) else 0)
            out[k] = before[k] * behind
        return np.moveaxis(out, 0, self.axis).reshape(x.shape)

    def decompose(self, x: Tensor, g: Tensor) -> Tensor:
        n = x.shape[self.axis] if x.shape else 1
        if n < 2:
            return g
        axis, step = self.axis % len(x.shape), 1
        x, total = cast(x, "float64"), cast(g, "float64")
        factors = concat([part(x, axis, 1, None), full_like(part(x, axis, 0, 1), 0)], axis)
        while step < n:  # by doubling steps
            ahead = part(factors, axis, None, -step)
            total = concat(
                [
                    part(total, axis, None, -step) + ahead * part(total, axis, step, None),
                    part(total, axis, -step, None),
                ],
                axis,
            )
            factors = concat([ahead * part(factors, axis, step, None), part(factors, axis, -step, None)], axis)
            step *= 2
        before = part(CumProd(self.axis)(x), axis, None, -1)
        return cast(total * concat([full_like(part(x, axis, 0, 1), 1), before], axis), g.dtype)

    gradient = gradient_of_decomposition

    samples = samples_of(
        ({"axis": 1}, [(3, 5, 4), (3, 5, 4)]),
        ({"axis": -1}, [(2, 1), (2, 1)]),
        ({"axis": 0}, [(6, 20), (6, 20)]),
    )


@tensor_method()
def cumprod(a: Tensor, axis: int) -> Tensor:
    """Products of all elements up to each along an axis."""
    return CumProd(axis)(a)


@op
class CumMax(Op):
    """The number (int64) of the largest of all elements up to each along an axis, the last of equal ones; NaN is the largest."""

    axis: int

    def infer(self, x: Any) -> Any:
        check_axis("cummax", self.axis, x.shape)
        return Spec(tuple(x.shape), "int64")

    def compute(self, x: NDArray) -> Any:
        out = NDArray.empty(x.shape or (1,), "int64")
        call("cummax", [out], x=with_axis(x), axis=self.axis % out.ndim)
        return out.reshape(x.shape)

    def reference(self, x: np.ndarray) -> Any:
        rows = np.moveaxis(x.reshape(x.shape or (1,)), self.axis, 0)
        most = np.maximum.accumulate(rows, 0)
        there = (rows == most) | (rows != rows)
        numbers = np.arange(len(rows)).reshape(-1, *[1] * (rows.ndim - 1))
        found = np.maximum.accumulate(np.where(there, numbers, 0), 0)
        return np.moveaxis(found, 0, self.axis).reshape(x.shape)

    def decompose(self, x: Tensor) -> Tensor:
        if not x.shape:
            return constant(0, x, "int64")
        axis = self.axis % len(x.shape)
        rows = cast(x, "int32") if x.dtype == "bool" else x
        there = eq(rows, running(maximum, rows, axis))
        if x.dtype in FLOATS:
            there = logical_or(there, isnan(rows))
        numbers = constant(np.arange(x.shape[axis]).reshape(-1, *[1] * (len(x.shape) - axis - 1)), x, "int64")
        numbers = broadcast_to(numbers, tuple(x.shape))
        return running(maximum, where(there, numbers, full_like(numbers, 0)), axis)

    gradient = no_gradient

    samples = samples_of(({"axis": 1}, [(3, 5, 4)]), ({"axis": -1}, [Spec((4, 9), "int64")]), ({"axis": 0}, [(6, 20)]))


def running(combine: Callable, x: Tensor, axis: int) -> Tensor:
    """All elements up to each along an axis combined, by doubling steps."""
    step = 1
    while step < x.shape[axis]:
        later = combine(part(x, axis, step, None), part(x, axis, None, -step))
        x, step = concat([part(x, axis, None, step), later], axis), step * 2
    return x


@tensor_method()
def cummax(a: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """(values, numbers) of the largest of all elements up to each along an axis."""
    numbers = CumMax(axis)(a)
    return gather(a, axis, numbers), numbers


@tensor_method()
def cummin(a: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """(values, numbers) of the smallest of all elements up to each along an axis."""
    numbers = CumMax(axis)(mirrored(a))
    return gather(a, axis, numbers), numbers


@op
class LogCumSumExp(Op):
    """log of the sum of e ** x of all elements up to each along an axis."""

    axis: int

    def infer(self, x: Any) -> Any:
        check_axis(self.label, self.axis, x.shape)
        return Spec(tuple(x.shape), float_dtype(x.dtype))

    def reference(self, x: np.ndarray) -> Any:
        return np.logaddexp.accumulate(cast_array(with_axis(x), float_dtype(x.dtype)), self.axis).reshape(x.shape)

    def decompose(self, x: Tensor) -> Tensor:
        x = cast(x, self.infer(x).dtype)
        return running(logaddexp, x, self.axis % len(x.shape)) if x.shape else x

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        """e ** x times the sum of g e ** -y from each element on, of positive and negative g apart and as logarithms."""
        total = 0.0
        for sign in (1.0, -1.0):
            part_of = out_grad * sign
            logs = where(gt(part_of, 0.0), log(where(gt(part_of, 0.0), part_of, 1.0)) - node, -math.inf)
            behind = flip(LogCumSumExp(self.axis)(flip(logs, self.axis)), self.axis) if out_grad.shape else logs
            total = total + exp(behind + node.inputs[0]) * sign
        return total

    samples = samples_of(({"axis": 1}, [(3, 5, 4)]), ({"axis": -1}, [(2, 1)]), ({"axis": 0}, [(6, 20)]))


@tensor_method()
def logcumsumexp(a: Tensor, axis: int) -> Tensor:
    """log of the sum of e ** a of all elements up to each along an axis, without overflow. As torch.logcumsumexp."""
    return LogCumSumExp(axis)(a)

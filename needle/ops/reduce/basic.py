"""Reductions over axes: sum, mean, max, product, variance, norms. Over all axes (None) the result is 0-d."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from needle.autograd import Op, Spec, Tensor, op, tensor_method
from needle.backend_ndarray import FLOATS, NDArray, call, dtype_name
from needle.ops.common import (
    as_axes,
    check_axes,
    check_filled,
    constant,
    gradient_of_decomposition,
    reduced_shape,
    with_axis,
)
from needle.ops.dtypes import cast_array, float_dtype
from needle.ops.families import family, function_of, named, op_class, samples_of
from needle.ops.math.comparison import eq, ne
from needle.ops.math.elementwise import cast, where
from needle.ops.math.maths import absolute, sqrt
from needle.ops.math.power import power_scalar
from needle.ops.shape.basic import Pad, broadcast_to, permute, reshape

__all__ = ["amax", "amin", "every", "mean", "prod", "some", "square_sum", "std", "summation", "variance", "vector_norm"]


class OverAxes(Op):
    """`axes` may be None (all), one axis or several, and negative."""

    axes: Any
    keepdims: bool

    def result_dtype(self, x: Any) -> str:
        return dtype_name(x.dtype)

    def infer(self, x: Any) -> Any:
        axes, keep = self._arguments(x)
        return Spec(reduced_shape(x.shape, axes, keep), self.result_dtype(x))

    def _arguments(self, x: Any) -> tuple[tuple[int, ...], bool]:
        return check_axes(self.label, self.axes, x.shape), self.keepdims

    samples = samples_of(
        *(({"axes": a, "keepdims": k}, [(3, 5, 4)]) for a, k in ((None, False), ((0, -1), True), (1, False)))
    )


def whole_sums(self: OverAxes, x: Any) -> str:
    """For `result_dtype = whole_sums`: integers and bools become int64."""
    return dtype_name(x.dtype) if x.dtype in FLOATS else "int64"


@family
class Reduction(OverAxes):
    """By the kernel `row`, which has the name of numpy's function."""

    axes: Any = None
    keepdims: bool = False
    row = ""
    compute_infers = True

    def compute(self, x: NDArray) -> Any:
        axes, keep = self._arguments(x)
        dtype = self.result_dtype(x)
        out = (x if x.dtype == dtype else x.astype(dtype)).reduce(self.row, axes, keep)
        return out if out.dtype == dtype else out.astype(dtype)  # the kernels know no bools

    def reference(self, x: np.ndarray) -> Any:
        """numpy's function takes no axis of an array without axes."""
        rows = with_axis(cast_array(x, self.result_dtype(x)))
        y = getattr(np, self.row)(rows, axis=as_axes(self.axes), keepdims=self.keepdims)
        return y if x.shape else y.reshape(())

    def spread(self, t: Tensor, x: Tensor) -> Tensor:
        """A result of the reduction of x, with the reduced axes stretched to x's shape again."""
        kept = reshape(t, reduced_shape(x.shape, self._arguments(x)[0], True)) if len(t.shape) else t
        return broadcast_to(kept, x.shape)

    samples = samples_of(
        *(
            ({"axes": a, "keepdims": k}, [(3, 5, 7)])
            for a, k in ((None, False), ((0, -1), False), (1, True), ((0,), False))
        )
    )


def reduction(cls: Any, name: str, *methods: str) -> Callable[..., Tensor]:
    """The public function of an op over axes, and methods of Tensor."""

    def function(a: Tensor, axes: Any = None, keepdims: bool = False) -> Tensor:
        return cls(as_axes(axes), keepdims)(a)

    named(function, name, cls.__doc__)
    return tensor_method(*methods)(function) if methods else function


@op
class Summation(Reduction):
    """Sum over axes. Integers and bools sum to int64."""

    row = "sum"
    result_dtype = whole_sums

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        return self.spread(out_grad, node.inputs[0])


@op
class SquareSum(Op):
    """Sum of the squares of all elements, in float64: ()."""

    def infer(self, x: Any) -> Spec:
        return Spec((), "float64")

    def compute(self, x: NDArray) -> NDArray:
        out = NDArray.empty((), "float64")
        call("sum_squares", [out], x=x.compact())
        return out

    def reference(self, x: np.ndarray) -> Any:
        return np.square(x.astype("float64")).sum()

    def decompose(self, x: Tensor) -> Tensor:
        wide = x.astype("float64")
        return summation(wide * wide)

    gradient = gradient_of_decomposition

    samples = samples_of(({}, [(3, 5, 7)]), ({}, [()]))


square_sum = function_of(SquareSum, "square_sum")
summation = reduction(Summation, "summation", "summation", "sum")


@op
class Mean(Reduction):
    """Mean over axes; of integers as float32."""

    row = "mean"

    def result_dtype(self, x: Any) -> str:
        return float_dtype(x.dtype)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        x = node.inputs[0]
        axes, _ = self._arguments(x)
        return self.spread(out_grad / math.prod(x.shape[a] for a in axes if x.shape), x)


mean = reduction(Mean, "mean", "mean")


class Extreme(Reduction):
    """Largest or smallest element; equal ones share the gradient, as in torch.amax."""

    def _arguments(self, x: Any) -> tuple[tuple[int, ...], bool]:
        axes, keep = Reduction._arguments(self, x)
        check_filled(self.label, x, axes)
        return axes, keep

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        x = node.inputs[0]
        axes, _ = self._arguments(x)
        hits = eq(x, self.spread(node, x))
        count = reshape(summation(cast(hits, x.dtype), axes), out_grad.shape)
        others = where(eq(count, 0.0), math.nan, count * 0.0)  # beside NaN nothing is equal to the result
        return where(hits, self.spread(out_grad / count, x), self.spread(others, x))


Max = op_class(__name__, "Max", Extreme, "Maximum over axes.", row="max")
Min = op_class(__name__, "Min", Extreme, "Minimum over axes.", row="min")
amax, amin = reduction(Max, "amax", "amax"), reduction(Min, "amin", "amin")


# -- composed ------------------------------------------------------------------------------------------------------------


@op
class Variance(OverAxes):
    """Mean squared distance from the mean; the sum is divided by the count less `correction`."""

    axes: Any = None
    correction: Any = 1
    keepdims: bool = False

    def decompose(self, x: Tensor) -> Tensor:
        axes = check_axes("variance", self.axes, x.shape)
        centred = x - mean(x, axes, keepdims=True)
        count = max(0.0, math.prod(x.shape[a] for a in axes if x.shape) - self.correction)
        total = summation(centred * centred, axes, self.keepdims)
        return total * (1 / count if count else math.inf)


@tensor_method("variance", "var")
def variance(a: Tensor, axes: Any = None, correction: Any = 1, keepdims: bool = False) -> Tensor:
    """Mean squared distance from the mean over `axes` (None: all), which vanish or, with `keepdims`, have size 1.

    The sum is divided by the count less `correction`: 1 is torch.var's default, 0 the variance of the elements themselves.
    """
    return Variance(as_axes(axes), correction, keepdims)(a)


def std(a: Tensor, axes: Any = None, correction: Any = 1, keepdims: bool = False) -> Tensor:
    """The root of the variance; its gradient at equal elements is zero, as in torch."""
    square = variance(a, axes, correction, keepdims)
    zero = eq(square, 0.0)
    return where(zero, 0.0, sqrt(where(zero, 1.0, square)))


@op
class Product(Reduction):
    """Product over axes. Integers and bools multiply to int64."""

    row = "prod"
    result_dtype = whole_sums

    def decompose(self, x: Tensor) -> Tensor:
        """By halves: its gradient divides by no element, which may be 0."""
        shape, dtype = self.infer(x)
        axes, _ = self._arguments(x)
        kept = [i for i in range(len(x.shape)) if i not in axes]
        n = math.prod(x.shape[i] for i in axes if x.shape)
        if n == 0:
            return constant(np.ones(shape, dtype), x, dtype)
        rows = reshape(
            permute(cast(x, dtype), (*kept, *axes) if x.shape else ()), (math.prod(x.shape[i] for i in kept), n)
        )
        while n > 1:
            rows = Pad(((0, n % 2),), 1.0)(rows)
            n = (n + 1) // 2
            rows = rows[:, :n] * rows[:, n:]
        return reshape(rows, shape)

    gradient = gradient_of_decomposition


prod = reduction(Product, "prod")


def every(a: Tensor, axes: Any = None, keepdims: bool = False) -> Tensor:
    """Whether all elements differ from zero."""
    return eq(summation(eq(a, 0), axes, keepdims), 0)


def some(a: Tensor, axes: Any = None, keepdims: bool = False) -> Tensor:
    """Whether any element differs from zero."""
    return ne(summation(ne(a, 0), axes, keepdims), 0)


def vector_norm(a: Tensor, order: float = 2.0, axes: Any = None, keepdims: bool = False) -> Tensor:
    """The vector norm of an order (inf and 0 included) over axes; its gradient at a zero vector is zero."""
    if order == 0:
        return summation(cast(ne(a, 0), a.dtype), axes, keepdims)
    if order in (math.inf, -math.inf):
        return (amax if order > 0 else amin)(absolute(a), axes, keepdims)
    if order == 1:
        return summation(absolute(a), axes, keepdims)
    size = absolute(a) if order != 2 else a
    if order < 1:  # a root of the elements has no slope at 0 either: there torch's is zero
        none = eq(size, 0.0)
        powers = where(none, 0.0 if order > 0 else math.inf, power_scalar(where(none, 1.0, size), order))
    else:
        powers = a * a if order == 2 else power_scalar(size, order)
    total = summation(powers, axes, keepdims)
    zero = eq(total, 0.0)
    return where(zero, 0.0, power_scalar(where(zero, 1.0, total), 1 / order))  # a root has no slope at 0

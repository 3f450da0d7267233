"""Reductions over axes: sum, mean, max, product, variance, norms. Over all axes (None) the result is 0-d."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from needle.autograd import Op, Spec, Tensor, op, tensor_method
from needle.backend_ndarray import NDArray, dtype_name

from .common import FLOATS, as_axes, check_axes, check_filled, float_dtype, with_axis
from .comparison import eq, ne
from .elementwise import add, cast, divide, divide_scalar, multiply, subtract, where
from .maths import absolute, sqrt
from .power import power_scalar
from .shape import broadcast_to, pad, permute, reshape


class Reduction(Op):
    """`axes` may be None (all), one axis or several, and negative."""

    axes: Any
    keepdims: bool
    row = ""  # kernel
    compute_infers = True

    def result_dtype(self, x: Any) -> str:
        return dtype_name(x.dtype)

    def infer(self, x: Any) -> Any:
        axes, keep = self._arguments(x)
        shape = tuple(1 if d in axes else s for d, s in enumerate(x.shape) if keep or d not in axes)
        return Spec(shape, self.result_dtype(x))

    def _arguments(self, x: Any) -> tuple[tuple[int, ...], bool]:
        return check_axes(self.label, self.axes, x.shape), self.keepdims

    def compute(self, x: NDArray) -> Any:
        axes, keep = self._arguments(x)
        dtype = self.result_dtype(x)
        out = (x if x.dtype == dtype else x.astype(dtype)).reduce(self.row, axes, keep)
        return out if out.dtype == dtype else out.astype(dtype)  # the kernels know no bools

    def over_axes(self, f: Callable, x: Any, **options: Any) -> Any:
        """numpy's f, which takes no axis of an array without axes."""
        y = f(with_axis(x), axis=as_axes(self.axes), keepdims=self.keepdims, **options)
        return y if x.shape else y.reshape(())

    def relax(self, t: Any, out: Any, x: Any) -> Any:
        axes, keep = self._arguments(Spec(t.sizes(x)))
        return getattr(t.relax.op, self.row)(x, list(axes), keep) if t.dtype(x) == out.dtype else None

    def spread(self, t: Tensor, x: Tensor) -> Tensor:
        """A result of the reduction of x, with the reduced axes stretched to x's shape again."""
        axes, _ = self._arguments(x)
        kept = tuple(1 if d in axes else s for d, s in enumerate(x.shape))
        return broadcast_to(reshape(t, kept), x.shape)

    @classmethod
    def samples(cls) -> list:
        cases = [(None, False), ((0, -1), False), (1, True), ((0,), False)]
        return [({"axes": a, "keepdims": k}, [(3, 5, 7)]) for a, k in cases]


@op
class Summation(Reduction):
    """Sum over axes. Integers and bools sum to int64."""

    axes: Any = None
    keepdims: bool = False
    row = "sum"

    def result_dtype(self, x: Any) -> str:
        return dtype_name(x.dtype) if x.dtype in FLOATS else "int64"

    def reference(self, x: np.ndarray) -> Any:
        return self.over_axes(np.sum, x, dtype=self.result_dtype(x))

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        return self.spread(out_grad, node.inputs[0])


@tensor_method("summation", "sum")
def summation(a: Tensor, axes: Any = None, keepdims: bool = False) -> Tensor:
    return Summation(as_axes(axes), keepdims)(a)


@op
class Mean(Reduction):
    """Mean over axes; of integers as float32."""

    axes: Any = None
    keepdims: bool = False
    row = "mean"

    def result_dtype(self, x: Any) -> str:
        return float_dtype(x.dtype)

    def reference(self, x: np.ndarray) -> Any:
        return self.over_axes(np.mean, x, dtype=self.result_dtype(x))

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        x = node.inputs[0]
        axes, _ = self._arguments(x)
        return self.spread(divide_scalar(out_grad, math.prod(x.shape[a] for a in axes if x.shape)), x)


@tensor_method()
def mean(a: Tensor, axes: Any = None, keepdims: bool = False) -> Tensor:
    return Mean(as_axes(axes), keepdims)(a)


class Extreme(Reduction):
    """Largest or smallest element; equal ones share the gradient, as in torch.amax."""

    def infer(self, x: Any) -> Any:
        check_filled(self.label, x, check_axes(self.label, self.axes, x.shape))
        return Reduction.infer(self, x)

    def compute(self, x: NDArray) -> Any:
        check_filled(self.label, x, check_axes(self.label, self.axes, x.shape))
        return Reduction.compute(self, x)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        x = node.inputs[0]
        axes, _ = self._arguments(x)
        hits = cast(eq(x, self.spread(node, x)), x.dtype)
        return multiply(hits, self.spread(divide(out_grad, reshape(summation(hits, axes), out_grad.shape)), x))


@op
class Max(Extreme):
    """Maximum over axes."""

    axes: Any = None
    keepdims: bool = False
    row = "max"

    def reference(self, x: np.ndarray) -> Any:
        return self.over_axes(np.max, x)


@tensor_method()
def amax(a: Tensor, axes: Any = None, keepdims: bool = False) -> Tensor:
    return Max(as_axes(axes), keepdims)(a)


@op
class Min(Extreme):
    """Minimum over axes."""

    axes: Any = None
    keepdims: bool = False
    row = "min"

    def reference(self, x: np.ndarray) -> Any:
        return self.over_axes(np.min, x)


@tensor_method()
def amin(a: Tensor, axes: Any = None, keepdims: bool = False) -> Tensor:
    return Min(as_axes(axes), keepdims)(a)


# -- composed ------------------------------------------------------------------------------------------------------------


class ComposedReduction(Op):
    """`axes` and `keepdims` as in Reduction; runs as other ops."""

    def infer(self, x: Any) -> Any:
        axes = check_axes(self.label, self.attributes()["axes"], x.shape)
        keep = self.attributes()["keepdims"]
        return Spec(tuple(1 if d in axes else s for d, s in enumerate(x.shape) if keep or d not in axes), str(x.dtype))

    @classmethod
    def samples(cls) -> list:
        return [({"axes": a, "keepdims": k}, [(3, 5, 4)]) for a, k in ((None, False), ((0, -1), True), (1, False))]


@op
class Variance(ComposedReduction):
    """Mean squared distance from the mean; the sum is divided by the count less `correction`."""

    axes: Any = None
    correction: Any = 1
    keepdims: bool = False

    def decompose(self, x: Tensor) -> Tensor:
        axes = check_axes("variance", self.axes, x.shape)
        centred = subtract(x, mean(x, axes, keepdims=True))
        count = max(0.0, math.prod(x.shape[a] for a in axes if x.shape) - self.correction)
        total = summation(multiply(centred, centred), axes, self.keepdims)
        return multiply(total, 1 / count if count else math.inf)


@tensor_method("variance", "var")
def variance(a: Tensor, axes: Any = None, correction: Any = 1, keepdims: bool = False) -> Tensor:
    return Variance(as_axes(axes), correction, keepdims)(a)


def std(a: Tensor, axes: Any = None, correction: Any = 1, keepdims: bool = False) -> Tensor:
    """The root of the variance; its gradient at equal elements is zero, as in torch."""
    square = variance(a, axes, correction, keepdims)
    zero = eq(square, 0.0)
    return where(zero, 0.0, sqrt(where(zero, 1.0, square)))


@op
class Product(ComposedReduction):
    """Product over axes, by halves. Integers and bools multiply to int64."""

    axes: Any = None
    keepdims: bool = False

    def infer(self, x: Any) -> Any:
        return Spec(ComposedReduction.infer(self, x).shape, str(x.dtype) if x.dtype in FLOATS else "int64")

    def decompose(self, x: Tensor) -> Tensor:
        shape, dtype = self.infer(x)
        axes = check_axes("product", self.axes, x.shape)
        kept = [i for i in range(len(x.shape)) if i not in axes]
        n = math.prod(x.shape[i] for i in axes if x.shape)
        if n == 0:
            return Tensor(np.ones(shape, dtype), device=x.device, dtype=dtype, requires_grad=False)
        rows = reshape(
            permute(cast(x, dtype), (*kept, *axes) if x.shape else ()), (math.prod(x.shape[i] for i in kept), n)
        )
        while n > 1:
            rows = pad(rows, (0, n % 2), value=1.0)
            n = (n + 1) // 2
            rows = multiply(rows[:, :n], rows[:, n:])
        return reshape(rows, shape)


def prod(a: Tensor, axes: Any = None, keepdims: bool = False) -> Tensor:
    return Product(as_axes(axes), keepdims)(a)


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
        powers = multiply(a, a) if order == 2 else power_scalar(size, order)
    total = summation(powers, axes, keepdims)
    zero = eq(total, 0.0)
    root = power_scalar(where(zero, add(multiply(total, 0.0), 1.0), total), 1 / order)  # sqrt has no slope at 0
    return where(zero, multiply(total, 0.0), root)

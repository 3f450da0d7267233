"""Reductions over axes: sum, mean, max. Over all axes (None) the result is 0-d."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from needle.autograd import Op, Spec, Tensor, op, tensor_method
from needle.backend_ndarray import NDArray

from .common import FLOATS, as_axes, cast_array, check_axes
from .comparison import eq
from .elementwise import cast, divide, divide_scalar, multiply
from .shape import broadcast_to, reshape


class Reduction(Op):
    """`axes` may be None (all), one axis or several, and negative."""

    row = ""  # kernel

    def result_dtype(self, x: Any) -> str:
        return str(x.dtype)

    def infer(self, x: Any) -> Any:
        axes, keep = self._arguments(x)
        shape = tuple(1 if d in axes else s for d, s in enumerate(x.shape) if keep or d not in axes)
        return Spec(shape, self.result_dtype(x))

    def _arguments(self, x: Any) -> tuple[tuple[int, ...], bool]:
        attributes = self.attributes()
        return check_axes(self.label, attributes["axes"], x.shape), attributes["keepdims"]

    def compute(self, x: NDArray) -> Any:
        axes, keep = self._arguments(x)
        return cast_array(x, self.result_dtype(x)).reduce(self.row, axes, keep)

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
        return str(x.dtype) if x.dtype in FLOATS else "int64"

    def reference(self, x: np.ndarray) -> Any:
        return np.sum(x, axis=as_axes(self.axes), keepdims=self.keepdims, dtype=self.result_dtype(x))

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        return self.spread(out_grad, node.inputs[0])


@tensor_method("summation", "sum")
def summation(a: Tensor, axes: Any = None, keepdims: bool = False) -> Tensor:
    return Summation(as_axes(axes), keepdims)(a)


@op
class Mean(Reduction):
    """Mean over axes."""

    axes: Any = None
    keepdims: bool = False
    row = "mean"

    def reference(self, x: np.ndarray) -> Any:
        return np.mean(x, axis=as_axes(self.axes), keepdims=self.keepdims)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        x = node.inputs[0]
        axes, _ = self._arguments(x)
        return self.spread(divide_scalar(out_grad, math.prod(x.shape[a] for a in axes)), x)


@tensor_method()
def mean(a: Tensor, axes: Any = None, keepdims: bool = False) -> Tensor:
    return Mean(as_axes(axes), keepdims)(a)


class Extreme(Reduction):
    """Largest or smallest element; equal ones share the gradient, as in torch.amax."""

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
        return np.max(x, axis=as_axes(self.axes), keepdims=self.keepdims)


@tensor_method("amax", "max")
def amax(a: Tensor, axes: Any = None, keepdims: bool = False) -> Tensor:
    return Max(as_axes(axes), keepdims)(a)


@op
class Min(Extreme):
    """Minimum over axes."""

    axes: Any = None
    keepdims: bool = False
    row = "min"

    def reference(self, x: np.ndarray) -> Any:
        return np.min(x, axis=as_axes(self.axes), keepdims=self.keepdims)


@tensor_method("amin", "min")
def amin(a: Tensor, axes: Any = None, keepdims: bool = False) -> Tensor:
    return Min(as_axes(axes), keepdims)(a)

"""Order along an axis: the place of the largest element, sorting, running sums."""

from __future__ import annotations

from typing import Any

import numpy as np

from needle.autograd import Op, Spec, Tensor, Unsupported, op, tensor_method
from needle.backend_ndarray import FLOATS, NDArray, call
from needle.backend_ndarray.kernels import kernel_dtype
from needle.ops.common import check_axis, check_filled, constant, reduced_shape, with_axis
from needle.ops.families import no_gradient, samples_of
from needle.ops.math.comparison import eq, gt, lt
from needle.ops.math.elementwise import cast
from needle.ops.math.logic import bitwise_not, isnan, logical_and, logical_not, logical_or
from needle.ops.reduce.basic import summation
from needle.ops.shape.basic import Pad, flatten, reshape, squeeze, transpose, unsqueeze
from needle.ops.shape.gather import GatherGrad, gather
from needle.ops.shape.indexing import getitem

__all__ = ["argmax", "argmin", "argsort", "cumsum", "max_along", "min_along", "sort", "topk"]


@op
class ArgMax(Op):
    """The number (int64) of the largest element along an axis, the first among equal ones; the axis stays with size 1."""

    axis: int

    def infer(self, x: Any) -> Any:
        axis = check_axis("argmax", self.axis, x.shape)
        check_filled("argmax", x, (axis,))
        return Spec(reduced_shape(x.shape, (axis,), True), "int64")

    def compute(self, x: NDArray) -> Any:
        shape, dtype = self.infer(x)
        row = with_axis(x).as_dtype(kernel_dtype("argmax", x.dtype))
        out = NDArray.empty(shape or (1,), dtype)
        call("argmax", [out], x=row, axis=self.axis % row.ndim)
        return out.reshape(shape)

    def reference(self, x: np.ndarray) -> Any:
        return np.argmax(x, self.axis, keepdims=True)

    gradient = no_gradient

    samples = samples_of(*(({"axis": a}, [(3, 5, 4)]) for a in (0, -1)))


@tensor_method()
def argmax(a: Tensor, axis: int | None = None, keepdims: bool = False) -> Tensor:
    """Number of the largest element along an axis; of all elements without one."""
    if axis is None:
        return squeeze(ArgMax(0)(flatten(a)), 0)
    found = ArgMax(axis)(a)
    return found if keepdims else squeeze(found, axis)


@tensor_method()
def argmin(a: Tensor, axis: int | None = None, keepdims: bool = False) -> Tensor:
    """Number of the smallest element along an axis; of all elements without one."""
    return argmax(mirrored(a), axis, keepdims)


@op
class MaxAlong(Op):
    """The largest element along one axis, which stays with size 1; the gradient goes to the first of equal ones."""

    axis: int

    def infer(self, x: Any) -> Any:
        return Spec(ArgMax(self.axis).infer(x).shape, str(x.dtype))

    def compute(self, x: NDArray) -> Any:
        return x.reduce("max", (self.axis % x.ndim,), True).as_dtype(x.dtype) if x.shape else x

    def aliases(self, out: Any, *inputs: Any) -> bool:
        return not inputs[0].shape

    def reference(self, x: np.ndarray) -> Any:
        return x.max(self.axis, keepdims=True)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        x = node.inputs[0]
        if not x.shape:
            return out_grad
        return GatherGrad(self.axis, tuple(x.shape))(out_grad, ArgMax(self.axis)(x.detach()))

    samples = samples_of(*(({"axis": a}, [(3, 5, 4)]) for a in (0, -1)))


def max_along(a: Tensor, axis: int, keepdims: bool = False) -> tuple[Tensor, Tensor]:
    """(values, numbers) of the largest elements along an axis."""
    values = MaxAlong(axis)(a)
    return (values if keepdims else squeeze(values, axis)), argmax(a, axis, keepdims)


def min_along(a: Tensor, axis: int, keepdims: bool = False) -> tuple[Tensor, Tensor]:
    """(values, numbers) of the smallest elements along an axis."""
    values, numbers = max_along(mirrored(a), axis, keepdims)
    return mirrored(values), numbers


@op
class Mirror(Op):
    """Values in the opposite order: -x, but ~x of bools and integers, of which the smallest has no opposite."""

    def infer(self, x: Any) -> Any:
        return Spec(tuple(x.shape), str(x.dtype))

    def decompose(self, x: Tensor) -> Tensor:
        return -x if x.dtype in FLOATS else bitwise_not(x)

    samples = samples_of(({}, [(4, 3)]), ({}, [Spec((4, 9), "bool")]), ({}, [Spec((4, 9), "int64")]))


def mirrored(a: Tensor) -> Tensor:
    return Mirror()(a)


@op
class ArgSort(Op):
    """The numbers (int64) of the elements along an axis in their order, or of the first `count`; equal ones keep theirs.

    Devices without the kernel count, for each element, those before it: n * n comparisons.
    """

    axis: int = -1
    descending: bool = False
    count: Any = None

    def infer(self, x: Any) -> Any:
        axis, shape = check_axis("argsort", self.axis, x.shape), [*x.shape]
        if self.count is not None:
            if not x.shape or not 0 <= self.count <= shape[axis]:
                raise ValueError(f"[argsort] count expects at most the size of axis {axis}, got {self.count}.")
            shape[axis] = self.count
        return Spec(tuple(shape), "int64")

    def compute(self, x: NDArray) -> Any:
        shape, dtype = self.infer(x)
        out = NDArray.empty(shape or (1,), dtype)
        call("argsort", [out], x=with_axis(x), axis=self.axis % out.ndim, descending=self.descending)
        return out.reshape(shape)

    def reference(self, x: np.ndarray) -> Any:
        if not x.shape:
            return np.zeros((), "int64")
        if self.descending:
            backwards = np.flip(np.argsort(np.flip(x, self.axis), self.axis, kind="stable"), self.axis)
            numbers = x.shape[self.axis] - 1 - backwards
        else:
            numbers = np.argsort(x, self.axis, kind="stable")
        return np.moveaxis(np.moveaxis(numbers, self.axis, 0)[: self.count], 0, self.axis)

    def decompose(self, x: Tensor) -> Tensor:
        if not x.shape:
            return constant(0, x, "int64")
        last = transpose(x, (self.axis, -1))
        n = last.shape[-1]
        mine, other = unsqueeze(last, -1), unsqueeze(last, -2)
        before, same = (gt if self.descending else lt)(other, mine), eq(other, mine)
        if x.dtype in FLOATS:  # what is no number counts as the largest
            first, second = (isnan(other), isnan(mine)) if self.descending else (isnan(mine), isnan(other))
            before = logical_or(before, logical_and(first, logical_not(second)))
            same = logical_or(same, logical_and(first, second))
        earlier = constant(np.tri(n, k=-1), x, "int32")
        place = summation(cast(before, "int32") + cast(same, "int32") * earlier, -1)  # of every element
        numbers = constant(np.arange(n), x, "int64")
        wanted = numbers if self.count is None else getitem(numbers, slice(0, self.count))
        found = cast(eq(unsqueeze(place, -2), reshape(wanted, (-1, 1))), "int64") * numbers
        return transpose(summation(found, -1), (self.axis, -1))

    gradient = no_gradient

    samples = samples_of(
        ({"axis": 1}, [(3, 5, 4)]),
        ({"axis": -1, "descending": True}, [Spec((4, 9), "int64")]),
        ({"axis": 0, "count": 2}, [(50, 3)]),
        ({"descending": True, "count": 3}, [(2, 700)]),
    )


@tensor_method()
def argsort(a: Tensor, axis: int = -1, descending: bool = False, count: Any = None) -> Tensor:
    """The numbers of the elements along an axis in their order, or of the first `count` of them."""
    return ArgSort(axis, descending, count)(a)


@tensor_method()
def sort(a: Tensor, axis: int = -1, descending: bool = False, count: Any = None) -> tuple[Tensor, Tensor]:
    """(values, numbers) in order along an axis, or the first `count` of them."""
    numbers = argsort(a, axis, descending, count)
    return gather(a, axis, numbers), numbers


def known_rank(a: Tensor) -> int | None:
    """The number of axes, None for a symbol of which it is not known."""
    try:
        return a.ndim
    except Unsupported:
        return None


@tensor_method()
def topk(a: Tensor, k: Any, axis: int = -1, largest: bool = True) -> tuple[Tensor, Tensor]:
    """(values, numbers) of the k largest (or smallest) elements along an axis, in order."""
    if known_rank(a) == 0 and isinstance(k, int) and k in (0, 1):  # either way all of it, as torch has it
        return sort(a, axis)
    return sort(a, axis, largest, k)


@op
class CumSum(Op):
    """Sums of all elements up to each along an axis, or of those from it on (`reverse`). Integers and bools sum to int64."""

    axis: int
    reverse: bool = False

    def infer(self, x: Any) -> Any:
        check_axis("cumsum", self.axis, x.shape)
        return Spec(tuple(x.shape), str(x.dtype) if x.dtype in FLOATS else "int64")

    def compute(self, x: NDArray) -> Any:
        shape, dtype = self.infer(x)
        out = NDArray.empty(shape or (1,), dtype)
        call("cumsum", [out], x=with_axis(x).as_dtype(dtype), axis=self.axis % out.ndim, reverse=self.reverse)
        return out.reshape(shape)

    def decompose(self, x: Tensor) -> Tensor:
        axis, step = self.axis % max(len(x.shape), 1), 1
        total = cast(x, self.infer(x).dtype)
        if not x.shape:
            return total
        while step < x.shape[axis]:  # by doubling steps
            moved = (-step, step) if self.reverse else (step, -step)
            total = total + Pad((moved, *[(0, 0)] * (len(x.shape) - axis - 1)))(total)
            step *= 2
        return total

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        return CumSum(self.axis, not self.reverse)(out_grad)

    samples = samples_of(
        ({"axis": 1}, [(3, 5, 4)]),
        ({"axis": -1, "reverse": True}, [(2, 9)]),
        ({"axis": 0}, [Spec((5, 2), "int32")]),
        ({"axis": 0, "reverse": True}, [(6, 20)]),
    )


@tensor_method()
def cumsum(a: Tensor, axis: int) -> Tensor:
    """Sums of all elements up to each along `axis`; integers and bools sum to int64. As torch.cumsum."""
    return CumSum(axis)(a)

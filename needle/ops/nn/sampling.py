"""Grids to sample images at, sliding windows, bags of embeddings, distances, places in sorted numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np

from needle.autograd import Op, Spec, Tensor, op
from needle.backend_ndarray import NDArray, call
from needle.op import one_of
from needle.ops.common import broadcast_shape, check_axis, constant, gradient_of_decomposition, unbroadcast, with_axis
from needle.ops.families import samples_of
from needle.ops.math.comparison import eq, gt, le, lt, ne
from needle.ops.math.elementwise import cast, maximum, minimum, where
from needle.ops.math.logic import logical_or
from needle.ops.math.maths import absolute, sign, sqrt
from needle.ops.math.power import quotient_or_zero
from needle.ops.nn.norm import Positive
from needle.ops.reduce.basic import amax, summation
from needle.ops.shape.basic import broadcast_to, reshape, transpose, unsqueeze
from needle.ops.shape.gather import take
from needle.ops.shape.indexing import getitem
from needle.ops.shape.runtime_shape import moveaxis
from needle.ops.shape.scatter import index_add, scatter_reduce

__all__ = ["affine_grid", "cdist", "embedding_bag", "pdist", "searchsorted", "sliding_windows"]


@op
class AffineGrid(Op):
    """The grid (N, *sizes, axes) of `size` (N, C, *sizes) under theta (N, axes, axes + 1), for `grid_sample`."""

    size: tuple
    align_corners: bool = False

    def infer(self, theta: Any) -> Any:
        rank = len(self.size) - 2
        if rank not in (2, 3) or tuple(theta.shape) != (self.size[0], rank, rank + 1):
            raise ValueError(
                f"[affine_grid] theta expects shape (N, 2, 3) or (N, 3, 4) for size {self.size}, got {tuple(theta.shape)}."
            )
        return Spec((self.size[0], *self.size[2:], rank), str(theta.dtype))

    def decompose(self, theta: Tensor) -> Tensor:
        sizes = self.infer(theta).shape[1:-1]
        lines = [np.linspace(-1, 1, s) if s > 1 else np.zeros(s) for s in sizes]
        if not self.align_corners:
            lines = [line * (s - 1) / s for line, s in zip(lines, sizes, strict=True)]
        places = np.stack([*np.meshgrid(*lines, indexing="ij")[::-1], np.ones(sizes)], -1)
        base = constant(places.reshape(1, -1, len(sizes) + 1), theta)
        return reshape(base @ theta.transpose(), (self.size[0], *sizes, len(sizes)))

    samples = samples_of(
        ({"size": (2, 1, 3, 4)}, [(2, 2, 3)]), ({"size": (1, 1, 2, 3, 1), "align_corners": True}, [(1, 3, 4)])
    )


def affine_grid(theta: Tensor, size: Sequence[Any], align_corners: bool = False) -> Tensor:
    """torch.nn.functional.affine_grid."""
    return AffineGrid(tuple(size), align_corners)(theta)


@op
class SlidingWindows(Op):
    """Windows of `size` every `step` along an axis; their elements are the last axis of the result."""

    axis: int
    size: int
    step: int
    is_view = True

    def infer(self, x: Any) -> Any:
        axis = check_axis(self.label, self.axis, x.shape)
        if not 0 <= self.size <= x.shape[axis] or self.step < 1:
            raise ValueError(
                f"[{self.label}] expects a size up to {x.shape[axis]} and a step from 1 on, got {self.size} and {self.step}."
            )
        count = (x.shape[axis] - self.size) // self.step + 1
        return Spec((*x.shape[:axis], count, *x.shape[axis + 1 :], self.size), str(x.dtype))

    def compute(self, x: NDArray) -> Any:
        """Windows that share elements: a view of x."""
        axis = self.axis % x.ndim
        strides = [s * self.step if a == axis else s for a, s in enumerate(x.strides)]
        return x.strided(self.infer(x).shape, (*strides, x.strides[axis]))

    def decompose(self, x: Tensor) -> Tensor:
        axis = self.axis % len(x.shape)
        first = np.arange(self.infer(x).shape[axis])[:, None] * self.step
        return moveaxis(take(x, constant(first + np.arange(self.size), x, "int64"), axis), axis + 1, -1)

    gradient = gradient_of_decomposition

    samples = samples_of(({"axis": 1, "size": 3, "step": 2}, [(2, 8, 3)]), ({"axis": -1, "size": 4, "step": 1}, [(6,)]))


def sliding_windows(a: Tensor, axis: int, size: int, step: int) -> Tensor:
    """torch.Tensor.unfold: windows of `size` every `step` along an axis, as a last axis; a number has one, (size,)."""
    if not a.shape:
        return SlidingWindows(axis, size, step)(a.reshape((1,)))[0]
    return SlidingWindows(axis, size, step)(a)


@op
class EmbeddingBag(Op):
    """Rows of a table (K, D) by indices (M,), together in bags that begin at `offsets` (B,), the first at 0: (B, D);
    an empty bag is 0.

    A fourth input has factors (M,) for "sum". last: the last offset is where the last bag ends. padding_idx: left out.
    """

    mode: str
    last: bool = False
    padding_idx: int | None = None
    checks = one_of(mode=("sum", "mean", "max"))

    def infer(self, indices: Any, weight: Any, offsets: Any, *factors: Any) -> Any:
        if len(indices.shape) != 1 or len(weight.shape) != 2 or len(offsets.shape) != 1:
            raise ValueError(
                f"[{self.label}] expects indices (M,), a weight (K, D) and offsets (B,), got {tuple(indices.shape)}, "
                f"{tuple(weight.shape)} and {tuple(offsets.shape)}."
            )
        if factors and self.mode != "sum":
            raise ValueError(f"[{self.label}] factors expect mode sum, got {self.mode}.")
        return Spec((offsets.shape[0] - self.last, weight.shape[1]), str(weight.dtype))

    def decompose(self, indices: Tensor, weight: Tensor, offsets: Tensor, *factors: Tensor) -> Tensor:
        bags, size = self.infer(indices, weight, offsets, *factors).shape
        place = constant(np.arange(indices.shape[0]), offsets)
        bag = searchsorted(offsets, place, right=True) - 1
        # Sums leave out what lies behind the end of the last bag; torch's maxima take it in.
        final = bags if self.last and self.mode != "max" else bags - 1
        bag = maximum(minimum(bag, constant(final, bag, "int64")), constant(0, bag, "int64"))
        rows = take(weight, indices, wrap=False)
        if factors:
            rows = rows * unsqueeze(factors[0], 1)
        counts: Any = broadcast_to(constant(1.0, weight), (indices.shape[0], 1))
        if self.padding_idx is not None:
            padding = eq(indices, self.padding_idx % weight.shape[0])
            bag = where(padding, bags, bag)  # a bag of its own
        wide = constant(np.zeros((bags + 1, size)), weight)
        if self.mode == "max":
            numbers = broadcast_to(unsqueeze(bag, 1), (indices.shape[0], size))
            return getitem(scatter_reduce(wide, 0, numbers, rows, "amax", False), slice(0, bags))
        total = getitem(index_add(wide, 0, bag, rows), slice(0, bags))
        if self.mode == "sum":
            return total
        held = getitem(index_add(constant(np.zeros((bags + 1, 1)), weight), 0, bag, counts), slice(0, bags))
        return total / maximum(held, constant(1.0, held))

    @classmethod
    def samples(cls) -> list:
        return [({"mode": m}, [Spec((6,), "int64"), (4, 3), Spec((1,), "int64")]) for m in ("sum", "mean")]


def embedding_bag(
    indices: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    mode: str = "mean",
    factors: Tensor | None = None,
    last: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """torch.nn.functional.embedding_bag of indices (M,) with offsets (B,)."""
    if offsets is not None:  # of bags that are none no index is one
        bad = logical_or(ne(offsets[:1], 0), gt(offsets[-1:], indices.shape[0]))
        indices = where(bad, -1, indices)
    given = () if factors is None else (factors,)
    return EmbeddingBag(mode, last, padding_idx)(indices, weight, offsets, *given)  # type: ignore[arg-type]


def p_norm(apart: Tensor, p: float) -> Tensor:
    """The norm of differences without a sign along the last axis; its gradient at zero is zero."""
    if not apart.shape[-1]:
        return summation(apart, -1)
    if p == 0:
        return summation(cast(lt(0.0 * apart, apart), apart.dtype), -1)
    if p == 1:
        return summation(apart, -1)
    if math.isinf(p):
        return amax(apart, -1)
    power = apart * apart if p == 2 else where(eq(apart, 0.0), 0.0, where(eq(apart, 0.0), 1.0, apart) ** p)
    total = summation(power, -1)
    none = eq(total, 0.0)
    safe = where(none, 1.0, total)
    return where(none, 0.0, sqrt(safe) if p == 2 else safe ** (1 / p))


@op
class CDist(Op):
    """Distances (..., P, R) between rows of a (..., P, M) and b (..., R, M) in the p-norm; the gradient at distance 0 is 0."""

    p: float = 2.0

    def infer(self, a: Any, b: Any) -> Any:
        if len(a.shape) < 2 or len(b.shape) < 2 or a.shape[-1] != b.shape[-1] or self.p < 0:
            raise ValueError(
                f"[cdist] expects (..., P, M), (..., R, M) and p of at least 0, got {tuple(a.shape)}, {tuple(b.shape)} and "
                f"{self.p}."
            )
        lead = broadcast_shape("cdist", tuple(a.shape[:-2]), tuple(b.shape[:-2]))
        return Spec((*lead, a.shape[-2], b.shape[-2]), str(a.dtype))

    def compute(self, a: NDArray, b: NDArray) -> Any:
        shape, dtype = self.infer(a, b)
        lead = shape[:-2]
        wide = [x.broadcast_to((*lead, *x.shape[-2:])) for x in (a, b)]
        rows = [x.reshape((math.prod(lead), *x.shape[-2:])) for x in wide]
        out = NDArray.empty((math.prod(lead), *shape[-2:]), dtype)
        call("cdist", [out], a=rows[0], b=rows[1], p=float(self.p))
        return out.reshape(shape)

    def decompose(self, a: Tensor, b: Tensor) -> Tensor:
        self.infer(a, b)
        return p_norm(absolute(unsqueeze(a, -2) - unsqueeze(b, -3)), self.p)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        if self.p not in CDistGrad.orders:
            return gradient_of_decomposition(self, out_grad, node)
        a, b = node.inputs
        wide = [broadcast_to(x, (*node.shape[:-2], *x.shape[-2:])) for x in (a, b)]
        of_a = CDistGrad(self.p)(*wide, node, out_grad)
        of_b = CDistGrad(self.p)(*wide[::-1], transpose(node, (-2, -1)), transpose(out_grad, (-2, -1)))
        return unbroadcast(of_a, a.shape), unbroadcast(of_b, b.shape)

    samples = samples_of(
        ({}, [(2, 4, 3), (5, 3)]),
        ({"p": 0.0}, [(4, 3), (5, 3)]),
        ({"p": 1.0}, [(4, 3), (5, 3)]),
        ({"p": 3.0}, [(4, 3), (5, 3)]),
    )


@op
class CDistGrad(Op):
    """The gradient of a (*, P, M) from b (*, R, M), the distances (*, P, R) in the 1- or 2-norm and their gradient."""

    p: float
    orders: ClassVar[tuple[float, ...]] = (1, 2)

    def infer(self, a: Any, b: Any, y: Any, g: Any) -> Any:
        if self.p not in self.orders:
            raise ValueError(f"[{self.label}] p expects 1 or 2, got {self.p}.")
        want = (*a.shape[:-1], b.shape[-2])
        if (
            tuple(y.shape) != want
            or tuple(g.shape) != want
            or (*b.shape[:-2], b.shape[-1]) != (*a.shape[:-2], a.shape[-1])
        ):
            raise ValueError(
                f"[{self.label}] expects distances and a gradient of shape {want}, got {tuple(y.shape)} and {tuple(g.shape)}."
            )
        return Spec(tuple(a.shape), str(a.dtype))

    def compute(self, a: NDArray, b: NDArray, y: NDArray, g: NDArray) -> Any:
        rows = [x.reshape((math.prod(x.shape[:-2]), *x.shape[-2:])) for x in (a, b, y, g)]
        out = NDArray.empty(rows[0].shape, a.dtype)
        call("cdist_grad", [out], **dict(zip(("a", "b", "y", "dy"), rows, strict=True)), p=float(self.p))
        return out.reshape(a.shape)

    def decompose(self, a: Tensor, b: Tensor, y: Tensor, g: Tensor) -> Tensor:
        d = unsqueeze(a, -2) - unsqueeze(b, -3)
        if self.p == 1:
            return summation(unsqueeze(g, -1) * sign(d), -2)
        return summation(unsqueeze(quotient_or_zero(g, y), -1) * d, -2)

    gradient = gradient_of_decomposition

    samples = samples_of(
        ({"p": 2.0}, [(2, 4, 3), (2, 5, 3), Positive((2, 4, 5)), (2, 4, 5)]),
        ({"p": 1.0}, [(4, 70), (5, 70), Positive((4, 5)), (4, 5)]),
    )


def cdist(a: Tensor, b: Tensor, p: float = 2.0) -> Tensor:
    """torch.cdist, by differences."""
    return CDist(p)(a, b)


@op
class PDist(Op):
    """The p-norms of differences between every two rows of (N, M), in the order of the upper triangle: (N (N - 1) / 2,)."""

    p: float = 2.0

    def infer(self, a: Any) -> Any:
        if len(a.shape) != 2 or self.p < 0:
            raise ValueError(f"[pdist] expects (N, M) and p of at least 0, got {tuple(a.shape)} and {self.p}.")
        return Spec((a.shape[0] * max(a.shape[0] - 1, 0) // 2,), str(a.dtype))

    def decompose(self, a: Tensor) -> Tensor:
        self.infer(a)
        first, second = (take(a, constant(n, a, "int64")) for n in np.triu_indices(a.shape[0], 1))
        return p_norm(absolute(first - second), self.p)

    samples = samples_of(({}, [(5, 3)]), ({"p": 3.0}, [(4, 2)]))


def pdist(a: Tensor, p: float = 2.0) -> Tensor:
    """torch.nn.functional.pdist."""
    return PDist(p)(a)


@op
class SearchSorted(Op):
    """Where values (..., M) would stand in `numbers` (N,) or (..., N), sorted: before equal ones, or `right` of them. int64."""

    right: bool = False

    def infer(self, numbers: Any, values: Any) -> Any:
        if len(numbers.shape) != 1 and tuple(numbers.shape[:-1]) != tuple(values.shape[:-1]):
            raise ValueError(
                f"[searchsorted] expects numbers (N,) or with the first axes of values {tuple(values.shape)}, got "
                f"{tuple(numbers.shape)}."
            )
        return Spec(tuple(values.shape), "int64")

    def compute(self, numbers: NDArray, values: NDArray) -> Any:
        shape, dtype = self.infer(numbers, values)
        both = np.result_type(numbers.dtype, values.dtype).name
        rows, wanted = (with_axis(a).as_dtype("int32" if both == "bool" else both) for a in (numbers, values))
        out = NDArray.empty(shape or (1,), dtype)
        call(
            "searchsorted",
            [out],
            numbers=rows.broadcast_to((*out.shape[:-1], rows.shape[-1])),
            values=wanted,
            right=self.right,
        )
        return out.reshape(shape)

    def decompose(self, numbers: Tensor, values: Tensor) -> Tensor:
        self.infer(numbers, values)
        rows = numbers if len(numbers.shape) == 1 else unsqueeze(numbers, -2)
        compare: Callable = le if self.right else lt
        wanted = unsqueeze(values, -1)
        before = logical_or(compare(rows, wanted), ne(wanted, wanted))  # a NaN stands behind all
        return summation(cast(before, "int64"), -1)

    samples = samples_of(({}, [(1,), (2, 3)]), ({"right": True}, [(2, 1), (2, 3)]))  # sorted, whatever is drawn


def searchsorted(numbers: Tensor, values: Tensor, right: bool = False) -> Tensor:
    """torch.searchsorted; devices without the kernel compare with all."""
    return SearchSorted(right)(numbers, values)

"""Rules of order statistics, integrals along an axis, and sums without NaN."""

from __future__ import annotations

from typing import Any

import torch

from needle import ops
from needle.autograd import Tensor, Unsupported
from needle.backend_ndarray import FLOATS
from needle.ops.reduce.sorting import known_rank

from .arithmetic import cast
from .reductions import Ordered, axes, cast_whole, diff
from .registry import rule
from .shapes import at

T = torch.Tensor


@rule(torch.median, T.median)
def median(input: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    found = ops.median(input, dim, keepdim)
    return found if dim is None else Ordered(*found)


@rule(torch.kthvalue, T.kthvalue)
def kthvalue(input: Any, k: int, dim: int = -1, keepdim: bool = False) -> Any:
    return Ordered(*ops.kthvalue(input, k, dim, keepdim))


@rule(torch.msort, T.msort)
def msort(input: Any) -> Any:
    return ops.sort(input, 0)[0]


def areas(y: Any, x: Any, dx: Any, dim: int) -> Any:
    """Twice those between neighbours along an axis, at points x (L,) or of y's shape, or dx apart."""
    if y.spec is not None and y.spec.dtype not in FLOATS and y.spec.shape[dim] == 0:
        raise Unsupported(
            "whole numbers without any along the axis stay whole in torch, and become floats where there are some"
        )
    pairs = ops.getitem(y, at(dim, slice(1, None))) + ops.getitem(y, at(dim, slice(None, -1)))
    return pairs * (dx if x is None else apart(y, x, dim))


def apart(y: Any, x: Any, dim: int) -> Any:
    """The differences of points x along that axis of y."""
    rank = known_rank(y)
    if rank is None:
        if dim != -1:
            raise Unsupported("points x along another axis than the last need the number of axes; pass example=")
        return diff(x)
    axis = dim % rank - rank
    return diff(x, dim=axis) if x.ndim > 1 else ops.reshape(diff(x), (-1, *[1] * (-1 - axis)))


@rule(torch.trapezoid, torch.trapz)
def trapezoid(y: Any, x: Any = None, *, dx: Any = 1.0, dim: int = -1) -> Any:
    return ops.summation(areas(y, x, dx, dim), dim) * 0.5


@rule(torch.cumulative_trapezoid)
def cumulative_trapezoid(y: Any, x: Any = None, *, dx: Any = 1.0, dim: int = -1) -> Any:
    return ops.cumsum(areas(y, x, dx, dim), dim) * 0.5


def slopes_along(f: Any, place: Any, dim: int, edge_order: int) -> Any:
    """Derivatives along an axis by three neighbours, of points that are a number apart or at a tensor `place` (L,)."""
    pick = lambda t, begin, end: ops.getitem(t, at(dim, slice(begin, end)))  # noqa: E731
    if isinstance(place, Tensor):
        steps = apart(f, place, dim)
        before, behind = pick(steps, None, -1), pick(steps, 1, None)
    else:
        steps = before = behind = place
    left, middle, right = pick(f, None, -2), pick(f, 1, -1), pick(f, 2, None)
    inner = (middle - left) * (behind / (before * (before + behind))) + (right - middle) * (
        before / (behind * (before + behind))
    )
    slopes = (pick(f, 1, None) - pick(f, None, -1)) / steps
    first, last = pick(slopes, None, 1), pick(slopes, -1, None)
    if edge_order == 2:  # the line through the slopes of two neighbours, at their end
        first = first * 2 - pick(inner, None, 1)
        last = last * 2 - pick(inner, -1, None)
    return ops.concat([first, inner, last], dim)


@rule(torch.gradient)
def gradient(input: Any, *, spacing: Any = None, dim: Any = None, edge_order: int = 1) -> Any:
    rank = known_rank(input)
    if dim is None and rank is None:
        raise Unsupported("derivatives along all axes need their number; pass example=")
    dims = list(range(rank)) if dim is None else [dim] if isinstance(dim, int) else list(dim)  # type: ignore[arg-type]
    f = input if input.dtype in FLOATS else ops.cast(input, "float32")
    dims = dims if rank is None else [d % rank - rank for d in dims]
    places = list(spacing) if isinstance(spacing, tuple | list) else [1 if spacing is None else spacing] * len(dims)
    return tuple(slopes_along(f, place, d, edge_order) for place, d in zip(places, dims, strict=True))


@rule(torch.isin)
def isin(elements: Any, test_elements: Any, *, assume_unique: bool = False, invert: bool = False) -> Any:
    if not isinstance(elements, Tensor):
        raise Unsupported("elements expects a tensor, got a number")
    if isinstance(test_elements, Tensor):
        equal = ops.some(ops.eq(ops.unsqueeze(elements, -1), ops.flatten(test_elements)), -1)
    else:
        equal = ops.eq(elements, test_elements)
    return ops.logical_not(equal) if invert else equal


@rule(torch.nansum, T.nansum)
def nansum(input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    if dtype is torch.bool:
        raise Unsupported("dtype expects numbers, got torch.bool")
    return cast_whole(ops.nansum(cast(input, dtype), axes(dim), keepdim), dtype)


@rule(torch.nanmean, T.nanmean)
def nanmean(input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    return ops.nanmean(cast(input, dtype), axes(dim), keepdim)


@rule(torch.dist, T.dist)
def dist(input: Any, other: Any, p: float = 2.0) -> Any:
    return ops.vector_norm(input - other, float(p), None, False)

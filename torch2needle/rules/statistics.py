"""Rules of quantiles, covariances and histograms."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from needle import ops
from needle.autograd import Tensor, Unsupported
from needle.backend_ndarray import FLOATS
from needle.ops.reduce.sorting import known_rank

from .ordering import median
from .reductions import Ordered
from .registry import rule

T = torch.Tensor


# -- quantiles -----------------------------------------------------------------------------------------------------------


def rows_of(input: Any, dim: int | None) -> tuple[Any, int | None]:
    """The tensor with the axis behind the others, and its rank; of all elements without one."""
    rank = known_rank(input)
    if rank is None:
        raise Unsupported("quantiles need the number of axes; pass example=")
    if dim is None or not rank:
        return ops.flatten(input), rank
    return ops.moveaxis(input, dim, -1), rank


def numbers_of(x: Any) -> Any:
    """How many of the last axis are numbers, in x's dtype and with that axis of size 1."""
    return ops.summation(ops.cast_like(ops.logical_not(ops.isnan(x)), x), -1, True)


def at_ranks(x: Any, ranks: Any, interpolation: str) -> Any:
    """Values (..., Q) between those of sorted x (..., N) at ranks (..., Q)."""
    below, above = ops.floor(ranks), ops.ceil(ranks)
    if interpolation in ("lower", "higher", "nearest"):
        rank = {"lower": below, "higher": above, "nearest": ops.round(ranks)}[interpolation]
        return ops.gather(x, -1, ops.cast(rank, "int64"), wrap=False)
    low, high = (ops.gather(x, -1, ops.cast(r, "int64"), wrap=False) for r in (below, above))
    apart = high - low
    if interpolation == "midpoint":
        return high - apart * 0.5
    weight = ranks - below
    return ops.where(ops.lt(weight, 0.5), low + apart * weight, high - apart * (1 - weight))


def quantiles(input: Any, q: Any, dim: int | None, keepdim: bool, interpolation: str, skip: bool) -> Any:
    if interpolation not in ("linear", "lower", "higher", "midpoint", "nearest"):
        raise Unsupported(f"interpolation expects linear, lower, higher, midpoint or nearest, got {interpolation}")
    if not isinstance(q, Tensor) and not 0 <= q <= 1:
        raise Unsupported(f"q expects numbers within 0 and 1, got {q}")
    x, rank = rows_of(input, dim)
    several = isinstance(q, Tensor) and q.ndim == 1
    ordered = ops.sort(x, -1)[0]
    count = numbers_of(x)
    every = ops.summation(ops.full_like(x, 1), -1, True)
    wanted = ops.reshape(q, (-1,)) if isinstance(q, Tensor) else q
    last = (every - 1) * wanted
    ranks = ops.clamp_min(count - 1, 0.0) * wanted if skip else ops.where(ops.lt(count, every), every - 1, last)
    found = at_ranks(ordered, ranks, interpolation)  # (..., Q)
    if several:
        found = ops.moveaxis(found, -1, 0)
    elif not keepdim or dim is None:
        found = ops.squeeze(found, -1)
    if not rank and not several:
        return ops.reshape(found, ())
    if not keepdim or not rank:
        return found
    if dim is None:
        return ops.reshape(found, (-1, *[1] * rank) if several else (1,) * rank)
    return ops.unsqueeze(found, dim % rank + 1) if several else ops.moveaxis(found, -1, dim)


@rule(torch.quantile, T.quantile)
def quantile(
    input: Any, q: Any, dim: int | None = None, keepdim: bool = False, *, interpolation: str = "linear"
) -> Any:
    return quantiles(input, q, dim, keepdim, interpolation, False)


@rule(torch.nanquantile, T.nanquantile)
def nanquantile(
    input: Any, q: Any, dim: int | None = None, keepdim: bool = False, *, interpolation: str = "linear"
) -> Any:
    return quantiles(input, q, dim, keepdim, interpolation, True)


@rule(torch.nanmedian, T.nanmedian)
def nanmedian(input: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    """The lower one of two in the middle; NaN where there is nothing else."""
    if input.dtype not in FLOATS:
        return median(input, dim, keepdim)
    whole = dim is None or not known_rank(input)
    x, axis = (ops.flatten(input), 0) if dim is None or whole else (input, dim)
    values, numbers = ops.sort(x, axis)
    count = ops.summation(ops.cast(ops.logical_not(ops.isnan(x)), "int64"), axis, True)
    place = ops.maximum(ops.floor_divide(count - 1, 2), 0)
    found = Ordered(ops.gather(values, axis, place), ops.gather(numbers, axis, place))
    if not keepdim or whole:
        found = Ordered(*(ops.squeeze(t, axis) for t in found))
    return found[0] if dim is None else found


# -- covariances ---------------------------------------------------------------------------------------------------------


@rule(torch.cov, T.cov)
def cov(input: Any, *, correction: int = 1, fweights: Any = None, aweights: Any = None) -> Any:
    return ops.squeeze(covariances(input, correction, fweights, aweights))


def covariances(input: Any, correction: int = 1, fweights: Any = None, aweights: Any = None) -> Any:
    """Of each variable (a row, or all of a vector) with each, columns are observations."""
    spec = getattr(input, "spec", None)
    if spec is None:
        raise Unsupported("covariances need the number of axes; pass example=")
    if spec.ndim > 2:
        raise Unsupported(f"input expects at most 2 axes, got shape {tuple(spec.shape)}")
    x = input if spec.dtype in FLOATS else ops.cast(input, "float32")
    x = x if spec.ndim == 2 else ops.reshape(x, (1, -1))
    given = [w for w in (fweights, aweights) if w is not None]
    weights = (
        ops.full_like(ops.summation(x, 0), 1) if not given else given[0] if len(given) == 1 else given[0] * given[1]
    )
    total = ops.summation(weights)
    lost = total * 0 + correction
    if aweights is not None and correction:
        lost = ops.summation(weights * aweights) / total * correction
    apart = x - ops.summation(x * weights, 1, True) / total
    return ops.matmul(apart, ops.transpose(apart * weights)) / ops.clamp_min((total - lost) * 1.0, 0.0)


@rule(torch.corrcoef, T.corrcoef)
def corrcoef(input: Any) -> Any:
    c = covariances(input)
    if input.ndim < 2:
        return ops.squeeze(c / c)
    deviation = ops.sqrt(ops.diagonal(c))
    return ops.squeeze(ops.clamp(c / ops.unsqueeze(deviation, 1) / ops.unsqueeze(deviation, 0), -1.0, 1.0))


# -- histograms ----------------------------------------------------------------------------------------------------------


@rule(torch.histc, T.histc)
def histc(input: Any, bins: int = 100, min: Any = 0, max: Any = 0) -> Any:
    """How many elements lie in each of equal bins, the last of which has both ends; without a range, in that of the elements."""
    x = ops.stop_gradient(ops.flatten(input))
    low, high = (ops.full_like(x, float(v), (1,)) for v in (min, max))
    if min == max:
        low, high = ops.amin(x, 0, keepdims=True), ops.amax(x, 0, keepdims=True)
        one = ops.eq(low, high)
        low, high = ops.where(one, low - 1.0, low), ops.where(one, high + 1.0, high)
    place = ops.floor((x - low) * float(bins) / (high - low))
    inside = ops.logical_and(ops.ge(x, low), ops.le(x, high))
    number = ops.where(inside, ops.minimum(place, float(bins - 1)), float(bins))  # others in a bin that is cut off
    counts = ops.index_add(ops.full_like(x, 0.0, (bins + 1,)), 0, ops.cast(number, "int64"), ops.full_like(x, 1.0))
    return ops.getitem(counts, slice(0, bins))


class Histogram(NamedTuple):
    """torch.histogram."""

    hist: Any
    bin_edges: Any


@rule(torch.histogram, T.histogram)
def histogram(
    input: Any, bins: Any = 100, *, range: Any = None, weight: Any = None, density: bool = False
) -> Histogram:
    """Sums of weights between edges, of which the last belongs to the last bin."""
    x = ops.stop_gradient(ops.flatten(input))
    if isinstance(bins, int):
        low, high = (ops.full_like(x, v, ()) for v in range) if range else (ops.amin(x, 0), ops.amax(x, 0))
        one = ops.eq(low, high)
        low, high = ops.where(one, low - 0.5, low), ops.where(one, high + 0.5, high)
        upwards = ops.arange_like(x, 0, bins + 1)
        step = (high - low) / float(bins)
        edges = ops.where(ops.lt(upwards, (bins + 1) // 2), low + step * upwards, high - step * (bins - upwards))
    else:
        edges = ops.stop_gradient(bins)
    number = ops.searchsorted(edges, x, True) - ops.cast(ops.eq(x, edges[-1]), "int64")  # the last bin has both ends
    each = ops.full_like(x, 1.0) if weight is None else ops.stop_gradient(ops.flatten(weight))
    sums = ops.index_add(ops.full_like(x, 0.0, (edges.shape[0] + 1,)), 0, number, each)[1:-1]  # without what is outside
    if density:
        sums = sums / (ops.summation(sums) * (edges[1:] - edges[:-1]))
    return Histogram(sums, edges)

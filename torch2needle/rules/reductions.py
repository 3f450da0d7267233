"""Rules of reductions, order and running sums. An absent dim means all of them."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from needle import ops
from needle.autograd import Tensor, Unsupported
from torch2needle.registry import rule
from torch2needle.rules.arithmetic import cast

T = torch.Tensor


class Extremes(NamedTuple):
    """The result of torch.aminmax."""

    min: Any
    max: Any


class Ordered(NamedTuple):
    """What torch.max and torch.sort return along a dim."""

    values: Any
    indices: Any


def axes(dim: Any) -> Any:
    """torch's dim as axes: none of them means all."""
    return None if isinstance(dim, tuple | list) and not dim else dim


def cast_whole(total: Any, dtype: Any) -> Any:
    """A total, which of bools and integers is int64, in the dtype that the call asks for."""
    return (
        total if dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point) else cast(total, dtype)
    )


@rule(torch.mean, T.mean)
def mean(input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    return ops.mean(cast(input, dtype), axes(dim), keepdims=keepdim)


@rule(torch.sum, T.sum)
def sum(input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    return cast_whole(ops.summation(cast(input, dtype), axes(dim), keepdims=keepdim), dtype)


@rule(torch.prod, T.prod)
def prod(input: Any, dim: int | None = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    return cast_whole(ops.prod(cast(input, dtype), dim, keepdim), dtype)


@rule(torch.amax, T.amax)
def amax(input: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return ops.amax(input, axes(dim), keepdim)


@rule(torch.amin, T.amin)
def amin(input: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return ops.amin(input, axes(dim), keepdim)


@rule(torch.max, T.max)
def max(input: Any, dim: Any = None, keepdim: bool = False, *, other: Any = None) -> Any:
    other = dim if isinstance(dim, Tensor) else other
    if other is not None:
        return ops.maximum(input, other)
    return ops.amax(input) if dim is None else Ordered(*ops.max_along(input, dim, keepdim))


@rule(torch.min, T.min)
def min(input: Any, dim: Any = None, keepdim: bool = False, *, other: Any = None) -> Any:
    other = dim if isinstance(dim, Tensor) else other
    if other is not None:
        return ops.minimum(input, other)
    return ops.amin(input) if dim is None else Ordered(*ops.min_along(input, dim, keepdim))


@rule(torch.aminmax, T.aminmax)
def aminmax(input: Any, *, dim: Any = None, keepdim: bool = False) -> Any:
    return Extremes(ops.amin(input, dim, keepdim), ops.amax(input, dim, keepdim))


@rule(torch.argmax, T.argmax)
def argmax(input: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    return whole_argument(ops.argmax, input, dim, keepdim)


@rule(torch.argmin, T.argmin)
def argmin(input: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    return whole_argument(ops.argmin, input, dim, keepdim)


def whole_argument(f: Any, input: Any, dim: int | None, keepdim: bool) -> Any:
    if dim is None and keepdim:
        raise Unsupported("keepdim=True without a dim is not supported")
    return f(input, dim, keepdim)


def correction_of(unbiased: bool | None, correction: Any) -> Any:
    return correction if unbiased is None else int(unbiased)


def spread_arguments(dim: Any, unbiased: Any, correction: Any) -> tuple[Any, Any]:
    """torch takes var(dim, unbiased) as well as var(unbiased)."""
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    return dim, correction_of(unbiased, 1 if correction is None else correction)


@rule(torch.var, T.var)
def var(
    input: Any, dim: Any = None, unbiased: bool | None = None, keepdim: bool = False, *, correction: Any = None
) -> Any:
    dim, correction = spread_arguments(dim, unbiased, correction)
    return ops.variance(input, axes(dim), correction, keepdim)


@rule(torch.std, T.std)
def std(
    input: Any, dim: Any = None, unbiased: bool | None = None, keepdim: bool = False, *, correction: Any = None
) -> Any:
    dim, correction = spread_arguments(dim, unbiased, correction)
    return ops.std(input, axes(dim), correction, keepdim)


@rule(torch.var_mean)
def var_mean(
    input: Any, dim: Any = None, unbiased: bool | None = None, keepdim: bool = False, *, correction: Any = None
) -> Any:
    dim, correction = spread_arguments(dim, unbiased, correction)
    return ops.variance(input, axes(dim), correction, keepdim), ops.mean(input, axes(dim), keepdim)


@rule(torch.std_mean)
def std_mean(
    input: Any, dim: Any = None, unbiased: bool | None = None, keepdim: bool = False, *, correction: Any = None
) -> Any:
    dim, correction = spread_arguments(dim, unbiased, correction)
    return ops.std(input, axes(dim), correction, keepdim), ops.mean(input, axes(dim), keepdim)


@rule(torch.logsumexp, T.logsumexp, torch.special.logsumexp)
def logsumexp(input: Any, dim: Any, keepdim: bool = False) -> Any:
    return ops.logsumexp(input, axes(dim), keepdim)


@rule(torch.all, T.all)
def all(input: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return ops.every(input, dim, keepdim)


@rule(torch.any, T.any)
def any(input: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return ops.some(input, dim, keepdim)


@rule(torch.count_nonzero, T.count_nonzero)
def count_nonzero(input: Any, dim: Any = None) -> Any:
    return ops.summation(ops.ne(input, 0), axes(dim))


@rule(torch.cumsum, T.cumsum)
def cumsum(input: Any, dim: int, *, dtype: Any = None) -> Any:
    return cast_whole(ops.cumsum(cast(input, dtype), dim), dtype)


@rule(torch.sort, T.sort)
def sort(input: Any, dim: int = -1, descending: bool = False, stable: bool = False) -> Any:
    return Ordered(*ops.sort(input, dim, descending))


@rule(torch.argsort, T.argsort)
def argsort(input: Any, dim: int = -1, descending: bool = False, stable: bool = False) -> Any:
    return ops.argsort(input, dim, descending)


@rule(torch.topk, T.topk)
def topk(input: Any, k: Any, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    return Ordered(*ops.topk(input, k, dim, largest))


# -- norms ---------------------------------------------------------------------------------------------------------------


@rule(torch.norm, T.norm)
def norm(input: Any, p: Any = "fro", dim: Any = None, keepdim: bool = False, out: Any = None, dtype: Any = None) -> Any:
    if p == "nuc":
        raise Unsupported("p expects a number or fro, got nuc")
    return ops.vector_norm(cast(input, dtype), 2.0 if p in ("fro", None) else float(p), axes(dim), keepdim)


@rule(torch.linalg.vector_norm)
def vector_norm(input: Any, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    return ops.vector_norm(cast(input, dtype), float(ord), axes(dim), keepdim)


@rule(torch.linalg.norm)
def linalg_norm(input: Any, ord: Any = None, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    vector = ord is None or isinstance(dim, int) or (dim is not None and len(dim) == 1)
    if not vector and (dim is not None or input.ndim != 1) and ord != "fro":
        raise Unsupported(f"ord expects None for matrices, got {ord}")
    return ops.vector_norm(cast(input, dtype), 2.0 if ord in (None, "fro") else float(ord), dim, keepdim)


@rule(F.cosine_similarity, torch.cosine_similarity)
def cosine_similarity(x1: Any, x2: Any, dim: int = 1, eps: float = 1e-8) -> Any:
    shape = x1 * x2
    x1, x2 = ops.broadcast_like(x1, shape), ops.broadcast_like(x2, shape)
    lengths = [ops.clamp_min(ops.vector_norm(x, 2.0, dim, True), eps) for x in (x1, x2)]
    return ops.summation((x1 / lengths[0]) * (x2 / lengths[1]), dim)


@rule(F.pairwise_distance, torch.pairwise_distance)
def pairwise_distance(x1: Any, x2: Any, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False) -> Any:
    return ops.vector_norm(x1 - x2 + eps, math.inf if p == math.inf else float(p), -1, keepdim)

"""Rules of reductions, order and running sums. An absent dim means all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from needle import ops
from needle.autograd import Tensor, Unsupported

from .arithmetic import cast
from .indexing import is_mask
from .registry import rule
from .shapes import at
from .tables import functions

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


def whole_argument(f: Callable) -> Callable:
    def convert(input: Any, dim: int | None, keepdim: bool) -> Any:
        if dim is None and keepdim:
            raise Unsupported("keepdim=True without a dim is not supported")
        return f(input, dim, keepdim)

    return convert


def over(f: Callable) -> Callable:
    """f(input, axes, ...)."""
    return lambda input, dim, *rest: f(input, axes(dim), *rest)


functions(
    "input, dim=None, keepdim=False",
    {
        (torch.amax, T.amax): over(ops.amax),
        (torch.amin, T.amin): over(ops.amin),
        (torch.all, T.all): ops.every,
        (torch.any, T.any): ops.some,
        (torch.argmax, T.argmax): whole_argument(ops.argmax),
        (torch.argmin, T.argmin): whole_argument(ops.argmin),
    },
)
functions("input, dim", {(torch.logcumsumexp, T.logcumsumexp): ops.logcumsumexp})
functions("input, dim, keepdim=False", {(torch.logsumexp, T.logsumexp, torch.special.logsumexp): over(ops.logsumexp)})
functions(
    "input, dim=None", {(torch.count_nonzero, T.count_nonzero): over(lambda x, axes: ops.summation(ops.ne(x, 0), axes))}
)


def extreme(elementwise: Callable, total: Callable, ordered: Callable) -> Callable:
    """Of two tensors, of one over all, or along a dim."""

    def convert(input: Any, dim: Any, keepdim: bool, other: Any) -> Any:
        other = dim if isinstance(dim, Tensor) else other
        if other is not None:
            return elementwise(input, other)
        return total(input) if dim is None else Ordered(*ordered(input, dim, keepdim))

    return convert


functions(
    "input, dim=None, keepdim=False, *, other=None",
    {
        (torch.max, T.max): extreme(ops.maximum, ops.amax, ops.max_along),
        (torch.min, T.min): extreme(ops.minimum, ops.amin, ops.min_along),
    },
)


@rule(torch.aminmax, T.aminmax)
def aminmax(input: Any, *, dim: Any = None, keepdim: bool = False) -> Any:
    return Extremes(ops.amin(input, dim, keepdim), ops.amax(input, dim, keepdim))


def spread(f: Callable) -> Callable:
    """torch takes f(dim, unbiased) as well as f(unbiased)."""

    def convert(input: Any, dim: Any, unbiased: bool | None, keepdim: bool, correction: Any) -> Any:
        if isinstance(dim, bool):
            dim, unbiased = None, dim
        if unbiased is not None:
            correction = int(unbiased)
        return f(input, axes(dim), 1 if correction is None else correction, keepdim)

    return convert


def beside_mean(f: Callable) -> Callable:
    return lambda input, axes, correction, keepdim: (
        f(input, axes, correction, keepdim),
        ops.mean(input, axes, keepdim),
    )


functions(
    "input, dim=None, unbiased=None, keepdim=False, *, correction=None",
    {
        (torch.var, T.var): spread(ops.variance),
        (torch.std, T.std): spread(ops.std),
        (torch.var_mean,): spread(beside_mean(ops.variance)),
        (torch.std_mean,): spread(beside_mean(ops.std)),
    },
)


@rule(torch.cumsum, T.cumsum, T.cumsum_)
def cumsum(input: Any, dim: int, *, dtype: Any = None) -> Any:
    return cast_whole(ops.cumsum(cast(input, dtype), dim), dtype)


@rule(torch.cumprod, T.cumprod, T.cumprod_)
def cumprod(input: Any, dim: int, *, dtype: Any = None) -> Any:
    return cast_whole(ops.cumprod(cast(input, dtype), dim), dtype)


@rule(torch.diff, T.diff)
def diff(input: Any, n: int = 1, dim: int = -1, prepend: Any = None, append: Any = None) -> Any:
    parts = [t for t in (prepend, input, append) if t is not None]
    x = parts[0] if len(parts) == 1 else ops.concat(parts, dim)
    before, behind = at(dim, slice(None, -1)), at(dim, slice(1, None))
    for _ in range(n):
        first, second = ops.getitem(x, before), ops.getitem(x, behind)
        x = ops.ne(second, first) if is_mask(x) else second - first
    return x


def in_order(f: Callable) -> Callable:
    return lambda *given: Ordered(*f(*given))


functions(
    "input, dim=-1, descending=False, stable=False",
    {(torch.sort, T.sort): in_order(ops.sort), (torch.argsort, T.argsort): ops.argsort},
)
functions(
    "input, dim",
    {(torch.cummax, T.cummax): in_order(ops.cummax), (torch.cummin, T.cummin): in_order(ops.cummin)},
)
functions("input, k, dim=-1, largest=True, sorted=True", {(torch.topk, T.topk): in_order(ops.topk)})


# -- norms ---------------------------------------------------------------------------------------------------------------


@rule(torch.linalg.vector_norm)
def vector_norm(input: Any, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    return ops.vector_norm(cast(input, dtype), float(ord), axes(dim), keepdim)


functions("x1, x2, dim=1, eps=1e-8", {(F.cosine_similarity, torch.cosine_similarity): ops.cosine_similarity})
functions(
    "x1, x2, p=2.0, eps=1e-6, keepdim=False", {(F.pairwise_distance, torch.pairwise_distance): ops.pairwise_distance}
)

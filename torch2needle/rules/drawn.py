"""Rules of random numbers: drawn anew at every call from numpy's stream, so that they agree with torch in distribution only."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from needle import ops
from needle.autograd import Unsupported

from .arithmetic import dtype_name
from .registry import rule
from .shapes import varargs
from .tables import functions

T = torch.Tensor


def name_of(dtype: Any) -> str | None:
    return None if dtype is None else dtype_name(dtype)


def check(generator: Any) -> None:
    if generator is not None:
        raise Unsupported("generators of torch are not those of needle")


functions(
    "input, *, dtype=None, **_",
    {
        (torch.rand_like,): lambda x, dtype: ops.rand_like(x, None, name_of(dtype)),
        (torch.randn_like,): lambda x, dtype: ops.randn_like(x, None, name_of(dtype)),
    },
)
functions(
    "*size, generator=None, dtype=None, like, **_",
    {
        (torch.rand,): lambda size, generator, dtype, like: uniform(ops.rand_like, size, generator, dtype, like),
        (torch.randn,): lambda size, generator, dtype, like: uniform(ops.randn_like, size, generator, dtype, like),
    },
)


def uniform(draw: Any, size: Any, generator: Any, dtype: Any, like: Any) -> Any:
    check(generator)
    return draw(like, varargs(size), dtype_name(dtype or torch.get_default_dtype()))


@rule(torch.randint)
def randint(
    low: Any, high: Any, size: Any = None, *, generator: Any = None, dtype: Any = None, like: Any, **_: Any
) -> Any:
    check(generator)
    low, high, size = (0, low, high) if size is None else (low, high, size)
    return ops.randint_like(like, low, high, tuple(size), dtype_name(dtype or torch.int64))


@rule(torch.ops.aten.randint.default)
def aten_randint(high: Any, size: Any, *, dtype: Any = None, like: Any, **_: Any) -> Any:
    return ops.randint_like(like, 0, high, tuple(size), dtype_name(dtype or torch.int64))


@rule(torch.randperm)
def randperm(n: Any, *, generator: Any = None, dtype: Any = None, like: Any, **_: Any) -> Any:
    check(generator)
    return ops.randperm_like(like, n, dtype_name(dtype or torch.int64))


@rule(torch.bernoulli, T.bernoulli)
def bernoulli(input: Any, p: float | None = None, *, generator: Any = None) -> Any:
    check(generator)
    return ops.bernoulli(input if p is None else ops.full_like(input, p))


@rule(torch.multinomial, T.multinomial)
def multinomial(input: Any, num_samples: int, replacement: bool = False, *, generator: Any = None) -> Any:
    """Numbers of the last axis, each as likely as its weight is of them all; without replacement none twice."""
    check(generator)
    weights = ops.cast(input, "float64")
    if not replacement or num_samples == 1:
        exponential = -ops.log1p(-ops.rand_like(weights))
        return ops.sort(weights / ops.clamp_min(exponential, 1e-38), -1, descending=True, count=num_samples)[1]
    drawn = ops.rand_like(weights, (*input.shape[:-1], num_samples), "float64")
    total = ops.cumsum(weights, -1)
    last = ops.getitem(total, (Ellipsis, slice(-1, None)))
    return ops.searchsorted(total, drawn * last, True)


@rule(F.gumbel_softmax)
def gumbel_softmax(logits: Any, tau: float = 1, hard: bool = False, eps: float = 1e-10, dim: int = -1) -> Any:
    """Jang, Gu and Poole, arXiv 1611.01144; `hard` has the gradient of the soft numbers."""
    exponential = ops.clamp_min(-ops.log1p(-ops.rand_like(logits)), 1e-38)
    soft = ops.softmax((logits - ops.log(exponential)) / tau, dim)
    if not hard:
        return soft
    best = ops.argmax(soft, dim, True)
    one = ops.scatter(soft * 0, dim, best, 1.0)
    return one - ops.stop_gradient(soft) + soft

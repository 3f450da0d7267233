"""Rules of random numbers: drawn anew at every call from numpy's stream, so that they agree with torch in distribution only."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from needle import ops
from needle.autograd import Tensor, Unsupported
from needle.backend_ndarray import FLOATS

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
    "*numbers, size=None, generator=None, dtype=None, like, **_",
    {
        (torch.rand,): lambda numbers, size, *rest: uniform(ops.rand_like, varargs(numbers, size), *rest),
        (torch.randn,): lambda numbers, size, *rest: uniform(ops.randn_like, varargs(numbers, size), *rest),
    },
)


def uniform(draw: Any, size: Any, generator: Any, dtype: Any, like: Any) -> Any:
    check(generator)
    return draw(like, size, dtype_name(dtype or torch.get_default_dtype()))


@rule(torch.randint)
def randint(
    low: Any = 0, high: Any = None, size: Any = None, *, generator: Any = None, dtype: Any = None, like: Any, **_: Any
) -> Any:
    check(generator)
    if size is None:  # randint(high, size)
        high, size = None, high
    low, high = (0, low) if high is None else (low, high)
    return ops.randint_like(like, low, high, tuple(size), dtype_name(dtype or torch.int64))


@rule(torch.randint_like)
def randint_like(input: Any, low: Any, high: Any = None, *, dtype: Any = None, generator: Any = None, **_: Any) -> Any:
    check(generator)
    low, high = (0, low) if high is None else (low, high)
    drawn = ops.randint_like(input, low, high, input.shape, "int64")
    return ops.cast(drawn, name_of(dtype) or input.dtype)


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


def drawn(f: Any) -> Any:
    """f of a tensor to fill, its options and torch's generator, which there is none of."""

    def draw(input: Any, *options: Any) -> Any:
        check(options[-1])
        return f(input, *options[:-1])

    return draw


def exponential(x: Any, rate: Any = 1.0) -> Any:
    """Positive numbers of the shape and dtype of x."""
    return ops.clamp_min(-ops.log1p(-ops.rand_like(x)), 1e-38) / rate


def normal_like(x: Any, mean: Any, std: Any) -> Any:
    return ops.randn_like(x) * std + mean


def integers(x: Any, low: Any, high: Any, generator: Any) -> Any:
    """torch's random_(high), random_(low, high) and, up to what the dtype holds exactly, random_()."""
    check(generator)
    if high is None and low is None:
        bits = {"float16": 11, "bfloat16": 8, "float32": 24, "float64": 53, "bool": 1, "uint8": 8, "int32": 31}
        low, high = 0, 2 ** bits.get(x.dtype, 62) + (x.dtype in FLOATS)
    low, high = (0, low) if high is None else (low or 0, high)
    return ops.cast(ops.randint_like(x, low, high, x.shape, "int64"), x.dtype)


functions("input, mean=0.0, std=1.0, *, generator=None", {(T.normal_,): drawn(normal_like)})
functions(
    "input, mean=1.0, std=2.0, *, generator=None",
    {(T.log_normal_,): drawn(lambda x, mean, std: ops.exp(normal_like(x, mean, std)))},
)
functions(
    "input, from_=0.0, to=1.0, *, generator=None",
    {(T.uniform_,): drawn(lambda x, low, high: ops.rand_like(x) * (high - low) + low)},
)
functions("input, lambd=1.0, *, generator=None", {(T.exponential_,): drawn(exponential)})
functions(
    "input, median=0.0, sigma=1.0, *, generator=None",
    {(T.cauchy_,): drawn(lambda x, median, sigma: ops.tan((ops.rand_like(x) - 0.5) * math.pi) * sigma + median)},
)
functions("input, from_=None, to=None, *, generator=None", {(T.random_,): integers})


@rule(T.geometric_)
def geometric(input: Any, p: float, *, generator: Any = None) -> Any:
    check(generator)
    wide = ops.rand_like(input, None, "float64")
    return ops.cast(ops.clamp_min(ops.ceil(ops.log1p(-wide) / math.log1p(-p)), 1.0), input.dtype)


@rule(T.bernoulli_)
def bernoulli_(input: Any, p: Any = 0.5, *, generator: Any = None) -> Any:
    check(generator)
    chance = (
        ops.broadcast_to(p, tuple(input.shape)) if isinstance(p, Tensor) else ops.full_like(input, p, dtype="float32")
    )
    return ops.cast(ops.bernoulli(chance), input.dtype)


@rule(torch.normal)
def normal(
    mean: Any, std: Any = 1.0, size: Any = None, *, generator: Any = None, dtype: Any = None, like: Any = None, **_: Any
) -> Any:
    """Of tensors, of a tensor and a number, or of two numbers and a size."""
    check(generator)
    if size is not None:
        return normal_like(ops.rand_like(like, tuple(size), dtype_name(dtype or torch.get_default_dtype())), mean, std)
    mean, std = (ops.stop_gradient(v) if isinstance(v, Tensor) else v for v in (mean, std))
    given, other = (mean, std) if isinstance(mean, Tensor) else (std, mean)
    return ops.randn_like(ops.ge(given, other), None, given.dtype) * std + mean  # of the shape that both have


@rule(torch.multinomial, T.multinomial)
def multinomial(input: Any, num_samples: int, replacement: bool = False, *, generator: Any = None) -> Any:
    """Numbers of the last axis, each as likely as its weight is of them all; without replacement none twice."""
    check(generator)
    weights = ops.cast(input, "float64")
    if not replacement or num_samples == 1:
        return ops.sort(weights / exponential(weights), -1, descending=True, count=num_samples)[1]
    drawn = ops.rand_like(weights, (*input.shape[:-1], num_samples), "float64")
    total = ops.cumsum(weights, -1)
    last = ops.getitem(total, (Ellipsis, slice(-1, None)))
    return ops.searchsorted(total, drawn * last, True)


functions(
    "logits, tau=1, hard=False, eps=1e-10, dim=-1",
    {(F.gumbel_softmax,): lambda logits, tau, hard, eps, dim: ops.gumbel_softmax(logits, tau, hard, dim)},
)
ROUNDS = 16  # of which each takes at least 95 of 100 numbers


def log_gamma_draws(a: Any) -> Any:
    """Logarithms of numbers of density x^(a - 1) e^-x / gamma(a), float64 (Marsaglia and Tsang, ACM TOMS 26, 2000)."""
    small = ops.lt(a, 1)
    d = ops.where(small, a + 1, a) - 1 / 3
    normal = ops.randn_like(a, (ROUNDS, *a.shape))
    root = normal / ops.sqrt(d * 9) + 1
    log = ops.log(ops.clamp_min(root, 1e-300)) * 3
    likely = normal * normal / 2 + d - d * root**3 + d * log
    taken = ops.logical_and(ops.gt(root, 0), ops.lt(ops.log1p(-ops.rand_like(normal)), likely))
    first = ops.argmax(ops.cast(taken, "int64"), 0, True)
    made = ops.log(d) + ops.take_along(log, first, 0)[0]
    return made + ops.where(small, ops.log1p(-ops.rand_like(a)) / a, 0.0)


@rule(torch._standard_gamma)
def standard_gamma(input: Any, generator: Any = None) -> Any:
    check(generator)
    least = math.log(torch.finfo(getattr(torch, input.dtype)).tiny)
    made = ops.exp(ops.clamp_min(log_gamma_draws(ops.cast(input, "float64")), least))
    return ops.undifferentiated(ops.cast(made, input.dtype), "gamma")


@rule(torch._sample_dirichlet)
def sample_dirichlet(input: Any, generator: Any = None) -> Any:
    """Gamma's over their sum, by logarithms: small ones may all be too small for numbers."""
    check(generator)
    made = ops.cast(ops.softmax(log_gamma_draws(ops.cast(input, "float64")), -1), input.dtype)
    least = torch.finfo(getattr(torch, input.dtype)).tiny
    return ops.undifferentiated(ops.clamp_min(made, least), "dirichlet")


@rule(torch.poisson)
def poisson(input: Any, generator: Any = None) -> Any:
    check(generator)
    return ops.poisson(input)


@rule(torch.binomial)
def binomial(count: Any, prob: Any, generator: Any = None) -> Any:
    check(generator)
    return ops.binomial(count, prob)

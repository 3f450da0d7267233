"""Rules of the incomplete gamma functions, in float64 whatever the dtype."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from needle import ops
from needle.ops.common import constant

from .bessel import in_double
from .special import with_tensors
from .tables import functions

T, S = torch.Tensor, torch.special
TERMS = 96  # of the series, of which a <= 50 and x <= a + 1 need no more
NODES, WEIGHTS = np.polynomial.legendre.leggauss(128)


def integral(f: Any, end: Any) -> Any:
    """Of f from 0 to `end`, by Gauss and Legendre's nodes along a new last axis."""
    half = ops.unsqueeze(end, -1) * 0.5
    y = half * (constant(NODES, end, "float64") + 1)
    return ops.summation(f(y) * half * constant(WEIGHTS, end, "float64"), -1)


def parts(a: Any, x: Any) -> tuple[Any, Any, Any]:
    """Whether x < a + 1, P there and Q elsewhere, of positive finite a and x: each is the smaller one or nearly so.

    Both are x^a e^-x / gamma(a) times an integral of what falls like a normal curve of variance a; P of small a is a series.
    """
    low, small = ops.lt(x, a + 1), ops.le(a, 50)
    factor = ops.exp(a * ops.log(x) - x - ops.lgamma(a))
    reach = ops.sqrt(a) * 12 + 45
    size = ops.unsqueeze(x, -1)

    few = ops.where(small, a, 1.0)
    near = ops.where(ops.logical_and(small, low), x, 1.0)
    steps = constant(np.arange(1.0, TERMS + 1), a, "float64")
    terms = ops.cumprod(ops.unsqueeze(near, -1) / (ops.unsqueeze(few, -1) + steps), -1)
    series = (ops.summation(terms, -1) + 1) / few

    power = ops.unsqueeze(ops.where(small, 51.0, a), -1) - 1
    below = integral(lambda y: ops.exp(y + power * ops.log1p(-y / size)), ops.minimum(x, reach)) / x
    power = ops.unsqueeze(a, -1) - 1
    above = integral(lambda y: ops.exp(power * ops.log1p(y / size) - y), reach) / x
    p = factor * ops.where(small, series, ops.where(ops.logical_and(low, ops.gt(a, 50)), below, 1.0))
    return low, p, factor * above


def incomplete(lower: bool) -> Any:
    def f(a: Any, x: Any) -> Any:
        a, x = (ops.where(ops.eq(a, x), v, v) for v in (a, x))  # of one shape
        negative = ops.logical_or(ops.lt(a, 0), ops.lt(x, 0))
        beyond = ops.logical_or(ops.eq(a, 0), ops.isinf(x))  # P is 1 there, and 0 where x is 0 or a infinite
        before = ops.logical_or(ops.eq(x, 0), ops.isinf(a))
        wrong = ops.logical_or(negative, ops.logical_and(beyond, before))
        inside = ops.logical_not(
            ops.logical_or(ops.logical_or(beyond, before), ops.logical_or(negative, ops.isnan(a + x)))
        )
        low, p, q = parts(ops.where(inside, a, 1.0), ops.where(inside, x, 1.0))
        made = ops.where(low, p if lower else 1 - p, 1 - q if lower else q)
        ends = ops.where(beyond, 1.0 if lower else 0.0, 0.0 if lower else 1.0)
        return ops.where(wrong, math.nan, ops.where(inside, made, ops.where(ops.isnan(a + x), a + x, ends)))

    return f


functions(
    "input, other",
    {
        (torch.igamma, T.igamma, S.gammainc): with_tensors(in_double(incomplete(True))),
        (torch.igammac, T.igammac, S.gammaincc): with_tensors(in_double(incomplete(False))),
    },
)

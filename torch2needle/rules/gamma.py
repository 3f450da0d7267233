"""Rules of the gamma function's relatives and of tails of the normal distribution, in float64 whatever the dtype."""

from __future__ import annotations

import math
from typing import Any

import torch

from needle import ops
from needle.autograd import Tensor
from needle.ops.math.gamma import BERNOULLI, STEPS, turn

from .bessel import in_double
from .registry import rule
from .special import with_tensors
from .tables import functions

T, S = torch.Tensor, torch.special


def zeta_above(s: Any, q: Any) -> Any:
    """Hurwitz' zeta of s > 1 and q > 0, by Euler and Maclaurin's formula behind STEPS terms."""
    total: Any = 0.0
    for k in range(STEPS):
        total = total + (q + k) ** -s
    z = q + STEPS
    power, s = z**-s, ops.clamp_max(s, 1e8) if isinstance(s, Tensor) else s  # beyond, the power is 0
    total = total + power * z / (s - 1) + power * 0.5
    factor, fall = s, power / z
    for k, b in enumerate(BERNOULLI, 1):
        total = total + factor * fall * (b / math.factorial(2 * k))
        factor = factor * (s + (2 * k - 1)) * (s + 2 * k)
        fall = fall / (z * z)
    return total


def zeta(s: Any, q: Any) -> Any:
    """Below 0 the sum from q on for whole s alone; infinite at whole numbers there and where s is 1."""
    inside = ops.logical_not(ops.le(s, 1))
    order = ops.where(inside, s, 2.0)
    steps = ops.where(ops.le(q, 0), ops.floor(-q) + 1, 0.0)  # from q to the first number above 0
    first = q + steps
    above = zeta_above(order, ops.where(ops.gt(first, 0), first, 1.0))
    negative = ops.logical_and(ops.le(q, 0), ops.ne(ops.floor(q), q))
    mirrored = ops.where(negative, 1 - first, 1.0)  # the terms below 0, from the nearest on
    odd = ops.eq(ops.remainder(order, 2), 1)
    below = zeta_above(order, mirrored) - zeta_above(order, mirrored + ops.where(negative, steps, 1.0))
    made = ops.where(negative, above + ops.where(odd, -below, below), above)
    made = ops.where(ops.logical_and(negative, ops.ne(ops.floor(order), order)), math.nan, made)
    made = ops.where(ops.logical_and(ops.le(q, 0), ops.eq(ops.floor(q), q)), math.inf, made)
    overflows = ops.logical_and(ops.gt(s, 1e13), ops.gt(q, 1))  # in torch's sum
    made = ops.where(ops.logical_or(ops.isnan(q), overflows), math.nan, made)
    return ops.where(inside, made, ops.where(ops.eq(s, 1), math.inf, math.nan))


def polygamma_of(n: int) -> Any:
    """The derivative of order n + 1 of log gamma, mirrored below 1/2 by the derivatives of pi / tan(pi x)."""
    factor = (-1.0) ** (n + 1) * math.factorial(n)

    def f(x: Any) -> Any:
        below = ops.lt(x, 0.5)
        made = zeta_above(n + 1.0, ops.where(below, 1 - x, x)) * factor
        part = turn(ops.where(below, x, 0.25))
        whole = ops.eq(part, 0)
        angle = ops.where(whole, 0.25, part) * math.pi
        cotangent = ops.cos(angle) / ops.sin(angle)
        powers = [0.0, 1.0]  # of the cotangent, in the n-th derivative by the angle
        for _ in range(n):
            slopes = [k * c for k, c in enumerate(powers)][1:]
            powers = [-(a + b) for a, b in zip([*slopes, 0, 0], [0, 0, *slopes], strict=True)]
        value: Any = 0.0
        for c in reversed(powers):
            value = value * cotangent + c
        mirrored = made * (-1.0) ** n - value * math.pi ** (n + 1)
        whole = ops.logical_or(whole, ops.eq(x, -math.inf)) if n > 1 else whole
        pole = math.copysign(math.inf, factor)
        return ops.where(below, ops.where(whole, pole, mirrored), made)

    return f


def erfcx(x: Any) -> Any:
    """exp(x ** 2) erfc(x)."""
    far = ops.gt(x, 25)
    near = ops.where(far, 1.0, x)
    z = ops.where(far, x, 25.0)
    square = 0.5 / (z * z)
    tail = (1 - square * (1 - square * (3 - square * 15))) / (z * math.sqrt(math.pi))
    return ops.where(far, tail, ops.exp(near * near) * ops.erfc(near))


def log_ndtr(x: Any) -> Any:
    tail = ops.lt(x, -1)
    far = ops.where(tail, x, -1.0)
    near = ops.where(tail, 0.0, x)
    return ops.where(
        tail,
        ops.log(erfcx(far * -math.sqrt(0.5)) * 0.5) - far * far * 0.5,
        ops.log1p(ops.erfc(near * math.sqrt(0.5)) * -0.5),
    )


def ndtri(p: Any) -> Any:
    """Hastings' approximation of the smaller tail, then Newton's steps on log_ndtr (Abramowitz and Stegun, 26.2.23)."""
    upper = ops.gt(p, 0.5)
    tail = ops.where(upper, 1 - p, p)
    inside = ops.gt(tail, 0)
    wanted = ops.log(ops.where(inside, tail, 0.25))
    t = ops.sqrt(wanted * -2)
    z = (2.515517 + t * (0.802853 + t * 0.010328)) / (1 + t * (1.432788 + t * (0.189269 + t * 0.001308))) - t
    for _ in range(4):
        log = log_ndtr(z)
        z = z - (log - wanted) * ops.exp(log + z * z * 0.5) * math.sqrt(2 * math.pi)
    ends = ops.where(ops.eq(tail, 0), -math.inf, math.nan)
    z = ops.where(inside, z, ends)
    return ops.where(upper, -z, z)


functions(
    "input",
    {
        (torch.lgamma, T.lgamma, T.lgamma_, S.gammaln): ops.lgamma,
        (torch.digamma, T.digamma, T.digamma_, S.digamma, S.psi): ops.digamma,
        (S.erfcx,): in_double(erfcx),
        (S.log_ndtr,): in_double(log_ndtr),
        (S.ndtri,): in_double(ndtri),
    },
)


@rule(torch.polygamma, S.polygamma)
def polygamma(n: int, input: Any) -> Any:
    return ops.digamma(input) if n == 0 else in_double(polygamma_of(n))(input)


@rule(T.polygamma, T.polygamma_)
def polygamma_method(input: Any, n: int) -> Any:
    return polygamma(n, input)


@rule(S.zeta)
def hurwitz_zeta(input: Any, other: Any) -> Any:
    return with_tensors(in_double(zeta))(input, other)


@rule(torch.mvlgamma, T.mvlgamma, T.mvlgamma_, S.multigammaln)
def multigammaln(input: Any, p: int) -> Any:
    def f(x: Any) -> Any:
        return sum((ops.lgamma(x - j / 2) for j in range(p)), p * (p - 1) / 4 * math.log(math.pi))

    return in_double(f)(input)

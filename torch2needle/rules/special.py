"""Rules of rarer element-wise functions, each made of needle's."""

from __future__ import annotations

import math
from typing import Any

import torch

from needle import ops
from needle.autograd import Tensor
from needle.backend_ndarray import FLOATS
from needle.ops.common import as_operand

from .arithmetic import scaled
from .indexing import is_mask
from .registry import rule
from .tables import functions

T = torch.Tensor
S = torch.special


def with_tensors(f: Any) -> Any:
    """f of two tensors, of which one may be given as a number."""
    return lambda a, b: f(a if isinstance(a, Tensor) else as_operand(a, b), as_operand(b, a))


def times_log(log: Any, least: float) -> Any:
    """a * log(b), and 0 where a is 0 and the logarithm is none of a number: b up to `least`, or infinite."""

    def product(a: Any, b: Any) -> Any:
        none = ops.logical_and(ops.eq(a, 0), ops.logical_or(ops.le(b, least), ops.eq(b, math.inf)))
        return ops.where(none, 0.0, scaled(a, 1, b) * log(ops.where(none, 1, b)))

    return product


def is_negative(x: Any) -> Any:
    """Of zeros, too, by their inverse."""
    return ops.lt(x, 0) if x.dtype not in FLOATS else ops.lt(ops.where(ops.eq(x, 0), 1 / x, x), 0)


def copysign(a: Any, b: Any) -> Any:
    size = ops.absolute(a * 1.0)  # of whole numbers, too
    return ops.where(is_negative(b), -size, size)


def float_power(a: Any, b: Any) -> Any:
    a, b = (ops.cast(v, "float64") if isinstance(v, Tensor) else float(v) for v in (a, b))
    return a**b


def sinc(x: Any) -> Any:
    angle = x * math.pi
    none = ops.eq(angle, 0)
    return ops.where(none, 1.0, ops.sin(angle) / ops.where(none, 1.0, angle))


def entr(input: Any) -> Any:
    x = input * 1.0  # of bools and integers, too
    inside = ops.gt(x, 0)
    value = -x * ops.log(ops.where(inside, x, 1.0))
    negative = ops.lt(x, 0)
    below = ops.where(negative, x, -1.0)
    beyond = below * math.inf + math.inf / ops.clamp_min(below, -3e38)  # -inf, whose gradient is NaN
    zero = ops.sqrt(ops.where(ops.logical_or(inside, negative), 1.0, x))  # whose gradient is infinite
    return ops.where(inside, value, ops.where(negative, beyond, zero))


functions(
    "input",
    {
        (torch.deg2rad, T.deg2rad, T.deg2rad_): lambda x: x * (math.pi / 180),
        (torch.rad2deg, T.rad2deg, T.rad2deg_): lambda x: x * (180 / math.pi),
        (torch.sinc, T.sinc, T.sinc_, S.sinc): sinc,
        (S.entr,): entr,
        (torch.erfinv, T.erfinv, T.erfinv_, S.erfinv): ops.erfinv,
        (S.ndtr,): lambda x: ops.erfc(x * -math.sqrt(0.5)) * 0.5,
        (torch.isposinf, T.isposinf): lambda x: ops.eq(x, math.inf),
        (torch.isneginf, T.isneginf): lambda x: ops.eq(x, -math.inf),
        (torch.signbit, T.signbit): is_negative,
    },
)
functions(
    "input, other",
    {
        (torch.logaddexp, T.logaddexp): ops.logaddexp,
        (torch.logaddexp2, T.logaddexp2): lambda a, b: (
            ops.logaddexp(a * math.log(2), b * math.log(2)) * (1 / math.log(2))
        ),
        (torch.xlogy, T.xlogy, T.xlogy_, S.xlogy): with_tensors(times_log(ops.log, 0.0)),
        (S.xlog1py,): with_tensors(times_log(ops.log1p, -1.0)),
        (torch.copysign, T.copysign, T.copysign_): with_tensors(copysign),
        (torch.ldexp, T.ldexp, T.ldexp_): with_tensors(lambda x, n: x * ops.exp2(n * 1.0)),
    },
)
functions("input, exponent", {(torch.float_power, T.float_power): float_power})
functions(
    "input, values",
    {(torch.heaviside, T.heaviside): lambda x, values: ops.where(ops.eq(x, 0), values, ops.cast_like(ops.gt(x, 0), x))},
)


@rule(torch.logit, T.logit, T.logit_, S.logit)
def logit(input: Any, eps: float | None = None) -> Any:
    x = input
    if eps is not None:  # which may be above 1 - eps
        x = ops.where(ops.lt(input, eps), eps, ops.clamp_max(input, 1 - eps))
    made = ops.log(x) - ops.log1p(x * -1.0)
    return made * ops.where(ops.isnan(made), math.nan, 1.0)  # beyond [0, 1] the gradient is no number, either


functions(
    "input, nan=None, posinf=None, neginf=None", {(torch.nan_to_num, T.nan_to_num, T.nan_to_num_): ops.nan_to_num}
)


@rule(torch.isclose, T.isclose)
def isclose(input: Any, other: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> Any:
    if is_mask(input):
        return ops.eq(input, other)
    return ops.isclose(input, other, rtol, atol, equal_nan)

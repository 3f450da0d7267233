"""Rules of element-wise arithmetic, functions, comparisons, selection and products along an axis of complex numbers."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from needle import ops
from needle.autograd import Tensor, Unsupported
from needle.complex_numbers import Complex
from needle.ops.fourier import complex as numbers
from needle.ops.fourier import complex_functions as of_numbers

from . import activations, arithmetic, counted, dropouts, losses, reductions, special
from .complex_numbers import as_complex, from_real, whole
from .registry import FUNCTION_RULES, complex_rule, rule

LOADED = (activations, counted, dropouts, losses, reductions, special)  # whose rules are taken below
T = torch.Tensor


def times_number(other: Any, alpha: Any) -> Any:
    return other if isinstance(alpha, int | float) and alpha == 1 else numbers.complex_multiply(whole(other), alpha)


@complex_rule(torch.add, T.add, T.add_, operator.add, operator.iadd, T.__add__, T.__radd__)
def add(input: Any, other: Any, *, alpha: Any = 1) -> Any:
    return numbers.complex_add(input, times_number(other, alpha))


@complex_rule(torch.sub, torch.subtract, T.sub, T.sub_, T.subtract, operator.sub, operator.isub)
def sub(input: Any, other: Any, *, alpha: Any = 1) -> Any:
    return numbers.complex_subtract(input, times_number(other, alpha))


@complex_rule(torch.rsub, T.__rsub__)
def rsub(input: Any, other: Any, *, alpha: Any = 1) -> Any:
    return numbers.complex_subtract(other, times_number(input, alpha))


@complex_rule(
    *(torch.div, torch.divide, torch.true_divide, T.div, T.div_, T.divide, T.true_divide),
    *(operator.truediv, operator.itruediv),
)
def div(input: Any, other: Any, *, rounding_mode: str | None = None) -> Any:
    if rounding_mode is not None:
        raise Unsupported("complex quotients have no rounding_mode")
    return numbers.complex_divide(input, other)


complex_rule(torch.mul, torch.multiply, T.mul, T.mul_, T.multiply, operator.mul, operator.imul)(
    lambda input, other: numbers.complex_multiply(input, other)
)
complex_rule(torch.pow, T.pow, T.pow_, operator.pow, operator.ipow)(
    lambda input, exponent: numbers.complex_power(input, exponent)
)
complex_rule(T.__rpow__)(lambda input, exponent: numbers.complex_power(exponent, input))
complex_rule(torch.eq, T.eq, operator.eq)(lambda input, other: numbers.complex_equal(input, other))
complex_rule(torch.ne, T.ne, operator.ne)(lambda input, other: numbers.complex_differs(input, other))


# -- functions of one tensor ---------------------------------------------------------------------------------------------

OF_REAL: dict[Callable, Callable[[Any], Any]] = {  # by the function of real numbers
    ops.reciprocal: lambda z: 1.0 / z,
    ops.rsqrt: lambda z: numbers.complex_divide(1.0, of_numbers.complex_sqrt(z)),
    ops.exp: numbers.complex_exp,
    ops.exp2: lambda z: numbers.complex_power(2.0, z),
    ops.expm1: of_numbers.complex_expm1,
    ops.log: numbers.complex_log,
    ops.log2: lambda z: numbers.complex_divide(numbers.complex_log(z), math.log(2)),
    ops.log10: lambda z: numbers.complex_divide(numbers.complex_log(z), math.log(10)),
    ops.log1p: of_numbers.complex_log1p,
    ops.sqrt: of_numbers.complex_sqrt,
    ops.sin: of_numbers.complex_sin,
    ops.cos: of_numbers.complex_cos,
    ops.tan: of_numbers.complex_tan,
    ops.sinh: of_numbers.complex_sinh,
    ops.cosh: of_numbers.complex_cosh,
    ops.asin: of_numbers.complex_asin,
    ops.acos: of_numbers.complex_acos,
    ops.atan: of_numbers.complex_atan,
    ops.asinh: of_numbers.complex_asinh,
    ops.acosh: of_numbers.complex_acosh,
    ops.atanh: of_numbers.complex_atanh,
}
UNARY: dict[tuple, Callable[[Any], Any]] = {
    **{targets: OF_REAL[f] for targets, f in arithmetic.UNARY.items() if f in OF_REAL},
    (torch.abs, torch.absolute, T.abs, T.absolute, operator.abs): ops.magnitude,
    (torch.angle, T.angle): ops.angle,
    (torch.square, T.square, T.square_): lambda z: z * z,
    (torch.tanh, T.tanh, T.tanh_, F.tanh): of_numbers.complex_tanh,
    (torch.sigmoid, T.sigmoid, T.sigmoid_, F.sigmoid, torch.special.expit): of_numbers.complex_sigmoid,
    (torch.sinc, T.sinc, T.sinc_, torch.special.sinc): lambda z: sinc(z),
    (torch.sgn, T.sgn, T.sgn_): of_numbers.complex_sign,
    (torch.isfinite, T.isfinite): lambda z: ops.logical_and(ops.isfinite(z.real), ops.isfinite(z.imag)),
    (torch.isnan, T.isnan): lambda z: ops.logical_or(ops.isnan(z.real), ops.isnan(z.imag)),
    (torch.isreal, T.isreal): lambda z: ops.eq(z.imag, 0.0),
    (torch.isinf, T.isinf): lambda z: ops.logical_or(ops.isinf(z.real), ops.isinf(z.imag)),
    (T.bool,): lambda z: truth(z),
}


@complex_rule(torch.logaddexp, T.logaddexp)
def logaddexp(input: Any, other: Any) -> Any:
    a, b = whole(input), whole(other)
    first = ops.ge(a.real, b.real)
    larger = numbers.complex_map(lambda x, y: ops.where(first, x, y), a, b)
    smaller = numbers.complex_map(lambda x, y: ops.where(first, y, x), a, b)
    return larger + of_numbers.complex_log1p(numbers.complex_exp(smaller - larger))


def of_one(f: Callable) -> Callable:
    return lambda input: f(input)


for _targets, _f in UNARY.items():
    complex_rule(*_targets)(of_one(_f))
rule(torch.angle, T.angle)(lambda input: ops.angle(input))


# -- selection ---------------------------------------------------------------------------------------------------------


@complex_rule(torch.where)
def where(condition: Any, input: Any, other: Any) -> Any:
    a, b = whole(input), whole(other)
    return ops.complex_pair(ops.where(condition, a.real, b.real), ops.where(condition, a.imag, b.imag), True)


complex_rule(T.where)(lambda input, condition, other: where(condition, input, other))


@complex_rule(torch.masked_fill, T.masked_fill, T.masked_fill_)
def masked_fill(input: Any, mask: Any, value: Any) -> Any:
    if not isinstance(input, Complex):
        raise Unsupported("a real tensor takes no complex value")
    value = whole(value)
    return Complex(ops.where(mask, value.real, input.real), ops.where(mask, value.imag, input.imag))


# -- as real numbers' ----------------------------------------------------------------------------------------------------


def sinc(z: Any) -> Complex:
    turned = z * math.pi
    return where(truth(z), of_numbers.complex_sin(turned) / where(truth(z), turned, 1.0), 1.0)


def truth(value: Any) -> Any:
    """Where a number is not 0."""
    return numbers.complex_differs(value, 0.0) if isinstance(value, Complex) else value


def of_truths(f: Callable) -> Callable:
    return lambda *args, **kwargs: f(*map(truth, args), **{k: truth(v) for k, v in kwargs.items()})


from_real(
    of_truths,
    *(torch.any, T.any, torch.all, T.all, torch.count_nonzero, T.count_nonzero, torch.nonzero, T.nonzero),
    *(torch.argwhere, T.argwhere, torch.logical_not, T.logical_not, torch.logical_and, T.logical_and),
    *(torch.logical_or, T.logical_or, torch.logical_xor, T.logical_xor),
)
# Made of operators alone, which complex numbers have, too.
from_real(
    lambda f: lambda *args, **kwargs: f(*args, **kwargs),
    torch.addcmul,
    T.addcmul,
    T.addcmul_,
    torch.addcdiv,
    T.addcdiv,
    T.addcdiv_,
)


@complex_rule(torch.lerp, T.lerp, T.lerp_)
def lerp(input: Any, end: Any, weight: Any) -> Any:
    """From the nearer end, by the weight's magnitude."""
    way = end - input
    rest = numbers.complex_subtract(1.0, weight) if isinstance(weight, Complex) else 1 - weight
    from_start, from_end = input + way * weight, end - way * rest
    if not isinstance(weight, Tensor | Complex):
        return from_start if abs(weight) < 0.5 else from_end
    near = ops.lt(ops.magnitude(weight) if isinstance(weight, Complex) else ops.absolute(weight), 0.5)
    return where(near, from_start, from_end)


complex_rule(F.silu)(lambda input, inplace=False: input * of_numbers.complex_sigmoid(input))
complex_rule(torch.float_power, T.float_power)(
    lambda input, exponent: numbers.complex_power(doubled(input), doubled(exponent))
)


def doubled(value: Any) -> Any:
    return as_complex(value, torch.complex128) if isinstance(value, Tensor | Complex) else value


@complex_rule(F.dropout)
def dropout(input: Any, p: float = 0.5, training: Any = True, inplace: bool = False) -> Any:
    """One draw for both parts."""
    return input * FUNCTION_RULES[F.dropout](ops.full_like(input.real, 1.0), p, training)


@complex_rule(torch.isclose, T.isclose)
def isclose(input: Any, other: Any, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False) -> Any:
    if equal_nan:
        raise Unsupported("equal_nan=True is not supported of complex numbers")
    far = ops.magnitude(input - other)
    near = ops.logical_and(ops.isfinite(far), ops.le(far, ops.magnitude(whole(other)) * rtol + atol))
    return ops.logical_or(near, numbers.complex_equal(input, other))


@complex_rule(F.l1_loss)
def l1_loss(
    input: Any, target: Any, size_average: Any = None, reduce: Any = None, reduction: str = "mean", weight: Any = None
) -> Any:
    far = ops.magnitude(input - target)
    return FUNCTION_RULES[F.l1_loss](far, ops.full_like(far, 0.0), size_average, reduce, reduction, weight)


@complex_rule(torch.logsumexp, T.logsumexp, torch.special.logsumexp)
def logsumexp(input: Any, dim: Any, keepdim: bool = False) -> Any:
    """Beside the largest real part."""
    top = ops.stop_gradient(ops.amax(input.real, dim, True))
    top = ops.where(ops.isfinite(top), top, 0.0)
    total = numbers.complex_exp(input - top).map(lambda x: ops.summation(x, dim, keepdims=True))
    made = numbers.complex_log(total) + top
    return made if keepdim else made.map(lambda x: ops.squeeze(x, dim))


# -- products along an axis ----------------------------------------------------------------------------------------------


def as_asked(input: Any, dtype: Any) -> Complex:
    if dtype is not None and not dtype.is_complex:
        raise Unsupported(f"products of complex numbers expect a complex dtype, got {dtype}")
    return whole(input) if dtype is None else as_complex(input, dtype)


@complex_rule(torch.cumprod, T.cumprod, T.cumprod_)
def cumprod(input: Any, dim: int, *, dtype: Any = None) -> Any:
    return of_numbers.complex_cumprod(as_asked(input, dtype), dim)


@complex_rule(torch.prod, T.prod)
def prod(input: Any, dim: int | None = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """The last of the products up to each, the first of which is 1."""
    z = as_asked(input, dtype).map(ops.flatten if dim is None else lambda x: ops.moveaxis(x, dim, -1))
    with_one = Complex(ops.pad(z.real, (1, 0), value=1.0), ops.pad(z.imag, (1, 0)))
    last = of_numbers.complex_cumprod(with_one, -1).map(lambda x: ops.getitem(x, (Ellipsis, -1)))
    return last.map(lambda x: ops.unsqueeze(x, dim)) if keepdim else last

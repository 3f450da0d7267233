"""Roots, circular and hyperbolic functions of complex numbers; exp and log are in complex.py. Kahan, Branch Cuts for Complex
Elementary Functions (1987).
"""

from __future__ import annotations

import math
from typing import Any

from needle.autograd import Op, Spec, Tensor, op
from needle.backend_ndarray import FLOATS
from needle.complex_numbers import Complex
from needle.ops.families import samples_of
from needle.ops.math.activation import tanh
from needle.ops.math.arithmetic import expm1, log1p
from needle.ops.math.comparison import eq, lt
from needle.ops.math.elementwise import cast, divide, where
from needle.ops.math.maths import absolute, asinh, cos, cosh, exp, log, sin, sinh, sqrt
from needle.ops.math.power import atan2, hypot
from needle.ops.shape.indexing import getitem
from needle.ops.shape.join import along_axis, concat

from .complex import (
    angle,
    complex_divide,
    complex_exp,
    complex_multiply,
    complex_pair,
    conj,
    magnitude,
    polar,
    view_as_complex,
    view_as_real,
)

__all__ = ["complex_cumprod"]


def complex_sqrt(a: Complex) -> Complex:
    """The root with real part >= 0."""
    return polar(sqrt(magnitude(a)), angle(a) * 0.5)


def complex_sign(a: Complex) -> Complex:
    """a / |a|, and 0 of 0."""
    size = magnitude(a)
    over = where(eq(size, 0.0), math.inf, size)  # where the gradient is 0, too
    return Complex(divide(a.real, over), divide(a.imag, over))


def complex_expm1(a: Complex) -> Complex:
    """exp(a) - 1, exact near 0."""
    half = sin(a.imag * 0.5)
    return complex_pair(expm1(a.real) * cos(a.imag) - half * half * 2.0, exp(a.real) * sin(a.imag), True)


def complex_log1p(a: Complex) -> Complex:
    """log(1 + a), exact near 0."""
    x, y = a.real, a.imag
    small = lt(magnitude(a), 0.5)
    near = where(small, x * (x + 2.0) + y * y, 0.0)
    far = where(small, 1.0, hypot(x + 1.0, y))
    return complex_pair(log1p(near) * 0.5 + log(far), atan2(y, x + 1.0), True)


# -- circular and hyperbolic ---------------------------------------------------------------------------------------------


def turned(a: Complex) -> Complex:
    """i a."""
    return Complex(-a.imag, a.real)


def turned_back(a: Complex) -> Complex:
    """-i a."""
    return Complex(a.imag, -a.real)


def complex_sin(a: Complex) -> Complex:
    return complex_pair(sin(a.real) * cosh(a.imag), cos(a.real) * sinh(a.imag), True)


def complex_cos(a: Complex) -> Complex:
    return complex_pair(cos(a.real) * cosh(a.imag), -(sin(a.real) * sinh(a.imag)), True)


def complex_sinh(a: Complex) -> Complex:
    return complex_pair(sinh(a.real) * cos(a.imag), cosh(a.real) * sin(a.imag), True)


def complex_cosh(a: Complex) -> Complex:
    return complex_pair(cosh(a.real) * cos(a.imag), sinh(a.real) * sin(a.imag), True)


def complex_tanh(a: Complex) -> Complex:
    """(sinh x cosh x + i sin y cos y) / (sinh^2 x + cos^2 y), both over cosh^2 x, so that nothing is infinite."""
    t, s, c = tanh(a.real), sin(a.imag), cos(a.imag)
    less = exp(absolute(a.real) * -2.0)
    falling = less * 4.0 / ((less + 1.0) * (less + 1.0))  # 1 / cosh^2 x
    below = t * t * (s * s) + c * c
    return complex_pair(t / below, s * c * falling / below, True)


def complex_tan(a: Complex) -> Complex:
    return turned_back(complex_tanh(turned(a)))


def complex_sigmoid(a: Complex) -> Complex:
    """1 / (1 + exp(-a)), or exp(a) / (exp(a) + 1), where exp is no larger than 1."""
    left = lt(a.real, 0.0)
    small = complex_exp(Complex(-absolute(a.real), where(left, a.imag, -a.imag)))
    top = complex_pair(where(left, small.real, 1.0), where(left, small.imag, 0.0), True)
    return complex_divide(top, Complex(small.real + 1.0, small.imag))


# -- their inverses ------------------------------------------------------------------------------------------------------


def roots(a: Complex) -> tuple[Complex, Complex]:
    """Of 1 - a and 1 + a."""
    return complex_sqrt(Complex(1.0 - a.real, -a.imag)), complex_sqrt(Complex(a.real + 1.0, a.imag))


def complex_asin(a: Complex) -> Complex:
    less, more = roots(a)
    return complex_pair(
        atan2(a.real, complex_multiply(less, more).real), asinh(complex_multiply(conj(less), more).imag), True
    )


def complex_acos(a: Complex) -> Complex:
    less, more = roots(a)
    return complex_pair(atan2(less.real, more.real) * 2.0, asinh(complex_multiply(conj(more), less).imag), True)


def complex_acosh(a: Complex) -> Complex:
    less, more = complex_sqrt(Complex(a.real - 1.0, a.imag)), complex_sqrt(Complex(a.real + 1.0, a.imag))
    return complex_pair(asinh(complex_multiply(conj(less), more).real), atan2(less.imag, more.real) * 2.0, True)


def complex_asinh(a: Complex) -> Complex:
    return turned_back(complex_asin(turned(a)))


def complex_atanh(a: Complex) -> Complex:
    x, y = a.real, a.imag
    beside = (1.0 - x) * (1.0 - x) + y * y
    return complex_pair(log1p(x * 4.0 / beside) * 0.25, atan2(y * 2.0, (1.0 - x) * (x + 1.0) - y * y) * 0.5, True)


def complex_atan(a: Complex) -> Complex:
    return turned_back(complex_atanh(turned(a)))


# -- products along an axis ----------------------------------------------------------------------------------------------


@op
class ComplexCumProd(Op):
    """Products of all numbers up to each along an axis, of pairs (..., 2) and as such; in float64 inside."""

    axis: int

    def infer(self, x: Any) -> Any:
        rank = len(x.shape) - 1
        if x.shape[-1:] != (2,) or not -rank <= self.axis < rank or x.dtype not in FLOATS:
            raise ValueError(
                f"[complex_cumprod] expects floats (..., 2) with axis {self.axis} before, got {x.dtype} {tuple(x.shape)}."
            )
        return Spec(tuple(x.shape), str(x.dtype))

    def decompose(self, x: Tensor) -> Tensor:
        """By doubling steps; the first numbers times 1 as torch's, where infinity times the other part's 0 is NaN."""
        z, axis, step = view_as_complex(cast(x, "float64")), self.axis % (len(x.shape) - 1), 1
        z = Complex(z.real - z.imag * 0.0, z.imag + z.real * 0.0)
        while step < x.shape[axis]:
            start, first, last = (
                Complex(getitem(z.real, part), getitem(z.imag, part))
                for part in (along_axis(axis, slice(*s)) for s in ((None, step), (None, -step), (step, None)))
            )
            ahead = complex_multiply(first, last)
            z = Complex(concat([start.real, ahead.real], axis), concat([start.imag, ahead.imag], axis))
            step *= 2
        return cast(view_as_real(z), self.infer(x).dtype)

    samples = samples_of(({"axis": 0}, [(3, 2)]), ({"axis": -1}, [(3, 5, 2)]), ({"axis": 1}, [(2, 0, 2)]))


def complex_cumprod(a: Complex, axis: int) -> Complex:
    """Running products along one axis of complex numbers of any shape, in the shape of `a`.

    Raises ValueError for an axis that `a` lacks. Source: `torch.cumprod`."""
    return view_as_complex(ComplexCumProd(axis)(view_as_real(a)))

"""Arithmetic of complex numbers: each function is one of real tensors, so that every form of a graph has it."""

from __future__ import annotations

import cmath
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from needle.autograd import Spec, Tensor
from needle.backend_ndarray import FLOATS
from needle.complex_numbers import Complex
from needle.ops.linalg.basic import matmul as real_matmul
from needle.ops.linalg.einsum import einsum as real_einsum
from needle.ops.math.comparison import eq as real_eq
from needle.ops.math.comparison import lt
from needle.ops.math.elementwise import add, cast, divide, maximum, multiply, negate, subtract, where
from needle.ops.math.logic import logical_and, logical_not
from needle.ops.math.maths import absolute, cos, exp, log, sin
from needle.ops.math.power import atan2, hypot, power
from needle.ops.shape.creation import full_like
from needle.ops.shape.join import Split, stack
from needle.ops.shape.runtime_shape import broadcast_like, cast_like, stop_gradient

__all__ = [
    "angle",
    "complex_map",
    "complex_pair",
    "conj",
    "magnitude",
    "multilinear",
    "polar",
    "view_as_complex",
    "view_as_real",
]

MOST_FACTORS = 16  # of a whole power that is a product


def known(x: Any) -> Spec | None:
    """Shape and dtype, where they are known before the graph runs."""
    return Spec(tuple(x.shape), x.dtype) if x.recorder is None or x.recorder.static else x.spec


def parts(x: Any) -> tuple[Any, Any]:
    """(real, imag) of a Complex or a complex number; imag is None for what is real."""
    return (x.real, x.imag) if isinstance(x, Complex | complex) else (x, None)


def complex_pair(real: Any, imag: Any, alike: bool = False) -> Complex:
    """real + i imag in the shape and dtype that both have together; one may be a number. alike: they have them already."""
    if not isinstance(real, Tensor):
        imag = floating(imag)
        return Complex(full_like(imag, real), imag)
    real = floating(real)
    if not isinstance(imag, Tensor):
        return Complex(real, full_like(real, imag))
    imag = floating(imag)
    a, b = settled(real), settled(imag)
    if not alike and (a is None or b is None or a != b):
        whole = real if a is not None and b is not None and wider(a, b) else add(multiply(imag, 0.0), real)
        real, imag = fitted(real, whole), fitted(imag, whole)
    return Complex(real, imag)


def settled(x: Any) -> Spec | None:
    """As `known`, where no other call of a graph has another shape."""
    return known(x) if x.recorder is None or x.recorder.static else None


def wider(a: Spec, b: Spec) -> bool:
    """Whether b fits into a as it is."""
    return FLOATS.index(a.dtype) >= FLOATS.index(b.dtype) and np.broadcast_shapes(a.shape, b.shape) == a.shape


def fitted(x: Tensor, like: Tensor) -> Tensor:
    return x if x is like else cast_like(broadcast_like(x, like), like)


def floating(x: Tensor) -> Tensor:
    """x, or in float32 what is no float."""
    spec = known(x)
    if spec is None:
        return multiply(x, 1.0)
    return x if spec.dtype in FLOATS else cast(x, "float32")


def complex_map(f: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """f, which moves or adds numbers, of the real parts and of the imaginary ones among its arguments; lists hold some, too.
    The result has the shape that f gives."""

    def side(value: Any, name: str) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(side(v, name) for v in value)
        return getattr(value, name) if isinstance(value, Complex) else value

    results = [f(*side(args, n), **{k: side(v, n) for k, v in named.items()}) for n in ("real", "imag")]
    return tuple(map(Complex, *results)) if isinstance(results[0], list | tuple) else Complex(*results)


def multilinear(f: Callable[..., Any], *factors: Any) -> Complex:
    """f, which is linear in each factor, of factors some of which are Complex; the result has the shape that f gives."""
    sums: list[Any] = [None, None]
    for choice in itertools.product(*((0, 1) if isinstance(x, Complex) else (0,) for x in factors)):
        chosen = [(parts(x)[c] if isinstance(x, Complex) else x) for x, c in zip(factors, choice, strict=True)]
        value, turns = f(*chosen), sum(choice)
        side, minus = turns % 2, turns % 4 > 1
        if sums[side] is None:
            sums[side] = negate(value) if minus else value
        else:
            sums[side] = subtract(sums[side], value) if minus else add(sums[side], value)
    return Complex(*sums)


# -- arithmetic ----------------------------------------------------------------------------------------------------------


def method(*names: str) -> Callable[[Callable], Callable]:
    def bind(f: Callable) -> Callable:
        for name in names:
            setattr(Complex, name, f)
        return f

    return bind


def plus(a: Any, b: Any) -> Any:
    """a + b of numbers and tensors in any order."""
    return add(a, b) if isinstance(a, Tensor) else add(b, a) if isinstance(b, Tensor) else a + b


def times(a: Any, b: Any) -> Any:
    return multiply(a, b) if isinstance(a, Tensor) else multiply(b, a) if isinstance(b, Tensor) else a * b


def over(a: Any, b: Any) -> Any:
    return divide(a, b) if isinstance(a, Tensor) else b.__rtruediv__(a) if isinstance(b, Tensor) else a / b


@method("__add__", "__radd__", "add")
def complex_add(a: Any, b: Any) -> Complex:
    (ar, ai), (br, bi) = parts(a), parts(b)
    imag = bi if ai is None else ai if bi is None else plus(ai, bi)
    return complex_pair(plus(ar, br), imag, ai is not None and bi is not None)


@method("__neg__")
def complex_negative(a: Complex) -> Complex:
    return a.map(negate)


def opposite(a: Any) -> Any:
    return negate(floating(a)) if isinstance(a, Tensor) else -a


@method("__sub__", "sub")
def complex_subtract(a: Any, b: Any) -> Complex:
    return complex_add(a, opposite(b))


@method("__rsub__")
def from_other(a: Complex, b: Any) -> Complex:
    return complex_add(complex_negative(a), b)


@method("__mul__", "__rmul__", "mul")
def complex_multiply(a: Any, b: Any) -> Complex:
    (ar, ai), (br, bi) = parts(a), parts(b)
    if ai is None:
        (ar, ai), (br, bi) = (br, bi), (ar, ai)
    if bi is None:
        return complex_pair(times(ar, br), times(ai, br), True)
    real = plus(times(ar, br), opposite(times(ai, bi)))
    return complex_pair(real, plus(times(ar, bi), times(ai, br)), True)


@method("__truediv__", "div")
def complex_divide(a: Any, b: Any) -> Complex:
    if isinstance(b, complex):
        return complex_multiply(a, 1 / b)
    (ar, ai), (br, bi) = parts(a), parts(b)
    if bi is None:
        return complex_pair(over(ar, b), over(ai, b), True)
    size = stop_gradient(maximum(absolute(br), absolute(bi)))  # else squares overflow; results do not depend on it
    c, d = divide(br, size), divide(bi, size)
    square = multiply(add(multiply(c, c), multiply(d, d)), size)
    real, imag = times(ar, c), opposite(times(ar, d))
    if ai is not None:
        real, imag = plus(real, times(ai, d)), plus(imag, times(ai, c))
    return complex_pair(divide(real, square), divide(imag, square), True)


@method("__rtruediv__")
def divided_by(a: Complex, b: Any) -> Complex:
    return complex_divide(b, a)


@method("conj")
def conj(a: Any) -> Any:
    """Of real numbers themselves."""
    return Complex(a.real, negate(a.imag)) if isinstance(a, Complex) else a


def whole_power(a: Complex, n: int) -> Complex:
    if n < 0:
        return complex_divide(1.0, whole_power(a, -n))
    result: Any = None
    while n:
        if n % 2:
            result = a if result is None else complex_multiply(result, a)
        n //= 2
        a = complex_multiply(a, a) if n else a
    return Complex(full_like(a.real, 1.0), full_like(a.real, 0.0)) if result is None else result


@method("__pow__")
def complex_power(a: Any, b: Any) -> Complex:
    if isinstance(a, Complex) and isinstance(b, int | float) and b == int(b) and abs(b) <= MOST_FACTORS:
        return whole_power(a, int(b))
    if isinstance(a, Complex) and not isinstance(b, Complex | complex):
        return polar(power(magnitude(a), b), times(angle(a), b))
    base = complex_log(a) if isinstance(a, Complex | Tensor) else cmath.log(a)
    return complex_exp(complex_multiply(base if not isinstance(base, complex) or base.imag else base.real, b))


@method("__rpow__")
def power_of(a: Complex, b: Any) -> Complex:
    return complex_power(b, a)


@method("__matmul__")
def complex_matmul(a: Any, b: Any) -> Complex:
    return multilinear(real_matmul, a, b)


@method("__rmatmul__")
def after_matmul(a: Complex, b: Any) -> Complex:
    return multilinear(real_matmul, b, a)


def complex_einsum(equation: str, *operands: Any) -> Complex:
    return multilinear(lambda *xs: real_einsum(equation, *xs), *operands)


@method("__eq__")
def complex_equal(a: Any, b: Any) -> Any:
    """Element by element."""
    if not isinstance(b, Complex | Tensor | int | float | complex):
        return NotImplemented
    (ar, ai), (br, bi) = parts(a), parts(b)
    equal = lambda x, y: real_eq(x, y) if isinstance(x, Tensor) else real_eq(y, x)  # noqa: E731
    same, x, y = equal(ar, br), 0.0 if ai is None else ai, 0.0 if bi is None else bi
    if isinstance(x, Tensor) or isinstance(y, Tensor):
        return logical_and(same, equal(x, y))
    return same if x == y else logical_and(same, logical_not(same))  # of real numbers and a number


@method("__ne__")
def complex_differs(a: Any, b: Any) -> Any:
    equal = complex_equal(a, b)
    return equal if equal is NotImplemented else logical_not(equal)


# -- functions -----------------------------------------------------------------------------------------------------------


@method("__abs__", "abs")
def magnitude(a: Any) -> Tensor:
    """|a| of a Complex, in its shape; its gradient at 0 is 0."""
    return hypot(a.real, a.imag)


@method("angle")
def angle(a: Any) -> Tensor:
    """In (-pi, pi]; of real numbers 0 or pi, and NaN of NaN."""
    if isinstance(a, Complex):
        return atan2(a.imag, a.real)
    a = stop_gradient(floating(a))
    return where(lt(a, 0.0), math.pi, where(real_eq(a, a), 0.0, a))


def polar(size: Tensor, turn: Tensor) -> Complex:
    """The numbers of these magnitudes and angles."""
    return complex_pair(multiply(size, cos(turn)), multiply(size, sin(turn)), True)


def complex_exp(a: Complex) -> Complex:
    return polar(exp(a.real), a.imag)


def complex_log(a: Any) -> Complex:
    if not isinstance(a, Complex):
        return complex_pair(log(absolute(a)), angle(a))
    return complex_pair(log(magnitude(a)), angle(a))


# -- the same memory ------------------------------------------------------------------------------------------------------


def view_as_real(a: Complex) -> Tensor:
    """(..., 2): real and imaginary parts, numpy's and torch's order in memory."""
    if not isinstance(a, Complex):
        raise TypeError("[view_as_real] expects complex numbers, got real ones.")
    return stack([a.real, a.imag], -1)


def view_as_complex(a: Tensor) -> Complex:
    """Of (..., 2)."""
    if isinstance(a, Complex):
        raise TypeError("[view_as_complex] expects real numbers, got complex ones.")
    spec = known(a)
    if spec is not None and (not spec.shape or spec.shape[-1] != 2 or spec.dtype not in FLOATS):
        raise ValueError(f"[view_as_complex] expects floats of shape (..., 2), got {spec.dtype} {tuple(spec.shape)}.")
    real, imag = Split(-1, 2)(a)
    return Complex(real, imag)


def moving(name: str) -> Callable[..., Any]:
    return lambda self, *args, **named: self.map(lambda x: getattr(x, name)(*args, **named))


for _name in ("reshape", "permute", "transpose", "broadcast_to", "__getitem__", "sum", "mean", "flip"):
    setattr(Complex, _name, moving(_name))

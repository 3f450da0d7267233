"""Rules of Bessel functions, by Chebyshev series in float64 whatever the dtype: one near zero, one far out."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from needle import ops
from needle.backend_ndarray import FLOATS

from .bessel_series import SERIES
from .tables import functions

S = torch.special


def in_double(f: Callable[..., Any]) -> Callable[..., Any]:
    """f of float64, whose result has the dtype of the tensor; whole numbers give torch's default."""

    def rounded(x: Any, *others: Any) -> Any:
        wide = [ops.cast(t, "float64") if hasattr(t, "dtype") else t for t in (x, *others)]
        kept = [t.dtype for t in (x, *others) if hasattr(t, "dtype") and t.dtype in FLOATS]
        dtype = max(kept, key=FLOATS.index) if kept else str(torch.get_default_dtype()).removeprefix("torch.")
        return ops.cast(f(*wide), dtype)

    return rounded


def without_gradient(f: Callable[..., Any]) -> Callable[..., Any]:
    """As in torch, where these functions let no gradient through."""
    return lambda *inputs: ops.stop_gradient(in_double(f)(*inputs))


def series(name: str, t: Any) -> Any:
    """The series of that name at t in [-1, 1], by Clenshaw's recurrence."""
    first, *rest = SERIES[name]
    a: Any = 0.0
    b: Any = 0.0
    for c in reversed(rest):
        a, b = t * 2 * a - b + c, a
    return t * a - b + first


def between(near: Any, far: Any, at_near: Any, at_far: Any) -> Callable[[Any, Any], Any]:
    """near(x) where the condition holds, else far(x), each at places where it is finite."""
    return lambda here, x: ops.where(here, near(ops.where(here, x, at_near)), far(ops.where(here, at_far, x)))


def i_scaled(order: int) -> Callable[[Any], Any]:
    """exp(-|x|) I(x)."""

    def f(x: Any) -> Any:
        size = ops.absolute(x)
        near = lambda s: series(f"i{order}e near", s / 4 - 1) * (s if order else 1)  # noqa: E731
        far = lambda s: series(f"i{order}e far", 16 / s - 1) / ops.sqrt(s)  # noqa: E731
        made = between(near, far, 1.0, 9.0)(ops.le(size, 8), size)
        made = ops.where(ops.isnan(x), x, made)
        return ops.where(ops.lt(x, 0), -made, made) if order else made

    return f


def i_plain(order: int) -> Callable[[Any], Any]:
    """In two factors, since exp(|x|) alone overflows earlier; NaN at infinity, as torch has it."""

    def f(x: Any) -> Any:
        half = ops.exp(ops.absolute(x) / 2)
        return i_scaled(order)(x) * half * half

    return f


def k_scaled(order: int) -> Callable[[Any], Any]:
    """exp(x) K(x): infinite at 0, NaN below."""

    def near(x: Any) -> Any:
        part = ops.log(x / 2) * i_plain(order)(x)
        y = series(f"k{order} near", x * x / 2 - 1)
        return ((y / x + part) if order else (y - part)) * ops.exp(x)

    def f(x: Any) -> Any:
        far = lambda s: series(f"k{order}e far", 4 / s - 1) / ops.sqrt(s)  # noqa: E731
        inside = ops.gt(x, 0)
        safe = ops.where(inside, x, 1.0)
        made = between(near, far, 1.0, 3.0)(ops.le(safe, 2), safe)
        return ops.where(inside, made, ops.where(ops.eq(x, 0), math.inf, math.nan))

    return f


def k_plain(order: int) -> Callable[[Any], Any]:
    return lambda x: k_scaled(order)(x) * ops.exp(-x)


def far_waves(order: int, second: bool, x: Any) -> Any:
    """J or Y beyond 8: a wave of slowly changing size and phase."""
    w = (8 / x) * (8 / x)
    p, q = series(f"p{order} far", 2 * w - 1), series(f"q{order} far", 2 * w - 1) * 8 / x
    phase = x - (math.pi / 4) * (1 + 2 * order)
    wave, other = (ops.sin(phase), ops.cos(phase)) if second else (ops.cos(phase), -ops.sin(phase))
    return (p * wave + q * other) * ops.sqrt(2 / (math.pi * x))


def j_plain(order: int) -> Callable[[Any], Any]:
    def f(x: Any) -> Any:
        size = ops.absolute(x)
        near = lambda s: series(f"j{order} near", s * s / 32 - 1) * (s if order else 1)  # noqa: E731
        far = lambda s: far_waves(order, False, s)  # noqa: E731
        made = between(near, far, 1.0, 9.0)(ops.le(size, 8), size)
        return ops.where(ops.lt(x, 0), -made, made) if order else made

    return f


def y_plain(order: int) -> Callable[[Any], Any]:
    """-inf at 0, NaN below."""

    def near(x: Any) -> Any:
        part = ops.log(x) * j_plain(order)(x)
        y = series(f"y{order} near", x * x / 32 - 1)
        return y * x + (part - 1 / x) * (2 / math.pi) if order else y + part * (2 / math.pi)

    def f(x: Any) -> Any:
        inside = ops.gt(x, 0)
        safe = ops.where(inside, x, 1.0)
        made = between(near, lambda s: far_waves(order, True, s), 1.0, 9.0)(ops.le(safe, 8), safe)
        return ops.where(inside, made, ops.where(ops.eq(x, 0), -math.inf, math.nan))

    return f


def airy_ai(x: Any) -> Any:
    """A series from -8 to 4, a wave below, a decay above; NaN at infinity, as torch has it."""
    middle = ops.logical_and(ops.ge(x, -8), ops.le(x, 4))
    size = ops.where(middle, 9.0, ops.absolute(x))
    z, root = size * ops.sqrt(size) * (2 / 3), ops.sqrt(ops.sqrt(size))
    down = series("ai far", 32 / (3 * z) - 1) * ops.exp(-z) / root
    turns, w = z - math.pi / 4, (LAST / z) * (LAST / z)
    p, q = series("ai p far", w * 2 - 1), series("ai q far", w * 2 - 1) * LAST / z
    waves = (p * ops.cos(turns) + q * ops.sin(turns)) / (root * math.sqrt(math.pi))
    near = series("ai near", (ops.where(middle, x, 0.0) + 2) / 6)
    made = ops.where(middle, near, ops.where(ops.lt(x, 0), waves, down))
    return ops.where(ops.isinf(x), math.nan, made)


LAST = 2 / 3 * 8**1.5  # the phase at -8


def spherical_j0(x: Any) -> Any:
    none = ops.eq(x, 0)
    made = ops.sin(x) / ops.where(none, 1.0, x)
    return ops.where(ops.isinf(x), 0.0, ops.where(none, 1.0, made))


functions(
    "input",
    {
        (torch.i0, torch.Tensor.i0, torch.Tensor.i0_, S.i0): in_double(i_plain(0)),
        (S.i1,): in_double(i_plain(1)),
        (S.i0e,): in_double(i_scaled(0)),
        (S.i1e,): in_double(i_scaled(1)),
        (S.modified_bessel_i0,): without_gradient(i_plain(0)),
        (S.modified_bessel_i1,): without_gradient(i_plain(1)),
        (S.modified_bessel_k0,): without_gradient(k_plain(0)),
        (S.modified_bessel_k1,): without_gradient(k_plain(1)),
        (S.scaled_modified_bessel_k0,): without_gradient(k_scaled(0)),
        (S.scaled_modified_bessel_k1,): without_gradient(k_scaled(1)),
        (S.bessel_j0,): without_gradient(j_plain(0)),
        (S.bessel_j1,): without_gradient(j_plain(1)),
        (S.bessel_y0,): without_gradient(y_plain(0)),
        (S.bessel_y1,): without_gradient(y_plain(1)),
        (S.airy_ai,): without_gradient(airy_ai),
        (S.spherical_bessel_j0,): without_gradient(spherical_j0),
    },
)

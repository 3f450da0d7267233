"""The gamma function's relatives and the inverse of erf. What devices without their kernels compute is in float64."""

from __future__ import annotations

import math
from typing import Any

from needle.autograd import Tensor, Unsupported
from needle.backend_ndarray import dtype_name
from needle.ops.common import Unary, gradient_of_decomposition
from needle.ops.families import function_of, op_class
from needle.ops.math.arithmetic import clamp_min
from needle.ops.math.comparison import eq, lt
from needle.ops.math.elementwise import cast, where
from needle.ops.math.logic import isinf
from needle.ops.math.maths import absolute, cos, erf, erfc, exp, log, round, sin, sqrt

__all__ = ["digamma", "erfinv", "lgamma"]

# The Bernoulli numbers B2, B4, ...
BERNOULLI = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6, -3617 / 510, 43867 / 798)
STEPS = 10  # by which arguments are moved up before a series in 1 / x


def moved_up(x: Any) -> tuple[Any, Any]:
    """Whether positive x is below STEPS, and x or x + STEPS."""
    low = lt(x, STEPS)
    return low, where(low, x + STEPS, x)


def turn(x: Any) -> Any:
    """x without its nearest whole number: sines of pi times it are exact at whole numbers."""
    return x - round(x)


def log_gamma_above(x: Any) -> Any:
    """Of positive x: Stirling's series, and the recurrence below STEPS."""
    low, z = moved_up(x)
    square = 1 / (z * z)
    rest: Any = 0.0
    for k, b in reversed(list(enumerate(BERNOULLI[:7], 1))):
        rest = rest * square + b / (2 * k * (2 * k - 1))
    made = (z - 0.5) * log(z) - z + 0.5 * math.log(2 * math.pi) + rest / z
    product: Any = 1.0
    for k in range(STEPS):
        product = product * (x + k)
    return made - log(where(low, product, 1.0))


def log_gamma(x: Any) -> Any:
    below, ends = lt(x, 0.5), isinf(x)
    safe = where(ends, 1.0, x)
    above = log_gamma_above(where(below, 1 - safe, safe))
    sine = absolute(sin(turn(where(below, safe, 0.5)) * math.pi))
    made = where(below, math.log(math.pi) - log(sine) - above, above)
    made = where(eq((safe - 1) * (safe - 2), 0), 0.0, made)
    return where(ends, math.inf, made)


def log_gamma_slope(x: Any) -> Any:
    below = lt(x, 0.5)
    safe = where(below, 1 - x, x)
    low, z = moved_up(safe)
    square = 1 / (z * z)
    rest: Any = 0.0
    for k, b in reversed(list(enumerate(BERNOULLI[:8], 1))):
        rest = rest * square + b / (2 * k)
    made = log(z) - 0.5 / z - rest * square
    steps: Any = 0.0
    near = where(low, safe, 1.0)
    for k in range(STEPS):
        steps = steps + 1 / (near + k)
    made = made - where(low, steps, 0.0)
    part = turn(where(below, x, 0.25))
    whole = eq(part, 0)
    angle = where(whole, 0.25, part) * math.pi
    reflected = made - math.pi * cos(angle) / sin(angle)
    pole = where(eq(x, 0), -1 / x, math.nan)
    return where(below, where(whole, pole, reflected), made)


def polynomial(x: Any, *factors: float, start: Any = 0.0) -> Any:
    for c in factors:
        start = start * x + c
    return start


def inverse_of_erf(x: Any) -> Any:
    """Giles' starting point, then Newton's steps on erf, which take it to the last digits."""
    inside = lt(absolute(x), 1)
    y = where(inside, x, 0.0)
    w = -log((1 - y) * (1 + y))
    root = sqrt(clamp_min(w, 5.0)) - 3
    near = polynomial(
        w - 2.5, 2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087, -0.00125372503
    )
    near = polynomial(w - 2.5, -0.00417768164, 0.246640727, 1.50140941, start=near)
    far = polynomial(root, -0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773, -0.0076224613)
    far = polynomial(root, 0.00943887047, 1.00167406, 2.83297682, start=far)
    z = y * where(lt(w, 5.0), near, far)
    sign, distance = where(lt(y, 0), -1.0, 1.0), 1 - absolute(y)
    for _ in range(2):  # by erfc far out, where erf is flat
        outside = sign * (distance - erfc(absolute(z)))
        error = where(lt(absolute(y), 0.5), erf(z) - y, outside)
        z = z - error * (exp(z * z) * (math.sqrt(math.pi) / 2))
    beyond = where(eq(absolute(x), 1), math.inf, math.nan)
    return z + x * where(inside, 0.0, beyond)  # a factor: the gradient is infinite or NaN there, too


def of_double(f: Any) -> Any:
    """A `decompose` by f of float64."""

    def decompose(self: Any, x: Tensor) -> Tensor:
        return cast(f(cast(x, "float64")), self.infer(x).dtype)

    return decompose


def is_double(self: Any, x: Any) -> bool:
    """False where the dtype is not known: graphs ask again when it is."""
    try:
        return dtype_name(x.dtype) == "float64"
    except Unsupported:
        return False


def relative(words: str, doc: str, f: Any, gradient: Any, **facts: Any) -> Any:
    """An op whose kernel has its name, with what it is made of elsewhere, and its function."""
    made = op_class(
        __name__, words, Unary, doc, kernel=words.lower(), decompose=of_double(f), gradient=gradient, **facts
    )
    return made, function_of(made, words.lower())


Digamma, digamma = relative(
    "Digamma",
    "The derivative of lgamma: NaN at negative whole numbers, at 0 an infinity of the sign opposite to its own.",
    log_gamma_slope,
    gradient_of_decomposition,
)
Lgamma, lgamma = relative(
    "Lgamma",
    "log |gamma(x)|: infinite at whole numbers below 1 and at both ends.",
    log_gamma,
    lambda self, out_grad, node: out_grad * digamma(node.inputs[0]),
    domain=(0.2, 4.0),
)
Erfinv, erfinv = relative(
    "Erfinv",
    "The inverse of erf: infinite at -1 and 1, NaN beyond.",
    inverse_of_erf,
    lambda self, out_grad, node: out_grad * exp(node * node) * (math.sqrt(math.pi) / 2),
    domain=(-0.9, 0.9),
    must_decompose=is_double,  # the kernel has digits of float32
)

"""Element-wise functions of one tensor."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from needle.autograd import OPS, Op, Tensor, tensor_method
from needle.backend_ndarray import FLOATS, NDArray, call, dtype_name
from needle.ops.common import Unary
from needle.ops.families import function_of, no_gradient, op_class
from needle.ops.math.comparison import gt
from needle.ops.math.elementwise import where

__all__ = [
    "absolute",
    "acos",
    "acosh",
    "asin",
    "asinh",
    "atan",
    "atanh",
    "ceil",
    "cos",
    "cosh",
    "erf",
    "erfc",
    "exp",
    "exp2",
    "floor",
    "log",
    "log2",
    "log10",
    "reciprocal",
    "round",
    "rsqrt",
    "sign",
    "sin",
    "sinh",
    "softplus",
    "sqrt",
    "tan",
]


def function(
    words: str,
    doc: str,
    ufunc: Any,
    slope: Any = None,
    names: tuple[str, ...] = (),
    base: type[Op] = Unary,
    **facts: Any,
) -> Any:
    """An op of one tensor, whose kernel has its name in lower case, and its function; slope(dy, x, y): the gradient of x."""
    if slope is not None:
        facts["gradient"] = lambda self, out_grad, node: slope(out_grad, node.inputs[0], node)
    facts |= {"kernel": words.lower(), "ufunc": staticmethod(ufunc)}
    made = op_class(__name__, words, base, doc, **facts)
    return made, function_of(made, *names or (words.lower(),))


POSITIVE: Any = {"domain": (0.2, 4.0)}
POLE: Any = {"zero_is_safe": False}

Exp, exp = function("Exp", "e ** x.", np.exp, lambda dy, x, y: dy * y)
Log, log = function("Log", "Natural logarithm.", np.log, lambda dy, x, y: dy / x, **POSITIVE, **POLE)
Sqrt, sqrt = function("Sqrt", "Square root.", np.sqrt, lambda dy, x, y: dy * 0.5 / y, **POSITIVE)
Rsqrt, rsqrt = function(
    "Rsqrt", "1 / sqrt(x).", lambda x: 1 / np.sqrt(x), lambda dy, x, y: dy * (y / x * -0.5), **POSITIVE, **POLE
)
Abs, absolute = function(
    "Abs", "|x|; the gradient at 0 is 0.", np.abs, lambda dy, x, y: dy * x.sign(), ("absolute", "abs", "__abs__")
)
Reciprocal, reciprocal = function(
    "Reciprocal", "1 / x.", np.reciprocal, lambda dy, x, y: -(dy * (y * y)), domain=(0.3, 3.0), **POLE
)
Sin, sin = function("Sin", "Sine of an angle in radians.", np.sin, lambda dy, x, y: dy * x.cos())
Cos, cos = function("Cos", "Cosine of an angle in radians.", np.cos, lambda dy, x, y: -(dy * x.sin()))


def erf_array(x: np.ndarray) -> np.ndarray:
    """erf in float64, rounded to the dtype of x; numpy has none."""
    if not isinstance(x, np.ndarray | np.generic):  # records, as in an export
        return x.erf()
    return np.vectorize(math.erf, otypes=["float64"])(x).astype(x.dtype)


Erf, erf = function(
    "Erf", "Error function.", erf_array, lambda dy, x, y: dy * ((-(x * x)).exp() * (2.0 / math.sqrt(math.pi)))
)
Tan, tan = function(
    "Tan", "Tangent of an angle in radians.", np.tan, lambda dy, x, y: dy * (y * y + 1), domain=(-1.2, 1.2)
)
UNIT: Any = {"domain": (-0.9, 0.9)}
Asin, asin = function("Asin", "Arc sine.", np.arcsin, lambda dy, x, y: dy * rsqrt(1 - x * x), **UNIT)
Acos, acos = function("Acos", "Arc cosine.", np.arccos, lambda dy, x, y: -(dy * rsqrt(1 - x * x)), **UNIT)
Atan, atan = function("Atan", "Arc tangent.", np.arctan, lambda dy, x, y: dy / (x * x + 1))
Sinh, sinh = function("Sinh", "Hyperbolic sine.", np.sinh, lambda dy, x, y: dy * OPS["Cosh"]()(x))
Cosh, cosh = function("Cosh", "Hyperbolic cosine.", np.cosh, lambda dy, x, y: dy * sinh(x))
Asinh, asinh = function("Asinh", "Inverse of sinh.", np.arcsinh, lambda dy, x, y: dy * rsqrt(x * x + 1))
Acosh, acosh = function(
    "Acosh", "Inverse of cosh.", np.arccosh, lambda dy, x, y: dy * rsqrt((x - 1) * (x + 1)), domain=(1.2, 4.0), **POLE
)
Atanh, atanh = function("Atanh", "Inverse of tanh.", np.arctanh, lambda dy, x, y: dy / (1 - x * x), **UNIT)
Exp2, exp2 = function("Exp2", "2 ** x.", np.exp2, lambda dy, x, y: dy * y * math.log(2))
Log2, log2 = function(
    "Log2", "Logarithm of base 2.", np.log2, lambda dy, x, y: dy / (x * math.log(2)), **POSITIVE, **POLE
)
Log10, log10 = function(
    "Log10", "Logarithm of base 10.", np.log10, lambda dy, x, y: dy / (x * math.log(10)), **POSITIVE, **POLE
)


def by_element(f: Any, recorded: Any) -> Any:
    """f, of numbers in double, on arrays, since numpy has no such function; `recorded` is for records, as in an export."""

    def apply(x: Any) -> Any:
        if not isinstance(x, np.ndarray | np.generic):
            return recorded(x)
        return np.vectorize(f, otypes=["float64"])(x).astype(x.dtype)

    return apply


Erfc, erfc = function(
    "Erfc",
    "1 - erf(x), without its loss of digits.",
    by_element(math.erfc, lambda x: 1 - x.erf()),
    lambda dy, x, y: dy * ((-(x * x)).exp() * (-2.0 / math.sqrt(math.pi))),
)


Softplus, _ = function("Softplus", "log(1 + e ** x).", lambda x: np.logaddexp(0, x), lambda dy, x, y: dy * x.sigmoid())


@tensor_method()
def softplus(a: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    """log(1 + e ** (beta a)) / beta, but a itself where beta a > threshold."""
    scaled = a if beta == 1 else a * beta
    y = Softplus()(scaled)
    y = y if beta == 1 else y / beta
    return y if threshold >= 20 else where(gt(scaled, threshold), a, y)  # beyond 20 they are equal in float32


class Step(Unary):
    """A function that is constant between its steps."""

    gradient = no_gradient


Sign, sign = function(
    "Sign",
    "-1, 0 or 1; 0 of a NaN, as torch has it.",
    lambda x: np.sign(np.where(x == x, x, 0)) if x.dtype != bool else x,
    base=Step,
)


class Rounding(Step):
    """To an integer; integers are one already and keep their dtype."""

    def operand_dtype(self, *inputs: Any) -> str:
        return dtype_name(inputs[0].dtype)

    def into(self, out: NDArray, *inputs: NDArray) -> None:
        call(str(self.kernel) if out.dtype in FLOATS else "copy", [out], x=inputs[0])

    def formula(self, x: np.ndarray) -> Any:
        return self.ufunc(x) if x.dtype.kind == "f" else x


Floor, floor = function("Floor", "The largest integer that is not above x.", np.floor, base=Rounding)
Ceil, ceil = function("Ceil", "The smallest integer that is not below x.", np.ceil, base=Rounding)
Round, round = function("Round", "The nearest integer; halves go to the even one.", np.rint, base=Rounding)
abs = absolute  # torch's name

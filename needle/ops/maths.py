"""Element-wise functions of one tensor."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from needle.autograd import Tensor, op, tensor_method
from needle.backend_ndarray import FLOATS, NDArray, call, dtype_name

from .common import Unary
from .comparison import gt
from .elementwise import divide, divide_scalar, mul_scalar, multiply, negate, where


@op
class Exp(Unary):
    """e ** x."""

    kernel = "exp"
    ufunc = np.exp

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        return multiply(out_grad, node)


@tensor_method()
def exp(a: Tensor) -> Tensor:
    return Exp()(a)


@op
class Log(Unary):
    """Natural logarithm."""

    kernel = "log"
    ufunc = np.log
    zero_is_safe = False
    domain = (0.2, 4.0)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        return divide(out_grad, node.inputs[0])


@tensor_method()
def log(a: Tensor) -> Tensor:
    return Log()(a)


@op
class Sqrt(Unary):
    """Square root."""

    kernel = "sqrt"
    ufunc = np.sqrt
    domain = (0.2, 4.0)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        return divide(mul_scalar(out_grad, 0.5), node)


@tensor_method()
def sqrt(a: Tensor) -> Tensor:
    return Sqrt()(a)


@op
class Rsqrt(Unary):
    """1 / sqrt(x)."""

    kernel = "rsqrt"
    zero_is_safe = False
    domain = (0.2, 4.0)

    def formula(self, x: np.ndarray) -> Any:
        return 1 / np.sqrt(x)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        return multiply(out_grad, mul_scalar(divide(node, node.inputs[0]), -0.5))


@tensor_method()
def rsqrt(a: Tensor) -> Tensor:
    return Rsqrt()(a)


@op
class Abs(Unary):
    """|x|; the gradient at 0 is 0."""

    kernel = "abs"
    ufunc = np.abs

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        return multiply(out_grad, sign(node.inputs[0]))


@tensor_method("abs", "__abs__")
def absolute(a: Tensor) -> Tensor:
    return Abs()(a)


@op
class Reciprocal(Unary):
    """1 / x."""

    kernel = "reciprocal"
    ufunc = np.reciprocal
    zero_is_safe = False
    domain = (0.3, 3.0)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        return negate(multiply(out_grad, multiply(node, node)))


@tensor_method()
def reciprocal(a: Tensor) -> Tensor:
    return Reciprocal()(a)


@op
class Sin(Unary):
    """Sine of an angle in radians."""

    kernel = "sin"
    ufunc = np.sin

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        return multiply(out_grad, cos(node.inputs[0]))


@tensor_method()
def sin(a: Tensor) -> Tensor:
    return Sin()(a)


@op
class Cos(Unary):
    """Cosine of an angle in radians."""

    kernel = "cos"
    ufunc = np.cos

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        return negate(multiply(out_grad, sin(node.inputs[0])))


@tensor_method()
def cos(a: Tensor) -> Tensor:
    return Cos()(a)


@op
class Erf(Unary):
    """Error function."""

    kernel = "erf"

    def formula(self, x: np.ndarray) -> Any:
        return erf_array(x)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        x = node.inputs[0]
        return multiply(out_grad, mul_scalar(exp(negate(multiply(x, x))), 2.0 / math.sqrt(math.pi)))


@tensor_method()
def erf(a: Tensor) -> Tensor:
    return Erf()(a)


def erf_array(x: np.ndarray) -> np.ndarray:
    """erf in float64, rounded to the dtype of x; numpy has none."""
    if not isinstance(x, np.ndarray | np.generic):  # records, as in an export
        return x.erf()
    return np.vectorize(math.erf, otypes=["float64"])(x).astype(x.dtype)


@op
class Softplus(Unary):
    """log(1 + e ** x)."""

    kernel = "softplus"

    def formula(self, x: np.ndarray) -> Any:
        return np.logaddexp(0, x)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        from .activation import sigmoid

        return multiply(out_grad, sigmoid(node.inputs[0]))


@tensor_method()
def softplus(a: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    """log(1 + e ** (beta a)) / beta, but a itself where beta a > threshold."""
    scaled = a if beta == 1 else mul_scalar(a, beta)
    y = Softplus()(scaled)
    y = y if beta == 1 else divide_scalar(y, beta)
    return y if threshold >= 20 else where(gt(scaled, threshold), a, y)  # beyond 20 they are equal in float32


class Step(Unary):
    """A function that is constant between its steps."""

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        return None


@op
class Sign(Step):
    """-1, 0 or 1; 0 of a NaN, as torch has it."""

    kernel = "sign"

    def formula(self, x: np.ndarray) -> Any:
        return np.sign(np.where(x == x, x, 0)) if x.dtype != bool else x


@tensor_method()
def sign(a: Tensor) -> Tensor:
    return Sign()(a)


class Rounding(Step):
    """To an integer; integers are one already and keep their dtype."""

    def operand_dtype(self, *inputs: Any) -> str:
        return dtype_name(inputs[0].dtype)

    def lower(self, builder: Any, inputs: list[NDArray], out: NDArray) -> None:
        call(str(self.kernel) if out.dtype in FLOATS else "copy", [out], x=inputs[0])

    def formula(self, x: np.ndarray) -> Any:
        return self.ufunc(x) if x.dtype.kind == "f" else x


@op
class Floor(Rounding):
    """The largest integer that is not above x."""

    kernel = "floor"
    ufunc = np.floor


@tensor_method()
def floor(a: Tensor) -> Tensor:
    return Floor()(a)


@op
class Ceil(Rounding):
    """The smallest integer that is not below x."""

    kernel = "ceil"
    ufunc = np.ceil


@tensor_method()
def ceil(a: Tensor) -> Tensor:
    return Ceil()(a)


@op
class Round(Rounding):
    """The nearest integer; halves go to the even one."""

    kernel = "round"
    ufunc = np.rint


@tensor_method()
def round(a: Tensor) -> Tensor:
    return Round()(a)


abs = absolute  # torch's name

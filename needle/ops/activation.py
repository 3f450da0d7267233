"""Activations, their gradients, and the table by which fused ops and kernels know them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, ClassVar

import numpy as np

from needle import _core
from needle.autograd import Tensor, op, tensor_method

from .common import Elementwise, Unary, gradient_of_decomposition
from .comparison import ge, gt, lt
from .elementwise import add, add_scalar, cast, divide_scalar, minimum, mul_scalar, multiply, negate, where
from .maths import absolute, erf, erf_array, exp

ACTIVATIONS: dict[str, type[Activation]] = {}  # by kernel name; filled as the classes are made
CODES = _core.ACTIVATIONS  # the activations that epilogues have, by number (csrc/kernels/activations.def)


def activation_code(name: str) -> int:
    """The number that kernels take as attribute `activation` (csrc/kernels/activations.def)."""
    if name not in CODES:
        raise ValueError(f"[activation] expects one of {', '.join(CODES)}, got {name}.")
    return CODES.index(name)


def apply_activation(name: str, x: Tensor, alpha: float = 0.0) -> Tensor:
    """Activation `name` of x as an op of its own."""
    if name == "none":
        return x
    cls: Any = ACTIVATIONS[name]
    return (cls(alpha) if cls.has_alpha else cls())(x)


class Activation(Unary):
    """An element-wise function with a gradient kernel `<kernel>_grad`, defined by `slope` in terms of ops."""

    from_output: ClassVar[bool] = False  # the gradient kernel reads the output, so that the input need not be kept
    has_alpha: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        if cls.kernel:
            ACTIVATIONS[cls.kernel] = cls

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        alpha = self.attributes().get("alpha")
        return ActivationGrad(str(self.kernel), alpha)(node if self.from_output else node.inputs[0], out_grad)

    @staticmethod
    def slope(x: Tensor, alpha: Any) -> Tensor:
        """The derivative at x, or where the output is x."""
        raise NotImplementedError


@op
class ActivationGrad(Elementwise):
    """out_grad times the derivative of an activation; first input: the activation's input or output."""

    activation: str
    alpha: Any
    gradient = gradient_of_decomposition
    kernel = "activation_grad"  # stands for the kernel of `activation`

    def row(self) -> tuple[Any, Iterable[float]]:
        return f"{self.activation}_grad", () if self.alpha is None else (self.alpha,)

    def decompose(self, x: Tensor, out_grad: Tensor) -> Tensor:
        return multiply(out_grad, ACTIVATIONS[self.activation].slope(x, self.alpha))

    @classmethod
    def samples(cls) -> list:
        kinds = [({"activation": n, "alpha": 0.3 if c.has_alpha else None}) for n, c in ACTIVATIONS.items()]
        return [(k, [(4, 33), (4, 33)]) for k in kinds]


@op
class ReLU(Activation):
    """max(x, 0)."""

    kernel = "relu"
    from_output = True

    def formula(self, x: np.ndarray) -> Any:
        return np.where(x < 0, 0, x)  # keeps -0, which np.maximum need not

    @staticmethod
    def slope(x: Tensor, alpha: Any) -> Tensor:
        return cast(gt(x, 0.0), x.dtype)


@tensor_method()
def relu(a: Tensor) -> Tensor:
    return ReLU()(a)


@op
class ReLU6(Activation):
    """x limited to [0, 6]."""

    kernel = "relu6"
    from_output = True

    def formula(self, x: np.ndarray) -> Any:
        return np.clip(x, 0, 6)

    @staticmethod
    def slope(x: Tensor, alpha: Any) -> Tensor:
        return multiply(cast(gt(x, 0.0), x.dtype), cast(lt(x, 6.0), x.dtype))


def relu6(a: Tensor) -> Tensor:
    return ReLU6()(a)


@op
class LeakyReLU(Activation):
    """x where x > 0, else alpha * x."""

    alpha: float
    kernel = "leaky_relu"
    has_alpha = True

    def formula(self, x: np.ndarray) -> Any:
        return np.where(x > 0, x, self.alpha * x)

    @staticmethod
    def slope(x: Tensor, alpha: Any) -> Tensor:
        return add_scalar(mul_scalar(cast(gt(x, 0.0), x.dtype), 1.0 - alpha), alpha)

    @classmethod
    def samples(cls) -> list:
        return [({"alpha": 0.1}, [(4, 33)])]


def leaky_relu(a: Tensor, negative_slope: float = 0.01) -> Tensor:
    return LeakyReLU(negative_slope)(a)


@op
class Sigmoid(Activation):
    """1 / (1 + e ** -x)."""

    kernel = "sigmoid"
    from_output = True

    def formula(self, x: np.ndarray) -> Any:
        return sigmoid_array(x)

    @staticmethod
    def slope(y: Tensor, alpha: Any) -> Tensor:
        return multiply(y, add_scalar(negate(y), 1.0))


@tensor_method()
def sigmoid(a: Tensor) -> Tensor:
    return Sigmoid()(a)


def sigmoid_array(x: np.ndarray) -> np.ndarray:
    small = np.exp(-np.abs(x))  # never overflows
    return np.where(x >= 0, 1 / (1 + small), small / (1 + small))


@op
class Tanh(Activation):
    """Hyperbolic tangent."""

    kernel = "tanh"
    from_output = True
    ufunc = np.tanh

    @staticmethod
    def slope(y: Tensor, alpha: Any) -> Tensor:
        return add_scalar(negate(multiply(y, y)), 1.0)


@tensor_method()
def tanh(a: Tensor) -> Tensor:
    return Tanh()(a)


@op
class SiLU(Activation):
    """x * sigmoid(x) (Elfwing et al., arXiv 1702.03118)."""

    kernel = "silu"

    def formula(self, x: np.ndarray) -> Any:
        return x * sigmoid_array(x)

    @staticmethod
    def slope(x: Tensor, alpha: Any) -> Tensor:
        s = sigmoid(x)
        return multiply(s, add_scalar(multiply(x, add_scalar(negate(s), 1.0)), 1.0))


@tensor_method()
def silu(a: Tensor) -> Tensor:
    return SiLU()(a)


@op
class GELU(Activation):
    """x times the normal distribution function of x (Hendrycks and Gimpel, arXiv 1606.08415)."""

    kernel = "gelu"

    def formula(self, x: np.ndarray) -> Any:
        return x * (1 + erf_array(x / math.sqrt(2.0))) / 2

    @staticmethod
    def slope(x: Tensor, alpha: Any) -> Tensor:
        cdf = mul_scalar(add_scalar(erf(mul_scalar(x, math.sqrt(0.5))), 1.0), 0.5)
        density = mul_scalar(exp(mul_scalar(multiply(x, x), -0.5)), 1 / math.sqrt(2 * math.pi))
        return add(cdf, multiply(x, density))


@op
class GELUTanh(Activation):
    """GELU by its tanh approximation: x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x ** 3))) / 2."""

    kernel = "gelu_tanh"

    def formula(self, x: np.ndarray) -> Any:
        return x * (1 + np.tanh(GELU_SCALE * (x + GELU_CUBE * x**3))) / 2

    @staticmethod
    def slope(x: Tensor, alpha: Any) -> Tensor:
        square = multiply(x, x)
        t = tanh(mul_scalar(multiply(x, add_scalar(mul_scalar(square, GELU_CUBE), 1.0)), GELU_SCALE))
        inner = mul_scalar(add_scalar(mul_scalar(square, 3 * GELU_CUBE), 1.0), GELU_SCALE)
        by_tanh = multiply(multiply(x, Tanh.slope(t, None)), inner)
        return mul_scalar(add_scalar(add(t, by_tanh), 1.0), 0.5)


GELU_SCALE, GELU_CUBE = math.sqrt(2.0 / math.pi), 0.044715


@tensor_method()
def gelu(a: Tensor, approximate: str = "none") -> Tensor:
    """GELU, exact or (approximate="tanh") by its tanh formula."""
    if approximate not in ("none", "tanh"):
        raise ValueError(f"[gelu] approximate expects none or tanh, got {approximate}.")
    return GELU()(a) if approximate == "none" else GELUTanh()(a)


@op
class Hardsigmoid(Activation):
    """x / 6 + 1 / 2, limited to [0, 1]."""

    kernel = "hardsigmoid"
    domain = (-5.0, 5.0)

    def formula(self, x: np.ndarray) -> Any:
        return np.clip(x + 3, 0, 6) / 6

    @staticmethod
    def slope(x: Tensor, alpha: Any) -> Tensor:
        return divide_scalar(cast(lt(absolute(x), 3.0), x.dtype), 6.0)


@tensor_method()
def hardsigmoid(a: Tensor) -> Tensor:
    return Hardsigmoid()(a)


@op
class Hardswish(Activation):
    """x * hardsigmoid(x) (Howard et al., arXiv 1905.02244)."""

    kernel = "hardswish"
    domain = (-5.0, 5.0)

    def formula(self, x: np.ndarray) -> Any:
        return x * np.clip(x + 3, 0, 6) / 6

    @staticmethod
    def slope(x: Tensor, alpha: Any) -> Tensor:
        inside = cast(lt(absolute(x), 3.0), x.dtype)
        return add(multiply(inside, add_scalar(divide_scalar(x, 3.0), 0.5)), cast(ge(x, 3.0), x.dtype))


@tensor_method()
def hardswish(a: Tensor) -> Tensor:
    return Hardswish()(a)


@op
class ELU(Activation):
    """x where x > 0, else alpha (e ** x - 1)."""

    alpha: float
    kernel = "elu"
    has_alpha = True

    def formula(self, x: np.ndarray) -> Any:
        return np.where(x > 0, x, self.alpha * np.expm1(np.where(x > 0, 0, x)))

    @staticmethod
    def slope(x: Tensor, alpha: Any) -> Tensor:
        positive = gt(x, 0.0)
        return where(positive, 1.0, mul_scalar(exp(minimum(x, 0.0)), alpha))

    @classmethod
    def samples(cls) -> list:
        return [({"alpha": 0.7}, [(4, 33)])]


def elu(a: Tensor, alpha: float = 1.0) -> Tensor:
    return ELU(alpha)(a)

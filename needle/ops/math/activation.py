"""Activations, their gradients, and the table by which fused ops and kernels know them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, ClassVar

import numpy as np

from needle import _core
from needle.autograd import Tensor, op, tensor_method
from needle.ops.common import Elementwise, Unary, gradient_of_decomposition
from needle.ops.families import function_of, op_class, samples_of, unary
from needle.ops.math.elementwise import (
    minimum,
    where,
)
from needle.ops.math.maths import erf, erf_array, exp

__all__ = [
    "ACTIVATIONS",
    "elu",
    "gelu",
    "hardsigmoid",
    "hardswish",
    "leaky_relu",
    "relu",
    "relu6",
    "sigmoid",
    "silu",
    "tanh",
]

ACTIVATIONS: dict[str, type[Activation]] = {}  # by kernel name; filled as the classes are made
CODES = _core.ACTIVATIONS  # the activations that epilogues have, by number (csrc/kernels/activations.def)


def activation_code(name: str) -> int:
    """The number that kernels take as attribute `activation` (csrc/kernels/activations.def)."""
    if name not in CODES:
        raise ValueError(f"[activation] expects one of {', '.join(CODES)}, got {name}.")
    return CODES.index(name)


def activation_op(name: str, alpha: float = 0.0) -> Activation:
    """Activation `name` as an op; alpha counts where it has one."""
    cls: Any = ACTIVATIONS[name]
    return cls(alpha) if cls.has_alpha else cls()


def apply_activation(name: str, x: Tensor, alpha: float = 0.0) -> Tensor:
    """Activation `name` of x as an op of its own."""
    return x if name == "none" else activation_op(name, alpha)(x)


class Activation(Unary):
    """An element-wise function with a gradient kernel `<kernel>_grad`, defined by `slope` in terms of ops."""

    from_output: ClassVar[bool] = False  # the gradient kernel reads the output, so that the input need not be kept
    has_alpha: ClassVar[bool] = False
    slope: ClassVar[Any]  # the derivative at x, or where the output is x, as a function of x and alpha if there is one

    def __init_subclass__(cls) -> None:
        if cls.kernel:
            ACTIVATIONS[cls.kernel] = cls

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        alpha = self.attributes().get("alpha")
        return ActivationGrad(str(self.kernel), alpha)(node if self.from_output else node.inputs[0], out_grad)


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
        return out_grad * ACTIVATIONS[self.activation].slope(x, *self.row()[1])

    @classmethod
    def samples(cls) -> list:
        kinds = [({"activation": n, "alpha": 0.3 if c.has_alpha else None}) for n, c in ACTIVATIONS.items()]
        return [(k, [(4, 33), (4, 33)]) for k in kinds]


def activation(words: str, kernel: str, doc: str, ufunc: Any, slope: Any, **facts: Any) -> Any:
    """The activation `words`: its value in numpy and its slope, of x and, with `has_alpha`, of the attribute alpha."""
    if facts.get("has_alpha"):
        facts["__annotations__"] = {"alpha": "float"}
    facts |= {"kernel": kernel, "ufunc": staticmethod(ufunc), "slope": staticmethod(slope)}
    return op_class(__name__, words, Activation, doc, **facts)


ReLU = activation(
    "ReLU",
    "relu",
    "max(x, 0).",
    lambda x: np.where(x < 0, 0, x),  # keeps -0, which np.maximum need not
    lambda y: (y > 0.0).cast(y.dtype),
    from_output=True,
)
relu = function_of(ReLU, "relu")

ReLU6 = activation(
    "ReLU6",
    "relu6",
    "x limited to [0, 6].",
    lambda x: np.clip(x, 0, 6),
    lambda y: (y > 0.0).cast(y.dtype) * (y < 6.0).cast(y.dtype),
    from_output=True,
)
relu6 = unary(ReLU6, "relu6")

LeakyReLU = activation(
    "LeakyReLU",
    "leaky_relu",
    "x where x > 0, else alpha * x.",
    lambda x, alpha: np.where(x > 0, x, alpha * x),
    lambda x, alpha: (x > 0.0).cast(x.dtype) * (1.0 - alpha) + alpha,
    has_alpha=True,
    samples=samples_of(({"alpha": 0.1}, [(4, 33)])),
)


def leaky_relu(a: Tensor, negative_slope: float = 0.01) -> Tensor:
    """Elements from zero on as they are, others times `negative_slope`. As torch.nn.functional.leaky_relu."""
    return LeakyReLU(negative_slope)(a)


def sigmoid_array(x: np.ndarray) -> np.ndarray:
    small = np.exp(-np.abs(x))  # never overflows
    return np.where(x >= 0, 1 / (1 + small), small / (1 + small))


Sigmoid = activation(
    "Sigmoid",
    "sigmoid",
    "1 / (1 + e ** -x).",
    sigmoid_array,
    lambda y: y * (1.0 - y),
    from_output=True,
)
sigmoid = function_of(Sigmoid, "sigmoid")

Tanh = activation(
    "Tanh",
    "tanh",
    "Hyperbolic tangent.",
    np.tanh,
    lambda y: 1.0 - y * y,
    from_output=True,
)
tanh = function_of(Tanh, "tanh")


def silu_slope(x: Tensor) -> Tensor:
    s = sigmoid(x)
    return s * (x * (1.0 - s) + 1.0)


SILU = "x * sigmoid(x) (Elfwing et al., arXiv 1702.03118)."
SiLU = activation("SiLU", "silu", SILU, lambda x: x * sigmoid_array(x), silu_slope)
silu = function_of(SiLU, "silu")


def gelu_slope(x: Tensor) -> Tensor:
    cdf = (erf(x * math.sqrt(0.5)) + 1.0) * 0.5
    density = exp(x * x * -0.5) * (1 / math.sqrt(2 * math.pi))
    return cdf + x * density


GELU = activation(
    "GELU",
    "gelu",
    "x times the normal distribution function of x (Hendrycks and Gimpel, arXiv 1606.08415).",
    lambda x: x * (1 + erf_array(x / math.sqrt(2.0))) / 2,
    gelu_slope,
)
GELU_SCALE, GELU_CUBE = math.sqrt(2.0 / math.pi), 0.044715


def gelu_tanh_slope(x: Tensor) -> Tensor:
    square = x * x
    t = tanh(x * (square * GELU_CUBE + 1.0) * GELU_SCALE)
    inner = (square * (3 * GELU_CUBE) + 1.0) * GELU_SCALE
    return (t + x * Tanh.slope(t) * inner + 1.0) * 0.5


GELUTanh = activation(
    "GELUTanh",
    "gelu_tanh",
    "GELU by its tanh approximation: x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x ** 3))) / 2.",
    lambda x: x * (1 + np.tanh(GELU_SCALE * (x + GELU_CUBE * x**3))) / 2,
    gelu_tanh_slope,
)


@tensor_method()
def gelu(a: Tensor, approximate: str = "none") -> Tensor:
    """GELU, exact or (approximate="tanh") by its tanh formula."""
    if approximate not in ("none", "tanh"):
        raise ValueError(f"[gelu] approximate expects none or tanh, got {approximate}.")
    return GELU()(a) if approximate == "none" else GELUTanh()(a)


Hardsigmoid = activation(
    "Hardsigmoid",
    "hardsigmoid",
    "x / 6 + 1 / 2, limited to [0, 1].",
    lambda x: np.clip(x + 3, 0, 6) / 6,
    lambda x: (abs(x) < 3.0).cast(x.dtype) / 6.0,
    domain=(-5.0, 5.0),
)
hardsigmoid = function_of(Hardsigmoid, "hardsigmoid")


Hardswish = activation(
    "Hardswish",
    "hardswish",
    "x * hardsigmoid(x) (Howard et al., arXiv 1905.02244).",
    lambda x: x * np.clip(x + 3, 0, 6) / 6,
    lambda x: (abs(x) < 3.0).cast(x.dtype) * (x / 3.0 + 0.5) + (x >= 3.0).cast(x.dtype),
    domain=(-5.0, 5.0),
)
hardswish = function_of(Hardswish, "hardswish")

ELU = activation(
    "ELU",
    "elu",
    "x where x > 0, else alpha (e ** x - 1).",
    lambda x, alpha: np.where(x > 0, x, alpha * np.expm1(np.where(x > 0, 0, x))),
    lambda x, alpha: where(x > 0.0, 1.0, exp(minimum(x, 0.0)) * alpha),
    has_alpha=True,
    samples=samples_of(({"alpha": 0.7}, [(4, 33)])),
)


def elu(a: Tensor, alpha: float = 1.0) -> Tensor:
    """Elements above zero as they are, others `alpha * (e ** x - 1)`. As torch.nn.functional.elu."""
    return ELU(alpha)(a)

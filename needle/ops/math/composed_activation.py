"""Activations that are compositions of other ops. At their corners, and for NaN, they do as torch does."""

from __future__ import annotations

from typing import Any

import numpy as np

from needle.autograd import Op, Spec, Tensor, op, tensor_method
from needle.backend_ndarray import FLOATS, NDArray, dtype_name
from needle.backend_ndarray.kernels import call_map
from needle.ops.common import Elementwise, Unary, check_axis, gradient_of_decomposition, unbroadcast
from needle.ops.families import family, samples_of, unary
from needle.ops.math.activation import ActivationGrad, activation, elu, sigmoid, tanh
from needle.ops.math.arithmetic import clamp
from needle.ops.math.comparison import ge, gt, le
from needle.ops.math.elementwise import Clamp, where
from needle.ops.math.logic import logical_or
from needle.ops.math.maths import absolute, softplus
from needle.ops.shape.basic import broadcast_to, reshape
from needle.ops.shape.indexing import getitem
from needle.ops.shape.masked import masked_fill

__all__ = [
    "celu",
    "glu",
    "hardshrink",
    "hardtanh",
    "logsigmoid",
    "mish",
    "prelu",
    "selu",
    "softshrink",
    "softsign",
    "tanhshrink",
    "threshold",
]

SELU_ALPHA, SELU_SCALE = 1.6732632423543772848, 1.0507009873554804934  # Klambauer et al., arXiv 1706.02515


def selu(a: Tensor) -> Tensor:
    """A scaled elu under which activations keep mean 0 and variance 1."""
    return elu(a, SELU_ALPHA) * SELU_SCALE


def celu(a: Tensor, alpha: float = 1.0) -> Tensor:
    """a where a > 0, else alpha (e ** (a / alpha) - 1) (Barron, arXiv 1704.07483)."""
    if alpha <= 0:
        raise ValueError(f"[celu] alpha expects a positive number, got {alpha}.")
    return elu(a) if alpha == 1 else elu(a * (1 / alpha)) * alpha


def mish_slope(x: Tensor) -> Tensor:
    t = tanh(softplus(x))
    return t + x * sigmoid(x) * (1.0 - t * t)


Mish = activation(
    "Mish",
    "mish",
    "x * tanh(softplus(x)) (Misra, arXiv 1908.08681).",
    lambda x: x * np.tanh(np.logaddexp(0, x)),
    mish_slope,
)
mish = unary(Mish, "mish")


def logsigmoid(a: Tensor) -> Tensor:
    """log(sigmoid(a)), without overflow."""
    return -softplus(-a)


@op
class Hardtanh(Clamp):
    """x limited to [low, high]; other than clamp's, the gradient is 0 on the limits."""

    def operand_dtype(self, *inputs: Any) -> str:
        return dtype_name(inputs[0].dtype)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        x = node.inputs[0]
        return where(logical_or(le(x, self.low), ge(x, self.high)), 0.0, out_grad)


def hardtanh(a: Tensor, min_val: float = -1.0, max_val: float = 1.0) -> Tensor:
    """a limited to [min_val, max_val]."""
    if min_val > max_val:
        raise ValueError(f"[hardtanh] min_val expects at most max_val {max_val}, got {min_val}.")
    return Hardtanh(min_val, max_val)(a)


def tanhshrink(a: Tensor) -> Tensor:
    """a - tanh(a)."""
    return a - tanh(a)


@family
class Shrink(Unary):
    """0 where |x| <= lambd; the gradient is 0 there, too, and else 1."""

    lambd: float

    def gradient(self, out_grad: Tensor, node: Tensor) -> Tensor:
        return where(le(absolute(node.inputs[0]), self.lambd), 0.0, out_grad)

    samples = samples_of(({"lambd": 0.5}, [(4, 33)]))


@op
class Hardshrink(Shrink):
    """0 where |x| <= lambd, else x."""

    kernel = "hardshrink"

    def decompose(self, x: Tensor) -> Tensor:
        return where(le(absolute(x), self.lambd), 0.0, x)

    def formula(self, x: np.ndarray) -> Any:
        return np.where(np.abs(x) <= self.lambd, 0, x)


@tensor_method()
def hardshrink(a: Tensor, lambd: float = 0.5) -> Tensor:
    """0 where |a| <= lambd, else a."""
    return Hardshrink(lambd)(a)


@op
class Softshrink(Shrink):
    """x drawn towards 0 by lambd."""

    kernel = "softshrink"

    def decompose(self, x: Tensor) -> Tensor:
        return x - clamp(x, -self.lambd, self.lambd)

    def formula(self, x: np.ndarray) -> Any:
        return x - np.clip(x, -self.lambd, self.lambd)


def softshrink(a: Tensor, lambd: float = 0.5) -> Tensor:
    """a drawn towards 0 by lambd, 0 where |a| <= lambd."""
    if lambd < 0:
        raise ValueError(f"[softshrink] lambd expects a number of at least 0, got {lambd}.")
    return Softshrink(lambd)(a)


def softsign(a: Tensor) -> Tensor:
    """a / (1 + |a|)."""
    return a / (absolute(a) + 1)


@op
class Threshold(Elementwise):
    """x where x > threshold, else value; both as numbers of x's dtype. The gradient is 0 up to the threshold, else 1."""

    kernel = "threshold"
    threshold: Any
    value: Any

    def operand_dtype(self, *inputs: Any) -> str:
        return dtype_name(inputs[0].dtype)

    def numbers(self, dtype: Any) -> tuple[Any, Any]:
        limit, value = (v if dtype_name(dtype) in FLOATS else int(v) for v in (self.threshold, self.value))
        return limit, value

    def decompose(self, x: Tensor) -> Tensor:
        limit, value = self.numbers(x.dtype)
        return masked_fill(x, le(x, limit), value)

    def into(self, out: NDArray, *inputs: NDArray) -> None:
        call_map("threshold", out, [x.fitted(out.shape, out.dtype) for x in inputs], self.numbers(out.dtype))

    def formula(self, x: np.ndarray) -> Any:
        limit, value = self.numbers(x.dtype)
        return np.where(x <= limit, np.asarray(value, x.dtype), x)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Tensor:
        return where(le(node.inputs[0], self.threshold), 0.0, out_grad)

    samples = samples_of(({"threshold": 0.3, "value": -0.7}, [(4, 33)]))


def threshold(a: Tensor, threshold: float, value: float) -> Tensor:
    """a where a > threshold, else value."""
    return Threshold(threshold, value)(a)


@op
class SlopeBelow(Elementwise):
    """x where x > 0, else slope * x, with an array of slopes that broadcasts to x's shape."""

    kernel = "prelu"

    def formula(self, x: np.ndarray, slope: np.ndarray) -> Any:
        return np.where(x > 0, x, slope * x)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        x, slope = node.inputs
        return (
            SlopeBelowGrad()(x, slope, out_grad) if x.requires_grad else None,
            # out_grad * x where x < 0, else 0; without bools, which images in blocks do not have
            unbroadcast(ActivationGrad("relu", None)(-x, out_grad * x), slope.shape) if slope.requires_grad else None,
        )

    samples = samples_of(({}, [(4, 33), (33,)]), ({}, [(2, 3, 5), (3, 1)]))


@op
class SlopeBelowGrad(Elementwise):
    """out_grad where x > 0, else slope * out_grad: what x gets of `SlopeBelow`."""

    kernel = "prelu_grad"
    gradient = gradient_of_decomposition

    def decompose(self, x: Tensor, slope: Tensor, out_grad: Tensor) -> Tensor:
        return where(gt(x, 0.0), out_grad, slope * out_grad)

    def formula(self, x: np.ndarray, slope: np.ndarray, out_grad: np.ndarray) -> Any:
        return np.where(x > 0, out_grad, slope * out_grad)

    samples = samples_of(({}, [(4, 33), (33,), (4, 33)]))


@op
class PReLU(Op):
    """x where x > 0, else weight * x; weight (1,), or (C,) for x (N, C, *). He et al., arXiv 1502.01852."""

    def infer(self, x: Any, weight: Any) -> Spec:
        channels = x.shape[1] if len(x.shape) > 1 else 1
        if len(weight.shape) > 1 or weight.shape not in ((), (1,), (channels,)):
            raise ValueError(f"[prelu] weight expects shape (1,) or ({channels},), got {tuple(weight.shape)}.")
        return Spec(tuple(x.shape), str(x.dtype))

    def decompose(self, x: Tensor, weight: Tensor) -> Tensor:
        if not x.shape:
            weight = reshape(weight, ())
        elif len(x.shape) > 2:  # a number per channel: an image of one pixel, which lies as x does
            weight = reshape(weight, (1, -1, *(1,) * (len(x.shape) - 2)))
            weight = broadcast_to(weight, (1, x.shape[1], *weight.shape[2:]))
        return SlopeBelow()(x, weight)

    samples = samples_of(({}, [(2, 5, 4, 3), (5,)]), ({}, [(4, 33), (1,)]), ({}, [(4, 3), (3,)]))


@tensor_method()
def prelu(a: Tensor, weight: Tensor) -> Tensor:
    """Leaky relu with a learned slope: weight (1,), or (C,) for a (N, C, *)."""
    return PReLU()(a, weight)


@op
class GLU(Op):
    """The first half along an axis times the sigmoid of the second (Dauphin et al., arXiv 1612.08083)."""

    axis: int = -1

    def infer(self, x: Any) -> Spec:
        axis, shape = check_axis("glu", self.axis, x.shape), list(x.shape)
        if not shape or shape[axis] % 2:
            raise ValueError(f"[glu] axis {self.axis} expects an even size, got shape {tuple(x.shape)}.")
        shape[axis] //= 2
        return Spec(tuple(shape), str(x.dtype))

    def decompose(self, x: Tensor) -> Tensor:
        axis = self.axis % len(x.shape)
        half = x.shape[axis] // 2
        first, second = ((*(slice(None),) * axis, s) for s in (slice(0, half), slice(half, 2 * half)))
        return getitem(x, first) * sigmoid(getitem(x, second))

    samples = samples_of(({}, [(4, 34)]), ({"axis": 1}, [(2, 6, 5)]))


def glu(a: Tensor, axis: int = -1) -> Tensor:
    """The gated linear unit along an axis of even size, which it halves."""
    return GLU(axis)(a)

"""Activations as layers."""

from __future__ import annotations

import numpy as np

from needle import init, ops
from needle.autograd import Tensor
from needle.backend_ndarray import Device
from needle.init.dropout import drawn

from .arguments import check_order
from .basic import Softmax
from .function import Declared, Function
from .module import Module, Parameter

__all__ = [
    "CELU",
    "ELU",
    "GELU",
    "GLU",
    "SELU",
    "Hardshrink",
    "Hardsigmoid",
    "Hardswish",
    "Hardtanh",
    "LeakyReLU",
    "LogSigmoid",
    "Mish",
    "PReLU",
    "RReLU",
    "ReLU",
    "ReLU6",
    "SiLU",
    "Sigmoid",
    "Softmax2d",
    "Softmin",
    "Softplus",
    "Softshrink",
    "Softsign",
    "Tanh",
    "Tanhshrink",
    "Threshold",
]


class ReLU(Function, function=ops.relu): ...


class ReLU6(Function, function=ops.relu6): ...


class Sigmoid(Function, function=ops.sigmoid): ...


class Tanh(Function, function=ops.tanh): ...


class SiLU(Function, function=ops.silu): ...


class Hardswish(Function, function=ops.hardswish): ...


class Hardsigmoid(Function, function=ops.hardsigmoid): ...


class LeakyReLU(Function, function=ops.leaky_relu):
    negative_slope: float = 0.01


class ELU(Function, function=ops.elu):
    alpha: float = 1.0


class GELU(Function, function=ops.gelu):
    approximate: str = "none"


class SELU(Function, function=ops.selu): ...


class CELU(Function, function=ops.celu):
    alpha: float = 1.0


class Mish(Function, function=ops.mish): ...


class LogSigmoid(Function, function=ops.logsigmoid): ...


class Hardtanh(Function, function=ops.hardtanh):
    min_val: float = -1.0
    max_val: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_order("Hardtanh", "max_val", "min_val", self.max_val, self.min_val)


class Tanhshrink(Function, function=ops.tanhshrink): ...


class Hardshrink(Function, function=ops.hardshrink):
    lambd: float = 0.5


class Softshrink(Function, function=ops.softshrink):
    lambd: float = 0.5


class Softplus(Function, function=ops.softplus):
    beta: float = 1.0
    threshold: float = 20.0


class Softsign(Function, function=ops.softsign): ...


class Threshold(Function, function=ops.threshold):
    threshold: float
    value: float


class GLU(Function, function=ops.glu):
    axis: int = -1


class PReLU(Module):
    """Leaky relu with a learned slope: `weight` (1,), or one per channel of (N, C, *)."""

    def __init__(
        self, num_parameters: int = 1, init_slope: float = 0.25, device: Device | None = None, dtype: str = "float32"
    ) -> None:
        super().__init__()
        self.num_parameters = num_parameters
        self.weight = Parameter(init.constant(num_parameters, c=init_slope), device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return ops.prelu(x, self.weight)

    def extra_repr(self) -> str:
        return f"{self.num_parameters}"


class RReLU(Declared):
    """Leaky relu; in training each element has a slope of its own from U(lower, upper), in evaluation their mean."""

    mode_dependent = True

    lower: float = 1 / 8
    upper: float = 1 / 3

    def __post_init__(self) -> None:
        super().__post_init__()
        check_order("RReLU", "upper", "lower", self.upper, self.lower)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return ops.leaky_relu(x, (self.lower + self.upper) / 2)
        shape = tuple(x.shape)
        slope = drawn(x, shape, lambda: np.random.uniform(self.lower, self.upper, shape))
        return ops.where(ops.le(x, 0.0), x * slope, x)


class Softmax2d(Module):
    """Softmax over the channels of (N, C, H, W) or (C, H, W)."""

    def forward(self, x: Tensor) -> Tensor:
        return ops.softmax(x, -3)


class Softmin(Softmax):
    """Softmax of -x."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(-x)

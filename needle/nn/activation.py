"""Activations as layers."""

from __future__ import annotations

import numpy as np

from needle import init, ops
from needle.autograd import Tensor
from needle.backend_ndarray import Device

from .arguments import check_order
from .basic import Softmax
from .module import Module, Parameter


class ReLU(Module):
    def forward(self, x: Tensor) -> Tensor:
        return ops.relu(x)


class ReLU6(Module):
    def forward(self, x: Tensor) -> Tensor:
        return ops.relu6(x)


class Sigmoid(Module):
    def forward(self, x: Tensor) -> Tensor:
        return ops.sigmoid(x)


class Tanh(Module):
    def forward(self, x: Tensor) -> Tensor:
        return ops.tanh(x)


class SiLU(Module):
    def forward(self, x: Tensor) -> Tensor:
        return ops.silu(x)


class Hardswish(Module):
    def forward(self, x: Tensor) -> Tensor:
        return ops.hardswish(x)


class Hardsigmoid(Module):
    def forward(self, x: Tensor) -> Tensor:
        return ops.hardsigmoid(x)


class LeakyReLU(Module):
    def __init__(self, negative_slope: float = 0.01) -> None:
        super().__init__()
        self.negative_slope = negative_slope

    def forward(self, x: Tensor) -> Tensor:
        return ops.leaky_relu(x, self.negative_slope)


class ELU(Module):
    def __init__(self, alpha: float = 1.0) -> None:
        super().__init__()
        self.alpha = alpha

    def forward(self, x: Tensor) -> Tensor:
        return ops.elu(x, self.alpha)


class GELU(Module):
    def __init__(self, approximate: str = "none") -> None:
        super().__init__()
        self.approximate = approximate

    def forward(self, x: Tensor) -> Tensor:
        return ops.gelu(x, self.approximate)


class SELU(Module):
    def forward(self, x: Tensor) -> Tensor:
        return ops.selu(x)


class CELU(Module):
    def __init__(self, alpha: float = 1.0) -> None:
        super().__init__()
        self.alpha = alpha

    def forward(self, x: Tensor) -> Tensor:
        return ops.celu(x, self.alpha)


class Mish(Module):
    def forward(self, x: Tensor) -> Tensor:
        return ops.mish(x)


class LogSigmoid(Module):
    def forward(self, x: Tensor) -> Tensor:
        return ops.logsigmoid(x)


class Hardtanh(Module):
    def __init__(self, min_val: float = -1.0, max_val: float = 1.0) -> None:
        super().__init__()
        check_order("Hardtanh", "max_val", "min_val", max_val, min_val)
        self.min_val, self.max_val = min_val, max_val

    def forward(self, x: Tensor) -> Tensor:
        return ops.hardtanh(x, self.min_val, self.max_val)


class Tanhshrink(Module):
    def forward(self, x: Tensor) -> Tensor:
        return ops.tanhshrink(x)


class Hardshrink(Module):
    def __init__(self, lambd: float = 0.5) -> None:
        super().__init__()
        self.lambd = lambd

    def forward(self, x: Tensor) -> Tensor:
        return ops.hardshrink(x, self.lambd)


class Softshrink(Module):
    def __init__(self, lambd: float = 0.5) -> None:
        super().__init__()
        self.lambd = lambd

    def forward(self, x: Tensor) -> Tensor:
        return ops.softshrink(x, self.lambd)


class Softplus(Module):
    def __init__(self, beta: float = 1.0, threshold: float = 20.0) -> None:
        super().__init__()
        self.beta, self.threshold = beta, threshold

    def forward(self, x: Tensor) -> Tensor:
        return ops.softplus(x, self.beta, self.threshold)


class Softsign(Module):
    def forward(self, x: Tensor) -> Tensor:
        return ops.softsign(x)


class Threshold(Module):
    def __init__(self, threshold: float, value: float) -> None:
        super().__init__()
        self.threshold, self.value = threshold, value

    def forward(self, x: Tensor) -> Tensor:
        return ops.threshold(x, self.threshold, self.value)


class GLU(Module):
    def __init__(self, axis: int = -1) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, x: Tensor) -> Tensor:
        return ops.glu(x, self.axis)


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


class RReLU(Module):
    """Leaky relu; in training each element has a slope of its own from U(lower, upper), in evaluation their mean."""

    mode_dependent = True

    def __init__(self, lower: float = 1 / 8, upper: float = 1 / 3) -> None:
        super().__init__()
        check_order("RReLU", "upper", "lower", upper, lower)
        self.lower, self.upper = lower, upper

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return ops.leaky_relu(x, (self.lower + self.upper) / 2)
        slope = np.random.uniform(self.lower, self.upper, x.shape)
        return ops.where(ops.le(x, 0.0), x * Tensor(slope, device=x.device, dtype=x.dtype, requires_grad=False), x)


class Softmax2d(Module):
    """Softmax over the channels of (N, C, H, W) or (C, H, W)."""

    def forward(self, x: Tensor) -> Tensor:
        return ops.softmax(x, -3)


class Softmin(Softmax):
    """Softmax of -x."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(-x)

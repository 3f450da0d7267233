"""Linear, containers, losses and the layers without parameters."""

from __future__ import annotations

from typing import Any

import numpy as np

from needle import init, ops
from needle.autograd import Tensor
from needle.backend_ndarray import Device

from .module import Module, Parameter


class Identity(Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


class Linear(Module):
    """y = x W + b for x of shape (..., in_features).

    layout="needle": weight (in, out), bias (1, out); layout="torch": weight (out, in), bias (out,).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Device | None = None,
        dtype: str = "float32",
        layout: str = "needle",
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self._layout = in_features, out_features, layout
        weight = init.kaiming_uniform(in_features, out_features, device=device, dtype=dtype)
        self.weight = Parameter(weight if layout == "needle" else weight.numpy().T, device=device, dtype=dtype)
        self.bias: Tensor | None = None
        if bias:
            drawn = init.kaiming_uniform(out_features, 1, device=device, dtype=dtype).numpy()
            self.bias = Parameter(drawn.reshape((1, -1) if layout == "needle" else (-1,)), device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return ops.linear(x, self.weight, self.bias, layout=self._layout)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}"


class Flatten(Module):
    def __init__(self, start_dim: int = 1, end_dim: int = -1) -> None:
        super().__init__()
        self.start_dim, self.end_dim = start_dim, end_dim

    def forward(self, x: Tensor) -> Tensor:
        return ops.flatten(x, self.start_dim, self.end_dim)


class Sequential(Module):
    """Calls its modules one after the other; they are named "0", "1", ... and listed in `modules`."""

    container = True

    def __init__(self, *modules: Module) -> None:
        super().__init__()
        self.modules = list(modules)  # type: ignore[method-assign,assignment]

    def member_name(self, attribute: str) -> str:
        return "" if attribute == "modules" else attribute

    def forward(self, x: Any) -> Any:
        for m in self.modules:  # type: ignore[attr-defined]
            x = m(x)
        return x


class Residual(Module):
    """fn(x) + x."""

    container = True

    def __init__(self, fn: Module) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(x) + x


class Dropout(Module):
    """In training keeps each element where rand <= 1 - p and scales it by 1 / (1 - p); draws from numpy's global stream."""

    mode_dependent = True

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return dropout(x, self.p, self.training)

    def extra_repr(self) -> str:
        return f"p={self.p}"


def dropout(x: Tensor, p: float = 0.5, training: Any = True) -> Tensor:
    """See Dropout."""
    if not training:
        return x
    keep = np.random.rand(*x.shape) <= 1 - p
    return x * Tensor(keep.astype(x.dtype) / (1 - p), device=x.device, dtype=x.dtype, requires_grad=False)


class SoftmaxLoss(Module):
    """Mean cross entropy of logits (batch, classes) and integer labels (batch,)."""

    def forward(self, logits: Tensor, y: Tensor) -> Tensor:
        return ops.cross_entropy(logits, y)


class Softmax(Module):
    def __init__(self, axis: int = -1) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, x: Tensor) -> Tensor:
        return ops.softmax(x, self.axis)


class LogSoftmax(Softmax):
    def forward(self, x: Tensor) -> Tensor:
        return ops.log_softmax(x, self.axis)


class Upsample(Module):
    """See ops.interpolate."""

    def __init__(
        self, size: Any = None, scale_factor: Any = None, mode: str = "nearest", align_corners: bool | None = None
    ) -> None:
        super().__init__()
        self.size, self.scale_factor, self.mode, self.align_corners = size, scale_factor, mode, align_corners

    def forward(self, x: Tensor) -> Tensor:
        return ops.interpolate(x, self.size, self.scale_factor, self.mode, self.align_corners)

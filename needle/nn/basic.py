"""Linear, residuals, losses and the layers without parameters."""

from __future__ import annotations

from typing import Any

from needle import init, ops
from needle.autograd import Tensor
from needle.backend_ndarray import Device
from needle.init.dropout import alpha_drop, channel_shape, drop, dropout

from .arguments import choice
from .function import Declared
from .module import Module, Parameter

__all__ = [
    "AlphaDropout",
    "Dropout",
    "Dropout1d",
    "Dropout2d",
    "Dropout3d",
    "FeatureAlphaDropout",
    "Flatten",
    "Identity",
    "Linear",
    "LogSoftmax",
    "Residual",
    "Softmax",
    "SoftmaxLoss",
    "StochasticDepth",
    "dropout",
]


class Identity(Module):
    """What comes in, as it is."""

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
        self.weight = Parameter(
            weight if layout == "needle" else ops.permute(weight, (1, 0)), device=device, dtype=dtype
        )
        self.bias: Tensor | None = None
        if bias:
            drawn = init.kaiming_uniform(out_features, 1, device=device, dtype=dtype).numpy()
            self.bias = Parameter(drawn.reshape((1, -1) if layout == "needle" else (-1,)), device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return ops.linear(x, self.weight, self.bias, layout=self._layout)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}"


class Flatten(Module):
    """Axes start_dim to end_dim as one: (N, C, H, W) to (N, C H W)."""

    def __init__(
        self, start_dim: int = 1, end_dim: int = -1, device: Device | None = None, dtype: str = "float32"
    ) -> None:
        super().__init__()
        self.start_dim, self.end_dim = start_dim, end_dim

    def forward(self, x: Tensor) -> Tensor:
        return ops.flatten(x, self.start_dim, self.end_dim)


class Residual(Module):
    """fn(x) + x, for an `fn` that keeps the shape."""

    container = True

    def __init__(self, fn: Module, device: Device | None = None, dtype: str = "float32") -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(x) + x


class Dropout(Module):
    """In training keeps each element where rand <= 1 - p and scales it by 1 / (1 - p); draws from numpy's global stream."""

    mode_dependent = True

    def __init__(self, p: float = 0.5, device: Device | None = None, dtype: str = "float32") -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return dropout(x, self.p, self.training)

    def extra_repr(self) -> str:
        return f"p={self.p}"


class Dropout1d(Dropout):
    """Dropout of whole channels of (N, C, L), or of one sample (C, L)."""

    def forward(self, x: Tensor) -> Tensor:
        return drop(x, channel_shape(x, x.ndim == 3), self.p) if self.training and self.p else x


class Dropout2d(Dropout):
    """Dropout of whole channels of (N, C, *); the first two axes count as N and C, however many there are, as in torch."""

    def forward(self, x: Tensor) -> Tensor:
        return drop(x, channel_shape(x), self.p) if self.training and self.p else x


class Dropout3d(Dropout):
    """Dropout of whole channels of (N, C, D, H, W), or of one sample (C, D, H, W)."""

    def forward(self, x: Tensor) -> Tensor:
        return drop(x, channel_shape(x, x.ndim == 5), self.p) if self.training and self.p else x


class StochasticDepth(Dropout):
    """Dropout of whole samples of (N, *): of each for itself in mode "row", of all or none in "batch" (arXiv 1603.09382)."""

    arguments = {"mode": choice("row", "batch")}

    def __init__(self, p: float = 0.5, mode: str = "row") -> None:
        super().__init__(p)
        self.mode = mode

    def forward(self, x: Tensor) -> Tensor:
        ones = [1] * (x.ndim - 1)
        return drop(x, (x.shape[0] if self.mode == "row" else 1, *ones), self.p) if self.training and self.p else x


class AlphaDropout(Dropout):
    """Dropout that keeps mean 0 and variance 1, for networks of selu."""

    def forward(self, x: Tensor) -> Tensor:
        return alpha_drop(x, x.shape, self.p) if self.training and self.p else x


class FeatureAlphaDropout(Dropout):
    """AlphaDropout of whole channels of (N, C, *)."""

    def forward(self, x: Tensor) -> Tensor:
        return alpha_drop(x, channel_shape(x), self.p) if self.training and self.p else x


class SoftmaxLoss(Module):
    """Mean cross entropy of logits (batch, classes, *) and class numbers (batch, *): see `ops.softmax_loss`."""

    def forward(self, logits: Tensor, y: Any) -> Tensor:
        return ops.softmax_loss(logits, y)


def axis_of(x: Tensor, axis: int | None) -> int:
    """The axis of a softmax; None: torch's old rule, the first axis of 0, 1 or 3, else the second."""
    if axis is not None:
        return axis
    return 0 if x.ndim in (0, 1, 3) else 1


class Softmax(Declared):
    """Softmax along an axis; None: torch's old rule, the first axis of 0, 1 or 3, else the second."""

    axis: int | None = -1

    def forward(self, x: Tensor) -> Tensor:
        return ops.softmax(x, axis_of(x, self.axis))


class LogSoftmax(Softmax):
    """log(softmax(x)) along an axis, without its overflow."""

    def forward(self, x: Tensor) -> Tensor:
        return ops.log_softmax(x, axis_of(x, self.axis))

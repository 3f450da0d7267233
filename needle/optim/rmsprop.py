"""RMSprop."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from needle.backend_ndarray import NDArray
from needle.nn.module import Parameter

from .base import Optimizer


class RMSprop(Optimizer):
    """Steps divided by a running root mean square of the gradient (Tieleman and Hinton, 2012), in torch's rule.

    s = alpha s + (1 - alpha) g^2; u = momentum u + g / (sqrt(s) + eps); w -= lr u, with weight decay in g.
    centered: s less the square of a running mean of g (Graves, arXiv 1308.0850).
    """

    options = ("lr", "alpha", "eps", "weight_decay", "momentum", "centered")

    def __init__(
        self,
        params: Iterable[Parameter],
        lr: float = 0.01,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        centered: bool = False,
    ) -> None:
        super().__init__(params)
        self.lr, self.alpha, self.eps, self.weight_decay = lr, alpha, eps, weight_decay
        self.momentum, self.centered = momentum, centered

    @property
    def slots(self) -> tuple[str, ...]:
        return ("square",) + ("momentum",) * bool(self.momentum) + ("mean",) * self.centered

    def update(self, p: Parameter, grad: Any, state: list[Any], first: bool) -> None:
        data, arrays = p.cached_data, dict(zip(self.slots, state, strict=True))
        g = grad + data * self.weight_decay if self.weight_decay else grad
        square = arrays["square"]
        square[...] = square * self.alpha + g * g * (1 - self.alpha)
        spread = square
        if self.centered:
            mean = arrays["mean"]
            mean[...] = mean * self.alpha + g * (1 - self.alpha)
            spread = square - mean * mean
        step = g / (square_root(spread) + self.eps)
        if self.momentum:
            u = arrays["momentum"]
            u[...] = u * self.momentum + step
            step = u
        data[...] = data - step * self.lr


def square_root(a: Any) -> Any:
    return a.ewise("sqrt") if isinstance(a, NDArray) else np.sqrt(a)

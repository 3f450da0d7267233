"""RMSprop."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

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

    def kernel(self, first: bool) -> tuple[Any, ...]:
        rates = (self.lr, self.alpha, self.eps, self.weight_decay, self.momentum)
        return ("rmsprop_step", *rates, self.centered)

    def operands(self, data: Any, state: list[Any]) -> list[Any]:
        arrays = dict(zip(self.slots, state, strict=True))  # the kernel leaves alone what stands in for a missing one
        return [data, *(arrays.get(slot, state[0]) for slot in ("square", "momentum", "mean"))]

    def formula(self, data: np.ndarray, grad: np.ndarray, state: list[Any], first: bool) -> None:
        arrays = dict(zip(self.slots, state, strict=True))
        g, square = grad + self.weight_decay * data, arrays["square"]
        square[...] = self.alpha * square + (1 - self.alpha) * g * g
        spread = square
        if self.centered:
            mean = arrays["mean"]
            mean[...] = self.alpha * mean + (1 - self.alpha) * g
            spread = square - mean * mean
        step = g / (np.sqrt(spread) + self.eps)
        if self.momentum:
            u = arrays["momentum"]
            u[...] = self.momentum * u + step
            step = u
        data -= self.lr * step

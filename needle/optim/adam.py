"""Adam and AdamW."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from needle.nn.module import Parameter

from .base import Optimizer


class Adam(Optimizer):
    """Adam with bias correction (Kingma and Ba, 2015); weight decay is added to the gradient."""

    decoupled = False
    options = ("lr", "beta1", "beta2", "eps", "weight_decay")

    def __init__(
        self,
        params: Iterable[Parameter],
        lr: float = 0.01,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params)
        self.lr, self.beta1, self.beta2, self.eps, self.weight_decay = lr, beta1, beta2, eps, weight_decay

    @property
    def slots(self) -> tuple[str, ...]:
        return ("mean", "square")

    def kernel(self, first: bool) -> tuple[Any, ...]:
        rates = (self.lr, self.beta1, self.beta2, self.eps, self.weight_decay)
        return ("adam_step", *rates, self.t, self.decoupled)

    def formula(self, data: np.ndarray, grad: np.ndarray, state: list[Any], first: bool) -> None:
        (m, v), wd = state, self.weight_decay
        if self.decoupled:
            data *= 1 - self.lr * wd
            g = grad
        else:
            g = grad + wd * data
        m[...] = self.beta1 * m + (1 - self.beta1) * g
        v[...] = self.beta2 * v + (1 - self.beta2) * g * g
        m_hat, v_hat = m / (1 - self.beta1**self.t), v / (1 - self.beta2**self.t)
        data -= self.lr * m_hat / (np.sqrt(v_hat) + self.eps)


class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019)."""

    decoupled = True

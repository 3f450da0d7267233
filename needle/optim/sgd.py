"""Stochastic gradient descent."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from needle.nn.module import Parameter

from .base import Optimizer


class SGD(Optimizer):
    """Stochastic gradient descent with momentum.

    rule="needle": u = momentum u + (1 - momentum) (g + wd w); w -= lr u.
    rule="torch":  v = momentum v + (1 - dampening) (g + wd w), the first v being g + wd w; w -= lr v (nesterov: g + momentum v).
    """

    options = ("lr", "momentum", "weight_decay", "dampening", "nesterov", "rule")

    def __init__(
        self,
        params: Iterable[Parameter],
        lr: float = 0.01,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        *,
        dampening: float = 0.0,
        nesterov: bool = False,
        rule: str = "needle",
    ) -> None:
        super().__init__(params)
        if rule not in ("needle", "torch"):
            raise ValueError(f"[SGD] rule expects needle or torch, got {rule}.")
        if rule == "needle" and (dampening or nesterov):
            raise ValueError(f"[SGD] dampening and nesterov belong to rule torch, got {dampening} and {nesterov}.")
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay
        self.dampening, self.nesterov, self.rule = dampening, nesterov, rule

    @property
    def slots(self) -> tuple[str, ...]:
        return ("momentum",)

    def kernel(self, first: bool) -> tuple[Any, ...]:
        if self.rule == "needle":
            return ("needle_sgd_step", self.lr, self.momentum, self.weight_decay)
        return ("sgd_step", self.lr, self.momentum, self.dampening, self.weight_decay, self.nesterov, first)

    def formula(self, data: np.ndarray, grad: np.ndarray, state: list[Any], first: bool) -> None:
        (u,), mu = state, self.momentum
        g = grad + self.weight_decay * data
        if self.rule == "needle":
            u[...] = mu * u + (1 - mu) * g
            data -= self.lr * u
        else:
            u[...] = g if first else mu * u + (1 - self.dampening) * g
            data -= self.lr * (g + mu * u if self.nesterov else u)

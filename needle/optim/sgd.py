"""Stochastic gradient descent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from .base import Optimizer
from .group import Group


class SGD(Optimizer):
    """Stochastic gradient descent with momentum: SGD(params, lr, momentum, *, weight_decay, ...).

    rule="needle": u = momentum u + (1 - momentum) (g + wd w); w -= lr u. Third argument: weight_decay.
    rule="torch":  v = momentum v + (1 - dampening) (g + wd w), the first v being g + wd w; w -= lr v (nesterov: g + momentum v).
    maximize: steps up the gradient.
    """

    rules: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "needle": {"lr": 0.01, "momentum": 0.0, "weight_decay": 0.0, "maximize": False},
        "torch": {
            "lr": 0.001,
            "momentum": 0.0,
            "dampening": 0.0,
            "weight_decay": 0.0,
            "nesterov": False,
            "maximize": False,
        },
    }
    # What comes third is weight_decay to the course and dampening to torch.
    arguments: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "needle": ("lr", "momentum", "weight_decay"),
        "torch": ("lr", "momentum"),
    }
    slots = ("momentum",)

    def check(self, group: Group) -> None:
        if group.get("nesterov") and (not group["momentum"] or group["dampening"]):
            raise ValueError(
                f"[SGD] nesterov expects momentum and no dampening, got {group['momentum']} and {group['dampening']}."
            )

    def slots_of(self, group: Group) -> tuple[str, ...]:
        return self.slots if group["momentum"] else ()

    def kernel(self, group: Group, step: int, first: bool) -> tuple[str, dict[str, Any]]:
        rates = {name: group[name] for name in ("lr", "momentum", "weight_decay")}
        if self.rule == "needle" and group["momentum"]:
            return "needle_sgd_step", rates
        more = {"dampening": group.get("dampening", 0.0), "nesterov": group.get("nesterov", False)}
        # Without momentum both rules are one, and nothing is dampened.
        return "sgd_step", rates | more | {"first": first or not group["momentum"]}

    def formula(self, group: Group, data: np.ndarray, grad: np.ndarray, state: Mapping[str, Any], first: bool) -> None:
        mu, g = group["momentum"], grad
        if group["weight_decay"]:
            g = g + group["weight_decay"] * data
        if mu:
            u = state["momentum"]
            if self.rule == "needle":
                u[...] = mu * u + (1 - mu) * g
            else:
                u[...] = g if first else mu * u + (1 - group["dampening"]) * g
            g = g + mu * u if group.get("nesterov") else u
        data -= group["lr"] * g

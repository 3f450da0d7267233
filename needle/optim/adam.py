"""Adam and AdamW."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from .base import Optimizer
from .group import Group

COMMON = {
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.0,
    "amsgrad": False,
    "maximize": False,
    "decoupled_weight_decay": False,
}


class Adam(Optimizer):
    """Adam with bias correction (Kingma and Ba, 2015); weight decay is added to the gradient.

    rule="needle": Adam(params, lr, beta1, beta2, eps, weight_decay); rule="torch": Adam(params, lr, betas, eps, weight_decay,
    amsgrad). The rules differ in their defaults alone. amsgrad: divides by the largest second moment so far (Reddi et al., 2018).
    maximize: steps up the gradient. decoupled_weight_decay: as AdamW.
    """

    rules: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "needle": {"lr": 0.01} | COMMON,
        "torch": {"lr": 0.001} | COMMON,
    }
    arguments: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "needle": ("lr", "beta1", "beta2", "eps", "weight_decay"),
        "torch": ("lr", "betas", "eps", "weight_decay", "amsgrad"),
    }
    slots = ("mean", "square", "largest")
    required = ("mean", "square")

    def slots_of(self, group: Group) -> tuple[str, ...]:
        return self.slots if group["amsgrad"] else self.required

    def kernel(self, group: Group, step: int, first: bool) -> tuple[str, dict[str, Any]]:
        rates = {name: group[name] for name in ("lr", "eps", "weight_decay", "amsgrad")}
        rates |= zip(("beta1", "beta2"), group["betas"], strict=True)
        return "adam_step", rates | {"step": step, "decoupled": group["decoupled_weight_decay"]}

    def formula(self, group: Group, data: np.ndarray, grad: np.ndarray, state: Mapping[str, Any], first: bool) -> None:
        m, v, g, (beta1, beta2) = state["mean"], state["square"], grad, group["betas"]
        if group["decoupled_weight_decay"]:
            data *= 1 - group["lr"] * group["weight_decay"]
        elif group["weight_decay"]:
            g = g + group["weight_decay"] * data
        m[...] = beta1 * m + (1 - beta1) * g
        v[...] = beta2 * v + (1 - beta2) * g * g
        if group["amsgrad"]:
            v = np.maximum(state["largest"], v, out=state["largest"])
        m_hat, v_hat = m / (1 - beta1 ** state["step"]), v / (1 - beta2 ** state["step"])
        data -= group["lr"] * m_hat / (np.sqrt(v_hat) + group["eps"])


class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019), of 0.01 in rule torch unless told otherwise."""

    rules: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "needle": {**Adam.rules["needle"], "decoupled_weight_decay": True},
        "torch": {**Adam.rules["torch"], "weight_decay": 0.01, "decoupled_weight_decay": True},
    }

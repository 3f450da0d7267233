"""RMSprop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from .base import Optimizer
from .group import Group

OPTIONS = {"lr": 0.01, "alpha": 0.99, "eps": 1e-8, "weight_decay": 0.0, "momentum": 0.0, "centered": False}


class RMSprop(Optimizer):
    """Steps divided by a running root mean square of the gradient (Tieleman and Hinton, 2012), in torch's rule by any name.

    s = alpha s + (1 - alpha) g^2; u = momentum u + g / (sqrt(s) + eps); w -= lr u, with weight decay in g.
    centered: s less the square of a running mean of g (Graves, arXiv 1308.0850). maximize: steps up the gradient.
    RMSprop(params, lr, alpha, eps, weight_decay, momentum, centered).
    """

    rules: ClassVar[Mapping[str, Mapping[str, Any]]] = dict.fromkeys(("needle", "torch"), OPTIONS | {"maximize": False})
    arguments: ClassVar[Mapping[str, tuple[str, ...]]] = dict.fromkeys(("needle", "torch"), tuple(OPTIONS))
    slots = ("square", "momentum", "mean")
    required = ("square",)

    def slots_of(self, group: Group) -> tuple[str, ...]:
        return ("square",) + ("momentum",) * bool(group["momentum"]) + ("mean",) * group["centered"]

    def kernel(self, group: Group, step: int, first: bool) -> tuple[str, dict[str, Any]]:
        names = ("lr", "alpha", "eps", "weight_decay", "momentum", "centered")
        return "rmsprop_step", {name: group[name] for name in names}

    def formula(self, group: Group, data: np.ndarray, grad: np.ndarray, state: Mapping[str, Any], first: bool) -> None:
        g, square, alpha = grad, state["square"], group["alpha"]
        if group["weight_decay"]:
            g = g + group["weight_decay"] * data
        square[...] = alpha * square + (1 - alpha) * g * g
        spread = square
        if group["centered"]:
            mean = state["mean"]
            mean[...] = alpha * mean + (1 - alpha) * g
            spread = square - mean * mean
        step = g / (np.sqrt(spread) + group["eps"])
        if group["momentum"]:
            u = state["momentum"]
            u[...] = group["momentum"] * u + step
            step = u
        data -= group["lr"] * step

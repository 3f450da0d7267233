"""The rules by which optimizers step: SGD, Adam, AdamW and RMSprop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .base import Optimizer
from .group import Group


class SGD(Optimizer):
    """Stochastic gradient descent with momentum: SGD(params, lr, momentum, *, weight_decay, ...).

    rule="needle": u = momentum u + (1 - momentum) (g + wd w); w -= lr u. Third argument: weight_decay.
    rule="torch":  v = momentum v + (1 - dampening) (g + wd w), the first v being g + wd w; w -= lr v (nesterov: g + momentum v).
    maximize: steps up the gradient.
    """

    rules = {
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
    arguments = {
        "needle": ("lr", "momentum", "weight_decay"),
        "torch": ("lr", "momentum"),
    }
    slots = ("momentum",)
    torch_names = {"momentum": "momentum_buffer"}

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


ADAM = {
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

    rules = {
        "needle": {"lr": 0.01} | ADAM,
        "torch": {"lr": 0.001} | ADAM,
    }
    arguments = {
        "needle": ("lr", "beta1", "beta2", "eps", "weight_decay"),
        "torch": ("lr", "betas", "eps", "weight_decay", "amsgrad"),
    }
    slots = ("mean", "square", "largest")
    required = ("mean", "square")
    torch_names = {"step": "step", "mean": "exp_avg", "square": "exp_avg_sq", "largest": "max_exp_avg_sq"}

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

    rules = {
        "needle": {**Adam.rules["needle"], "decoupled_weight_decay": True},
        "torch": {**Adam.rules["torch"], "weight_decay": 0.01, "decoupled_weight_decay": True},
    }


RMSPROP = {"lr": 0.01, "alpha": 0.99, "eps": 1e-8, "weight_decay": 0.0, "momentum": 0.0, "centered": False}


class RMSprop(Optimizer):
    """Steps divided by a running root mean square of the gradient (Tieleman and Hinton, 2012), in torch's rule by any name.

    s = alpha s + (1 - alpha) g^2; u = momentum u + g / (sqrt(s) + eps); w -= lr u, with weight decay in g.
    centered: s less the square of a running mean of g (Graves, arXiv 1308.0850). maximize: steps up the gradient.
    RMSprop(params, lr, alpha, eps, weight_decay, momentum, centered).
    """

    rules = dict.fromkeys(("needle", "torch"), RMSPROP | {"maximize": False})
    arguments = dict.fromkeys(("needle", "torch"), tuple(RMSPROP))
    slots = ("square", "momentum", "mean")
    required = ("square",)
    torch_names = {"step": "step", "square": "square_avg", "momentum": "momentum_buffer", "mean": "grad_avg"}

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

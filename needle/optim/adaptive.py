"""Further rules by which optimizers step: Adagrad, Adadelta, Adamax, NAdam, RAdam, Lion. By any name of rule they are torch's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from needle.autograd import Tensor

from .base import Optimizer
from .group import Group


def both(options: Any) -> dict[str, Any]:
    """Options, or names of arguments, that hold by either rule."""
    return dict.fromkeys(("needle", "torch"), options)


def with_decay(group: Group, data: np.ndarray, grad: np.ndarray) -> np.ndarray:
    """The gradient with weight decay; decoupled, the parameter shrinks instead."""
    if group.get("decoupled_weight_decay"):
        data *= 1 - group["lr"] * group["weight_decay"]
        return grad
    return grad + group["weight_decay"] * data if group["weight_decay"] else grad


def move(mean: np.ndarray, beta: float, value: np.ndarray) -> np.ndarray:
    """A running mean takes a value."""
    mean[...] = beta * mean + (1 - beta) * value
    return mean


def rates(group: Group, *names: str) -> dict[str, Any]:
    """Options as a kernel's attributes."""
    return {name: group[name] for name in ("lr", *names, "weight_decay")}


ADAGRAD = {"lr": 0.01, "lr_decay": 0.0, "weight_decay": 0.0, "initial_accumulator_value": 0.0, "eps": 1e-10}


class Adagrad(Optimizer):
    """Steps over the root of the sum of all squared gradients (Duchi et al., 2011).

    s += g^2, from initial_accumulator_value; w -= lr / (1 + (t - 1) lr_decay) g / (sqrt(s) + eps), with weight decay in g.
    Adagrad(params, lr, lr_decay, weight_decay, initial_accumulator_value, eps). maximize: steps up the gradient.
    """

    rules = both(ADAGRAD | {"maximize": False})
    arguments = both(tuple(ADAGRAD))
    slots = required = ("sum",)
    torch_names = {"step": "step", "sum": "sum"}

    def rate(self, group: Group, step: int) -> float:
        return group["lr"] / (1 + (step - 1) * group["lr_decay"])

    def kernel(self, group: Group, step: int, first: bool) -> tuple[str, dict[str, Any]]:
        attrs = rates(group, "eps") | {"initial": group["initial_accumulator_value"], "first": first}
        return "adagrad_step", attrs | {"lr": self.rate(group, step)}

    def formula(self, group: Group, data: np.ndarray, grad: np.ndarray, state: Mapping[str, Any], first: bool) -> None:
        g, s = with_decay(group, data, grad), state["sum"]
        s[...] = (group["initial_accumulator_value"] if first else s) + g * g
        data -= self.rate(group, state["step"]) * g / (np.sqrt(s) + group["eps"])


ADADELTA = {"lr": 1.0, "rho": 0.9, "eps": 1e-6, "weight_decay": 0.0}


class Adadelta(Optimizer):
    """Steps as large as those before, over a running root mean square of the gradient (Zeiler, arXiv 1212.5701).

    v = rho v + (1 - rho) g^2; u = sqrt(d + eps) / sqrt(v + eps) g; d = rho d + (1 - rho) u^2; w -= lr u, with weight decay in g.
    Adadelta(params, lr, rho, eps, weight_decay). maximize: steps up the gradient.
    """

    rules = both(ADADELTA | {"maximize": False})
    arguments = both(tuple(ADADELTA))
    slots = required = ("square", "moved")
    torch_names = {"step": "step", "square": "square_avg", "moved": "acc_delta"}

    def check(self, group: Group) -> None:
        if group["rho"] > 1:
            raise ValueError(f"[Adadelta] rho expects a number from 0 to 1, got {group['rho']}.")

    def kernel(self, group: Group, step: int, first: bool) -> tuple[str, dict[str, Any]]:
        return "adadelta_step", rates(group, "rho", "eps")

    def formula(self, group: Group, data: np.ndarray, grad: np.ndarray, state: Mapping[str, Any], first: bool) -> None:
        g, rho, eps = with_decay(group, data, grad), group["rho"], group["eps"]
        v = move(state["square"], rho, g * g)
        u = np.sqrt(state["moved"] + eps) / np.sqrt(v + eps) * g
        move(state["moved"], rho, u * u)
        data -= group["lr"] * u


ADAMAX = {"lr": 0.002, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}


class Adamax(Optimizer):
    """Adam with the largest gradient so far in place of the root mean square (Kingma and Ba, 2015, section 7.1).

    m = beta1 m + (1 - beta1) g; n = max(beta2 n, |g| + eps); w -= lr / (1 - beta1^t) m / n, with weight decay in g.
    Adamax(params, lr, betas, eps, weight_decay). maximize: steps up the gradient.
    """

    rules = both(ADAMAX | {"maximize": False})
    arguments = both(tuple(ADAMAX))
    slots = required = ("mean", "largest")
    torch_names = {"step": "step", "mean": "exp_avg", "largest": "exp_inf"}

    def kernel(self, group: Group, step: int, first: bool) -> tuple[str, dict[str, Any]]:
        return "adamax_step", rates(group, "beta1", "beta2", "eps") | {"step": step}

    def formula(self, group: Group, data: np.ndarray, grad: np.ndarray, state: Mapping[str, Any], first: bool) -> None:
        g, (beta1, beta2) = with_decay(group, data, grad), group["betas"]
        m, n = move(state["mean"], beta1, g), state["largest"]
        n[...] = np.maximum(beta2 * n, np.abs(g) + group["eps"])
        data -= group["lr"] / (1 - beta1 ** state["step"]) * m / n


NADAM = {
    "lr": 0.002,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.0,
    "momentum_decay": 0.004,
    "decoupled_weight_decay": False,
}


class NAdam(Optimizer):
    """Adam with Nesterov's momentum (Dozat, 2016): the step looks ahead along the gradient.

    mu_t = beta1 (1 - 0.96^(t momentum_decay) / 2); w -= lr ((1 - mu_t) / (1 - p_t) g + mu_t+1 / (1 - p_t+1) m) /
    (sqrt(v / (1 - beta2^t)) + eps) with p_t = mu_1 ... mu_t; where a schedule changes beta1, steps keep theirs.
    NAdam(params, lr, betas, eps, weight_decay, momentum_decay, decoupled_weight_decay). maximize: steps up the gradient.
    """

    rules = both(NADAM | {"maximize": False})
    arguments = both(tuple(NADAM))
    slots = required = ("mean", "square")
    torch_names = {"step": "step", "mean": "exp_avg", "square": "exp_avg_sq", "mu_product": "mu_product"}
    numbers = ("mu_product",)

    def momentum(self, group: Group, step: int) -> float:
        return group["betas"][0] * (1 - 0.5 * 0.96 ** (step * group["momentum_decay"]))

    def advance(self, group: Group, p: Tensor, slots: tuple[str, ...]) -> tuple[dict[str, Any], bool]:
        state, first = super().advance(group, p, slots)
        state["mu_product"] = state.get("mu_product", 1.0) * self.momentum(group, state["step"])
        return state, first

    def step_sizes(self, group: Group, step: int, product: float) -> tuple[float, float]:
        """Those along the gradient and along its mean."""
        now, following = self.momentum(group, step), self.momentum(group, step + 1)
        return group["lr"] * (1 - now) / (1 - product), group["lr"] * following / (1 - product * following)

    def kernel(self, group: Group, step: int, first: bool, product: float = 0.0) -> tuple[str, dict[str, Any]]:
        attrs = rates(group, "beta1", "beta2", "eps") | {"decoupled": group["decoupled_weight_decay"], "step": step}
        along_gradient, along_mean = self.step_sizes(group, step, product)
        return "nadam_step", attrs | {"gradient_rate": along_gradient, "mean_rate": along_mean}

    def formula(self, group: Group, data: np.ndarray, grad: np.ndarray, state: Mapping[str, Any], first: bool) -> None:
        g, (beta1, beta2) = with_decay(group, data, grad), group["betas"]
        m, v = move(state["mean"], beta1, g), move(state["square"], beta2, g * g)
        along_gradient, along_mean = self.step_sizes(group, state["step"], state["mu_product"])
        spread = np.sqrt(v / (1 - beta2 ** state["step"])) + group["eps"]
        data -= (along_gradient * g + along_mean * m) / spread


RADAM = {
    "lr": 0.001,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.0,
    "decoupled_weight_decay": False,
}


class RAdam(Optimizer):
    """Adam without the division until the mean of squares is known well enough (Liu et al., arXiv 1908.03265).

    RAdam(params, lr, betas, eps, weight_decay, decoupled_weight_decay). maximize: steps up the gradient.
    """

    rules = both(RADAM | {"maximize": False})
    arguments = both(tuple(RADAM))
    slots = required = ("mean", "square")
    torch_names = {"step": "step", "mean": "exp_avg", "square": "exp_avg_sq"}

    def step_size(self, group: Group, step: int) -> tuple[float, bool]:
        """That along the mean of gradients, and whether it is divided by the root of squares."""
        beta1, beta2 = group["betas"]
        size, left = group["lr"] / (1 - beta1**step), 1 - beta2**step
        most = 2 / (1 - beta2) - 1
        length = most - 2 * step * beta2**step / left
        if length <= 5:
            return size, False
        rectified = (length - 4) * (length - 2) * most / ((most - 4) * (most - 2) * length)
        return size * math.sqrt(rectified * left), True

    def kernel(self, group: Group, step: int, first: bool) -> tuple[str, dict[str, Any]]:
        size, rectified = self.step_size(group, step)
        attrs = rates(group, "beta1", "beta2", "eps") | {"decoupled": group["decoupled_weight_decay"]}
        return "radam_step", attrs | {"size": size, "rectified": rectified}

    def formula(self, group: Group, data: np.ndarray, grad: np.ndarray, state: Mapping[str, Any], first: bool) -> None:
        g, (beta1, beta2) = with_decay(group, data, grad), group["betas"]
        m, v = move(state["mean"], beta1, g), move(state["square"], beta2, g * g)
        size, rectified = self.step_size(group, state["step"])
        data -= size * m / (np.sqrt(v) + group["eps"]) if rectified else size * m


LION = {"lr": 0.0001, "betas": (0.9, 0.99), "weight_decay": 0.0}


class Lion(Optimizer):
    """Steps of one size along the sign of the gradient mixed with its mean (Chen et al., arXiv 2302.06675).

    w -= lr (sign(beta1 m + (1 - beta1) g) + wd w); m = beta2 m + (1 - beta2) g. Rates are some tenth of Adam's, weight decay is
    ten times its. Lion(params, lr, betas, weight_decay). maximize: steps up the gradient.
    """

    rules = both(LION | {"maximize": False})
    arguments = both(tuple(LION))
    slots = required = ("mean",)

    def kernel(self, group: Group, step: int, first: bool) -> tuple[str, dict[str, Any]]:
        return "lion_step", rates(group, "beta1", "beta2")

    def formula(self, group: Group, data: np.ndarray, grad: np.ndarray, state: Mapping[str, Any], first: bool) -> None:
        m, (beta1, beta2) = state["mean"], group["betas"]
        data *= 1 - group["lr"] * group["weight_decay"]
        data -= group["lr"] * np.sign(beta1 * m + (1 - beta1) * grad)
        move(m, beta2, grad)

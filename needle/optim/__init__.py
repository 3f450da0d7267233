"""Optimizers. They write parameters in place, keep their state outside the tape and never change gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from needle.autograd import Tensor
from needle.backend_ndarray import NDArray, call
from needle.nn.module import Parameter


class Optimizer:
    """Base: `params`, `reset_grad`, `step`. State arrays are made at a parameter's first step."""

    def __init__(self, params: Sequence[Parameter]) -> None:
        self.params = list(params)
        self.state: dict[int, list[Any]] = {}

    def reset_grad(self) -> None:
        for p in self.params:
            p.grad = None

    zero_grad = reset_grad

    def step(self) -> None:
        for i, p in enumerate(self.params):
            if p.grad is None:
                continue
            first = i not in self.state
            if first:
                self.state[i] = [zeros_like(p.cached_data) for _ in range(self.n_state)]
            if not isinstance(p.cached_data, np.ndarray) and not p.cached_data.is_compact():
                p.data = Tensor.make_const(p.cached_data.compact())  # the kernels write contiguous memory
            self.update(p, compact(p.grad.realize_cached_data()), self.state[i], first)
            p.touch()

    n_state = 0

    def update(self, p: Parameter, grad: Any, state: list[Any], first: bool) -> None:
        raise NotImplementedError


def zeros_like(a: Any) -> Any:
    if isinstance(a, np.ndarray):
        return np.zeros_like(a)
    out = NDArray.empty(a.shape, a.dtype)
    out.fill(0.0)
    return out


def compact(a: Any) -> Any:
    return a if isinstance(a, np.ndarray) else a.compact()


class SGD(Optimizer):
    """Stochastic gradient descent with momentum.

    rule="needle": u = momentum u + (1 - momentum) (g + wd w); w -= lr u.
    rule="torch":  v = momentum v + (1 - dampening) (g + wd w), the first v being g + wd w; w -= lr v (nesterov: g + momentum v).
    """

    def __init__(
        self,
        params: Sequence[Parameter],
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
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay
        self.dampening, self.nesterov, self.rule = dampening, nesterov, rule

    n_state = 1

    def update(self, p: Parameter, grad: Any, state: list[Any], first: bool) -> None:
        data, (u,) = p.cached_data, state
        mu, wd = self.momentum, self.weight_decay
        if isinstance(data, np.ndarray):
            g = grad + wd * data
            if self.rule == "needle":
                u[...] = mu * u + (1 - mu) * g
                data -= self.lr * u
            else:
                u[...] = g if first else mu * u + (1 - self.dampening) * g
                data -= self.lr * (g + mu * u if self.nesterov else u)
        elif self.rule == "needle":
            call("needle_sgd_step", [data, u], [grad], self.lr, mu, wd)
        else:
            call("sgd_step", [data, u], [grad], self.lr, mu, self.dampening, wd, self.nesterov, first)


class Adam(Optimizer):
    """Adam with bias correction (Kingma and Ba, 2015); weight decay is added to the gradient."""

    decoupled = False
    n_state = 2

    def __init__(
        self,
        params: Sequence[Parameter],
        lr: float = 0.01,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params)
        self.lr, self.beta1, self.beta2, self.eps, self.weight_decay = lr, beta1, beta2, eps, weight_decay
        self.t = 0

    def step(self) -> None:
        self.t += 1
        super().step()

    def update(self, p: Parameter, grad: Any, state: list[Any], first: bool) -> None:
        data, (m, v), wd = p.cached_data, state, self.weight_decay
        if not isinstance(data, np.ndarray):
            call(
                "adam_step", [data, m, v], [grad], self.lr, self.beta1, self.beta2, self.eps, wd, self.t, self.decoupled
            )
            return
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


def clip_grad_norm(params: Sequence[Parameter], max_norm: float) -> float:
    """Scale the gradients so that their joint 2-norm is at most `max_norm`; returns the norm before."""
    grads = [p.grad for p in params if p.grad is not None]
    total = float(np.sqrt(sum(float((g.numpy().astype("float64") ** 2).sum()) for g in grads)))
    if total > max_norm:
        for p in params:
            if p.grad is not None:
                p.grad = (p.grad * (max_norm / (total + 1e-6))).detach()
    return total

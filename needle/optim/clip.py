"""Limits on gradients. They put new tensors in `.grad`: a gradient that someone else holds stays as it is."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from needle.autograd import Tensor
from needle.nn.module import Parameter


def as_numpy(t: Tensor) -> np.ndarray:
    """The values, without a copy."""
    data = t.realize_cached_data()
    return data if isinstance(data, np.ndarray) else data.read()


def norm(arrays: list[np.ndarray], order: float) -> float:
    """The norm of all values together, summed in float64."""
    if math.isinf(order):
        return max((float(np.abs(a).max(initial=0.0)) for a in arrays), default=0.0)
    return float(sum(np.sum(np.abs(a.astype("float64")) ** order) for a in arrays)) ** (1 / order)


def clip_grad_norm(params: Iterable[Parameter], max_norm: float, norm_type: float = 2.0) -> float:
    """Scale the gradients so that their joint norm is at most `max_norm`; returns the norm before, as torch."""
    params = [p for p in params if p.grad is not None]
    grads: list[Any] = [p.grad for p in params]
    total = norm([as_numpy(g) for g in grads], norm_type)
    scale = max_norm / (total + 1e-6)
    if not scale >= 1:
        for p, g in zip(params, grads, strict=True):
            p.grad = (g.detach() * scale).detach()
    return total


def clip_grad_value(params: Iterable[Parameter], clip_value: float) -> None:
    """Bring every entry of the gradients into [-clip_value, clip_value]."""
    from needle.ops import clamp

    for p in params:
        if p.grad is not None:
            p.grad = clamp(p.grad.detach(), -clip_value, clip_value).detach()


__all__ = ["clip_grad_norm", "clip_grad_value"]

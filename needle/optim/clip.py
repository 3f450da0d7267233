"""Limits on gradients. They put new tensors in `.grad`: a gradient that someone else holds stays as it is."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from needle.autograd import Tensor
from needle.nn.module import Parameter

from .group import parameters


def as_numpy(t: Tensor) -> np.ndarray:
    """The values, without a copy."""
    data = t.realize_cached_data()
    return data if isinstance(data, np.ndarray) else data.read()


def norm(arrays: list[np.ndarray], order: float) -> float:
    """The norm of the norms of arrays, in float64: for orders 1, 2, ... that of all values together."""
    norms = [np.linalg.norm(a.astype("float64").ravel(), order) for a in arrays if a.size]
    return float(np.linalg.norm(norms, order)) if norms else 0.0


def with_gradients(label: str, params: Any) -> list[Any]:
    """Those of the parameters, one or several, that have a gradient."""
    return [p for p in parameters(label, params) if p.grad is not None]


def clip_grad_norm(
    params: Iterable[Parameter], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> float:
    """Scale the gradients so that their joint norm is at most `max_norm`; returns the norm before, as torch.

    A norm that is infinite or NaN makes gradients zeros or NaN; error_if_nonfinite: RuntimeError instead.
    """
    clipped = with_gradients("clip_grad_norm", params)
    total = norm([as_numpy(p.grad) for p in clipped], float(norm_type))
    if error_if_nonfinite and not math.isfinite(total):
        raise RuntimeError(f"[clip_grad_norm] expects a finite norm of order {norm_type}, got {total}.")
    scale = max_norm / (total + 1e-6)
    if not scale >= 1:
        for p in clipped:
            p.grad = (p.grad.detach() * scale).detach()
    return total


def clip_grad_value(params: Iterable[Parameter], clip_value: float) -> None:
    """Bring every entry of the gradients into [-clip_value, clip_value]."""
    from needle.ops import clamp

    for p in with_gradients("clip_grad_value", params):
        p.grad = clamp(p.grad.detach(), -clip_value, clip_value).detach()

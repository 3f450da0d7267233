"""Random elements set to zero: what the dropout layers and ops do. Masks are drawn from numpy's global legacy stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from needle.autograd import Spec, Tensor


def dropout(x: Tensor, p: float = 0.5, training: Any = True) -> Tensor:
    """In training: each element kept where rand <= 1 - p and scaled by 1 / (1 - p); else x."""
    return drop(x, x.shape, p) if training and p else x


def drawn(x: Tensor, shape: tuple[int, ...], make: Callable[[], np.ndarray]) -> Tensor:
    """A constant of random numbers `make()` beside x; a recorded training step draws it anew for every call."""
    dtype = x.dtype
    if getattr(x.recorder, "trains", False):
        return x.recorder.draw(Spec(tuple(shape), dtype), lambda: make().astype(dtype))
    return Tensor(make(), device=x.device, dtype=dtype, requires_grad=False)


def drop(x: Tensor, shape: tuple[int, ...], p: float) -> Tensor:
    """x with elements, or what one element of `shape` broadcasts to, zeroed with probability p and the rest scaled."""

    def mask() -> np.ndarray:
        keep = (np.random.rand(*shape) <= 1 - p).astype(dtype)
        return keep / (1 - p) if p < 1 else keep * 0

    dtype = x.dtype
    return x * drawn(x, shape, mask)


def channel_shape(x: Tensor, batched: bool = True) -> tuple[int, ...]:
    """The shape of x with one element per channel: (N, C, 1, ...), or of one sample (C, 1, ...)."""
    return tuple(s if i <= batched else 1 for i, s in enumerate(x.shape))


SELU_LIMIT = -1.7580993408473766  # selu at minus infinity: what alpha dropout puts in place of an element


def alpha_drop(x: Tensor, shape: tuple[int, ...], p: float) -> Tensor:
    """As `drop`, but with selu's limit for zero and scaled and shifted so that mean 0 and variance 1 stay.

    Klambauer et al., arXiv 1706.02515.
    """
    if p == 1:
        return x * 0.0
    scale = ((1 - p) * (1 + p * SELU_LIMIT**2)) ** -0.5
    kept = drawn(x, shape, lambda: np.random.rand(*shape) <= 1 - p)
    return x * (kept * scale) + (kept * -(SELU_LIMIT * scale) + SELU_LIMIT * scale * (1 - p))

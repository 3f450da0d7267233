"""Batch norm folded into the weights before it: one pair of ops, used by the executor and by the fused layers; weights of a
convolution that does nothing, for one that stands alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from needle.autograd import Op, Spec, Tensor, op
from needle.backend_ndarray import NDArray, from_dlpack
from needle.ops.common import constant
from needle.ops.families import family, no_gradient, samples_of


def fold_batch_norm(
    weight: np.ndarray,
    bias: np.ndarray | None,
    mean: np.ndarray,
    var: np.ndarray,
    gamma: np.ndarray,
    beta: np.ndarray,
    eps: float,
    axis: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """(weight, bias) of the layer that equals layer + batch norm. `axis`: the weight's output channels.

    Computed in float64 and returned in the weight's dtype: gamma / sqrt(var + eps) would lose digits in float32.
    """
    m, v, g, b = (a.astype("float64") for a in (mean, var, gamma, beta))
    scale = g / np.sqrt(v + eps)
    shape = [1] * weight.ndim
    shape[axis] = -1
    if weight.shape[axis] != scale.size:  # grouped transposed convolution: (I, O / groups, ...), groups along axis 0
        groups = scale.size // weight.shape[axis]
        grouped = weight.reshape(groups, -1, *weight.shape[1:])
        folded = scaled(grouped, scale.reshape(groups, 1, -1, *[1] * (weight.ndim - 2))).reshape(weight.shape)
    else:
        folded = scaled(weight, scale.reshape(shape))
    shift = (0 if bias is None else bias.reshape(-1).astype("float64")) - m
    return folded, (shift * scale + b).astype(weight.dtype)


def scaled(weight: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """weight * scale in float64; numpy does it a few rows at a time, without a copy of the whole weight in float64."""
    if not isinstance(weight, np.ndarray):  # an array that records
        return (weight.astype("float64") * scale).astype(weight.dtype)
    out = np.empty(weight.shape, weight.dtype)
    return np.multiply(weight, scale, out=out, dtype="float64", casting="same_kind")


@family
class Folded(Op):
    """Inputs weight, mean, var, gamma, beta, and the layer's bias if it has one."""

    eps: float
    axis: int = 0
    index = 0

    def infer(self, weight: Any, mean: Any, *_: Any) -> Spec:
        return Spec(tuple(weight.shape) if self.index == 0 else tuple(mean.shape), weight.dtype)

    def reference(self, weight: np.ndarray, *rest: np.ndarray) -> np.ndarray:
        mean, var, gamma, beta, *bias = rest
        return fold_batch_norm(weight, bias[0] if bias else None, mean, var, gamma, beta, self.eps, self.axis)[
            self.index
        ]

    def compute(self, *arrays: NDArray) -> NDArray:
        return from_dlpack(self.reference(*(a.read() for a in arrays)))


@op
class FoldedWeight(Folded):
    """The weight with the batch norm's scale in it."""


@op
class FoldedBias(Folded):
    """The bias with the batch norm's shift in it."""

    index = 1


@op
class UnitWeight(Op):
    """The weight (C, C / groups, 1, 1) of the convolution that leaves images as they are; of a vector (C,), whatever it holds."""

    ignores_values = True
    groups: int = 1

    def infer(self, channels: Any) -> Spec:
        return Spec((channels.shape[0], channels.shape[0] // self.groups, 1, 1), channels.dtype)

    def reference(self, channels: np.ndarray) -> np.ndarray:
        shape, dtype = self.infer(channels)
        weight, at = np.zeros(shape, dtype), np.arange(shape[0])
        weight[at, at % shape[1]] = 1
        return weight

    def decompose(self, channels: Tensor) -> Tensor:
        return constant(self.reference(channels), channels)  # type: ignore[arg-type]

    gradient = no_gradient

    samples = samples_of(({}, [(3,)]), ({"groups": 2}, [(4,)]))

"""Normalisation layers."""

from __future__ import annotations

import numpy as np

from needle import init, ops
from needle.autograd import Tensor
from needle.backend_ndarray import Device

from .module import Module, Parameter


class BatchNorm2d(Module):
    """Batch normalisation over (N, C, H, W) per channel (Ioffe and Szegedy, 2015).

    running = (1 - momentum) running + momentum batch; running_var follows the biased batch variance, or torch's unbiased one
    with unbiased=True. `count_batches` adds torch's buffer num_batches_tracked.
    """

    mode_dependent = True

    def __init__(
        self,
        dim: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        device: Device | None = None,
        dtype: str = "float32",
        affine: bool = True,
        track_running_stats: bool = True,
        unbiased: bool = False,
        count_batches: bool = False,
    ) -> None:
        super().__init__()
        self.dim, self.eps, self.momentum, self.unbiased = dim, eps, momentum, unbiased
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None
        if affine:
            self.weight = Parameter(init.ones(dim), device=device, dtype=dtype)
            self.bias = Parameter(init.zeros(dim), device=device, dtype=dtype)
        self.running_mean: Tensor | None = None
        self.running_var: Tensor | None = None
        if track_running_stats:
            self.running_mean = init.zeros(dim, device=device, dtype=dtype)
            self.running_var = init.ones(dim, device=device, dtype=dtype)
        self.num_batches_tracked: Tensor | None = None
        if count_batches and track_running_stats:
            self.num_batches_tracked = Tensor(
                np.array(0, dtype="int64"), device=device, dtype="int64", requires_grad=False
            )

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.num_batches_tracked is not None and x.recorder is None:
            self.num_batches_tracked.data = self.num_batches_tracked + 1
        return ops.batch_norm(
            x,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            training=self.training or self.running_mean is None,
            momentum=self.momentum,
            eps=self.eps,
            unbiased=self.unbiased,
        )

    def extra_repr(self) -> str:
        return f"{self.dim}, eps={self.eps}, momentum={self.momentum}"


class BatchNorm1d(BatchNorm2d):
    """Batch normalisation over (N, C) or (N, C, L)."""


class LayerNorm1d(Module):
    """Normalises each row of (batch, dim); parameters `weight` and `bias` of shape (dim,)."""

    def __init__(self, dim: int, eps: float = 1e-5, device: Device | None = None, dtype: str = "float32") -> None:
        super().__init__()
        self.dim, self.eps = dim, eps
        self.weight = Parameter(init.ones(dim), device=device, dtype=dtype)
        self.bias = Parameter(init.zeros(dim), device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        mean = ops.mean(x, -1, keepdims=True)
        centred = x - mean
        variance = ops.mean(centred * centred, -1, keepdims=True)
        return centred * ops.rsqrt(variance + self.eps) * self.weight + self.bias

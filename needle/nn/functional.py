"""Layers without parameters for functional calls of other frameworks, which hand in their tensors."""

from __future__ import annotations

from typing import Any

from needle import ops
from needle.autograd import Tensor

from .function import Declared
from .module import Module

__all__ = ["FunctionalBatchNorm", "FunctionalInstanceNorm", "WriteBuffer"]


class WriteBuffer(Module):
    """Writes a value into a buffer, both given at the call."""

    def forward(self, buffer: Tensor, value: Tensor) -> Tensor:
        buffer.data = value.detach()
        return value


class FunctionalBatchNorm(Declared):
    """Batch normalisation, in torch's rule, with the statistics and parameters given at the call."""

    mode_dependent = True

    momentum: float = 0.1
    eps: float = 1e-5

    def forward(self, x: Tensor, mean: Any, var: Any, weight: Any = None, bias: Any = None) -> Tensor:
        training = self.training or mean is None
        return ops.batch_norm(x, mean, var, weight, bias, training, self.momentum, self.eps, unbiased=True)


class FunctionalInstanceNorm(FunctionalBatchNorm):
    """Instance normalisation with the statistics and parameters given at the call."""

    def forward(self, x: Tensor, mean: Any, var: Any, weight: Any = None, bias: Any = None) -> Tensor:
        own = self.training or mean is None
        return ops.instance_norm(x, mean, var, weight, bias, own, self.momentum, self.eps)

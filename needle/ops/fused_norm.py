"""Batch norm and activation as one op."""

from __future__ import annotations

from typing import Any

import numpy as np

from needle.autograd import Op, Tensor, is_on, op
from needle.backend_ndarray import NDArray

from .activation import activation_code, apply_activation
from .fused import act_reference, count_batch
from .norm import BatchNorm, apply_batch_norm, batch_norm


@op
class FusedBatchNormActivation(Op):
    """activation(batch_norm(x)), x (N, C, *); inputs x, weight, bias, running mean and variance, [num_batches_tracked]."""

    eps: float = 1e-5
    momentum: float = 0.1
    training: Any = False  # a bool, or a Mode that follows the batch norm's module
    unbiased: bool = False
    activation: str = "relu"
    alpha: float = 0.0
    has_count: bool = False
    layout = "any"
    zero_is_safe = BatchNorm.zero_is_safe

    def must_decompose(self, *inputs: Any) -> bool:
        return is_on(self.training)

    def is_weight(self, index: int) -> bool:
        return index > 0

    def infer(self, x: Any, gamma: Any, beta: Any, mean: Any, var: Any, *_: Any) -> Any:
        return BatchNorm(self.eps).infer(x, mean, var, gamma, beta)

    def compute(self, *inputs: NDArray) -> NDArray:
        out = NDArray.empty(inputs[0].shape, inputs[0].dtype)
        self.lower(None, list(inputs), out)
        return out

    def lower(self, builder: Any, inputs: list[NDArray], out: NDArray) -> None:
        x, gamma, beta, mean, var = inputs[:5]
        code = activation_code(self.activation)
        apply_batch_norm(out, x, mean, var, gamma, beta, eps=self.eps, activation=code, alpha=self.alpha)

    def reference(
        self, x: np.ndarray, gamma: np.ndarray, beta: np.ndarray, mean: np.ndarray, var: np.ndarray, *_: Any
    ) -> Any:
        return act_reference(self.activation, self.alpha, BatchNorm(self.eps).reference(x, mean, var, gamma, beta))

    def decompose(self, x: Tensor, gamma: Tensor, beta: Tensor, mean: Tensor, var: Tensor, *count: Tensor) -> Tensor:
        if self.training:
            count_batch(count[0] if count else None, x)
        y = batch_norm(x, mean, var, gamma, beta, self.training, self.momentum, self.eps, self.unbiased)
        return apply_activation(self.activation, y, self.alpha)

    @classmethod
    def samples(cls) -> list:
        from .norm import Positive

        v = [(5,), (5,), (5,), Positive((5,))]
        return [({"activation": a}, [(2, 5, 4, 3), *v]) for a in ("relu", "gelu")] + [({}, [(4, 5), *v])]


def fused_batchnorm_relu(
    x: Tensor,
    gamma: Tensor,
    beta: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    training: Any = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    unbiased: bool = False,
) -> Tensor:
    """relu(batch_norm(x)), x (N, C, *); in training it updates the running statistics."""
    return FusedBatchNormActivation(eps, momentum, training, unbiased)(x, gamma, beta, running_mean, running_var)

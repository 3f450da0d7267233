"""Transposed convolution with batch norm and activation as one op."""

from __future__ import annotations

from typing import Any

import numpy as np

from needle.autograd import Op, Spec, Tensor, is_on, op
from needle.backend_ndarray import NDArray

from .activation import activation_code, apply_activation
from .conv import ConvTranspose2d, conv_transpose2d_kernel
from .fold import FoldedBias, FoldedWeight
from .fused import act_reference, count_batch
from .norm import BatchNorm, Positive, apply_batch_norm, batch_norm
from .planned import Halo, conv_transpose2d_halo, lower_conv_transpose2d
from .spatial import ANY, windows_of


@op
class FusedConvTranspose2dActivation(Op):
    """activation(conv_transpose2d(x, w) + bias); inputs x, w, [bias]."""

    stride: tuple = (1, 1)
    padding: tuple = (0, 0, 0, 0)
    output_padding: tuple = (0, 0)
    dilation: tuple = (1, 1)
    groups: int = 1
    activation: str = "relu"
    alpha: float = 0.0
    float32_only = True
    checks = windows_of(stride=1, padding=ANY, output_padding=0, dilation=1, groups=1)
    layout = "blocked"
    flops = ConvTranspose2d.flops

    @property
    def conv(self) -> ConvTranspose2d:
        return ConvTranspose2d(self.stride, self.padding, self.output_padding, self.dilation, self.groups)

    def is_weight(self, index: int) -> bool:
        return index > 0

    def infer(self, *inputs: Any) -> Spec:
        return self.conv.infer(*inputs)

    def compute(self, x: NDArray, w: NDArray, *bias: NDArray) -> NDArray:
        return conv_transpose2d_kernel(self.conv, x, w, bias[0] if bias else None, self.activation, self.alpha)

    def reference(self, *inputs: np.ndarray) -> np.ndarray:
        return act_reference(self.activation, self.alpha, self.conv.reference(*inputs))

    def decompose(self, *inputs: Tensor) -> Tensor:
        return apply_activation(self.activation, self.conv(*inputs), self.alpha)

    def halo(self, index: int, out: Spec, *inputs: Spec) -> Halo:
        return conv_transpose2d_halo(self, out, *inputs[:2]) if index == 0 else (0, 0, 0, 0)

    def lower(self, builder: Any, inputs: list[NDArray], out: NDArray) -> None:
        lower_conv_transpose2d(builder, self, inputs, out, activation_code(self.activation), self.alpha)

    @classmethod
    def samples(cls) -> list:
        return [
            ({"stride": (2, 2), "activation": "silu"}, [(1, 18, 4, 4), (18, 5, 2, 2), (5,)]),
            ({"padding": (1, 1, 1, 1), "groups": 2}, [(1, 4, 5, 4), (4, 3, 3, 3)]),
        ]


@op
class FusedConvTransposeBatchNorm2d(Op):
    """activation(batch_norm(conv_transpose2d(x, w))).

    Inputs x, w, [conv bias], bn weight, bn bias, running mean, running variance, [num_batches_tracked].
    """

    stride: tuple = (1, 1)
    padding: tuple = (0, 0, 0, 0)
    output_padding: tuple = (0, 0)
    dilation: tuple = (1, 1)
    groups: int = 1
    eps: float = 1e-5
    momentum: float = 0.1
    training: Any = False  # a bool, or a Mode that follows the batch norm's module
    unbiased: bool = False
    activation: str = "none"
    alpha: float = 0.0
    has_bias: bool = False
    has_count: bool = False
    float32_only = True
    checks = windows_of(stride=1, padding=ANY, output_padding=0, dilation=1, groups=1)
    flops = ConvTranspose2d.flops

    def must_decompose(self, *inputs: Any) -> bool:
        return is_on(self.training)

    def is_weight(self, index: int) -> bool:
        return index > 0

    @property
    def conv(self) -> ConvTranspose2d:
        return ConvTranspose2d(self.stride, self.padding, self.output_padding, self.dilation, self.groups)

    def split(self, inputs: Any) -> tuple[Any, list[Any], list[Any], list[Any]]:
        """[x, weight], bias?, [gamma, beta, mean, var], count?."""
        first = 2 + self.has_bias
        return inputs[:2], list(inputs[2:first]), list(inputs[first : first + 4]), list(inputs[first + 4 :])

    def folded(self, inputs: Any) -> tuple[FusedConvTranspose2dActivation, FoldedWeight, FoldedBias, list, list]:
        (x, w), bias, (gamma, beta, mean, var), _ = self.split(inputs)
        attributes = {**self.conv.attributes(), "activation": self.activation, "alpha": self.alpha}
        parts = [w, mean, var, gamma, beta, *bias]
        return (
            FusedConvTranspose2dActivation(**attributes),
            FoldedWeight(self.eps, 1),
            FoldedBias(self.eps, 1),
            parts,
            [x],
        )

    def infer(self, *inputs: Any) -> Spec:
        (x, w), bias, (gamma, beta, mean, var), _ = self.split(inputs)
        out = self.conv.infer(x, w, *bias)
        BatchNorm(self.eps).infer(out, mean, var, gamma, beta)
        return out

    def compute(self, *inputs: NDArray) -> NDArray:
        (x, w), bias, (gamma, beta, mean, var), _ = self.split(inputs)
        out = conv_transpose2d_kernel(self.conv, x, w, bias[0] if bias else None)
        code = activation_code(self.activation)
        apply_batch_norm(out, out, mean, var, gamma, beta, eps=self.eps, activation=code, alpha=self.alpha)
        return out

    def reference(self, *inputs: np.ndarray) -> np.ndarray:
        (x, w), bias, (gamma, beta, mean, var), _ = self.split(inputs)
        y = BatchNorm(self.eps).reference(self.conv.reference(x, w, *bias), mean, var, gamma, beta)
        return act_reference(self.activation, self.alpha, y)

    def decompose(self, *inputs: Tensor) -> Tensor:
        (x, w), bias, (gamma, beta, mean, var), count = self.split(inputs)
        if self.training:
            count_batch(count[0] if count else None, x)
        y = self.conv(x, w, *bias)
        y = batch_norm(y, mean, var, gamma, beta, self.training, self.momentum, self.eps, self.unbiased)
        return apply_activation(self.activation, y, self.alpha)

    @classmethod
    def samples(cls) -> list:
        v = [(6,), (6,), (6,), Positive((6,))]
        return [
            ({"stride": (2, 2), "activation": "relu", "has_bias": True}, [(2, 5, 4, 3), (5, 6, 2, 2), (6,), *v]),
            ({"padding": (1, 1, 1, 1), "groups": 2}, [(1, 4, 5, 4), (4, 3, 3, 3), *v]),
        ]

"""Ops that stand for several. Each carries its unfused form in `decompose`; in training mode that form is what runs."""

from __future__ import annotations

from typing import Any

import numpy as np

from needle.autograd import Op, Spec, Tensor, is_on, op
from needle.backend_ndarray import NDArray
from needle.backend_ndarray.kernels import call_map

from .activation import ACTIVATIONS, activation_code, apply_activation
from .conv import Conv2d, conv2d_kernel
from .fold import FoldedBias, FoldedWeight
from .norm import BatchNorm, Positive, apply_batch_norm, batch_norm
from .planned import Halo, conv2d_halo, lower_conv2d
from .spatial import ANY, as_padding, per_axis, windows_of


def act_reference(name: str, alpha: float, x: np.ndarray) -> np.ndarray:
    if name == "none":
        return x
    cls: Any = ACTIVATIONS[name]
    return (cls(alpha) if cls.has_alpha else cls()).reference(x)


def residual_broadcasts(fused: Any, inputs: Any) -> bool:
    """True where the residual is not of the convolution's shape, so that only the unfused add can take it."""
    x, w, _, *_, residual = fused.split(inputs)
    return residual is not None and tuple(residual.shape) != fused.conv.infer(x, w).shape


def add_and_activate(out: NDArray, residual: NDArray, activation: str, alpha: float) -> NDArray:
    """out = activation(out + residual), in place."""
    call_map("add", out, [out, residual])
    if activation != "none":
        call_map(activation, out, [out], (alpha,) if ACTIVATIONS[activation].has_alpha else ())
    return out


def count_batch(count: Any, x: Tensor) -> None:
    """Add one to torch's num_batches_tracked, as the BatchNorm layers do."""
    if count is not None and x.recorder is None:
        count.data = count + 1


@op
class FusedConv2dActivation(Op):
    """activation(conv2d(x, w) + bias + residual); inputs x, w, [bias], [residual]."""

    stride: tuple = (1, 1)
    padding: tuple = (0, 0, 0, 0)
    dilation: tuple = (1, 1)
    groups: int = 1
    activation: str = "relu"
    alpha: float = 0.0
    has_bias: bool = False
    has_residual: bool = False
    float32_only = True
    checks = windows_of(stride=1, padding=ANY, dilation=1, groups=1)
    layout = "blocked"
    flops = Conv2d.flops

    @property
    def conv(self) -> Conv2d:
        return Conv2d(self.stride, self.padding, self.dilation, self.groups)

    def split(self, inputs: Any) -> tuple[Any, Any, Any, Any]:
        """x, weight, bias or None, residual or None."""
        x, w, *rest = inputs
        bias = rest.pop(0) if self.has_bias else None
        return x, w, bias, rest[0] if self.has_residual else None

    def is_weight(self, index: int) -> bool:
        return 0 < index < 2 + self.has_bias

    def must_decompose(self, *inputs: Any) -> bool:
        return residual_broadcasts(self, inputs)

    def infer(self, *inputs: Any) -> Spec:
        x, w, bias, residual = self.split(inputs)
        out = self.conv.infer(x, w, bias)
        if residual is not None and tuple(residual.shape) != out.shape:
            raise ValueError(f"[{self.label}] residual expects shape {out.shape}, got {tuple(residual.shape)}.")
        return out

    def compute(self, *inputs: NDArray) -> NDArray:
        x, w, bias, residual = self.split(inputs)
        if residual is None:
            return conv2d_kernel(self.conv, x, w, bias, self.activation, self.alpha)
        out = conv2d_kernel(self.conv, x, w, bias)
        return add_and_activate(out, residual, self.activation, self.alpha)

    def reference(self, *inputs: np.ndarray) -> np.ndarray:
        x, w, bias, residual = self.split(inputs)
        y = self.conv.reference(x, w, bias)
        return act_reference(self.activation, self.alpha, y if residual is None else y + residual)

    def decompose(self, *inputs: Tensor) -> Tensor:
        x, w, bias, residual = self.split(inputs)
        y = self.conv(x, w) if bias is None else self.conv(x, w, bias)
        return apply_activation(self.activation, y if residual is None else y + residual, self.alpha)

    def halo(self, index: int, out: Spec, *inputs: Spec) -> Halo:
        return conv2d_halo(self, out, *inputs[:2]) if index == 0 else (0, 0, 0, 0)

    def reads_narrow_blocks(self, *inputs: Spec) -> bool:
        return self.groups == 1

    def lower(self, builder: Any, inputs: list[NDArray], out: NDArray) -> None:
        x, w, bias, residual = self.split(inputs)
        parts = [x, w] if bias is None else [x, w, bias]
        lower_conv2d(builder, self, parts, out, residual, activation_code(self.activation), self.alpha)

    @classmethod
    def samples(cls) -> list:
        base = {"padding": (1, 1, 1, 1), "has_bias": True}
        return [
            (base, [(2, 5, 7, 6), (17, 5, 3, 3), (17,)]),
            ({**base, "has_residual": True, "activation": "silu"}, [(1, 4, 5, 5), (4, 4, 3, 3), (4,), (1, 4, 5, 5)]),
            ({"activation": "none", "has_residual": True}, [(1, 4, 5, 5), (3, 4, 1, 1), (1, 3, 5, 5)]),
        ]


@op
class FusedConvBatchNorm2d(Op):
    """activation(batch_norm(conv2d(x, w)) + residual).

    Inputs x, w, [conv bias], bn weight, bn bias, running mean, running variance, [residual], [num_batches_tracked].
    """

    stride: tuple = (1, 1)
    padding: tuple = (0, 0, 0, 0)
    dilation: tuple = (1, 1)
    groups: int = 1
    eps: float = 1e-5
    momentum: float = 0.1
    training: Any = False  # a bool, or a Mode that follows the batch norm's module
    unbiased: bool = False
    activation: str = "none"
    alpha: float = 0.0
    has_bias: bool = False
    has_residual: bool = False
    has_count: bool = False
    flops = Conv2d.flops

    float32_only = True
    checks = windows_of(stride=1, padding=ANY, dilation=1, groups=1)

    def must_decompose(self, *inputs: Any) -> bool:
        return is_on(self.training) or residual_broadcasts(self, inputs)

    def is_weight(self, index: int) -> bool:
        return 0 < index < 6 + self.has_bias

    @property
    def conv(self) -> Conv2d:
        return Conv2d(self.stride, self.padding, self.dilation, self.groups)

    def split(self, inputs: Any) -> tuple[Any, Any, Any, list[Any], Any]:
        """x, weight, bias or None, [gamma, beta, mean, var], residual or None."""
        x, w, *rest = inputs
        bias = rest.pop(0) if self.has_bias else None
        return x, w, bias, rest[:4], rest[4] if self.has_residual else None

    def folded(self, inputs: Any) -> tuple[FusedConv2dActivation, FoldedWeight, FoldedBias, list[Any], list[Any]]:
        """The convolution with the batch norm in its weights: op, the two folds, their inputs, and [x, residual?]."""
        x, w, bias, (gamma, beta, mean, var), residual = self.split(inputs)
        conv = FusedConv2dActivation(
            self.stride, self.padding, self.dilation, self.groups, self.activation, self.alpha, True, self.has_residual
        )
        parts = [w, mean, var, gamma, beta] + ([] if bias is None else [bias])
        return conv, FoldedWeight(self.eps), FoldedBias(self.eps), parts, [x] + ([] if residual is None else [residual])

    def infer(self, *inputs: Any) -> Spec:
        x, w, bias, vectors, residual = self.split(inputs)
        out = self.conv.infer(x, w, bias)
        BatchNorm(self.eps).infer(out, vectors[2], vectors[3], vectors[0], vectors[1])
        if residual is not None and tuple(residual.shape) != out.shape:
            raise ValueError(f"[{self.label}] residual expects shape {out.shape}, got {tuple(residual.shape)}.")
        return out

    def compute(self, *inputs: NDArray) -> NDArray:
        # An eager call does not fold: that would cost more than the pass over the result which it saves.
        x, w, bias, (gamma, beta, mean, var), residual = self.split(inputs)
        out = conv2d_kernel(self.conv, x, w, bias)
        code = activation_code(self.activation) if residual is None else 0
        apply_batch_norm(out, out, mean, var, gamma, beta, eps=self.eps, activation=code, alpha=self.alpha)
        return out if residual is None else add_and_activate(out, residual, self.activation, self.alpha)

    def reference(self, *inputs: np.ndarray) -> np.ndarray:
        x, w, bias, (gamma, beta, mean, var), residual = self.split(inputs)
        y = BatchNorm(self.eps).reference(self.conv.reference(x, w, bias), mean, var, gamma, beta)
        return act_reference(self.activation, self.alpha, y if residual is None else y + residual)

    def decompose(self, *inputs: Tensor) -> Tensor:
        x, w, bias, (gamma, beta, mean, var), residual = self.split(inputs)
        if self.training:
            count_batch(inputs[-1] if self.has_count else None, x)
        y = self.conv(x, w) if bias is None else self.conv(x, w, bias)
        y = batch_norm(y, mean, var, gamma, beta, self.training, self.momentum, self.eps, self.unbiased)
        return apply_activation(self.activation, y if residual is None else y + residual, self.alpha)

    @classmethod
    def samples(cls) -> list:
        v = [(6,), (6,), (6,), Positive((6,))]
        return [
            ({"activation": "relu", "padding": (1, 1, 1, 1)}, [(2, 3, 5, 6), (6, 3, 3, 3), *v]),
            ({"has_bias": True, "has_residual": True}, [(1, 3, 5, 6), (6, 3, 1, 1), (6,), *v, (1, 6, 5, 6)]),
        ]


def fused_conv_batchnorm2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gamma: Tensor,
    beta: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
    training: Any = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    activation: str = "none",
    residual: Tensor | None = None,
    unbiased: bool = False,
) -> Tensor:
    """activation(batch_norm(conv2d(x)) + residual), NCHW; in training it updates the running statistics."""
    stride, dilation = per_axis("conv2d", stride, 2), per_axis("conv2d", dilation, 2)
    full = as_padding(padding, tuple(weight.shape[2:4]), stride, dilation, "conv2d")
    fused = FusedConvBatchNorm2d(
        stride,
        full,
        dilation,
        groups,
        eps,
        momentum,
        training,
        unbiased,
        activation,
        0.0,
        bias is not None,
        residual is not None,
    )
    extra = [] if bias is None else [bias]
    return fused(x, weight, *extra, gamma, beta, running_mean, running_var, *([] if residual is None else [residual]))


def fused_conv_batchnorm2d_relu(*args: Any, **kwargs: Any) -> Tensor:
    """relu(batch_norm(conv2d(x))); arguments as fused_conv_batchnorm2d."""
    return fused_conv_batchnorm2d(*args, **dict(activation="relu", **kwargs))


def fused_conv2d_relu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
    residual: Tensor | None = None,
) -> Tensor:
    """relu(conv2d(x) + residual)."""
    stride, dilation = per_axis("conv2d", stride, 2), per_axis("conv2d", dilation, 2)
    full = as_padding(padding, tuple(weight.shape[2:4]), stride, dilation, "conv2d")
    fused = FusedConv2dActivation(stride, full, dilation, groups, "relu", 0.0, bias is not None, residual is not None)
    return fused(x, weight, *([] if bias is None else [bias]), *([] if residual is None else [residual]))

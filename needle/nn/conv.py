"""Convolutions and pooling as layers, NCHW."""

from __future__ import annotations

from typing import Any

import numpy as np

from needle import init, ops
from needle.autograd import Tensor
from needle.backend_ndarray import Device
from needle.ops.common import pair

from .module import Module, Parameter


class Conv(Module):
    """2-D convolution, NCHW in and out.

    layout="needle": weight (k, k, C_in, C_out), padding (k - 1) // 2 unless given; layout="torch": weight
    (C_out, C_in / groups, k_h, k_w), padding 0 unless given. `padding`: int, pair, "same" or "valid".
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Any,
        stride: Any = 1,
        bias: bool = True,
        device: Device | None = None,
        dtype: str = "float32",
        padding: Any = None,
        dilation: Any = 1,
        groups: int = 1,
        layout: str = "needle",
    ) -> None:
        super().__init__()
        if in_channels % groups or out_channels % groups:
            raise ValueError(
                f"[Conv] channels {in_channels} and {out_channels} expect to be multiples of groups, got {groups}."
            )
        kh, kw = pair(kernel_size)
        self.in_channels, self.out_channels, self.kernel_size = in_channels, out_channels, (kh, kw)
        self.stride, self.dilation, self.groups, self._layout = pair(stride), pair(dilation), groups, layout
        if padding is None:
            padding = ((kh - 1) // 2, (kw - 1) // 2) if layout == "needle" else 0
        self.padding = padding
        taps, per_group = kh * kw, in_channels // groups
        shape = (kh, kw, per_group, out_channels)
        drawn = init.kaiming_uniform(per_group * taps, out_channels * taps, shape=shape, device=device, dtype=dtype)
        weight = drawn if layout == "needle" else np.ascontiguousarray(drawn.numpy().transpose(3, 2, 0, 1))
        self.weight = Parameter(weight, device=device, dtype=dtype)
        self.bias: Tensor | None = None
        if bias:
            bound = 1 / (per_group * taps) ** 0.5
            self.bias = Parameter(
                init.rand(out_channels, low=-bound, high=bound, device=device, dtype=dtype), device=device, dtype=dtype
            )

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight if self._layout == "torch" else ops.permute(self.weight, (3, 2, 0, 1))
        return ops.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)

    def extra_repr(self) -> str:
        return (
            f"{self.in_channels}, {self.out_channels}, {self.kernel_size}, stride={self.stride}, padding={self.padding}"
        )


class ConvTranspose2d(Module):
    """Transposed 2-D convolution; weight (C_in, C_out / groups, k_h, k_w) as torch's."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Any,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: Any = 1,
        device: Device | None = None,
        dtype: str = "float32",
    ) -> None:
        super().__init__()
        kh, kw = pair(kernel_size)
        self.stride, self.padding, self.output_padding = pair(stride), pair(padding), pair(output_padding)
        self.dilation, self.groups = pair(dilation), groups
        shape = (in_channels, out_channels // groups, kh, kw)
        fan_in = out_channels // groups * kh * kw
        self.weight = Parameter(init.kaiming_uniform(fan_in, 1, shape=shape), device=device, dtype=dtype)
        self.bias: Tensor | None = None
        if bias:
            bound = 1 / fan_in**0.5
            self.bias = Parameter(init.rand(out_channels, low=-bound, high=bound), device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return ops.conv_transpose2d(
            x, self.weight, self.bias, self.stride, self.padding, self.output_padding, self.groups, self.dilation
        )


class MaxPool2d(Module):
    """See ops.max_pool2d."""

    def __init__(
        self, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
    ) -> None:
        super().__init__()
        self.kernel_size, self.stride, self.padding = kernel_size, stride, padding
        self.dilation, self.ceil_mode = dilation, ceil_mode

    def forward(self, x: Tensor) -> Tensor:
        return ops.max_pool2d(x, self.kernel_size, self.stride, self.padding, self.dilation, self.ceil_mode)


class AvgPool2d(Module):
    """See ops.avg_pool2d."""

    def __init__(
        self,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> None:
        super().__init__()
        self.kernel_size, self.stride, self.padding = kernel_size, stride, padding
        self.ceil_mode, self.count_include_pad, self.divisor_override = ceil_mode, count_include_pad, divisor_override

    def forward(self, x: Tensor) -> Tensor:
        return ops.avg_pool2d(
            x,
            self.kernel_size,
            self.stride,
            self.padding,
            self.ceil_mode,
            self.count_include_pad,
            self.divisor_override,
        )


class AdaptiveAvgPool2d(Module):
    """See ops.adaptive_avg_pool2d."""

    def __init__(self, output_size: Any) -> None:
        super().__init__()
        self.output_size = output_size

    def forward(self, x: Tensor) -> Tensor:
        return ops.adaptive_avg_pool2d(x, self.output_size)

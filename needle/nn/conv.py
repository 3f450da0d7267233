"""Convolutions as layers, NCHW."""

from __future__ import annotations

from math import prod
from typing import Any, ClassVar

from needle import init, ops
from needle.autograd import Tensor
from needle.backend_ndarray import Device
from needle.ops.nn.spatial import as_padding, per_axis

from .arguments import check_divides, integers
from .module import Module, Parameter

__all__ = ["Conv", "Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d"]


def pad_around(x: Tensor, padding: Any, kernel: tuple, dilation: tuple, mode: str) -> tuple[Tensor, Any]:
    """x with the padding of a convolution in a mode other than zeros, and the padding that is left to do."""
    if mode == "zeros":
        return x, padding
    n = len(kernel)
    full = as_padding(padding, kernel, (1,) * n, dilation, "conv")
    pads = [full[j] for i in reversed(range(n)) for j in (i, n + i)]
    return (ops.pad(x, pads, mode=mode) if any(pads) else x), 0


def draw_weights(
    shape: tuple[int, ...], biases: int, fan_in: int, device: Device | None, dtype: str
) -> tuple[Parameter, Tensor | None]:
    """A weight and, for a number of biases, a bias as torch draws them: uniform, by the inputs of one output."""
    where: dict[str, Any] = {"device": device, "dtype": dtype}
    weight = Parameter(init.kaiming_uniform(fan_in, 1, shape=shape, **where), **where)
    bound = 1 / max(fan_in, 1) ** 0.5
    return weight, Parameter(init.rand(biases, low=-bound, high=bound, **where), **where) if biases else None


class Conv(Module):
    """2-D convolution, NCHW in and out.

    layout="needle": weight (k, k, C_in, C_out), padding (k - 1) // 2 unless given; layout="torch": weight
    (C_out, C_in / groups, k_h, k_w), padding 0 unless given. `padding`: int, pair, "same" or "valid"; `padding_mode`:
    "zeros", "reflect", "replicate" or "circular".
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
        padding_mode: str = "zeros",
    ) -> None:
        super().__init__()
        label = type(self).__name__
        check_divides(label, "channels", "groups", groups, in_channels, out_channels)
        kh, kw = per_axis(label, kernel_size, 2)
        self.in_channels, self.out_channels, self.kernel_size = in_channels, out_channels, (kh, kw)
        self.stride, self.dilation = per_axis(label, stride, 2), per_axis(label, dilation, 2)
        self.groups, self._layout = groups, layout
        if padding is None:
            padding = ((kh - 1) // 2, (kw - 1) // 2) if layout == "needle" else 0
        as_padding(padding, self.kernel_size, self.stride, self.dilation, label)
        self.padding, self.padding_mode = padding, padding_mode
        shape = (kh, kw, in_channels // groups, out_channels)
        self.weight, self.bias = draw_weights(shape, out_channels if bias else 0, prod(shape[:3]), device, dtype)
        if layout == "torch":
            weight = ops.permute(self.weight.detach(), (3, 2, 0, 1))
            self.weight = Parameter(weight, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight if self._layout == "torch" else ops.permute(self.weight, (3, 2, 0, 1))
        x, padding = pad_around(x, self.padding, self.kernel_size, self.dilation, self.padding_mode)
        return ops.conv2d(x, weight, self.bias, self.stride, padding, self.dilation, self.groups)

    def extra_repr(self) -> str:
        return (
            f"{self.in_channels}, {self.out_channels}, {self.kernel_size}, stride={self.stride}, padding={self.padding}"
        )


class Conv1d(Module):
    """1-D convolution over (N, C, L); weight (C_out, C_in / groups, k) as torch's. Arguments as torch.nn.Conv1d."""

    axes: ClassVar[int] = 1
    convolve: ClassVar[Any] = staticmethod(ops.conv1d)

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Any,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        device: Device | None = None,
        dtype: str = "float32",
    ) -> None:
        super().__init__()
        label = type(self).__name__
        check_divides(label, "channels", "groups", groups, in_channels, out_channels)
        self.in_channels, self.out_channels = in_channels, out_channels
        self.kernel_size = per_axis(label, kernel_size, self.axes)
        self.stride, self.dilation = per_axis(label, stride, self.axes), per_axis(label, dilation, self.axes)
        as_padding(padding, self.kernel_size, self.stride, self.dilation, label)
        self.padding, self.padding_mode, self.groups = padding, padding_mode, groups
        shape = (out_channels, in_channels // groups, *self.kernel_size)
        self.weight, self.bias = draw_weights(shape, out_channels if bias else 0, prod(shape[1:]), device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        x, padding = pad_around(x, self.padding, self.kernel_size, self.dilation, self.padding_mode)
        return self.convolve(x, self.weight, self.bias, self.stride, padding, self.dilation, self.groups)

    extra_repr = Conv.extra_repr


class Conv2d(Conv1d):
    """2-D convolution over (N, C, H, W) with torch's arguments; weight (C_out, C_in / groups, k_h, k_w) as torch's. The
    course's is `Conv`."""

    axes = 2
    convolve = staticmethod(ops.conv2d)


class Conv3d(Conv1d):
    """3-D convolution over (N, C, D, H, W); weight (C_out, C_in / groups, k_d, k_h, k_w) as torch's."""

    axes = 3
    convolve = staticmethod(ops.conv3d)


class ConvTranspose2d(Module):
    """Transposed 2-D convolution; weight (C_in, C_out / groups, k_h, k_w) as torch's."""

    axes: ClassVar[int] = 2
    convolve: ClassVar[Any] = staticmethod(ops.conv_transpose2d)
    arguments = {"padding": integers(0)}

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
        label = type(self).__name__
        check_divides(label, "channels", "groups", groups, in_channels, out_channels)
        kernel = per_axis(label, kernel_size, self.axes)
        given = (per_axis(label, v, self.axes) for v in (stride, padding, output_padding, dilation))
        self.stride, self.padding, self.output_padding, self.dilation = given
        self.groups = groups
        shape = (in_channels, out_channels // groups, *kernel)
        self.weight, self.bias = draw_weights(shape, out_channels if bias else 0, prod(shape[1:]), device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.convolve(
            x, self.weight, self.bias, self.stride, self.padding, self.output_padding, self.groups, self.dilation
        )


class ConvTranspose1d(ConvTranspose2d):
    """Transposed 1-D convolution; weight (C_in, C_out / groups, k) as torch's."""

    axes = 1
    convolve = staticmethod(ops.conv_transpose1d)


class ConvTranspose3d(ConvTranspose2d):
    """Transposed 3-D convolution; weight (C_in, C_out / groups, k_d, k_h, k_w) as torch's."""

    axes = 3
    convolve = staticmethod(ops.conv_transpose3d)

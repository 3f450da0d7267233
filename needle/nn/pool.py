"""Pooling as layers: windows, and regions that cover the input."""

from __future__ import annotations

from typing import Any, ClassVar

from needle import ops
from needle.autograd import Tensor
from needle.ops.spatial import per_axis

from .arguments import integers
from .module import Module


def check_window(label: str, kernel: Any, padding: Any) -> None:
    """Raises where a window may lie in the padding alone."""
    n = max(len(v) if isinstance(v, tuple) else 1 for v in (kernel, padding))
    if any(p > k // 2 for p, k in zip(per_axis(label, padding, n), per_axis(label, kernel, n), strict=True)):
        raise ValueError(f"[{label}] padding expects at most half of kernel_size {kernel}, got {padding}.")


class MaxPool2d(Module):
    """See ops.max_pool2d."""

    pool: ClassVar[Any] = staticmethod(ops.max_pool2d)

    def __init__(
        self, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
    ) -> None:
        super().__init__()
        check_window(type(self).__name__, kernel_size, padding)
        self.kernel_size, self.stride, self.padding = kernel_size, stride, padding
        self.dilation, self.ceil_mode = dilation, ceil_mode

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(x, self.kernel_size, self.stride, self.padding, self.dilation, self.ceil_mode)


class MaxPool1d(MaxPool2d):
    """See ops.max_pool1d."""

    pool = staticmethod(ops.max_pool1d)


class MaxPool3d(MaxPool2d):
    """See ops.max_pool3d."""

    pool = staticmethod(ops.max_pool3d)


class AvgPool1d(Module):
    """See ops.avg_pool1d."""

    def __init__(
        self,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
    ) -> None:
        super().__init__()
        check_window(type(self).__name__, kernel_size, padding)
        self.kernel_size, self.stride, self.padding = kernel_size, stride, padding
        self.ceil_mode, self.count_include_pad = ceil_mode, count_include_pad

    def forward(self, x: Tensor) -> Tensor:
        return ops.avg_pool1d(x, self.kernel_size, self.stride, self.padding, self.ceil_mode, self.count_include_pad)


class AvgPool2d(Module):
    """See ops.avg_pool2d."""

    pool: ClassVar[Any] = staticmethod(ops.avg_pool2d)

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
        check_window(type(self).__name__, kernel_size, padding)
        self.kernel_size, self.stride, self.padding = kernel_size, stride, padding
        self.ceil_mode, self.count_include_pad, self.divisor_override = ceil_mode, count_include_pad, divisor_override

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(
            x,
            self.kernel_size,
            self.stride,
            self.padding,
            self.ceil_mode,
            self.count_include_pad,
            self.divisor_override,
        )


class AvgPool3d(AvgPool2d):
    """See ops.avg_pool3d."""

    pool = staticmethod(ops.avg_pool3d)


class AdaptiveAvgPool2d(Module):
    """See ops.adaptive_avg_pool2d."""

    pool: ClassVar[Any] = staticmethod(ops.adaptive_avg_pool2d)
    arguments = {"output_size": integers(1, holes=True)}  # None: the size of the input

    def __init__(self, output_size: Any) -> None:
        super().__init__()
        self.output_size = output_size

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(x, self.output_size)


class AdaptiveAvgPool1d(AdaptiveAvgPool2d):
    """See ops.adaptive_avg_pool1d."""

    pool = staticmethod(ops.adaptive_avg_pool1d)


class AdaptiveAvgPool3d(AdaptiveAvgPool2d):
    """See ops.adaptive_avg_pool3d."""

    pool = staticmethod(ops.adaptive_avg_pool3d)


class AdaptiveMaxPool1d(AdaptiveAvgPool2d):
    """See ops.adaptive_max_pool1d."""

    pool = staticmethod(ops.adaptive_max_pool1d)


class AdaptiveMaxPool2d(AdaptiveAvgPool2d):
    """See ops.adaptive_max_pool2d."""

    pool = staticmethod(ops.adaptive_max_pool2d)


class AdaptiveMaxPool3d(AdaptiveAvgPool2d):
    """See ops.adaptive_max_pool3d."""

    pool = staticmethod(ops.adaptive_max_pool3d)

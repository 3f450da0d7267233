"""Pooling as layers: windows, and regions that cover the input."""

from __future__ import annotations

from typing import Any

from needle import ops
from needle.ops.nn.spatial import per_axis

from .arguments import integers
from .function import Function

__all__ = [
    "AdaptiveAvgPool1d",
    "AdaptiveAvgPool2d",
    "AdaptiveAvgPool3d",
    "AdaptiveMaxPool1d",
    "AdaptiveMaxPool2d",
    "AdaptiveMaxPool3d",
    "AvgPool1d",
    "AvgPool2d",
    "AvgPool3d",
    "MaxPool1d",
    "MaxPool2d",
    "MaxPool3d",
]


class Windows(Function):
    """What layers over windows share."""

    kernel_size: Any
    stride: Any = None
    padding: Any = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        label, kernel, padding = type(self).__name__, self.kernel_size, self.padding
        n = max(len(v) if isinstance(v, tuple) else 1 for v in (kernel, padding))
        # No window lies in the padding alone.
        if any(p > k // 2 for p, k in zip(per_axis(label, padding, n), per_axis(label, kernel, n), strict=True)):
            raise ValueError(f"[{label}] padding expects at most half of kernel_size {kernel}, got {padding}.")


class MaxPool2d(Windows, function=ops.max_pool2d):
    dilation: Any = 1
    ceil_mode: bool = False


class AvgPool1d(Windows, function=ops.avg_pool1d):
    ceil_mode: bool = False
    count_include_pad: bool = True


class AvgPool2d(AvgPool1d, function=ops.avg_pool2d):
    divisor_override: int | None = None


class AdaptivePool(Function):
    """What layers over regions that cover the input share."""

    arguments = {"output_size": integers(1, holes=True)}  # None: the size of the input
    output_size: Any


class MaxPool1d(MaxPool2d, function=ops.max_pool1d): ...


class MaxPool3d(MaxPool2d, function=ops.max_pool3d): ...


class AvgPool3d(AvgPool2d, function=ops.avg_pool3d): ...


class AdaptiveAvgPool1d(AdaptivePool, function=ops.adaptive_avg_pool1d): ...


class AdaptiveAvgPool2d(AdaptivePool, function=ops.adaptive_avg_pool2d): ...


class AdaptiveAvgPool3d(AdaptivePool, function=ops.adaptive_avg_pool3d): ...


class AdaptiveMaxPool1d(AdaptivePool, function=ops.adaptive_max_pool1d): ...


class AdaptiveMaxPool2d(AdaptivePool, function=ops.adaptive_max_pool2d): ...


class AdaptiveMaxPool3d(AdaptivePool, function=ops.adaptive_max_pool3d): ...

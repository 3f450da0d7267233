"""Pooling as layers: windows, and regions that cover the input."""

from __future__ import annotations

from typing import Any, ClassVar

from needle import ops
from needle.autograd import Tensor
from needle.ops.nn.pool import window
from needle.ops.nn.spatial import per_axis

from .arguments import integers
from .function import Declared, Function
from .module import OWN

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
    "MaxUnpool1d",
    "MaxUnpool2d",
    "MaxUnpool3d",
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


def is_one_node(pool: Any) -> bool:
    """Not with two results: graphs then look inside."""
    return type(pool).__module__.startswith(OWN) and not pool.return_indices


LEAF: Any = property(is_one_node)


class MaxPool2d(Windows, function=ops.max_pool2d):
    """See ops.max_pool2d. return_indices: also where the maxima lie, as ops.max_pool_places has it."""

    axes: ClassVar[int] = 2
    is_leaf = LEAF
    dilation: Any = 1
    ceil_mode: bool = False
    return_indices: bool = False

    def forward(self, x: Tensor) -> Any:
        *window, places = self.values()
        values = self.function(x, *window)
        return (values, ops.max_pool_places(x, *window, axes=self.axes)) if places else values


class AvgPool1d(Windows, function=ops.avg_pool1d):
    ceil_mode: bool = False
    count_include_pad: bool = True


class AvgPool2d(AvgPool1d, function=ops.avg_pool2d):
    divisor_override: int | None = None


class AdaptivePool(Function):
    """What layers over regions that cover the input share."""

    arguments = {"output_size": integers(1, holes=True)}  # None: the size of the input
    output_size: Any


class MaxPool1d(MaxPool2d, function=ops.max_pool1d):
    axes = 1


class MaxPool3d(MaxPool2d, function=ops.max_pool3d):
    axes = 3


class AvgPool3d(AvgPool2d, function=ops.avg_pool3d): ...


class AdaptiveAvgPool1d(AdaptivePool, function=ops.adaptive_avg_pool1d): ...


class AdaptiveAvgPool2d(AdaptivePool, function=ops.adaptive_avg_pool2d): ...


class AdaptiveAvgPool3d(AdaptivePool, function=ops.adaptive_avg_pool3d): ...


class AdaptiveMaxPool1d(AdaptivePool, function=ops.adaptive_max_pool1d):
    """See ops.adaptive_max_pool1d. return_indices: also where the maxima lie, as ops.adaptive_max_pool_places has it."""

    axes: ClassVar[int] = 1
    is_leaf = LEAF
    return_indices: bool = False

    def forward(self, x: Tensor) -> Any:
        values = self.function(x, self.output_size)
        if not self.return_indices:
            return values
        return values, ops.adaptive_max_pool_places(x, self.output_size, axes=self.axes)


class AdaptiveMaxPool2d(AdaptiveMaxPool1d, function=ops.adaptive_max_pool2d):
    axes = 2


class AdaptiveMaxPool3d(AdaptiveMaxPool1d, function=ops.adaptive_max_pool3d):
    axes = 3


class MaxUnpool1d(Declared):
    """The way back of a max pooling with return_indices; output_size is by default what the windows cover."""

    axes: ClassVar[int] = 1
    container = True
    kernel_size: Any
    stride: Any = None
    padding: Any = 0

    def forward(self, x: Tensor, indices: Tensor, output_size: Any = None) -> Tensor:
        return unpooled(self.axes, x, indices, self.kernel_size, self.stride, self.padding, output_size)


class MaxUnpool2d(MaxUnpool1d):
    """`MaxUnpool1d` over two axes: x (N, C, H, W)."""

    axes = 2


class MaxUnpool3d(MaxUnpool1d):
    """`MaxUnpool1d` over three axes: x (N, C, D, H, W)."""

    axes = 3


def unpooled(
    n: int, x: Tensor, indices: Tensor, kernel_size: Any, stride: Any, padding: Any, output_size: Any
) -> Tensor:
    """`ops.max_unpool` over n axes with torch's arguments."""
    if output_size is None:
        given = zip(*window("max_unpool", n, kernel_size, stride, padding), strict=True)
        sizes = (x.shape[i - n] for i in range(n))
        output_size = tuple((size - 1) * s - 2 * p + k for size, (k, s, p) in zip(sizes, given, strict=True))
    return ops.max_unpool(x, indices, tuple(output_size)[-n:])

"""Pooling over one and three axes, which works axis by axis on the kernels for two; adaptive maxima."""

from __future__ import annotations

from typing import Any

from needle.autograd import Op, Spec, Tensor, op

from .indexing import getitem
from .join import along, concat
from .pool import AdaptiveAvgPool2d, AvgPool2d, MaxPool2d, infer_adaptive, pool_sizes, window
from .spatial import on_frames, on_row, per_axis, windows_of


class PoolNd(Op):
    """A pooling over as many axes as its attributes have entries: one or three."""

    kind = ""

    @property
    def label(self) -> str:
        return f"{self.kind}_pool{len(self._per_axis())}d"

    def _per_axis(self) -> tuple:
        return self.attributes()["kernel_size"]

    def infer(self, x: Any) -> Any:
        return Spec((*x.shape[:2], *pool_sizes(self, x)), str(x.dtype))


@op
class MaxPoolNd(PoolNd):
    """Maximum of every window of x (N, C, L) or (N, C, D, H, W)."""

    kernel_size: tuple
    stride: tuple
    padding: tuple
    dilation: tuple
    ceil_mode: bool = False
    kind = "max"
    checks = windows_of(kernel_size=1, stride=1, padding=0, dilation=1)

    def decompose(self, x: Tensor) -> Tensor:
        self.infer(x)
        k, s, p, d = self.kernel_size, self.stride, self.padding, self.dilation
        if len(k) == 1:
            return on_row(MaxPool2d((1, *k), (1, *s), (0, *p), (1, *d), self.ceil_mode), x)
        planes = MaxPool2d(k[1:], s[1:], p[1:], d[1:], self.ceil_mode)
        return on_frames(planes, MaxPool2d((k[0], 1), (s[0], 1), (p[0], 0), (d[0], 1), self.ceil_mode), x)

    @classmethod
    def samples(cls) -> list:
        line = {"kernel_size": (3,), "stride": (2,), "padding": (1,), "dilation": (2,), "ceil_mode": True}
        cube = {"kernel_size": (2, 3, 2), "stride": (2, 1, 2), "padding": (1, 1, 0), "dilation": (1, 1, 2)}
        return [(line, [(2, 3, 10)]), (cube, [(1, 2, 5, 4, 6)]), ({**cube, "ceil_mode": True}, [(1, 2, 4, 4, 6)])]


@op
class AvgPoolNd(PoolNd):
    """Mean of every window of x (N, C, L) or (N, C, D, H, W); attributes as in AvgPool2d."""

    kernel_size: tuple
    stride: tuple
    padding: tuple
    ceil_mode: bool = False
    count_include_pad: bool = True
    divisor_override: int | None = None
    kind = "avg"
    checks = windows_of(kernel_size=1, stride=1, padding=0)

    def decompose(self, x: Tensor) -> Tensor:
        self.infer(x)
        k, s, p, rest = self.kernel_size, self.stride, self.padding, (self.ceil_mode, self.count_include_pad)
        if len(k) == 1:
            return on_row(AvgPool2d((1, *k), (1, *s), (0, *p), *rest, self.divisor_override), x)
        planes = AvgPool2d(k[1:], s[1:], p[1:], *rest, 1 if self.divisor_override else None)
        return on_frames(planes, AvgPool2d((k[0], 1), (s[0], 1), (p[0], 0), *rest, self.divisor_override), x)

    @classmethod
    def samples(cls) -> list:
        line = {"kernel_size": (3,), "stride": (2,), "padding": (1,), "ceil_mode": True}
        cube = {"kernel_size": (2, 3, 2), "stride": (2, 1, 2), "padding": (1, 1, 0), "ceil_mode": True}
        return [
            (line, [(2, 3, 10)]),
            ({**cube, "count_include_pad": False}, [(1, 2, 5, 4, 5)]),
            ({**cube, "divisor_override": 5}, [(1, 2, 4, 4, 6)]),
        ]


class AdaptivePoolNd(PoolNd):
    def _per_axis(self) -> tuple:
        return self.attributes()["output_size"]

    def infer(self, x: Any) -> Any:
        return infer_adaptive(self, x)


@op
class AdaptiveAvgPoolNd(AdaptivePoolNd):
    """Means of output_size regions of x (N, C, L) or (N, C, D, H, W); regions as in AdaptiveAvgPool2d."""

    output_size: tuple
    kind = "adaptive_avg"

    def decompose(self, x: Tensor) -> Tensor:
        self.infer(x)
        size = self.output_size
        if len(size) == 1:
            return on_row(AdaptiveAvgPool2d((None, *size)), x)
        return on_frames(AdaptiveAvgPool2d(size[1:]), AdaptiveAvgPool2d((size[0], None)), x)

    @classmethod
    def samples(cls) -> list:
        return [({"output_size": (3,)}, [(2, 3, 7)]), ({"output_size": (2, None, 5)}, [(1, 2, 5, 3, 4)])]


@op
class AdaptiveMaxPoolNd(AdaptivePoolNd):
    """Maxima of output_size regions of x, over one, two or three axes; regions as in AdaptiveAvgPool2d."""

    output_size: tuple
    kind = "adaptive_max"

    def decompose(self, x: Tensor) -> Tensor:
        self.infer(x)
        size = self.output_size
        if len(size) == 1:
            return on_row(AdaptiveMaxPoolNd((None, *size)), x)
        if len(size) == 3:
            return on_frames(AdaptiveMaxPoolNd(size[1:]), AdaptiveMaxPoolNd((size[0], None)), x)
        for axis in (3, 2):  # columns first: of equal maxima the first in the image's order gets the gradient
            out = size[axis - 2]
            x = x if out is None else region_maxima(x, axis, out)
        return x

    @classmethod
    def samples(cls) -> list:
        sizes = [((3,), (2, 3, 7)), ((2, 5), (1, 2, 6, 3)), ((2, None, 3), (1, 2, 5, 3, 6))]
        return [({"output_size": s}, [x]) for s, x in sizes]


def region_maxima(x: Tensor, axis: int, out: int) -> Tensor:
    """x (N, C, H, W) with `out` maxima along its axis 2 or 3; one pooling where the regions are of one size."""
    size = x.shape[axis]

    def pool(piece: Tensor, length: int) -> Tensor:
        kernel = (length, 1) if axis == 2 else (1, length)
        return MaxPool2d(kernel, kernel)(piece) if length > 1 else piece

    if size % out == 0:
        return pool(x, size // out)
    bounds = [(i * size // out, -(-(i + 1) * size // out)) for i in range(out)]
    return concat([pool(getitem(x, along(axis, 4, slice(a, b))), b - a) for a, b in bounds], axis)


def max_pool1d(
    x: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
) -> Tensor:
    """Maxima of windows of x (N, C, L), arguments as in torch."""
    kernel, step, pads, spread = window("max_pool1d", 1, kernel_size, stride, padding, dilation)
    return MaxPoolNd(kernel, step, pads, spread, bool(ceil_mode))(x)


def max_pool3d(
    x: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
) -> Tensor:
    """Maxima of windows of x (N, C, D, H, W), arguments as in torch."""
    kernel, step, pads, spread = window("max_pool3d", 3, kernel_size, stride, padding, dilation)
    return MaxPoolNd(kernel, step, pads, spread, bool(ceil_mode))(x)


def avg_pool1d(
    x: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> Tensor:
    """Means of windows of x (N, C, L), arguments as in torch."""
    kernel, step, pads = window("avg_pool1d", 1, kernel_size, stride, padding)
    return AvgPoolNd(kernel, step, pads, bool(ceil_mode), bool(count_include_pad))(x)


def avg_pool3d(
    x: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    """Means of windows of x (N, C, D, H, W), arguments as in torch."""
    kernel, step, pads = window("avg_pool3d", 3, kernel_size, stride, padding)
    return AvgPoolNd(kernel, step, pads, bool(ceil_mode), bool(count_include_pad), divisor_override)(x)


def adaptive_avg_pool1d(x: Tensor, output_size: Any) -> Tensor:
    """Means of `output_size` regions of x (N, C, L)."""
    return AdaptiveAvgPoolNd(per_axis("adaptive_avg_pool1d", output_size, 1))(x)


def adaptive_avg_pool3d(x: Tensor, output_size: Any) -> Tensor:
    """Means of regions of x (N, C, D, H, W); None in `output_size` keeps the input's size."""
    return AdaptiveAvgPoolNd(per_axis("adaptive_avg_pool3d", output_size, 3))(x)


def adaptive_max_pool1d(x: Tensor, output_size: Any) -> Tensor:
    """Maxima of `output_size` regions of x (N, C, L)."""
    return AdaptiveMaxPoolNd(per_axis("adaptive_max_pool1d", output_size, 1))(x)


def adaptive_max_pool2d(x: Tensor, output_size: Any) -> Tensor:
    """Maxima of regions of x (N, C, H, W); None in `output_size` keeps the input's size."""
    return AdaptiveMaxPoolNd(per_axis("adaptive_max_pool2d", output_size, 2))(x)


def adaptive_max_pool3d(x: Tensor, output_size: Any) -> Tensor:
    """Maxima of regions of x (N, C, D, H, W); None in `output_size` keeps the input's size."""
    return AdaptiveMaxPoolNd(per_axis("adaptive_max_pool3d", output_size, 3))(x)

"""Pooling over one and three axes, which works axis by axis on the kernels for two; adaptive maxima."""

from __future__ import annotations

import itertools
from typing import Any

from needle.autograd import Op, Spec, Tensor, op
from needle.ops.families import samples_of
from needle.ops.nn.pool import (
    AdaptiveAvgPool2d,
    AvgPool2d,
    MaxPool2d,
    Pool,
    adaptive_pooling,
    avg_pooling,
    infer_adaptive,
    infer_pool,
    max_pooling,
    pooled_regions,
)
from needle.ops.nn.spatial import on_frames, on_row, windows_of
from needle.ops.nn.volumes import FramesOfVolume, VolumeOfFrames, volumes_in
from needle.ops.shape.basic import reshape
from needle.ops.shape.indexing import getitem
from needle.ops.shape.join import along, concat

__all__ = [
    "adaptive_avg_pool1d",
    "adaptive_avg_pool3d",
    "adaptive_max_pool1d",
    "adaptive_max_pool2d",
    "adaptive_max_pool3d",
    "avg_pool1d",
    "avg_pool3d",
    "max_pool1d",
    "max_pool3d",
]


class PoolNd(Op):
    """A pooling over as many axes as its first attribute has entries: one or three."""

    kind = ""
    infer = infer_pool

    @property
    def label(self) -> str:
        return f"{self.kind}_pool{len(next(iter(vars(self).values())))}d"


@op
class DepthPool(Op):
    """Images x (N D, C, H, W), `depth` frames of each volume, to (N D', C, H, W): pooled over the depth as `pool` does over the
    rows of (N, C, D, H W).
    """

    pool: Any  # a Pool of windows of one column
    depth: int

    def infer(self, x: Any) -> Spec:
        frames, c, *size = x.shape
        return Spec((volumes_in(self.label, frames, self.depth) * len(self.windows()), c, *size), str(x.dtype))

    def windows(self) -> list[tuple[list[int], float]]:
        """The frames of every window of a volume, and by what their sum is divided."""
        pool, column = self.pool, Spec((1, 1, self.depth, 1))
        if isinstance(pool, AdaptiveAvgPool2d):
            regions = pooled_regions((self.depth,), pool.infer(column).shape[2:3])[0]
            return [(list(range(*r)), r[1] - r[0]) for r in regions]
        divisors = pool.divisor(column)[:, 0] if isinstance(pool, AvgPool2d) else itertools.repeat(1.0)
        apart, (count,) = getattr(pool, "dilation", (1,))[0], pool.infer(column).shape[2:3]
        starts = (i * pool.stride[0] - pool.padding[0] for i in range(count))
        windows = ([a + t * apart for t in range(pool.kernel_size[0])] for a in starts)
        return [([f for f in w if 0 <= f < self.depth], d) for w, d in zip(windows, divisors, strict=False)]

    def decompose(self, x: Tensor) -> Tensor:
        _, c, *size = x.shape
        volume = VolumeOfFrames(self.depth)(x)
        n = volume.shape[0]
        made = self.pool(reshape(volume, (n, c, self.depth, size[0] * size[1])))
        return FramesOfVolume()(reshape(made, (n, c, made.shape[2], *size)))

    @classmethod
    def samples(cls) -> list:
        pools = [
            (MaxPool2d((3, 1), (2, 1), (1, 0), (1, 1), True), 6),
            (MaxPool2d((2, 1), (1, 1), (1, 0), (2, 1)), 5),
            (AvgPool2d((3, 1), (1, 1), (1, 0), False, False), 4),
            (AvgPool2d((3, 1), (2, 1), (1, 0), True), 5),
            (AdaptiveAvgPool2d((3, None)), 4),
        ]
        return [({"pool": p, "depth": d}, [(d * n, 3, 2, 2)]) for (p, d), n in zip(pools, (1, 2, 1, 2, 1), strict=True)]


def over_frames(planes: Pool, depth: Pool, x: Tensor) -> Tensor:
    """As `on_frames`, for plans that keep frames as images."""
    frames = planes(FramesOfVolume()(x))
    pooled = DepthPool(depth, x.shape[2])
    return VolumeOfFrames(len(pooled.windows()))(pooled(frames))


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
        return on_frames(*self.by_axis(), x)

    def by_axis(self) -> tuple[Pool, Pool]:
        k, s, p, d = self.kernel_size, self.stride, self.padding, self.dilation
        planes = MaxPool2d(k[1:], s[1:], p[1:], d[1:], self.ceil_mode)
        return planes, MaxPool2d((k[0], 1), (s[0], 1), (p[0], 0), (d[0], 1), self.ceil_mode)

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
        return on_frames(*self.by_axis(), x)

    def by_axis(self) -> tuple[Pool, Pool]:
        k, s, p, rest = self.kernel_size, self.stride, self.padding, (self.ceil_mode, self.count_include_pad)
        planes = AvgPool2d(k[1:], s[1:], p[1:], *rest, 1 if self.divisor_override else None)
        return planes, AvgPool2d((k[0], 1), (s[0], 1), (p[0], 0), *rest, self.divisor_override)

    @classmethod
    def samples(cls) -> list:
        line = {"kernel_size": (3,), "stride": (2,), "padding": (1,), "ceil_mode": True}
        cube = {"kernel_size": (2, 3, 2), "stride": (2, 1, 2), "padding": (1, 1, 0), "ceil_mode": True}
        return [
            (line, [(2, 3, 10)]),
            ({**cube, "count_include_pad": False}, [(1, 2, 5, 4, 5)]),
            ({**cube, "divisor_override": 5}, [(1, 2, 4, 4, 6)]),
        ]


@op
class AdaptiveAvgPoolNd(PoolNd):
    """Means of output_size regions of x (N, C, L) or (N, C, D, H, W); regions as in AdaptiveAvgPool2d."""

    output_size: tuple
    kind = "adaptive_avg"
    infer = infer_adaptive

    def decompose(self, x: Tensor) -> Tensor:
        self.infer(x)
        size = self.output_size
        if len(size) == 1:
            return on_row(AdaptiveAvgPool2d((None, *size)), x)
        return on_frames(*self.by_axis(), x)

    def by_axis(self) -> tuple[Pool, Pool]:
        return AdaptiveAvgPool2d(self.output_size[1:]), AdaptiveAvgPool2d((self.output_size[0], None))

    samples = samples_of(({"output_size": (3,)}, [(2, 3, 7)]), ({"output_size": (2, None, 5)}, [(1, 2, 5, 3, 4)]))


@op
class AdaptiveMaxPoolNd(PoolNd):
    """Maxima of output_size regions of x, over one, two or three axes; regions as in AdaptiveAvgPool2d."""

    output_size: tuple
    kind = "adaptive_max"
    infer = infer_adaptive

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


max_pool1d, max_pool3d = max_pooling(MaxPoolNd, 1), max_pooling(MaxPoolNd, 3)
avg_pool1d, avg_pool3d = avg_pooling(AvgPoolNd, 1), avg_pooling(AvgPoolNd, 3)
adaptive_avg_pool1d = adaptive_pooling(AdaptiveAvgPoolNd, "adaptive_avg_pool1d", 1)
adaptive_avg_pool3d = adaptive_pooling(AdaptiveAvgPoolNd, "adaptive_avg_pool3d", 3)
adaptive_max_pool1d = adaptive_pooling(AdaptiveMaxPoolNd, "adaptive_max_pool1d", 1)
adaptive_max_pool2d = adaptive_pooling(AdaptiveMaxPoolNd, "adaptive_max_pool2d", 2)
adaptive_max_pool3d = adaptive_pooling(AdaptiveMaxPoolNd, "adaptive_max_pool3d", 3)

"""Pixels to channels and back: pixel shuffles, and sliding windows as columns (im2col) with their sum (col2im)."""

from __future__ import annotations

import math
from typing import Any

from needle.autograd import Op, Spec, Tensor, op
from needle.ops.families import samples_of
from needle.ops.nn.spatial import check_spatial, conv_size, per_axis, windows_of
from needle.ops.shape.basic import Pad, permute, reshape
from needle.ops.shape.indexing import getitem, scattered
from needle.ops.shape.join import along, stack

__all__ = ["channel_shuffle", "fold", "pixel_shuffle", "pixel_unshuffle", "unfold"]


@op
class PixelShuffle(Op):
    """(..., C r r, H, W) to (..., C, H r, W r). Shi et al., arXiv 1609.05158."""

    factor: int

    def infer(self, x: Any) -> Any:
        r = self.factor
        if len(x.shape) < 3 or r < 1 or x.shape[-3] % (r * r):
            raise ValueError(
                f"[pixel_shuffle] expects shape (..., C, H, W) and C a multiple of {r * r}, got {tuple(x.shape)}."
            )
        *lead, c, h, w = x.shape
        return Spec((*lead, c // (r * r), h * r, w * r), str(x.dtype))

    def decompose(self, x: Tensor) -> Tensor:
        shape, r = self.infer(x).shape, self.factor
        *lead, c, h, w = x.shape
        parts = reshape(x, (math.prod(lead), c // (r * r), r, r, h, w))
        return reshape(permute(parts, (0, 1, 4, 2, 5, 3)), shape)

    samples = samples_of(({"factor": 2}, [(2, 8, 3, 2)]), ({"factor": 3}, [(9, 2, 3)]))


def pixel_shuffle(x: Tensor, upscale_factor: int) -> Tensor:
    """x (..., C r r, H, W) to (..., C, H r, W r)."""
    return PixelShuffle(upscale_factor)(x)


@op
class PixelUnshuffle(Op):
    """(..., C, H r, W r) to (..., C r r, H, W): the inverse of PixelShuffle."""

    factor: int

    def infer(self, x: Any) -> Any:
        r = self.factor
        if len(x.shape) < 3 or r < 1 or x.shape[-2] % r or x.shape[-1] % r:
            raise ValueError(
                f"[pixel_unshuffle] expects shape (..., C, H, W) and H, W multiples of {r}, got {tuple(x.shape)}."
            )
        *lead, c, h, w = x.shape
        if not math.prod(x.shape):  # torch leaves nothing as it is
            return Spec(tuple(x.shape), str(x.dtype))
        return Spec((*lead, c * r * r, h // r, w // r), str(x.dtype))

    def decompose(self, x: Tensor) -> Tensor:
        shape, r = self.infer(x).shape, self.factor
        if not math.prod(shape):
            return x
        *lead, c, h, w = x.shape
        parts = reshape(x, (math.prod(lead), c, h // r, r, w // r, r))
        return reshape(permute(parts, (0, 1, 3, 5, 2, 4)), shape)

    samples = samples_of(({"factor": 2}, [(2, 3, 4, 6)]), ({"factor": 3}, [(1, 3, 6)]))


def pixel_unshuffle(x: Tensor, downscale_factor: int) -> Tensor:
    """x (..., C, H r, W r) to (..., C r r, H, W)."""
    return PixelUnshuffle(downscale_factor)(x)


@op
class ChannelShuffle(Op):
    """x (N, C, ...): channels of `groups` groups interleaved. Zhang et al., arXiv 1707.01083."""

    groups: int

    def infer(self, x: Any) -> Any:
        if len(x.shape) < 3 or x.shape[1] % self.groups:
            raise ValueError(
                f"[channel_shuffle] expects shape (N, C, ...) and C a multiple of {self.groups}, got {tuple(x.shape)}."
            )
        return Spec(tuple(x.shape), str(x.dtype))

    def decompose(self, x: Tensor) -> Tensor:
        shape = self.infer(x).shape
        n, c, *rest = shape
        parts = reshape(x, (n, self.groups, c // self.groups, math.prod(rest)))
        return reshape(permute(parts, (0, 2, 1, 3)), shape)

    samples = samples_of(({"groups": 3}, [(2, 6, 3, 2)]))


def channel_shuffle(x: Tensor, groups: int) -> Tensor:
    """x (N, C, ...) with the channels of its groups interleaved."""
    return ChannelShuffle(groups)(x)


def tap_slices(op: Any, size: tuple) -> list[tuple]:
    """For every kernel element the index of its pixels in padded images, for windows in `size` places."""
    (kh, kw), (sh, sw), (dh, dw) = op.kernel_size, op.stride, op.dilation
    rows = [slice(i * dh, i * dh + sh * (size[0] - 1) + 1, sh) for i in range(kh)]
    columns = [slice(j * dw, j * dw + sw * (size[1] - 1) + 1, sw) for j in range(kw)]
    return [(slice(None), slice(None), r, c) for r in rows for c in columns]


def places(label: str, op: Any, size: Any) -> tuple[int, ...]:
    """How many windows fit along each axis of images of `size`."""
    axes = zip(size, op.kernel_size, op.stride, op.padding, op.dilation, strict=True)
    found = tuple(conv_size(n, k, s, p, p, d) for n, k, s, p, d in axes)
    if min(found) < 1:
        raise ValueError(f"[{label}] kernel {op.kernel_size} is larger than the padded image {tuple(size)}.")
    return found


@op
class Im2col(Op):
    """Windows of x (N, C, H, W) as columns: (N, C KH KW, windows)."""

    kernel_size: tuple
    dilation: tuple = (1, 1)
    padding: tuple = (0, 0)
    stride: tuple = (1, 1)
    checks = windows_of(kernel_size=1, dilation=1, padding=0, stride=1)

    def infer(self, x: Any) -> Any:
        check_spatial("unfold", x, 2)
        rows = x.shape[1] * math.prod(self.kernel_size)
        return Spec((x.shape[0], rows, math.prod(places("unfold", self, x.shape[2:]))), str(x.dtype))

    def decompose(self, x: Tensor) -> Tensor:
        shape, size = self.infer(x).shape, places("unfold", self, x.shape[2:])
        if any(self.padding):
            x = Pad(tuple((p, p) for p in self.padding))(x)
        return reshape(stack([getitem(x, at) for at in tap_slices(self, size)], 2), shape)

    @classmethod
    def samples(cls) -> list:
        mixed = {"kernel_size": (3, 2), "dilation": (1, 2), "padding": (1, 0), "stride": (2, 1)}
        return [({"kernel_size": (2, 2)}, [(2, 3, 4, 3)]), (mixed, [(1, 2, 5, 6)])]


def unfold(x: Tensor, kernel_size: Any, dilation: Any = 1, padding: Any = 0, stride: Any = 1) -> Tensor:
    """Windows of x (N, C, H, W) as columns (N, C KH KW, windows), arguments as torch.nn.functional.unfold."""
    return Im2col(*(per_axis("unfold", v, 2) for v in (kernel_size, dilation, padding, stride)))(x)


@op
class Col2im(Op):
    """Columns (N, C KH KW, windows) added where the windows lie in images (N, C, H, W) of `output_size`."""

    output_size: tuple
    kernel_size: tuple
    dilation: tuple = (1, 1)
    padding: tuple = (0, 0)
    stride: tuple = (1, 1)
    checks = windows_of(kernel_size=1, dilation=1, padding=0, stride=1)

    def infer(self, x: Any) -> Any:
        count = math.prod(places("fold", self, self.output_size))
        taps = math.prod(self.kernel_size)
        if len(x.shape) != 3 or x.shape[1] % taps or x.shape[2] != count:
            raise ValueError(f"[fold] expects shape (N, C * {taps}, {count}), got {tuple(x.shape)}.")
        return Spec((x.shape[0], x.shape[1] // taps, *self.output_size), str(x.dtype))

    def decompose(self, x: Tensor) -> Tensor:
        n, c, h, w = self.infer(x).shape
        size = places("fold", self, (h, w))
        taps = reshape(x, (n, c, math.prod(self.kernel_size), *size))
        full = (n, c, h + 2 * self.padding[0], w + 2 * self.padding[1])
        at = tap_slices(self, size)
        total = scattered(at, (getitem(taps, along(2, 5, i)) for i in range(len(at))), full)
        return Pad(tuple((-p, -p) for p in self.padding))(total) if any(self.padding) else total

    @classmethod
    def samples(cls) -> list:
        mixed = {"kernel_size": (3, 2), "dilation": (1, 2), "padding": (1, 0), "stride": (2, 1)}
        return [
            ({"output_size": (4, 3), "kernel_size": (2, 2)}, [(2, 12, 6)]),
            ({"output_size": (5, 6), **mixed}, [(1, 12, 12)]),
        ]


def fold(x: Tensor, output_size: Any, kernel_size: Any, dilation: Any = 1, padding: Any = 0, stride: Any = 1) -> Tensor:
    """Columns (N, C KH KW, windows) summed into images of `output_size`, arguments as torch.nn.functional.fold."""
    return Col2im(*(per_axis("fold", v, 2) for v in (output_size, kernel_size, dilation, padding, stride)))(x)

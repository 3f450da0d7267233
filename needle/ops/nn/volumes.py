"""Volumes (N, C, D, H, W) as images: their frames, and what a window over the depth reads of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from needle.autograd import Op, Spec, Tensor, op
from needle.backend_ndarray import NDArray
from needle.ops.families import samples_of
from needle.ops.nn.spatial import conv_size
from needle.ops.shape.basic import Pad, permute, reshape
from needle.ops.shape.indexing import getitem
from needle.ops.shape.join import along, concat

__all__: list[str] = []

DEPTH_FIRST = (0, 2, 1, 3, 4)  # and back


def volumes_in(label: str, frames: Any, depth: int) -> Any:
    """How many volumes of `depth` frames there are."""
    if frames % depth:
        raise ValueError(f"[{label}] expects images in multiples of {depth}, got {frames}.")
    return frames // depth


class Arranged(Op):
    """The same elements in another order of axes; its gradient is the op that leads back."""

    is_view = compute_infers = True


@op
class FramesOfVolume(Arranged):
    """x (N, C, D, H, W) as images (N D, C, H, W)."""

    def infer(self, x: Any) -> Spec:
        n, c, d, *size = x.shape
        return Spec((n * d, c, *size), str(x.dtype))

    def compute(self, x: NDArray) -> Any:
        return x.permute(DEPTH_FIRST).viewed(self.infer(x).shape)

    def reference(self, x: np.ndarray) -> Any:
        return x.transpose(DEPTH_FIRST).reshape(self.infer(x).shape)

    def decompose(self, x: Tensor) -> Tensor:
        return reshape(permute(x, DEPTH_FIRST), self.infer(x).shape)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        return VolumeOfFrames(node.inputs[0].shape[2])(out_grad)

    samples = samples_of(({}, [(2, 3, 4, 5, 2)]), ({}, [(1, 2, 3, 1, 2)]))


@op
class VolumeOfFrames(Arranged):
    """Images x (N D, C, H, W) as volumes (N, C, D, H, W) of `depth` frames."""

    depth: int

    def infer(self, x: Any) -> Spec:
        frames, c, *size = x.shape
        return Spec((volumes_in(self.label, frames, self.depth), c, self.depth, *size), str(x.dtype))

    def _frames(self, x: Any) -> tuple:
        n, c, d, *size = self.infer(x).shape
        return (n, d, c, *size)

    def compute(self, x: NDArray) -> Any:
        return x.viewed(self._frames(x)).permute(DEPTH_FIRST)

    def reference(self, x: np.ndarray) -> Any:
        return x.reshape(self._frames(x)).transpose(DEPTH_FIRST)

    def decompose(self, x: Tensor) -> Tensor:
        return permute(reshape(x, self._frames(x)), DEPTH_FIRST)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        return FramesOfVolume()(out_grad)

    samples = samples_of(({"depth": 2}, [(6, 3, 4, 5)]), ({"depth": 3}, [(3, 2, 1, 2)]))


@op
class DepthTaps(Op):
    """Images x (N D, C, H, W), `depth` frames of each volume, to (N D', taps C, H, W): the channels of all frames that a window
    over the depth reads; in groups each group's channels of all these frames lie together. padding: (front, back). block: of
    which the channels of a tap, with zeros, are a multiple.
    """

    depth: int
    taps: int
    stride: int = 1
    padding: tuple = (0, 0)
    dilation: int = 1
    groups: int = 1
    block: int = 1

    def windows(self) -> int:
        """How many a volume has."""
        front, back = self.padding
        return conv_size(self.depth, self.taps, self.stride, front, back, self.dilation)

    def infer(self, x: Any) -> Spec:
        frames, c, *size = x.shape
        channels = self.taps * (c + -c % self.block)
        return Spec((volumes_in(self.label, frames, self.depth) * self.windows(), channels, *size), str(x.dtype))

    def decompose(self, x: Tensor) -> Tensor:
        x = filled_channels(x, self.block)
        _, c, *size = x.shape
        shape = dataclasses.replace(self, block=1).infer(x).shape
        split = reshape(x, (x.shape[0] // self.depth, self.depth, self.groups, c // self.groups, *size))
        if any(self.padding):
            split = Pad(((0, 0), self.padding, *((0, 0),) * 4))(split)
        reach = self.stride * (self.windows() - 1) + 1
        starts = range(0, self.taps * self.dilation, self.dilation)
        taps = [getitem(split, along(1, 6, slice(s, s + reach, self.stride))) for s in starts]
        return reshape(concat(taps, 3) if len(taps) > 1 else taps[0], shape)

    samples = samples_of(
        ({"depth": 3, "taps": 2}, [(6, 3, 2, 2)]),
        ({"depth": 5, "taps": 3, "stride": 2, "padding": (1, 2), "groups": 2}, [(5, 4, 1, 3)]),
        ({"depth": 4, "taps": 2, "dilation": 2, "padding": (0, 1)}, [(8, 16, 2, 1)]),
        ({"depth": 4, "taps": 3, "padding": (1, 1), "block": 4}, [(4, 6, 2, 3)]),
    )


def filled_channels(x: Tensor, block: int) -> Tensor:
    """x with zeros along axis 1 up to a multiple of `block`."""
    fill = -x.shape[1] % block
    return Pad(((0, fill), *((0, 0),) * (len(x.shape) - 2)))(x) if fill else x


@op
class FramesOfChannels(Arranged):
    """Images x (N, parts C, H, W) as (N parts, C, H, W): neighbouring frames, the first part before the next."""

    parts: int

    def infer(self, x: Any) -> Spec:
        n, c, *size = x.shape
        return Spec((n * self.parts, c // self.parts, *size), str(x.dtype))

    def compute(self, x: NDArray) -> Any:
        return x.viewed(self.infer(x).shape)

    def reference(self, x: np.ndarray) -> Any:
        return x.reshape(self.infer(x).shape)

    def decompose(self, x: Tensor) -> Tensor:
        return reshape(x, self.infer(x).shape)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        return reshape(out_grad, node.inputs[0].shape)

    samples = samples_of(({"parts": 2}, [(3, 4, 2, 5)]), ({"parts": 3}, [(1, 48, 1, 2)]))

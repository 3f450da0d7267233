"""Convolutions over one and three axes, on the kernels for two: sequences are images of one row, volumes are frames."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from needle.autograd import OPS, Op, Spec, Tensor, op
from needle.backend_ndarray import NDArray
from needle.ops.common import gradient_of_decomposition
from needle.ops.dtypes import lacks_float64
from needle.ops.families import samples_of
from needle.ops.nn.conv import Conv2d, ImageLayer, convolution, transposed_convolution
from needle.ops.nn.spatial import ANY, infer_conv, infer_conv_transpose, on_axis, windows_of
from needle.ops.nn.volumes import DepthTaps, FramesOfChannels, FramesOfVolume, VolumeOfFrames, filled_channels
from needle.ops.shape.basic import Pad, permute, reshape, squeeze, unsqueeze
from needle.ops.shape.indexing import getitem, scattered
from needle.ops.shape.join import along, concat

__all__ = ["conv1d", "conv3d", "conv_transpose1d", "conv_transpose3d"]


def over_images(op: Op, **attributes: Any) -> Op:
    """The convolution of images that does the work of one over other axes, with the other's groups."""
    images: Any = OPS[f"{op.name[:-2]}2d"]
    return images(groups=vars(op)["groups"], **attributes)


class OfSequences(Op):
    """A convolution of sequences (N, C, L), as one of images of one row."""

    def decompose(self, x: Tensor, w: Tensor, *bias: Tensor) -> Tensor:
        self.infer(x, w, *bias)
        own = self.attributes()
        rows = {"stride": (1, *own["stride"]), "dilation": (1, *own["dilation"])}
        if "output_padding" in own:
            rows["output_padding"] = (0, *own["output_padding"])
        left, right = own["padding"]
        return squeeze(
            over_images(self, padding=(0, left, 0, right), **rows)(unsqueeze(x, 2), unsqueeze(w, 2), *bias), 2
        )


@op
class Conv1d(OfSequences):
    """Inputs: x (N, I, L), weight (O, I / groups, K), optionally bias (O,). padding: (left, right)."""

    stride: tuple = (1,)
    padding: tuple = (0, 0)
    dilation: tuple = (1,)
    groups: int = 1
    checks = windows_of(stride=1, padding=ANY, dilation=1, groups=1)
    infer = infer_conv

    samples = samples_of(
        ({}, [(2, 3, 9), (4, 3, 3), (4,)]),
        ({"stride": (2,), "padding": (1, 2), "dilation": (2,), "groups": 2}, [(1, 4, 11), (6, 2, 3)]),
        ({"padding": (2, 2), "groups": 20}, [(1, 20, 7), (20, 1, 5), (20,)]),
    )


@op
class DepthwiseTaps(ImageLayer):
    """A depthwise convolution of volumes: x (N, KD C, H, W) as DepthTaps leaves it, C being O filled up to a multiple of `block`;
    weight (O, KD, KH, KW), optionally bias (O,).
    """

    stride: tuple = (1, 1)
    padding: tuple = (0, 0, 0, 0)
    dilation: tuple = (1, 1)
    block: int = 16
    float32_only = lacks_float64("conv2d")
    channel_axis = 0
    checks = windows_of(stride=1, padding=ANY, dilation=1)

    def _conv(self, w: Any) -> Conv2d:
        return Conv2d(self.stride, self.padding, self.dilation, w.shape[0])

    def _split(self, x: Any, w: Any) -> tuple:
        return (x.shape[0], w.shape[1], x.shape[1] // w.shape[1], *x.shape[2:])

    def _joined(self, x: Any, w: Any) -> tuple:
        return (x.shape[0], w.shape[0] * w.shape[1], *x.shape[2:])

    def infer(self, x: Any, w: Any, *bias: Any) -> Spec:
        wanted = w.shape[1] * (w.shape[0] + -w.shape[0] % self.block)
        if x.shape[1] != wanted:
            raise ValueError(f"[depthwise_taps] x expects {wanted} channels, got {x.shape[1]}.")
        return self._conv(w).infer(Spec(self._joined(x, w), str(x.dtype)), w, *bias)

    def flops(self, out: Any, x: Any, w: Any, *rest: Any) -> int:
        return 2 * math.prod(out.shape) * math.prod(w.shape[1:])

    def into(
        self, out: NDArray, x: NDArray, w: NDArray, bias: Any = None, *, activation: str = "none", alpha: float = 0.0
    ) -> None:
        by_channel = x.reshape(self._split(x, w)).permute((0, 2, 1, 3, 4))[:, : w.shape[0]]
        given = (by_channel.reshape(self._joined(x, w)), w, *([] if bias is None else [bias]))
        self._conv(w).into(out, *given, activation=activation, alpha=alpha)

    def reference(self, x: np.ndarray, w: np.ndarray, *bias: np.ndarray) -> Any:
        by_channel = x.reshape(self._split(x, w)).transpose((0, 2, 1, 3, 4))[:, : w.shape[0]]
        return self._conv(w).reference(by_channel.reshape(self._joined(x, w)), w, *bias)

    def decompose(self, x: Tensor, w: Tensor, *bias: Tensor) -> Tensor:
        by_channel = permute(reshape(x, self._split(x, w)), (0, 2, 1, 3, 4))
        of_weight = getitem(by_channel, along(1, 5, slice(0, w.shape[0])))
        return self._conv(w)(reshape(of_weight, self._joined(x, w)), w, *bias)

    gradient = gradient_of_decomposition

    samples = samples_of(
        ({}, [(2, 48, 5, 4), (4, 3, 2, 3), (4,)]),
        ({"stride": (2, 1), "padding": (1, 0, 1, 2)}, [(1, 32, 5, 4), (13, 2, 3, 3)]),
        ({"padding": (1, 1, 1, 1)}, [(1, 32, 1, 2), (13, 2, 3, 3)]),
    )


@op
class Conv3d(Op):
    """Inputs: x (N, I, D, H, W), weight (O, I / groups, KD, KH, KW), optionally bias (O,).

    padding: (front, top, left, back, bottom, right). A 2-d convolution over frames whose channels are those of KD frames.
    """

    stride: tuple = (1, 1, 1)
    padding: tuple = (0, 0, 0, 0, 0, 0)
    dilation: tuple = (1, 1, 1)
    groups: int = 1
    checks = windows_of(stride=1, padding=ANY, dilation=1, groups=1)
    infer = infer_conv

    def decompose(self, x: Tensor, w: Tensor, *bias: Tensor) -> Tensor:
        shape = self.infer(x, w, *bias).shape
        inside = tuple(w.shape[3:]) == self.stride[1:] == (1, 1) and not any(self._sides())
        return self._along_depth(shape, x, w, *bias) if inside else self.over_frames(x, w, *bias)

    def _sides(self) -> tuple:
        """Padding of height and width: top, left, bottom, right."""
        return (*self.padding[1:3], *self.padding[4:])

    def _along_depth(self, shape: tuple, x: Tensor, w: Tensor, *bias: Tensor) -> Tensor:
        """A kernel of one pixel per frame: the volume as an image of D rows and H W columns."""
        (n, c, d, h, width), (o, per_group, kd) = x.shape, w.shape[:3]
        ends, step, spread = (self.padding[0], 0, self.padding[3], 0), (self.stride[0], 1), (self.dilation[0], 1)
        conv = over_images(self, stride=step, padding=ends, dilation=spread)
        return reshape(conv(reshape(x, (n, c, d, h * width)), reshape(w, (o, per_group, kd, 1)), *bias), shape)

    def over_frames(self, x: Tensor, w: Tensor, *bias: Tensor, block: int = 1) -> Tensor:
        """A convolution of frames, each with the channels of all frames that the window reads, in multiples of `block`."""
        c, (o, per_group, kd, *kernel) = x.shape[1], w.shape
        ends = (self.padding[0], self.padding[3])
        images, frames = FramesOfVolume()(x), {"stride": self.stride[1:], "padding": self._sides()}
        frames["dilation"] = self.dilation[1:]
        taps = DepthTaps(x.shape[2], kd, self.stride[0], ends, self.dilation[0], self.groups, block)
        if (kd, taps.stride, ends) == (1, 1, (0, 0)):
            out = over_images(self, **frames)(images, reshape(w, (o, per_group, *kernel)), *bias)
        elif block > 1 and self.groups == c == o:
            shifted = dataclasses.replace(taps, groups=1)(images)
            out = DepthwiseTaps(**frames, block=block)(shifted, reshape(w, (o, kd, *kernel)), *bias)
        else:
            w = permute(filled_channels(w, block), (0, 2, 1, 3, 4))
            out = over_images(self, **frames)(taps(images), reshape(w, (o, -1, *kernel)), *bias)
        return VolumeOfFrames(taps.windows())(out)

    @classmethod
    def samples(cls) -> list:
        mixed = {"stride": (2, 1, 2), "padding": (1, 0, 1, 2, 1, 1), "dilation": (2, 1, 1), "groups": 2}
        return [
            ({}, [(2, 3, 4, 5, 4), (4, 3, 2, 3, 3), (4,)]),
            (mixed, [(1, 4, 5, 4, 6), (6, 2, 3, 2, 3)]),
            ({"padding": (1, 0, 0, 1, 0, 0), "stride": (2, 1, 1)}, [(2, 3, 5, 3, 2), (4, 3, 3, 1, 1), (4,)]),
        ]


@op
class ConvTranspose1d(OfSequences):
    """Inputs: x (N, I, L), weight (I, O / groups, K), optionally bias (O,). padding: (left, right)."""

    stride: tuple = (1,)
    padding: tuple = (0, 0)
    output_padding: tuple = (0,)
    dilation: tuple = (1,)
    groups: int = 1
    checks = windows_of(stride=1, padding=ANY, output_padding=0, dilation=1, groups=1)
    infer = infer_conv_transpose

    @classmethod
    def samples(cls) -> list:
        two = {"stride": (2,), "padding": (1, 1), "output_padding": (1,), "groups": 2}
        return [({}, [(2, 3, 5), (3, 4, 3), (4,)]), (two, [(1, 4, 5), (4, 3, 3)])]


@op
class ConvTranspose3d(Op):
    """Inputs: x (N, I, D, H, W), weight (I, O / groups, KD, KH, KW), optionally bias (O,); padding as in Conv3d.

    A 2-d transposed convolution gives the KD frames that each input frame adds to; they are summed where they fall.
    """

    stride: tuple = (1, 1, 1)
    padding: tuple = (0, 0, 0, 0, 0, 0)
    output_padding: tuple = (0, 0, 0)
    dilation: tuple = (1, 1, 1)
    groups: int = 1
    checks = windows_of(stride=1, padding=ANY, output_padding=0, dilation=1, groups=1)
    infer = infer_conv_transpose

    def decompose(self, x: Tensor, w: Tensor, *bias: Tensor) -> Tensor:
        (n, c, d, *_), (_, per_group, *kernel), g = x.shape, w.shape, self.groups
        size = self.infer(x, w, *bias).shape[3:]
        front, top, left, back, bottom, right = self.padding
        images = FramesOfVolume()(x)
        weight = reshape(permute(w, (0, 2, 1, 3, 4)), (c, kernel[0] * per_group, *kernel[1:]))
        sides = {"padding": (top, left, bottom, right), "output_padding": self.output_padding[1:]}
        conv = over_images(self, stride=self.stride[1:], dilation=self.dilation[1:], **sides)
        if g == 1 and self._meets_nothing(kernel[0]):
            whole = [concat(bias * kernel[0], 0)] if bias else []
            return VolumeOfFrames(d * kernel[0])(FramesOfChannels(kernel[0])(conv(images, weight, *whole)))
        frames = reshape(conv(images, weight), (n, d, g, kernel[0], per_group, *size))
        out = self._sum(permute(frames, (0, 2, 4, 1, 3, 5, 6)), (n, g * per_group, d, *size))
        if front or back or self.output_padding[0]:
            out = on_axis(Pad(((-front, self.output_padding[0] - back), (0, 0))), out, 2)
        return out + reshape(bias[0], (-1, 1, 1, 1)) if bias else out

    def _meets_nothing(self, taps: int) -> bool:
        """Whether each frame of the result comes from one tap of one frame."""
        ends = (self.padding[0], self.padding[3], self.output_padding[0])
        return not any(ends) and self.stride[0] == taps and self.dilation[0] == 1

    def _sum(self, frames: Tensor, shape: tuple) -> Tensor:
        """frames (N, G, O / G, D, KD, H, W), each added at its depth; `shape` is that of one tap, (N, O, D, H, W)."""
        taps, step, spread = frames.shape[4], self.stride[0], self.dilation[0]
        n, o, d, *size = shape
        if step == taps and spread == 1:  # no two taps meet
            return reshape(frames, (n, o, d * taps, *size))
        full = (n, o, step * (d - 1) + spread * (taps - 1) + 1, *size)
        places = [along(2, 5, slice(i * spread, i * spread + step * (d - 1) + 1, step)) for i in range(taps)]
        return scattered(places, (reshape(getitem(frames, along(4, 7, i)), shape) for i in range(taps)), full)

    @classmethod
    def samples(cls) -> list:
        mixed = {"stride": (2, 1, 2), "padding": (1, 0, 1, 1, 0, 1), "output_padding": (1, 0, 1), "groups": 2}
        return [
            ({}, [(2, 3, 3, 4, 3), (3, 4, 2, 3, 3), (4,)]),
            ({**mixed, "dilation": (2, 1, 1)}, [(1, 4, 3, 3, 4), (4, 3, 3, 2, 3)]),
            ({"stride": (2, 2, 2)}, [(1, 3, 2, 3, 2), (3, 2, 2, 2, 2), (2,)]),
        ]


conv1d, conv3d = convolution(Conv1d, "conv1d", 1), convolution(Conv3d, "conv3d", 3)
conv_transpose1d = transposed_convolution(ConvTranspose1d, "conv_transpose1d", 1)
conv_transpose3d = transposed_convolution(ConvTranspose3d, "conv_transpose3d", 3)

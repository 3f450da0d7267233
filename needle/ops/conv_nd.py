"""Convolutions over one and three axes, on the kernels for two: sequences are images of one row, volumes are frames."""

from __future__ import annotations

from typing import Any

from needle.autograd import Op, Tensor, op

from .conv import Conv2d, ConvTranspose2d
from .elementwise import add
from .indexing import ScatterItem, encode_index, getitem
from .join import along, concat
from .shape import Pad, permute, reshape, squeeze, unsqueeze
from .spatial import ANY, as_padding, infer_conv, infer_conv_transpose, on_axis, per_axis, windows_of


@op
class Conv1d(Op):
    """Inputs: x (N, I, L), weight (O, I / groups, K), optionally bias (O,). padding: (left, right)."""

    stride: tuple = (1,)
    padding: tuple = (0, 0)
    dilation: tuple = (1,)
    groups: int = 1
    checks = windows_of(stride=1, padding=ANY, dilation=1, groups=1)

    def infer(self, x: Any, w: Any, bias: Any = None) -> Any:
        return infer_conv(self, x, w, bias)

    def decompose(self, x: Tensor, w: Tensor, *bias: Tensor) -> Tensor:
        self.infer(x, w, *bias)
        left, right = self.padding
        conv = Conv2d((1, *self.stride), (0, left, 0, right), (1, *self.dilation), self.groups)
        return squeeze(conv(unsqueeze(x, 2), unsqueeze(w, 2), *bias), 2)

    @classmethod
    def samples(cls) -> list:
        return [
            ({}, [(2, 3, 9), (4, 3, 3), (4,)]),
            ({"stride": (2,), "padding": (1, 2), "dilation": (2,), "groups": 2}, [(1, 4, 11), (6, 2, 3)]),
            ({"padding": (2, 2), "groups": 20}, [(1, 20, 7), (20, 1, 5), (20,)]),
        ]


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

    def infer(self, x: Any, w: Any, bias: Any = None) -> Any:
        return infer_conv(self, x, w, bias)

    def decompose(self, x: Tensor, w: Tensor, *bias: Tensor) -> Tensor:
        shape = self.infer(x, w, *bias).shape
        inside = tuple(w.shape[3:]) == self.stride[1:] == (1, 1) and not any(self._sides())
        return (self._along_depth if inside else self._over_frames)(shape, x, w, *bias)

    def _sides(self) -> tuple:
        """Padding of height and width: top, left, bottom, right."""
        return (*self.padding[1:3], *self.padding[4:])

    def _along_depth(self, shape: tuple, x: Tensor, w: Tensor, *bias: Tensor) -> Tensor:
        """A kernel of one pixel per frame: the volume as an image of D rows and H W columns."""
        (n, c, d, h, width), (o, per_group, kd) = x.shape, w.shape[:3]
        conv = Conv2d((self.stride[0], 1), (self.padding[0], 0, self.padding[3], 0), (self.dilation[0], 1), self.groups)
        return reshape(conv(reshape(x, (n, c, d, h * width)), reshape(w, (o, per_group, kd, 1)), *bias), shape)

    def _over_frames(self, shape: tuple, x: Tensor, w: Tensor, *bias: Tensor) -> Tensor:
        front, back = self.padding[0], self.padding[3]
        if front or back:
            x = on_axis(Pad(((front, back), (0, 0))), x, 2)
        (n, c, d, h, width), (o, per_group, *kernel), g = x.shape, w.shape, self.groups
        frames = permute(reshape(x, (n, g, c // g, d, h, width)), (0, 3, 1, 2, 4, 5))
        step, depth = self.stride[0], shape[2]
        starts = [i * self.dilation[0] for i in range(kernel[0])]
        taps = [getitem(frames, along(1, 6, slice(s, s + step * (depth - 1) + 1, step))) for s in starts]
        images = reshape(concat(taps, 3) if len(taps) > 1 else taps[0], (n * depth, kernel[0] * c, h, width))
        weight = reshape(permute(w, (0, 2, 1, 3, 4)), (o, kernel[0] * per_group, *kernel[1:]))
        out = Conv2d(self.stride[1:], self._sides(), self.dilation[1:], g)(images, weight, *bias)
        return permute(reshape(out, (n, depth, o, *shape[3:])), (0, 2, 1, 3, 4))

    @classmethod
    def samples(cls) -> list:
        mixed = {"stride": (2, 1, 2), "padding": (1, 0, 1, 2, 1, 1), "dilation": (2, 1, 1), "groups": 2}
        return [
            ({}, [(2, 3, 4, 5, 4), (4, 3, 2, 3, 3), (4,)]),
            (mixed, [(1, 4, 5, 4, 6), (6, 2, 3, 2, 3)]),
            ({"padding": (1, 0, 0, 1, 0, 0), "stride": (2, 1, 1)}, [(2, 3, 5, 3, 2), (4, 3, 3, 1, 1), (4,)]),
        ]


@op
class ConvTranspose1d(Op):
    """Inputs: x (N, I, L), weight (I, O / groups, K), optionally bias (O,). padding: (left, right)."""

    stride: tuple = (1,)
    padding: tuple = (0, 0)
    output_padding: tuple = (0,)
    dilation: tuple = (1,)
    groups: int = 1
    checks = windows_of(stride=1, padding=ANY, output_padding=0, dilation=1, groups=1)

    def infer(self, x: Any, w: Any, bias: Any = None) -> Any:
        return infer_conv_transpose(self, x, w, bias)

    def decompose(self, x: Tensor, w: Tensor, *bias: Tensor) -> Tensor:
        self.infer(x, w, *bias)
        left, right = self.padding
        more = (0, *self.output_padding)
        conv = ConvTranspose2d((1, *self.stride), (0, left, 0, right), more, (1, *self.dilation), self.groups)
        return squeeze(conv(unsqueeze(x, 2), unsqueeze(w, 2), *bias), 2)

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

    def infer(self, x: Any, w: Any, bias: Any = None) -> Any:
        return infer_conv_transpose(self, x, w, bias)

    def decompose(self, x: Tensor, w: Tensor, *bias: Tensor) -> Tensor:
        (n, c, d, h, width), (_, per_group, *kernel), g = x.shape, w.shape, self.groups
        size = self.infer(x, w, *bias).shape[3:]
        front, top, left, back, bottom, right = self.padding
        images = reshape(permute(x, (0, 2, 1, 3, 4)), (n * d, c, h, width))
        weight = reshape(permute(w, (0, 2, 1, 3, 4)), (c, kernel[0] * per_group, *kernel[1:]))
        sides = (top, left, bottom, right)
        conv = ConvTranspose2d(self.stride[1:], sides, self.output_padding[1:], self.dilation[1:], g)
        frames = reshape(conv(images, weight), (n, d, g, kernel[0], per_group, *size))
        out = self._sum(permute(frames, (0, 2, 4, 1, 3, 5, 6)), (n, g * per_group, d, *size))
        if front or back or self.output_padding[0]:
            out = on_axis(Pad(((-front, self.output_padding[0] - back), (0, 0))), out, 2)
        return add(out, reshape(bias[0], (-1, 1, 1, 1))) if bias else out

    def _sum(self, frames: Tensor, shape: tuple) -> Tensor:
        """frames (N, G, O / G, D, KD, H, W), each added at its depth; `shape` is that of one tap, (N, O, D, H, W)."""
        taps, step, spread = frames.shape[4], self.stride[0], self.dilation[0]
        n, o, d, *size = shape
        if step == taps and spread == 1:  # no two taps meet
            return reshape(frames, (n, o, d * taps, *size))
        full = (n, o, step * (d - 1) + spread * (taps - 1) + 1, *size)
        total: Any = None
        for i in range(taps):
            tap = reshape(getitem(frames, along(4, 7, i)), shape)
            at = encode_index(along(2, 5, slice(i * spread, i * spread + step * (d - 1) + 1, step)))
            placed = ScatterItem(at, full)(tap)
            total = placed if total is None else add(total, placed)
        return total

    @classmethod
    def samples(cls) -> list:
        mixed = {"stride": (2, 1, 2), "padding": (1, 0, 1, 1, 0, 1), "output_padding": (1, 0, 1), "groups": 2}
        return [
            ({}, [(2, 3, 3, 4, 3), (3, 4, 2, 3, 3), (4,)]),
            ({**mixed, "dilation": (2, 1, 1)}, [(1, 4, 3, 3, 4), (4, 3, 3, 2, 3)]),
            ({"stride": (2, 2, 2)}, [(1, 3, 2, 3, 2), (3, 2, 2, 2, 2), (2,)]),
        ]


def arguments(bias: Tensor | None) -> tuple[Tensor, ...]:
    return () if bias is None else (bias,)


def geometry(label: str, n: int, weight: Tensor, stride: Any, padding: Any, dilation: Any) -> tuple[Any, Any, Any]:
    """stride, padding and dilation of a convolution over n axes, as the attributes that ops take."""
    strides, dilations = per_axis(label, stride, n), per_axis(label, dilation, n)
    kernel = tuple(weight.shape[2 : n + 2]) if padding == "same" else ()
    return strides, as_padding(padding, kernel, strides, dilations, label), dilations


def conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    """1-d convolution. padding: a number, (left, right), "same" or "valid"."""
    return Conv1d(*geometry("conv1d", 1, weight, stride, padding, dilation), groups)(x, weight, *arguments(bias))


def conv3d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    """3-d convolution. padding: a number, one per axis, (front, top, left, back, bottom, right), "same" or "valid"."""
    return Conv3d(*geometry("conv3d", 3, weight, stride, padding, dilation), groups)(x, weight, *arguments(bias))


def conv_transpose1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Tensor:
    """1-d transposed convolution, arguments as in torch."""
    strides, pads, dilations = geometry("conv_transpose1d", 1, weight, stride, padding, dilation)
    more = per_axis("conv_transpose1d", output_padding, 1)
    return ConvTranspose1d(strides, pads, more, dilations, groups)(x, weight, *arguments(bias))


def conv_transpose3d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Tensor:
    """3-d transposed convolution, arguments as in torch."""
    strides, pads, dilations = geometry("conv_transpose3d", 3, weight, stride, padding, dilation)
    more = per_axis("conv_transpose3d", output_padding, 3)
    return ConvTranspose3d(strides, pads, more, dilations, groups)(x, weight, *arguments(bias))

"""Rules of padding, interpolation, and pixels rearranged: modules and functions."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from needle import nn as needle_nn
from needle import ops
from needle.autograd import Unsupported
from torch2needle.registry import rule

CONSTANT = (nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d, nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d)


@rule(*CONSTANT)
def constant_pad(m: Any) -> Any:
    return needle_nn.Pad(m.padding, "constant", float(m.value))


@rule(nn.ReflectionPad1d, nn.ReflectionPad2d, nn.ReflectionPad3d)
def reflection_pad(m: Any) -> Any:
    return needle_nn.Pad(m.padding, "reflect")


@rule(nn.ReplicationPad1d, nn.ReplicationPad2d, nn.ReplicationPad3d)
def replication_pad(m: Any) -> Any:
    return needle_nn.Pad(m.padding, "replicate")


@rule(nn.CircularPad1d, nn.CircularPad2d, nn.CircularPad3d)
def circular_pad(m: Any) -> Any:
    return needle_nn.Pad(m.padding, "circular")


@rule(F.pad)
def pad(input: Any, pad: Any, mode: str = "constant", value: float | None = None) -> Any:
    return ops.pad(input, tuple(pad), mode, value)


@rule(nn.Upsample, nn.UpsamplingBilinear2d, nn.UpsamplingNearest2d)
def upsample(m: nn.Upsample) -> Any:
    return needle_nn.Upsample(m.size, m.scale_factor, m.mode, m.align_corners, m.recompute_scale_factor)


@rule(F.interpolate)
def interpolate(
    input: Any,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Any:
    if antialias:
        raise Unsupported("antialias=True is not supported")
    return ops.interpolate(input, size, scale_factor, mode, align_corners, recompute_scale_factor)


@rule(F.pixel_shuffle, torch.pixel_shuffle)
def pixel_shuffle(input: Any, upscale_factor: int) -> Any:
    return ops.pixel_shuffle(input, upscale_factor)


@rule(F.pixel_unshuffle, torch.pixel_unshuffle)
def pixel_unshuffle(input: Any, downscale_factor: int) -> Any:
    return ops.pixel_unshuffle(input, downscale_factor)


@rule(F.channel_shuffle, torch.channel_shuffle, torch.native_channel_shuffle)
def channel_shuffle(input: Any, groups: int) -> Any:
    return ops.channel_shuffle(input, groups)


@rule(F.unfold)
def unfold(input: Any, kernel_size: Any, dilation: Any = 1, padding: Any = 0, stride: Any = 1) -> Any:
    return ops.unfold(input, kernel_size, dilation, padding, stride)


@rule(F.fold)
def fold(input: Any, output_size: Any, kernel_size: Any, dilation: Any = 1, padding: Any = 0, stride: Any = 1) -> Any:
    return ops.fold(input, output_size, kernel_size, dilation, padding, stride)

"""Rules of padding, interpolation, and pixels rearranged: modules and functions."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from needle import nn as needle_nn
from needle import ops

from .registry import rule
from .tables import functions, layers

layers(
    "padding value",
    *(nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d, nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d),
    to=lambda padding, value: needle_nn.Pad(padding, "constant", float(value)),
)
layers("padding", nn.ReflectionPad1d, nn.ReflectionPad2d, nn.ReflectionPad3d, to=needle_nn.Pad, mode="reflect")
layers("padding", nn.ReplicationPad1d, nn.ReplicationPad2d, nn.ReplicationPad3d, to=needle_nn.Pad, mode="replicate")
layers("padding", nn.CircularPad1d, nn.CircularPad2d, nn.CircularPad3d, to=needle_nn.Pad, mode="circular")
layers(
    "size scale_factor mode align_corners recompute_scale_factor",
    *(nn.Upsample, nn.UpsamplingBilinear2d, nn.UpsamplingNearest2d),
    to=needle_nn.Upsample,
)


@rule(F.pad, torch._C._nn.pad)
def pad(input: Any, pad: Any, mode: str = "constant", value: float | None = None) -> Any:
    return ops.pad(input, tuple(pad), mode, value)


functions(
    "input, size=None, scale_factor=None, mode='nearest', align_corners=None, recompute_scale_factor=None, antialias=False",
    {(F.interpolate,): ops.interpolate},
)
functions("input, upscale_factor", {(F.pixel_shuffle, torch.pixel_shuffle): ops.pixel_shuffle})
functions("input, downscale_factor", {(F.pixel_unshuffle, torch.pixel_unshuffle): ops.pixel_unshuffle})
functions(
    "input, groups", {(F.channel_shuffle, torch.channel_shuffle, torch.native_channel_shuffle): ops.channel_shuffle}
)
functions("input, kernel_size, dilation=1, padding=0, stride=1", {(F.unfold,): ops.unfold})
functions("input, output_size, kernel_size, dilation=1, padding=0, stride=1", {(F.fold,): ops.fold})

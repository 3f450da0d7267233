"""Layers that move elements: shapes, pixels and channels, windows as columns."""

from __future__ import annotations

from typing import Any

from needle import ops

from .arguments import COUNT, integer, integers
from .function import Function

__all__ = ["ChannelShuffle", "Fold", "PixelShuffle", "PixelUnshuffle", "Unflatten", "Unfold"]


class PixelShuffle(Function, function=ops.pixel_shuffle):
    arguments = {"upscale_factor": COUNT}
    upscale_factor: int


class PixelUnshuffle(Function, function=ops.pixel_unshuffle):
    arguments = {"downscale_factor": COUNT}
    downscale_factor: int


class ChannelShuffle(Function, function=ops.channel_shuffle):
    groups: int


class Unflatten(Function, function=ops.unflatten):
    arguments = {"axis": integer(), "shape": integers(-1)}
    axis: int
    shape: Any


class Unfold(Function, function=ops.unfold):
    arguments = {"padding": integers(0)}
    kernel_size: Any
    dilation: Any = 1
    padding: Any = 0
    stride: Any = 1


class Fold(Function, function=ops.fold):
    arguments = {"padding": integers(0)}
    output_size: Any
    kernel_size: Any
    dilation: Any = 1
    padding: Any = 0
    stride: Any = 1

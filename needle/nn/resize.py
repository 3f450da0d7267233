"""Resizing as a layer."""

from __future__ import annotations

from typing import Any

from needle import ops
from needle.autograd import Tensor
from needle.ops.nn.resize import MODES, check_resize

from .arguments import choice, integers
from .function import Function

__all__ = ["Upsample", "UpsamplingBilinear2d", "UpsamplingNearest2d"]


class Upsample(Function, function=ops.interpolate):
    arguments = {"size": integers(1), "mode": choice(*MODES)}

    size: Any = None
    scale_factor: Any = None
    mode: str = "nearest"
    align_corners: bool | None = None
    recompute_scale_factor: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_resize("Upsample", *self.values())


class UpsamplingNearest2d(Function, function=ops.interpolate):
    """x (N, C, H, W) at another size, of the nearest pixels: see ops.interpolate."""

    arguments = {"size": integers(1)}
    size: Any = None
    scale_factor: Any = None


class UpsamplingBilinear2d(UpsamplingNearest2d):
    """x (N, C, H, W) at another size, linear between pixels, the corners' among them: see ops.interpolate."""

    def forward(self, x: Tensor) -> Tensor:
        return ops.interpolate(x, self.size, self.scale_factor, "bilinear", True)

"""Resizing as a layer."""

from __future__ import annotations

from typing import Any

from needle import ops
from needle.autograd import Tensor
from needle.ops.resize import MODES, check_resize

from .arguments import choice, integers
from .module import Module


class Upsample(Module):
    """See ops.interpolate."""

    arguments = {"size": integers(1), "mode": choice(*MODES)}

    def __init__(
        self,
        size: Any = None,
        scale_factor: Any = None,
        mode: str = "nearest",
        align_corners: bool | None = None,
        recompute_scale_factor: bool | None = None,
    ) -> None:
        super().__init__()
        check_resize("Upsample", size, scale_factor, mode, align_corners, recompute_scale_factor)
        self.size, self.scale_factor, self.mode, self.align_corners = size, scale_factor, mode, align_corners
        self.recompute_scale_factor = recompute_scale_factor

    def forward(self, x: Tensor) -> Tensor:
        return ops.interpolate(
            x, self.size, self.scale_factor, self.mode, self.align_corners, self.recompute_scale_factor
        )

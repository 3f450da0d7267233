"""Resizing as a layer."""

from __future__ import annotations

from typing import Any

from needle import ops
from needle.ops.nn.resize import MODES, check_resize

from .arguments import choice, integers
from .function import Function

__all__ = ["Upsample"]


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

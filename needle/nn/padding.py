"""Padding as layers."""

from __future__ import annotations

from typing import Any

from needle import ops
from needle.autograd import Tensor
from needle.ops.nn.spatial import per_axis
from needle.ops.shape.padding import EDGE_MODES

from .arguments import choice, integers, wrong
from .function import Function
from .module import Module

__all__ = ["ConstantPad2d", "Pad"]


class Pad(Function, function=ops.pad):
    """See ops.pad: `padding` from the last axis backwards; mode constant, reflect, replicate or circular."""

    arguments = {"padding": integers(), "mode": choice("constant", *EDGE_MODES)}
    padding: Any
    mode: str = "constant"
    value: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.padding, int) or len(self.padding) % 2:
            raise wrong("[Pad] padding", "an even number of pads", self.padding)
        if self.value is not None and self.mode != "constant":
            raise wrong("[Pad] value", f"None beside mode {self.mode}", self.value)

    def extra_repr(self) -> str:
        return f"{self.padding}, mode={self.mode}"


class ConstantPad2d(Module):
    """Pads (left, right, top, bottom) with one value."""

    arguments = {"padding": integers()}

    def __init__(self, padding: Any, value: float = 0.0) -> None:
        super().__init__()
        self.padding, self.value = per_axis("ConstantPad2d", padding, 4), value

    def forward(self, x: Tensor) -> Tensor:
        return ops.pad(x, self.padding, value=self.value)

"""Padding as layers."""

from __future__ import annotations

from typing import Any

from needle import ops
from needle.autograd import Tensor
from needle.ops.padding import EDGE_MODES
from needle.ops.spatial import per_axis

from .arguments import choice, integers, wrong
from .module import Module


class Pad(Module):
    """See ops.pad: `padding` from the last axis backwards; mode constant, reflect, replicate or circular."""

    arguments = {"padding": integers(), "mode": choice("constant", *EDGE_MODES)}

    def __init__(self, padding: Any, mode: str = "constant", value: float | None = None) -> None:
        super().__init__()
        if isinstance(padding, int) or len(padding) % 2:
            raise wrong("[Pad] padding", "an even number of pads", padding)
        if value is not None and mode != "constant":
            raise wrong("[Pad] value", f"None beside mode {mode}", value)
        self.padding, self.mode, self.value = padding, mode, value

    def forward(self, x: Tensor) -> Tensor:
        return ops.pad(x, self.padding, self.mode, self.value)

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

"""Padding as layers."""

from __future__ import annotations

from typing import Any

from needle import ops
from needle.autograd import Tensor

from .module import Module


class Pad(Module):
    """See ops.pad: `padding` from the last axis backwards; mode constant, reflect, replicate or circular."""

    def __init__(self, padding: Any, mode: str = "constant", value: float | None = None) -> None:
        super().__init__()
        self.padding, self.mode, self.value = tuple(padding), mode, value

    def forward(self, x: Tensor) -> Tensor:
        return ops.pad(x, self.padding, self.mode, self.value)

    def extra_repr(self) -> str:
        return f"{self.padding}, mode={self.mode}"


class ConstantPad2d(Module):
    """Pads (left, right, top, bottom) with one value."""

    def __init__(self, padding: Any, value: float = 0.0) -> None:
        super().__init__()
        self.padding, self.value = padding, value

    def forward(self, x: Tensor) -> Tensor:
        p = self.padding
        return ops.pad(x, (p,) * 4 if isinstance(p, int) else tuple(p), value=self.value)

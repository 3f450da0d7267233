"""Padding as layers."""

from __future__ import annotations

from typing import Any, ClassVar

from needle import ops
from needle.autograd import Tensor
from needle.ops.nn.spatial import per_axis
from needle.ops.shape.padding import EDGE_MODES

from .arguments import choice, integers, wrong
from .function import Declared, Function

__all__ = [
    "CircularPad1d",
    "CircularPad2d",
    "CircularPad3d",
    "ConstantPad1d",
    "ConstantPad2d",
    "ConstantPad3d",
    "Pad",
    "ReflectionPad1d",
    "ReflectionPad2d",
    "ReflectionPad3d",
    "ReplicationPad1d",
    "ReplicationPad2d",
    "ReplicationPad3d",
    "ZeroPad1d",
    "ZeroPad2d",
    "ZeroPad3d",
]


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


class AxesPad(Declared):
    """Base: pads of the last axes, from the last one backwards, or one number for all: see ops.pad."""

    arguments = {"padding": integers()}
    axes: ClassVar[int]
    mode: ClassVar[str]
    padding: Any

    def __init_subclass__(cls, axes: int = 0, mode: str = "", **kwargs: Any) -> None:
        if axes:
            cls.axes, cls.mode = axes, mode
            shape = f"(..., {', '.join('DHW'[-axes:] if axes > 1 else 'L')})"
            cls.__doc__ = (
                f"Pads x {shape} in mode {mode}; padding: one number, or {2 * axes} from the last axis backwards."
            )
        super().__init_subclass__(**kwargs)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.padding = per_axis(type(self).__name__, self.padding, 2 * self.axes)

    def forward(self, x: Tensor) -> Tensor:
        return ops.pad(x, self.padding, self.mode)

    def extra_repr(self) -> str:
        return f"{self.padding}"


class ConstantPad1d(AxesPad, axes=1, mode="constant"):
    value: float = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return ops.pad(x, self.padding, value=self.value)


class ConstantPad2d(ConstantPad1d, axes=2, mode="constant"): ...


class ConstantPad3d(ConstantPad1d, axes=3, mode="constant"): ...


class ZeroPad1d(AxesPad, axes=1, mode="constant"): ...


class ZeroPad2d(AxesPad, axes=2, mode="constant"): ...


class ZeroPad3d(AxesPad, axes=3, mode="constant"): ...


class ReflectionPad1d(AxesPad, axes=1, mode="reflect"): ...


class ReflectionPad2d(AxesPad, axes=2, mode="reflect"): ...


class ReflectionPad3d(AxesPad, axes=3, mode="reflect"): ...


class ReplicationPad1d(AxesPad, axes=1, mode="replicate"): ...


class ReplicationPad2d(AxesPad, axes=2, mode="replicate"): ...


class ReplicationPad3d(AxesPad, axes=3, mode="replicate"): ...


class CircularPad1d(AxesPad, axes=1, mode="circular"): ...


class CircularPad2d(AxesPad, axes=2, mode="circular"): ...


class CircularPad3d(AxesPad, axes=3, mode="circular"): ...

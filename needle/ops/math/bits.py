"""Whole numbers by their bits: shifts, and numbers of fewer bits than they are kept in."""

from __future__ import annotations

from typing import Any

import numpy as np

from needle.autograd import Op, Spec, Tensor, op
from needle.backend_ndarray import FLOATS
from needle.ops.common import as_operand, broadcast_shape, constant
from needle.ops.families import samples_of
from needle.ops.math.arithmetic import floor_divide, remainder
from needle.ops.math.comparison import ge, lt
from needle.ops.math.elementwise import cast, maximum, minimum, where
from needle.ops.math.logic import logical_and
from needle.ops.shape.creation import full_like
from needle.ops.shape.gather import take

__all__ = ["narrowed", "shift"]

POWERS = np.left_shift(np.int64(1), np.arange(64))  # the last is -2 ** 63: products wrap around


@op
class Shift(Op):
    """Bits of integers, moved up, or down (`right`) with the sign. By 64 or more or below 0: 0, or down by all of them."""

    right: bool

    def infer(self, a: Any, b: Any) -> Any:
        for x in (a, b):
            if x.dtype in FLOATS or x.dtype == "bool":
                raise ValueError(f"[shift] expects integers, got {x.dtype}.")
        shape = broadcast_shape("shift", tuple(a.shape), tuple(b.shape))
        return Spec(shape, "int64" if "int64" in (a.dtype, b.dtype) else "int32")

    def decompose(self, a: Tensor, b: Tensor) -> Tensor:
        spec = self.infer(a, b)
        x, n = cast(a, "int64"), cast(b, "int64")
        last = 62 if self.right else 63
        inside = logical_and(ge(n, 0), lt(n, last + 1))
        power = take(constant(POWERS, a, "int64"), minimum(maximum(n, full_like(n, 0)), full_like(n, last)))
        if self.right:
            made = where(inside, floor_divide(x, power), where(lt(x, 0), full_like(x, -1), full_like(x, 0)))
        else:
            moved = x * power
            made = where(inside, moved, full_like(moved, 0))
        return cast(made, spec.dtype)

    samples = samples_of(
        ({"right": False}, [Spec((4, 9), "int64"), Spec((9,), "int64")]),
        ({"right": True}, [Spec((4, 9), "int32"), Spec((4, 1), "int32")]),
    )


def shift(a: Tensor, b: Any, right: bool) -> Tensor:
    """a << b, or a >> b, of whole numbers."""
    return Shift(right)(a, as_operand(b, a))


@op
class Narrowed(Op):
    """Numbers as int8, uint8, int16 or uint16 has them: without their fraction, wrapped around; kept in int32."""

    dtype: str

    def infer(self, x: Any) -> Any:
        return Spec(tuple(x.shape), "int32")

    def decompose(self, x: Tensor) -> Tensor:
        limits = np.iinfo(self.dtype)
        low, count = int(limits.min), int(limits.max) - int(limits.min) + 1
        whole = cast(x, "int32")
        return remainder(whole - low, count) + low if low else remainder(whole, count)

    samples = samples_of(
        *(({"dtype": d}, [Spec((4, 9), "int64")]) for d in ("int8", "uint8")), ({"dtype": "int16"}, [(3, 5)])
    )


def narrowed(a: Tensor, dtype: str) -> Tensor:
    """a as torch.int8 and its like have it, in int32."""
    return Narrowed(dtype)(a)

"""Writing by masks: a number, slices in their order, or one for all, where a mask holds."""

from __future__ import annotations

import math
from typing import Any

from needle.autograd import Op, Spec, Tensor, op, tensor_method
from needle.backend_ndarray import FLOATS, promote_scalar
from needle.ops.common import broadcast_shape, constant
from needle.ops.families import samples_of
from needle.ops.math.elementwise import cast, where
from needle.ops.reduce.sorting import cumsum
from needle.ops.shape.basic import broadcast_to, flatten, reshape
from needle.ops.shape.gather import take
from needle.ops.shape.join import concat

__all__ = ["masked_fill", "masked_put", "masked_scatter"]


@op
class MaskedFill(Op):
    """x with one value where a bool mask holds; `leading`: the mask's axes are the first of x, not the last.

    The value becomes one of x's dtype; with `promotes` x becomes one of the dtype that they have together.
    """

    value: Any
    leading: bool = False
    promotes: bool = False

    def infer(self, x: Any, mask: Any) -> Any:
        if mask.dtype != "bool":
            raise ValueError(f"[masked_fill] mask expects dtype bool, got {mask.dtype}.")
        shape = self._aligned(x, mask)
        return Spec(broadcast_shape("masked_fill", tuple(x.shape), shape), self._dtype(x))

    def _dtype(self, x: Any) -> str:
        if self.promotes:
            return promote_scalar(str(x.dtype), self.value)
        if x.dtype not in FLOATS and isinstance(self.value, float) and not math.isfinite(self.value):
            raise ValueError(f"[masked_fill] value expects a number that {x.dtype} can hold, got {self.value}.")
        return str(x.dtype)

    def _aligned(self, x: Any, mask: Any) -> tuple[int, ...]:
        after = len(x.shape) - len(mask.shape) if self.leading else 0
        return (*mask.shape, *(1,) * after)

    def decompose(self, x: Tensor, mask: Tensor) -> Tensor:
        return where(reshape(mask, self._aligned(x, mask)), constant(self.value, x, self._dtype(x)), x)

    samples = samples_of(
        ({"value": -2.0}, [(2, 3, 4), Spec((3, 4), "bool")]),
        ({"value": 1.5, "leading": True}, [(2, 3, 4), Spec((2, 3), "bool")]),
    )


@tensor_method()
def masked_fill(a: Tensor, mask: Tensor, value: Any, leading: bool = False, promotes: bool = False) -> Tensor:
    """a with a number where `mask` (bool) holds; in the dtype of a, or with `promotes` of both."""
    return MaskedFill(value, leading, promotes)(a, mask)


@op
class MaskedPut(Op):
    """x[mask] = values: the slices of x where a bool mask, of its first axes, holds become those of `values` in their order, or
    all the same one."""

    like_first = True

    def infer(self, x: Any, mask: Any, values: Any) -> Any:
        if mask.dtype != "bool" or tuple(mask.shape) != tuple(x.shape[: len(mask.shape)]):
            raise ValueError(
                f"[{self.label}] mask expects bools of the first axes of x {tuple(x.shape)}, got "
                f"{mask.dtype} {tuple(mask.shape)}."
            )
        rest = tuple(x.shape[len(mask.shape) :])
        counted = values.shape[:1] if self._has_each(x, mask, values) else (1,)
        want = (*counted, *rest)
        if len(values.shape) > len(want) or broadcast_shape(self.label, tuple(values.shape), want) != want:
            raise ValueError(
                f"[{self.label}] values expect a shape that broadcasts to (N, {', '.join(map(str, rest))}), got "
                f"{tuple(values.shape)}."
            )
        return Spec(tuple(x.shape), str(x.dtype))

    def _has_each(self, x: Any, mask: Any, values: Any) -> bool:
        """Whether there is a value for each element of the mask that holds, not one for all."""
        return len(values.shape) == len(x.shape) - len(mask.shape) + 1 and values.shape[0] != 1

    def decompose(self, x: Tensor, mask: Tensor, values: Tensor) -> Tensor:
        rest = len(x.shape) - len(mask.shape)
        values, holds = cast(values, x.dtype), reshape(mask, (*mask.shape, *(1,) * rest))
        if not self._has_each(x, mask, values):
            return where(holds, reshape(values, values.shape[1:]) if len(values.shape) > rest else values, x)
        values = broadcast_to(values, (values.shape[0], *x.shape[len(mask.shape) :]))
        if not values.shape[0]:  # which a mask without any may take; what they are made of has gradients of zeros
            none = constant(math.nan if x.dtype in FLOATS else 0, x)
            values = concat([values, broadcast_to(none, (1, *values.shape[1:]))], 0)
        place = reshape(cumsum(cast(flatten(mask), "int64"), 0) - 1, mask.shape)
        return where(holds, take(values, where(mask, place, 0)), x)

    @classmethod
    def samples(cls) -> list:
        mask = Spec((2, 3), "bool")
        return [({}, [(2, 3, 4), mask, (6, 4)]), ({}, [(2, 3, 4), mask, (4,)]), ({}, [(2, 3, 4), mask, (1, 1)])]


def masked_put(a: Tensor, mask: Tensor, values: Tensor) -> Tensor:
    """a[mask] = values for a mask (bool) of the first axes of a; `values` has a slice for each True, or one for all."""
    return MaskedPut()(a, mask, values)


@op
class MaskedScatter(Op):
    """x with the elements of `source` in their order where a bool mask, which broadcasts with x, holds."""

    def infer(self, x: Any, mask: Any, source: Any) -> Any:
        if mask.dtype != "bool" or source.dtype != x.dtype:
            raise ValueError(
                f"[{self.label}] expects a bool mask and a source of {x.dtype}, got {mask.dtype} and {source.dtype}."
            )
        return Spec(broadcast_shape(self.label, tuple(x.shape), tuple(mask.shape)), str(x.dtype))

    def decompose(self, x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
        shape = self.infer(x, mask, source).shape
        return masked_put(broadcast_to(x, shape), broadcast_to(mask, shape), flatten(source))

    @classmethod
    def samples(cls) -> list:
        return [({}, [(2, 3, 4), Spec((3, 4), "bool"), (5, 6)])]


@tensor_method()
def masked_scatter(a: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """torch.masked_scatter."""
    return MaskedScatter()(a, mask, source)

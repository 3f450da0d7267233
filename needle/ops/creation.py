"""Tensors made inside a forward, whose sizes or dtype come from another tensor."""

from __future__ import annotations

from typing import Any

import numpy as np

from needle.autograd import Op, Spec, Tensor, op


@op
class Full(Op):
    """One value everywhere. `shape` and `dtype` None are those of the input, whose values play no part."""

    value: Any
    shape: Any = None
    dtype: str | None = None

    def infer(self, like: Any) -> Any:
        shape = tuple(like.shape) if self.shape is None else tuple(int(s) for s in self.shape)
        return Spec(shape, self.dtype or str(like.dtype))

    def decompose(self, like: Tensor) -> Tensor:
        shape, dtype = self.infer(like)
        return Tensor(np.full(shape, self.value, dtype), device=like.device, dtype=dtype, requires_grad=False)

    @classmethod
    def samples(cls) -> list:
        return [({"value": 1.5}, [(3, 4)]), ({"value": 2, "shape": (2, 5), "dtype": "int64"}, [(3,)])]


def full_like(like: Tensor, value: Any, shape: Any = None, dtype: str | None = None) -> Tensor:
    """`value` in a shape and dtype, by default those of `like`; a constant on its device."""
    return Full(value, None if shape is None else tuple(shape), dtype)(like)


@op
class Arange(Op):
    """Numbers from start to before end. The input gives only the device (and, recorded, the place in the graph)."""

    start: Any
    end: Any
    step: Any = 1
    dtype: str | None = None

    def _values(self) -> np.ndarray:
        values = np.arange(self.start, self.end, self.step)
        return values.astype(self.dtype or ("float32" if values.dtype.kind == "f" else "int64"))

    def infer(self, like: Any) -> Any:
        values = self._values()
        return Spec(values.shape, str(values.dtype))

    def decompose(self, like: Tensor) -> Tensor:
        values = self._values()
        return Tensor(values, device=like.device, dtype=str(values.dtype), requires_grad=False)

    @classmethod
    def samples(cls) -> list:
        return [({"start": 1, "end": 8, "step": 2}, [(3,)]), ({"start": 0.5, "end": 3}, [(3,)])]


def arange_like(like: Tensor, start: Any, end: Any, step: Any = 1, dtype: str | None = None) -> Tensor:
    """torch.arange on the device of `like`; bounds may be symbolic."""
    return Arange(start, end, step, dtype)(like)

"""Tensors made inside a forward, whose sizes or dtype come from another tensor."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from needle.autograd import Op, Spec, Tensor, op
from needle.backend_ndarray import promote_scalar
from needle.backend_ndarray.sizes import larger, whole
from needle.ops.common import constant
from needle.ops.families import samples_of

__all__ = ["arange_like", "full_like", "linspace_like", "triangle_mask_like"]


@op
class Full(Op):
    """One value everywhere. `shape` and `dtype` None are those of the input, whose values play no part."""

    ignores_values = True
    value: Any
    shape: Any = None
    dtype: str | None = None

    def infer(self, like: Any) -> Any:
        shape = tuple(like.shape) if self.shape is None else tuple(map(whole, self.shape))
        return Spec(shape, self.dtype or str(like.dtype))

    def decompose(self, like: Tensor) -> Tensor:
        shape, dtype = self.infer(like)
        return constant(np.full(shape, self.value, dtype), like, dtype)

    samples = samples_of(({"value": 1.5}, [(3, 4)]), ({"value": 2, "shape": (2, 5), "dtype": "int64"}, [(3,)]))


def full_like(like: Tensor, value: Any, shape: Any = None, dtype: str | None = None) -> Tensor:
    """`value` in a shape and dtype, by default those of `like`; a constant on its device."""
    return Full(value, None if shape is None else tuple(shape), dtype)(like)


@op
class Number(Op):
    """A number as a tensor without axes, in the dtype that it has beside the input, whose values play no part."""

    ignores_values = True
    value: Any

    def infer(self, like: Any) -> Any:
        return Spec((), promote_scalar(str(like.dtype), self.value))

    def decompose(self, like: Tensor) -> Tensor:
        return constant(self.value, like, self.infer(like).dtype)

    samples = samples_of(({"value": 1.5}, [(3, 4)]))


@op
class TriangleMask(Op):
    """Which places of a matrix torch.triu (upper) or torch.tril keep; the input gives only the device."""

    ignores_values = True
    rows: Any
    columns: Any
    upper: bool = False
    diagonal: Any = 0

    def infer(self, like: Any) -> Any:
        return Spec((whole(self.rows), whole(self.columns)), "bool")

    def decompose(self, like: Tensor) -> Tensor:
        lower = np.tri(int(self.rows), int(self.columns), int(self.diagonal) - self.upper, dtype=bool)
        return constant(lower != self.upper, like, "bool")

    samples = samples_of(*(({"rows": 3, "columns": 5, "upper": u, "diagonal": 1}, [(2,)]) for u in (False, True)))


def triangle_mask_like(like: Tensor, rows: Any, columns: Any, upper: bool = False, diagonal: Any = 0) -> Tensor:
    """What torch.triu (upper) or torch.tril keep of a (rows, columns) matrix as truths, on the device of `like`."""
    return TriangleMask(rows, columns, upper, diagonal)(like)


class Line(Op):
    """Numbers of an arithmetic progression. `dtype`: LIKE for that of the input, which else gives only the device."""

    ignores_values = True

    def values(self, dtype: str) -> np.ndarray:
        """In any dtype, to be cast."""
        raise NotImplementedError

    def _values(self, like: Any) -> np.ndarray:
        dtype = str(like.dtype) if vars(self)["dtype"] == LIKE else vars(self)["dtype"]
        return self.values(dtype).astype(dtype)

    def infer(self, like: Any) -> Any:
        values = self._values(like)
        return Spec(values.shape, str(values.dtype))

    def decompose(self, like: Tensor) -> Tensor:
        values = self._values(like)
        return constant(values, like, str(values.dtype))


LIKE = "like"


@op
class Arange(Line):
    """Numbers from start to before end."""

    start: Any
    end: Any
    step: Any
    dtype: str

    def infer(self, like: Any) -> Any:
        dtype = str(like.dtype) if self.dtype == LIKE else self.dtype
        return Spec((self._counted(dtype)[0],), dtype)

    def _counted(self, dtype: str) -> tuple[int, Any, Any]:
        """How many numbers, the first, and the step."""
        start, end, step = self.start, self.end, self.step
        if dtype == "int64":  # of whole parts, where torch counts the other dtypes' numbers before it cuts
            start, end, step = whole(start), whole(end), whole(step)
        if step == 0:
            raise ValueError("[arange] step expects a number other than 0, got 0.")
        return larger(0, math.ceil((end - start) / step)), start, step

    def values(self, dtype: str) -> np.ndarray:
        count, start, step = self._counted(dtype)
        start, step = (int(start), int(step)) if dtype == "int32" else (start, step)
        return start + step * np.arange(count)

    @classmethod
    def samples(cls) -> list:
        whole = {"start": 1, "end": 8, "step": 2, "dtype": "int64"}
        return [(whole, [(3,)]), ({"start": 0.5, "end": 3, "step": 1, "dtype": LIKE}, [(3,)])]


def arange_like(like: Tensor, start: Any, end: Any, step: Any = 1, dtype: str = "int64") -> Tensor:
    """torch.arange on the device of `like`; bounds may be symbolic."""
    return Arange(start, end, step, dtype)(like)


@op
class Linspace(Line):
    """`steps` numbers from start to end, both of them included."""

    start: Any
    end: Any
    steps: Any
    dtype: str

    def values(self, dtype: str) -> np.ndarray:
        start, end, steps = self.start, self.end, int(self.steps)
        if dtype in ("int32", "int64"):
            start, end = int(start), int(end)
        if steps == 1:
            return np.array([start])
        step = np.longdouble((end - start) / max(steps - 1, 1))  # products are not rounded, as torch's are not
        i = np.arange(steps)
        return np.where(i < steps // 2, start + step * i, end - step * (steps - 1 - i)).astype("float64")

    samples = samples_of(*(({"start": 0.5, "end": 3.5, "steps": 3, "dtype": d}, [(3,)]) for d in ("int64", LIKE)))


def linspace_like(like: Tensor, start: Any, end: Any, steps: Any, dtype: str) -> Tensor:
    """torch.linspace on the device of `like`; bounds and number may be symbolic."""
    return Linspace(start, end, steps, dtype)(like)

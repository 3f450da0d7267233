"""The backend functions of the course (`needle.course.backend`) in numpy: what `cpu_numpy()` falls through to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from needle.course.backend import Course, Sizes, contiguous


class Memory:
    """Uninitialised memory for `size` float32 numbers."""

    def __init__(self, size: int) -> None:
        self.array = np.empty(size, "float32")

    def ptr(self) -> int:
        return self.array.ctypes.data

    @property
    def size(self) -> int:
        return self.array.size


KERNELS: dict[str, Callable[..., Any]] = {
    "fill": lambda value: value,
    "copy": lambda x: x,
    "matmul": lambda a, b, activation, alpha: a @ b,
    "sum": lambda x: x.sum(1, keepdims=True),
    "max": lambda x: x.max(1, keepdims=True),
}
NAMES = {"mul": "multiply", "div": "divide", "eq": "equal", "ge": "greater_equal"}  # numpy's, where they differ


class NumpyCourse(Course):
    """The functions on numpy arrays in place of a device's."""

    __device_name__ = "numpy"
    Array = Memory  # type: ignore[assignment]

    def __init__(self) -> None:
        pass

    def _view(self, a: Memory, shape: Sizes, strides: Sizes | None = None, offset: int = 0) -> np.ndarray:
        """The view of `a`, checked to lie inside of it."""
        strides = contiguous(shape) if strides is None else strides
        ends = [offset, offset]
        for n, s in zip(shape, strides, strict=True):
            ends[s > 0] += (n - 1) * s
        if 0 not in shape and (ends[0] < 0 or ends[1] >= a.size):
            raise ValueError(f"[needle] a view reaches outside its storage of {4 * a.size} bytes.")
        return np.lib.stride_tricks.as_strided(a.array[offset:], tuple(shape), tuple(4 * s for s in strides))

    def to_numpy(self, a: Memory, shape: Sizes, strides: Sizes, offset: int) -> np.ndarray:
        return self._view(a, shape, strides, offset).copy()

    def from_numpy(self, a: np.ndarray, out: Memory) -> None:
        out.array[: a.size] = np.reshape(a, -1)

    def _run(self, name: str, out: np.ndarray, **named: Any) -> None:
        out[...] = KERNELS[name](**named)

    def _run_map(self, name: str, out: np.ndarray, ins: list[np.ndarray], numbers: list[float]) -> None:
        name = name.removesuffix("_scalar")
        with np.errstate(all="ignore"):
            out[...] = getattr(np, NAMES.get(name, name))(*ins, *map(np.float32, numbers))


FUNCTIONS: Course = NumpyCourse()


def __getattr__(name: str) -> Any:
    return getattr(FUNCTIONS, name)

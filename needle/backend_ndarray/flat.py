"""One-dimensional access to strided arrays, which have no one-dimensional view."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .ndarray import NDArray


class Flat:
    """The elements of an array in row-major order, as numpy's `flat`: reading copies, writing goes through."""

    def __init__(self, base: NDArray) -> None:
        self.base = base

    shape = property(lambda self: (self.base.size,))
    size = property(lambda self: self.base.size)
    dtype = property(lambda self: self.base.dtype)

    def __len__(self) -> int:
        return self.base.size

    def __iter__(self) -> Iterator[NDArray]:
        return (self[i] for i in range(len(self)))

    def _place(self, i: Any) -> tuple[int, ...]:
        n, i = len(self), operator.index(i)
        if not -n <= i < n:
            raise IndexError(f"[flat] index {i} is out of range for {n} elements.")
        return tuple(map(int, np.unravel_index(i % n, self.base.shape)))

    def __getitem__(self, index: Any) -> NDArray:
        if hasattr(index, "__index__"):
            return self.base[self._place(index)].copy()
        return self.base.compact().flat[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        if hasattr(index, "__index__"):
            self.base[self._place(index)] = value
            return
        whole = self.base.copy()
        whole.flat[index] = value
        self.base[...] = whole

    def numpy(self) -> np.ndarray:
        return self.base.numpy().reshape(-1)

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.asarray(self.numpy(), dtype=dtype)

    def __repr__(self) -> str:
        return f"Flat({self.numpy()})"

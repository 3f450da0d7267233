"""The backend functions of the course, on flat float32 memory: names over rows of a device's kernel table.

`Array(size)` is memory for `size` numbers. Strides, offsets and sizes count elements; strides may be negative.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from needle import _core

Sizes = Sequence[int]
Memory: TypeAlias = Any  # a Storage of the core
View: TypeAlias = Any  # an Array of the core


def contiguous(shape: Sizes) -> list[int]:
    return [int(np.prod(shape[i + 1 :])) for i in range(len(shape))]


class Course:
    """The functions for one device of the core."""

    __tile_size__ = 8

    def __init__(self, core: Any, kernels: dict[str, Any]) -> None:
        self.core, self.kernels = core, kernels
        self.__device_name__ = core.name

    def Array(self, size: int) -> Memory:
        """Uninitialised memory with `.ptr()` and `.size`."""
        return self.core.allocate(4 * size)

    def _view(self, a: Memory, shape: Sizes, strides: Sizes | None = None, offset: int = 0) -> View:
        return _core.Array(a, shape, contiguous(shape) if strides is None else strides, offset, "float32")

    def _run(self, name: str, out: View, **named: Any) -> None:
        kernel = self.kernels[name]
        kernel([out], *kernel.order(named))

    def _run_map(self, name: str, out: View, ins: list[View], numbers: list[float]) -> None:
        self.kernels[name]([out], ins, numbers)

    def to_numpy(self, a: Memory, shape: Sizes, strides: Sizes, offset: int) -> np.ndarray:
        """A copy of the view."""
        return self._view(a, shape, strides, offset).numpy(False).copy()

    def from_numpy(self, a: np.ndarray, out: Memory) -> None:
        self._view(out, (a.size,)).store(np.ascontiguousarray(a, "float32"))

    def fill(self, out: Memory, val: float) -> None:
        self._run("fill", self._view(out, (out.size,)), value=val)

    def compact(self, a: Memory, out: Memory, shape: Sizes, strides: Sizes, offset: int) -> None:
        """Write the view of `a` to `out`, element after element."""
        self._run("copy", self._view(out, shape), x=self._view(a, shape, strides, offset))

    def ewise_setitem(self, a: Memory, out: Memory, shape: Sizes, strides: Sizes, offset: int) -> None:
        """Write the elements of `a` to the view of `out`."""
        self._run("copy", self._view(out, shape, strides, offset), x=self._view(a, shape))

    def scalar_setitem(self, size: int, val: float, out: Memory, shape: Sizes, strides: Sizes, offset: int) -> None:
        """Write `val` to the view of `out`; `size` is its number of elements."""
        self._run("fill", self._view(out, shape, strides, offset), value=val)

    @staticmethod
    def _map(kernel: str) -> Callable[..., None]:
        """f(a, [b or number], out) for an element-wise kernel."""

        def run(self: Course, a: Memory, *rest: Any) -> None:
            *others, out = rest
            flat = [self._view(x, (a.size,)) for x in (a, *others) if hasattr(x, "ptr")]
            numbers = [float(x) for x in others if not hasattr(x, "ptr")]
            self._run_map(kernel, self._view(out, (a.size,)), flat, numbers)

        return run

    ewise_add, scalar_add = _map("add"), _map("add_scalar")
    ewise_mul, scalar_mul = _map("mul"), _map("mul_scalar")
    ewise_div, scalar_div = _map("div"), _map("div_scalar")
    ewise_maximum, scalar_maximum = _map("maximum"), _map("maximum_scalar")
    ewise_eq, scalar_eq = _map("eq"), _map("eq_scalar")
    ewise_ge, scalar_ge = _map("ge"), _map("ge_scalar")
    scalar_power = _map("power_scalar")
    ewise_log, ewise_exp, ewise_tanh = _map("log"), _map("exp"), _map("tanh")

    def matmul(self, a: Memory, b: Memory, out: Memory, m: int, n: int, p: int) -> None:
        """out (m, p) = a (m, n) @ b (n, p)."""
        operands = {"a": self._view(a, (m, n)), "b": self._view(b, (n, p))}
        self._run("matmul", self._view(out, (m, p)), **operands, activation=0, alpha=0)

    def _tiles(self, a: Memory, rows: int, columns: int) -> View:
        """Tiles (rows / T, columns / T, T, T) as a view (rows / T, T, columns / T, T), the order of a matrix."""
        t = self.__tile_size__
        return self._view(a, (rows // t, t, columns // t, t), (columns * t, t, t * t, 1))

    def matmul_tiled(self, a: Memory, b: Memory, out: Memory, m: int, n: int, p: int) -> None:
        """The product of matrices stored as tiles of `__tile_size__`, to tiles; m, n and p are multiples of it."""
        if any(s % self.__tile_size__ for s in (m, n, p)):
            raise ValueError(f"[matmul_tiled] expects multiples of {self.__tile_size__}, got {m}, {n} and {p}.")
        left, right, product = (self.Array(rows * columns) for rows, columns in ((m, n), (n, p), (m, p)))
        for tiled, matrix, shape in ((a, left, (m, n)), (b, right, (n, p))):
            tiles = self._tiles(tiled, *shape)
            self._run("copy", self._view(matrix, tiles.shape), x=tiles)
        self.matmul(left, right, product, m, n, p)
        tiles = self._tiles(out, m, p)
        self._run("copy", tiles, x=self._view(product, tiles.shape))

    @staticmethod
    def _reduce(kernel: str) -> Callable[..., None]:
        """f(a, out, reduce_size): each element of `out` from the next `reduce_size` elements of `a`."""

        def run(self: Course, a: Memory, out: Memory, reduce_size: int) -> None:
            groups = a.size // reduce_size
            self._run(kernel, self._view(out, (groups, 1)), x=self._view(a, (groups, reduce_size)))

        return run

    reduce_sum, reduce_max = _reduce("sum"), _reduce("max")

"""The backend functions of the course, on flat float32 memory: names over rows of the kernel table.

`Array(size)` is memory for `size` numbers. Strides, offsets and sizes count elements; strides may be negative.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from needle import _core

KERNELS: dict[str, Any] = _core.kernels()

__device_name__ = "cpu"
__tile_size__ = 8


def Array(size: int) -> _core.Storage:
    """Uninitialised memory with `.ptr()` and `.size`."""
    return _core.Storage(4 * size)


def _view(a: _core.Storage, shape: Sequence[int], strides: Sequence[int] | None = None, offset: int = 0) -> _core.Array:
    if strides is None:
        strides = [int(np.prod(shape[i + 1 :])) for i in range(len(shape))]
    return _core.Array(a, shape, strides, offset, "float32")


def _run(kernel: str, out: _core.Array, *ins: _core.Array, attrs: Sequence[float] = ()) -> None:
    KERNELS[kernel]([out], ins, attrs)


def to_numpy(a: _core.Storage, shape: Sequence[int], strides: Sequence[int], offset: int) -> np.ndarray:
    """A copy of the view."""
    return _view(a, shape, strides, offset).numpy().copy()


def from_numpy(a: np.ndarray, out: _core.Storage) -> None:
    _view(out, (a.size,)).numpy()[...] = np.reshape(a, -1)
    out.wrote()


def fill(out: _core.Storage, val: float) -> None:
    _run("fill", _view(out, (out.size,)), attrs=(val,))


def compact(a: _core.Storage, out: _core.Storage, shape: Sequence[int], strides: Sequence[int], offset: int) -> None:
    """Write the view of `a` to `out`, element after element."""
    _run("copy", _view(out, shape), _view(a, shape, strides, offset))


def ewise_setitem(
    a: _core.Storage, out: _core.Storage, shape: Sequence[int], strides: Sequence[int], offset: int
) -> None:
    """Write the elements of `a` to the view of `out`."""
    _run("copy", _view(out, shape, strides, offset), _view(a, shape))


def scalar_setitem(
    size: int, val: float, out: _core.Storage, shape: Sequence[int], strides: Sequence[int], offset: int
) -> None:
    """Write `val` to the view of `out`; `size` is its number of elements."""
    _run("fill", _view(out, shape, strides, offset), attrs=(val,))


def _map(kernel: str) -> Callable[..., None]:
    """f(a, [b or number], out) for an element-wise kernel."""

    def run(a: _core.Storage, *rest: Any) -> None:
        *others, out = rest
        flat = [_view(x, (a.size,)) for x in (a, *others) if isinstance(x, _core.Storage)]
        _run(kernel, _view(out, (a.size,)), *flat, attrs=[float(x) for x in others if not isinstance(x, _core.Storage)])

    return run


ewise_add, scalar_add = _map("add"), _map("add_scalar")
ewise_mul, scalar_mul = _map("mul"), _map("mul_scalar")
ewise_div, scalar_div = _map("div"), _map("div_scalar")
ewise_maximum, scalar_maximum = _map("maximum"), _map("maximum_scalar")
ewise_eq, scalar_eq = _map("eq"), _map("eq_scalar")
ewise_ge, scalar_ge = _map("ge"), _map("ge_scalar")
scalar_power = _map("power_scalar")
ewise_log, ewise_exp, ewise_tanh = _map("log"), _map("exp"), _map("tanh")


def _product(out: _core.Array, a: _core.Array, b: _core.Array) -> None:
    _run("matmul", out, a, b, attrs=(0, 0, 0))


def matmul(a: _core.Storage, b: _core.Storage, out: _core.Storage, m: int, n: int, p: int) -> None:
    """out (m, p) = a (m, n) @ b (n, p)."""
    _product(_view(out, (m, p)), _view(a, (m, n)), _view(b, (n, p)))


def _tiles(a: _core.Storage, rows: int, columns: int) -> _core.Array:
    """Tiles (rows / T, columns / T, T, T) as a view (rows / T, T, columns / T, T), the order of a matrix."""
    t = __tile_size__
    return _view(a, (rows // t, t, columns // t, t), (columns * t, t, t * t, 1))


def matmul_tiled(a: _core.Storage, b: _core.Storage, out: _core.Storage, m: int, n: int, p: int) -> None:
    """The product of matrices stored as tiles of `__tile_size__`, to tiles; m, n and p are multiples of it."""
    if any(s % __tile_size__ for s in (m, n, p)):
        raise ValueError(f"[matmul_tiled] expects multiples of {__tile_size__}, got {m}, {n} and {p}.")
    dense = [_core.empty((rows, columns), "float32") for rows, columns in ((m, n), (n, p), (m, p))]
    for tiled, matrix, shape in ((a, dense[0], (m, n)), (b, dense[1], (n, p))):
        tiles = _tiles(tiled, *shape)
        _run("copy", _view(matrix.storage, tiles.shape), tiles)
    _product(dense[2], dense[0], dense[1])
    tiles = _tiles(out, m, p)
    _run("copy", tiles, _view(dense[2].storage, tiles.shape))


def _reduce(kernel: str) -> Callable[[_core.Storage, _core.Storage, int], None]:
    """f(a, out, reduce_size): each element of `out` from the next `reduce_size` elements of `a`."""

    def run(a: _core.Storage, out: _core.Storage, reduce_size: int) -> None:
        groups = a.size // reduce_size
        _run(kernel, _view(out, (groups, 1)), _view(a, (groups, reduce_size)))

    return run


reduce_sum, reduce_max = _reduce("sum"), _reduce("max")

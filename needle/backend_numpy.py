"""The backend functions of the course (`needle.backend_ndarray.course`) in numpy: what `cpu_numpy()` falls through to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

__device_name__ = "numpy"
__tile_size__ = 8


class Array:
    """Uninitialised memory for `size` float32 numbers."""

    def __init__(self, size: int) -> None:
        self.array = np.empty(size, "float32")

    def ptr(self) -> int:
        return self.array.ctypes.data

    @property
    def size(self) -> int:
        return self.array.size


def _view(a: Array, shape: Sequence[int], strides: Sequence[int], offset: int) -> np.ndarray:
    """The view of `a`, checked to lie inside of it."""
    ends = [offset, offset]
    for n, s in zip(shape, strides, strict=True):
        ends[s > 0] += (n - 1) * s
    if 0 not in shape and (ends[0] < 0 or ends[1] >= a.size):
        raise ValueError(f"[needle] a view reaches outside its storage of {4 * a.size} bytes.")
    start = a.array[offset:]
    return np.lib.stride_tricks.as_strided(start, tuple(shape), tuple(4 * s for s in strides))


def to_numpy(a: Array, shape: Sequence[int], strides: Sequence[int], offset: int) -> np.ndarray:
    """A copy of the view."""
    return _view(a, shape, strides, offset).copy()


def from_numpy(a: np.ndarray, out: Array) -> None:
    out.array[: a.size] = np.reshape(a, -1)


def fill(out: Array, val: float) -> None:
    out.array.fill(val)


def compact(a: Array, out: Array, shape: Sequence[int], strides: Sequence[int], offset: int) -> None:
    """Write the view of `a` to `out`, element after element."""
    from_numpy(_view(a, shape, strides, offset), out)


def ewise_setitem(a: Array, out: Array, shape: Sequence[int], strides: Sequence[int], offset: int) -> None:
    """Write the elements of `a` to the view of `out`."""
    _view(out, shape, strides, offset)[...] = a.array[: int(np.prod(shape))].reshape(shape)


def scalar_setitem(
    size: int, val: float, out: Array, shape: Sequence[int], strides: Sequence[int], offset: int
) -> None:
    """Write `val` to the view of `out`; `size` is its number of elements."""
    _view(out, shape, strides, offset)[...] = val


def _map(f: Callable[..., Any]) -> Callable[..., None]:
    """f(a, [b or number], out), in float32."""

    def run(*operands: Any) -> None:
        *ins, out = operands
        with np.errstate(all="ignore"):
            out.array[: ins[0].size] = f(*(x.array if isinstance(x, Array) else np.float32(x) for x in ins))

    return run


ewise_add = scalar_add = _map(np.add)
ewise_mul = scalar_mul = _map(np.multiply)
ewise_div = scalar_div = _map(np.divide)
ewise_maximum = scalar_maximum = _map(np.maximum)
ewise_eq = scalar_eq = _map(np.equal)
ewise_ge = scalar_ge = _map(np.greater_equal)
scalar_power = _map(np.power)
ewise_log, ewise_exp, ewise_tanh = _map(np.log), _map(np.exp), _map(np.tanh)


def matmul(a: Array, b: Array, out: Array, m: int, n: int, p: int) -> None:
    """out (m, p) = a (m, n) @ b (n, p)."""
    from_numpy(a.array[: m * n].reshape(m, n) @ b.array[: n * p].reshape(n, p), out)


def matmul_tiled(a: Array, b: Array, out: Array, m: int, n: int, p: int) -> None:
    """The product of matrices stored as tiles of `__tile_size__`, to tiles; m, n and p are multiples of it."""
    t = __tile_size__
    if any(s % t for s in (m, n, p)):
        raise ValueError(f"[matmul_tiled] expects multiples of {t}, got {m}, {n} and {p}.")
    dense = [
        x.array[: r * c].reshape(r // t, c // t, t, t).swapaxes(1, 2).reshape(r, c)
        for x, r, c in ((a, m, n), (b, n, p))
    ]
    from_numpy((dense[0] @ dense[1]).reshape(m // t, t, p // t, t).swapaxes(1, 2), out)


def _reduce(f: Callable[..., Any]) -> Callable[[Array, Array, int], None]:
    """f(a, out, reduce_size): each element of `out` from the next `reduce_size` elements of `a`."""

    def run(a: Array, out: Array, reduce_size: int) -> None:
        from_numpy(f(a.array.reshape(-1, reduce_size), axis=1), out)

    return run


reduce_sum, reduce_max = _reduce(np.sum), _reduce(np.max)

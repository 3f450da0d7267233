"""Functions of arrays by numpy's names: what programs call on `needle.backend_selection.array_api`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from needle import _core

from .device import DLPACK, Device
from .ndarray import NDArray


def broadcast_to(array: NDArray, shape: Sequence[int]) -> NDArray:
    return array.broadcast_to(shape)


def reshape(array: NDArray, shape: Sequence[int] | int) -> NDArray:
    return array.reshape(shape)


def flip(array: NDArray, axes: Sequence[int] | int) -> NDArray:
    return array.flip(axes)


def maximum(a: NDArray, b: Any) -> NDArray:
    return a.maximum(b)


def log(a: NDArray) -> NDArray:
    return a.log()


def exp(a: NDArray) -> NDArray:
    return a.exp()


def tanh(a: NDArray) -> NDArray:
    return a.tanh()


def sum(a: NDArray, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> NDArray:
    return a.sum(axis, keepdims)


def max(a: NDArray, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> NDArray:
    return a.max(axis, keepdims)


def empty(shape: Sequence[int], dtype: str = "float32", device: Device | None = None) -> NDArray:
    return NDArray.empty(shape, dtype, device)


def full(shape: Sequence[int], value: float, dtype: str = "float32", device: Device | None = None) -> NDArray:
    out = NDArray.empty(shape, dtype, device)
    out.fill(value)
    return out


def from_dlpack(x: Any) -> NDArray:
    """Zero-copy NDArray over any object with `__dlpack__`, on the device where its memory is."""
    kind = int(x.__dlpack_device__()[0]) if hasattr(x, "__dlpack_device__") else 1
    device = DLPACK.get(kind)
    if device is None:
        raise ValueError(
            f"[from_dlpack] expects memory of {', '.join(map(str, DLPACK.values()))}, got device type {kind}."
        )
    device.require()
    if kind == 1:
        return NDArray.wrap(_core.from_dlpack(x.__dlpack__(), device.core))
    stream = device.core.stream or int(kind == 2)  # CUDA's default stream has the number 1 here, ROCm's 0
    return NDArray.wrap(_core.from_dlpack(x.__dlpack__(stream=stream), device.core), device)

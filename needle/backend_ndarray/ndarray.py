"""NDArray: a strided array of any dtype on a device; what users, autograd and DLPack see.

Views share their storage (`_handle`) and have numpy's strides, counted in elements. Memory layouts of the executor never
appear here.
"""

from __future__ import annotations

import math
import operator
import threading
from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy as np

from needle import _core

from .device import Device, default_device

KERNELS = _core.kernels()


def itemsize(dtype: str) -> int:
    return np.dtype(dtype).itemsize


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides, n = [], 1
    for s in reversed(shape):
        strides.append(n)
        n *= s
    return tuple(reversed(strides))


class _Planning(threading.local):
    """While `builder` is set on a thread, memory is virtual and kernel calls become steps of the builder's plan."""

    builder: Any = None


PLANNING = _Planning()


def call(name: str, outs: Sequence[NDArray], ins: Sequence[NDArray], *attrs: float) -> None:
    """Run kernel `name` of the CPU table, or plan its run; attributes in the order of its row."""
    if PLANNING.builder is not None:
        PLANNING.builder.call(name, outs, ins, attrs)
        return
    KERNELS[name]([o._ref for o in outs], [i._ref for i in ins], attrs)


class NDArray:
    """See the module's docstring. `NDArray(x)` copies numpy arrays, numbers, sequences and other NDArrays."""

    __slots__ = ("_device", "_dtype", "_handle", "_offset", "_reference", "_shape", "_strides")
    _shape: tuple[int, ...]
    _strides: tuple[int, ...]
    _offset: int
    _dtype: str
    _device: Device
    _handle: Any  # a Storage of the core, or a plan's Buffer
    _reference: Any  # the core's Array of this view; None until a kernel needs it
    __array_priority__ = 1000  # numpy scalars on the left leave the operation to us

    def __init__(self, other: Any, device: Device | None = None, dtype: str | None = None) -> None:
        if isinstance(other, NDArray):
            source = other if dtype in (None, other.dtype) else other.astype(dtype)
            self._init(source.compact() if source is not other else source._copy())
            return
        data = np.asarray(other)
        if dtype is None:
            dtype = "float32" if data.dtype.kind == "f" or not hasattr(other, "dtype") else str(data.dtype)
        data = np.ascontiguousarray(data, dtype=dtype).reshape(data.shape)
        (device or default_device()).require()
        self._init(NDArray.empty(data.shape, dtype))
        if data.size:
            self.numpy_view()[...] = data

    def _init(self, other: NDArray) -> None:
        for slot in NDArray.__slots__:
            setattr(self, slot, getattr(other, slot))

    @staticmethod
    def make(
        shape: Sequence[int],
        strides: Sequence[int] | None = None,
        device: Device | None = None,
        handle: Any = None,
        offset: int = 0,
        dtype: str = "float32",
    ) -> NDArray:
        """A view of `handle`, or fresh uninitialised memory when there is none. Strides and offset count elements."""
        self = NDArray.__new__(NDArray)
        self._shape = tuple(shape)
        self._strides = contiguous_strides(self._shape) if strides is None else tuple(strides)
        self._device = device or default_device()
        self._device.require()
        self._dtype, self._offset = dtype, offset
        self._handle = handle
        self._reference = None
        if handle is None and PLANNING.builder is not None:
            self._handle = PLANNING.builder.buffer(math.prod(self._shape) * itemsize(dtype))
        elif handle is None:
            self._reference = _core.empty(self._shape, dtype)
            self._handle = self._reference.storage
        return self

    @staticmethod
    def empty(shape: Sequence[int], dtype: str = "float32") -> NDArray:
        return NDArray.make(shape, dtype=dtype)

    @staticmethod
    def wrap(ref: _core.Array) -> NDArray:
        """An NDArray around an array that the core made."""
        self = NDArray.make(ref.shape, ref.strides, handle=ref.storage, offset=ref.offset, dtype=ref.dtype)
        self._reference = ref
        return self

    @property
    def _ref(self) -> _core.Array:
        if self._reference is None:
            self._reference = _core.Array(self._handle, self._shape, self._strides, self._offset, self._dtype)
        return self._reference

    shape = property(lambda self: self._shape)
    strides = property(lambda self: self._strides)
    dtype = property(lambda self: self._dtype)
    device = property(lambda self: self._device)
    ndim = property(lambda self: len(self._shape))

    @property
    def size(self) -> int:
        return math.prod(self._shape)

    def __len__(self) -> int:
        return self._shape[0]

    def __repr__(self) -> str:
        if PLANNING.builder is not None:
            return f"NDArray(shape={self._shape}, dtype={self._dtype})"
        return f"NDArray({self.numpy()}, device={self.device})"

    # -- conversions -------------------------------------------------------------------------------------------------

    def numpy_view(self) -> np.ndarray:
        """numpy array over the same memory."""
        return self._ref.numpy()

    def numpy(self) -> np.ndarray:
        return self._ref.numpy().copy()

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.asarray(self.numpy(), dtype=dtype)

    def __dlpack__(self, *, stream: Any = None, **_: Any) -> Any:
        return self._ref.dlpack()

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    def astype(self, dtype: str) -> NDArray:
        out = NDArray.empty(self._shape, dtype)
        call("copy", [out], [self])
        return out

    def _copy(self) -> NDArray:
        return self.astype(self._dtype)

    def __deepcopy__(self, memo: Any) -> NDArray:
        return self._copy()

    # -- views -------------------------------------------------------------------------------------------------------

    def _view(self, shape: Sequence[int], strides: Sequence[int], offset: int | None = None) -> NDArray:
        offset = self._offset if offset is None else offset
        return NDArray.make(shape, strides, self._device, self._handle, offset, self._dtype)

    @property
    def is_blocked(self) -> bool:
        """True for a value in blocks of 16 channels, (N, C/16, H, W, 16); only plans have such."""
        return getattr(self._handle, "blocked", False)

    def is_compact(self) -> bool:
        n = 1
        for size, stride in zip(reversed(self._shape), reversed(self._strides), strict=True):
            if size != 1 and stride != n:
                return False
            n *= size
        return True

    def compact(self) -> NDArray:
        return self if self.is_compact() else self._copy()

    def reshape(self, shape: Sequence[int] | int) -> NDArray:
        shape = resolve_shape((shape,) if isinstance(shape, int) else shape, self._shape)
        source = self.compact()
        return source._view(shape, contiguous_strides(shape))

    def split_last(self, parts: int) -> NDArray:
        """(..., parts * n) as a view (..., parts, n), of any strides."""
        *shape, size = self._shape
        *strides, step = self._strides
        return self._view([*shape, parts, size // parts], [*strides, size // parts * step, step])

    def permute(self, axes: Sequence[int]) -> NDArray:
        return self._view([self._shape[a] for a in axes], [self._strides[a] for a in axes])

    def broadcast_to(self, shape: Sequence[int]) -> NDArray:
        shape = tuple(shape)
        lead = len(shape) - self.ndim
        strides = [0] * lead
        for have, want, stride in zip(self._shape, shape[lead:], self._strides, strict=True):
            if have != want and have != 1:
                raise ValueError(f"[broadcast_to] expects a shape that broadcasts to {shape}, got {self._shape}.")
            strides.append(stride if have == want else 0)
        return self._view(shape, strides)

    def flip(self, axes: Sequence[int] | int) -> NDArray:
        strides, offset = list(self._strides), self._offset
        for a in (axes,) if isinstance(axes, int) else axes:
            offset += (self._shape[a] - 1) * self._strides[a]
            strides[a] = -strides[a]
        return self._view(self._shape, strides, offset)

    def process_slice(self, s: slice, dim: int) -> slice:
        return slice(*s.indices(self._shape[dim]))

    def __getitem__(self, index: Any) -> NDArray:
        index = index if isinstance(index, tuple) else (index,)
        if Ellipsis in index:
            at = index.index(Ellipsis)
            fill = self.ndim - sum(i is not None for i in index) + 1
            index = index[:at] + (slice(None),) * fill + index[at + 1 :]
        shape, strides, offset, dim = [], [], self._offset, 0
        for i in index:
            if i is None:
                shape.append(1)
                strides.append(0)
                continue
            if dim >= self.ndim:
                raise IndexError(f"[getitem] too many indices for shape {self._shape}, got {len(index)}.")
            n, stride = self._shape[dim], self._strides[dim]
            if isinstance(i, slice):
                start, stop, step = i.indices(n)
                shape.append(max(0, -(-(stop - start) // step)))
                strides.append(stride * step)
                offset += start * stride if shape[-1] else 0
            else:
                i = operator.index(i)
                if not -n <= i < n:
                    raise IndexError(f"[getitem] index {i} is out of range for axis {dim} of size {n}.")
                offset += (i % n) * stride
            dim += 1
        return self._view(shape + list(self._shape[dim:]), strides + list(self._strides[dim:]), offset)

    def __setitem__(self, index: Any, value: Any) -> None:
        target = self[index]
        if isinstance(value, NDArray):
            call("copy", [target], [value.broadcast_to(target.shape)])
        elif np.ndim(value) == 0:
            call("fill", [target], [], float(value))
        else:
            self[index] = NDArray(value, dtype=self._dtype)

    @property
    def flat(self) -> NDArray:
        """1-D view of a compact array: writes go through."""
        return self.reshape((self.size,))

    def fill(self, value: float) -> None:
        call("fill", [self], [], float(value))

    # -- arithmetic --------------------------------------------------------------------------------------------------

    def ewise(self, name: str, *others: NDArray, attrs: Sequence[float] = ()) -> NDArray:
        """Element-wise kernel `name` over this array and `others`, broadcast together."""
        arrays = [self, *others]
        shape = self._shape if not others else np.broadcast_shapes(*(a._shape for a in arrays))
        dtype = self._dtype if not others else arrays[-1]._dtype
        out = NDArray.empty(shape, dtype)
        ins = [a if a._shape == shape else a.broadcast_to(shape) for a in arrays]
        call(name, [out], ins, *attrs)
        return out

    def _binary(self, name: str, other: Any) -> NDArray:
        if isinstance(other, NDArray):
            return self.ewise(name, other)
        return self.ewise(f"{name}_scalar", attrs=(float(other),))

    def __add__(self, other: Any) -> NDArray:
        return self._binary("add", other)

    __radd__ = __add__

    def __mul__(self, other: Any) -> NDArray:
        return self._binary("mul", other)

    __rmul__ = __mul__

    def __sub__(self, other: Any) -> NDArray:
        return self.ewise("sub", other) if isinstance(other, NDArray) else self + (-other)

    def __rsub__(self, other: Any) -> NDArray:
        return (-self) + other

    def __truediv__(self, other: Any) -> NDArray:
        return self._binary("div", other)

    def __pow__(self, other: Any) -> NDArray:
        return self._binary("power", other)

    def __neg__(self) -> NDArray:
        return self.ewise("neg")

    def __eq__(self, other: object) -> NDArray:  # type: ignore[override]
        return self._binary("eq", other)

    def __ge__(self, other: Any) -> NDArray:
        return self._binary("ge", other)

    def __gt__(self, other: Any) -> NDArray:
        return self._binary("gt", other)

    def maximum(self, other: Any) -> NDArray:
        return self._binary("maximum", other)

    def log(self) -> NDArray:
        return self.ewise("log")

    def exp(self) -> NDArray:
        return self.ewise("exp")

    def tanh(self) -> NDArray:
        return self.ewise("tanh")

    def __matmul__(self, other: NDArray) -> NDArray:
        batch = np.broadcast_shapes(self._shape[:-2], other._shape[:-2])
        a = self.broadcast_to((*batch, *self._shape[-2:]))
        b = other.broadcast_to((*batch, *other._shape[-2:]))
        out = NDArray.empty((*batch, self._shape[-2], other._shape[-1]), self._dtype)
        call("matmul", [out], [a, b], 0, 0, 0)
        return out

    # -- reductions --------------------------------------------------------------------------------------------------

    def reduce(self, name: str, axes: Sequence[int], keepdims: bool) -> NDArray:
        """Reduction kernel `name` over `axes` (non-negative)."""
        kept = tuple(1 if d in axes else s for d, s in enumerate(self._shape))
        out = NDArray.empty(kept, self._dtype)
        call(name, [out], [self])
        return out if keepdims else out.reshape([s for d, s in enumerate(self._shape) if d not in axes])

    def _reduce_course(self, name: str, axis: int | Sequence[int] | None, keepdims: bool) -> NDArray:
        if axis is None:  # the course's rule: over everything gives shape (1,)
            out = self.reduce(name, range(self.ndim), True)
            return out if keepdims else out.reshape((1,))
        axes = [a % self.ndim for a in ((axis,) if isinstance(axis, int) else axis)]
        return self.reduce(name, axes, keepdims)

    def sum(self, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> NDArray:
        return self._reduce_course("sum", axis, keepdims)

    def max(self, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> NDArray:
        return self._reduce_course("max", axis, keepdims)

    def pad(self, axes: Sequence[tuple[int, int]], value: float = 0.0) -> NDArray:
        out = NDArray.empty([s + l + r for s, (l, r) in zip(self._shape, axes, strict=True)], self._dtype)
        out.fill(value)
        out[tuple(slice(l, l + s) for s, (l, _) in zip(self._shape, axes, strict=True))] = self
        return out


def resolve_shape(shape: Sequence[int], old: Sequence[int]) -> tuple[int, ...]:
    """`shape` with its -1 computed from `old`; raises when the sizes differ."""
    shape, total = tuple(int(s) for s in shape), math.prod(old)
    if shape.count(-1) == 1:
        known = reduce(operator.mul, (s for s in shape if s != -1), 1)
        if known and total % known == 0:
            shape = tuple(total // known if s == -1 else s for s in shape)
    if -1 in shape or math.prod(shape) != total:
        raise ValueError(f"[reshape] expects a shape of {total} elements, got {shape}.")
    return shape


def array(a: Any, dtype: str | None = None, device: Device | None = None) -> NDArray:
    return NDArray(a, device=device, dtype=dtype)


def empty(shape: Sequence[int], dtype: str = "float32", device: Device | None = None) -> NDArray:
    return NDArray.empty(shape, dtype)


def full(shape: Sequence[int], value: float, dtype: str = "float32", device: Device | None = None) -> NDArray:
    out = NDArray.empty(shape, dtype)
    out.fill(value)
    return out


def from_dlpack(x: Any) -> NDArray:
    """Zero-copy NDArray over any object with `__dlpack__` on the CPU."""
    return NDArray.wrap(_core.from_dlpack(x.__dlpack__()))

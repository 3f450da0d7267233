"""NDArray: a strided array of any dtype on a device; what users, autograd and DLPack see.

Views share their storage (`_handle`) and have numpy's strides, counted in elements. The executor's layouts never appear here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

import numpy as np

from needle import _core

from .device import DLPACK, Device, cpu, cpu_numpy
from .dtypes import dtype_name, dtype_of, itemsize, promote, promote_scalar
from .flat import Flat
from .kernels import DTYPES, KERNELS, PLACE, PLAIN, PLANNING, call, call_map, kernel_dtype
from .sizes import bounds
from .strides import (
    broadcast_shapes,
    broadcast_strides,
    contiguous_strides,
    flip_view,
    index_view,
    is_contiguous,
    is_permutation,
    reduced_shapes,
    reshaped_strides,
    resolve_shape,
)

CPU = cpu()
known_strides = contiguous_strides.known  # type: ignore[attr-defined] # of arrays in real memory, whose sizes are plain numbers


def unary(name: str) -> Callable[[NDArray], NDArray]:
    """A method: element-wise kernel `name` of an array."""
    return lambda self: self.ewise(name)


def binary(name: str, out: str = "") -> Callable[[NDArray, Any], NDArray]:
    """A method: element-wise kernel `name` of an array and another, or of it and a number by the kernel `<name>_scalar`."""
    return lambda self, other: self._binary(name, other, out)


class NDArray:
    """A strided array on a device; `NDArray(x)` copies numpy arrays, numbers, sequences and other NDArrays.

    dtype: a name, "float32", "float64", "int32", "int64" or "bool"; by default that of `other`, but float32 for
    float64. Others are kept in wider ones that hold all of their values. TypeError for what holds no numbers.
    """

    __slots__ = ("_device", "_dtype", "_offset", "_reference", "_shape", "_storage", "_strides")
    _shape: tuple[int, ...]
    _strides: tuple[int, ...]
    _offset: int
    _dtype: str
    _device: Device
    _storage: Any  # a Storage of the core, or a plan's Buffer; None until somebody asks for the handle
    _reference: Any  # the core's Array of this view; None until a kernel needs it
    __array_priority__ = 1000  # numpy arrays and scalars on the left leave the operation to us

    def __init__(self, other: Any, device: Device | None = None, dtype: Any = None) -> None:
        if isinstance(other, NDArray):
            self._init(other.astype(dtype or other._dtype, device))
            return
        wanted = dtype_of(other, dtype)
        dtype = "float32" if dtype is None and wanted == "float64" else wanted  # float64 is asked for by name
        data = np.ascontiguousarray(other, dtype=dtype).reshape(np.shape(other))
        self._init(NDArray.empty(data.shape, dtype, device))
        self._ref.store(data)

    def _init(self, other: NDArray) -> None:
        for slot in NDArray.__slots__:
            setattr(self, slot, getattr(other, slot))

    @classmethod
    def make(
        cls,
        shape: Sequence[int],
        strides: Sequence[int] | None = None,
        device: Device | None = None,
        handle: Any = None,
        offset: int = 0,
        dtype: str = "float32",
    ) -> Any:
        """A view of `handle`, or fresh uninitialised memory when there is none. Strides and offset count elements."""
        self = cls.__new__(cls)
        self._shape = shape = tuple(shape)
        self._strides = contiguous_strides(shape) if strides is None else tuple(strides)
        device = PLACE.device if device is None else device
        self._device = CPU if device is None or device is CPU else check_device(device)
        self._dtype, self._offset = dtype, offset
        self._storage, self._reference = handle, None
        if handle is None and PLANNING.builder is not None:
            self._storage = PLANNING.builder.buffer(math.prod(shape) * itemsize(dtype))
        elif handle is None:
            self._reference = self._device.core.empty(shape, dtype)
        return self

    @staticmethod
    def empty(shape: Sequence[int], dtype: str = "float32", device: Device | None = None) -> NDArray:
        if PLANNING.builder is None and (device is CPU or (device is None and PLACE.device is None)):
            return NDArray._of(_core.empty(shape, dtype), tuple(shape), dtype, CPU)
        return NDArray.make(shape, None, device, None, 0, dtype)

    @staticmethod
    def _of(ref: _core.Array, shape: tuple[int, ...], dtype: str, device: Device) -> NDArray:
        """An NDArray around a new array of the core."""
        self = NDArray.__new__(NDArray)
        self._shape, self._strides, self._offset = shape, known_strides(shape), 0
        self._device, self._dtype, self._storage, self._reference = device, dtype, None, ref
        return self

    @staticmethod
    def made(
        name: str,
        ins: Sequence[Any],
        dtype: str,
        to: tuple[int, ...],
        shape: tuple[int, ...],
        attrs: tuple[float, ...] = (),
    ) -> NDArray:
        """What kernel `name` writes to a new array of shape `to`, seen as one of `shape`; all inputs and `attributes`."""
        if PLANNING.builder is None:
            refs = [None if i is None else i._reference or i._ref for i in ins]
            device = ins[0]._device
            return NDArray._of(device.kernels[name].new(refs, dtype, attrs, to, shape), shape, dtype, device)
        out = NDArray.empty(to, dtype)
        kernel = KERNELS[name]
        call(name, [out], **dict(zip(kernel.inputs, ins, strict=True)), **dict(zip(kernel.attrs, attrs, strict=True)))
        return out if shape == to else out.reshape(shape)

    @staticmethod
    def wrap(ref: _core.Array, device: Device = CPU) -> NDArray:
        """An NDArray around an array that the core made."""
        self = NDArray.__new__(NDArray)
        self._shape, self._strides, self._offset = ref.shape, ref.strides, ref.offset
        self._device, self._dtype, self._storage, self._reference = device, ref.dtype, None, ref
        return self

    @property
    def _ref(self) -> _core.Array:
        if self._reference is None:
            self._reference = _core.Array(self._storage, self._shape, self._strides, self._offset, self._dtype)
        return self._reference

    @property
    def _handle(self) -> Any:
        if self._storage is None:
            self._storage = self._reference.storage
        return self._storage

    shape = property(attrgetter("_shape"), doc="A tuple of whole numbers.")
    strides = property(attrgetter("_strides"), doc="Elements, not bytes, from one to the next along each axis.")
    dtype = property(attrgetter("_dtype"), doc="Its name, such as 'float32'.")
    device = property(attrgetter("_device"), doc="Where the memory is.")
    ndim = property(lambda self: len(self._shape))
    size = property(lambda self: math.prod(self._shape))

    def __len__(self) -> int:
        if not self._shape:
            raise TypeError("[ndarray] an array without axes has no length.")
        return self._shape[0]

    def __bool__(self) -> bool:
        return bool(self.read())

    def __float__(self) -> float:
        return float(self.read().item())

    def __repr__(self) -> str:
        if PLANNING.builder is not None:
            return f"NDArray(shape={self._shape}, dtype={self._dtype})"
        return f"NDArray({self.numpy()}, device={self.device})"

    # -- conversions -------------------------------------------------------------------------------------------------

    def numpy_view(self) -> np.ndarray:
        """numpy array over the same memory, which has to be the CPU's."""
        return self._ref.numpy()

    def read(self) -> np.ndarray:
        """numpy array that is not for writing: over the same memory on the CPU, else a copy."""
        return self._ref.numpy(False)

    def numpy(self) -> np.ndarray:
        return self.read().copy() if self._device is CPU else self.read()

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.asarray(self.numpy(), dtype=dtype)

    def __dlpack__(self, *, stream: Any = None, **_: Any) -> Any:
        core = self._device.core
        hosts = self._device is not CPU and self.__dlpack_device__()[0] == 1  # the emulation's memory: read at once
        if hosts or (core.stream != (0 if stream in (None, 1) else stream) and stream != -1):
            core.sync()  # the other side works on another stream
        return self._ref.dlpack()

    def __dlpack_device__(self) -> tuple[int, int]:
        return next((kind for kind, device in DLPACK.items() if device is self._device), 1), 0

    def astype(self, dtype: Any, device: Device | None = None) -> NDArray:
        """A compact copy, on the array's device if none is given."""
        device, dtype = device or self._device, dtype_name(dtype)
        if device != self._device:
            return NDArray(self.as_dtype(dtype).read(), device, dtype)
        out = NDArray.empty(self._shape, dtype, device)
        call("copy", [out], x=self)
        return out

    def copy(self) -> NDArray:
        return self.astype(self._dtype)

    def as_dtype(self, dtype: str) -> NDArray:
        """A copy only where the dtype differs."""
        return self if self._dtype == dtype else self.astype(dtype)

    def fitted(self, shape: tuple[int, ...], dtype: str) -> NDArray:
        """As an operand of this shape and dtype."""
        x = self if self._dtype == dtype else self.astype(dtype)
        return x if x._shape == shape else x.broadcast_to(shape)

    def __deepcopy__(self, memo: Any) -> NDArray:
        return self.copy()

    def __reduce__(self) -> Any:
        raise TypeError(
            "[pickle] arrays and models of needle are not pickled; write a model with needle.save(net, path)."
        )

    # -- views -------------------------------------------------------------------------------------------------------

    def strided(self, shape: Sequence[int], strides: Sequence[int], offset: int | None = None) -> NDArray:
        """Elements of the same memory, by strides and an offset (None: this array's) in elements."""
        offset = self._offset if offset is None else offset
        return NDArray.make(shape, strides, self._device, self._handle, offset, self._dtype)

    def is_same_view(self, other: NDArray) -> bool:
        """True for a view of the same elements in the same order."""
        return self._handle is other._handle and (self._offset, self._shape, self._strides) == (
            other._offset,
            other._shape,
            other._strides,
        )

    def is_compact(self) -> bool:
        return self._strides is contiguous_strides(self._shape) or is_contiguous(self._shape, self._strides)

    def compact(self) -> NDArray:
        return self if self.is_compact() else self.copy()

    def reshape(self, shape: Sequence[int] | int) -> NDArray:
        """A view of a compact array; the result is compact."""
        shape = resolve_shape((shape,) if isinstance(shape, int) else shape, self._shape)
        return self.compact().strided(shape, contiguous_strides(shape))

    def viewed(self, shape: Sequence[int]) -> NDArray:
        """`reshape` that copies only where no strides show the elements in that shape; the result may be strided."""
        shape = resolve_shape(shape, self._shape)
        strides = reshaped_strides(self._shape, self._strides, shape)
        return self.reshape(shape) if strides is None else self.strided(shape, strides)

    def split_last(self, parts: int) -> NDArray:
        """(..., parts * n) as a view (..., parts, n), of any strides."""
        *shape, size = self._shape
        *strides, step = self._strides
        return self.strided([*shape, parts, size // parts], [*strides, size // parts * step, step])

    def permute(self, axes: Sequence[int]) -> NDArray:
        if not is_permutation(tuple(axes), len(self._shape)):
            raise ValueError(f"[permute] axes {tuple(axes)} are no permutation of the axes of shape {self._shape}.")
        return self.strided([self._shape[a] for a in axes], [self._strides[a] for a in axes])

    def broadcast_to(self, shape: Sequence[int]) -> NDArray:
        shape = tuple(shape)
        return self.strided(shape, broadcast_strides(self._shape, self._strides, shape))

    def flip(self, axes: Sequence[int] | int) -> NDArray:
        axes = (axes,) if isinstance(axes, int) else axes
        return self.strided(self._shape, *flip_view(self._shape, self._strides, self._offset, axes))

    def narrow(self, axis: int, start: int, size: int) -> NDArray:
        """`size` elements from `start` on along an axis."""
        shape = list(self._shape)
        shape[axis] = size
        return self.strided(shape, self._strides, self._offset + start * self._strides[axis] if size else self._offset)

    def process_slice(self, s: slice, dim: int) -> slice:
        """`s` with its start, stop and step written out for an axis."""
        return slice(*bounds(s, self._shape[dim]))

    def __getitem__(self, index: Any) -> NDArray:
        return self.strided(*index_view(self._shape, self._strides, self._offset, index))

    def __setitem__(self, index: Any, value: Any) -> None:
        target = self[index]
        if not isinstance(value, NDArray):
            if np.ndim(value) == 0 and not isinstance(value, int):
                call("fill", [target], value=float(value))
                return
            value = NDArray(value, self._device, self._dtype)
        source = value.broadcast_to(target._shape)
        overlaps = source._handle is target._handle and not source.is_same_view(target)
        call("copy", [target], x=source.copy() if overlaps else source)

    @property
    def flat(self) -> Any:
        """The elements in row-major order: writes go through."""
        return self.reshape((self.size,)) if self.is_compact() else Flat(self)

    def fill(self, value: float) -> None:
        call("fill", [self], value=float(value))

    # -- arithmetic --------------------------------------------------------------------------------------------------

    def ewise(
        self, name: str, others: Sequence[NDArray] = (), attrs: Iterable[float] = (), dtype: str = "", out: str = ""
    ) -> NDArray:
        """Element-wise kernel `name` over this array and `others`, broadcast together; `dtype`: of operands and result."""
        shape, same = self._shape, True
        for a in others:
            dtype = dtype or promote(self._dtype, a._dtype)
            same = same and a._shape == shape
        dtype = dtype or self._dtype
        if dtype not in DTYPES[name]:
            dtype = kernel_dtype(name, dtype)
        out = out or dtype
        if PLANNING.builder is None:
            ins = [a._reference or a._ref if a._dtype == dtype else a.astype(dtype)._ref for a in (self, *others)]
            ref = self._device.kernels[name].map(ins, out, attrs)
            return NDArray._of(ref, shape if same else ref.shape, out, self._device)
        result = NDArray.empty(broadcast_shapes(shape, *(a._shape for a in others)), out)
        call_map(name, result, [a.fitted(result._shape, dtype) for a in (self, *others)], attrs)
        return result

    def _binary(self, name: str, other: Any, out: str = "") -> NDArray:
        """With another array, or with a number by the kernel `<name>_scalar`."""
        if isinstance(other, NDArray):
            return self.ewise(name, (other,), (), "", out)
        if type(other) not in (float, int) and np.ndim(other):
            return self.ewise(name, (NDArray(other, self._device),), (), "", out)
        return self.ewise(f"{name}_scalar", (), (float(other),), promote_scalar(self._dtype, other), out)

    __add__ = __radd__ = binary("add")
    __mul__ = __rmul__ = binary("mul")
    __pow__, maximum = binary("power"), binary("maximum")
    __neg__, log, exp, tanh = (unary(name) for name in ("neg", "log", "exp", "tanh"))
    # Comparisons give 0 and 1 in float32, the course's only dtype.
    __eq__ = binary("eq", "float32")  # type: ignore[assignment]
    __ge__, __gt__ = binary("ge", "float32"), binary("gt", "float32")
    __le__, __lt__ = binary("le", "float32"), binary("lt", "float32")

    def __sub__(self, other: Any) -> NDArray:
        return self.ewise("sub", (other,)) if isinstance(other, NDArray) else self + (-np.asarray(other)[()])

    def __rsub__(self, other: Any) -> NDArray:
        return (-self) + other

    def __truediv__(self, other: Any) -> NDArray:
        return self._binary("div", other if isinstance(other, NDArray) else np.asarray(other, "float32")[()])

    def __rtruediv__(self, other: Any) -> NDArray:
        return self.ewise("rdiv_scalar", attrs=(float(other),))

    def __ne__(self, other: object) -> NDArray:  # type: ignore[override]
        return 1 - (self == other)

    def __matmul__(self, other: NDArray) -> NDArray:
        """(..., M, K) @ (..., K, N), leading axes broadcast."""
        if self.ndim < 2 or other.ndim < 2 or self._shape[-1] != other._shape[-2]:
            raise ValueError(f"[matmul] expects (..., M, K) and (..., K, N), got {self._shape} and {other._shape}.")
        dtype = promote(self._dtype, other._dtype)
        if dtype == "bool":
            raise ValueError("[matmul] operands expect numbers, got bools on both sides.")
        dtype = kernel_dtype("matmul", dtype)
        batch = self._shape[:-2]
        if batch != other._shape[:-2]:
            batch = broadcast_shapes(batch, other._shape[:-2])
        ins = [x.fitted((*batch, *x._shape[-2:]), dtype) for x in (self, other)]
        shape = (*batch, self._shape[-2], other._shape[-1])
        return NDArray.made("matmul", [*ins, None], dtype, shape, shape, PLAIN)

    # -- reductions --------------------------------------------------------------------------------------------------

    def reduce(self, name: str, axes: Sequence[int], keepdims: bool) -> NDArray:
        """Reduction kernel `name` over `axes` (non-negative)."""
        source = self.as_dtype(kernel_dtype(name, self._dtype))
        kept, left = reduced_shapes(self._shape, tuple(axes))
        return NDArray.made(name, [source], source._dtype, kept, kept if keepdims else left)

    def _reduce_course(self, name: str, axis: int | Sequence[int] | None, keepdims: bool) -> NDArray:
        if axis is None:  # the course's rule: over everything gives shape (1,)
            out = self.reduce(name, range(self.ndim), True)
            return out if keepdims else out.reshape((1,))
        axes = (axis,) if isinstance(axis, int) else tuple(axis)
        if any(not -self.ndim <= a < self.ndim for a in axes):
            raise ValueError(f"[{name}] axis {axis} is out of range for shape {self._shape}.")
        return self.reduce(name, [a % self.ndim for a in axes], keepdims)

    def sum(self, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> NDArray:
        return self._reduce_course("sum", axis, keepdims)

    def max(self, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> NDArray:
        return self._reduce_course("max", axis, keepdims)

    def pad(self, axes: Sequence[tuple[int, int]], value: float = 0.0) -> NDArray:
        out = NDArray.empty([s + l + r for s, (l, r) in zip(self._shape, axes, strict=True)], self._dtype, self._device)
        out.fill(value)
        out[tuple(slice(l, l + s) for s, (l, _) in zip(self._shape, axes, strict=True))] = self
        return out


def check_device(device: Device) -> Device:
    """`device`, if it holds NDArrays here."""
    if not isinstance(device, Device):
        raise TypeError(f"[ndarray] device expects one of needle's, such as needle.cpu(), got {device!r}.")
    device.require()
    if device == cpu_numpy():
        raise ValueError("[ndarray] arrays on cpu_numpy() are numpy arrays; make a Tensor on it instead.")
    return device


def array(a: Any, dtype: Any = None, device: Device | None = None) -> NDArray:
    return NDArray(a, device=device, dtype=dtype)

"""Arrays of other libraries, without importing any of them: in through `__dlpack__`, out through `from_dlpack`."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from .autograd import Tensor
from .backend_ndarray import NDArray, cpu, cpu_numpy, from_dlpack
from .backend_selection import default_device


def array_kind(x: Any) -> str:
    """needle, numpy, or the root package of the array's library."""
    if isinstance(x, Tensor):
        return "needle"
    return type(x).__module__.partition(".")[0]


def as_ndarray(x: Any) -> NDArray:
    """NDArray over `x`'s memory where that is possible, else over a copy. `x`: Tensor, numpy array, anything with DLPack."""
    if isinstance(x, Tensor):
        x = x.cached_data
    if isinstance(x, NDArray):
        return x
    x = np.asarray(x) if isinstance(x, np.generic) else x
    if isinstance(x, np.ndarray):
        if not x.flags.writeable or x.dtype.byteorder == ">":  # numpy exports only writeable memory of native order
            return NDArray(x.astype(x.dtype.newbyteorder("=")))
        return from_dlpack(x)
    if hasattr(x, "__dlpack__"):
        return from_dlpack(x.detach() if hasattr(x, "detach") else x)
    return NDArray(np.asarray(x, dtype="float32"))


def as_tensor(x: Any) -> Any:
    """A Tensor for arrays of any library; everything else (None, numbers, nested structures) as it is."""
    if isinstance(x, Tensor) or not (isinstance(x, NDArray | np.ndarray) or hasattr(x, "__dlpack__")):
        return x
    if default_device() == cpu_numpy():
        return Tensor.make_const(
            x.numpy() if isinstance(x, NDArray) else np.asarray(x.detach() if hasattr(x, "detach") else x)
        )
    return Tensor.make_const(as_ndarray(x))


def mirror(x: NDArray, kind: str) -> Any:
    """`x` as an array of library `kind` over the same memory."""
    if kind in ("needle", "builtins"):
        return Tensor.make_const(x)
    if kind == "numpy":
        return x.numpy_view() if x.device == cpu() else x.numpy()
    library = sys.modules.get(kind)
    if library is None or not hasattr(library, "from_dlpack"):
        return x
    return library.from_dlpack(x)

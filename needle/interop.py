"""Arrays of other libraries, without importing any of them: in through `__dlpack__`, out through `from_dlpack`."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from .autograd import Tensor
from .backend_ndarray import NDArray, cpu, cpu_numpy, from_dlpack
from .backend_ndarray.dtypes import KEPT, WIDER
from .backend_selection import default_device


def array_kind(x: Any) -> str:
    """needle, numpy, or the root package of the array's library."""
    if isinstance(x, Tensor):
        return "needle"
    return type(x).__module__.partition(".")[0]


def is_foreign_array(x: Any) -> bool:
    """Whether `as_ndarray` sees an array in it: a Tensor, numpy's, or one with DLPack."""
    return isinstance(x, Tensor | np.ndarray) or hasattr(x, "__dlpack__")


def as_ndarray(x: Any, copy: bool = True) -> NDArray:
    """NDArray over `x`'s memory where that is possible, else over a copy. `x`: Tensor, numpy array, anything with DLPack.

    dtypes without kernels are kept in wider ones that hold all of their values. copy=False: raise where that needs a copy.
    """
    if isinstance(x, Tensor):
        x = x.cached_data
    if isinstance(x, NDArray):
        return x
    if isinstance(x, np.generic):
        x = np.asarray(x)
    if not hasattr(x, "__dlpack__"):
        return NDArray(np.asarray(x, dtype="float32"))
    name = x.dtype.name if isinstance(x, np.ndarray) else str(getattr(x, "dtype", "float32")).rpartition(".")[2]
    if name not in (*KEPT, *WIDER, "bfloat16"):
        known = ", ".join((*KEPT, *WIDER))
        raise TypeError(f"[array] dtype expects one of {known}, got {name}.")
    over = isinstance(x, np.ndarray) and (not x.flags.writeable or not x.dtype.isnative)  # what numpy does not export
    if name in KEPT and not over:
        try:
            return from_dlpack(x.detach() if hasattr(x, "detach") else x)
        except (BufferError, ValueError, RuntimeError) as e:  # the other library's words on sparse or unmade arrays
            raise e if str(e).startswith("[") else TypeError(f"[array] expects a dense array in memory: {e}.") from e
    if not copy:
        raise TypeError(f"[array] dtype expects one of {', '.join(KEPT)} in native order, got {name}.")
    if name == "bfloat16":
        return from_dlpack(x.detach().float()) if hasattr(x, "float") else NDArray(np.asarray(x, "float32"))
    if not isinstance(x, np.ndarray):
        x = np.from_dlpack(x.detach().cpu() if hasattr(x, "detach") else x)
    return NDArray(x, dtype=WIDER.get(name, name))


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

"""Arrays of other libraries, without importing any of them: in through `__dlpack__`, out through `from_dlpack`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from .autograd import Tensor
from .backend_ndarray import NDArray, as_ndarray, cpu, cpu_numpy
from .backend_ndarray.functions import works_beside_torch
from .backend_selection import default_device
from .complex_numbers import Complex, is_complex, joined, parts
from .graph.structure import map_structure


def array_kind(x: Any) -> str:
    """needle, numpy, or the root package of the array's library."""
    if isinstance(x, Tensor):
        return "needle"
    return type(x).__module__.partition(".")[0]


def is_foreign_array(x: Any) -> bool:
    """Whether `as_ndarray` sees an array in it: a Tensor, numpy's, or one with DLPack."""
    return isinstance(x, Tensor | np.ndarray) or hasattr(x, "__dlpack__")


def as_tensor(x: Any) -> Any:
    """A Tensor for arrays of any library, or a Complex; everything else (None, numbers, nested structures) as it is."""
    if is_complex(x):
        return parts(x).map(as_tensor)
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
    if kind == "torch" and works_beside_torch(x.device):
        return library.from_dlpack(x._ref.dlpack())
    return library.from_dlpack(x)


def over_numpy(arrays: tuple) -> tuple[tuple, Callable[[list], list]]:
    """numpy's arrays over the memory of torch's tensors, without the way through DLPack, and what makes tensors of results;
    what numpy cannot stand for is left as it is."""
    torch = sys.modules.get("torch")
    if torch is None or not arrays or not isinstance(arrays[0], torch.Tensor):
        return arrays, list
    try:
        return tuple(a.numpy() for a in arrays), lambda results: [torch.from_numpy(r) for r in results]
    except (AttributeError, RuntimeError, TypeError):  # another device, dtype or library, or a gradient to keep
        return arrays, list


def mirrored(result: Any, kind: str) -> Any:
    """A result with arrays of library `kind` in the place of its Tensors."""
    return map_structure(
        result, lambda t: mirror(t.realize_cached_data(), kind) if isinstance(t, Tensor) else t, mirror_whole
    )


def mirror_whole(real: Any, imag: Any) -> Any:
    """Complex numbers from parts that are arrays of a library, or Tensors."""
    kind = array_kind(real)
    if isinstance(real, np.ndarray):
        return joined(real, imag)
    library = sys.modules.get(kind)
    if kind == "needle" or library is None or not hasattr(library, "from_dlpack"):
        return Complex(real, imag)
    return (
        library.complex(real, imag)
        if hasattr(library, "complex")
        else library.from_dlpack(joined(*map(np.asarray, (real, imag))))
    )


__all__ = ["array_kind", "as_ndarray", "as_tensor", "is_foreign_array", "mirror", "mirror_whole"]

"""Functions of arrays by numpy's names: what programs call on `needle.backend_selection.array_api`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from needle import _core

from .device import DLPACK, Device
from .dtypes import KEPT, WIDER
from .ndarray import NDArray


def method(name: str) -> Callable[..., NDArray]:
    """The function that calls this method of its first argument."""
    return lambda array, *args, **named: getattr(array, name)(*args, **named)


broadcast_to, reshape, flip = method("broadcast_to"), method("reshape"), method("flip")
maximum, log, exp, tanh = method("maximum"), method("log"), method("exp"), method("tanh")
sum, max = method("sum"), method("max")


def empty(shape: Sequence[int], dtype: str = "float32", device: Device | None = None) -> NDArray:
    return NDArray.empty(shape, dtype, device)


def full(shape: Sequence[int], value: float, dtype: str = "float32", device: Device | None = None) -> NDArray:
    out = NDArray.empty(shape, dtype, device)
    out.fill(value)
    return out


def works_beside_torch(device: Device) -> bool:
    """Whether torch works in the very stream that needle does: then an exchange needs none of the protocol's waiting, which takes
    torch some 20 us."""
    if device not in (DLPACK[2], DLPACK[10]):
        return False
    torch = sys.modules.get("torch")
    stream = getattr(getattr(torch, "_C", None), "_cuda_getCurrentRawStream", None)
    return stream is not None and stream(0) == device.core.stream


def is_negated(x: Any) -> bool:
    """Whether it is a torch tensor whose memory holds its values with the other sign, as the imaginary part of `z.conj()` is."""
    return hasattr(x, "is_neg") and bool(x.is_neg())


def from_dlpack(x: Any) -> NDArray:
    """Zero-copy NDArray over any object with `__dlpack__`, on the device where its memory is."""
    kind = int(x.__dlpack_device__()[0]) if hasattr(x, "__dlpack_device__") else 1
    device = DLPACK.get(kind)
    if device is None:
        raise ValueError(
            f"[from_dlpack] expects memory of {', '.join(map(str, DLPACK.values()))}, got device type {kind}."
        )
    device.require()
    if is_negated(x):
        raise ValueError(
            "[from_dlpack] expects memory of the values, got one with the other sign; call resolve_neg() first."
        )
    if kind == 1:
        return NDArray.wrap(_core.from_dlpack(x.__dlpack__(), device.core))
    if works_beside_torch(device) and type(x).__module__ == "torch" and x.get_device() == 0 and not x.requires_grad:
        return NDArray.wrap(_core.from_dlpack(sys.modules["torch"].utils.dlpack.to_dlpack(x), device.core), device)
    stream = device.core.stream or int(kind == 2)  # CUDA's default stream has the number 1 here, ROCm's 0
    return NDArray.wrap(_core.from_dlpack(x.__dlpack__(stream=stream), device.core), device)


def numpy_of(x: Any) -> np.ndarray:
    """The values of an array of any library and device, or of what numpy reads, for numpy; of bfloat16 in float32."""
    if hasattr(x, "detach"):
        x = x.detach()
        x = x.cpu() if hasattr(x, "cpu") else x
        x = x.float() if str(x.dtype).endswith("bfloat16") else x
    return np.asarray(x)


def as_ndarray(x: Any, copy: bool = True) -> NDArray:
    """NDArray over `x`'s memory where that is possible, else over a copy. `x`: Tensor, numpy array, anything with DLPack.

    dtypes without kernels are kept in wider ones that hold all of their values. copy=False: raise where that needs a copy.
    """
    x = getattr(x, "cached_data", x)  # a Tensor's
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
    if copy and is_negated(x):
        x = x.resolve_neg()
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

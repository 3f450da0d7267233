from .ndarray import (
    Device,
    NDArray,
    array,
    call,
    cpu,
    cpu_numpy,
    cuda,
    default_device,
    empty,
    from_dlpack,
    full,
    hip,
)

__all__ = [
    "Device",
    "NDArray",
    "array",
    "call",
    "cpu",
    "cpu_numpy",
    "cuda",
    "default_device",
    "empty",
    "from_dlpack",
    "full",
    "hip",
]

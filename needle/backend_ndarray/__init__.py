from .device import Device, cpu, cpu_numpy, cuda, default_device, hip
from .ndarray import NDArray, array, call, empty, from_dlpack, full

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

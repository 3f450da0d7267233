from .device import Device, all_devices, cpu, cpu_numpy, cuda, default_device, hip
from .dtypes import FLOATS, dtype_name, dtype_of, promote, promote_scalar
from .ndarray import NDArray, array, call, empty, from_dlpack, full

__all__ = [
    "FLOATS",
    "Device",
    "NDArray",
    "all_devices",
    "array",
    "call",
    "cpu",
    "cpu_numpy",
    "cuda",
    "default_device",
    "dtype_name",
    "dtype_of",
    "empty",
    "from_dlpack",
    "full",
    "hip",
    "promote",
    "promote_scalar",
]

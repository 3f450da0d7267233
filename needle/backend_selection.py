"""`NEEDLE_BACKEND` picks the default device and array class: nd (our kernels), np (numpy), nd on a GPU (cuda, hip, emulation).

`NEEDLE_NUM_THREADS`, which the core reads, is checked here, too.
"""

from __future__ import annotations

import os

import numpy as np

from . import backend_ndarray as nd
from .backend_ndarray import Device, all_devices, cpu, cpu_numpy, cuda, emulation, hip

BACKEND = os.environ.get("NEEDLE_BACKEND", "nd")
_DEFAULTS = {"nd": cpu, "np": cpu_numpy, "cuda": cuda, "hip": hip, "emulation": emulation}
if BACKEND not in _DEFAULTS:
    raise RuntimeError(f"Unknown needle array backend {BACKEND}")
_THREADS = os.environ.get("NEEDLE_NUM_THREADS", "").strip()
if _THREADS and not (_THREADS.isascii() and _THREADS.isdigit() and int(_THREADS) > 0):
    raise RuntimeError(f"[needle] NEEDLE_NUM_THREADS expects a whole number of at least 1, got {_THREADS}.")

array_api = np if BACKEND == "np" else nd  # what course programs compute with in their own ops
NDArray = array_api.ndarray if BACKEND == "np" else nd.NDArray


def default_device() -> Device:
    """Where new tensors lie: the CPU, or what NEEDLE_BACKEND names (nd, np, cuda, hip)."""
    return _DEFAULTS[BACKEND]()


__all__ = [
    "BACKEND",
    "Device",
    "NDArray",
    "all_devices",
    "array_api",
    "cpu",
    "cpu_numpy",
    "cuda",
    "default_device",
    "emulation",
    "hip",
]

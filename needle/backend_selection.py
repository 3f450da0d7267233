"""`NEEDLE_BACKEND` picks the default device: nd (our kernels), np (numpy) or hip."""

from __future__ import annotations

import os

from . import backend_ndarray as nd

BACKEND = os.environ.get("NEEDLE_BACKEND", "nd")
if BACKEND not in ("nd", "np", "hip"):
    raise RuntimeError(f"Unknown needle array backend {BACKEND}")

_DEFAULTS = {"nd": nd.cpu, "np": nd.cpu_numpy, "hip": nd.hip}


def default_device() -> nd.Device:
    return _DEFAULTS[BACKEND]()

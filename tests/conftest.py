"""Fixtures: a fixed random stream for every test, a resting collector for those that count live tensors, scripts' environment."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from gpu_devices import PRESENT, gpu_device

# Tests of kernels are about needle's own; tests/test_gpu_vendor.py asks for vendors' libraries.
os.environ.setdefault("NEEDLE_GPU_VENDOR", "off")


@pytest.fixture(autouse=True)
def seed() -> None:
    np.random.seed(0)


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What earlier tests left is gone, and what a test makes must go without Python's search for cycles."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def script_environment() -> dict[str, str]:
    """For subprocesses of profiling's scripts: its modules are importable under PYTHONSAFEPATH, too, as they are here."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


@pytest.fixture(scope="module", params=PRESENT)
def gpu(request: pytest.FixtureRequest) -> Any:
    """Every GPU device that is here. Each array has memory of exactly its size, so that reading beyond its end shows."""
    device = gpu_device(request.param)
    device.limit_cache(0)
    yield device
    device.limit_cache(None)

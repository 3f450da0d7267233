"""GPU devices for tests: the emulation at both wave widths on any machine, and hardware where there is some."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import needle as ndl
from needle.backend_ndarray import Device

DEVICES = {d.name: d for d in (ndl.emulation(32), ndl.emulation(64), ndl.cuda(), ndl.hip())}
DRIVERS = {"cuda": "/dev/nvidiactl", "hip": "/dev/kfd"}  # files that are there when a driver is
PRESENT = [name for name in DEVICES if name not in DRIVERS or Path(DRIVERS[name]).exists()]


def gpu_device(name: str) -> Device:
    """The device, its library built; skips the test where there is no such hardware."""
    from test_gpu import build

    if name not in PRESENT:
        pytest.skip(f"this machine has no {name} device")
    if not DEVICES[name].enabled():
        folder = name.partition("_")[0]
        os.environ["NEEDLE_GPU_LIBRARIES"] = str(build(folder, f"-DNEEDLE_{folder.upper()}=ON"))
        DEVICES[name].require()
    return DEVICES[name]

"""GPU devices for tests: the emulation at both wave widths on any machine, and hardware where there is some.

`everywhere` marks a test of models or fusion: it runs on the default device, on cuda and on hip, each being the default one
meanwhile. One that is `emulated`, too, is small enough for the emulation; `pytest --emulate` takes all of them there.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

import needle as ndl
from needle import _core
from needle.backend_ndarray import Device
from needle.backend_selection import BACKEND
from needle.facts import library_folders

DEVICES = {d.name: d for d in (ndl.emulation(32), ndl.emulation(64), ndl.cuda(), ndl.hip())}
DRIVERS = {"cuda": "/dev/nvidiactl", "hip": "/dev/kfd"}  # files that are there when a driver is
ASKED = os.environ.get("NEEDLE_TEST_DEVICES", "").split(",")  # whose tests are collected also where they cannot run
PRESENT = [name for name in DEVICES if name not in DRIVERS or name in ASKED or Path(DRIVERS[name]).exists()]
ABSENT = [name for name in DEVICES if name not in PRESENT]
LIBRARIES: dict[str, Path] = {}  # by device, of those that are open
MODEL_DEVICES = ["cpu", *DEVICES] if BACKEND == "nd" else ["cpu"]  # another backend has one device
everywhere = pytest.mark.usefixtures("anywhere")
emulated = pytest.mark.emulated


def parameters(names: Iterable[str]) -> list[str]:
    """Names of devices as parameters of a fixture: for one that is not here no tests are made, which the end of a run says."""
    return [name for name in names if name not in ABSENT]


def find_libraries() -> None:
    """Opens what lies where needle looks now: the environment variable names one folder, builds have one each."""
    for name in PRESENT:
        if name not in LIBRARIES and DEVICES[name].enabled():
            places = (folder / f"libneedle_{name}.so" for folder in library_folders(_core.__file__))
            LIBRARIES[name] = next(path for path in places if path.exists())


def gpu_device(name: str) -> Device:
    """The device, its library built; skips the test where there is no such hardware."""
    from test_gpu import build

    if name not in PRESENT:
        pytest.skip(f"this machine has no {name} device")
    find_libraries()
    if name not in LIBRARIES:
        folder = name.partition("_")[0]
        os.environ["NEEDLE_GPU_LIBRARIES"] = str(build(folder, f"-DNEEDLE_{folder.upper()}=ON"))
        DEVICES[name].require()
        find_libraries()
    return DEVICES[name]


def gpu_library(name: str) -> Path:
    """The file of the device's library."""
    gpu_device(name)
    return LIBRARIES[name]


def ours(x: Any) -> ndl.Tensor:
    """A torch tensor of the CPU on the default device."""
    return ndl.Tensor(x.numpy(), dtype=str(x.dtype)[6:], requires_grad=False)


def compiles() -> bool:
    """Whether `compile` takes models on the present default device."""
    return ndl.default_device() != ndl.cpu_numpy()


def need_executor() -> None:
    if not compiles():
        pytest.skip(f"there is no executor for {ndl.default_device()}")

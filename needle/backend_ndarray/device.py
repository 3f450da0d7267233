"""Devices: where arrays live."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import needle.backend_numpy as backend_numpy

from . import course


class Device:
    """A place for arrays. Devices are equal by name; `enabled()` is False where the hardware is missing.

    Other attributes are those of the backend module: `device.Array(size)`, `device.ewise_add(a, b, out)`, ...
    """

    def __init__(self, name: str, module: ModuleType | None) -> None:
        self.name, self.module = name, module

    def __repr__(self) -> str:
        return f"{self.name}()"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __getattr__(self, name: str) -> Any:
        module = self.__dict__.get("module")
        if module is None or not hasattr(module, name):
            place = "this machine or build has no such device" if module is None else f"there is no function {name}"
            raise AttributeError(f"[{self.__dict__.get('name')}] {place}.")
        return getattr(module, name)

    def __reduce__(self) -> Any:
        return _named, (self.name,)

    def enabled(self) -> bool:
        return self.module is not None

    def require(self) -> None:
        if self.module is None:
            raise RuntimeError(f"[{self.name}] this machine or build has no such device.")


_CPU, _CUDA, _HIP = Device("cpu", course), Device("cuda", None), Device("hip", None)
_NUMPY = Device("cpu_numpy", backend_numpy)


def _named(name: str) -> Device:
    return next(d for d in all_devices() if d.name == name)


def cpu() -> Device:
    return _CPU


def cuda() -> Device:
    return _CUDA


def hip() -> Device:
    return _HIP


def cpu_numpy() -> Device:
    """numpy arrays computed by each op's `reference`: the oracle, also in float64."""
    return _NUMPY


def all_devices() -> list[Device]:
    return [_CPU, _CUDA, _HIP, _NUMPY]


def default_device() -> Device:
    return _CPU

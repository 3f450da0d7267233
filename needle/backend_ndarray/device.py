"""Devices: where arrays live."""

from __future__ import annotations


class Device:
    """A place for arrays. Devices are equal by name; `enabled()` is False where the hardware is missing."""

    def __init__(self, name: str, available: bool) -> None:
        self.name, self._available = name, available

    def __repr__(self) -> str:
        return f"{self.name}()"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)

    def enabled(self) -> bool:
        return self._available

    def require(self) -> None:
        if not self._available:
            raise RuntimeError(f"[{self.name}] this machine or build has no such device.")


_CPU, _CUDA, _HIP = Device("cpu", True), Device("cuda", False), Device("hip", False)
_NUMPY = Device("cpu_numpy", True)


def cpu() -> Device:
    return _CPU


def cuda() -> Device:
    return _CUDA


def hip() -> Device:
    return _HIP


def cpu_numpy() -> Device:
    """numpy arrays computed by each op's `reference`: the oracle, also in float64."""
    return _NUMPY


def default_device() -> Device:
    return _CPU

"""Devices: where arrays live. GPUs come from libraries, which are looked for and opened at first use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from needle import _core, backend_numpy
from needle.course.backend import Course
from needle.facts import FOLDER, library_folders

from .vendor import Vendors

NoKernel = _core.NoKernel  # a device has no kernel of a name, or not for a dtype


class Kernels(dict):
    """A device's kernels by name."""

    def __init__(self, core: Any) -> None:
        super().__init__(core.kernels())
        self.device = core.name

    def __missing__(self, name: str) -> Any:
        known = ", ".join(sorted(self)) or "none"
        raise NoKernel(f"[{name}] there is no such kernel on {self.device}(), which has {known}.")


class Device:
    """A place for arrays. Devices are equal by name; `enabled()` is False where the hardware is missing.

    Other attributes are those of the backend module: `device.Array(size)`, `device.ewise_add(a, b, out)`, ...
    """

    core: Any = None  # the core's device; None for cpu_numpy() and for what is not open
    target = ""  # whose plans run on it (needle/targets), "" for none
    kernels: dict[str, Any]

    def __init__(self, name: str, module: Any = None, core: Any = None) -> None:
        self.name, self.module, self.kernels = name, module, {}
        if core is not None:
            self._use(core)

    def _use(self, core: Any) -> None:
        self.core, self.kernels = core, Kernels(core)
        self.module = Course(core, self.kernels)

    def __repr__(self) -> str:
        return f"{self.name}()"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in ("__device_name__", "__tile_size__"):
            raise AttributeError(name)  # what copy and pickle ask for opens no library
        why = self.missing()
        if why is None and hasattr(self.module, name):
            return getattr(self.module, name)
        raise AttributeError(why or f"[{self.name}] there is no function {name}.")

    def __reduce__(self) -> Any:
        return device_named, (self.name,)

    def missing(self) -> str | None:
        """Why the device cannot be used, in one sentence; None when it can."""
        return None if self.module is not None else f"[{self.name}] this machine or build has no such device."

    def enabled(self) -> bool:
        return self.missing() is None

    def require(self) -> None:
        why = self.missing()
        if why is not None:
            raise RuntimeError(why)


class GpuDevice(Device):
    """A device whose kernels and memory come from libneedle_<name>.so."""

    target = "gpu"
    _vendors: Vendors

    def missing(self) -> str | None:
        if self.module is not None:
            return None
        why = f"[{self.name}] this machine or build has no such device"
        file = f"libneedle_{self.name}.so"
        path = next((p for p in (folder / file for folder in library_folders(_core.__file__)) if p.exists()), None)
        if path is None:
            return f"{why}: {file} is neither beside needle nor in the folder of {FOLDER}."
        try:
            core = _core.open(str(path))
        except RuntimeError as e:
            return f"{why}: {e}"
        if core.name != self.name:
            return f"{why}: {path} is a library of {core.name}()."
        missing = core.missing()
        if missing is not None:
            return f"{why}: {missing}."
        self._vendors = Vendors(str(path))
        self._use(core)
        return None

    def _opened(self) -> Any:
        self.require()
        return self.core

    def properties(self) -> dict[str, Any]:
        """Name, warp (lanes), units (multiprocessors) and memory (bytes, 0 if unknown)."""
        return self._opened().properties()

    def memory(self) -> dict[str, int]:
        """Bytes in use, cached and at the peak; how many arrays took new memory and how many a freed block."""
        return self._opened().memory()

    def release_memory(self) -> None:
        """Give freed memory, which is kept for later arrays, back to the device."""
        self._opened().release_memory()

    def limit_cache(self, nbytes: int | None) -> None:
        """How much freed memory to keep; None: all of it. With 0 every array has memory of exactly its size for itself."""
        self._opened().limit_cache(2**64 - 1 if nbytes is None else nbytes)

    def vendors(self) -> dict[str, Any]:
        """`mode` (auto, on, off) and `libraries`: name, whether open, and version and place or why not."""
        self.require()
        return {key: value for key, value in self._vendors.report().items() if key != "choices"}

    def use_vendors(self, mode: str | None) -> None:
        """Vendors' libraries where they are faster (auto), wherever they can (on) or never (off); None: as NEEDLE_GPU_VENDOR
        says. Earlier choices are forgotten."""
        self.require()
        self._vendors.use(mode)

    def choices(self) -> list[dict[str, Any]]:
        """Products and convolutions met so far: shapes, `taken` (a library's name or "needle"), microseconds, and `why`."""
        self.require()
        return list(self._vendors.report()["choices"])

    def synchronize(self) -> None:
        """Wait until everything that was started is done."""
        self._opened().sync()

    @contextmanager
    def stream(self, handle: int) -> Iterator[None]:
        """Work on another stream (its address), such as torch's, instead of the device's default one."""
        core = self._opened()
        before, core.stream = core.stream, handle
        try:
            yield
        finally:
            core.stream = before


_CPU = Device("cpu", None, _core.cpu())
_CPU.target = "cpu"
_CUDA, _HIP = GpuDevice("cuda"), GpuDevice("hip")
_EMULATED = {wave: GpuDevice(f"emulation_w{wave}") for wave in (32, 64)}
_NUMPY = Device("cpu_numpy", backend_numpy.FUNCTIONS)
DLPACK = {1: _CPU, 2: _CUDA, 10: _HIP}  # device types of the exchange format


def device_named(name: str) -> Device:
    return next(d for d in (*all_devices(), *_EMULATED.values()) if d.name == name)


def cpu() -> Device:
    """The CPU, with the kernels of the best instruction set that it has (`needle.isa()`)."""
    return _CPU


def cuda() -> Device:
    """The first NVIDIA GPU. The call needs none; the first use says in a RuntimeError what is missing."""
    return _CUDA


def hip() -> Device:
    """The first AMD GPU under ROCm. The call needs none; the first use says in a RuntimeError what is missing."""
    return _HIP


def emulation(wave: int = 32) -> Device:
    """The GPU kernels run on the host with `wave` (32 or 64) lanes, slowly: for tests on machines without a GPU."""
    if wave not in _EMULATED:
        raise ValueError(f"[emulation] wave expects 32 or 64, got {wave}.")
    return _EMULATED[wave]


def cpu_numpy() -> Device:
    """numpy arrays computed by each op's `reference`: the oracle, also in float64."""
    return _NUMPY


def all_devices() -> list[Device]:
    """CPU, CUDA, HIP and numpy; `device.enabled()` says which of them can be used here."""
    return [_CPU, _CUDA, _HIP, _NUMPY]


def default_device() -> Device:
    return _CPU

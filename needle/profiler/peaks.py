"""What this machine can do at most: floating-point operations per second, and bytes per second from each level of memory."""

from __future__ import annotations

import functools
import math
import time
from pathlib import Path
from typing import Any, NamedTuple

from needle import _core
from needle.backend_ndarray import Device, default_device
from needle.backend_ndarray.device import GpuDevice
from needle.backend_ndarray.kernels import KERNELS
from needle.backend_ndarray.ndarray import NDArray, call
from needle.executor.builder import Builder
from needle.executor.constants import ConstantPool
from needle.facts import cpu_name

KIB = 1024
CACHED = tuple(16 * KIB * 4**i for i in range(7))  # bytes of source and copy together, 16 KiB to 64 MiB
LEAST = 4 * KIB**2  # bytes moved in one timed run, so that entering the plan does not count
UNKNOWN_L3 = 32 * KIB**2  # where the system does not tell


class Peaks(NamedTuple):
    """Peak rates for `threads` threads. `cached`: (bytes of source and copy, bytes per second), the largest last."""

    flops: float
    cached: tuple[tuple[int, float], ...]
    cpu: str
    isa: str
    threads: int

    @property
    def bandwidth(self) -> float:
        """Bytes per second of a copy much larger than the caches."""
        return self.cached[-1][1]

    def seconds(self, flops: float, nbytes: float) -> float:
        """The least time of a step: its operations at the FMA peak, or its bytes from the smallest memory that holds them."""
        rate = self.cached[0][1]
        for size, value in self.cached:
            rate = value if nbytes >= size else rate
        return max(flops / self.flops, nbytes / rate)

    def to_dict(self) -> dict[str, Any]:
        return {
            "cpu": self.cpu,
            "isa": self.isa,
            "threads": self.threads,
            "peak_gflops": self.flops / 1e9,
            "bandwidth_gbs": self.bandwidth / 1e9,
            "cache_gbs": self.cached[0][1] / 1e9,
            "copies": [{"bytes": size, "gbs": rate / 1e9} for size, rate in self.cached],
        }

    def __str__(self) -> str:
        rates = f"peak {self.flops / 1e9:.0f} GF/s, {self.bandwidth / 1e9:.1f} GB/s from memory"
        return f"{self.cpu}, {self.isa}, {self.threads} threads: {rates}, {self.cached[0][1] / 1e9:.0f} GB/s from cache"


class Gpu(NamedTuple):
    """A GPU, whose peaks are not measured: its profiles have times and rates, but no share of a peak."""

    device: str
    name: str
    units: int

    def seconds(self, flops: float, nbytes: float) -> None:
        return None

    def to_dict(self) -> dict[str, Any]:
        return self._asdict()

    def __str__(self) -> str:
        return f"{self.name}, {self.device}, {self.units} units: its peaks are not measured"


def last_cache_bytes() -> int:
    try:
        text = Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text().strip()
        return int(text.removesuffix("K")) * KIB
    except (OSError, ValueError):
        return UNKNOWN_L3


def fma_peak(tries: int = 15, iterations: int = 300_000) -> float:
    """Operations per second of one core: the best of a few loops of independent FMAs, each about 2 ms."""
    out, best = NDArray.empty((2,)), 0.0
    for _ in range(tries):
        start = time.perf_counter()
        KERNELS["fma_peak"]([out._ref], [], [float(iterations)])
        best = max(best, float(out.numpy()[1]) / (time.perf_counter() - start))
    return best


def stream_rate(nbytes: int, tries: int, kernel: str = "copy", in_place: bool = False) -> float:
    """Bytes read and written per second by a kernel that touches `nbytes`, planned so that nothing but the kernel runs."""
    builder = Builder(ConstantPool(), default_device())
    repeats = max(1, LEAST // nbytes)
    with builder.active():
        source = NDArray.empty((nbytes // 8,))
        target = source if in_place else NDArray.empty((nbytes // 8,))
        for _ in range(repeats):
            call(kernel, [target], x=source)
    plan, best = builder.finish([], [], verify=False).core, 0.0
    for _ in range(tries):
        start = time.perf_counter()
        plan.run([], [])
        best = max(best, repeats * nbytes / (time.perf_counter() - start))
    return best


@functools.cache
def copy_rates(threads: int) -> tuple[tuple[int, float], ...]:
    """Rates by size, once per process and number of threads; the last is a copy of 8 times the last cache.

    From caches an element-wise op in place is faster than a copy, and the faster of the two counts.
    """
    rates = []
    for size in CACHED:
        tries = 40 if size < CACHED[-2] else 6
        rates.append(max(stream_rate(size, tries), stream_rate(size, tries, "relu", in_place=True)))
    sizes = [*CACHED, max(8 * last_cache_bytes(), 4 * CACHED[-1])]
    rates.append(stream_rate(sizes[-1], tries=4))
    # Less memory is never slower than more, except by noise.
    return tuple((s, max(rates[i:])) for i, s in enumerate(sizes))


def peaks_of(device: Device) -> Peaks | Gpu:
    """What stands at the top of a profile on `device`, and what its times are compared with."""
    if not isinstance(device, GpuDevice):
        return measure_peaks()
    facts = device.properties()
    return Gpu(repr(device), facts["name"], facts["units"])


def measure_peaks() -> Peaks:
    """The peaks of this process with its present number of threads; the operations are measured anew at every call."""
    threads = _core.num_threads()
    rates = copy_rates(threads)
    peak = threads * fma_peak()
    if not math.isfinite(peak) or peak <= 0:
        raise RuntimeError(f"[profile] the FMA peak cannot be measured, got {peak}.")
    return Peaks(peak, rates, cpu_name(), _core.isa(), threads)

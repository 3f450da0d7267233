"""Calls of kernels, which run at once or become steps of a plan."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from .device import Device, cpu

if TYPE_CHECKING:
    from .ndarray import NDArray

KERNELS = cpu().kernels
DTYPES = {name: frozenset(row.dtypes) for name, row in KERNELS.items()}
# How often an op ran as its decomposition because the device has no kernel for it: (device, op) -> times.
DECOMPOSED: Counter[tuple[str, str]] = Counter()


class _Planning(threading.local):
    """While `builder` is set on a thread, memory is virtual and kernel calls become steps of the builder's plan."""

    builder: Any = None


class _Place(threading.local):
    """The device on which an op of this thread makes its results, None for the CPU."""

    device: Device | None = None


PLANNING, PLACE = _Planning(), _Place()


@contextmanager
def on_device(device: Device | None) -> Iterator[None]:
    """Arrays made inside without a device are made on this one."""
    before, PLACE.device = PLACE.device, device
    try:
        yield
    finally:
        PLACE.device = before


def call(name: str, outs: Sequence[NDArray], ins: Sequence[NDArray], *attrs: float) -> None:
    """Run kernel `name` of the table of the arrays' device, or plan its run; attributes in the order of its row."""
    if PLANNING.builder is not None:
        PLANNING.builder.call(name, outs, ins, attrs)
        return
    kernel = outs[0]._device.kernels[name]
    kernel([o._reference or o._ref for o in outs], [i._reference or i._ref for i in ins], attrs)


def kernel_dtype(name: str, dtype: str) -> str:
    """dtype in which kernel `name` takes arrays of `dtype`: integers are float32 to functions of real numbers."""
    known = DTYPES[name]
    return dtype if dtype in known else "int64" if "int64" in known else "float32"

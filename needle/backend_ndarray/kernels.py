"""Calls of kernels, which run at once or become steps of a plan."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from .device import Device, cpu
from .dtypes import FLOATS

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


@contextmanager
def unplanned() -> Iterator[None]:
    """Kernels called inside run at once, on the CPU, whatever is being planned."""
    before, PLANNING.builder = PLANNING.builder, None
    try:
        with on_device(None):
            yield
    finally:
        PLANNING.builder = before


def call(name: str, outs: Sequence[NDArray], /, **named: Any) -> None:
    """Run kernel `name` of the table of the arrays' device, or plan its run; inputs and attributes by the names of its row.

    An optional input may be None.
    """
    if PLANNING.builder is None:
        outs[0]._device.kernels[name].call(outs, named)
    else:
        PLANNING.builder.call(name, outs, named)


def call_groups(name: str, outs: Sequence[NDArray], ins: Sequence[NDArray], **attrs: float) -> None:
    """A kernel of GROUPS at once: outputs and inputs of one group after the other."""
    refs = ([a._reference or a._ref for a in arrays] for arrays in (outs, ins))
    outs[0]._device.kernels[name](*refs, attributes(name, **attrs))


def call_map(name: str, out: NDArray, ins: Sequence[NDArray], attrs: Iterable[float] = ()) -> None:
    """An element-wise kernel, whose operands and attributes have an order that everyone knows."""
    if PLANNING.builder is None:
        refs = [i._reference or i._ref for i in ins]
        out._device.kernels[name]([out._reference or out._ref], refs, tuple(attrs))
        return
    kernel = KERNELS[name]
    named = dict(zip(kernel.inputs, ins, strict=True)) | dict(zip(kernel.attrs, attrs, strict=True))
    PLANNING.builder.call(name, [out], named)


def attributes(name: str, **named: float) -> tuple[float, ...]:
    """Attributes of kernel `name` in the order of its row, for what calls it often."""
    wanted = KERNELS[name].attrs
    if named.keys() != set(wanted):
        raise ValueError(f"[{name}] expects the attributes {', '.join(wanted)}, got {', '.join(named)}.")
    return tuple(named[a] for a in wanted)


PLAIN = attributes("matmul", activation=0, alpha=0)  # a product and nothing after it


def kernel_dtype(name: str, dtype: str) -> str:
    """dtype in which kernel `name` takes arrays of `dtype`: integers are float32 to functions of real numbers, and so is a
    float that it lacks.
    """
    known = DTYPES[name]
    return dtype if dtype in known else "int64" if "int64" in known and dtype not in FLOATS else "float32"

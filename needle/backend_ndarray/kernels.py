"""Calls of kernels, which run at once or become steps of a plan."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .course import KERNELS

if TYPE_CHECKING:
    from .ndarray import NDArray

DTYPES = {name: frozenset(row.dtypes) for name, row in KERNELS.items()}


class _Planning(threading.local):
    """While `builder` is set on a thread, memory is virtual and kernel calls become steps of the builder's plan."""

    builder: Any = None


PLANNING = _Planning()


def call(name: str, outs: Sequence[NDArray], ins: Sequence[NDArray], *attrs: float) -> None:
    """Run kernel `name` of the CPU table, or plan its run; attributes in the order of its row."""
    if PLANNING.builder is not None:
        PLANNING.builder.call(name, outs, ins, attrs)
        return
    KERNELS[name]([o._reference or o._ref for o in outs], [i._reference or i._ref for i in ins], attrs)


def kernel_dtype(name: str, dtype: str) -> str:
    """dtype in which kernel `name` takes arrays of `dtype`: integers are float32 to functions of real numbers."""
    known = DTYPES[name]
    return dtype if dtype in known else "int64" if "int64" in known else "float32"

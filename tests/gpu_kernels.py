"""Runs GPU kernels on numpy arrays of any strides and compares results; shared by the tests of kernel families."""

from __future__ import annotations

import ctypes as c
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from needle.ops.nn.pool import AdaptiveAvgPool2dGrad, AvgPool2d, AvgPool2dGrad, MaxPool2d, MaxPool2dGrad
from needle.ops.nn.spatial import window_attributes
from test_gpu import SCRATCH, Backend, Call, Exec, View, normal

DTYPES = ["float32", "float64", "int32", "int64", "bool"]
FLOATS = {"float32": 5e-6, "float64": 1e-14}  # and what their results may be off, of the largest


def run(backend: Backend, name: str, outs: list[np.ndarray], ins: list[np.ndarray], **named: Any) -> None:
    """Runs a kernel on copies in device memory; every array keeps its strides, and what lies between its elements.

    ins: the row's first inputs in its order; others and attributes by name.
    """
    held = []
    row = backend.rows[name]
    inputs = [text.decode().partition(":")[0] for text in row.inputs.split()]
    given = dict(zip((n.removesuffix("?") for n in inputs), ins, strict=False)) | named
    arrays = [given.pop(n.removesuffix("?"), None) if n.endswith("?") else given.pop(n) for n in inputs]
    attrs = [float(given.pop(n.decode())) for n in row.attrs.split()]
    assert not given and len(outs) == len(row.outputs.split())

    def view(a: np.ndarray | None) -> View:
        if a is None:
            return View(rank=-1)
        low = sum(min(0, (n - 1) * s) for n, s in zip(a.shape, a.strides, strict=True))
        high = sum(max(0, (n - 1) * s) for n, s in zip(a.shape, a.strides, strict=True))
        span = high - low + a.itemsize if a.size else 0
        p = backend.table.alloc(span)
        assert p, "out of device memory"
        backend.table.copy(p, a.ctypes.data + low, span, None)
        held.append((p, a.ctypes.data + low, span))
        strides = [s // a.itemsize for s in a.strides]
        return View(p - low, (c.c_int64 * 8)(*a.shape), (c.c_int64 * 8)(*strides), a.ndim, DTYPES.index(str(a.dtype)))

    out_views, in_views = (View * len(outs))(*map(view, outs)), (View * len(arrays))(*map(view, arrays))
    slots: dict[int, tuple[int, int]] = {}

    def scratch(slot: int, nbytes: int) -> int:
        if slot in slots:
            backend.table.free(*slots[slot])
        slots[slot] = (backend.table.alloc(nbytes), nbytes)
        return slots[slot][0]

    executor = Exec(1, None, SCRATCH(scratch), None)
    row.run(Call(out_views, in_views, (c.c_double * len(attrs))(*attrs), len(outs), len(arrays), c.pointer(executor)))
    backend.table.sync(None)
    for p, home, span in held[: len(outs)]:
        backend.table.copy(home, p, span, None)
    backend.table.sync(None)
    for p, span in [(p, span) for p, _, span in held] + list(slots.values()):
        backend.table.free(p, span)


def window(stride: Any, padding: Any, dilation: Any, groups: int | None = None) -> dict[str, int]:
    """The attributes of a convolution's window."""
    found = window_attributes(SimpleNamespace(stride=stride, padding=padding, dilation=dilation))
    return found | ({} if groups is None else {"groups": groups})


def close(got: np.ndarray, exact: np.ndarray, tolerance: float = 5e-6) -> None:
    assert got.shape == exact.shape
    if exact.size:
        error = np.abs(got - exact).max() / max(np.abs(exact).max(), 1e-30)
        assert error < tolerance, f"error {error:.2e}"


def nans(*shape: int, dtype: str = "float32") -> np.ndarray:
    return np.full(shape, np.nan if dtype.startswith("float") else -1, dtype)


def inside(a: np.ndarray, gap: int = 3) -> np.ndarray:
    """The same values as a slice of a larger array, along every axis."""
    whole = np.full([n + 2 * gap for n in a.shape], 7, a.dtype)
    part = whole[tuple(slice(gap, gap + n) for n in a.shape)]
    part[...] = a
    return part


def channels_last(a: np.ndarray) -> np.ndarray:
    """(N, C, H, W) whose memory is (N, H, W, C)."""
    return np.ascontiguousarray(a.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)


def double(*arrays: np.ndarray) -> list[np.ndarray]:
    return [a.astype(np.float64) for a in arrays]


LAYOUTS = {"nchw": lambda a: a, "nhwc": channels_last, "strided": inside}


def check_pool(backend: Backend, op: Any, x: np.ndarray, place: Callable, tolerance: float) -> None:
    """A pool of x and its gradient, their arrays where `place` puts them, against the op's reference."""
    exact = op.reference(x.astype(float))
    out, dx = place(nans(*exact.shape, dtype=x.dtype.name)), place(nans(*x.shape, dtype=x.dtype.name))
    run(backend, op.row(), [out], [place(x)], **op.kernel_attributes())
    close(out, exact, tolerance)
    dy = normal(*exact.shape, seed=1).astype(x.dtype)
    if isinstance(op, MaxPool2d):
        exact = MaxPool2dGrad(*op.attributes().values()).reference(x, dy.astype(float))
        run(backend, "max_pool2d_grad", [dx], [place(x), place(dy)], **op.kernel_attributes())
    else:
        grad = AvgPool2dGrad(op, x.shape) if isinstance(op, AvgPool2d) else AdaptiveAvgPool2dGrad(x.shape)
        exact = grad.reference(dy.astype(float))
        run(backend, f"{op.row()}_grad", [dx], [place(dy)], **op.kernel_attributes())
    close(dx, exact, tolerance)

"""Orders, running sums, products and maxima along axes on GPU devices, against the CPU's kernels."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest

import needle as ndl
from needle.backend_ndarray import Device, NDArray, call

TOLERANCE = {"float32": (1e-6, 1e-5), "float64": (1e-13, 1e-11)}
DTYPES = ["float32", "float64", "int32", "int64", "bool"]
# Shape and axis: one element, none, short and long lines, few and many of them, beside each other and behind.
LINES = [
    ((1,), 0),
    ((0, 3), 0),
    ((3, 0), 0),
    ((5, 7), 1),
    ((5, 7), 0),
    ((3, 17, 4), 1),
    ((2, 2049), 1),
    ((300, 3), 0),
    ((257, 200), 0),
    ((1, 9000), 1),
    ((9001, 2), 0),
    ((3, 300, 5), 1),
]


def numbers(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """With ties, both zeros and, of floats, NaN and infinities."""
    rng = np.random.default_rng(len(shape))
    a = rng.integers(-9, 9, shape)
    if dtype == "bool":
        return a > 0
    a = a.astype(dtype)
    if dtype.startswith("float"):
        a += (rng.integers(0, 4, shape) * 0.1).astype(dtype)
        flat = a.reshape(-1)
        flat[5::97], flat[11::213], flat[40::307], flat[64::401] = -0.0, np.nan, np.inf, -np.inf
    return a


def turned(x: NDArray) -> NDArray:
    return x.permute(tuple(range(x.ndim))[::-1])


LAYOUTS: dict[str, Callable[[np.ndarray, Device], NDArray]] = {
    "plain": lambda a, device: NDArray(a, device, str(a.dtype)),
    "turned": lambda a, device: turned(NDArray(np.ascontiguousarray(a.T), device, str(a.dtype))),
    "strided": lambda a, device: NDArray(np.repeat(a, 2, -1), device, str(a.dtype))[..., ::2],
    "mirrored": lambda a, device: NDArray(np.ascontiguousarray(a[..., ::-1]), device, str(a.dtype)).flip((a.ndim - 1,)),
}


def check(gpu: Device, a: np.ndarray, name: str, result: str, **attrs: int) -> None:
    """One kernel on both devices, of arrays of all strides, into plain and turned ones."""
    for layout, made in LAYOUTS.items():
        got = []
        for device in (gpu, ndl.cpu()):
            x = made(a, device)
            assert x.shape == a.shape
            outs = NDArray.empty(a.shape, result, device), NDArray.empty(a.shape[::-1], result, device)
            for out in (outs[0], turned(outs[1])):
                call(name, [out], x=x, **attrs)
                got.append(out.numpy())
        for have, want in zip(got[:2], got[2:], strict=True):
            if name == "cumsum" and result.startswith("float"):
                np.testing.assert_allclose(have, want, *TOLERANCE[result], err_msg=layout)
            else:
                np.testing.assert_array_equal(have, want, layout)


@pytest.mark.parametrize("dtype", DTYPES[:4])
@pytest.mark.parametrize(("shape", "axis"), LINES, ids=str)
def test_running(gpu: Device, shape: tuple[int, ...], axis: int, dtype: str) -> None:
    a = numbers(shape, dtype)
    for reverse in (0, 1):
        check(gpu, a, "cumsum", dtype, axis=axis, reverse=reverse)
    check(gpu, a, "cummax", "int64", axis=axis)
    small = a if dtype.startswith("int") else np.where(a < 0, 1 + a / 8, a / 4).astype(dtype)
    check(gpu, small, "cumprod", dtype, axis=axis)


@pytest.mark.parametrize(("shape", "axis"), LINES, ids=str)
def test_running_places_of_bools(gpu: Device, shape: tuple[int, ...], axis: int) -> None:
    check(gpu, numbers(shape, "bool"), "cummax", "int64", axis=axis)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("shape", "axis"), LINES, ids=str)
def test_gradient_of_running_products(gpu: Device, shape: tuple[int, ...], axis: int, dtype: str) -> None:
    """Where factors are zero, too."""
    x, dy = np.random.uniform(0.5, 1.5, shape).astype(dtype), np.random.uniform(-1, 1, shape).astype(dtype)
    x.reshape(-1)[3::50] = 0
    got = []
    for device in (gpu, ndl.cpu()):
        given = (LAYOUTS["turned"](t, device) for t in (x, dy))
        out = NDArray.empty(shape, dtype, device)
        call("cumprod_grad", [out], **dict(zip(("x", "dy"), given, strict=True)), axis=axis)
        got.append(out.numpy())
    np.testing.assert_allclose(got[0], got[1], 1e-6, 1e-12)


def test_running_sums_of_zeros_and_overflow(gpu: Device) -> None:
    """Products before a zero overflow, behind it they stay zero; equal inputs give equal bits."""
    x = np.full((1, 5000), 1e30, "float32")
    x[0, 7] = 0
    got = [ndl.ops.cumprod(ndl.Tensor(x, device=d), 1).numpy() for d in (gpu, ndl.cpu())]
    np.testing.assert_array_equal(*got)
    a = np.random.default_rng(0).standard_normal((2, 50000)).astype("float32")
    first, again = (ndl.ops.cumsum(ndl.Tensor(a, device=gpu), 1).numpy() for _ in range(2))
    assert first.tobytes() == again.tobytes()
    np.testing.assert_allclose(first, np.cumsum(a.astype("float64"), 1), 1e-6, 1e-6)


ORDERS = [
    *LINES,
    ((1, 1), 1),
    ((40, 2), 1),
    ((3, 2048), 1),
    ((2, 4097), 1),
    ((1, 20000), 1),
    ((50257,), 0),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "axis"), ORDERS, ids=str)
def test_order(gpu: Device, shape: tuple[int, ...], axis: int, dtype: str) -> None:
    """All elements or the first few, of ties, NaN and zeros of both signs, upwards and downwards."""
    a = numbers(shape, dtype)
    n = shape[axis]
    for layout, count, descending in itertools.product(LAYOUTS, sorted({n, min(n, 1), min(n, 50), n // 3}), (0, 1)):
        if layout != "plain" and count < n:
            continue
        result = tuple(count if d == axis else size for d, size in enumerate(shape))
        got = []
        for device in (gpu, ndl.cpu()):
            out = NDArray.empty(result, "int64", device)
            call("argsort", [out], x=LAYOUTS[layout](a, device), axis=axis, descending=descending)
            got.append(out.numpy())
        np.testing.assert_array_equal(*got, f"{layout} {count} {descending}")


def test_what_builds_on_orders(gpu: Device) -> None:
    """A vocabulary that all pairs of would not fit in memory."""
    a = np.random.default_rng(0).standard_normal((3, 50257)).astype("float32")
    for f in (
        lambda x: ndl.ops.sort(x, 1),
        lambda x: ndl.ops.topk(x, 50, 1),
        lambda x: ndl.ops.topk(x, 7, 1, largest=False),
        lambda x: ndl.ops.topk(x, 700, 1),
    ):
        for got, want in zip(f(ndl.Tensor(a, device=gpu)), f(ndl.Tensor(a, device=ndl.cpu())), strict=True):
            np.testing.assert_array_equal(got.numpy(), want.numpy())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 5, 3), (0, 3, 2), (3, 40, 1), (1, 7, 70)], ids=str)
def test_gather(gpu: Device, shape: tuple[int, ...], dtype: str) -> None:
    """Tables and numbers of any strides; a number outside is NaN or 0, for a kernel cannot raise."""
    x, rng = numbers(shape, dtype), np.random.default_rng(0)
    for many, kind, layout in itertools.product((0, 1, 9), ("int32", "int64"), LAYOUTS):
        at = rng.integers(0, shape[1], (shape[0], many, shape[2])).astype(kind)
        out = NDArray.empty(at.shape, dtype, gpu)
        call("gather", [out], x=LAYOUTS[layout](x, gpu), numbers=LAYOUTS[layout](at, gpu))
        np.testing.assert_array_equal(out.numpy(), np.take_along_axis(x, at, 1))
    at = np.full((shape[0], 2, shape[2]), shape[1])
    at[:, 1] = -1
    out = NDArray.empty(at.shape, dtype, gpu)
    call("gather", [out], x=NDArray(x, gpu, dtype), numbers=NDArray(at, gpu, "int64"))
    assert (np.isnan(out.numpy()) if dtype.startswith("float") else out.numpy() == 0).all()


@pytest.mark.parametrize("dtype", DTYPES[:4])
@pytest.mark.parametrize("count", [0, 1, 2, 33, 1000])
def test_places_in_sorted_numbers(gpu: Device, count: int, dtype: str) -> None:
    lines = np.sort(numbers((3, count), dtype), -1)
    values = np.concatenate([numbers((3, 70), dtype), lines], -1)
    for layout, right in itertools.product(LAYOUTS, (0, 1)):
        got = []
        for device in (gpu, ndl.cpu()):
            out = NDArray.empty(values.shape, "int64", device)
            given = {"numbers": LAYOUTS[layout](lines, device) if count else NDArray(lines, device, dtype)}
            call("searchsorted", [out], **given, values=LAYOUTS[layout](values, device), right=right)
            got.append(out.numpy())
        np.testing.assert_array_equal(*got)
    spread = [
        ndl.ops.searchsorted(*(ndl.Tensor(a, device=d, dtype=dtype) for a in (lines[0], values))).numpy()
        for d in (gpu, ndl.cpu())
    ]
    np.testing.assert_array_equal(*spread)


def test_in_plans(gpu: Device) -> None:
    """Several of them share a plan's workspace, run after run."""

    def net(x: ndl.Tensor) -> tuple[ndl.Tensor, ...]:
        values, places = ndl.ops.topk(x, 5, 1)
        return values, places, ndl.ops.cumsum(x, 1), *ndl.ops.sort(x, 1), ndl.ops.softmax(x, 0)

    draw = np.random.default_rng(0).standard_normal
    exe = ndl.compile(net, (ndl.Tensor(draw((6, 5000)), device=gpu),))
    for _ in range(3):
        x = draw((6, 5000)).astype("float32")
        for got, want in zip(exe(ndl.Tensor(x, device=gpu)), net(ndl.Tensor(x, device=ndl.cpu())), strict=True):
            np.testing.assert_allclose(got.numpy(), want.numpy(), 1e-5, 1e-5)
    assert not exe.last.decomposed
    assert {"argsort", "cumsum", "gather", "softmax_columns"} <= set(exe.plan.names)

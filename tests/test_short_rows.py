"""Maps, copies and reductions of short rows, of steps, mirrored and shared elements, beside numpy."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import nn

import needle as ndl
import torch2needle
from needle.autograd import OPS
from needle.backend_ndarray import NDArray, call
from needle.backend_selection import BACKEND

pytestmark = pytest.mark.skipif(BACKEND == "np", reason="kernels and plans")

ROWS = (1, 3, 65, 700)
COLUMNS = (*range(1, 10), 17, 31, 40, 127, 130, 300)
SLICES = {  # of the last axis, whose array is wide enough
    "whole": lambda n: slice(0, n),
    "mirrored": lambda n: slice(n - 1, None, -1) if n else slice(0, 0),
    "every other": lambda n: slice(0, 2 * n, 2),
    "every other from 1": lambda n: slice(1, 2 * n, 2),
    "every third": lambda n: slice(0, 3 * n, 3),
}


def seen(values: np.ndarray, index: tuple) -> tuple[NDArray, np.ndarray]:
    """An array through a slice, and what numpy sees there."""
    flips = tuple(a for a, i in enumerate(index) if isinstance(i, slice) and (i.step or 1) < 0)
    forward = tuple(slice(0, i.start + 1) if a in flips else i for a, i in enumerate(index))
    x = NDArray(values, dtype=str(values.dtype))[forward]
    return (x.flip(flips) if flips else x), values[index]


def operands(rows: int, columns: int, dtype: str) -> Iterator[tuple[str, NDArray, np.ndarray]]:
    rng = np.random.default_rng(rows * 1000 + columns)
    values = (rng.standard_normal((rows, 3 * columns)) * 9).astype(dtype)
    for name, part in SLICES.items():
        yield name, *seen(values, (slice(None), part(columns)))
    for shape in ((rows, 1), (1, columns), (1, 1)):
        small = (rng.standard_normal(shape) * 9).astype(dtype)
        yield (
            str(shape),
            NDArray(small, dtype=dtype).broadcast_to((rows, columns)),
            np.broadcast_to(small, (rows, columns)),
        )


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64"])
@pytest.mark.parametrize("rows", ROWS)
def test_maps_and_copies(rows: int, dtype: str) -> None:
    for columns in COLUMNS:
        ins = list(operands(rows, columns, dtype))
        mask = np.random.default_rng(columns).random((rows, columns)) > 0.5
        for name, x, want in ins:
            out = NDArray.empty((rows, columns), dtype)
            call("copy", [out], x=x)
            np.testing.assert_array_equal(out.numpy(), want, f"copy {name} {columns}")
            wide = NDArray(np.zeros((rows, 2 * columns), dtype), dtype=dtype)
            for half in (wide[:, :columns], wide[:, ::2]):
                call("copy", [half], x=x)
                np.testing.assert_array_equal(half.numpy(), want, f"copy of {name} into a part, {columns}")
                call("add", [half], x=x, y=x)
                np.testing.assert_array_equal(half.numpy(), want + want, f"sum of {name} into a part, {columns}")
            for other, y, more in ins:
                call("sub", [out], x=x, y=y)
                np.testing.assert_array_equal(out.numpy(), want - more, f"{name} - {other}, {columns}")
            call("where", [out], x=NDArray(mask, dtype="bool"), y=x, z=ins[0][1])
            np.testing.assert_array_equal(out.numpy(), np.where(mask, want, ins[0][2]), f"where {name} {columns}")
            truth = NDArray.empty((rows, columns), "bool")
            call("gt", [truth], x=x, y=ins[0][1])
            np.testing.assert_array_equal(truth.numpy(), want > ins[0][2], f"gt {name} {columns}")


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64"])
def test_maps_of_small_matrices(dtype: str) -> None:
    """Many of them, with operands that repeat along every axis or lie in another order, also of another dtype."""
    rng = np.random.default_rng(0)
    for shape in ((700, 2, 2), (9, 3, 5), (8, 4, 8), (7, 2, 2), (3, 65, 2, 3), (20, 1, 3, 1, 2), (0, 2, 2)):
        given = []
        for kept in itertools.product([False, True], repeat=len(shape)):
            own = tuple(n if k else 1 for n, k in zip(shape, kept, strict=True))
            values = (rng.standard_normal(own) * 9).astype(dtype)
            given.append((NDArray(values, dtype=dtype).broadcast_to(shape), np.broadcast_to(values, shape)))
        for order in itertools.permutations(range(len(shape))) if len(shape) < 5 else ():
            values = (rng.standard_normal([shape[a] for a in order]) * 9).astype(dtype)
            back = tuple(map(order.index, range(len(shape))))
            given.append((NDArray(values, dtype=dtype).permute(back), values.transpose(back)))
        x, first = given[len(given) // 2 - 1]
        for y, second in given:
            out = NDArray.empty(shape, dtype)
            call("sub", [out], x=x, y=y)
            np.testing.assert_array_equal(out.numpy(), first - second, str(shape))
            call("where", [out], x=NDArray(second > 0, dtype="bool"), y=y, z=x)
            np.testing.assert_array_equal(out.numpy(), np.where(second > 0, second, first), str(shape))
            if len(shape) < 5:
                turned = NDArray.empty(shape[::-1], dtype).permute(tuple(range(len(shape)))[::-1])
                call("sub", [turned], x=x, y=y)
                np.testing.assert_array_equal(turned.numpy(), first - second, str(shape))


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64"])
@pytest.mark.parametrize("rows", ROWS)
def test_reductions(rows: int, dtype: str) -> None:
    """Along rows and columns; of three axes, too."""
    for columns in COLUMNS:
        for name, x, values in operands(rows, columns, dtype):
            wide = values.astype("float64" if dtype != "int64" else dtype)
            for kernel, reduced in (("sum", np.sum), ("max", np.max), ("min", np.min), ("mean", np.mean)):
                if kernel == "mean" and dtype == "int64":
                    continue
                for axes in ((0,), (1,), (0, 1)):
                    got, want = x.reduce(kernel, axes, False).numpy(), reduced(wide, axis=axes)
                    scale = np.abs(wide).sum(axes) / (1 if kernel == "sum" else wide.size / max(want.size, 1))
                    error = np.abs(got - want)
                    limit = 0 if dtype == "int64" or kernel in ("max", "min") else 1e-6 * scale
                    assert (error <= limit).all(), f"{kernel} of {name} over {axes}, {columns} columns"
            near = 1 + x.numpy().astype("float64") / 100 if dtype != "int64" else np.sign(x.numpy())
            got = NDArray(near.astype(dtype), dtype=dtype).reduce("prod", (1,), False).numpy()
            np.testing.assert_allclose(got, np.prod(near.astype(dtype).astype("float64"), 1), rtol=2e-6, atol=2e-38)


def test_extremes_of_rows_keep_nan() -> None:
    for columns in COLUMNS:
        for place in {0, columns // 2, columns - 1}:
            values = np.random.default_rng(0).standard_normal((70, columns)).astype("float32")
            values[3, place] = np.nan
            for kernel in ("max", "min", "sum"):
                got = NDArray(values).reduce(kernel, (1,), False).numpy()
                assert np.isnan(got[3]) and np.isfinite(np.delete(got, 3)).all(), f"{kernel} {columns} {place}"


def with_ties(values: np.ndarray, nan: bool) -> np.ndarray:
    values = np.round(values)
    if nan and values.dtype.kind == "f":
        values.flat[:: max(2, values.size // 7)] = np.nan
    return values


@pytest.mark.parametrize("nan", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64"])
def test_along_an_axis(dtype: str, nan: bool) -> None:
    """Running sums, products and maxima, the largest and the order, of rows and columns."""
    for rows, columns in ((1, 1), (3, 2), (65, 1), (65, 3), (130, 8), (33, 17), (17, 40), (1, 300), (2, 0), (0, 2)):
        values = with_ties((np.random.default_rng(columns).standard_normal((rows, 3 * columns)) * 3).astype(dtype), nan)
        for name, part in SLICES.items():
            x, want = seen(values, (slice(None), part(columns)))
            for axis in (0, 1):
                told = f"{name} {rows} x {columns} along {axis}"
                wide = want.astype("float64" if want.dtype.kind == "f" else "int64")
                made = {k: NDArray.empty((rows, columns), dtype) for k in ("cumsum", "cumprod")}
                call("cumsum", [made["cumsum"]], x=x, axis=axis, reverse=0)
                np.testing.assert_allclose(made["cumsum"].numpy(), np.cumsum(wide, axis), 1e-6, 1e-6, err_msg=told)
                if dtype != "int32":
                    call("cumprod", [made["cumprod"]], x=x, axis=axis)
                    with np.errstate(all="ignore"):
                        product = np.cumprod(wide, axis).astype(dtype)
                    np.testing.assert_allclose(made["cumprod"].numpy(), product, 1e-6, err_msg=told)
                numbers = NDArray.empty((rows, columns), "int64")
                call("cummax", [numbers], x=x, axis=axis)
                np.testing.assert_array_equal(numbers.numpy(), OPS["CumMax"](axis).reference(want), told)
                call("argsort", [numbers], x=x, axis=axis, descending=0)
                np.testing.assert_array_equal(numbers.numpy(), np.argsort(want, axis, kind="stable"), told)
                if not want.size:
                    continue
                largest = NDArray.empty((rows, 1) if axis else (1, columns), "int64")
                call("argmax", [largest], x=x, axis=axis)
                np.testing.assert_array_equal(largest.numpy(), np.argmax(want, axis, keepdims=True), told)


@pytest.mark.parametrize("numbers_dtype", ["int32", "int64"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "bool"])
def test_elements_by_numbers(dtype: str, numbers_dtype: str) -> None:
    """Of tables in a batch, whose rows are short, and whose batch is one."""
    rng = np.random.default_rng(0)
    for batch, count, many, width in (
        *((700, 2, 2, 1), (65, 9, 1, 1), (3, 2000, 2500, 1), (1, 5, 3000, 1), (0, 3, 2, 1), (5, 3, 0, 1)),
        *((1, 700, 700, 2), (4, 30, 65, 3), (2, 9, 40, 17), (2, 3, 2, 1200), (3, 4, 5, 0), (1, 1, 1, 1)),
    ):
        table = (rng.standard_normal((batch, width, count)) * 9).astype(dtype)
        numbers = rng.integers(0, count, (batch, many, width)).astype(numbers_dtype)
        source = (rng.standard_normal((batch, many, width)) * 9).astype(dtype)
        told = f"{batch} x {count} x {width}, {many}"
        plain = np.ascontiguousarray(table.swapaxes(1, 2))
        for x in (NDArray(plain, dtype=dtype), NDArray(table, dtype=dtype).permute((0, 2, 1))):
            for y in (numbers, numbers[:, :, :1].repeat(width, 2)):
                out = NDArray.empty((batch, many, width), dtype)
                call("gather", [out], x=x, numbers=NDArray(y, dtype=numbers_dtype))
                np.testing.assert_array_equal(out.numpy(), np.take_along_axis(plain, y.astype("int64"), 1), told)
            shared = NDArray(numbers[:1], dtype=numbers_dtype).broadcast_to(numbers.shape) if batch else None
            if shared is not None:
                call("gather", [out], x=x, numbers=shared)
                want = np.take_along_axis(plain, np.broadcast_to(numbers[:1], numbers.shape).astype("int64"), 1)
                np.testing.assert_array_equal(out.numpy(), want, told)
        for code, apply in ((0, None), (1, np.add), (3, np.maximum)):
            want = plain.copy()
            into = NDArray(plain.copy(), dtype=dtype)
            call(
                "scatter",
                [into],
                rows=NDArray(source, dtype=dtype),
                numbers=NDArray(numbers, dtype=numbers_dtype),
                reduce=code,
            )
            b, _, w = np.indices(numbers.shape)
            if apply is None:
                for i in range(many):
                    want[b[:, i], numbers[:, i], w[:, i]] = source[:, i]
            else:
                apply.at(want, (b, numbers, w), source)
            np.testing.assert_allclose(into.numpy(), want, 1e-4, 1e-3, err_msg=told)


@pytest.mark.parametrize("columns", range(1, 36))
def test_norms_of_short_rows(columns: int) -> None:
    rng = np.random.default_rng(columns)
    for shift, scale in ((0, 1), (10, 0.1), (5, 0)):
        x = torch.tensor(shift + scale * rng.standard_normal((33, columns))).float()
        weight, bias = (torch.tensor(rng.standard_normal(columns)).float() for _ in range(2))
        y, mean, inverse = NDArray.empty((33, columns)), NDArray.empty((33,)), NDArray.empty((33,))
        given = {"weight": NDArray(weight.numpy()), "bias": NDArray(bias.numpy())}
        call("layer_norm", [y, mean, inverse], x=NDArray(x.numpy()), **given, eps=1e-5)
        args = ((columns,), weight.double(), bias.double(), 1e-5)
        want = torch.nn.functional.layer_norm(x.double(), *args).numpy()
        np.testing.assert_allclose(y.numpy(), want, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(mean.numpy(), x.double().mean(1).numpy(), rtol=1e-6, atol=1e-6)
        call("rms_norm", [y], x=NDArray(x.numpy()), weight=given["weight"], eps=1e-5)
        want = torch.nn.functional.rms_norm(x.double(), (columns,), weight.double(), 1e-5).numpy()
        np.testing.assert_allclose(y.numpy(), want, rtol=2e-6, atol=1e-6)


class Windows(nn.Module):
    """Whose maps must not be written where windows share elements."""

    def __init__(self, size: int, step: int, swapped: bool) -> None:
        super().__init__()
        self.size, self.step, self.swapped = size, step, swapped

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        w = (x * 2).unfold(-1, self.size, self.step)
        w = w.transpose(-1, -2) if self.swapped else w
        y = (torch.relu(w) + 1).sigmoid()
        return y, w.sum(-1), w.amax(-2), torch.tanh(w * y)


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("size, step", [(1, 1), (2, 1), (3, 2), (4, 4), (5, 7), (11, 1)])
def test_windows(size: int, step: int, swapped: bool) -> None:
    net, x = Windows(size, step, swapped), torch.randn(3, 11)
    wants = net(x.double())
    exe = ndl.compile(torch2needle.convert(net, x, dynamic=False), x)
    for made in (exe(x), torch2needle.convert(net, x, dynamic=False)(x)):
        for got, want in zip(made, wants, strict=True):
            np.testing.assert_allclose(got.numpy(), want.numpy(), rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("times", [(2, 1, 1, 3, 1), (2, 2, 2, 2, 2), (1, 3, 0, 1, 2), (2, 1, 1, 1, 1, 2)])
def test_repeats_of_many_axes(times: tuple[int, ...]) -> None:
    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.repeat(times)

    x = torch.randn(2, 1, 3, 2, 2)
    net = torch2needle.convert(Net(), x, dynamic=False)
    for got in (net(x), ndl.compile(net, x)(x)):
        np.testing.assert_array_equal(got.numpy(), x.repeat(times).numpy())


EMPTY_AND_SMALL = [(0, 3), (3, 0), (1, 1), (1, 7), (7, 1), (2, 0, 4), (65, 2)]
CALLS = {
    "sums": lambda x: x.sum(0).sum() + x.sum(-1).sum(),
    "product": lambda x: x.prod(-1),
    "product of columns": lambda x: x.prod(0),
    "mirrored": lambda x: x.flip(0, 1) * 2,
    "every other": lambda x: x[..., ::2] * x[..., ::2],
    "factors": lambda x: x[..., None] * torch.arange(3.0, dtype=x.dtype),
    "repeats": lambda x: x.repeat_interleave(3, -1),
    "running product": lambda x: x.cumprod(-1),
    "logsumexp": lambda x: x.logsumexp(0),
    "softmax": lambda x: x.softmax(0),
    "norm": lambda x: nn.functional.rms_norm(x, x.shape[-1:], eps=1e-3),
    "distances": lambda x: torch.cdist(x, x[..., :1, :], 1.0),
    "where": lambda x: torch.where(x > 0, x, x.flip(-1)),
}


@pytest.mark.parametrize("shape", EMPTY_AND_SMALL, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_sizes_zero_and_one(name: str, shape: tuple[int, ...]) -> None:
    """Values, planned and eager, and gradients."""

    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return CALLS[name](x)

    x = torch.randn(shape)
    theirs = x.double().requires_grad_()
    want = CALLS[name](theirs)
    (want * want).sum().backward()
    net, ours = torch2needle.convert(Net(), x, dynamic=False), ndl.Tensor(x.numpy(), requires_grad=True)
    made = net(ours)
    ndl.ops.summation(made * made).backward()
    for got in (made.detach(), ndl.compile(net, x)(x)):
        np.testing.assert_allclose(got.numpy(), want.detach().numpy(), rtol=2e-5, atol=2e-5)
    if ours.grad is None:  # the product of nothing is a constant
        assert x.numel() == 0
    else:
        np.testing.assert_allclose(ours.grad.numpy(), theirs.grad.numpy(), rtol=1e-4, atol=5e-5)

"""Maps, copies and reductions of short rows, of steps, mirrored and shared elements, beside numpy."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import nn

import needle as ndl
import torch2needle
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

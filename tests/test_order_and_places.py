"""Kernels of order along an axis and of reading by numbers, against numpy and torch."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import needle as ndl
from needle import ops
from needle.backward import vjp

RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def seeded() -> None:
    RNG.bit_generator.state = np.random.default_rng(0).bit_generator.state


NUMBERS = {
    "float32": lambda shape: np.round(RNG.standard_normal(shape) * 9, 1).astype("float32"),
    "float64": lambda shape: RNG.standard_normal(shape),
    "int32": lambda shape: RNG.integers(-5, 5, shape).astype("int32"),
    "int64": lambda shape: RNG.integers(-(2**62), 2**62, shape),
    "bool": lambda shape: RNG.integers(0, 2, shape).astype("bool"),
}
SPECIAL = np.array([np.nan, -0.0, 0.0, np.inf, -np.inf, 1.0, np.nan, -np.nan, 0.0, -1.0, 1e-45, -1e-45])


def tensor(array: Any) -> ndl.Tensor:
    return ndl.Tensor(array, dtype=str(array.dtype), requires_grad=False)


def planned(f: Any, *arrays: Any) -> Any:
    return ndl.compile(f, tuple(map(tensor, arrays)))(*map(tensor, arrays)).numpy()


@pytest.mark.parametrize("dtype", NUMBERS)
def test_order(dtype: str) -> None:
    """Stable, with NaN as the largest, the whole of it or its beginning, along any axis of any view."""
    for shape, axis in (((3, 0), 1), ((1,), 0), ((7, 40), 1), ((41, 3), 0), ((2, 700, 2), 1), ((6000,), 0)):
        x = NUMBERS[dtype](shape)
        if dtype.startswith("float") and x.size > 20:
            x.reshape(-1)[: len(SPECIAL)] = SPECIAL
        for descending, view in itertools.product((False, True), (x, np.flip(x, axis))):
            want = torch.sort(torch.tensor(view.copy()), dim=axis, descending=descending, stable=True)[1].numpy()
            got = ops.argsort(tensor(x) if view is x else ops.flip(tensor(x), axis), axis, descending)
            np.testing.assert_array_equal(got.numpy(), want)
            for count in {0, min(2, shape[axis]), shape[axis]}:
                some = ops.argsort(tensor(view.copy()), axis, descending, count).numpy()
                np.testing.assert_array_equal(some, want.take(range(count), axis))


def test_order_of_numbers_that_differ_in_their_last_digits() -> None:
    """The first of many are not told apart by the digit that is looked at first."""
    x = (1e6 + RNG.permutation(5000) / 16).astype("float32")
    np.testing.assert_array_equal(ops.topk(tensor(x), 9)[0].numpy(), np.sort(x)[::-1][:9])
    np.testing.assert_array_equal(planned(lambda t: ops.topk(t, 7, 0, False)[1], x), np.argsort(x, kind="stable")[:7])
    with pytest.raises(ValueError, match=r"^\[argsort\] count expects at most the size of axis 0, got 9\.$"):
        ops.argsort(tensor(x[:8]), 0, False, 9)


def test_running_sums() -> None:
    for dtype, shape, axis in (
        ("float32", (5, 33, 4), 1),
        ("float32", (3, 20), 0),
        ("float64", (2, 9), -1),
        ("int32", (4, 1, 3), 1),
        ("bool", (50,), 0),
        ("float32", (0, 3), 0),
    ):
        x = NUMBERS[dtype](shape)
        want = np.cumsum(x.astype("float64"), axis)
        for got in (ops.cumsum(tensor(x), axis).numpy(), planned(lambda t, a=axis: ops.cumsum(t, a), x)):
            np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-5)
        turned = ops.cumsum(ops.flip(tensor(x), axis), axis).numpy()
        np.testing.assert_allclose(turned, np.cumsum(np.flip(x, axis).astype("float64"), axis), rtol=1e-6, atol=1e-5)
    ones = np.full(1 << 20, 0.1, "float32")
    assert abs(ops.cumsum(tensor(ones), 0).numpy()[-1] / (0.1 * len(ones)) - 1) < 1e-6
    x = ndl.Tensor(NUMBERS["float32"]((4, 5)))
    ops.summation(ops.cumsum(x, 1) * tensor(np.arange(5, dtype="float32"))).backward()
    np.testing.assert_allclose(x.grad.numpy(), np.tile(np.cumsum(np.arange(5)[::-1])[::-1], (4, 1)))


def test_places_in_sorted_numbers() -> None:
    for numbers, values in (
        ((1,), (3,)),
        ((0,), (2, 2)),
        ((100,), (4, 50)),
        ((3, 17), (3, 8)),
        ((2, 3, 9), (2, 3, 40)),
    ):
        for dtype in ("float32", "float64", "int64", "int32"):
            rows, wanted = np.sort(NUMBERS[dtype](numbers), -1), NUMBERS[dtype](values)
            if dtype.startswith("float"):
                wanted.reshape(-1)[:2] = np.nan, -np.inf
            for right in (False, True):
                want = torch.searchsorted(torch.tensor(rows), torch.tensor(wanted), right=right).numpy()
                np.testing.assert_array_equal(ops.searchsorted(tensor(rows), tensor(wanted), right).numpy(), want)
                got = planned(lambda a, b, r=right: ops.searchsorted(a, b, r), rows, wanted)
                np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", NUMBERS)
def test_elements_along_an_axis(dtype: str) -> None:
    for shape, axis, index in (
        ((5,), 0, (9,)),
        ((5, 3), 0, (4, 2)),
        ((3, 5000), 1, (2, 9000)),
        ((2, 4, 3), 1, (2, 7, 3)),
        ((2, 4, 3), -1, (1, 2, 0)),
        ((4, 3), 1, (4, 5)),
    ):
        x, numbers = NUMBERS[dtype](shape), RNG.integers(-shape[axis], shape[axis], index)
        part = x[tuple(slice(None) if d == axis % x.ndim else slice(s) for d, s in enumerate(index))]
        want = np.take_along_axis(part, numbers, axis)
        turned = ops.transpose(tensor(np.swapaxes(x, 0, -1).copy()), (0, -1))  # of other strides
        for got in (
            ops.gather(tensor(x), axis, tensor(numbers)),
            ops.gather(turned, axis, tensor(numbers.astype("int32"))),
        ):
            np.testing.assert_array_equal(got.numpy(), want)
        np.testing.assert_array_equal(planned(lambda t, i, a=axis: ops.gather(t, a, i), x, numbers), want)


def test_numbers_outside_of_an_axis() -> None:
    x, beyond = np.ones((3, 2), "float32"), np.array([[0, 3], [-4, 1]])
    with pytest.raises(IndexError, match=r"^\[gather\] index expects numbers in \[-3, 3\), got -4 to 3\.$"):
        ops.gather(tensor(x), 0, tensor(beyond))
    with pytest.raises(IndexError, match=r"^\[gather\] index expects numbers from 0 to 2, got (3|-1)\.$"):
        planned(lambda t, i: ops.gather(t, 0, i * 1), x, beyond)


SAMPLED = [
    (m, p, c) for m in ("bilinear", "nearest", "bicubic") for p in ("zeros", "border", "reflection") for c in (0, 1)
]


@pytest.mark.parametrize(("mode", "padding", "corners"), SAMPLED)
def test_grid_sample(mode: str, padding: str, corners: int) -> None:
    """Values and gradients, eager and compiled, of images and volumes, with places far outside."""
    torch.manual_seed(0)
    cases = [((2, 3, 5, 7), (4, 70)), ((1, 5, 1, 6), (3, 2)), ((2, 1, 4, 4), (0, 3)), ((1, 17, 4, 5), (7, 45))]
    cases += [((2, 3, 3, 4, 5), (2, 3, 4)), ((1, 2, 1, 2, 1), (2, 1, 9))] * (mode != "bicubic")
    for (shape, out), dtype in itertools.product(cases, (torch.float32, torch.float64)):
        x = torch.randn(shape, dtype=torch.float64)
        grid = torch.rand(shape[0], *out, len(out), dtype=torch.float64) * 6 - 3
        wants = [t.to(dtype).double().clone().requires_grad_() for t in (x, grid)]
        want = F.grid_sample(*wants, mode, padding, bool(corners))
        seed = torch.randn(want.shape, dtype=torch.float64)
        want.backward(seed)
        given = [ndl.Tensor(t.to(dtype).numpy(), dtype=str(dtype)[6:]) for t in (x, grid)]
        got = ops.grid_sample(*given, mode, padding, bool(corners))
        got.backward(ndl.Tensor(seed.to(dtype).numpy(), dtype=str(dtype)[6:]))
        tolerance = 2e-4 if dtype == torch.float32 else 1e-10
        near = [(got.detach(), want.detach()), *((g.grad, w.grad) for g, w in zip(given, wants, strict=True))]
        for ours, theirs in near:
            scale = max(1.0, float(theirs.abs().max())) if theirs.numel() else 1.0
            assert np.abs(ours.numpy() - theirs.numpy()).max(initial=0) <= tolerance * scale
        f = lambda a, b: ops.grid_sample(a, b, mode, padding, bool(corners))  # noqa: E731
        np.testing.assert_array_equal(planned(f, *(g.numpy() for g in given)), got.numpy())
        turned = ops.transpose(ndl.Tensor(x.to(dtype).transpose(2, -1).numpy().copy(), dtype=str(dtype)[6:]), (2, -1))
        np.testing.assert_allclose(f(turned, given[1]).numpy(), got.numpy(), rtol=1e-5, atol=1e-5)


def test_gradients_of_gradients_of_grid_sample() -> None:
    x, grid = torch.randn(1, 2, 3, 4, dtype=torch.float64), torch.rand(1, 3, 2, 2, dtype=torch.float64) * 2 - 1
    ours = [ndl.Tensor(t.numpy(), dtype="float64") for t in (x, grid)]
    read = ops.grid_sample(*ours)
    ops.summation(vjp(read, read * 2.0, ours)[1] ** 2).backward()
    # torch has no second derivative here: finite differences of its first
    step, want = 1e-6, np.zeros(x.shape)
    for place in np.ndindex(*x.shape):
        totals = []
        for sign in (1, -1):
            moved = x.clone()
            moved[place] += sign * step
            wanted = grid.clone().requires_grad_()
            (F.grid_sample(moved, wanted, align_corners=False) ** 2).sum().backward()
            totals.append(float((wanted.grad**2).sum()))
        want[place] = (totals[0] - totals[1]) / (2 * step)
    np.testing.assert_allclose(ours[0].grad.numpy(), want, atol=1e-4)


@pytest.mark.parametrize("p", [0.0, 1.0, 1.5, 2.0, 3.0, np.inf])
def test_distances(p: float) -> None:
    for a, b in (
        ((4, 3), (5, 3)),
        ((2, 9, 70), (2, 33, 70)),
        ((1, 1), (1, 1)),
        ((2, 3, 1003), (2, 4, 1003)),
        ((3, 1, 5, 4), (2, 6, 4)),
        ((0, 3), (4, 3)),
        ((2, 0), (3, 0)),
    ):
        for dtype in ("float32", "float64"):
            x, y = NUMBERS[dtype](a), NUMBERS[dtype](b)
            want = torch.cdist(torch.tensor(x).double(), torch.tensor(y).double(), p).numpy()
            turned = ops.transpose(tensor(np.swapaxes(x, -1, -2).copy()))
            f = lambda s, t: ops.cdist(s, t, p)  # noqa: E731
            for got in (f(tensor(x), tensor(y)).numpy(), f(turned, tensor(y)).numpy(), planned(f, x, y)):
                np.testing.assert_allclose(got, want, rtol=1e-5 if dtype == "float32" else 1e-9, atol=1e-6)
    near = 1000 + np.arange(3, dtype="float32")[:, None] / 64  # where squares of the numbers would cancel
    np.testing.assert_array_equal(ops.cdist(tensor(near), tensor(near)).numpy(), np.abs(near - near.T))

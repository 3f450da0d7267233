"""Writes by numbers and masks: scatter, index_add, index_put and assignment, against torch; what plans do with buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import needle as ndl  # noqa: E402
import torch2needle  # noqa: E402
from conversion import converts  # noqa: E402
from needle import ops  # noqa: E402
from test_rules_arithmetic import Three, Two, agrees  # noqa: E402

X = (5, 4, 3)
AXES = (0, 1, 2, -1)
torch.manual_seed(0)


def ints(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape)


def each_once(axis: int) -> torch.Tensor:
    """Numbers of the shape X that name every place along an axis once, in any order."""
    return torch.rand(X).argsort(axis)


def on_copy(write: Callable) -> Callable:
    """The first argument after a write into a copy of it."""

    def written(x: Any, i: Any, v: Any) -> Any:
        y = x.clone()
        write(y, i, v)
        return y

    return written


def assign(*place: Any) -> Callable:
    """y[place] = v, with the second argument where a place is "i"."""

    def write(y: Any, i: Any, v: Any) -> None:
        y[tuple(i if isinstance(p, str) else p for p in place)] = v

    return on_copy(write)


SLICE = slice(None)
PAIR = torch.tensor([3, 0])
ASSIGNED = [
    (assign("i"), torch.tensor([3, -1]), (2, 4, 3)),
    (assign("i"), torch.tensor([3, -1]), (3,)),
    (assign("i"), torch.tensor([[3], [1]]), (2, 1, 4, 3)),
    (assign(SLICE, "i"), PAIR, (5, 2, 3)),
    (assign("i", SLICE, 1), PAIR, (2, 4)),
    (assign(slice(1, None), "i", Ellipsis), PAIR, (4, 2, 3)),
    (assign("i", torch.tensor([[1], [2]])), PAIR, (2, 2, 3)),
    (assign("i", SLICE, torch.tensor([1, 2])), PAIR, (2, 4)),
    (assign(Ellipsis, "i"), torch.tensor([2, 0]), ()),
    (lambda x, i, v: x.index_put((i,), v, accumulate=True), torch.tensor([2, 0, 2]), (3, 4, 3)),
    (lambda x, i, v: x.index_put((i, i), v, accumulate=True), torch.tensor([2, 0, 2]), (3, 3)),
    (lambda x, i, v: torch.index_put(x, (i,), v), torch.tensor([2, 0, -1]), (1, 4, 3)),
    (lambda x, i, v: x.clone().put_(i, v), torch.tensor([2, 0, -1]), (3,)),
    (lambda x, i, v: x.put(i, v, accumulate=True), torch.tensor([2, 0, 2]), (3,)),
    (assign("i"), torch.rand(5) > 0.5, (4, 3)),
    (assign("i"), torch.rand(5, 4) > 0.5, (1, 1)),
    (assign("i"), torch.tensor([True, False, True, True, False]), (3, 4, 3)),
    (lambda x, i, v: x.masked_scatter(i, v), torch.rand(4, 3) > 0.5, (70,)),
    (lambda x, i, v: torch.masked_scatter(x, i, v), torch.rand(5, 1, 3) > 0.5, (9, 9)),
]


@pytest.mark.parametrize("axis", AXES)
def test_scatter(axis: int) -> None:
    agrees(lambda x, i, s: x.scatter(axis, i, s), X, each_once(axis), X, batch=False)
    agrees(lambda x, i, s: torch.zeros_like(x).scatter_(axis, i, s) + x, X, each_once(axis), X, batch=False)
    converts(Two(lambda x, i: torch.scatter(x, axis, i, 2.5)), X, each_once(axis)[:2, :2, :2] % 2, batch=False)
    agrees(lambda x, i, s: x.scatter_add(axis, i, s), X, ints(X[axis], *X), X, batch=False)
    some = ints(X[axis], 2, 3, 2)
    agrees(lambda x, i, s: x.scatter_add(axis, i, s), X, some, (3, 3, 3), batch=False, gradient=False)


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("reduce", ["sum", "prod", "mean", "amax", "amin"])
def test_reductions(reduce: str, include_self: bool) -> None:
    for axis in (0, -1):
        options: dict[str, Any] = {"include_self": include_self}
        numbers = ints(X[axis], *X)
        agrees(lambda x, i, s: x.scatter_reduce(axis, i, s, reduce, **options), X, numbers, X, batch=False)  # noqa: B023
        if reduce != "sum":
            rows = ints(X[axis], X[axis])
            agrees(lambda x, i, s: x.index_reduce(axis, i, s, reduce, **options), X, rows, X, batch=False)  # noqa: B023


def test_products_with_zeros() -> None:
    x, s = torch.tensor([2.0, 0.0, 3.0, 0.0]), torch.tensor([0.0, 4.0, 5.0, 0.0, 0.0, 2.0])
    i = torch.tensor([0, 0, 1, 2, 2, 3])
    agrees(lambda x, i, s: x.scatter_reduce(0, i, s, "prod"), x, i, s, batch=False)


def test_equal_extremes_share_the_gradient() -> None:
    x, s, i = torch.tensor([2.0, 1.0]), torch.tensor([2.0, 2.0, 1.0, 0.5]), torch.tensor([0, 0, 1, 1])
    agrees(lambda x, i, s: x.scatter_reduce(0, i, s, "amax"), x, i, s, batch=False)


def test_a_nan_stays() -> None:
    x, s, i = torch.zeros(2), torch.tensor([float("nan"), 1.0, 2.0]), torch.tensor([0, 0, 1])
    for reduce in ("amax", "amin"):
        net = converts(Three(lambda x, i, s: x.scatter_reduce(0, i, s, reduce)), x, i, s, batch=False, gradient=False)  # noqa: B023
        assert np.isnan(net(x, i, s).numpy()[0])


@pytest.mark.parametrize("axis", AXES)
def test_slices(axis: int) -> None:
    size = X[axis]
    part = tuple(3 if d == axis % 3 else s for d, s in enumerate(X))
    agrees(lambda x, i, s: x.index_add(axis, i, s, alpha=2), X, ints(size, 3), part, batch=False)
    agrees(lambda x, i, s: torch.zeros_like(x).index_add_(axis, i, s), X, ints(size, 3), part, batch=False)
    agrees(lambda x, i, s: x.index_copy(axis, i, s), X, torch.randperm(size)[:3], part, batch=False)
    agrees(lambda x, i: x.index_fill(axis, i, 3), X, torch.tensor([0, -1]), batch=False)


@pytest.mark.parametrize("case", range(len(ASSIGNED)))
def test_assignment(case: int) -> None:
    f, index, values = ASSIGNED[case]
    agrees(f, X, index, values, batch=False)


def test_assignment_at_masks_of_the_input() -> None:
    def negative(x: Any) -> Any:
        y = x.clone()
        y[y < 0] = 0.5
        y[y[:, 0] > 1] = x[0] * 2
        return y

    agrees(negative, (6, 4), batch=False)


def test_of_two_that_go_to_one_place_the_last_stays_and_has_the_gradient() -> None:
    x = ndl.Tensor(np.zeros(3, "float32"))
    source = ndl.Tensor(np.array([1, 2, 3], "float32"))
    y = ops.scatter(x, 0, ndl.Tensor(np.array([1, 1, 0]), dtype="int64"), source)
    y.sum().backward()
    assert y.numpy().tolist() == [3, 2, 0]
    assert source.grad.numpy().tolist() == [0, 1, 1]
    assert x.grad.numpy().tolist() == [0, 0, 1]


@pytest.mark.parametrize("dtype", ["int32", "int64", "bool", "float64"])
def test_other_dtypes(dtype: str) -> None:
    x, s = (torch.randint(0, 2, X).to(getattr(torch, dtype)) for _ in range(2))
    for f in (lambda x, i, s: x.scatter(1, i, s), lambda x, i, s: x.scatter_reduce(1, i, s, "amax")):
        if dtype == "bool" and f(torch.ones(1, 1).bool(), torch.zeros(1, 1).long(), torch.ones(1, 1).bool()) is None:
            continue
        agrees(f, x, each_once(1), s, batch=False, gradient=False)


def test_numbers_outside() -> None:
    x, s = (ndl.Tensor(np.ones(3, "float32")) for _ in range(2))
    bad = ndl.Tensor(np.array([0, 3, 1]), dtype="int64")
    with pytest.raises(IndexError, match=r"\[scatter\] index expects numbers in \[0, 3\), got 0 to 3"):
        ops.scatter(x, 0, bad, s)
    with pytest.raises(IndexError, match=r"\[index_add\] index expects numbers in \[0, 3\)"):
        ops.index_add(x, 0, bad, s)


PLANNED: dict[str, tuple[Callable, tuple[int, ...]]] = {
    "scatter": (lambda x, i: ops.scatter(x, 0, i, x, "sum"), (5, 3)),
    "scatter of rows": (lambda x, i: ops.index_add(x, 1, i, x), (3,)),
    "scatter by shared numbers": (lambda x, i: ops.scatter(x, 0, ops.broadcast_to(i, (5, 3)), x), (5, 1)),
    "gather": (lambda x, i: ops.gather(x, 0, i), (7, 3)),
    "gather along rows": (lambda x, i: ops.gather(x, 1, i), (5, 2)),
    "gather of rows": (lambda x, i: ops.take(x, i), (2, 3)),
    "gather by shared numbers": (lambda x, i: ops.gather(x, 0, ops.broadcast_to(i, (5, 3))), (5, 1)),
}


@pytest.mark.parametrize("dtype", ["float32", "int64"])
@pytest.mark.parametrize("number", ["int32", "int64"])
@pytest.mark.parametrize("case", PLANNED)
def test_plans_refuse_numbers_outside(case: str, number: str, dtype: str) -> None:
    f, shape = PLANNED[case]
    x = np.arange(15).reshape(5, 3).astype(dtype)
    good = np.random.default_rng(0).integers(0, 3, shape).astype(number)
    exe = ndl.compile(f, (x, good))
    size = 3 if case in ("scatter of rows", "gather along rows") else 5
    said = rf"^\[{case[:7].rstrip()}\] index expects numbers from 0 to {size - 1}, got -?\d+\.$"
    for wrong in (size, -size - 1, np.iinfo(number).max, np.iinfo(number).min):
        bad = good.copy()
        bad.flat[-1] = wrong
        with pytest.raises(IndexError, match=said):
            exe(x, bad)
    np.testing.assert_array_equal(exe(x, good), f(ndl.Tensor(x, dtype=dtype), ndl.Tensor(good, dtype=number)).numpy())


@pytest.mark.parametrize("case", range(4))
def test_nothing_and_single_elements(case: int) -> None:
    f, shapes = [
        (lambda x, i, s: x.scatter_add(0, i, s), (X, ints(5, 0, 4, 3), (0, 4, 3))),
        (lambda x, i, s: x.index_add(1, i, s), (X, ints(4, 0), (5, 0, 3))),
        (lambda x, i, s: x.index_copy(0, i, s), ((1, 1), torch.tensor([0]), (1, 1))),
        (lambda x, i, s: x.scatter_reduce(0, i, s, "mean", include_self=False), ((1,), torch.tensor([0]), (1,))),
    ][case]
    agrees(f, *shapes, batch=False)


class Shifts(nn.Module):
    """Keeps the last four rows in a buffer: what is written and what is read lie in one memory."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(4, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rows[:-1] = self.rows[1:].clone()
        self.rows[-1] = x
        return self.rows * 2


def test_a_buffer_that_shifts() -> None:
    model = Shifts().eval()
    net = torch2needle.convert(model, example=(torch.zeros(3),))
    exe = ndl.compile(net, (np.zeros(3, "float32"),))
    for _ in range(6):
        x = torch.randn(3)
        np.testing.assert_allclose(exe(x.numpy()), model(x).numpy())
    np.testing.assert_allclose(net.rows.numpy(), model.rows.numpy())


class Counter(nn.Module):
    """Counts what it sees in a buffer, and keeps the last of each kind in another."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(6))
        self.register_buffer("last", torch.zeros(6, 3))

    def forward(self, x: torch.Tensor, kind: torch.Tensor) -> torch.Tensor:
        self.seen.index_add_(0, kind, torch.ones(kind.shape[0]))
        self.last[kind] = x
        return self.last * self.seen[:, None]


def test_plans_write_buffers_where_they_are() -> None:
    model = Counter().eval()
    x, kind = torch.randn(4, 3), torch.tensor([1, 5, 0, 2])
    net = torch2needle.convert(model, example=(x, kind))
    exe = ndl.compile(net, (x.numpy(), kind.numpy()))
    assert exe.plan.names.count("scatter") == 2
    place = net.last.cached_data._handle
    for _ in range(3):
        np.testing.assert_allclose(exe(x.numpy(), kind.numpy()), model(x, kind).numpy(), atol=1e-6)
    assert net.last.cached_data._handle is place
    np.testing.assert_allclose(net.seen.numpy(), model.seen.numpy())

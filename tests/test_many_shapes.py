"""Executables that meet many shapes: which plans are kept, the memory that they share, and runs beside planning."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import numpy as np
import pytest

import needle as ndl
from needle.executor import executable


class Net(ndl.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = ndl.nn.Linear(8, 32), ndl.nn.Linear(32, 8)

    def forward(self, x: ndl.Tensor) -> Any:
        return self.second(ndl.ops.relu(self.first(x))) + ndl.ops.mean(x)


def rows(n: int) -> np.ndarray:
    return np.random.default_rng(n).normal(size=(n, 8)).astype("float32")


def agrees(exe: Any, net: Any, n: int) -> None:
    np.testing.assert_allclose(exe(rows(n)), net(ndl.Tensor(rows(n))).numpy(), rtol=1e-5, atol=1e-5)


@pytest.fixture
def net() -> Any:
    np.random.seed(0)
    return Net().eval()


def test_a_number_of_plans_is_kept(net: Any) -> None:
    exe = ndl.compile(net, rows(1), max_plans=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for n in (2, 3, 1, 2, 3):
            agrees(exe, net, n)
    with pytest.warns(UserWarning, match=r"Net was called with more than 3 shapes.*max_plans") as told:
        for n in (*range(4, 12), 1):
            agrees(exe, net, n)
    assert len(told) == 1 and len(exe._plans) == 3


@pytest.mark.parametrize("given", [0, -1, 2.5, "many"])
def test_numbers_of_plans(net: Any, given: Any) -> None:
    with pytest.raises(ValueError, match="max_plans expects a number of at least 1 or None"):
        ndl.compile(net, rows(1), max_plans=given)


def test_memory_over_many_shapes(net: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One arena for all, as large as the largest; plans go when they take too much together."""
    exe = ndl.compile(net, rows(4))
    constants = len(exe._pool.constants)
    for n in range(1, 60):
        agrees(exe, net, n)
    assert len(exe._plans) == 59 and exe.memory["arenas"] == 1 and len(exe._pool.constants) <= constants + 1
    monkeypatch.setattr(executable, "KEPT_BYTES", 20 * executable.STEP_BYTES)
    with pytest.warns(UserWarning, match="shapes, whose plans are thrown away"):
        for n in range(60, 200):
            agrees(exe, net, n)
    assert len(exe._plans) * len(exe.plan.names) <= 20 and exe.memory["arenas"] == 1
    agrees(exe, net, 1)


def test_threads_take_arenas_of_their_own(net: Any) -> None:
    exe = ndl.compile(net, rows(64))
    wanted = {n: net(ndl.Tensor(rows(n))).numpy() for n in (64, 33, 7)}
    faults: list[float] = []

    def run(n: int) -> None:
        for _ in range(200):
            faults.append(float(np.abs(exe(rows(n)) - wanted[n]).max()))

    threads = [threading.Thread(target=run, args=(n,)) for n in wanted]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(faults) == 600 and max(faults) < 1e-4 and 1 <= exe.memory["arenas"] <= 3


def test_runs_go_on_while_a_shape_is_planned(net: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    exe = ndl.compile(net, rows(4))
    begun, go_on, make = threading.Event(), threading.Event(), exe._make

    def slow(*given: Any) -> Any:
        begun.set()
        assert go_on.wait(60)
        return make(*given)

    monkeypatch.setattr(exe, "_make", slow)
    found: list[np.ndarray] = []
    other = threading.Thread(target=lambda: found.append(exe(rows(9))))
    other.start()
    assert begun.wait(60)
    agrees(exe, net, 4)  # does not wait for the plan
    go_on.set()
    other.join(60)
    np.testing.assert_allclose(found[0], net(ndl.Tensor(rows(9))).numpy(), rtol=1e-5, atol=1e-5)


def test_weights_that_change_between_shapes(net: Any) -> None:
    exe = ndl.compile(net, rows(4))
    for n in (4, 5, 6):
        agrees(exe, net, n)
    net.first.weight.data = net.first.weight.detach() * 2
    for n in (6, 4, 7, 5):
        agrees(exe, net, n)

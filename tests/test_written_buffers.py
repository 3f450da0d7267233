"""Compiled models that write their buffers: in place where that is right, with the values of eager calls."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import needle as ndl
import operator_fusion
from gpu_devices import everywhere, need_executor
from needle import nn, ops
from needle.backend_selection import BACKEND
from needle.graph import symbolic

pytestmark = pytest.mark.skipif(BACKEND == "np", reason="the numpy backend has no executor")


class Cache(nn.Module):
    """Rows of the input written into a buffer from a place on; `use` says what it returns."""

    def __init__(self, use: Callable) -> None:
        super().__init__()
        self.use = use
        self.linear = nn.Linear(4, 4)
        self.kept = ndl.Tensor(np.arange(2 * 6 * 4, dtype="float32").reshape(2, 6, 4), requires_grad=False)

    def forward(self, x: Any, place: Any) -> Any:
        return self.use(self, x, place)


def written(m: Cache, x: Any, place: Any) -> Any:
    m.kept.data = ops.index_copy(m.kept, 1, place, m.linear(x))
    return m.kept


def plain(m: Cache, x: Any, place: Any) -> Any:
    return written(m, x, place).sum((1,))


def old_and_new(m: Cache, x: Any, place: Any) -> Any:
    """The old value is read after the new one was there."""
    old = m.kept * 1
    new = written(m, x, place)
    return old, new, old - new


def old_itself(m: Cache, x: Any, place: Any) -> Any:
    old = m.kept[:, 1:3]
    return old, written(m, x, place).relu()


def twice(m: Cache, x: Any, place: Any) -> Any:
    m.kept.data = ops.index_copy(m.kept, 1, place, m.linear(x))
    m.kept.data = ops.index_copy(m.kept, 1, place + 1, x)
    return m.kept * 2, m.kept.reshape((2, -1))


def between(m: Cache, x: Any, place: Any) -> Any:
    """The first of two writes is read, too."""
    first = ops.index_copy(m.kept, 1, place, m.linear(x))
    m.kept.data = ops.index_copy(first, 1, place + 1, x)
    return first + 1, m.kept.relu()


def scaled(m: Cache, x: Any, place: Any) -> Any:
    m.kept.data = ops.index_copy(m.kept * 0.5, 1, place, x)
    return m.kept.transpose((1, 2)).exp()


def last_reader(m: Cache, x: Any, place: Any) -> Any:
    """An element-wise op that could overwrite the written value, were that not the buffer."""
    return ops.tanh(written(m, x, place))


USES = [written, plain, old_and_new, old_itself, twice, between, scaled, last_reader]


@everywhere
@pytest.mark.parametrize("use", USES, ids=[u.__name__ for u in USES])
def test_equals_eager_calls(use: Callable) -> None:
    need_executor()
    net = Cache(use).eval()
    twin = copy.deepcopy(net)
    rng = np.random.default_rng(0)
    exe = None
    for count, at in [(2, 0), (1, 2), (3, 2), (1, 4), (2, 1)]:
        x = ndl.Tensor(rng.standard_normal((2, count, 4)).astype("float32"), requires_grad=False)
        place = ndl.Tensor(np.arange(at, at + count), dtype="int64", requires_grad=False)
        exe = exe or ndl.compile(net, (x, place))
        got, want = exe(x, place), twin(x, place)
        for g, w in zip(*(v if isinstance(v, tuple) else (v,) for v in (got, want)), strict=True):
            np.testing.assert_allclose(g.numpy(), w.numpy(), rtol=0, atol=1e-5)
        np.testing.assert_allclose(net.kept.numpy(), twin.kept.numpy(), rtol=0, atol=1e-5)
        assert np.allclose(net(x, place)[0].numpy(), twin(x, place)[0].numpy(), atol=1e-5)  # eagerly again


def arguments(count: int = 2, at: int = 1) -> tuple[np.ndarray, np.ndarray]:
    return np.full((2, count, 4), 0.5, "float32"), np.arange(at, at + count)


def test_writes_the_rows_alone() -> None:
    exe = ndl.compile(Cache(plain).eval(), arguments())
    assert exe.plan.names.count("scatter") == 1 and "copy" not in exe.plan.names
    place = exe.model.kept.cached_data._handle
    for count in (1, 2, 3):
        exe(*arguments(count))
    assert exe.model.kept.cached_data._handle is place


def test_profiling_and_tuning_change_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("NEEDLE_CACHE", str(tmp_path))
    net = Cache(scaled).eval()
    before, memory = net.kept.numpy(), net.kept.cached_data
    exe = ndl.compile(net, arguments(), tune=True)
    exe.profile(*arguments(), rounds=3)
    named = dict(zip(("x", "place"), arguments(), strict=True))
    assert exe.profile(**named, rounds=1) and exe.profile(arguments()[0], place=arguments()[1], rounds=1)
    with pytest.raises(TypeError, match=r"^\[executable\] .*'other'\.$"):
        exe.profile(**named, other=1)
    for profiled in (exe, net, ndl.compile(lambda x, place: net(x, place), arguments())):
        ndl.profile(profiled, arguments(), rounds=1)
    np.testing.assert_array_equal(net.kept.numpy(), before)
    assert net.kept.cached_data is memory  # which others may share
    operator_fusion.fuse(symbolic(net), example=arguments())
    np.testing.assert_array_equal(net.kept.numpy(), before)


def test_threads_take_turns() -> None:
    """Every run halves the buffer: as many runs as halvings."""
    net = Cache(scaled).eval()
    exe = ndl.compile(net, arguments(1))
    before = net.kept.numpy()
    threads = [threading.Thread(target=lambda: [exe(*arguments(1)) for _ in range(5)]) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    np.testing.assert_array_equal(net.kept.numpy()[:, 0], before[:, 0] * 0.5**20)


def test_changed_weights_and_buffers_hold_from_the_next_run_on() -> None:
    net = Cache(plain).eval()
    exe = ndl.compile(net, arguments())
    exe(*arguments())
    net.linear.weight.data = ndl.Tensor(np.zeros((4, 4), "float32"))
    net.kept.data = ndl.Tensor(np.ones((2, 6, 4), "float32"))
    np.testing.assert_allclose(exe(*arguments()), 4.0 + 2 * np.broadcast_to(net.linear.bias.numpy(), (2, 4)), rtol=1e-6)


@everywhere
def test_rows_outside_are_seen() -> None:
    """They are refused; a plan on a GPU, which cannot, gives NaN, not what it has without the rows that were lost."""
    need_executor()
    net = Cache(plain).eval()
    x, place = (ndl.Tensor(a, dtype=str(a.dtype), requires_grad=False) for a in arguments(2, 5))
    with pytest.raises(IndexError, match=r"\[index_copy\] index expects numbers in \[0, 6\), got 5 to 6"):
        net(x, place)
    exe = ndl.compile(net, (x, place))
    if x.device == ndl.cpu():
        with pytest.raises(IndexError, match=r"^\[scatter\] index expects numbers from 0 to 5, got 6\.$"):
            exe(x, place)
    else:
        assert np.isnan(exe(x, place).numpy()).all()


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64", "bool"])
def test_index_copy_of_strided_arrays(dtype: str) -> None:
    rng = np.random.default_rng(1)
    base, rows = (rng.integers(0, 2, s).astype(dtype) for s in ((5, 3, 4), (2, 4, 3)))
    x, source = (ndl.Tensor(a, dtype=dtype, requires_grad=False) for a in (base, rows))
    made = ops.index_copy(x, 0, ndl.Tensor(np.array([4, 4]), dtype="int64"), source.transpose((1, 2)))
    base[4] = rows[1].T
    np.testing.assert_array_equal(made.numpy(), base)


def test_gradient_of_equal_numbers() -> None:
    """Only the row that stays has one."""
    x, source = ndl.Tensor(np.zeros((3, 2))), ndl.Tensor(np.ones((2, 2)))
    ops.index_copy(x, 0, ndl.Tensor(np.array([1, 1]), dtype="int64"), source).sum().backward()
    np.testing.assert_array_equal(source.grad.numpy(), [[0, 0], [1, 1]])
    np.testing.assert_array_equal(x.grad.numpy(), [[1, 1], [0, 0], [1, 1]])

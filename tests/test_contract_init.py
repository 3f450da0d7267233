"""Initialisers as the framework's contract has them: shapes, arguments, and which random numbers they draw."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import needle as ndl
from needle import init

SHAPE = (4, 6)
EXACT = {"rtol": 1e-6, "atol": 1e-7}


def drawn(f: Callable[[], Any]) -> np.ndarray:
    np.random.seed(7)
    return np.asarray(f())


def uniform(bound: float, *shape: int) -> np.ndarray:
    return drawn(lambda: np.random.rand(*shape)) * 2 * bound - bound


def normal(std: float, *shape: int) -> np.ndarray:
    return drawn(lambda: np.random.randn(*shape)) * std


RANDOM: dict[str, tuple[Callable[..., ndl.Tensor], Callable[[], np.ndarray]]] = {
    "rand": (lambda **k: init.rand(*SHAPE, **k), lambda: drawn(lambda: np.random.rand(*SHAPE))),
    "rand-range": (
        lambda **k: init.rand(*SHAPE, low=-2.0, high=3.0, **k),
        lambda: drawn(lambda: np.random.rand(*SHAPE)) * 5 - 2,
    ),
    "rand-0d": (lambda **k: init.rand(**k), lambda: drawn(lambda: np.random.rand())),
    "randn": (lambda **k: init.randn(*SHAPE, **k), lambda: normal(1.0, *SHAPE)),
    "randn-moved": (lambda **k: init.randn(*SHAPE, mean=1.0, std=0.5, **k), lambda: normal(0.5, *SHAPE) + 1),
    "randb": (lambda **k: init.randb(*SHAPE, **k), lambda: drawn(lambda: np.random.rand(*SHAPE)) <= 0.5),
    "randb-p": (lambda **k: init.randb(*SHAPE, p=0.8, **k), lambda: drawn(lambda: np.random.rand(*SHAPE)) <= 0.8),
    "xavier_uniform": (lambda **k: init.xavier_uniform(4, 6, **k), lambda: uniform(math.sqrt(6 / 10), 4, 6)),
    "xavier_uniform-gain": (
        lambda **k: init.xavier_uniform(4, 6, gain=1.5, **k),
        lambda: uniform(1.5 * math.sqrt(6 / 10), 4, 6),
    ),
    "xavier_normal": (
        lambda **k: init.xavier_normal(4, 6, gain=0.3, **k),
        lambda: normal(0.3 * math.sqrt(2 / 10), 4, 6),
    ),
    "kaiming_uniform": (lambda **k: init.kaiming_uniform(4, 6, **k), lambda: uniform(math.sqrt(6 / 4), 4, 6)),
    "kaiming_uniform-relu": (
        lambda **k: init.kaiming_uniform(4, 6, nonlinearity="relu", **k),
        lambda: uniform(math.sqrt(6 / 4), 4, 6),
    ),
    "kaiming_uniform-shape": (  # the bound still uses fan_in
        lambda **k: init.kaiming_uniform(27, 6, shape=(3, 3, 3, 6), **k),
        lambda: uniform(math.sqrt(6 / 27), 3, 3, 3, 6),
    ),
    "kaiming_normal": (lambda **k: init.kaiming_normal(4, 6, **k), lambda: normal(math.sqrt(2 / 4), 4, 6)),
}


@pytest.mark.parametrize("name", RANDOM)
def test_random_initialisers_draw_from_numpys_global_stream(name: str) -> None:
    make, want = RANDOM[name]
    expected = want()
    after = np.random.rand()  # one draw of the whole shape, and nothing more
    np.random.seed(7)
    got = make()
    assert np.random.rand() == after
    assert isinstance(got, ndl.Tensor)
    assert got.shape == expected.shape
    assert got.dtype == ("bool" if name.startswith("randb") else "float32")
    assert got.device == ndl.default_device()
    assert not got.requires_grad
    np.testing.assert_allclose(got.numpy(), expected, **EXACT)


@pytest.mark.parametrize("name", RANDOM)
def test_random_initialisers_take_device_dtype_and_requires_grad(name: str) -> None:
    make, want = RANDOM[name]
    expected = want()
    for device in (ndl.cpu(), ndl.cpu_numpy()):
        np.random.seed(7)
        got = make(device=device, dtype="float64", requires_grad=True)
        assert (got.device, got.dtype, got.requires_grad) == (device, "float64", True)
        np.testing.assert_allclose(got.numpy(), expected, rtol=1e-14)


CONSTANT: dict[str, tuple[Callable[..., ndl.Tensor], float]] = {
    "ones": (lambda **k: init.ones(*SHAPE, **k), 1.0),
    "zeros": (lambda **k: init.zeros(*SHAPE, **k), 0.0),
    "constant": (lambda **k: init.constant(*SHAPE, c=2.5, **k), 2.5),
    "constant-default": (lambda **k: init.constant(*SHAPE, **k), 1.0),
}


@pytest.mark.parametrize("name", CONSTANT)
def test_constants(name: str) -> None:
    make, value = CONSTANT[name]
    np.random.seed(7)
    got = make()
    assert (got.shape, got.dtype, got.device, got.requires_grad) == (SHAPE, "float32", ndl.default_device(), False)
    assert (got.numpy() == value).all()
    other = make(device=ndl.cpu_numpy(), dtype="float64", requires_grad=True)
    assert (other.device, other.dtype, other.requires_grad) == (ndl.cpu_numpy(), "float64", True)
    assert np.random.rand() == drawn(lambda: np.random.rand())  # no number was drawn


def test_one_hot() -> None:
    labels = np.array([2, 0, 4, 2])
    for i in (ndl.Tensor(labels), ndl.Tensor(labels.tolist()), ndl.Tensor(labels.astype("uint8"))):
        got = init.one_hot(5, i)
        assert (got.shape, got.dtype, got.device, got.requires_grad) == ((4, 5), "float32", i.device, False)
        assert (got.numpy() == np.eye(5)[labels]).all()
    grid = init.one_hot(3, ndl.Tensor([[0, 1], [2, 0]]), dtype="int64", device=ndl.cpu())
    assert (grid.shape, grid.dtype, grid.device) == ((2, 2, 3), "int64", ndl.cpu())
    with pytest.raises(IndexError, match=r"\[one_hot\] expects numbers in \[0, 5\), got 0 to 5\."):
        init.one_hot(5, ndl.Tensor([0.0, 5.0]))
    with pytest.raises(IndexError, match=r"\[one_hot\] expects numbers in \[0, 5\), got -1 to 3\."):
        init.one_hot(5, ndl.Tensor([-1.0, 3.0]))


@pytest.mark.parametrize(("make", "value"), [(init.ones_like, 1), (init.zeros_like, 0)], ids=["ones", "zeros"])
def test_like(make: Callable[..., ndl.Tensor], value: int) -> None:
    for device, dtype in ((ndl.cpu(), "float32"), (ndl.cpu_numpy(), "float64"), (ndl.cpu(), "int64")):
        x = ndl.Tensor(np.full(SHAPE, 3), device=device, dtype=dtype)
        got = make(x)
        assert (got.shape, got.dtype, got.device, got.requires_grad) == (SHAPE, dtype, device, False)
        assert (got.numpy() == value).all()
    assert make(x, requires_grad=True).requires_grad
    assert make(x, device=ndl.cpu_numpy()).device == ndl.cpu_numpy()


@pytest.mark.parametrize("f", [init.kaiming_uniform, init.kaiming_normal])
def test_kaiming_knows_relu_only(f: Callable[..., ndl.Tensor]) -> None:
    with pytest.raises(ValueError, match=r"\[kaiming\] nonlinearity expects relu, got tanh\."):
        f(3, 4, nonlinearity="tanh")


def test_bounds_and_spread_of_large_draws() -> None:
    w = init.kaiming_uniform(300, 200).numpy()
    bound = math.sqrt(6 / 300)
    assert np.abs(w).max() <= bound
    assert np.abs(w).max() > 0.99 * bound
    assert abs(init.kaiming_normal(300, 200).numpy().std() - math.sqrt(2 / 300)) < 1e-3
    assert abs(init.randb(200, 300, p=0.3).numpy().mean() - 0.3) < 0.01

"""NDArray as the framework's contract has it: operators, comparisons, reductions, products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import needle as ndl
from needle import backend_ndarray as nd
from values import made, same

# -- NDArray: arithmetic -------------------------------------------------------------------------------------------------

OPERATIONS: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "matmul": lambda a, b: a @ b,
    "neg": lambda a, b: -a,
    "power": lambda a, b: a**2,
    "power-fraction": lambda a, b: (a * a) ** 0.75,
    "add-scalar": lambda a, b: a + 1.5 + (2 + b),
    "sub-scalar": lambda a, b: (a - 1.5) * (1.5 - b),
    "mul-scalar": lambda a, b: 2 * a * 1.5,
    "div-scalar": lambda a, b: a / 3 + 1 / b,
}


@pytest.mark.parametrize("strided", [False, True], ids=["compact", "strided"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_operators(name: str, strided: bool) -> None:
    (x, a), (y, b) = made(6, 6), made(6, 6)
    if strided:
        x, y, a, b = x.T[::-1], y[:, ::-1], a.permute((1, 0)).flip((0,)), b.flip((1,))
    got = OPERATIONS[name](a, b)
    same(got, OPERATIONS[name](x, y), 1e-4)
    assert got.dtype == "float32"
    assert got.is_compact()


def test_numpy_operands() -> None:
    x, a = made(3, 3)
    y = np.random.randn(3, 3).astype("float32")
    for got in (a + y, y + a, np.float32(2) * a, a * np.float64(2)):
        assert isinstance(got, nd.NDArray)
    same(y - a, y - x)
    same(np.float64(2) - a, 2 - x)


@pytest.mark.parametrize("name", ["log", "exp", "tanh"])
def test_functions(name: str) -> None:
    x = np.random.rand(4, 5).astype("float32") + 0.1
    same(getattr(nd.array(x), name)(), getattr(np, name)(x))


def test_maximum() -> None:
    (x, a), (y, b) = made(3, 4), made(3, 4)
    same(a.maximum(b), np.maximum(x, y))
    same(a.maximum(0.25), np.maximum(x, 0.25))


COMPARISONS: dict[str, Callable[..., Any]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "ge": lambda a, b: a >= b,
    "gt": lambda a, b: a > b,
    "le": lambda a, b: a <= b,
    "lt": lambda a, b: a < b,
}


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64", "bool"])
@pytest.mark.parametrize("name", COMPARISONS)
def test_comparisons_give_float32(name: str, dtype: str) -> None:
    x, y = ((np.random.rand(2, 5, 5) * 3).astype("int64")).astype(dtype)
    a, b = nd.array(x, dtype=dtype), nd.array(y, dtype=dtype)
    for other, numpy in ((b, y), (1, 1), (0.5, 0.5)):
        got = COMPARISONS[name](a, other)
        assert got.dtype == "float32"
        same(got, COMPARISONS[name](x, numpy).astype("float32"))


def test_scalars_are_cast_to_float32_before_comparisons() -> None:
    a = nd.array(np.array([0.1, 0.2, 0.3], "float32"))
    assert (a == 0.1).numpy().tolist() == [1, 0, 0]
    assert (a >= 0.2).numpy().tolist() == [0, 1, 1]
    assert (a > 0.2).numpy().tolist() == [0, 0, 1]


def test_integers_and_numbers() -> None:
    a = nd.array(np.array([1, 2, 3]))
    assert a.dtype == "int64"
    for got, want, dtype in (
        (a + 1, [2, 3, 4], "int64"),
        (a * 0.5, [0.5, 1, 1.5], "float32"),
        (a / 2, [0.5, 1, 1.5], "float32"),
        (a + nd.array([0.5]), [1.5, 2.5, 3.5], "float32"),
        (a.exp(), np.exp([1, 2, 3]), "float32"),
        (-a, [-1, -2, -3], "int64"),
        (a.sum(), [6], "int64"),
        ((a == 2).sum(), [1], "float32"),
    ):
        assert got.dtype == dtype
        same(got, np.asarray(want))
    assert nd.array(np.array([True, False])).sum().numpy().tolist() == [1]


def test_truth_of_an_array() -> None:
    assert bool(nd.array([2.0]))
    assert not nd.array(0.0)
    assert float(nd.array([2.0])) == 2.0
    with pytest.raises(ValueError, match="ambiguous"):
        bool(nd.array([1.0, 2.0]))


REDUCED = [(None, (1,)), (0, (4, 5)), (1, (3, 5)), (-1, (3, 4)), ((0, 2), (4,)), ((0, 1, 2), ())]


@pytest.mark.parametrize("name", ["sum", "max"])
@pytest.mark.parametrize(("axis", "shape"), REDUCED)
def test_reductions(name: str, axis: Any, shape: tuple) -> None:
    x, a = made(3, 4, 5)
    got = getattr(a, name)(axis=axis)
    assert got.shape == shape
    same(got, getattr(x, name)(axis=axis).reshape(shape), 1e-4)
    same(getattr(a, name)(axis=axis, keepdims=True), getattr(x, name)(axis=axis, keepdims=True), 1e-4)
    same(getattr(a.permute((2, 0, 1)), name)(axis=0), getattr(x.transpose(2, 0, 1), name)(axis=0), 1e-4)


def test_pad() -> None:
    x, a = made(2, 3)
    same(a.pad(((1, 0), (2, 1))), np.pad(x, ((1, 0), (2, 1))))
    same(a.permute((1, 0)).pad(((0, 0), (0, 3)), value=2.0), np.pad(x.T, ((0, 0), (0, 3)), constant_values=2.0))


@pytest.mark.parametrize(("m", "k", "n"), [(1, 1, 1), (8, 8, 8), (7, 13, 5), (72, 72, 72), (128, 128, 128), (3, 0, 2)])
def test_matmul_is_close_to_float64(m: int, k: int, n: int) -> None:
    (x, a), (y, b) = made(m, k), made(k, n)
    want = x.astype("float64") @ y
    np.testing.assert_allclose((a @ b).numpy(), want, rtol=1e-5, atol=1e-5 * max(1.0, np.abs(want).max(initial=0)))


def test_broadcasting() -> None:
    (x, a), (y, b) = made(3, 1, 5), made(4, 1)
    same(a + b, x + y)
    same(a[:0] + b, x[:0] + y)


def test_empty_arrays_and_scalars() -> None:
    a = nd.array(np.zeros((0, 3), "float32"))
    assert (a + 1).shape == (0, 3)
    assert a.sum(axis=0).numpy().tolist() == [0, 0, 0]
    b = nd.array(2.5)
    assert b.shape == ()
    assert float(b * 2) == 5.0
    assert nd.full((2, 2), 3.0).numpy().tolist() == [[3, 3], [3, 3]]
    assert nd.empty((2, 3)).shape == (2, 3)


def test_arrays_at_the_left_of_a_tensor() -> None:
    t = ndl.Tensor([1.0, 2.0], device=ndl.cpu())
    assert isinstance(t * nd.array([2.0, 3.0]), ndl.Tensor)
    same(t * nd.array([2.0, 3.0]), [2.0, 6.0])


def test_functions_by_numpys_names() -> None:
    x, a = made(3, 4)
    same(nd.exp(a), np.exp(x))
    same(nd.log(nd.exp(a)), np.log(np.exp(x)))
    same(nd.tanh(a), np.tanh(x))
    same(nd.maximum(a, 0.5), np.maximum(x, np.float32(0.5)))
    same(nd.sum(a, axis=1), x.sum(1))
    same(nd.max(a, axis=(0, 1), keepdims=True), x.max(keepdims=True))
    same(nd.reshape(a, (2, 6)), x.reshape(2, 6))
    same(nd.flip(a, (1,)), x[:, ::-1])
    same(nd.broadcast_to(a, (2, 3, 4)), np.broadcast_to(x, (2, 3, 4)))
    same(nd.full((2, 3), 1.5), np.full((2, 3), np.float32(1.5)))


@pytest.mark.parametrize("shape", [(2, -3), (-2, -3), (-1, -1), (4,)])
def test_reshape_to_another_size_is_an_error(shape: tuple[int, ...]) -> None:
    _, a = made(2, 3)
    with pytest.raises(ValueError, match=r"\[reshape\] expects a shape of 6 elements"):
        a.reshape(shape)


@pytest.mark.parametrize("view", ["permuted", "sliced", "flipped", "broadcast"])
def test_kernels_walk_strides_without_a_copy(view: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, a = made(6, 8, 10)
    pick = {
        "permuted": lambda v: v.permute((2, 0, 1)) if v is a else v.transpose(2, 0, 1),
        "sliced": lambda v: v[::2, :, 1::3],
        "flipped": lambda v: v.flip((1,)) if v is a else v[:, ::-1],
        "broadcast": lambda v: v[:, :1].broadcast_to((6, 8, 10)) if v is a else np.broadcast_to(v[:, :1], v.shape),
    }[view]
    b, y = pick(a), pick(x)
    monkeypatch.setattr(nd.NDArray, "astype", lambda self, *args: pytest.fail("an operand was copied"))
    same(b.exp(), np.exp(y))
    same(b + b * 2, y + y * 2)
    same(b >= 0, (y >= 0).astype("float32"))
    same(b.max(axis=1), y.max(1))
    np.testing.assert_allclose(b.sum(axis=(0, 2)).numpy(), y.sum((0, 2)), rtol=1e-5, atol=1e-5)

"""NDArray as the framework's contract has it: attributes, views, assignment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from needle import backend_ndarray as nd
from values import made, same

# -- NDArray: attributes and views ---------------------------------------------------------------------------------------


def test_array_attributes() -> None:
    x, a = made(3, 4, 5)
    assert (a.shape, a.strides, a.size, a.ndim, a.dtype, a.device) == (
        (3, 4, 5),
        (20, 5, 1),
        60,
        3,
        "float32",
        nd.cpu(),
    )
    assert isinstance(a._handle.ptr(), int)
    assert a._handle.size == 60
    assert a.is_compact()
    same(a, x)
    a.numpy()[:] = 0
    same(a, x)
    b = nd.NDArray(a)
    b.fill(0.0)
    same(a, x)


def test_make() -> None:
    a = nd.NDArray.make((2, 3))
    assert (a.shape, a.strides, a.device, a.dtype, a.is_compact()) == ((2, 3), (3, 1), nd.cpu(), "float32", True)
    x, b = made(4, 6)
    view = nd.NDArray.make((2, 3), strides=(12, 2), device=nd.cpu(), handle=b._handle, offset=1)
    same(view, x[::2, 1::2])
    assert view._handle is b._handle
    with pytest.raises(ValueError, match="reaches outside its storage"):
        nd.NDArray.make((5, 6), device=nd.cpu(), handle=b._handle).numpy()
    with pytest.raises(ValueError, match=r"arrays on cpu_numpy\(\) are numpy arrays"):
        nd.array([1.0], device=nd.cpu_numpy())


class Named(nd.NDArray):
    """A subclass with members of its own."""

    def __init__(self, other: Any, name: str = "") -> None:
        super().__init__(other)
        self.name = name

    def doubled(self) -> nd.NDArray:
        return self * 2


def test_subclasses() -> None:
    a = Named(np.ones((2, 2)), name="ones")
    assert a.name == "ones"
    same(a.doubled() + a, np.full((2, 2), 3.0))
    same(Named(a).reshape((4,)), np.ones(4))
    assert isinstance(Named.make((2,)), Named)


def broadcast(a: Any, shape: tuple[int, ...]) -> Any:
    return np.broadcast_to(a, shape) if isinstance(a, np.ndarray) else a.broadcast_to(shape)


VIEWS: dict[str, Callable[[Any], Any]] = {
    "transpose": lambda a: a.T if isinstance(a, np.ndarray) else a.permute((2, 1, 0)),
    "permute": lambda a: a.transpose(1, 2, 0) if isinstance(a, np.ndarray) else a.permute((1, 2, 0)),
    "reshape": lambda a: a.reshape((2, 12, 5)),
    "reshape-1": lambda a: a.reshape((4, -1)),
    "reshape-ones": lambda a: a.reshape((1, 4, 1, 30)),
    "slice": lambda a: a[1:3, :, 2:4],
    "one-slice": lambda a: a[2:3],
    "steps": lambda a: a[::2, 1::3, ::-2],
    "int": lambda a: a[1],
    "ints": lambda a: a[1, :, -1],
    "all-ints": lambda a: a[3, 0, 2],
    "ellipsis": lambda a: a[..., 1:],
    "none": lambda a: a[:, None, 1],
    "backwards": lambda a: a[::-1],
    "past-the-end": lambda a: a[2:100, :, -3:],
    "slice-of-slice": lambda a: a[1:, ::2][1:, 1:, 1:],
    "flip": lambda a: np.flip(a, (0, 2)) if isinstance(a, np.ndarray) else a.flip((0, 2)),
    "flip-one": lambda a: np.flip(a, -1) if isinstance(a, np.ndarray) else a.flip(-1),
    "broadcast": lambda a: (
        np.broadcast_to(a[:, :1], (3, 4, 6, 5)) if isinstance(a, np.ndarray) else a[:, :1].broadcast_to((3, 4, 6, 5))
    ),
    "broadcast-ones": lambda a: (
        np.broadcast_to(a[:1], (1, 6, 5)) if isinstance(a, np.ndarray) else a[:1].broadcast_to((1, 6, 5))
    ),
    "broadcast-same": lambda a: np.broadcast_to(a, a.shape) if isinstance(a, np.ndarray) else a.broadcast_to(a.shape),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_share_memory_and_have_numpys_strides(name: str) -> None:
    x, a = made(4, 6, 5)
    want, got = VIEWS[name](x), VIEWS[name](a)
    same(got, want)
    assert got.strides == tuple(s // 4 for s in want.strides)
    assert isinstance(got.strides, tuple)
    assert got._handle is a._handle
    assert got._handle.ptr() == a._handle.ptr()
    compact = got.compact()
    assert compact.is_compact()
    same(compact, want)
    assert (compact is got) == got.is_compact()
    if isinstance(want, np.ndarray) and "broadcast" not in name:
        got[...] = 7.0
        want[...] = 7.0
        same(a, x)


def test_wrong_views_are_errors() -> None:
    a = made(2, 3)[1]
    for f, error in (
        (lambda: a.reshape((4, 2)), r"\[reshape\] expects a shape of 6 elements, got \(4, 2\)\."),
        (lambda: a.reshape((4, -1)), r"\[reshape\] expects a shape of 6 elements"),
        (lambda: a.permute((0, 0)), r"\[permute\] axes \(0, 0\) are no permutation"),
        (
            lambda: a.broadcast_to((2, 4)),
            r"\[broadcast_to\] expects a shape that broadcasts to \(2, 4\), got \(2, 3\)\.",
        ),
        (lambda: a[2], r"\[getitem\] index 2 is out of range for axis 0 of size 2\."),
        (lambda: a[0, 0, 0], r"\[getitem\] too many indices for shape \(2, 3\), got 3\."),
        (lambda: a[True], r"\[getitem\] expects integers, slices, None and \.\.\., got bool\."),
        (lambda: a @ a, r"\[matmul\] expects \(\.\.\., M, K\) and \(\.\.\., K, N\), got \(2, 3\) and \(2, 3\)\."),
        (lambda: a + made(3, 2)[1], r"\[add\] shapes \(2, 3\), \(3, 2\) do not broadcast together\."),
        (lambda: a.sum(axis=2), r"\[sum\] axis 2 is out of range for shape \(2, 3\)\."),
    ):
        with pytest.raises((ValueError, IndexError, TypeError), match=error):
            f()


def test_process_slice() -> None:
    a = made(4, 6)[1]
    assert a.process_slice(slice(None), 1) == slice(0, 6, 1)
    assert a.process_slice(slice(-3, None), 0) == slice(1, 4, 1)
    assert a.process_slice(slice(1, 100, 2), 1) == slice(1, 6, 2)


WRITES: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "number": (np.s_[1:3, ::2], lambda m: 3.5),
    "array": (np.s_[1:3, ::2], lambda m: m(np.arange(6.0).reshape(2, 3))),
    "broadcast": (np.s_[1:3, ::2], lambda m: m(np.arange(3.0))),
    "int": (np.s_[2], lambda m: m(np.arange(6.0))),
    "ints": (np.s_[2, 3], lambda m: -1),
    "everything": (np.s_[...], lambda m: 0.0),
    "backwards": (np.s_[::-1, 4:1:-1], lambda m: m(np.arange(12.0).reshape(4, 3))),
    "strided-source": (np.s_[:2, :4], lambda m: m(np.arange(16.0).reshape(4, 4))[::2]),
}


@pytest.mark.parametrize("name", WRITES)
def test_assignment_in_place(name: str) -> None:
    index, value = WRITES[name]
    x, a = made(4, 6)
    pointer, whole = a._handle.ptr(), a.reshape((2, 12))
    x[index] = value(lambda v: v)
    a[index] = value(lambda v: nd.array(v, device=nd.cpu()))
    same(a, x)
    same(whole, x.reshape(2, 12))
    assert a._handle.ptr() == pointer
    a[index] = value(lambda v: v)  # a numpy array as the value
    same(a, x)


def test_assignment_to_overlapping_memory() -> None:
    x, a = made(2000, 8)
    x[1:], x[:, ::-1] = x[:-1].copy(), x.copy()
    b = nd.array(a)
    b[1:] = b[:-1]
    same(b, np.concatenate([a.numpy()[:1], a.numpy()[:-1]]))
    c = nd.array(a)
    c[:, ::-1] = c
    same(c, a.numpy()[:, ::-1])


def test_flat_of_a_compact_array_is_a_view() -> None:
    x, a = made(3, 4)
    assert a.flat._handle is a._handle
    assert a.flat.shape == (12,)
    for j in (0, 5, -1):
        a.flat[j] += 0.5
        x.flat[j] += 0.5
    a.flat[2:4] = 9.0
    x.flat[2:4] = 9.0
    same(a, x)


@pytest.mark.parametrize("view", ["permute", "steps", "flip"])
def test_flat_of_a_strided_array_writes_through(view: str) -> None:
    x, a = made(4, 6, 5)
    want, got = VIEWS[view](x), VIEWS[view](a)
    for j in (0, 7, -1):
        before = got.flat[j]
        got.flat[j] += 0.5
        got.flat[j] -= 2.0
        want.flat[j] -= 1.5
        same(before, np.asarray(want.flat[j] + 1.5))
    got.flat[1:4] = [1.0, 2.0, 3.0]
    want.flat[1:4] = [1.0, 2.0, 3.0]
    same(a, x)
    same(got.flat, want.reshape(-1))
    same(got.flat[2:5], want.reshape(-1)[2:5])
    same([float(v) for v in got.flat], want.reshape(-1))
    assert got.flat.size == len(got.flat) == want.size
    with pytest.raises(IndexError, match=r"\[flat\] index 500 is out of range"):
        got.flat[500] = 0.0

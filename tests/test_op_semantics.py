"""torch's rules at the corners of ops: dtypes that meet, whole numbers beyond 2 ** 53, NaN, no axes, no elements.

Each function of tensors gives torch's dtype, shape and values eagerly, in a plan, saved and loaded, and in numpy.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import needle as ndl
import torch2needle
from conversion import close, leaves
from op_cases import CASES, EMPTY, INF, NEEDS_EXAMPLE, bools, i64, t

UNKNOWN = [name for name in CASES if name not in NEEDS_EXAMPLE]


class Calls(nn.Module):
    def __init__(self, f: Callable) -> None:
        super().__init__()
        self.f = f


class One(Calls):
    def forward(self, x: torch.Tensor) -> Any:
        return self.f(x)


class Two(Calls):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return self.f(x, y)


class Three(Calls):
    def forward(self, x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> Any:
        return self.f(x, y, w)


def calls(f: Callable, count: int) -> nn.Module:
    return (One, Two, Three)[count - 1](f)


def agrees(got: Any, want: Any) -> None:
    assert [str(np.asarray(o.numpy()).dtype) for o in leaves(got)] == [str(o.dtype)[6:] for o in leaves(want)]
    for mine, theirs in zip(leaves(got), leaves(want), strict=True):
        mine, theirs = np.asarray(mine.numpy()), theirs.numpy()
        assert mine.shape == theirs.shape
        if theirs.dtype.kind == "f":
            finite = np.isfinite(theirs)
            np.testing.assert_array_equal(np.where(finite, 0, mine), np.where(finite, 0, theirs))
            close(*(torch.tensor(np.where(finite, v, 0)) for v in (mine, theirs)))
        else:
            np.testing.assert_array_equal(mine, theirs)


@pytest.fixture(scope="module")
def converted() -> Callable:
    made: dict[str, Any] = {}

    def net(name: str) -> Any:
        f, inputs = CASES[name]
        if name not in made:
            model = calls(f, len(inputs))
            made[name] = torch2needle.convert(model, tuple(inputs)), model(*inputs)
        return (*made[name], inputs)

    return net


@pytest.mark.parametrize("name", CASES)
def test_eager(name: str, converted: Callable) -> None:
    net, want, inputs = converted(name)
    agrees(net(*inputs), want)


@pytest.mark.parametrize("name", UNKNOWN)
def test_without_an_example(name: str) -> None:
    f, inputs = CASES[name]
    agrees(torch2needle.convert(calls(f, len(inputs)))(*inputs), f(*inputs))


@pytest.mark.parametrize("name", CASES)
def test_compiled(name: str, converted: Callable) -> None:
    net, want, inputs = converted(name)
    agrees(ndl.compile(net, inputs)(*inputs), want)


@pytest.mark.parametrize("name", CASES)
def test_saved_and_loaded_in_numpy(name: str, converted: Callable, tmp_path: Path) -> None:
    net, want, inputs = converted(name)
    ndl.save(net, tmp_path / "net.needle")
    loaded = ndl.load(tmp_path / "net.needle")
    agrees(loaded(*inputs), want)
    where = {"device": ndl.cpu_numpy(), "requires_grad": False}
    agrees(loaded.to(ndl.cpu_numpy())(*(ndl.Tensor(x.numpy(), dtype=str(x.dtype)[6:], **where) for x in inputs)), want)


REFUSED: dict[str, tuple[Callable, tuple[torch.Tensor, ...], str]] = {
    "an integer divided by 0": (lambda x: x // (x - 1), (i64(1, 2),), "divisor expects numbers other than 0"),
    "a remainder of 0": (lambda x: x % 0, (i64(1, 2),), "divisor expects numbers other than 0"),
    "the largest of none": (lambda x: torch.amax(x, 0), (EMPTY,), "expects at least one element"),
    "the place of the largest of none": (lambda x: x.argmax(), (EMPTY,), "expects at least one element"),
    "infinity as an int": (
        lambda x: x.masked_fill(x > 0, INF),
        (i64(1, 2),),
        "value expects a number that int64 can hold",
    ),
    "more than int32 holds": (lambda x: x.clamp(max=2**40), (t(1, 2, dtype="int32"),), "that int32 can hold"),
    "bools times bools": (lambda x: x @ x.t(), (bools([True], [False]),), "operands expect numbers, got bools"),
    "einsum of bools": (lambda x: torch.einsum("ab,cb->ac", x, x), (bools([True, False]),), "operands expect numbers"),
    "more than 64 bits": (lambda x: x + 2**64, (i64(1, 2),), "at most 64 bits"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_a_sentence(name: str) -> None:
    """What torch refuses, too."""
    f, inputs, text = REFUSED[name]
    with pytest.raises((RuntimeError, IndexError, ZeroDivisionError, OverflowError, TypeError)):
        f(*inputs)
    with pytest.raises((ValueError, torch2needle.ConversionError), match=text):
        torch2needle.convert(calls(f, len(inputs)))(*inputs)


@pytest.mark.parametrize(
    "f",
    [lambda x, k: x.tril(k), lambda x, k: x.amax(k), lambda x, k: x[k:], lambda x, k: x.narrow(0, k, 1), F.leaky_relu],
)
def test_numbers_from_tensors_are_refused(f: Callable) -> None:
    with pytest.raises(torch2needle.ConversionError, match="got the value of the tensor"):
        torch2needle.convert(Two(lambda x, k: f(x, k)))


def test_pieces_of_unknown_number_are_refused() -> None:
    with pytest.raises(torch2needle.ConversionError, match="number of pieces"):
        torch2needle.convert(One(lambda x: x.split(1)))


def test_bits_in_place_without_an_example() -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(x).bitwise_or_(x).bitwise_or_(y)

    class Two(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return f(x, y)

    inputs = t(5, 6, dtype="int32"), i64(2, 9)
    agrees(torch2needle.convert(Two())(*inputs), f(*inputs))

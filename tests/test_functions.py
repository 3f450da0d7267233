"""Vector forms of functions that the C library has for single numbers, in units of the last place of float32 beside float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from needle.backend_ndarray import NDArray, call
from needle.backend_selection import BACKEND

pytestmark = pytest.mark.skipif(BACKEND == "np", reason="kernels")

COUNT = 40_003  # not whole vectors
SPECIAL = np.array(
    [0, -0.0, np.inf, -np.inf, np.nan, 1, -1, 1e-37, -1e-37, 3, 2, -2, 0.5, 8192, -8193, 3e38], "float32"
)
TINY = np.finfo("float32").tiny
RNG = np.random.default_rng(0)


def spread(least: float, most: float) -> np.ndarray:
    """Numbers of both signs, as many of each size."""
    sizes = np.exp(RNG.uniform(np.log(least), np.log(most), COUNT))
    return np.concatenate([SPECIAL, sizes * RNG.choice([-1, 1], COUNT)]).astype("float32")


def any_bits() -> np.ndarray:
    x = RNG.integers(0, 2**32, COUNT, dtype=np.uint64).astype("uint32").view("float32")
    return np.where(np.abs(x) < TINY, np.float32(1), x)


def apart(got: np.ndarray, want: np.ndarray) -> float:
    """The largest distance, in units of the last place; infinite where one is no number, or another zero or infinity.

    Runs flush numbers below TINY to zero.
    """
    usual = ~(np.abs(want) < TINY) | (want == 0)
    got, want = got[usual], want[usual]
    with np.errstate(all="ignore"):
        as_float = want.astype("float32")
        unit = np.maximum(np.spacing(np.abs(as_float)).astype("float64"), 1.4e-45)
        distance = np.abs(got.astype("float64") - want) / unit
    distance[(np.isnan(got) & np.isnan(want)) | (got == as_float)] = 0
    signs = (np.signbit(got) != np.signbit(want)) & ~np.isnan(got)
    return float(np.where(np.isnan(distance) | signs, np.inf, distance).max())


def by_torch(f: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[np.ndarray], np.ndarray]:
    return lambda x: f(torch.tensor(x)).numpy()


FUNCTIONS: dict[str, tuple[Callable[[np.ndarray], np.ndarray], tuple[np.ndarray, ...]]] = {
    "sin": (np.sin, (spread(1e-6, 1e4), any_bits())),
    "cos": (np.cos, (spread(1e-6, 1e4), any_bits())),
    "atan": (np.arctan, (spread(1e-6, 1e6), spread(0.5, 2), any_bits())),
    "asin": (np.arcsin, (spread(1e-6, 1), spread(0.3, 1), any_bits())),
    "acos": (np.arccos, (spread(1e-6, 1), spread(0.3, 1), any_bits())),
    "sinh": (np.sinh, (spread(1e-6, 100), any_bits())),
    "cosh": (np.cosh, (spread(1e-6, 100), any_bits())),
    "atanh": (np.arctanh, (spread(1e-6, 1), spread(0.3, 1), any_bits())),
    "exp2": (np.exp2, (spread(1e-6, 160), any_bits())),
    "log2": (np.log2, (spread(0.5, 2), any_bits())),
    "log10": (np.log10, (spread(0.5, 2), any_bits())),
    "tan": (np.tan, (spread(1e-6, 1e6), any_bits())),
    "asinh": (np.arcsinh, (spread(1e-6, 1e6), any_bits())),
    "acosh": (np.arccosh, (spread(0.5, 1.5), any_bits())),
    "erfc": (np.vectorize(math.erfc), (spread(1e-6, 10), any_bits())),
    "lgamma": (by_torch(torch.lgamma), (spread(1e-6, 1e4), spread(0.5, 3), any_bits())),
    "digamma": (by_torch(torch.digamma), (spread(1e-6, 1e4), spread(0.5, 3), any_bits())),
    "erfinv": (by_torch(torch.erfinv), (spread(1e-6, 1), spread(0.9, 1), any_bits())),
}
CLOSE = {
    "tan": 1.1,
    "asinh": 0.51,
    "acosh": 0.51,
    "erfc": 0.51,
    "lgamma": 1.1,
    "digamma": 1.1,
    "erfinv": 0.55,
}  # those in double, and the C library's tangents


@pytest.mark.parametrize("name", FUNCTIONS)
def test_within_units_of_the_last_place(name: str) -> None:
    function, arguments = FUNCTIONS[name]
    for x in arguments:
        out = NDArray.empty(x.shape)
        call(name, [out], x=NDArray(x))
        with np.errstate(all="ignore"):
            assert apart(out.numpy(), function(x.astype("float64"))) <= CLOSE.get(name, 2.5)


def remainder(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """With the sign of y, but for zeros, as torch's."""
    rest = np.fmod(x, y)
    return np.where((rest != 0) & ((rest < 0) != (y < 0)), rest + y, rest)


def whole_numbers() -> np.ndarray:
    return RNG.integers(-50, 50, COUNT).astype("float32")


def test_powers() -> None:
    special = np.concatenate([SPECIAL, np.array([2**24 - 1, -(2**24) + 1, 2**25, 33.5, -7, 101], "float32")])
    for x, y in [
        (np.repeat(special, len(special)), np.tile(special, len(special))),
        (spread(1e-3, 1e3), spread(1e-3, 30)),
        (spread(0.9, 1.1), spread(1, 1e3)),
        (spread(1e-3, 1e3), np.concatenate([SPECIAL, whole_numbers()])),
    ]:
        out = NDArray.empty(x.shape)
        call("power", [out], x=NDArray(x), y=NDArray(y))
        with np.errstate(all="ignore"):
            assert apart(out.numpy(), np.power(x.astype("float64"), y.astype("float64"))) <= 0.51


OF_TWO = {"atan2": np.arctan2, "fmod": np.fmod, "remainder": remainder}


@pytest.mark.parametrize("name", [*OF_TWO, "floor_divide"])
def test_of_two(name: str) -> None:
    pairs = [
        (spread(1e-3, 1e3), spread(1e-3, 1e3)),
        (spread(1e-3, 1e9), spread(1e-3, 10)),
        (np.repeat(SPECIAL, len(SPECIAL)), np.tile(SPECIAL, len(SPECIAL))),
        (whole_numbers(), whole_numbers()),
    ]
    for x, y in pairs:
        out = NDArray.empty(x.shape)
        call(name, [out], x=NDArray(x), y=NDArray(y))
        with np.errstate(all="ignore"):
            if name == "floor_divide":  # torch's is of float32
                want = torch.floor_divide(torch.from_numpy(x), torch.from_numpy(y)).numpy().astype("float64")
            else:
                want = OF_TWO[name](x.astype("float64"), y.astype("float64"))
        usual = (np.abs(y) > 1e-30) | (name != "floor_divide")  # torch's quotients overflow
        assert apart(out.numpy()[usual], want[usual]) <= (2.5 if name == "atan2" else 0)

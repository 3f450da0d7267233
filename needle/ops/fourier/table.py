"""Numbers that csrc/cpu/fft.cpp multiplies by, computed in double and kept by length."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from needle.backend_ndarray import NDArray
from needle.backend_ndarray.kernels import unplanned

RADICES = (2, 3, 5, 7, 11, 13)
DIRECT = 4096  # longest transform with a table for vectors of rows; fft.cpp's kDirect
SPLIT = 256  # length from which one row is two passes over columns


class Plan(NamedTuple):
    """How a transform of length n runs: one of `core` complex numbers by stages of length m, in two passes if m1 > 1."""

    core: int
    m: int
    m1: int
    table: NDArray


def is_smooth(n: int) -> bool:
    for r in RADICES:
        while n % r == 0:
            n //= r
    return n == 1


def convolution_length(n: int) -> int:
    """The smallest length of many factors 2 that holds a convolution of n numbers with 2 n - 1."""
    least = 2 * n - 1
    return min(f << max(0, (-(-least // f) - 1).bit_length()) for f in (1, 3, 5, 9, 15))


def split(m: int) -> int:
    """The factor of m nearest to its root, 1 where there is none to speak of."""
    if m < SPLIT:
        return 1
    m1 = next(d for d in range(int(m**0.5), 0, -1) if m % d == 0)
    return m1 if m1 >= 4 or m > DIRECT else 1


def roots(n: int, powers: np.ndarray) -> np.ndarray:
    """e ** (-2 pi i k / n)."""
    return np.exp(-2j * np.pi * (powers % n) / n)


def tables(core: int, m: int, m1: int, halved: bool) -> Iterator[np.ndarray]:
    """In the order of `Table` in fft.cpp."""
    if m <= DIRECT:
        yield roots(m, np.arange(m))
    if m1 > 1:
        m2 = m // m1
        yield roots(m1, np.arange(m1))
        yield roots(m2, np.arange(m2))
        yield roots(m, np.outer(np.arange(m1), np.arange(m2)).ravel())
    if m != core:
        chirp = roots(2 * core, np.arange(core) ** 2)
        around = np.zeros(m, complex)
        around[:core] = chirp.conj()
        around[m - core + 1 :] = chirp.conj()[:0:-1]
        yield chirp
        yield np.fft.fft(around) / m
    if halved:
        half = roots(2 * core, np.arange(core + 1))
        half[core] = -1  # without the rounding of its sine: that frequency is real
        yield half


@lru_cache(maxsize=64)
def plan(n: int, real: bool, dtype: str) -> Plan:
    """real: values or results are real, and two of them count as one complex number where n is even."""
    halved = real and n % 2 == 0
    core = n // 2 if halved else n
    m = core if is_smooth(core) else convolution_length(core)
    m1 = split(m)
    flat = np.concatenate([np.concatenate([t.real, t.imag]) for t in tables(core, m, m1, halved)])
    with unplanned():
        return Plan(core, m, m1, NDArray(flat, dtype=dtype))

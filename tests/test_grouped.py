"""Products of groups of rows with a matrix each: ends in any order, empty groups, rows behind the last end."""

from __future__ import annotations

import numpy as np

import needle as ndl
from needle import ops

Array = np.ndarray


def groups(rows: Array, ends: Array) -> list[slice]:
    ends = np.sort(ends.clip(0, len(rows)))
    return [slice(a, b) for a, b in zip([0, *ends], ends, strict=False)]


def by_rows(a: Array, b: Array, ends: Array) -> Array:
    y = np.zeros((len(a), b.shape[2]))
    for matrix, rows in zip(b, groups(a, ends), strict=True):
        y[rows] = a[rows].astype("float64") @ matrix
    return y


def summed(a: Array, b: Array, ends: Array) -> Array:
    return np.array([a[rows].T.astype("float64") @ b[rows] for rows in groups(a, ends)])


def test_drawn_groups() -> None:
    draw = np.random.default_rng(0)
    for _ in range(300):
        (size, n), (k, m) = draw.integers((0, 1), (20, 9)), draw.integers(0, 40, 2)
        ends = draw.integers(-2, size + 3, n).astype(draw.choice(["int32", "int64"]))
        for dtype, tolerance in (("float32", 2e-6), ("float64", 1e-14)):
            a, b, c = (draw.standard_normal(s).astype(dtype) for s in ((size, k), (n, k, m), (size, m)))
            x, w, y, e = (ndl.Tensor(v, dtype=str(v.dtype), requires_grad=False) for v in (a, b, c, ends))
            turned = ops.permute(ndl.Tensor(b.swapaxes(1, 2).copy(), dtype=dtype, requires_grad=False), (0, 2, 1))
            for got, want in (
                (ops.grouped_matmul(x, w, e), by_rows(a, b, ends)),
                (ops.grouped_matmul(x, turned, e), by_rows(a, b, ends)),
                (ops.grouped_outer(x, y, e), summed(a, c, ends)),
            ):
                assert got.shape == want.shape
                assert np.abs(got.numpy() - want).max(initial=0) <= tolerance * max(1, np.abs(want).max(initial=0))

"""Attention of one query a head, which reads keys and values where they lie: against float64 torch, on every instruction set."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import needle as ndl
from needle import ops
from needle.backend_selection import BACKEND

pytestmark = pytest.mark.skipif(BACKEND == "np", reason="the numpy backend has no kernels")
SIZES = [  # heads, keys, width of keys, width of values
    (1, 1, 1, 1),
    (3, 2, 5, 7),
    (2, 17, 16, 64),
    (12, 256, 64, 64),
    (5, 257, 65, 63),
    (2, 1000, 128, 129),
    (7, 33, 40, 200),
]
MASKS = ["none", "causal", "bool", "float", "all hidden"]
ORDERS = ["plain", "heads inside", "shared", "keys apart"]


def drawn(rng: Any, order: str, heads: int, keys: int, width: int) -> np.ndarray:
    """(2, heads, keys, width) in several orders of memory; shared: one for all heads."""
    if order == "heads inside":
        return rng.standard_normal((2, keys, heads, width), dtype="float32").transpose(0, 2, 1, 3)
    if order == "shared":
        return np.broadcast_to(rng.standard_normal((2, 1, keys, width), dtype="float32"), (2, heads, keys, width))
    if order == "keys apart":  # the last axis is not dense: another way through the kernel
        return rng.standard_normal((2, heads, width, keys), dtype="float32").swapaxes(2, 3)
    return rng.standard_normal((2, heads, keys, width), dtype="float32")


def mask_of(rng: Any, kind: str, heads: int, keys: int) -> np.ndarray | None:
    if kind in ("none", "causal"):
        return None
    if kind == "all hidden":
        return np.zeros((1, 1, 1, keys), "bool")
    keep = rng.random((2, heads, 1, keys)) > 0.4
    keep[..., 0] = True
    return keep if kind == "bool" else np.where(keep, rng.standard_normal(keep.shape), -np.inf).astype("float32")


def tensor(x: np.ndarray) -> Any:
    """A Tensor of the array's own order in memory."""
    order = sorted(range(x.ndim), key=lambda d: -x.strides[d])
    if 0 in x.strides:
        return ops.broadcast_to(ndl.Tensor(np.ascontiguousarray(x[:, :1])), x.shape)
    return ops.permute(ndl.Tensor(np.ascontiguousarray(x.transpose(order))), tuple(np.argsort(order)))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_one_query(sizes: tuple[int, ...], kind: str, order: str) -> None:
    heads, keys, width, out = sizes
    rng = np.random.default_rng(keys)
    q = rng.standard_normal((2, heads, 1, width), dtype="float32")
    k, v = drawn(rng, order, heads, keys, width), drawn(rng, order, heads, keys, out)
    mask, causal = mask_of(rng, kind, heads, keys), kind == "causal"
    exact = [torch.from_numpy(np.ascontiguousarray(a)).double() for a in (q, k, v)]
    given = None if mask is None else torch.from_numpy(mask)
    given = given.double() if given is not None and given.is_floating_point() else given
    want = F.scaled_dot_product_attention(*exact, attn_mask=given, is_causal=causal).numpy()
    places = [tensor(a) for a in (q, k, v)]
    masks = None if mask is None else ndl.Tensor(mask, dtype=str(mask.dtype))

    def run(q: Any, k: Any, v: Any) -> Any:
        return ops.scaled_dot_product_attention(q, k, v, masks, causal)

    got = run(*places).numpy()
    if kind == "all hidden":
        assert np.isnan(want).all() == np.isnan(got).all()
        return
    np.testing.assert_allclose(got, want, rtol=0, atol=3e-6 * np.abs(want).max())
    compiled = ndl.compile(run, tuple(places))(*places).numpy()
    np.testing.assert_allclose(compiled, want, rtol=0, atol=3e-6 * np.abs(want).max())


def test_nan_and_infinity() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 3, n, 8), dtype="float32") for n in (1, 5, 5))
    for where, value in ((k, np.nan), (v, np.nan), (v, np.inf), (k, np.inf), (q, np.nan)):
        kept = where[0, 1, 0, 2]
        where[0, 1, 0, 2] = value
        a, b, c = map(torch.from_numpy, (q, k, v))  # torch's own kernel makes 0 of a query that is NaN
        want = ((a @ b.mT / 8**0.5).softmax(-1) @ c).numpy()
        got = ops.scaled_dot_product_attention(*map(ndl.Tensor, (q, k, v))).numpy()
        where[0, 1, 0, 2] = kept
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif("NEEDLE_ISA" in os.environ, reason="the whole suite runs on one of them")
@pytest.mark.parametrize("isa", ["scalar", "avx2"])
def test_other_instruction_sets(isa: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", __file__, "-k", "test_one_query or nan"]
    done = subprocess.run(command, env=os.environ | {"NEEDLE_ISA": isa}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:]

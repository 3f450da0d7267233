"""Attention on the GPU backends against numpy in float64: in the host emulation at both wave widths on any machine, and on a
CUDA device where there is one."""

# ruff: noqa: F811  (fixtures are imported by name)
from __future__ import annotations

import numpy as np
import pytest

from gpu_kernels import close, double, inside, nans, run
from test_gpu import Backend, backend, normal  # noqa: F401

PRECISIONS = {"float32": 5e-6, "tf32": 1e-3, "float16": 1e-2, "bfloat16": 1e-2}  # errors, relative to the largest


def soft(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


ATTENTIONS = [  # batch, queries, keys, features, values
    ((2, 3), 5, 7, 8, 16),
    ((), 33, 33, 5, 3),
    ((1, 1), 1, 150, 40, 1),
    ((2,), 70, 130, 64, 64),
    ((1,), 65, 1, 33, 132),
    ((1,), 1, 1, 1, 1),
    ((2,), 3, 0, 4, 5),
    ((1,), 1, 2000, 64, 64),  # few queries: the keys are shared out, in as many parts as fill the device or hold 256
    ((2, 1), 8, 700, 40, 132),
    ((), 5, 257, 33, 70),
    ((3, 8), 2, 321, 8, 65),
    ((1,), 9, 500, 16, 16),
    ((1,), 70, 130, 0, 5),  # no features: the loops that load them order nothing
    ((), 4, 130, 0, 5),
]


@pytest.mark.parametrize("case", ATTENTIONS, ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", ["none", "bool", "float"])
def test_attention(backend: Backend, case: tuple, causal: bool, mask: str) -> None:
    batch, length, source, features, values = case
    q, k = normal(*batch, length, features), inside(normal(*batch, source, features, seed=1))
    v = np.ascontiguousarray(normal(*batch, source, values, seed=2).swapaxes(-1, -2)).swapaxes(-1, -2)
    s = np.matmul(*double(q, k.swapaxes(-1, -2))) * 0.7
    extra = []
    if mask == "bool":
        keep = np.random.default_rng(0).random((length, source)) < 0.7
        keep[0] = False
        s = np.where(keep, s, -np.inf)
        extra = [np.broadcast_to(keep, (*batch, length, source))]
    if mask == "float":
        added = normal(length, source, seed=3)
        added[:, :1] = -np.inf
        s = s + added
        extra = [np.broadcast_to(added, (*batch, length, source))]
    if causal:
        s = np.where(np.tril(np.ones((length, source), bool)), s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True, initial=-1e30))
    exact = p / np.maximum(p.sum(-1, keepdims=True), 1e-300) @ v.astype(float)
    memory = nans(*batch[:-1], length, *batch[-1:], values)  # (..., L, heads, D), as the op asks for it
    out = memory.swapaxes(-2, -3) if batch else memory
    run(backend, "attention", [out], [q, k, v, *extra], scale=0.7, causal=causal, strict=0)
    close(out, exact)


@pytest.mark.parametrize("queries", [1, 4])
def test_attention_of_few_queries_over_hidden_and_invalid_keys(backend: Backend, queries: int) -> None:
    """Whole parts of the keys that are hidden; NaN in one key reaches every result, infinite values only where they weigh."""
    q, k, v = normal(queries, 20), normal(1500, 20, seed=1), normal(1500, 9, seed=2)
    keep = np.zeros((queries, 1500), bool)
    keep[:, 700:710] = True
    s = np.where(keep, double(q)[0] @ double(k)[0].T, -np.inf)
    out = nans(queries, 9)
    run(backend, "attention", [out], [q, k, v, keep], scale=1, causal=0, strict=0)
    close(out, soft(s) @ double(v)[0])
    k[1200] = np.nan
    run(backend, "attention", [out], [q, k, v, keep], scale=1, causal=0, strict=0)
    close(out, soft(s) @ double(v)[0])
    run(backend, "attention", [out], [q, k, v], scale=1, causal=0, strict=0)
    assert np.isnan(out).all()


@pytest.mark.parametrize("case", [c for c in ATTENTIONS if c[2] > 200], ids=str)
def test_attention_does_not_depend_on_thread_order(backend: Backend, case: tuple, monkeypatch) -> None:
    batch, length, source, features, values = case
    ins = [normal(*batch, length, features), normal(*batch, source, features), normal(*batch, source, values)]
    found = []
    for order in "01":
        monkeypatch.setenv("NEEDLE_EMULATION_REVERSE", order)
        found.append(nans(*batch, length, values))
        run(backend, "attention", found[-1:], ins, scale=0.7, causal=0, strict=0)
    assert np.array_equal(*found)


def attend(backend: Backend, precision: str, out: np.ndarray, ins: list, **attributes: float) -> None:
    number = list(PRECISIONS).index(precision)
    run(backend, "attention_fused", [out], ins, **{"causal": 0, "strict": 0} | attributes, precision=number)


def by_heads(a: np.ndarray) -> np.ndarray:
    """(..., heads, L, D) whose memory is (..., L, heads, D)."""
    return np.ascontiguousarray(a.swapaxes(-2, -3)).swapaxes(-2, -3)


def turned(a: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(a.swapaxes(-1, -2)).swapaxes(-1, -2)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("precision", PRECISIONS)
def test_drawn_attention(backend: Backend, precision: str, seed: int) -> None:
    r = np.random.default_rng(seed)
    batch = (2, int(r.integers(1, 3)))
    length, source = int(r.choice([9, 63, 64, 65, 130])), int(r.choice([1, 7, 64, 65, 200]))
    features, values = (int(r.choice([1, 5, 32, 64, 80, 128, 160])) for _ in range(2))
    layouts = [[np.ascontiguousarray, by_heads, inside, turned][i] for i in r.integers(0, 4, 4)]
    causal, strict, mask = int(r.integers(0, 2)), int(r.integers(0, 2)), str(r.choice(["none", "bool", "float"]))
    q, k, v = (
        layout(r.standard_normal((*batch, n, size)).astype(np.float32))
        for layout, n, size in zip(layouts, (length, source, source), (features, features, values), strict=False)
    )
    scale = 1 / np.sqrt(features)
    s = np.matmul(*double(q, k.swapaxes(-1, -2))) * scale
    extra = []
    if mask == "bool":
        keep = r.random((batch[1], length, source)) < 0.7
        keep[:, ::7] = False
        s = np.where(keep, s, -np.inf)
        extra = [np.broadcast_to(keep, s.shape)]
    if mask == "float":
        added = r.standard_normal((length, source)).astype(np.float32)
        added[:, :1] = -np.inf
        s = s + added
        extra = [np.broadcast_to(added, s.shape)]
    if causal:
        s = np.where(np.tril(np.ones((length, source), bool)), s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True, initial=-1e30))
    exact = p / np.maximum(p.sum(-1, keepdims=True), 1e-300) @ v.astype(float)
    sees = np.isfinite(s).any(-1)
    found = []
    for _ in range(2):
        found.append(layouts[3](nans(*batch, length, values)))
        attend(backend, precision, found[-1], [q, k, v, *extra], scale=scale, causal=causal, strict=strict)
    assert np.array_equal(*found, equal_nan=True)
    if extra and strict:
        assert np.isnan(found[0][~sees]).all()
        found[0][~sees] = 0
    close(found[0], exact, PRECISIONS[precision])
    largest = max(features, values)
    if precision in ("float16", "bfloat16") and largest <= 128 and source > 7 and features > 1 and sees.any():
        assert np.abs(found[0] - exact).max() > 1e-5  # not the exact kernel


@pytest.mark.parametrize("size", [20, 64, 100])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_attention_of_invalid_numbers(backend: Backend, precision: str, size: int) -> None:
    """A NaN spoils the queries that see it, an infinite score its row; nothing else."""
    length, source = 70, 150
    q, k, v = (normal(n, size, seed=i) for i, n in enumerate((length, source, source)))
    keep = np.ones((length, source), bool)
    keep[:40, 100] = False
    k[100] = np.nan  # hidden from the first 40
    q[3] = np.inf
    q[5, 2] = np.nan
    s = np.where(keep, double(q)[0] @ double(k)[0].T, -np.inf) / np.sqrt(size)
    spoiled = np.array([3, 5, *range(40, length)])
    clean = np.setdiff1d(np.arange(length), spoiled)
    out = nans(length, size)
    attend(backend, precision, out, [q, k, v, keep], scale=1 / np.sqrt(size))
    assert np.isnan(out[spoiled]).all()
    close(out[clean], soft(s[clean]) @ double(v)[0], PRECISIONS[precision])
    v[149, 7] = np.inf  # weighs in all rows
    attend(backend, precision, out, [q, k, v, keep], scale=1 / np.sqrt(size))
    assert np.isinf(out[clean, 7]).all() and np.isfinite(np.delete(out[clean], 7, 1)).all()
    attend(backend, precision, out, [q, k, v, np.zeros_like(keep)], scale=1, strict=1)
    assert np.isnan(out).all()


@pytest.mark.parametrize("precision", ["tf32", "bfloat16"])
def test_keys_after_all_queries_are_not_read(backend: Backend, precision: str) -> None:
    q, k, v = (normal(n, 64, seed=i) for i, n in enumerate((64, 192, 192)))
    out, first = nans(64, 64), nans(64, 64)
    attend(backend, precision, first, [q, k[:64], v[:64]], scale=0.1, causal=1)
    k[64:] = v[64:] = np.nan
    attend(backend, precision, out, [q, k, v], scale=0.1, causal=1)
    assert np.array_equal(out, first)


def test_large_scores_do_not_overflow(backend: Backend) -> None:
    q, k, v = (normal(n, 32, seed=i) for i, n in enumerate((20, 90, 90)))
    s = double(q)[0] @ double(k)[0].T * 1000
    for precision in PRECISIONS:
        out = nans(20, 32)
        attend(backend, precision, out, [q, k, v], scale=1000)
        assert np.isfinite(out).all()
    attend(backend, "float32", out, [q, k, v], scale=1000)
    close(out, soft(s) @ double(v)[0], 2e-3)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_attention_without_features_or_keys(backend: Backend, precision: str) -> None:
    v, out = normal(70, 5), nans(20, 5)
    attend(backend, precision, out, [nans(20, 0), nans(70, 0), v], scale=1)
    close(out, np.broadcast_to(v.astype(float).mean(0), out.shape), PRECISIONS[precision])
    attend(backend, precision, out, [normal(20, 3), nans(0, 3), nans(0, 5)], scale=1)
    assert not out.any()

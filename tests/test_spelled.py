"""What transformers write in small steps, in the spellings that are met, and views of strided arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import needle as ndl
import operator_fusion
from needle import nn, ops
from needle.autograd import Spec
from needle.backend_ndarray import NDArray
from needle.backend_ndarray.strides import reshaped_strides
from needle.backend_selection import BACKEND
from needle.graph import symbolic

RNG = np.random.default_rng(0)


class Spelled(nn.Module):
    """A function of x and a weight as a module."""

    container = True

    def __init__(self, f: Callable[..., Any], *shape: int) -> None:
        super().__init__()
        self.f, self.weight = f, nn.Parameter(ndl.Tensor(RNG.uniform(0.5, 1.5, shape).astype("float32")))

    def forward(self, x: Any) -> Any:
        return self.f(x, self.weight)


def fused(f: Callable[..., Any], shape: tuple[int, ...], *weight: int) -> tuple[Any, Any]:
    net = Spelled(f, *weight).eval()
    made = symbolic(net, (Spec(shape),))
    return made, operator_fusion.fuse(made)


def mean(x: Any, axis: Any = -1) -> Any:
    return ops.mean(x, axis, keepdims=True)


NORMS: dict[str, Callable[[Any, Any], Any]] = {
    "weight first": lambda x, w: w * (x * ops.rsqrt(mean(x**2) + 1e-5)),
    "weight last": lambda x, w: x * ops.rsqrt(mean(x * x) + 1e-5) * w,
    "divided": lambda x, w: x / ops.sqrt(mean(x**2) + 1e-5) * w,
    "power": lambda x, w: x * (mean(x**2) + 1e-5) ** -0.5 * w,
    "axis 2": lambda x, w: w * (ops.rsqrt(mean(x**2, (2,)) + 1e-5) * x),
    "cast": lambda x, w: w * ops.cast(x * ops.rsqrt(mean(x**2) + 1e-5), "float32"),
}


@pytest.mark.parametrize("name", NORMS)
def test_norms_by_root_mean_square(name: str) -> None:
    x = RNG.standard_normal((2, 5, 37)).astype("float32")
    net, made = fused(NORMS[name], x.shape, 37)
    assert made.fusion_report.counts == {"RMSNorm": 1}
    wide = x.astype("float64")
    want = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * net.weight.numpy()
    np.testing.assert_allclose(made(ndl.Tensor(x)).numpy(), want, rtol=2e-6, atol=1e-6)
    if BACKEND != "np":
        exe = ndl.compile(made, (x,))
        assert exe.plan.names == ["rms_norm"]
        np.testing.assert_allclose(exe(x), want, rtol=2e-6, atol=1e-6)


NO_NORMS: dict[str, Callable[[Any, Any], Any]] = {
    "other axis": lambda x, w: w * (x * ops.rsqrt(mean(x**2, 1) + 1e-5)),
    "cubes": lambda x, w: w * (x * ops.rsqrt(mean(x**4) + 1e-5)),
    "another root": lambda x, w: w * (x * (mean(x**2) + 1e-5) ** -0.25),
    "of another": lambda x, w: w * (x * ops.rsqrt(mean((x * 2.0) ** 2) + 1e-5)),
    "mean kept": lambda x, w: w * (x * ops.rsqrt(m := mean(x**2) + 1e-5)) + m,
}


@pytest.mark.parametrize("name", NO_NORMS)
def test_what_is_another_norm_stays(name: str) -> None:
    net, made = fused(NO_NORMS[name], (2, 5, 6), 6)
    assert "RMSNorm" not in made.fusion_report.counts
    x = ndl.Tensor(RNG.standard_normal((2, 5, 6)).astype("float32"))
    np.testing.assert_allclose(made(x).numpy(), net(x).numpy(), rtol=1e-6)


def turned(x: Any, at: int) -> Any:
    return ops.concat((-x[..., at:], x[..., :at]), -1)


@pytest.mark.parametrize(
    ("width", "at", "fires"), [(8, 4, True), (34, 17, True), (2, 1, True), (8, 2, False), (7, 3, False)]
)
def test_rotary_turns_halves(width: int, at: int, fires: bool) -> None:
    angles = RNG.standard_normal((5, width)).astype("float32")
    cos, sin = ndl.Tensor(np.cos(angles)), ndl.Tensor(np.sin(angles))
    _, made = fused(lambda x, w: x * cos + turned(x, at) * sin, (2, 3, 5, width), 1)
    assert ("RotaryEmbedding" in made.fusion_report.counts) == fires
    x = RNG.standard_normal((2, 3, 5, width)).astype("float32")
    wide = x.astype("float64")
    want = wide * np.cos(angles) + np.concatenate([-wide[..., at:], wide[..., :at]], -1) * np.sin(angles)
    np.testing.assert_allclose(made(ndl.Tensor(x)).numpy(), want, atol=2e-6)


@pytest.mark.skipif(BACKEND == "np", reason="plans")
def test_heads_turn_where_they_lie() -> None:
    """Queries as a slice of a joint product, in the order in which heads are split."""
    x, angles = RNG.standard_normal((2, 7, 3 * 4 * 6)).astype("float32"), RNG.standard_normal((7, 6)).astype("float32")
    for interleaved in (False, True):

        def f(x: Any, cos: Any, sin: Any, interleaved: bool = interleaved) -> Any:
            q = ops.transpose(ops.reshape(x[..., 24:48], (2, 7, 4, 6)), (1, 2))
            return ops.rotary(q, cos, sin, interleaved)

        args = (x, np.cos(angles), np.sin(angles))
        q = x[..., 24:48].reshape(2, 7, 4, 6).swapaxes(1, 2).astype("float64")
        other = np.concatenate([-q[..., 3:], q[..., :3]], -1)
        if interleaved:
            other = np.stack([-q[..., 1::2], q[..., ::2]], -1).reshape(q.shape)
        exe = ndl.compile(f, args)
        np.testing.assert_allclose(exe(*args), q * args[1] + other * args[2], atol=1e-6)
        assert exe.plan.names == ["rotary"]


def test_views_of_strided_arrays() -> None:
    """Every shape that strides can tell, compared with numpy, which knows when it has to copy."""
    rng = np.random.default_rng(1)
    for _ in range(400):
        shape = tuple(int(n) for n in rng.choice([1, 2, 3, 4, 6], rng.integers(1, 5)))
        base = np.arange(np.prod(shape) * 2, dtype="float32").reshape(*shape, 2)
        axes = [int(a) for a in rng.permutation(len(shape) + 1)]
        x = base.transpose(axes)[..., :: int(rng.integers(1, 3))]
        factors = [int(f) for n in x.shape for f in ([2, n // 2] if n % 2 == 0 else [n])]
        to = tuple(factors) if rng.random() < 0.5 else (int(np.prod(x.shape[:2])), *x.shape[2:])
        strides = tuple(s // x.itemsize for s in x.strides)
        found = reshaped_strides(x.shape, strides, to)
        moved = not np.shares_memory(x.reshape(to), x)
        assert (found is None) == moved, (x.shape, strides, to)
        if found is not None:
            start = np.lib.stride_tricks.as_strided(x, to, tuple(s * x.itemsize for s in found))
            np.testing.assert_array_equal(start, x.reshape(to))
    x = NDArray(np.arange(24, dtype="float32").reshape(4, 6))
    np.testing.assert_array_equal(x.permute((1, 0)).viewed((24,)).numpy(), np.arange(24).reshape(4, 6).T.reshape(-1))
    assert x[:, 2:4].viewed((2, 2, 2))._handle is x._handle

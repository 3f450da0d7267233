"""Kernels of eager training steps on plain images, forwards and backwards, against torch in float64 on every ISA."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import needle as ndl
from needle import ops
from needle.backend_ndarray import NDArray, cpu_numpy

TOLERANCE = 5e-6  # of the largest value
Shape = tuple[int, ...]


def drawn(shape: Shape, offset: float = 0.0) -> np.ndarray:
    return (np.random.default_rng(sum(shape)).standard_normal(shape) + offset).astype("float32")


def strided(x: np.ndarray) -> NDArray:
    """x as a view with gaps along every axis."""
    wide = np.full([2 * s for s in x.shape], np.nan, "float32")
    wide[tuple(slice(None, None, 2) for _ in x.shape)] = x
    return NDArray(wide)[tuple(slice(None, None, 2) for _ in x.shape)]


def agrees(f: Callable[..., Any], g: Callable[..., Any], *values: np.ndarray, views: bool = False) -> None:
    """f on our tensors, strided ones with `views`, and g on torch's: result and gradients."""
    ours = [ndl.Tensor.make_const(strided(v) if views else NDArray(v), requires_grad=True) for v in values]
    theirs = [torch.from_numpy(v.astype("float64")).requires_grad_() for v in values]
    y, want = f(*ours), g(*theirs)
    dy = drawn(tuple(want.shape))
    y.backward(ndl.Tensor(dy))
    want.backward(torch.from_numpy(dy.astype("float64")))
    for got, known in ((y, want.detach()), *((o.grad, t.grad) for o, t in zip(ours, theirs, strict=True))):
        np.testing.assert_allclose(got.numpy(), known.numpy(), rtol=0, atol=TOLERANCE * max(1, known.abs().max()))


def batch_norms() -> Iterator[tuple[Shape, float]]:
    for size in (1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 100, 600):
        for images, channels in ((2, 3), (4, 37), (37, 5)):
            yield (images, channels, size), 0.0
    yield from (((70, 300, 1), 0.0), ((3, 129, 2), 0.0), ((33, 65, 4), 30.0), ((2, 19, 600), 30.0), ((1, 4, 9), 0.0))


def check_batch_norm(shape: Shape, offset: float, views: bool) -> None:
    weight, bias = drawn(shape[1:2], 1.0), drawn(shape[1:2])
    norms = (ops.batch_norm, torch.nn.functional.batch_norm)
    f, g = (lambda x, w, b, norm=norm: norm(x, None, None, w, b, True) for norm in norms)
    agrees(f, g, drawn(shape, offset), weight, bias, views=views)


DEPTHWISE: list[dict[str, Any]] = [
    {"kernel": k, "stride": s, "padding": p, "dilation": d, "channels": c, "size": size}
    for c, size in ((2, (5, 4)), (16, (1, 7)), (37, (6, 9)))
    for k, s, p, d in (
        ((3, 3), (1, 1), (1, 1), (1, 1)),
        ((3, 3), (2, 2), (1, 1), (1, 1)),
        ((1, 1), (3, 2), (0, 0), (1, 1)),
        ((5, 2), (2, 3), (4, 0), (1, 2)),
        ((2, 5), (1, 4), (1, 6), (2, 1)),
        ((7, 7), (1, 1), (3, 3), (2, 2)),
    )
]


def check_depthwise(
    kernel: Shape, stride: Shape, padding: Shape, dilation: Shape, channels: int, size: Shape, views: bool
) -> None:
    size = tuple(max(n, d * (k - 1) + 1 - 2 * p) for n, k, p, d in zip(size, kernel, padding, dilation, strict=True))
    x, w = drawn((2, channels, *size)), drawn((channels, 1, *kernel))
    how = {"stride": stride, "padding": padding, "dilation": dilation, "groups": channels}
    conv2d, transposed = torch.nn.functional.conv2d, torch.nn.functional.conv_transpose2d
    agrees(lambda x, w: ops.conv2d(x, w, **how), lambda x, w: conv2d(x, w, **how), x, w, views=views)
    axes = zip(size, kernel, stride, padding, dilation, strict=True)
    out = [(n - 1) * s - 2 * p + d * (k - 1) + 1 for n, k, s, p, d in axes]
    if min(out) > 0:
        bias = drawn((channels,))
        f, g = (lambda x, w, b, m=m: m(x, w, b, **how) for m in (ops.conv_transpose2d, transposed))
        agrees(f, g, x, w, bias, views=views)


POOLS: list[tuple[Shape, Any, Any, Any]] = [
    ((2, 17, 9, 8), 3, 2, 1),
    ((1, 8, 5, 7), (3, 2), (1, 2), (1, 0)),
    ((2, 33, 4, 1), (2, 1), 1, 0),
    ((3, 16, 1, 6), (1, 3), (1, 2), (0, 1)),
    ((2, 7, 6, 6), 2, 2, 0),
    ((1, 9, 300, 300), 3, 3, 0),
]


def check_pool(shape: Shape, kernel: Any, stride: Any, padding: Any, views: bool) -> None:
    torch_nn = torch.nn.functional
    for ours, theirs in ((ops.max_pool2d, torch_nn.max_pool2d), (ops.avg_pool2d, torch_nn.avg_pool2d)):
        f, g = (lambda x, m=m: m(x, kernel, stride, padding) for m in (ours, theirs))
        agrees(f, g, drawn(shape), views=views)


def cases() -> Iterator[tuple[Callable[..., None], tuple]]:
    for views in (False, True):
        yield from ((check_batch_norm, (*c, views)) for c in batch_norms())
        yield from ((check_depthwise, (*c.values(), views)) for c in DEPTHWISE)
        yield from ((check_pool, (*c, views)) for c in POOLS)


@pytest.mark.parametrize(("check", "args"), list(cases()), ids=lambda v: v.__name__ if callable(v) else str(v))
def test_agrees_with_float64(check: Callable[..., None], args: tuple) -> None:
    check(*args)


@pytest.mark.parametrize("isa", ["scalar", "avx2"])
def test_other_isas(isa: str) -> None:
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\nfrom test_eager_training import cases\n"
    code += "for check, args in cases(): check(*args)"
    env = {**os.environ, "NEEDLE_ISA": isa}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    if "is not supported by this CPU" in done.stderr:
        pytest.skip(f"no {isa} here")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("size", [1, 4, 20])
def test_equal_numbers_are_normalised_to_the_bias(size: int) -> None:
    """Their mean is exact: the root of eps alone would multiply what is left."""
    x = ndl.Tensor(np.full((6, 5, size), 0.1, "float32"))
    bias = ndl.Tensor(np.arange(5, dtype="float32"))
    y = ops.batch_norm(x, None, None, ndl.init.ones(5), bias, True)
    assert (y.numpy() == np.arange(5, dtype="float32")[:, None]).all()


@pytest.mark.parametrize("size", [1, 4, 20])
def test_a_channel_with_nan_spoils_no_other(size: int) -> None:
    x = drawn((6, 5, size))
    x[2, 3, 0] = np.nan
    t = ndl.Tensor(x)
    y = ops.batch_norm(t, None, None, ndl.init.ones(5), ndl.init.zeros(5), True)
    y.backward(ndl.Tensor(drawn(x.shape)))
    for got in (y, t.grad):
        assert np.isnan(got.numpy()).all(axis=(0, 2)).tolist() == [False, False, False, True, False]
        assert not np.isnan(np.delete(got.numpy(), 3, 1)).any()


@pytest.mark.parametrize("device", [ndl.cpu(), cpu_numpy()], ids=str)
@pytest.mark.parametrize("users", [1, 2, 3, 6])
def test_gradients_of_all_users_add_up(users: int, device: Any) -> None:
    x = ndl.Tensor(drawn((3, 4)), device=device)
    parts = [x * float(i + 1) for i in range(users)]
    ops.summation(ops.concat([ops.concat(parts, 1), x], 1)).backward()
    assert (x.grad.numpy() == sum(range(users + 1)) + 1).all()
    second = ops.summation(x * x * x + x * x + ops.concat([x, x], 0)[:3] * x)
    second.backward()
    ops.summation(x.grad).backward()
    np.testing.assert_allclose(x.grad.numpy(), 6 * x.numpy() + 4, rtol=1e-5)


def test_a_parameter_has_the_sum_of_views() -> None:
    """Parts of a gradient that are views of it, and of one another's memory, are not written to."""
    x, y = ndl.Tensor(drawn((2, 3))), ndl.Tensor(drawn((2, 3)))
    whole = ops.concat([x, x, y, x], 1)
    dy = ndl.Tensor(drawn((2, 12)))
    kept = dy.numpy()
    whole.backward(dy)
    assert (dy.numpy() == kept).all()
    np.testing.assert_allclose(x.grad.numpy(), kept[:, :3] + kept[:, 3:6] + kept[:, 9:], rtol=1e-6)


def test_running_statistics_follow_torch() -> None:
    ours, theirs = ndl.nn.BatchNorm2d(5, unbiased=True, count_batches=True), torch.nn.BatchNorm2d(5).double()
    kept = ours.running_mean.detach()
    for step in range(3):
        x = drawn((4, 5, 3, 2), step)
        ours(ndl.Tensor(x)), theirs(torch.from_numpy(x).double())
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        got, want = getattr(ours, name), getattr(theirs, name)
        assert got.shape == tuple(want.shape) and got.requires_grad is False
        np.testing.assert_allclose(got.numpy(), want.numpy(), rtol=1e-5)
    assert (kept.numpy() == 0).all()  # what others hold of them stays

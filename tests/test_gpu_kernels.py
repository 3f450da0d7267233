"""Products, convolutions, pools, norms, softmax and attention on the GPU backends, against numpy in float64.

In the host emulation at both wave widths on any machine, and on a CUDA device where there is one.
"""

# ruff: noqa: F811  (fixtures are imported by name)
from __future__ import annotations

import ctypes as c

import numpy as np
import pytest

from needle.ops.activation import ACTIVATIONS as OPS
from needle.ops.activation import CODES
from needle.ops.conv import Conv2dWeightGrad, ConvTranspose2d, conv2d_array, conv_transpose2d_array
from needle.ops.fused import act_reference
from needle.ops.pool import (
    AdaptiveAvgPool2d,
    AdaptiveAvgPool2dGrad,
    AvgPool2d,
    AvgPool2dGrad,
    MaxPool2d,
    MaxPool2dGrad,
)
from needle.ops.resize import Interpolate, InterpolateGrad
from test_gpu import ACTIVATIONS, NONE, RELU, Backend, Call, Exec, View, backend, cuda, emulation, normal  # noqa: F401

DTYPES = ["float32", "float64", "int32", "int64", "bool"]
GELU = 7
EXACT, TF32, FLOAT16, BFLOAT16 = range(4)
TOLERANCE = {EXACT: 5e-6, TF32: 2e-3, FLOAT16: 2e-3, BFLOAT16: 2e-2}  # of the largest result


def run(backend: Backend, name: str, outs: list[np.ndarray], ins: list[np.ndarray], *attrs: float) -> None:
    """Runs a kernel on copies in device memory; every array keeps its strides, and what lies between its elements."""
    held = []

    def view(a: np.ndarray) -> View:
        low = sum(min(0, (n - 1) * s) for n, s in zip(a.shape, a.strides, strict=True))
        high = sum(max(0, (n - 1) * s) for n, s in zip(a.shape, a.strides, strict=True))
        span = high - low + a.itemsize if a.size else 0
        p = backend.table.alloc(span)
        assert p, "out of device memory"
        backend.table.copy(p, a.ctypes.data + low, span, None)
        held.append((p, a.ctypes.data + low, span))
        strides = [s // a.itemsize for s in a.strides]
        return View(p - low, (c.c_int64 * 8)(*a.shape), (c.c_int64 * 8)(*strides), a.ndim, DTYPES.index(str(a.dtype)))

    row = backend.rows[name]
    assert len(attrs) == len(row.attrs.split()) and row.min_in <= len(ins) <= row.max_in and len(outs) == row.n_out
    out_views, in_views = (View * len(outs))(*map(view, outs)), (View * len(ins))(*map(view, ins))
    executor = Exec(1, None, None, None)
    row.run(Call(out_views, in_views, (c.c_double * len(attrs))(*attrs), len(outs), len(ins), c.pointer(executor)))
    backend.table.sync(None)
    for p, home, span in held[: len(outs)]:
        backend.table.copy(home, p, span, None)
    backend.table.sync(None)
    for p, _, span in held:
        backend.table.free(p, span)


def close(got: np.ndarray, exact: np.ndarray, tolerance: float = 5e-6) -> None:
    assert got.shape == exact.shape
    if exact.size:
        error = np.abs(got - exact).max() / max(np.abs(exact).max(), 1e-30)
        assert error < tolerance, f"error {error:.2e}"


def nans(*shape: int, dtype: str = "float32") -> np.ndarray:
    return np.full(shape, np.nan if dtype.startswith("float") else -1, dtype)


def inside(a: np.ndarray, gap: int = 3) -> np.ndarray:
    """The same values as a slice of a larger array, along every axis."""
    whole = np.full([n + 2 * gap for n in a.shape], 7, a.dtype)
    part = whole[tuple(slice(gap, gap + n) for n in a.shape)]
    part[...] = a
    return part


def channels_last(a: np.ndarray) -> np.ndarray:
    """(N, C, H, W) whose memory is (N, H, W, C)."""
    return np.ascontiguousarray(a.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)


def double(*arrays: np.ndarray) -> list[np.ndarray]:
    return [a.astype(np.float64) for a in arrays]


MATRICES = [  # batch of a, batch of b, m, k, n
    ((), (), 17, 33, 65),
    ((), (), 130, 40, 132),
    ((), (), 5, 64, 12),
    ((3,), (3,), 9, 17, 33),
    ((3,), (1,), 9, 17, 33),
    ((2, 1), (2, 3), 4, 16, 20),
    ((2, 3), (1, 3), 66, 8, 68),
    ((2,), (2,), 1, 1, 1),
    ((2,), (2,), 3, 0, 5),
    ((0,), (0,), 3, 4, 5),
]


@pytest.mark.parametrize("case", MATRICES, ids=str)
@pytest.mark.parametrize("order", ["plain", "transposed", "strided"])
def test_matmul(backend: Backend, case: tuple, order: str) -> None:
    batch_a, batch_b, m, k, n = case
    a, b, bias = normal(*batch_a, m, k), normal(*batch_b, k, n, seed=1), normal(n, seed=2)
    if order == "transposed":
        a, b = (np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2) for x in (a, b))
    if order == "strided":
        a, b, bias = inside(a)[..., ::-1], inside(b), inside(bias)
    batch = np.broadcast_shapes(batch_a, batch_b)
    a, b = np.broadcast_to(a, (*batch, m, k)), np.broadcast_to(b, (*batch, k, n))
    exact = np.matmul(*double(a, b))
    out = nans(*batch, m, n)
    run(backend, "matmul", [out], [a, b], NONE, 0, 0)
    close(out, exact)
    run(backend, "matmul", [out], [a, b, bias], RELU, 0, 1)
    close(out, np.maximum(exact + bias, 0))


@pytest.mark.parametrize("dtype", ["float64", "int32", "int64"])
def test_matmul_of_other_dtypes(backend: Backend, dtype: str) -> None:
    values = np.random.default_rng(0).integers(-9, 9, (3, 5, 17)), np.random.default_rng(1).integers(-9, 9, (3, 17, 6))
    a, b = (inside(v.astype(dtype)) for v in values)
    out = nans(3, 5, 6, dtype=dtype)
    run(backend, "matmul", [out], [a, b, b[0, 0]], NONE, 0, 1)
    assert (out == a @ b + b[0, 0]).all()


@pytest.mark.parametrize("precision", range(4))
@pytest.mark.parametrize("m,k,n", [(70, 65, 130), (260, 48, 260), (17, 100, 33)])
@pytest.mark.parametrize("turned", [False, True])
def test_matmul_fused(backend: Backend, precision: int, m: int, k: int, n: int, turned: bool) -> None:
    a, b, bias, residual = normal(m, k), normal(k, n, seed=1), normal(n, seed=2), normal(m, n, seed=3)
    if turned:
        a, b = np.asfortranarray(a), np.asfortranarray(b)
    out = nans(m, n)
    run(backend, "matmul_fused", [out], [a, b, bias, inside(residual)], RELU, 0, 1, 1, precision)
    exact = np.maximum(np.matmul(*double(a, b)) + bias + residual, 0)
    close(out, exact, TOLERANCE[precision])
    if precision != EXACT and backend.table.name != b"hip":
        assert np.abs(out - exact).max() > 1e-5, "lower precision must be what ran"


@pytest.mark.parametrize("precision", [TF32, FLOAT16, BFLOAT16])
def test_lower_precision_rounds_to_nearest(backend: Backend, precision: int) -> None:
    """Ties, subnormals, infinities and NaN of the storage format, seen through a product with the identity."""
    bits = {TF32: 10, FLOAT16: 10, BFLOAT16: 7}[precision]
    step = 2.0**-bits
    x = np.array([1 + step, 1 + 1.5 * step, 1 + 0.75 * step, -1 - 0.25 * step, 2.0**-17, np.inf, np.nan, 3], np.float32)
    a = np.zeros((16, 16), np.float32)
    a[np.arange(8), np.arange(8)] = x
    a = np.repeat(a, 2, axis=0)[:20]
    out = nans(20, 16)
    with np.errstate(invalid="ignore"):
        run(backend, "matmul_fused", [out], [a[:, :5], np.eye(5, 16, dtype="float32")], NONE, 0, 0, 0, precision)
    expected = [1 + step, 1 + 2 * step, 1 + step, -1, 2.0**-17]
    if precision == TF32:
        expected[1] = 1 + 2 * step  # a tie goes away from zero
    assert out[range(0, 10, 2), range(5)].tolist() == expected
    run(backend, "matmul_fused", [out], [a, np.full((16, 16), 1, "float32")], NONE, 0, 0, 0, precision)
    assert np.isposinf(out[10]).all() and np.isnan(out[12]).all()


@pytest.mark.parametrize("precision", [EXACT, FLOAT16])
@pytest.mark.parametrize("code", [4, GELU])
def test_matmul_other_activations(backend: Backend, precision: int, code: int) -> None:
    from math import erf

    act = ACTIVATIONS.get(code, lambda v: v * 0.5 * (1 + np.vectorize(erf)(v / np.sqrt(2))))
    a, b = normal(140, 20), normal(20, 140, seed=1)
    out = nans(140, 140)
    run(backend, "matmul_fused", [out], [a, b], code, 0, 0, 0, precision)
    close(out, act(np.matmul(*double(a, b))), TOLERANCE[precision])


# (N, C, H, W), (O, KH, KW), stride, padding (top, left, bottom, right), dilation, groups
CONVS = [
    ((2, 3, 6, 7), (4, 3, 3), (1, 1), (0, 0, 0, 0), (1, 1), 1),
    ((1, 4, 9, 8), (6, 3, 2), (2, 1), (1, 2, 1, 2), (1, 2), 1),
    ((2, 4, 14, 14), (6, 3, 3), (2, 2), (1, 1, 1, 1), (1, 1), 2),
    ((1, 20, 5, 5), (20, 2, 2), (1, 1), (0, 1, 1, 0), (1, 1), 20),
    ((1, 6, 9, 7), (12, 3, 3), (2, 1), (1, 1, 1, 1), (1, 1), 6),
    ((1, 5, 8, 8), (5, 5, 5), (1, 2), (2, 2, 2, 2), (1, 1), 5),
    ((2, 17, 5, 5), (33, 1, 1), (1, 1), (0, 0, 0, 0), (1, 1), 1),
    ((2, 12, 4, 6), (16, 1, 1), (1, 1), (0, 0, 0, 0), (1, 1), 1),
    ((1, 33, 1, 1), (17, 3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 1),
    ((1, 1, 1, 1), (1, 1, 1), (1, 1), (0, 0, 0, 0), (1, 1), 1),
    ((1, 8, 7, 9), (12, 3, 3), (1, 1), (-1, 2, 1, -1), (1, 1), 1),
    ((1, 16, 18, 18), (130, 3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 1),
]
LAYOUTS = {"nchw": lambda a: a, "nhwc": channels_last, "strided": inside}


def conv_case(case: tuple) -> tuple:
    x, (o, kh, kw), stride, padding, dilation, groups = case
    w = normal(o, x[1] // groups, kh, kw, seed=1)
    x = normal(*x)
    return x, w, stride, padding, dilation, groups, conv2d_array(*double(x, w), stride, padding, dilation, groups)


@pytest.mark.parametrize("case", CONVS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_conv2d(backend: Backend, case: tuple, layout: str) -> None:
    x, w, stride, padding, dilation, groups, exact = conv_case(case)
    bias, shape = normal(w.shape[0], seed=2), LAYOUTS[layout]
    out = shape(nans(*exact.shape))
    attrs = (*stride, *padding, *dilation, groups)
    run(backend, "conv2d", [out], [shape(x), shape(w)], *attrs, NONE, 0, 0)
    close(out, exact)
    run(backend, "conv2d", [out], [shape(x), shape(w), inside(bias)], *attrs, RELU, 0, 1)
    close(out, np.maximum(exact + bias.reshape(-1, 1, 1), 0))


@pytest.mark.parametrize("case", CONVS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("precision", range(4))
def test_conv2d_fused(backend: Backend, case: tuple, layout: str, precision: int) -> None:
    x, w, stride, padding, dilation, groups, exact = conv_case(case)
    scale, bias, residual = normal(w.shape[0], seed=2), normal(w.shape[0], seed=3), normal(*exact.shape, seed=4)
    shape = LAYOUTS[layout]
    out, code = shape(nans(*exact.shape)), 3 if precision == EXACT else RELU
    ins = [shape(x), shape(w), scale, inside(bias), shape(residual)]
    run(backend, "conv2d_fused", [out], ins, *stride, *padding[:2], *dilation, groups, code, 0.1, 1, 1, 1, precision)
    exact = exact * scale.reshape(-1, 1, 1) + bias.reshape(-1, 1, 1) + residual
    close(out, np.maximum(exact, 0.1 * exact if code == 3 else 0), TOLERANCE[precision])


@pytest.mark.parametrize("case", CONVS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_conv2d_gradients(backend: Backend, case: tuple, layout: str) -> None:
    x, w, stride, padding, dilation, groups, y = conv_case(case)
    dy, shape = normal(*y.shape, seed=5), LAYOUTS[layout]
    exact = Conv2dWeightGrad(w.shape[2:], stride, padding, dilation, groups).reference(*double(x, dy))
    dw = nans(*w.shape)
    run(backend, "conv2d_weight_grad", [dw], [shape(x), shape(dy)], *stride, *padding[:2], *dilation, groups)
    close(dw, exact)
    op = ConvTranspose2d(stride, padding, (0, 0), dilation, groups)
    exact = conv_transpose2d_array(*double(dy, w), op, x.shape[2:])
    dx = shape(nans(*x.shape))
    run(
        backend,
        "conv_transpose2d",
        [dx],
        [shape(dy), shape(w)],
        *stride,
        *padding[:2],
        *dilation,
        groups,
        NONE,
        0,
        0,
    )
    close(dx, exact)


def test_conv2d_weight_grad_of_many_pixels(backend: Backend) -> None:
    """Enough pixels that several blocks share a result."""
    x, dy = normal(2, 5, 40, 41), normal(2, 7, 40, 41, seed=1)
    exact = Conv2dWeightGrad((3, 3), (1, 1), (1, 1, 1, 1)).reference(*double(x, dy))
    for shape in (np.ascontiguousarray, channels_last):
        dw = nans(7, 5, 3, 3)
        run(backend, "conv2d_weight_grad", [dw], [shape(x), shape(dy)], 1, 1, 1, 1, 1, 1, 1)
        close(dw, exact)


# (N, C, H, W), (O, KH, KW), stride, padding, output padding, dilation, groups
TRANSPOSED = [
    ((2, 3, 4, 5), (4, 3, 3), (1, 1), (0, 0, 0, 0), (0, 0), (1, 1), 1),
    ((1, 4, 5, 4), (6, 3, 3), (2, 2), (1, 1, 1, 1), (1, 1), (1, 1), 1),
    ((1, 18, 4, 4), (5, 2, 2), (2, 2), (0, 0, 0, 0), (0, 0), (1, 1), 1),
    ((1, 4, 5, 4), (4, 3, 2), (2, 1), (1, 0, 1, 0), (0, 0), (2, 1), 2),
    ((1, 3, 3, 3), (4, 2, 2), (3, 3), (0, 0, 0, 0), (2, 2), (1, 1), 1),
    ((1, 9, 4, 3), (9, 4, 4), (2, 3), (1, 1, 1, 1), (0, 0), (1, 1), 9),
    ((1, 2, 4, 4), (3, 3, 3), (3, 2), (0, 0, 0, 0), (0, 0), (2, 3), 1),
]


@pytest.mark.parametrize("case", TRANSPOSED, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_conv_transpose2d(backend: Backend, case: tuple, layout: str) -> None:
    size, (o, kh, kw), stride, padding, rest, dilation, groups = case
    x, w, bias = normal(*size), normal(size[1], o // groups, kh, kw, seed=1), normal(o, seed=2)
    op, shape = ConvTranspose2d(stride, padding, rest, dilation, groups), LAYOUTS[layout]
    exact = conv_transpose2d_array(*double(x, w), op, op.infer(x, w).shape[2:])
    out = shape(nans(*exact.shape))
    attrs = (*stride, *padding[:2], *dilation, groups)
    run(backend, "conv_transpose2d", [out], [shape(x), shape(w), bias], *attrs, RELU, 0, 1)
    close(out, np.maximum(exact + bias.reshape(-1, 1, 1), 0))


def test_conv2d_is_fast_enough_in_the_emulation(backend: Backend) -> None:
    """Tests of whole models run on it: three layers of implicit GEMM in two seconds."""
    from time import perf_counter

    cases = [((1, 16, 16, 16), 32, 3, 1), ((1, 32, 8, 8), 64, 3, 1), ((1, 64, 8, 8), 128, 1, 0)]
    arrays = [(normal(*x), normal(o, x[1], k, k), nans(1, o, *x[2:]), p) for x, o, k, p in cases]
    start = perf_counter()
    for x, w, out, p in arrays:
        run(backend, "conv2d", [out], [x, w], 1, 1, p, p, p, p, 1, 1, 1, RELU, 0, 0)
    assert perf_counter() - start < 2


def soft(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


ROWS = [(1, 1), (3, 5), (70, 33), (5, 64), (2, 200), (3, 1025), (2, 3000)]
FLOATS = {"float32": 5e-6, "float64": 1e-14}


@pytest.mark.parametrize("shape", ROWS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS)
def test_softmax(backend: Backend, shape: tuple, dtype: str) -> None:
    x, dy = (normal(*shape, seed=s).astype(dtype) * 3 for s in (0, 1))
    m, d = shape
    labels = np.random.default_rng(0).integers(0, d, m)
    p, tolerance = soft(x.astype(np.float64)), FLOATS[dtype]
    log_p = np.log(p)
    total = np.log(np.exp(x.astype(np.float64)).sum(-1))

    def row(name: str, exact: np.ndarray, *ins: np.ndarray) -> None:
        out = inside(nans(*exact.shape, dtype=dtype))[tuple(slice(0, n) for n in exact.shape)]
        run(backend, name, [out], list(ins))
        close(out, exact, tolerance)

    x, dy = inside(x), inside(dy)
    row("softmax", p, x)
    row("log_softmax", log_p, x)
    row("logsumexp", total.reshape(-1, 1), x)
    row("softmax_grad", p * (dy - (p * dy).sum(-1, keepdims=True)), p.astype(dtype), dy)
    row("log_softmax_grad", dy - p * dy.sum(-1, keepdims=True), log_p.astype(dtype), dy)
    one_hot = labels[:, None] == np.arange(d)
    for kind in ("int32", "int64"):
        row("cross_entropy", -log_p[np.arange(m), labels], x, labels.astype(kind))
        row("cross_entropy_grad", (p - one_hot) * dy[:, :1], x, labels.astype(kind), dy[:, 0])


def test_softmax_of_extremes(backend: Backend) -> None:
    x = np.array([[0, -np.inf, 1e30, 1e30], [-1e30, 0, 3, -np.inf], [0, np.nan, 0, 0]], np.float32)
    out = nans(3, 4)
    run(backend, "softmax", [out], [x])
    close(out[:2], soft(x[:2].astype(np.float64)))
    assert np.isnan(out[2]).all()
    loss = np.zeros(2, np.float32)
    run(backend, "cross_entropy", [loss], [x[:2], np.array([4, -1])])
    assert np.isnan(loss).all()


IMAGES = [(2, 5, 12), (4, 3, 1), (3, 17, 49), (2, 64, 36), (1, 1, 1), (2, 33, 400), (70, 32, 1)]


def channels_inside(x: np.ndarray) -> np.ndarray:
    """(N, C, S) whose memory is (N, S, C)."""
    return np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2)


@pytest.mark.parametrize("shape", IMAGES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("layout", [np.ascontiguousarray, channels_inside, inside], ids=["ncs", "nsc", "strided"])
def test_batch_norm(backend: Backend, shape: tuple, dtype: str, layout: object) -> None:
    n, channels, s = shape
    x, dy = (layout(normal(*shape, seed=k).astype(dtype) + 2) for k in (0, 1))
    mean, weight, bias = (normal(channels, seed=k).astype(dtype) for k in (2, 3, 4))
    var, tolerance, eps = np.abs(normal(channels, seed=5)).astype(dtype) + 0.1, 4 * FLOATS[dtype], 1e-3
    per_channel = (1, -1, 1)
    out = layout(nans(*shape, dtype=dtype))
    exact = (x.astype(float) - mean.reshape(per_channel)) * (weight / np.sqrt(var + eps)).reshape(per_channel)
    run(backend, "batch_norm", [out], [x, mean, var, weight, bias], eps, RELU, 0)
    close(out, np.maximum(exact + bias.reshape(per_channel), 0), tolerance)

    stats = [nans(channels, dtype=dtype) for _ in range(3)]
    run(backend, "batch_norm_train", [out, *stats], [x, weight, bias], eps, 0, 0)
    m, v = x.astype(float).mean((0, 2)), x.astype(float).var((0, 2))
    inverse = 1 / np.sqrt(v + eps)
    z = (x - m.reshape(per_channel)) * inverse.reshape(per_channel)
    close(out, z * weight.reshape(per_channel) + bias.reshape(per_channel), tolerance)
    for got, exact in zip(stats, (m, v, inverse), strict=True):
        close(got, exact, tolerance)

    dx, dw, db = layout(nans(*shape, dtype=dtype)), nans(channels, dtype=dtype), nans(channels, dtype=dtype)
    ins = [x, m.astype(dtype), inverse.astype(dtype), weight, dy]
    run(backend, "batch_norm_train_grad", [dx, dw, db], ins)
    g, gz = dy.sum((0, 2)), (dy * z).sum((0, 2))
    close(db, g, 10 * tolerance)
    close(dw, gz, 10 * tolerance)
    exact = dy - (g.reshape(per_channel) + z * gz.reshape(per_channel)) / (n * s)
    scale = (weight * inverse).reshape(per_channel)
    assert np.abs(dx - exact * scale).max() < 10 * tolerance * np.abs(dy * scale).max()


@pytest.mark.parametrize("shape", ROWS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS)
def test_layer_norm(backend: Backend, shape: tuple, dtype: str) -> None:
    x = inside(normal(*shape).astype(dtype) + 3)
    weight, bias = (normal(shape[1], seed=k).astype(dtype) for k in (1, 2))
    m, v = x.astype(float).mean(1), x.astype(float).var(1)
    inverse = 1 / np.sqrt(v + 1e-5)
    z, tolerance = (x - m[:, None]) * inverse[:, None], 4 * FLOATS[dtype]
    for ins, exact in (([], z), ([weight], z * weight), ([weight, bias], z * weight + bias)):
        y, mean, inv = nans(*shape, dtype=dtype), nans(shape[0], dtype=dtype), nans(shape[0], dtype=dtype)
        run(backend, "layer_norm", [y, mean, inv], [x, *ins], 1e-5)
        close(y, exact, tolerance)
        close(mean, m, tolerance)
        close(inv, inverse, tolerance)


ATTENTIONS = [  # batch, queries, keys, features, values
    ((2, 3), 5, 7, 8, 16),
    ((), 33, 33, 5, 3),
    ((1, 1), 1, 150, 40, 1),
    ((2,), 70, 130, 64, 64),
    ((1,), 65, 1, 33, 132),
    ((1,), 1, 1, 1, 1),
    ((2,), 3, 0, 4, 5),
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
    run(backend, "attention", [out], [q, k, v, *extra], 0.7, causal, bool(extra))
    close(out, exact)


def sample_cases(*classes: type) -> list:
    """(op, shapes) of the samples of image ops."""
    return [(cls(**attributes), shapes[0]) for cls in classes for attributes, shapes in cls.samples()]


@pytest.mark.parametrize("case", sample_cases(MaxPool2d, AvgPool2d, AdaptiveAvgPool2d), ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_pools(backend: Backend, case: tuple, layout: str, dtype: str) -> None:
    op, size = case
    shape, tolerance = LAYOUTS[layout], FLOATS[dtype]
    x = normal(*size).astype(dtype).round(1)  # with ties, of which the first wins
    exact = op.reference(x.astype(float))
    out, dx = shape(nans(*exact.shape, dtype=dtype)), shape(nans(*size, dtype=dtype))
    run(backend, op.row(), [out], [shape(x)], *op.kernel_attributes())
    close(out, exact, tolerance)
    dy = normal(*exact.shape, seed=1).astype(dtype)
    if isinstance(op, MaxPool2d):
        exact = MaxPool2dGrad(*op.attributes().values()).reference(x, dy.astype(float))
        run(backend, "max_pool2d_grad", [dx], [shape(x), shape(dy)], *op.kernel_attributes())
    else:
        grad = AvgPool2dGrad(op, size) if isinstance(op, AvgPool2d) else AdaptiveAvgPool2dGrad(size)
        exact = grad.reference(dy.astype(float))
        run(backend, f"{op.row()}_grad", [dx], [shape(dy)], *op.kernel_attributes())
    close(dx, exact, tolerance)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [(2, 70, 7, 7), (1, 3, 30, 20), (3, 1, 5, 5)], ids=str)
def test_global_average(backend: Backend, layout: str, size: tuple) -> None:
    x, shape = normal(*size) + 1, LAYOUTS[layout]
    out = shape(nans(*size[:2], 1, 1))
    run(backend, "adaptive_avg_pool2d", [out], [shape(x)])
    close(out, x.astype(float).mean((2, 3), keepdims=True))


def test_max_pool_keeps_nan(backend: Backend) -> None:
    x = normal(1, 1, 4, 4)
    x[0, 0, 0, 0] = np.nan
    out = np.zeros((1, 1, 2, 2), np.float32)
    run(backend, "max_pool2d", [out], [x], 2, 2, 2, 2, 0, 0, 1, 1)
    assert np.isnan(out[0, 0, 0, 0]) and not np.isnan(out.reshape(-1)[1:]).any()


RESIZES = [
    ((2, 3, 5, 4), (10, 8)),
    ((1, 17, 5, 4), (3, 9)),
    ((1, 2, 9, 8), (4, 3)),
    ((1, 1, 1, 1), (3, 2)),
    ((1, 3, 6, 5), (1, 1)),
]


@pytest.mark.parametrize("case", RESIZES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", ["nearest", "bilinear", "corners"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_interpolate(backend: Backend, case: tuple, layout: str, mode: str, dtype: str) -> None:
    (size, to), corners = case, mode == "corners"
    kind = "nearest" if mode == "nearest" else "bilinear"
    op, shape = Interpolate(size=to, mode=kind, align_corners=corners), LAYOUTS[layout]
    x, dy = normal(*size).astype(dtype), normal(*size[:2], *to, seed=1).astype(dtype)
    attrs = (*(() if kind == "nearest" else (corners,)), *op._scales(size[2:], to))
    out, dx = shape(nans(*dy.shape, dtype=dtype)), shape(nans(*size, dtype=dtype))
    run(backend, f"interpolate_{kind}", [out], [shape(x)], *attrs)
    close(out, op.reference(x.astype(float)), FLOATS[dtype])
    run(backend, f"interpolate_{kind}_grad", [dx], [shape(dy)], *attrs)
    close(dx, InterpolateGrad(size, None, kind, corners).reference(dy.astype(float)), FLOATS[dtype])


@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize("m,n", [(1, 1), (70, 33), (5, 130)])
def test_gradient_of_a_linear_layer(backend: Backend, name: str, m: int, n: int) -> None:
    """dz and db in one pass, then dx and dw by the products on strided views."""
    x, w, dy, alpha, step = normal(m, 17), normal(n, 17, seed=1), normal(m, n, seed=2), 0.3, 1e-6
    z = np.matmul(*double(x, w.T))
    exact = dy * (act_reference(name, alpha, z + step) - act_reference(name, alpha, z - step)) / (2 * step)
    value = act_reference(name, alpha, z) if name != "none" and OPS[name].from_output else z
    code = CODES.index(name)
    dz, db, dx, dw = nans(m, n), nans(n), nans(m, 17), nans(n, 17)
    run(backend, "activation_bias_grad", [dz, db], [inside(value.astype(np.float32)), dy], code, alpha)
    close(dz, exact, 1e-5)
    close(db, exact.sum(0), 1e-5)
    run(backend, "matmul", [dx], [dz, w], NONE, 0, 0)
    run(backend, "matmul", [dw], [np.asfortranarray(dz.T), x], NONE, 0, 0)
    close(dx, exact @ w, 1e-5)
    close(dw, exact.T @ x, 1e-5)

"""Products and convolutions on the GPU backends against numpy in float64: in the host emulation at both wave widths on any
machine, and on a CUDA device where there is one."""

# ruff: noqa: F811  (fixtures are imported by name)
from __future__ import annotations

import numpy as np
import pytest

from gpu_kernels import LAYOUTS, channels_last, close, double, inside, nans, run, window
from needle.ops.fused.layer import act_reference
from needle.ops.math.activation import ACTIVATIONS as OPS
from needle.ops.math.activation import CODES
from needle.ops.nn.conv import Conv2dWeightGrad, ConvTranspose2d, conv2d_array, transposed_array
from test_gpu import ACTIVATIONS, NONE, RELU, ROOT, Backend, backend, normal  # noqa: F401

GELU = 7
EXACT, TF32, FLOAT16, BFLOAT16 = range(4)
EXACT_TF32 = (b"hip", b"emulation_w64")  # CDNA multiplies float32 as it is
TOLERANCE = {EXACT: 5e-6, TF32: 2e-3, FLOAT16: 2e-3, BFLOAT16: 2e-2}  # of the largest result

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
    run(backend, "matmul", [out], [a, b], activation=NONE, alpha=0)
    close(out, exact)
    run(backend, "matmul", [out], [a, b, bias], activation=RELU, alpha=0)
    close(out, np.maximum(exact + bias, 0))


@pytest.mark.parametrize("dtype", ["float64", "int32", "int64"])
def test_matmul_of_other_dtypes(backend: Backend, dtype: str) -> None:
    values = np.random.default_rng(0).integers(-9, 9, (3, 5, 17)), np.random.default_rng(1).integers(-9, 9, (3, 17, 6))
    a, b = (inside(v.astype(dtype)) for v in values)
    out = nans(3, 5, 6, dtype=dtype)
    run(backend, "matmul", [out], [a, b, b[0, 0]], activation=NONE, alpha=0)
    assert (out == a @ b + b[0, 0]).all()


@pytest.mark.parametrize("precision", range(4))
@pytest.mark.parametrize("m,k,n", [(70, 65, 130), (260, 48, 260), (17, 100, 33)])
@pytest.mark.parametrize("turned", [False, True])
def test_matmul_fused(backend: Backend, precision: int, m: int, k: int, n: int, turned: bool) -> None:
    a, b, bias, residual = normal(m, k), normal(k, n, seed=1), normal(n, seed=2), normal(m, n, seed=3)
    if turned:
        a, b = np.asfortranarray(a), np.asfortranarray(b)
    out = nans(m, n)
    run(backend, "matmul_fused", [out], [a, b, bias, inside(residual)], activation=RELU, alpha=0, precision=precision)
    exact = np.maximum(np.matmul(*double(a, b)) + bias + residual, 0)
    close(out, exact, TOLERANCE[precision])
    if precision != EXACT and (precision != TF32 or backend.table.name not in EXACT_TF32):
        assert np.abs(out - exact).max() > 1e-5, "lower precision must be what ran"


@pytest.mark.parametrize("m", [1, 3, 8])
@pytest.mark.parametrize("k,n", [(50, 70), (64, 128), (1, 1), (0, 3)])
@pytest.mark.parametrize("order", ["C", "F"])
def test_matmul_of_few_rows(backend: Backend, m: int, k: int, n: int, order: str) -> None:
    a, b = normal(m, k), np.asarray(normal(k, n, seed=1), order=order)
    bias, residual, out = normal(n, seed=2), normal(m, n, seed=3), nans(m, n)
    run(backend, "matmul_fused", [out], [a, b, bias, inside(residual)], activation=4, alpha=0, precision=EXACT)
    close(out, ACTIVATIONS[4](np.matmul(*double(a, b)) + bias + residual))


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
        ins = [a[:, :5], np.eye(5, 16, dtype="float32")]
        run(backend, "matmul_fused", [out], ins, activation=NONE, alpha=0, precision=precision)
    expected = [1 + step, 1 + 2 * step, 1 + step, -1, 2.0**-17]
    if precision == TF32:
        expected[1] = 1 + 2 * step  # a tie goes away from zero
        expected = x[:5].tolist() if backend.table.name in EXACT_TF32 else expected
    assert out[range(0, 10, 2), range(5)].tolist() == expected
    ins = [a, np.full((16, 16), 1, "float32")]
    run(backend, "matmul_fused", [out], ins, activation=NONE, alpha=0, precision=precision)
    assert np.isposinf(out[10]).all() and np.isnan(out[12]).all()


@pytest.mark.parametrize("precision", [EXACT, FLOAT16])
@pytest.mark.parametrize("code", [4, GELU])
def test_matmul_other_activations(backend: Backend, precision: int, code: int) -> None:
    from math import erf

    act = ACTIVATIONS.get(code, lambda v: v * 0.5 * (1 + np.vectorize(erf)(v / np.sqrt(2))))
    a, b = normal(140, 20), normal(20, 140, seed=1)
    out = nans(140, 140)
    run(backend, "matmul_fused", [out], [a, b], activation=code, alpha=0, precision=precision)
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
    attrs = window(stride, padding, dilation, groups) | {"pad_bottom": padding[2], "pad_right": padding[3], "alpha": 0}
    run(backend, "conv2d", [out], [shape(x), shape(w)], activation=NONE, **attrs)
    close(out, exact)
    run(backend, "conv2d", [out], [shape(x), shape(w), inside(bias)], activation=RELU, **attrs)
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
    attrs = window(stride, padding, dilation, groups) | {"precision": precision}
    run(backend, "conv2d_fused", [out], ins, activation=code, alpha=0.1, **attrs)
    exact = exact * scale.reshape(-1, 1, 1) + bias.reshape(-1, 1, 1) + residual
    close(out, np.maximum(exact, 0.1 * exact if code == 3 else 0), TOLERANCE[precision])


@pytest.mark.parametrize("case", CONVS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_conv2d_gradients(backend: Backend, case: tuple, layout: str) -> None:
    x, w, stride, padding, dilation, groups, y = conv_case(case)
    dy, shape = normal(*y.shape, seed=5), LAYOUTS[layout]
    exact = Conv2dWeightGrad(w.shape[2:], stride, padding, dilation, groups).reference(*double(x, dy))
    dw = nans(*w.shape)
    run(backend, "conv2d_weight_grad", [dw], [shape(x), shape(dy)], **window(stride, padding, dilation, groups))
    close(dw, exact)
    op = ConvTranspose2d(stride, padding, (0, 0), dilation, groups)
    exact = transposed_array(*double(dy, w), op, x.shape[2:])
    dx = shape(nans(*x.shape))
    attrs = window(stride, padding, dilation, groups)
    run(backend, "conv_transpose2d", [dx], [shape(dy), shape(w)], activation=NONE, alpha=0, **attrs)
    close(dx, exact)


@pytest.mark.parametrize("channels", [(5, 7), (36, 70)])
def test_conv2d_weight_grad_of_many_pixels(backend: Backend, channels: tuple, monkeypatch) -> None:
    """Enough pixels that several blocks share a result; in any order of threads the same to the last bit."""
    x, dy = (normal(2, n, 40, 41, seed=n) for n in channels)
    exact = Conv2dWeightGrad((3, 3), (1, 1), (1, 1, 1, 1)).reference(*double(x, dy))
    for shape in (np.ascontiguousarray, channels_last):
        found = []
        for order in "01":
            monkeypatch.setenv("NEEDLE_EMULATION_REVERSE", order)
            found.append(nans(*exact.shape))
            run(backend, "conv2d_weight_grad", found[-1:], [shape(x), shape(dy)], **window((1, 1), (1, 1), (1, 1), 1))
            close(found[-1], exact)
        assert np.array_equal(*found)


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
    exact = transposed_array(*double(x, w), op, op.infer(x, w).shape[2:])
    out = shape(nans(*exact.shape))
    attrs = window(stride, padding, dilation, groups)
    run(backend, "conv_transpose2d", [out], [shape(x), shape(w), bias], activation=RELU, alpha=0, **attrs)
    close(out, np.maximum(exact + bias.reshape(-1, 1, 1), 0))


@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize("m,n", [(1, 1), (70, 33), (5, 130), (700, 24), (300, 5)])
def test_gradient_of_a_linear_layer(backend: Backend, name: str, m: int, n: int) -> None:
    """dz and db in one pass, then dx and dw by the products on strided views."""
    x, w, dy, alpha, step = normal(m, 17), normal(n, 17, seed=1), normal(m, n, seed=2), 0.3, 1e-6
    z = np.matmul(*double(x, w.T))
    exact = dy * (act_reference(name, alpha, z + step) - act_reference(name, alpha, z - step)) / (2 * step)
    value = act_reference(name, alpha, z) if name != "none" and OPS[name].from_output else z
    code = CODES.index(name)
    dz, db, dx, dw = nans(m, n), nans(n), nans(m, 17), nans(n, 17)
    run(backend, "activation_bias_grad", [dz, db], [inside(value.astype(np.float32)), dy], activation=code, alpha=alpha)
    close(dz, exact, 1e-5)
    close(db, exact.sum(0), 1e-5)
    across = [np.asfortranarray(a) for a in (nans(m, n), value.astype(np.float32), dy)]
    for given in ([nans(m, n), value.astype(np.float32), dy], across):  # neighbours in rows, and in columns
        db[...] = np.nan
        run(backend, "activation_bias_grad", [given[0], db], given[1:], activation=code, alpha=alpha)
        assert np.array_equal(given[0], dz)
        close(db, exact.sum(0), 1e-5)
    run(backend, "matmul", [dx], [dz, w], activation=NONE, alpha=0)
    run(backend, "matmul", [dw], [np.asfortranarray(dz.T), x], activation=NONE, alpha=0)
    close(dx, exact @ w, 1e-5)
    close(dw, exact.T @ x, 1e-5)


CDISTS = [(1, 1, 1, 1), (2, 5, 3, 4), (0, 2, 3, 4), (1, 70, 65, 17), (2, 3, 130, 33), (1, 4, 5, 0)]


@pytest.mark.parametrize("p", [0, 1, 2, 3.5, np.inf], ids=str)
@pytest.mark.parametrize("case", CDISTS, ids=str)
def test_cdist(backend: Backend, case: tuple, p: float) -> None:
    n, rows, columns, terms = case
    for dtype, tolerance in (("float32", 1e-5), ("float64", 1e-13)):
        a, b = normal(n, rows, terms).astype(dtype), normal(n, columns, terms, seed=1).astype(dtype)
        b[:, : min(rows, columns)] = np.where(np.arange(terms) < terms // 2, b, a[:, :1])[:, : min(rows, columns)]
        apart = np.abs(a[:, :, None].astype("float64") - b[:, None])
        exact = np.linalg.norm(apart, p, -1) if terms else np.zeros((n, rows, columns))
        turned = np.ascontiguousarray(b.swapaxes(1, 2)).swapaxes(1, 2)
        for left, right in ((a, b), (inside(a), turned)):
            out = nans(n, rows, columns, dtype=dtype)
            run(backend, "cdist", [out], [left, right], p=p)
            close(out, exact, tolerance)
            if p not in (1, 2):
                continue
            slopes, out = normal(n, rows, columns, seed=2).astype(dtype), nans(n, rows, terms, dtype=dtype)
            run(backend, "cdist_grad", [out], [left, right, exact.astype(dtype), inside(slopes)], p=p)
            d = a[:, :, None].astype("float64") - b[:, None]
            with np.errstate(divide="ignore", invalid="ignore"):
                each = np.sign(d) if p == 1 else np.where(exact[..., None] == 0, 0, d / exact[..., None])
            close(out, (each * slopes[..., None]).sum(2), tolerance)

"""Softmax, norms, pools, resizing and sampling on the GPU backends against numpy in float64: in the host emulation at both
wave widths on any machine, and on a CUDA device where there is one."""

# ruff: noqa: F811  (fixtures are imported by name)
from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

import needle as ndl
from gpu_kernels import FLOATS, LAYOUTS, check_pool, close, inside, nans, run
from needle.backend_ndarray import Device, NDArray, call
from needle.ops.nn.pool import (
    AdaptiveAvgPool2d,
    AvgPool2d,
    MaxPool2d,
)
from needle.ops.nn.resize import Interpolate, InterpolateGrad, attributes_of
from needle.ops.nn.row_norm_grad import RowNormGrad
from test_gpu import RELU, Backend, backend, normal  # noqa: F401


def soft(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


ROWS = [(1, 1), (3, 5), (70, 33), (5, 64), (2, 200), (3, 1025), (2, 3000)]


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


COLUMNS = [
    (2, 5, 12),
    (1, 1, 4),
    (3, 16, 33),
    (0, 3, 5),
    (2, 17, 65),
    (1, 120, 70),
    (2, 150, 5),
    (5, 1100, 31),
    (1, 700, 4),
]


@pytest.mark.parametrize("shape", COLUMNS, ids=str)
def test_softmax_of_columns(backend: Backend, shape: tuple) -> None:
    """Threads, lanes of waves or blocks to a column, few and many of them, and rows of no fixed length."""
    x, dy = (normal(*shape, seed=s) * 3 for s in (0, 1))
    b, d, n = shape
    labels = np.random.default_rng(0).integers(0, d, (b, n))
    across = x.astype(np.float64).swapaxes(1, 2)
    p = soft(across).swapaxes(1, 2)
    log_p, total = np.log(p), np.log(np.exp(across).sum(-1))[:, None]

    def columns(name: str, exact: np.ndarray, *ins: np.ndarray, **named: int) -> None:
        out = inside(nans(*exact.shape))[tuple(slice(0, n) for n in exact.shape)]
        run(backend, name, [out], list(ins), **named)
        close(out, exact, 2e-5)

    x, dy = inside(x), inside(dy)
    columns("softmax_columns", p, x, logarithm=0)
    columns("softmax_columns", log_p, x, logarithm=1)
    columns("logsumexp_columns", total, x)
    columns("softmax_columns_grad", p * (dy - (p * dy).sum(1, keepdims=True)), p.astype("float32"), dy, logarithm=0)
    columns("softmax_columns_grad", dy - p * dy.sum(1, keepdims=True), log_p.astype("float32"), dy, logarithm=1)
    one_hot = labels[:, None] == np.arange(d)[:, None]
    for kind in ("int32", "int64"):
        columns("cross_entropy_columns", -(log_p * one_hot).sum(1), x, labels.astype(kind))
        columns("cross_entropy_columns_grad", (p - one_hot) * dy[:, :1], x, labels.astype(kind), dy[:, 0])


@pytest.mark.parametrize("d", [4, 60, 300, 20000])
@pytest.mark.parametrize("n", [3, 5000])
def test_softmax_of_extremes_in_long_rows(gpu: Device, d: int, n: int) -> None:
    """Rows and columns of every length, with infinities and NaN before and behind numbers far apart, are the CPU's."""
    n = min(n, 100000 // d)
    x = np.random.default_rng(d).uniform(-200, 200, (d, n)).astype("float32")
    x[:, ::5] = -np.inf
    x[d // 2, ::5] = -120
    x[0, 1::5], x[-1, 2::5] = np.inf, np.nan
    x[: d // 2, 3::5] = -np.inf
    x[:, n // 2] = -np.inf
    labels = np.random.default_rng(0).integers(-1, d + 1, n)
    for a, axis in ((x, 0), (np.ascontiguousarray(x.T), 1)):
        for f in (ndl.ops.softmax, ndl.ops.log_softmax, ndl.ops.logsumexp):
            got, want = (f(ndl.Tensor(a, device=where), axis).numpy() for where in (gpu, ndl.cpu()))
            np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)
    for name, rows, numbers in (("", x.T.copy(), labels), ("_columns", x[None], labels[None])):
        outs = []
        for device in (gpu, ndl.cpu()):
            given = {"logits": NDArray(rows, device), "labels": NDArray(numbers, device, "int64")}
            loss, slopes = NDArray.empty(numbers.shape, device=device), NDArray.empty(rows.shape, device=device)
            call("cross_entropy" + name, [loss], **given)
            call(f"cross_entropy{name}_grad", [slopes], **given, dloss=NDArray(np.ones(numbers.shape), device))
            outs.append((loss.numpy(), slopes.numpy()))
        for got, want in zip(*outs, strict=True):
            np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-5)


def test_softmax_over_channels_moves_nothing(gpu: Device) -> None:
    """Columns of plain images, rows of those whose channels are neighbours."""
    kinds = []
    for axes in ((0, 1, 2, 3), (0, 3, 1, 2)):
        shape = (2, 5, 4, 3) if axes[1] == 1 else (2, 4, 3, 5)
        exe = ndl.compile(
            lambda x, axes=axes: ndl.ops.softmax(ndl.ops.permute(x, axes), 1), (ndl.Tensor(normal(*shape), device=gpu),)
        )
        kinds.append(exe.plan.names)
    assert kinds[0] == ["softmax_columns"]
    assert kinds[1][0] == "softmax"


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
    run(backend, "batch_norm", [out], [x, mean, var, weight, bias], eps=eps, activation=RELU, alpha=0)
    close(out, np.maximum(exact + bias.reshape(per_channel), 0), tolerance)

    stats = [nans(channels, dtype=dtype) for _ in range(3)]
    run(backend, "batch_norm_train", [out, *stats], [x, weight, bias], eps=eps, activation=0, alpha=0)
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


@pytest.mark.parametrize("channels", [1, 3, 4, 64, 130])
@pytest.mark.parametrize("layout", [np.ascontiguousarray, channels_inside], ids=["ncs", "nsc"])
def test_batch_norm_train_far_from_zero(backend: Backend, channels: int, layout: object) -> None:
    """Channels shared by blocks and channels of one block, whose squared means are a million variances."""
    sizes = (1, 35, 36, 1089, *((9216, 9409) if channels <= 4 else ()))
    for images, pixels, outlier in itertools.product((1, 2, 3), sizes, (False, True)):
        x, dy = (layout(normal(images, channels, pixels, seed=k)) for k in (0, 1))
        x += np.float32(1000)
        if outlier:
            x[0, :, 0] = 0  # distances from the first element are no help then
        weight, bias = (normal(channels, seed=k) for k in (2, 3))
        y, stats = layout(nans(*x.shape)), [nans(channels) for _ in range(3)]
        run(backend, "batch_norm_train", [y, *stats], [x, weight, bias], eps=1e-5, activation=RELU, alpha=0)
        mean, var, inverse = stats
        np.testing.assert_allclose(mean, x.mean((0, 2), dtype=float), rtol=1e-6)
        np.testing.assert_allclose(var, x.astype(float).var((0, 2)), rtol=1e-4, atol=1e-30)
        np.testing.assert_allclose(inverse, 1 / np.sqrt(var.astype(float) + 1e-5), rtol=1e-5)
        z_off = 1e-4 * np.maximum(inverse, 1).reshape(1, -1, 1)  # a mean of 1000 is rounded to 6e-5
        leaves = [torch.tensor(a, dtype=torch.float64, requires_grad=True) for a in (x, weight, bias)]
        if images * pixels == 1:
            close(y, np.maximum(bias, 0).reshape(1, -1, 1))
            continue
        exact = torch.nn.functional.batch_norm(leaves[0], None, None, *leaves[1:], training=True, eps=1e-5)
        scale = np.abs(weight * inverse).reshape(1, -1, 1)
        assert (np.abs(y - exact.detach().relu().numpy()) < 1e-5 + z_off * np.abs(weight).reshape(1, -1, 1)).all()
        exact.backward(torch.tensor(dy, dtype=torch.float64))
        outs = [layout(nans(*x.shape)), nans(channels), nans(channels)]
        run(backend, "batch_norm_train_grad", outs, [x, mean, inverse, weight, dy])
        off = [np.abs(a - leaf.grad.numpy()) for a, leaf in zip(outs, leaves, strict=True)]
        assert (off[0] < z_off * scale * np.abs(dy).max()).all()
        assert (off[1] < z_off.ravel() * np.abs(dy).sum((0, 2))).all()
        assert (off[2] < 1e-5 * np.abs(dy).sum((0, 2))).all()


@pytest.mark.parametrize("layout", [np.ascontiguousarray, channels_inside], ids=["ncs", "nsc"])
def test_batch_norm_train_without_numbers(backend: Backend, layout: object) -> None:
    """NaN and infinity stay in their channel; channels without pixels have no statistics."""
    odd = normal(2, 4, 9216)
    odd[1, 1, 77], odd[0, 2, 5] = np.nan, np.inf
    for x, lost in ((odd, [False, True, True, False]), (normal(2, 4, 0), [True] * 4), (normal(0, 4, 5), [True] * 4)):
        y, stats = layout(nans(*x.shape)), [np.zeros(4, np.float32) for _ in range(3)]
        ins = [layout(x), np.ones(4, np.float32), np.zeros(4, np.float32)]
        run(backend, "batch_norm_train", [y, *stats], ins, eps=1e-5, activation=0, alpha=0)
        assert all(np.isnan(s).tolist() == lost for s in stats)
        assert x.size == 0 or np.isnan(y).all((0, 2)).tolist() == lost


@pytest.mark.parametrize("shape", ROWS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS)
def test_layer_norm(backend: Backend, shape: tuple, dtype: str) -> None:
    x = inside(normal(*shape).astype(dtype) + 3)
    weight, bias = (normal(shape[1], seed=k).astype(dtype) for k in (1, 2))
    m, v = x.astype(float).mean(1), x.astype(float).var(1)
    inverse = 1 / np.sqrt(v + 1e-5)
    z, tolerance = (x - m[:, None]) * inverse[:, None], 4 * FLOATS[dtype]
    cases = (([], z), ([weight], z * weight), ([None, bias], z + bias), ([weight, bias], z * weight + bias))
    for ins, exact in cases:
        y, mean, inv = nans(*shape, dtype=dtype), nans(shape[0], dtype=dtype), nans(shape[0], dtype=dtype)
        run(backend, "layer_norm", [y, mean, inv], [x, *ins], eps=1e-5)
        close(y, exact, tolerance)
        close(mean, m, tolerance)
        close(inv, inverse, tolerance)


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
    check_pool(backend, op, x, shape, tolerance)


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
    run(backend, "max_pool2d", [out], [x], **MaxPool2d((2, 2), (2, 2)).kernel_attributes())
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
    attrs = attributes_of(op, size[2:], to)
    out, dx = shape(nans(*dy.shape, dtype=dtype)), shape(nans(*size, dtype=dtype))
    run(backend, f"interpolate_{kind}", [out], [shape(x)], **attrs)
    close(out, op.reference(x.astype(float)), FLOATS[dtype])
    run(backend, f"interpolate_{kind}_grad", [dx], [shape(dy)], **attrs)
    close(dx, InterpolateGrad(size, None, kind, corners).reference(dy.astype(float)), FLOATS[dtype])


@pytest.mark.parametrize("shape", [*ROWS, (0, 5), (2000, 12), (300, 260), (3, 20000)], ids=str)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rms", [0, 1])
@pytest.mark.parametrize("weighted", [False, True])
def test_gradient_of_norms(gpu: Device, shape: tuple, dtype: str, rms: int, weighted: bool) -> None:
    """Of rows in registers and longer ones; sums of columns over parts of the rows, with and without the bias's."""
    x, dy = normal(*shape).astype(dtype) + 1, normal(*shape, seed=1).astype(dtype)
    weight = normal(shape[1], seed=2).astype(dtype) if weighted else None
    for bias in (False, True):
        got = []
        for device in (gpu, ndl.cpu()):
            given = [ndl.Tensor(a, device=device, dtype=dtype) for a in (x, weight, dy) if a is not None]
            op = RowNormGrad(axes=1, eps=1e-5, rms=bool(rms), has_weight=weighted, has_bias=bias)
            found = op(*given)
            got.append([a.numpy() for a in (found if op.n_out > 1 else (found,))])
        for have, want in zip(*got, strict=True):
            if shape[1] == 1:  # differences of equal numbers, over sqrt(eps)
                assert np.abs(have - want).max() < (1e-3 if dtype == "float32" else 1e-11)
            else:
                close(have, want.astype(np.float64), 2e-5 if dtype == "float32" else 1e-12)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("last", [False, True], ids=["nchw", "nhwc"])
def test_places_of_maxima(gpu: Device, last: bool, dtype: str) -> None:
    """First ones among equals, NaN, windows that reach over the edge, and those that share an image out."""
    x = np.random.default_rng(0).integers(0, 4, (2, 5, 9, 7)).astype(dtype)
    x[0, 1, 3, 3] = x[1, 2, 0, 0] = np.nan
    x[1, 3] = -np.inf
    windows = [(1, 1, 1, 1, 0, 0, 1, 1), (2, 2, 2, 2, 0, 0, 1, 1), (3, 3, 2, 1, 1, 1, 1, 1), (3, 2, 1, 2, 1, 1, 2, 3)]
    names = ["kernel_h", "kernel_w", "stride_h", "stride_w", "pad_top", "pad_left", "dilation_h", "dilation_w"]
    for window_of in windows:
        attrs = dict(zip(names, window_of, strict=True))
        size = [
            (n + 2 * p - d * (k - 1) - 1) // s + 1
            for n, k, s, p, d in zip((9, 7), window_of[:2], window_of[2:4], window_of[4:6], window_of[6:], strict=True)
        ]
        check_places(gpu, "max_pool2d_places", x, last, size, **attrs)
    for size in ([1, 1], [4, 3], [9, 7], [12, 10]):
        check_places(gpu, "adaptive_max_pool2d_places", x, last, size)


def check_places(gpu: Device, name: str, x: np.ndarray, last: bool, size: list[int], **attrs: int) -> None:
    got = []
    for device in (gpu, ndl.cpu()):
        images = NDArray(np.moveaxis(x, 1, -1).copy() if last else x, device, str(x.dtype))
        out = NDArray.empty((*x.shape[:2], *size), "int64", device)
        call(name, [out], x=images.permute((0, 3, 1, 2)) if last else images, **attrs)
        got.append(out.numpy())
    np.testing.assert_array_equal(*got)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("count", [0, 1, 255, 5000, 300001])
def test_sum_of_squares(gpu: Device, count: int, dtype: str) -> None:
    x = normal(count).astype(dtype)
    out = [NDArray.empty((1,), "float64", gpu) for _ in range(2)]
    for y in out:
        call("sum_squares", [y], x=NDArray(x, gpu, dtype))
    np.testing.assert_allclose(out[0].numpy()[0], (x.astype("float64") ** 2).sum(), 1e-13)
    assert out[0].numpy().tobytes() == out[1].numpy().tobytes()


@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
@pytest.mark.parametrize("corners", [False, True])
def test_grid_sample(gpu: Device, mode: str, padding: str, corners: bool) -> None:
    """Images and volumes, channels as neighbours and not, places within, on the edges and far outside."""
    for size, places in (
        ((2, 3, 4, 5), (3, 7)),
        ((1, 40, 6, 6), (2, 2)),
        ((2, 1, 1, 3), (5, 1)),
        ((1, 3, 2, 3, 4), (2, 3, 5)),
    ):
        rank = len(places)
        if mode == "bicubic" and rank == 3:
            continue
        for dtype, last in itertools.product(("float32", "float64"), (False, True)):
            x = np.random.standard_normal(size).astype(dtype)
            # 1 / 64 is exact, and no coordinate lies between two pixels but by it
            grid = (np.random.randint(-90, 90, (size[0], *places, rank)) / 64).astype(dtype)
            grid.reshape(-1)[:4] = -1, 1, 50, -1e4
            got = []
            for device in (gpu, ndl.cpu()):
                image = NDArray(np.moveaxis(x, 1, -1).copy() if last else x, device, dtype)
                if last:
                    image = image.permute((0, rank + 1, *range(1, rank + 1)))
                sampled = ndl.ops.grid_sample(
                    ndl.Tensor.make_const(image), ndl.Tensor(grid, device=device, dtype=dtype), mode, padding, corners
                )
                got.append(sampled.numpy())
            np.testing.assert_allclose(
                *got, 1e-4 if dtype == "float32" else 1e-12, 1e-4 if dtype == "float32" else 1e-12
            )


def test_grid_sample_of_no_numbers(gpu: Device) -> None:
    x = np.arange(24, dtype="float32").reshape(1, 2, 3, 4)
    grid = np.array([[[[np.nan, 0], [np.inf, -np.inf], [0, 0]]]], "float32")
    for mode, padding in itertools.product(("bilinear", "nearest", "bicubic"), ("zeros", "border", "reflection")):
        got = (
            ndl.ops.grid_sample(ndl.Tensor(x, device=d), ndl.Tensor(grid, device=d), mode, padding).numpy()
            for d in (gpu, ndl.cpu())
        )
        np.testing.assert_allclose(*got, 1e-6, err_msg=f"{mode} {padding}")

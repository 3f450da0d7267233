"""What GPU kernels do four floats at a time, at the sizes and places where they can and just cannot: against numpy in
float64, in the host emulation at both wave widths on any machine, and on a CUDA device where there is one."""

# ruff: noqa: F811  (fixtures are imported by name)
from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from gpu_kernels import FLOATS, channels_last, check_pool, close, inside, nans, run, window
from needle.ops.nn.conv import conv2d_array
from needle.ops.nn.pool import (
    AdaptiveAvgPool2d,
    AvgPool2d,
    MaxPool2d,
)
from needle.ops.nn.resize import Interpolate, InterpolateGrad, attributes_of
from needle.ops.nn.rotary import Rotary
from test_gpu import RELU, Backend, backend, normal  # noqa: F401


def among(before: int, after: int) -> Callable[[np.ndarray], np.ndarray]:
    """As a channels-last image that is a slice of one with more channels in front and behind."""

    def place(a: np.ndarray) -> np.ndarray:
        n, c, h, w = a.shape
        whole = channels_last(np.full((n, before + c + after, h, w), 7, a.dtype))
        whole[:, before : before + c] = a
        return whole[:, before : before + c]

    return place


# Aligned; aligned behind other channels; pixels that are no multiple of four apart; from the second channel on.
PLACES = {"whole": channels_last, "behind": among(4, 8), "odd": among(0, 3), "unaligned": among(1, 3)}
POOLS = [
    MaxPool2d((3, 3), (2, 2), (1, 1)),
    MaxPool2d((2, 2), (2, 2)),
    MaxPool2d((2, 3), (1, 2), (1, 1), (2, 1)),
    MaxPool2d((4, 1), (1, 1), (2, 0)),
    AvgPool2d((3, 3), (2, 2), (1, 1)),
    AvgPool2d((2, 1), (1, 2)),
    AvgPool2d((5, 4), (3, 3), (2, 1)),
    AdaptiveAvgPool2d((1, 1)),
    AdaptiveAvgPool2d((3, 2)),
    AdaptiveAvgPool2d((7, 9)),
]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("channels", [1, 3, 4, 5, 64, 140])
@pytest.mark.parametrize("op", POOLS, ids=repr)
def test_pools(backend: Backend, op: MaxPool2d | AvgPool2d | AdaptiveAvgPool2d, channels: int, place: str) -> None:
    size, put = (2, channels, 7, 9), PLACES[place]
    x = normal(*size).round(1)  # with ties, of which the first wins
    check_pool(backend, op, x, put, FLOATS["float32"])


@pytest.mark.parametrize(
    "size", [(1, 8, 1, 1), (3, 4, 1, 40), (2, 2048, 7, 7), (1, 12, 33, 1), (2, 128, 5, 4)], ids=str
)
@pytest.mark.parametrize("place", PLACES)
def test_global_average(backend: Backend, size: tuple, place: str) -> None:
    x, put = normal(*size) + 1, PLACES[place]
    out = put(nans(*size[:2], 1, 1))
    run(backend, "adaptive_avg_pool2d", [out], [put(x)])
    close(out, x.astype(float).mean((2, 3), keepdims=True))


@pytest.mark.parametrize("channels", [3, 4, 64])
def test_pools_keep_nan_and_infinity(backend: Backend, channels: int) -> None:
    """In their own channel and window only."""
    x = channels_last(normal(1, channels, 6, 6))
    x[0, 1, 0, 0], x[0, 2, 5, 5], x[0, 0] = np.nan, np.inf, -np.inf
    for kernel in (2, 3):
        op = MaxPool2d((kernel, kernel), (kernel, kernel))
        out = channels_last(nans(1, channels, 6 // kernel, 6 // kernel))
        run(backend, "max_pool2d", [out], [x], **op.kernel_attributes())
        assert np.isnan(out[0, 1, 0, 0]) and np.isnan(out).sum() == 1
        assert np.isposinf(out[0, 2, -1, -1]) and np.isposinf(out).sum() == 1 and np.isneginf(out[0, 0]).all()
    dy, dx = channels_last(normal(1, channels, 2, 2, seed=1)), channels_last(nans(1, channels, 6, 6))
    dy[0, 1, 0, 0] = np.inf
    run(backend, "max_pool2d_grad", [dx], [x, dy], **op.kernel_attributes())
    assert np.isposinf(dx[0, 1, 0, 0]) and np.isfinite(dx).sum() == dx.size - 1


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("channels", [3, 4, 5, 64])
@pytest.mark.parametrize("mode", ["nearest", "bilinear", "corners"])
@pytest.mark.parametrize("to", [(10, 8), (3, 9), (1, 1)], ids=str)
def test_interpolate(backend: Backend, to: tuple, mode: str, channels: int, place: str) -> None:
    size, put, corners = (2, channels, 5, 4), PLACES[place], mode == "corners"
    kind = "nearest" if mode == "nearest" else "bilinear"
    op = Interpolate(size=to, mode=kind, align_corners=corners)
    x, dy = normal(*size), normal(*size[:2], *to, seed=1)
    attrs, out, dx = attributes_of(op, size[2:], to), put(nans(*dy.shape)), put(nans(*size))
    run(backend, f"interpolate_{kind}", [out], [put(x)], **attrs)
    close(out, op.reference(x.astype(float)))
    run(backend, f"interpolate_{kind}_grad", [dx], [put(dy)], **attrs)
    close(dx, InterpolateGrad(size, None, kind, corners).reference(dy.astype(float)))


def rows_at(shift: int, gap: int) -> Callable[[np.ndarray], np.ndarray]:
    """As rows that begin `shift` elements into a larger array's, which have `gap` elements more."""

    def place(a: np.ndarray) -> np.ndarray:
        whole = np.full((a.shape[0], a.shape[1] + shift + gap), 7, a.dtype)
        whole[:, shift : shift + a.shape[1]] = a
        return whole[:, shift : shift + a.shape[1]]

    return place


ROW_PLACES = {"whole": rows_at(0, 0), "apart": rows_at(4, 4), "odd": rows_at(0, 3), "unaligned": rows_at(1, 3)}
# Kept by a wave (also where rows are many), by a block, and too long for one.
ROWS = [(3, 1), (5, 3), (70, 4), (2, 767), (2, 768), (70, 768), (70, 197), (3, 5000), (2, 9000), (1, 17001), (0, 8)]


@pytest.mark.parametrize("shape", ROWS, ids=str)
@pytest.mark.parametrize("place", ROW_PLACES)
def test_layer_norm(backend: Backend, shape: tuple, place: str) -> None:
    put, (m, d) = ROW_PLACES[place], shape
    x, weight, bias = normal(*shape) + 3, normal(d, seed=1), normal(d, seed=2)
    mean, inverse = x.astype(float).mean(1), 1 / np.sqrt(x.astype(float).var(1) + 1e-5)
    z = (x - mean[:, None]) * inverse[:, None]
    for ins, exact in (([], z), ([weight, bias], z * weight + bias), ([None, inside(bias, 1)], z + bias)):
        y, got = put(nans(*shape)), (nans(m), nans(m))
        run(backend, "layer_norm", [y, *got], [put(x), *ins], eps=1e-5)
        close(y, exact, 2e-5)
        close(got[0], mean, 2e-5)
        close(got[1], inverse, 2e-5)


@pytest.mark.parametrize("shape", ROWS, ids=str)
@pytest.mark.parametrize("place", ROW_PLACES)
def test_softmax(backend: Backend, shape: tuple, place: str) -> None:
    put, (m, d) = ROW_PLACES[place], shape
    x, dy = 3 * normal(*shape), normal(*shape, seed=1)
    e = np.exp(x.astype(float) - x.max(-1, keepdims=True))
    p, labels = e / e.sum(-1, keepdims=True), np.random.default_rng(0).integers(0, d, m)
    log_p = x - x.max(-1, keepdims=True) - np.log(e.sum(-1, keepdims=True))

    def row(name: str, exact: np.ndarray, *ins: np.ndarray) -> None:
        out = put(nans(*shape)) if exact.shape == shape else nans(*exact.shape)
        run(backend, name, [out], list(ins))
        close(out, exact)

    row("softmax", p, put(x))
    row("log_softmax", log_p, put(x))
    row("logsumexp", (x - log_p)[:, :1], put(x))
    row("softmax_grad", p * (dy - (p * dy).sum(-1, keepdims=True)), put(p.astype("float32")), put(dy))
    row("log_softmax_grad", dy - p * dy.sum(-1, keepdims=True), put(log_p.astype("float32")), put(dy))
    row("cross_entropy", -log_p[np.arange(m), labels], put(x), labels)
    row("cross_entropy_grad", (p - (labels[:, None] == np.arange(d))) * dy[:, :1], put(x), labels, dy[:, 0])


@pytest.mark.parametrize("d", [3, 4, 767, 768, 5000, 9000])
def test_softmax_of_extremes(backend: Backend, d: int) -> None:
    x = np.zeros((5, d), np.float32)
    x[0, 1], x[1, 2], x[2], x[3, 1], x[4, ::2] = np.nan, np.inf, -np.inf, -np.inf, -np.inf
    out, totals = nans(5, d), nans(5, 1)
    run(backend, "softmax", [out], [x])
    run(backend, "logsumexp", [totals], [x])
    assert np.isnan(out[[0, 2]]).all() and np.isnan(out[1, 2])
    close(out[3:], np.exp(x[3:].astype(float)) / np.exp(x[3:].astype(float)).sum(1, keepdims=True))
    assert np.isnan(totals[0, 0]) and np.isposinf(totals[1, 0]) and np.isneginf(totals[2, 0])
    close(totals[3:, 0], np.log(np.exp(x[3:].astype(float)).sum(1)))


# Shapes of an operand and of another that is broadcast to it.
OPERANDS = [
    ((1,), (1,)),
    ((3,), (1,)),
    ((4099,), (4099,)),
    ((4099,), (1,)),
    ((5, 8), (8,)),
    ((5, 8), (5, 1)),
    ((5, 7), (7,)),
    ((3, 4, 5, 12), (4, 1, 12)),
    ((2, 64, 3, 5), (64, 1, 1)),
    ((300, 260), (260,)),
    ((0, 4), (4,)),
]


@pytest.mark.parametrize("shapes", OPERANDS, ids=str)
@pytest.mark.parametrize("place", ["whole", "aligned", "unaligned", "turned", "backwards"])
def test_elements(backend: Backend, shapes: tuple, place: str) -> None:
    """Operands of one value along the last dimension, slices of others, and dimensions in another order."""

    def put(a: np.ndarray) -> np.ndarray:
        if place == "turned":
            return np.asfortranarray(a)
        if place == "backwards":
            return np.ascontiguousarray(a[..., ::-1])[..., ::-1]
        return a if place == "whole" else inside(a, 4 if place == "aligned" else 1)

    shape, other = shapes
    a, b, out = put(normal(*shape)), np.broadcast_to(put(normal(*other, seed=1)), shape), put(nans(*shape))
    for name, exact in (("add", a.astype(float) + b), ("mul", a.astype(float) * b)):
        run(backend, name, [out], [a, b])
        close(out, exact)
    run(backend, "sub", [out], [b, a])
    close(out, b.astype(float) - a)
    run(backend, "relu", [out], [b])
    close(out, np.maximum(b, 0))
    run(backend, "where", [out], [np.broadcast_to(a > 0, shape), a, b])
    close(out, np.where(a > 0, a, b))


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64", "bool"])
@pytest.mark.parametrize("channels", [1, 2, 3, 4, 5, 16, 64])
@pytest.mark.parametrize("pixels", [(1, 1), (3, 5), (8, 8), (33, 40)], ids=str)
def test_copies_of_images(backend: Backend, pixels: tuple, channels: int, dtype: str) -> None:
    """Into parts of wider images and out of them, and from one order of dimensions to the other."""
    a = np.random.default_rng(0).integers(0, 2 if dtype == "bool" else 99, (2, channels, *pixels)).astype(dtype)
    for put in (*PLACES.values(), np.ascontiguousarray, inside):
        for take in (among(channels, 0), channels_last, np.ascontiguousarray, inside):
            out = put(np.zeros_like(a))
            run(backend, "copy", [out], [take(a)])
            assert np.array_equal(out, a)
            if out.base is not None:  # and nothing beside it was written
                assert np.array_equal(out.base, put(a).base)


def test_copies_keep_every_bit(backend: Backend) -> None:
    a = np.arange(0x7F800000, 0x7F800000 + 4096, dtype=np.uint32).view(np.float32)  # infinity and NaN of all sorts
    out = np.zeros(4096, np.float32)
    run(backend, "copy", [out], [a])
    assert np.array_equal(out.view(np.uint32), a.view(np.uint32))


# Kernel, stride, padding, dilation.
DEPTHWISE = [
    ((3, 3), (1, 1), (1, 1, 1, 1), (1, 1)),
    ((3, 3), (2, 2), (0, 1, 1, 0), (1, 1)),
    ((5, 5), (1, 2), (2, 2, 2, 2), (1, 1)),
    ((7, 7), (1, 1), (3, 3, 3, 3), (1, 1)),
    ((2, 3), (1, 1), (2, 2, 1, 2), (1, 2)),
    ((1, 1), (1, 1), (0, 0, 0, 0), (1, 1)),
    ((9, 6), (1, 1), (4, 3, 4, 2), (1, 1)),
    ((13, 13), (1, 1), (6, 6, 6, 6), (1, 1)),
]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("channels", [3, 4, 5, 64, 268, 1100])
@pytest.mark.parametrize("case", DEPTHWISE, ids=str)
def test_depthwise(backend: Backend, case: tuple, channels: int, place: str) -> None:
    kernel, stride, padding, dilation = case
    put, size = PLACES[place], (2, channels, 7, 9) if channels < 1000 else (1, channels, 3, 4)
    x, w = normal(*size), normal(channels, 1, *kernel, seed=1)
    scale, bias = normal(channels, seed=2), normal(channels, seed=3)
    exact = conv2d_array(x.astype(float), w.astype(float), stride, padding, dilation, channels)
    residual, out = normal(*exact.shape, seed=4), put(nans(*exact.shape))
    attrs = window(stride, padding, dilation, channels) | {"precision": 0, "alpha": 0}
    run(backend, "conv2d_fused", [out], [put(x), w], activation=0, **attrs)
    close(out, exact)
    ins = [put(x), np.asfortranarray(w), inside(scale), bias, put(residual)]
    run(backend, "conv2d_fused", [out], ins, activation=RELU, **attrs)
    close(out, np.maximum(exact * scale.reshape(-1, 1, 1) + bias.reshape(-1, 1, 1) + residual, 0))


def test_depthwise_of_nan_and_infinity(backend: Backend) -> None:
    """What lies outside of an image is left out, also where a weight is infinite."""
    x, w, out = channels_last(normal(1, 8, 4, 4)), np.ones((8, 1, 3, 3), np.float32), channels_last(nans(1, 8, 4, 4))
    w[2, 0, 0, 0], x[0, 3, 0, 0] = np.inf, np.nan
    attrs = window((1, 1), (1, 1, 1, 1), (1, 1), 8) | {"precision": 0, "alpha": 0}
    run(backend, "conv2d_fused", [out], [x, w], activation=0, **attrs)
    assert np.isfinite(out[0, 2, 0]).all() and np.isfinite(out[0, 2, :, 0]).all() and np.isinf(out[0, 2, 1:, 1:]).all()
    assert np.isnan(out[0, 3, :2, :2]).all() and np.isnan(out).sum() == 4


@pytest.mark.parametrize("shape", ROWS, ids=str)
@pytest.mark.parametrize("place", ROW_PLACES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_rms_norm(backend: Backend, shape: tuple, place: str, dtype: str) -> None:
    put = ROW_PLACES[place]
    x, weight = normal(*shape).astype(dtype), normal(shape[1], seed=1).astype(dtype)
    exact = x.astype(float) / np.sqrt((x.astype(float) ** 2).mean(1, keepdims=True) + 1e-3)
    for ins, wanted in (([], exact), ([weight], exact * weight), ([inside(weight, 1)], exact * weight)):
        y = put(nans(*shape, dtype=dtype))
        run(backend, "rms_norm", [y], [put(x), *ins], eps=1e-3)
        close(y, wanted, FLOATS[dtype])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("width", [2, 4, 6, 8, 20, 64, 128])
@pytest.mark.parametrize("place", ["whole", "heads", "aligned", "unaligned"])
def test_rotary(backend: Backend, width: int, interleaved: bool, place: str) -> None:
    def put(a: np.ndarray) -> np.ndarray:
        if place == "heads":  # (batch, heads, length, width) whose memory has heads behind the length
            return np.ascontiguousarray(a.swapaxes(1, 2)).swapaxes(1, 2)
        return a if place == "whole" else inside(a, 4 if place == "aligned" else 1)

    shape, op = (2, 3, 5, width), Rotary(interleaved)
    x, cos, sin = normal(*shape), normal(5, width, seed=1), normal(2, 1, 5, width, seed=2)
    out, turns = put(nans(*shape)), [np.broadcast_to(a, shape) for a in (cos, sin)]
    run(backend, "rotary", [out], [put(x), *turns], interleaved=int(interleaved))
    close(out, op.reference(*(a.astype(float) for a in (x, cos, sin))))
    run(backend, "rotary", [out[0, 0, 0]], [x[0, 0, 0], cos[0], sin[0, 0, 0]], interleaved=int(interleaved))
    close(out[0, 0, 0], op.reference(*(a.astype(float) for a in (x[0, 0, 0], cos[0], sin[0, 0, 0]))))

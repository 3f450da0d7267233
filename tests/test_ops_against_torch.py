"""Ops at hard cases, values and gradients, kernels and numpy, against torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from needle import ops
from needle.autograd import Tensor
from needle.ops.common import vjp
from test_ops import BACKENDS, assert_close, float32_exact, tensors

TORCH_CASES = {
    "conv2d": (
        lambda m, x, w, b: m.conv2d(x, w, b, stride=(2, 1), padding=(1, 2), dilation=(1, 2)),
        [(2, 3, 9, 8), (5, 3, 3, 2), (5,)],
    ),
    "conv2d_same": (lambda m, x, w: m.conv2d(x, w, padding="same"), [(1, 3, 7, 8), (4, 3, 4, 3)]),
    "conv2d_depthwise": (lambda m, x, w: m.conv2d(x, w, padding=1, groups=6), [(1, 6, 7, 8), (6, 1, 3, 3)]),
    "conv2d_leftover_rows": (lambda m, x, w: m.conv2d(x, w, stride=2, padding=1), [(2, 4, 14, 14), (8, 4, 3, 3)]),
    "conv_transpose2d": (
        lambda m, x, w, b: m.conv_transpose2d(x, w, b, stride=2, padding=1, output_padding=1),
        [(2, 4, 5, 6), (4, 3, 3, 3), (3,)],
    ),
    "conv_transpose2d_groups": (
        lambda m, x, w: m.conv_transpose2d(x, w, stride=3, groups=2),
        [(1, 4, 3, 4), (4, 2, 2, 2)],
    ),
    "conv_transpose2d_output_padding_of_stride": (
        lambda m, x, w: m.conv_transpose2d(x, w, stride=1, dilation=2, output_padding=1),
        [(1, 2, 4, 5), (2, 3, 2, 2)],
    ),
    "max_pool2d": (lambda m, x: m.max_pool2d(x, 3, 2, 1), [(2, 3, 9, 8)]),
    "max_pool2d_ceil": (lambda m, x: m.max_pool2d(x, (3, 2), 2, (1, 0), (1, 2), True), [(1, 2, 10, 11)]),
    "avg_pool2d": (lambda m, x: m.avg_pool2d(x, 3, 2, 1, True), [(2, 3, 8, 9)]),
    "avg_pool2d_no_pad_count": (lambda m, x: m.avg_pool2d(x, 3, 2, 1, True, False), [(2, 3, 8, 9)]),
    "avg_pool2d_divisor": (lambda m, x: m.avg_pool2d(x, 2, None, 0, False, True, 3), [(1, 2, 6, 7)]),
    "adaptive_avg_pool2d": (lambda m, x: m.adaptive_avg_pool2d(x, (3, 2)), [(2, 3, 7, 5)]),
    "adaptive_avg_pool2d_up": (lambda m, x: m.adaptive_avg_pool2d(x, 7), [(1, 2, 3, 5)]),
    "nearest_size": (lambda m, x: m.interpolate(x, size=(7, 3)), [(2, 3, 5, 4)]),
    "nearest_scale": (lambda m, x: m.interpolate(x, scale_factor=2.5), [(2, 3, 5, 4)]),
    "bilinear_scale": (lambda m, x: m.interpolate(x, scale_factor=(1.7, 0.6), mode="bilinear"), [(2, 3, 5, 4)]),
    "bilinear_corners": (
        lambda m, x: m.interpolate(x, size=(9, 7), mode="bilinear", align_corners=True),
        [(2, 3, 5, 4)],
    ),
    "batch_norm_train": (
        lambda m, x, w, b: m.batch_norm(x, None, None, weight=w, bias=b, training=True),
        [(4, 3, 5, 6), (3,), (3,)],
    ),
    "gelu": (lambda m, x: m.gelu(x), [(4, 33)]),
    "gelu_tanh": (lambda m, x: m.gelu(x, approximate="tanh"), [(4, 33)]),
    "hardswish": (lambda m, x: m.hardswish(x), [(4, 33)]),
    "elu": (lambda m, x: m.elu(x, 0.7), [(4, 33)]),
    "pad": (lambda m, x: m.pad(x, (1, -1, 0, 2)), [(2, 3, 4)]),
}


@pytest.mark.parametrize("numpy", BACKENDS)
@pytest.mark.parametrize("name", TORCH_CASES)
def test_agrees_with_torch(name: str, numpy: bool) -> None:
    f, shapes = TORCH_CASES[name]
    arrays = float32_exact([np.random.randn(*s) for s in shapes])
    theirs = [torch.tensor(a, requires_grad=True) for a in arrays]
    want = f(F, *theirs)
    weight = float32_exact([np.random.randn(*want.shape)])[0]
    (want * torch.tensor(weight)).sum().backward()
    ours = tensors(arrays, numpy)
    out = f(ops, *ours)
    got = vjp(out, Tensor(weight, device=out.device, dtype=out.dtype), ours)
    tolerance = 1e-12 if numpy else 2e-5
    assert_close(out.numpy().astype("float64"), want.detach().numpy(), tolerance)
    for g, t in zip(got, theirs, strict=True):
        assert_close(g.numpy().astype("float64"), t.grad.numpy(), tolerance)


INFINITE: dict[str, Any] = {
    "regions": lambda m, x: m.adaptive_avg_pool2d(x, (2, 4)),
    "nearest": lambda m, x: m.interpolate(x, size=(4, 7)),
    "nearest_exact": lambda m, x: m.interpolate(x, size=(4, 7), mode="nearest-exact"),
    "bilinear": lambda m, x: m.interpolate(x, size=(4, 9), mode="bilinear"),
}


@pytest.mark.parametrize("numpy", BACKENDS)
@pytest.mark.parametrize("name", INFINITE)
def test_an_infinite_pixel_stays_in_its_windows(name: str, numpy: bool) -> None:
    x = np.random.randint(-8, 8, (1, 2, 5, 6)) / 8
    x[0, 1, 2, 3] = np.inf
    got = INFINITE[name](ops, tensors([x], numpy)[0]).numpy()
    np.testing.assert_allclose(got, INFINITE[name](F, torch.tensor(x)).numpy(), rtol=1e-5, atol=1e-6)


def test_course_conv_is_nhwc() -> None:
    z, w = tensors([np.random.randn(3, 14, 14, 4), np.random.randn(3, 3, 4, 8)], True)
    out = ops.conv(z, w, stride=2, padding=1)
    want = F.conv2d(
        torch.tensor(z.numpy()).permute(0, 3, 1, 2), torch.tensor(w.numpy()).permute(3, 2, 0, 1), stride=2, padding=1
    )
    np.testing.assert_allclose(out.numpy(), want.permute(0, 2, 3, 1).numpy(), rtol=1e-10, atol=1e-10)

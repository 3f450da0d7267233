"""Products and convolutions by vendors' libraries: what these are told, and what is done for them or behind them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gpu_devices import PRESENT, gpu_device
from gpu_kernels import LAYOUTS, window
from gpu_libraries import EXACT, GELU, NONE, RELU, SIGMOID, TF32, Library, matmul, normal, on, taken
from needle.backend_ndarray import Device, NDArray, array, call
from needle.ops.nn.conv import conv2d_array


def test_products(device: Device, library: Library) -> None:
    """Batches, shared sides, a layer's transposed weight, float64 (ours alone) and empty ones."""
    cases = [
        ((3,), (3,), 4, 5, 6),
        ((3,), (1,), 4, 5, 6),
        ((2, 3), (2, 3), 4, 5, 6),
        ((2, 3), (1, 3), 4, 5, 6),
        ((), (), 1, 5, 6),
        ((), (), 4, 0, 6),
    ]
    for batch_a, batch_b, m, k, n in cases:
        a, b = normal(*batch_a, m, k), normal(*batch_b, k, n, seed=1)
        out = NDArray.empty((*batch_a, m, n), "float32", device)
        right = array(np.ascontiguousarray(b), device=device).broadcast_to((*batch_a, k, n))
        call("matmul", [out], a=array(a, device=device), b=right, activation=NONE, alpha=0)
        assert np.abs(out.numpy() - a @ b).max() < 1e-5
    assert taken(device) == ["test_products"] * 4  # not two axes of batches that are none, and no empty sums
    x, w, bias = normal(5, 6), normal(7, 6, seed=1), normal(7, seed=2)
    out = NDArray.empty((5, 7), "float32", device)
    operands = {n: on(device, v) for n, v in (("x", x), ("weight", w), ("bias", bias))}
    call("linear", [out], **operands, activation=RELU, alpha=0)
    assert np.abs(out.numpy() - np.maximum(x @ w.T + bias, 0)).max() < 1e-5
    assert len(device.choices()) == 5
    before = library.runs()
    out = NDArray.empty((5, 7), "float64", device)
    left, right = (array(v.astype("float64"), "float64", device) for v in (x, w.T.copy()))
    call("matmul", [out], a=left, b=right, activation=NONE, alpha=0)
    assert library.runs() == before


GEOMETRIES = pytest.mark.parametrize(
    "shape,weight,stride,padding,dilation,groups",
    [
        ((2, 3, 6, 7), (4, 3, 3), (1, 1), (0, 0), (1, 1), 1),
        ((1, 4, 9, 8), (6, 3, 2), (2, 1), (1, 2), (1, 2), 1),
        ((2, 4, 8, 8), (6, 3, 3), (2, 2), (1, 1), (1, 1), 2),
        ((1, 6, 5, 5), (6, 3, 3), (1, 1), (1, 1), (1, 1), 6),
    ],
)


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@GEOMETRIES
def test_conv2d(device: Device, layout: str, shape, weight, stride, padding, dilation, groups) -> None:
    """What the library is told about a convolution is what our kernels do: they are compared before it is taken."""
    o, *kernel = weight
    x, w = normal(*shape), normal(o, shape[1] // groups, *kernel, seed=1)
    exact = conv2d_array(x.astype(np.float64), w.astype(np.float64), stride, (*padding, *padding), dilation, groups)
    scale, bias, residual = normal(o, seed=2), normal(o, seed=3), normal(*exact.shape, seed=4)
    inputs = [LAYOUTS[layout](v) if v.ndim == 4 else v for v in (x, w, scale, bias, residual)]
    out = on(device, LAYOUTS[layout](np.zeros(exact.shape, np.float32)))
    names = ("x", "weight", "scale", "bias", "residual")
    operands = {n: on(device, v) for n, v in zip(names, inputs, strict=True)}
    attrs = window(stride, padding, dilation, groups) | {"precision": EXACT}
    call("conv2d_fused", [out], **operands, activation=RELU, alpha=0, **attrs)
    channel = (slice(None), None, None)
    exact = np.maximum(exact * scale[channel] + bias[channel] + residual, 0)
    assert np.abs(out.numpy() - exact).max() / np.abs(exact).max() < 5e-6
    (choice,) = device.choices()
    assert (choice["op"], choice["taken"], choice["window"]) == (
        "conv2d",
        "test_convolutions",
        [*stride, *padding, *dilation, groups],
    )


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@GEOMETRIES
def test_conv2d_weight_grad(device: Device, layout: str, shape, weight, stride, padding, dilation, groups) -> None:
    o, *kernel = weight
    x, w = torch.from_numpy(normal(*shape)).double(), torch.zeros(o, shape[1] // groups, *kernel, dtype=torch.double)
    y = torch.nn.functional.conv2d(x, w.requires_grad_(), None, stride, padding, dilation, groups)
    dy = normal(*y.shape, seed=1)
    (exact,) = torch.autograd.grad(y, w, torch.from_numpy(dy).double())
    made = on(device, LAYOUTS[layout](np.zeros(exact.shape, np.float32)))
    operands = {"x": on(device, LAYOUTS[layout](normal(*shape))), "dy": on(device, LAYOUTS[layout](dy))}
    for precision, off in ((EXACT, 5e-6), (TF32, 5e-3)):
        attrs = window(stride, padding, dilation, groups) | {"precision": precision}
        call("conv2d_weight_grad_fused", [made], **operands, **attrs)
        assert np.abs(made.numpy() - exact.numpy()).max() / exact.abs().max() < off
    assert taken(device) == ["test_convolutions"] * 2
    assert [c["op"] for c in device.choices()] == ["conv2d_weight_grad"] * 2


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("activation", [NONE, SIGMOID])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("precision", [EXACT, TF32])
def test_what_a_library_lacks_is_done_behind_it(
    device: Device, layout: str, activation: int, groups: int, precision: int
) -> None:
    """An epilogue, or its activation alone, in place, whatever the result's strides."""
    x, w, bias = normal(2, 4, 5, 6), normal(4, 8 // groups, 2, 3, seed=1), normal(8, seed=2)
    net = torch.nn.ConvTranspose2d(4, 8, (2, 3), (2, 1), (0, 1), groups=groups).double()
    net.weight.data, net.bias.data = torch.from_numpy(w).double(), torch.from_numpy(bias).double()
    exact = net(torch.from_numpy(x).double()).detach()
    exact = (exact.sigmoid() if activation == SIGMOID else exact).numpy()
    given = {"x": LAYOUTS[layout](x), "weight": w, "bias": bias}
    out = on(device, LAYOUTS[layout](np.zeros(exact.shape, np.float32)))
    attrs = window((2, 1), (0, 1), (1, 1), groups) | {"precision": precision}
    operands = {n: on(device, v) for n, v in given.items()}
    call("conv_transpose2d_fused", [out], **operands, activation=activation, alpha=0, **attrs)
    assert np.abs(out.numpy() - exact).max() < (1e-5 if precision == EXACT else 1e-2)
    (choice,) = device.choices()
    assert (choice["op"], choice["taken"], choice["after"]) == ("conv_transpose2d", "test_convolutions", "epilogue")
    matmul(device, 21, 12, 9, SIGMOID)
    matmul(device, 20, 12, 8, SIGMOID)
    assert [c["after"] for c in device.choices() if c["op"] == "matmul"] == ["activation"] * 2


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize(
    "shape,weight,stride,padding",
    [
        ((2, 3, 9, 8), (4, 7, 7), (2, 2), (3, 3)),
        ((1, 1, 5, 6), (3, 2, 3), (1, 1), (0, 2)),
        ((1, 3, 6, 7), (5, 3, 4), (2, 1), (1, 0)),
        ((2, 2, 7, 7), (4, 1, 1), (2, 2), (0, 0)),
        ((1, 6, 4, 9), (2, 3, 3), (1, 2), (2, 1)),
        ((1, 1, 4, 4), (2, 2, 3), (4, 4), (0, 1)),
    ],
)
def test_few_channels_are_folded(device: Device, layout: str, shape, weight, stride, padding) -> None:
    """At TF32 the test's library wants channels by the four."""
    o, *kernel = weight
    x, w, bias = normal(*shape), normal(o, shape[1], *kernel, seed=1), normal(o, seed=2)
    exact = conv2d_array(x.astype(np.float64), w.astype(np.float64), stride, (*padding, *padding), (1, 1), 1)
    out = on(device, LAYOUTS[layout](np.zeros(exact.shape, np.float32)))
    operands = {"x": on(device, LAYOUTS[layout](x)), "weight": on(device, LAYOUTS[layout](w)), "bias": on(device, bias)}
    attrs = window(stride, padding, (1, 1), 1) | {"precision": TF32}
    call("conv2d_fused", [out], **operands, activation=RELU, alpha=0, **attrs)
    exact = np.maximum(exact + bias[:, None, None], 0)
    assert np.abs(out.numpy() - exact).max() / np.abs(exact).max() < 1e-5  # the library's sums are float64
    (choice,) = device.choices()
    assert (choice["taken"], choice["folded"], choice["after"]) == ("test_convolutions", True, "")
    device.use_vendors("auto")
    call("conv2d_fused", [out], **operands, activation=RELU, alpha=0, **attrs)
    assert np.abs(out.numpy() - exact).max() / np.abs(exact).max() < 5e-3


@pytest.mark.parametrize("name", PRESENT)
def test_what_is_here(name: str, library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """On hardware, cuBLASLt and cuDNN or hipBLASLt and MIOpen wherever they can: they agree with our kernels."""
    device = gpu_device(name)
    monkeypatch.setenv("NEEDLE_EMULATION_VENDOR", str(library.path))
    library.behave()
    device.use_vendors("on")
    attrs_3x3 = window((1, 1), (1, 1), (1, 1), 1) | {"precision": EXACT}
    for precision in range(4):
        for activation in (NONE, RELU):
            matmul(device, 64, 48, 32, activation, precision)
    for layout in LAYOUTS.values():
        x, w, bias, residual = (
            normal(2, 8, 9, 9),
            normal(16, 8, 3, 3, seed=1),
            normal(16, seed=2),
            normal(2, 16, 9, 9, seed=3),
        )
        exact = conv2d_array(x.astype(np.float64), w.astype(np.float64), (1, 1), (1, 1, 1, 1), (1, 1), 1)
        exact = np.maximum(exact + bias[:, None, None] + residual, 0)
        given = {"x": layout(x), "weight": layout(w), "bias": bias, "residual": layout(residual)}
        operands = {n: on(device, v) for n, v in given.items()}
        out = on(device, layout(np.zeros(exact.shape, np.float32)))
        call("conv2d_fused", [out], **operands, activation=RELU, alpha=0, **attrs_3x3)
        assert np.abs(out.numpy() - exact).max() / np.abs(exact).max() < 5e-6
        weight = torch.zeros(16, 8, 3, 3, dtype=torch.double, requires_grad=True)
        torch.nn.functional.conv2d(torch.from_numpy(x).double(), weight, padding=1).backward(
            torch.from_numpy(residual).double()
        )
        for precision in (EXACT, TF32):
            out = on(device, layout(np.zeros(weight.shape, np.float32)))
            operands = {"x": on(device, layout(x)), "dy": on(device, layout(residual))}
            call("conv2d_weight_grad_fused", [out], **operands, **attrs_3x3 | {"precision": precision})
            off = np.abs(out.numpy() - weight.grad.numpy()).max() / weight.grad.abs().max()  # type: ignore[union-attr]
            assert off < (5e-6 if precision == EXACT else 5e-3)
        for channels in (1, 3):
            image, filters = normal(2, channels, 12, 12), normal(16, channels, 5, 5, seed=1)
            wide = conv2d_array(image.astype(np.float64), filters.astype(np.float64), (2, 2), (2,) * 4, (1, 1), 1)
            out = on(device, layout(np.zeros(wide.shape, np.float32)))
            attrs = window((2, 2), (2, 2), (1, 1), 1) | {"precision": TF32}
            call(
                "conv2d_fused",
                [out],
                x=on(device, image),
                weight=on(device, filters),
                activation=NONE,
                alpha=0,
                **attrs,
            )
            assert np.abs(out.numpy() - wide).max() / np.abs(wide).max() < 5e-3
    for activation in (RELU, SIGMOID, GELU):  # not a number stays that, in products and convolutions
        a, image = normal(64, 48), normal(2, 8, 9, 9)
        a[3, 5] = image[1, 2, 4, 4] = np.nan
        out = NDArray.empty((64, 32), "float32", device)
        operands = {"a": on(device, a), "b": on(device, normal(48, 32, seed=1)), "bias": on(device, normal(32, seed=2))}
        call("matmul_fused", [out], **operands, activation=activation, alpha=0, precision=EXACT)
        assert np.isnan(out.numpy()).all(1).nonzero()[0].tolist() == [3]
        out = NDArray.empty((2, 16, 9, 9), "float32", device)
        operands = {"x": on(device, image), "weight": on(device, normal(16, 8, 3, 3, seed=1))}
        call(
            "conv2d_fused", [out], **operands, bias=on(device, normal(16)), activation=activation, alpha=0, **attrs_3x3
        )
        found = np.isnan(out.numpy())
        assert found[1, :, 3:6, 3:6].all() and found.sum() == 9 * 16
    faults = [c for c in device.choices() if c["why"].startswith(("error", "results"))]
    monkeypatch.undo()
    device.use_vendors(None)
    assert not faults

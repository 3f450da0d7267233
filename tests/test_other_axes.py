"""Sequences and volumes that plans keep as images in blocks, beside torch in float64."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import needle as ndl
import operator_fusion
import torch2needle
from needle.backend_selection import BACKEND

pytestmark = pytest.mark.skipif(BACKEND == "np", reason="plans")

CONV = {1: nn.Conv1d, 3: nn.Conv3d}
BATCH_NORM = {1: nn.BatchNorm1d, 3: nn.BatchNorm3d}
LAYOUTS = {"to_blocked", "from_blocked", "copy"}


def settled(net: nn.Module) -> nn.Module:
    """With running statistics and factors that matter."""
    for m in net.modules():
        if isinstance(m, nn.modules.batchnorm._BatchNorm):
            m.running_mean.uniform_(-1, 1)
            m.running_var.uniform_(0.5, 2)
        if isinstance(m, nn.modules.batchnorm._BatchNorm | nn.GroupNorm | nn.modules.instancenorm._InstanceNorm):
            for p in m.parameters():
                nn.init.uniform_(p, 0.5, 1.5)
    return net.eval()


def kernels_of(net: nn.Module, x: torch.Tensor, tolerance: float = 4e-6) -> list[str]:
    """The kernels of the fused net's plan; it and the plain net's plan are compared with torch."""
    want = copy.deepcopy(net).double()(x.double()).detach().numpy()
    plain = torch2needle.convert(net, x, dynamic=False)
    for made in (plain, operator_fusion.fuse(plain)):
        exe = ndl.compile(made, x)
        got = exe(x).numpy()
        assert got.shape == want.shape
        assert np.abs(got - want).max() <= tolerance * max(np.abs(want).max(), 1e-3)
    return list(exe.plan.names)


def layers(axes: int, *kernels: int | tuple) -> nn.Sequential:
    """Convolutions of 16 and more channels with batch norms and activations."""
    made, channels = [], 16
    for i, kernel in enumerate(kernels):
        size = (kernel,) * axes if isinstance(kernel, int) else kernel
        conv = CONV[axes](channels, 16 * (i + 2), size, padding=tuple(k // 2 for k in size), bias=i % 2 == 0)
        channels = conv.out_channels
        made += [conv, BATCH_NORM[axes](channels), (nn.ReLU(), nn.SiLU(), nn.LeakyReLU(0.1))[i % 3]]
    return nn.Sequential(*made)


@pytest.mark.parametrize(
    "axes, kernels, size",
    [
        (1, (3, 5, 1), (2, 16, 37)),
        (1, (1, 7), (1, 16, 1)),
        (3, (3, 3), (1, 16, 5, 6, 7)),
        (3, ((1, 3, 3), (3, 1, 1), (1, 1, 1)), (1, 16, 4, 9, 8)),
        (3, ((5, 1, 1), (3, 3, 3)), (1, 16, 1, 2, 3)),
    ],
)
def test_layers_stay_in_blocks(axes: int, kernels: tuple, size: tuple[int, ...]) -> None:
    names = kernels_of(settled(layers(axes, *kernels)), torch.randn(size))
    assert not {"batch_norm", "relu", "silu", "leaky_relu"} & set(names), names
    assert sum(n in LAYOUTS for n in names) <= 3, names  # the net's input and its result


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("padding", [0, 1, 2])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("depth", [3, 6])
def test_windows_over_the_depth(stride: int, padding: int, batch: int, depth: int) -> None:
    window: Any = {"kernel_size": (3, 3, 1), "stride": (stride, 1, 1), "padding": (padding, 1, 0)}
    for channels, out, groups in (
        (32, 20, 1),
        (12, 8, 1),
        (20, 16, 1),
        (20, 20, 20),
        (32, 32, 32),
        (16, 32, 16),
        (32, 32, 2),
    ):
        middle = nn.Conv3d(channels, out, groups=groups, bias=groups != 20, **window)
        net = nn.Sequential(nn.Conv3d(3, channels, 1), nn.ReLU(), middle, nn.BatchNorm3d(out), nn.ReLU())
        names = kernels_of(settled(net), torch.randn(batch, 3, depth, 4, 5))
        assert "batch_norm" not in names and ("depthwise_blocked" in names) == (channels == out == groups), names


@pytest.mark.parametrize("size", [(3, 1, 1), (3, 2, 1), (1, 1, 4), (2, 5, 1), (3, 2, 2)])
@pytest.mark.parametrize("stride", [1, 2])
def test_depthwise_windows_larger_than_the_image(stride: int, size: tuple[int, ...]) -> None:
    """Rows and columns of a kernel that meet padding alone."""
    for channels in (3, 16, 20):
        net = nn.Conv3d(channels, channels, 3, stride=(1, stride, 1), padding=1, groups=channels)
        assert "depthwise_blocked" in kernels_of(settled(net), torch.randn(2, channels, *size))


class Joined(nn.Module):
    """What reads a volume beside windows over its depth: a sum, a concat, a factor per channel, and the net's output."""

    def __init__(self, axes: int) -> None:
        super().__init__()
        self.first, self.one, self.other = CONV[axes](4, 32, 1), CONV[axes](32, 32, 3, padding=1), CONV[axes](32, 32, 1)
        pool = {1: nn.AdaptiveAvgPool1d, 3: nn.AdaptiveAvgPool3d}[axes]
        self.gate = nn.Sequential(pool(1), CONV[axes](32, 32, 1), nn.Sigmoid())
        self.last = CONV[axes](96, 8, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        a = torch.relu(self.one(x) + x)
        b = self.other(a) * self.gate(a)
        joined = torch.cat([x, a, b], 1)
        return torch.cat([self.last(joined), joined, b + b.mean((-1, -2), keepdim=True)], 1)


@pytest.mark.parametrize("axes", [1, 3])
@pytest.mark.parametrize("batch", [1, 3])
def test_other_readers(axes: int, batch: int) -> None:
    names = kernels_of(Joined(axes).eval(), torch.randn(batch, 4, *(5, 6, 7)[-axes:]))
    assert names.count("to_blocked") <= (1 if axes == 1 or batch == 1 else 4), names


@pytest.mark.parametrize("axes", [1, 3])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(
    "shape", ["more axes", "one sample", "one frame", "last axis", "channels", "number", "fewer axes"]
)
def test_operands_that_broadcast(axes: int, batch: int, shape: str) -> None:
    size = (batch, 16, *(4, 5, 6)[-axes:])
    other = {
        "more axes": (2, *size),
        "one sample": (3 if batch == 1 else 1, *size[1:]),
        "one frame": (*size[:2], 1, *size[3:]),
        "last axis": size[-1:],
        "channels": (16, *(1,) * axes),
        "number": (),
        "fewer axes": size[-2:],
    }[shape]

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.gate = CONV[axes](3, 16, 1), CONV[axes](3, 16, 1)
            self.other = nn.Parameter(torch.randn(other))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.relu(self.first(x) * self.other) + self.other
            return y * torch.sigmoid(self.gate(x[:, :, :1]))

    kernels_of(Net().eval(), torch.randn(size[0], 3, *size[2:]))


POOLS = {
    "max": nn.MaxPool3d(3, 2, 1),
    "max of frames": nn.MaxPool3d((1, 3, 3), 2, (0, 1, 1)),
    "max, dilated": nn.MaxPool3d(2, 1, 1, dilation=2),
    "max, ceil": nn.MaxPool3d(2, 2, ceil_mode=True),
    "mean": nn.AvgPool3d(3, 2, 1),
    "mean of what is inside": nn.AvgPool3d((3, 2, 2), (1, 2, 2), (1, 0, 0), count_include_pad=False),
    "mean by 5": nn.AvgPool3d(2, 1, divisor_override=5),
    "adaptive": nn.AdaptiveAvgPool3d((3, None, 2)),
    "adaptive to one": nn.AdaptiveAvgPool3d(1),
}


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("pool", POOLS)
def test_pools_of_volumes(pool: str, batch: int) -> None:
    net = nn.Sequential(nn.Conv3d(2, 20, 1), nn.ReLU(), POOLS[pool], nn.Conv3d(20, 8, 1)).eval()
    names = kernels_of(net, torch.randn(batch, 2, 5, 6, 7))
    assert sum(n in ("to_blocked", "from_blocked") for n in names) == 2, names


NORMS = {
    1: (nn.InstanceNorm1d, nn.Conv1d, (33,)),
    2: (nn.InstanceNorm2d, nn.Conv2d, (40, 70)),
    3: (nn.InstanceNorm3d, nn.Conv3d, (3, 4, 5)),
}


@pytest.mark.parametrize("axes", NORMS)
@pytest.mark.parametrize("channels, groups", [(1, 1), (24, 3), (32, 1), (48, 16), (20, 0)])
@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_norms_of_groups(axes: int, channels: int, groups: int, offset: float) -> None:
    instance, conv, size = NORMS[axes]
    norm = nn.GroupNorm(groups, channels) if groups else instance(channels, affine=True)
    net = nn.Sequential(conv(3, channels, 3, padding=1), norm, nn.SiLU(), conv(channels, 5, 1))
    with torch.no_grad():
        net[0].bias.add_(offset)
    names = kernels_of(settled(net), torch.randn(2, 3, *size), 4e-6 if not offset else 1e-4)
    assert "group_norm_blocked" in names and "silu" not in names, names


def test_a_norm_of_equal_numbers() -> None:
    net = nn.Sequential(nn.Conv2d(1, 16, 1), nn.GroupNorm(4, 16)).eval()
    with torch.no_grad():
        net[0].weight.zero_()
        net[0].bias.fill_(0.5)
    x = torch.randn(2, 1, 5, 7)
    assert not ndl.compile(torch2needle.convert(net, x, dynamic=False), x)(x).numpy().any()


def test_another_batch_takes_another_way() -> None:
    net = settled(nn.Sequential(*layers(3, 3), nn.Conv3d(32, 16, (3, 1, 1), padding=(1, 0, 0))))
    made = torch2needle.convert(net, torch.randn(2, 16, 4, 5, 6))
    exe = ndl.compile(made, torch.randn(2, 16, 4, 5, 6))
    for batch in (1, 2, 5):
        x = torch.randn(batch, 16, 4, 5, 6)
        want = copy.deepcopy(net).double()(x.double()).detach().numpy()
        assert np.abs(exe(x).numpy() - want).max() <= 4e-6 * np.abs(want).max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_empty_batch_of_volumes(dtype: torch.dtype) -> None:
    net = (
        nn.Sequential(nn.Conv3d(16, 24, 3, padding=1), nn.ReLU(), nn.MaxPool3d(2, 1), nn.Conv3d(24, 8, 1))
        .eval()
        .to(dtype)
    )
    example = torch.randn(2, 16, 6, 4, 4, dtype=dtype)
    exe = ndl.compile(torch2needle.convert(net, example), example)
    assert exe(example[:0]).shape == (0, 8, 5, 3, 3)


def test_long_rows_are_cut() -> None:
    """Rows whose windows exceed a core's cache, beside short ones."""
    for size, kernel in (((2, 64, 40000), 5), ((1, 16, 3, 130, 131), (3, 3, 3))):
        axes = len(size) - 2
        conv = CONV[axes](size[1], 24, kernel, padding=1)
        kernels_of(nn.Sequential(CONV[axes](size[1], size[1], 1), conv).eval(), torch.randn(size), 1e-5)


class Enlarged(nn.Module):
    """Transposed convolutions of volumes whose frames meet or do not, beside what is joined to them."""

    def __init__(self, channels: int, **window: Any) -> None:
        super().__init__()
        self.first, self.up = nn.Conv3d(3, 32, 1), nn.ConvTranspose3d(32, channels, **window)
        self.next, self.last = nn.Conv3d(channels, 16, 3, padding=1), nn.Conv3d(channels + 16, 8, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up = torch.relu(self.up(self.first(x)))
        return self.last(torch.cat([self.next(up), up], 1)) + self.next(torch.tanh(up))[:, :8]


@pytest.mark.parametrize(
    "window",
    [
        {"kernel_size": 2, "stride": 2},
        {"kernel_size": (3, 2, 2), "stride": (3, 1, 2), "bias": False},
        {"kernel_size": 4, "stride": 2, "padding": 1},
        {"kernel_size": 2, "stride": 2, "groups": 2},
        {"kernel_size": 2, "stride": 2, "padding": (1, 0, 0), "output_padding": (0, 1, 0)},
    ],
)
@pytest.mark.parametrize("channels", [16, 12])
@pytest.mark.parametrize("batch", [1, 2])
def test_transposed_convolutions(window: dict, channels: int, batch: int) -> None:
    kernels_of(Enlarged(channels, **window).eval(), torch.randn(batch, 3, 3, 4, 5))


@pytest.mark.parametrize("axes, kernels", [(1, (3, 5)), (3, ((3, 3, 3), (3, 1, 1)))])
@pytest.mark.parametrize("groups", [0, 4])
def test_compiled_steps(axes: int, kernels: tuple, groups: int) -> None:
    net = layers(axes, *kernels)
    if groups:
        net = nn.Sequential(*(nn.GroupNorm(groups, m.num_features) if hasattr(m, "num_features") else m for m in net))
    x, y = torch.randn(2, 16, *(5, 6, 7)[-axes:]), torch.randn(2, 48)
    twin = copy.deepcopy(net).double()
    own = torch2needle.convert(net.train(), x, dynamic=False)
    optimizer = torch.optim.SGD(twin.parameters(), 0.1, momentum=0.9)
    spatial = tuple(range(2, 2 + axes))

    def loss(out: ndl.Tensor, y: ndl.Tensor) -> ndl.Tensor:
        return ndl.ops.mean((ndl.ops.mean(out, spatial) - y) ** 2)

    step = ndl.compile_step(own, loss, ndl.optim.SGD(own.parameters(), lr=0.1, momentum=0.9), (x, y))
    for _ in range(3):
        optimizer.zero_grad()
        want = ((twin(x.double()).mean(spatial) - y.double()) ** 2).mean()
        want.backward()
        optimizer.step()
        assert float(np.asarray(step(x, y))) == pytest.approx(want.item(), rel=2e-6)

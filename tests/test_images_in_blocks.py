"""Ops that plans run on images in blocks of channels, beside torch in float64."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import needle as ndl
import torch2needle
from needle.backend_selection import BACKEND

pytestmark = pytest.mark.skipif(BACKEND == "np", reason="plans")

Images = Callable[[torch.Tensor], torch.Tensor]


class Net(nn.Module):
    """middle(a convolution's image), and a convolution of what comes out where `more`."""

    def __init__(self, channels: int, middle: nn.Module | Images, more: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, channels, 3, padding=1), nn.Conv2d(channels, 4, 3, padding=1)
        self.middle, self.more = middle, more

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.middle(self.first(x))
        return self.last(y) if self.more else y


def kernels_of(net: Net, size: tuple[int, int, int], tolerance: float = 4e-6) -> list[str]:
    """The kernels of the net's plan, which is compared with torch."""
    x = torch.randn(size[0], 3, *size[1:])
    exe = ndl.compile(torch2needle.convert(net.eval(), x, dynamic=False), x)
    want = copy.deepcopy(net).double()(x.double()).detach().numpy()
    got = exe(x).numpy()
    assert got.shape == want.shape
    assert np.abs(got - want).max() <= tolerance * max(np.abs(want).max(), 1e-3)
    return list(exe.plan.names)


SIZES = [(1, 1, 1), (2, 7, 9), (3, 40, 36)]
REDUCTIONS: dict[str, Callable[[torch.Tensor, bool], torch.Tensor]] = {
    "mean": lambda y, keep: y.mean((2, 3), keepdim=keep),
    "sum": lambda y, keep: y.sum((-1, -2), keepdim=keep),
    "amax": lambda y, keep: y.amax((3, 2), keepdim=keep),
    "amin": lambda y, keep: y.amin((2, 3), keepdim=keep),
    "norm": lambda y, keep: y.norm(dim=(2, 3), keepdim=keep),
    "of channels": lambda y, keep: y.mean(1, keepdim=keep),
    "of columns": lambda y, keep: y.sum(2, keepdim=keep),
    "of all": lambda y, keep: y.mean((1, 2, 3), keepdim=keep),
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions(name: str) -> None:
    torch.manual_seed(0)
    for channels, keep, size in itertools.product((1, 5, 16, 33), (False, True), SIZES):
        kernels = kernels_of(Net(channels, lambda y, keep=keep: REDUCTIONS[name](y, keep), False), size)
        assert ("from_blocked" in kernels) == name.startswith("of ")


def test_images_times_what_their_pixels_sum_up_to_stay_in_blocks() -> None:
    torch.manual_seed(0)
    kernels = kernels_of(Net(32, lambda y: y * torch.sigmoid(y.mean((2, 3), keepdim=True)), True), (2, 9, 7))
    assert kernels.count("from_blocked") == 1  # of the result


class ChannelNorm(nn.LayerNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = F.layer_norm(x.permute(0, 2, 3, 1), self.normalized_shape, self.weight, self.bias, self.eps)
        return rows.permute(0, -1, 1, 2)


@pytest.mark.parametrize("given", [{}, {"elementwise_affine": False}, {"bias": False}, {"eps": 1e-2}], ids=str)
@pytest.mark.parametrize("channels", [1, 5, 16, 33, 100])
def test_layer_norms_of_channels(channels: int, given: dict) -> None:
    torch.manual_seed(0)
    norm = ChannelNorm(channels, **given)
    for value in norm.parameters():
        nn.init.normal_(value)
    for before, more, size in itertools.product((nn.Identity(), nn.Sigmoid()), (False, True), SIZES):
        kernels = kernels_of(Net(channels, nn.Sequential(before, norm), more), size, 1e-5)
        assert "layer_norm_blocked" in kernels and "layer_norm" not in kernels


def test_layer_norms_of_rows_stay_so() -> None:
    torch.manual_seed(0)

    def both(y: torch.Tensor) -> torch.Tensor:
        rows = F.layer_norm(y.permute(0, 2, 3, 1), (16,))
        return rows.permute(0, 3, 1, 2) + rows.mean()

    assert "layer_norm_blocked" not in kernels_of(Net(16, both, True), (2, 7, 9))
    turned = lambda y: F.layer_norm(y.permute(0, 3, 2, 1), (16,)).permute(0, 3, 1, 2)  # noqa: E731
    assert "layer_norm_blocked" not in kernels_of(Net(16, turned, False), (2, 7, 9))


def test_a_pixel_that_is_not_a_number_spoils_no_other() -> None:
    torch.manual_seed(0)
    net = Net(20, ChannelNorm(20), False).eval()
    x = torch.randn(1, 3, 6, 6)
    x[0, 1, 0, 0] = np.nan
    got = ndl.compile(torch2needle.convert(net, x, dynamic=False), x)(x).numpy()
    np.testing.assert_array_equal(np.isnan(got), net(x).isnan().numpy())

"""Convolutions of single pixels of enlarged images, which plans compute on the small ones, beside torch in float64."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import needle as ndl
import operator_fusion
import torch2needle
from needle.backend_selection import BACKEND

pytestmark = pytest.mark.skipif(BACKEND == "np", reason="plans")


class Head(nn.Module):
    """Images of several sizes, enlarged to the first one's and joined, as Segformer's decoder."""

    def __init__(self, resize: Callable[[torch.Tensor, Any], torch.Tensor], behind: nn.Module, **conv: Any) -> None:
        super().__init__()
        self.resize = resize
        self.levels = nn.ModuleList(nn.Conv2d(3, c, 3, s, 1) for c, s in ((40, 1), (64, 2), (48, 3), (37, 4)))
        self.fuse, self.behind = nn.Conv2d(189, 33, **{"kernel_size": 1, **conv}), behind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, *rest = (level(x) for level in self.levels)
        return self.behind(self.fuse(torch.cat([first, *(self.resize(y, first.shape[2:]) for y in rest)], 1)))


def compiled(net: nn.Module, size: tuple[int, int, int], fuse: bool, **given: Any) -> list[str]:
    """The kernels of the net's plan, which is compared with torch."""
    x = torch.randn(size[0], 3, *size[1:])
    made: Any = torch2needle.convert(net.eval(), x, dynamic=False)
    exe: Any = ndl.compile(operator_fusion.fuse(made) if fuse else made, x, **given)
    want = copy.deepcopy(net).double()(x.double()).detach().numpy()
    assert np.abs(exe(x).numpy() - want).max() <= 4e-6 * np.abs(want).max()
    return list(exe.plan.names)


def convolutions(kernels: list[str]) -> int:
    return sum(k.startswith("conv2d_") and not k.endswith("pack") for k in kernels)


RESIZES: dict[str, Callable[[torch.Tensor, Any], torch.Tensor]] = {
    "nearest": lambda y, size: F.interpolate(y, size),
    "bilinear": lambda y, size: F.interpolate(y, size, mode="bilinear"),
    "corners": lambda y, size: F.interpolate(y, size, mode="bilinear", align_corners=True),
    "bicubic": lambda y, size: F.interpolate(y, size, mode="bicubic"),
}
BEHIND = {
    "norm": lambda: nn.Sequential(nn.BatchNorm2d(33), nn.ReLU()),
    "gelu": nn.GELU,
    "nothing": nn.Identity,
    "residual": lambda: Residual(),
}


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(33, 33, 3, padding=1)

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        return F.relu(y + self.layer(y))


@pytest.mark.parametrize("resize", RESIZES)
@pytest.mark.parametrize("behind", BEHIND)
def test_heads(resize: str, behind: str) -> None:
    for bias, fuse, size in itertools.product((True, False), (True, False), ((1, 24, 36), (2, 13, 17))):
        torch.manual_seed(0)
        kernels = compiled(Head(RESIZES[resize], BEHIND[behind](), bias=bias), size, fuse)
        assert convolutions(kernels) == 5 + 3 * (resize != "bicubic") + (behind == "residual")


class Chosen(nn.Module):
    def __init__(self, forward: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.first, self.one, self.two = nn.Conv2d(3, 64, 3, 2, 1), nn.Conv2d(64, 48, 1), nn.Conv2d(64, 32, 1)
        self.wide, self.grouped, self.few = (
            nn.Conv2d(64, 48, 3, padding=1),
            nn.Conv2d(64, 48, 1, groups=4),
            nn.Conv2d(64, 999, 1),
        )
        self.body = forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self, self.first(x))


def up(y: torch.Tensor, factor: float = 2) -> torch.Tensor:
    return F.interpolate(y, scale_factor=factor, mode="bilinear")


SMALL: dict[str, tuple[bool, Callable[..., torch.Tensor]]] = {  # whether the convolution is of the small image
    "alone": (True, lambda m, y: m.one(up(y))),
    "by 3 and a half": (True, lambda m, y: m.one(up(y, 3.5))),
    "with an activation": (True, lambda m, y: F.hardswish(m.one(up(y)))),
    "read twice": (False, lambda m, y: m.one(z := up(y)) + m.two(z).mean()),
    "smaller": (False, lambda m, y: m.one(up(y, 0.5))),
    "larger kernel": (False, lambda m, y: m.wide(up(y))),
    "groups": (False, lambda m, y: m.grouped(up(y))),
    "more channels than it repays": (False, lambda m, y: m.few(up(y))),
}


@pytest.mark.parametrize("name", SMALL)
def test_what_is_computed_small(name: str) -> None:
    torch.manual_seed(0)
    small, forward = SMALL[name]
    kernels = compiled(Chosen(forward), (2, 20, 28), False)
    assert convolutions(kernels[: kernels.index("interpolate_bilinear")]) == 1 + small


def test_training_and_free_sizes() -> None:
    torch.manual_seed(0)
    net = Head(RESIZES["bilinear"], nn.Sequential(nn.BatchNorm2d(33), nn.ReLU()))
    x, y = torch.randn(2, 3, 12, 16), torch.randn(2, 33, 12, 16)
    made = torch2needle.convert(copy.deepcopy(net), x)
    step = ndl.compile_step(made, ndl.nn.MSELoss(), ndl.optim.SGD(made.parameters(), lr=0.1), (x, y))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.mse_loss(net(x), y)
        loss.backward()
        optimizer.step()
        assert float(step(x, y)) == pytest.approx(loss.item(), rel=1e-5)
    exe: Any = ndl.compile(made.eval(), x)
    for n, h, w in ((1, 12, 16), (3, 20, 12), (2, 9, 31), (1, 40, 40)):
        z = torch.randn(n, 3, h, w)
        want = net.eval()(z).detach().numpy()
        np.testing.assert_allclose(exe(z).numpy(), want, rtol=1e-3, atol=1e-3 * np.abs(want).max())


def test_images_of_the_same_size_are_not_resized() -> None:
    for mode, given in (("nearest", {}), ("bilinear", {}), ("bilinear", {"align_corners": True})):
        net = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Upsample((6, 7), mode=mode, **given), nn.Conv2d(8, 8, 3))
        assert not any("interpolate" in s for s in compiled(net, (2, 6, 7), False))
        assert any("interpolate" in s for s in compiled(net, (2, 3, 7), False))

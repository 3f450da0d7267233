"""Factors of a layer's channels that plans fold into its weights, sums with zero, operands of images with fewer axes."""

from __future__ import annotations

import copy
import itertools

import numpy as np
import pytest
import torch
from torch import nn

import needle as ndl
import operator_fusion
import torch2needle
from needle.backend_selection import BACKEND

pytestmark = pytest.mark.skipif(BACKEND == "np", reason="plans")

LAYERS = {
    "conv": lambda bias: nn.Conv2d(6, 8, 3, padding=1, bias=bias),
    "grouped": lambda bias: nn.Conv2d(6, 8, 3, padding=1, groups=2, bias=bias),
    "transposed": lambda bias: nn.ConvTranspose2d(6, 8, 3, padding=1, bias=bias),
    "transposed, grouped": lambda bias: nn.ConvTranspose2d(6, 8, 3, padding=1, groups=2, bias=bias),
    "linear": lambda bias: nn.Linear(6, 8, bias=bias),
}
FACTORS = ("per channel", "one", "no axes", "number", "integer", "per row", "input")


class Scaled(nn.Module):
    """factor * norm(layer(first(x))), or in the other order."""

    def __init__(self, layer: nn.Module, norm: bool, factor: str, left: bool) -> None:
        super().__init__()
        linear = isinstance(layer, nn.Linear)
        self.first = nn.Linear(6, 6) if linear else nn.Conv2d(6, 6, 1)
        self.layer, self.norm = layer, nn.BatchNorm2d(8) if norm else nn.Identity()
        if norm:
            for t in (*self.norm.parameters(), self.norm.running_mean):
                nn.init.normal_(t)
            nn.init.uniform_(self.norm.running_var, 0.5, 2)
        shapes = {"per channel": (8,) if linear else (8, 1, 1), "one": (1, 1), "no axes": (), "per row": (5, 1)}
        self.kind, self.left = factor, left
        self.weight = nn.Parameter(torch.randn(shapes[factor])) if factor in shapes else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.layer(self.first(x)))
        numbers = {"number": -0.3, "integer": 2, "input": x.mean()}
        by = numbers[self.kind] if self.weight is None else self.weight
        return by * y if self.left else y * by


def compiled(net: nn.Module, *inputs: torch.Tensor, fused: bool = False, tolerance: float = 2e-6) -> ndl.Executable:
    """The net's executable, which is compared with torch in float64."""
    made = torch2needle.convert(net.eval(), inputs, dynamic=False)
    exe = ndl.compile(operator_fusion.fuse(made) if fused else made, inputs)
    want = copy.deepcopy(net).double()(*(x.double() for x in inputs)).detach().numpy()
    assert np.abs(exe(*inputs).numpy() - want).max() <= tolerance * np.abs(want).max()
    return exe


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("layer", LAYERS)
def test_factors_go_into_weights(layer: str, factor: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 5, 6) if layer == "linear" else torch.randn(2, 6, 5, 9)
    for bias, norm, left, fused in itertools.product((False, True), repeat=4):
        if layer == "linear" and norm:
            continue
        net = Scaled(LAYERS[layer](bias), norm, factor, left)
        exe = compiled(net, x, fused=fused)
        folded = any("FoldedEWiseMul" in k or "FoldedMulScalar" in k for k in exe.report.counts)
        turned = layer == "transposed, grouped" and factor in ("per channel", "one", "no axes")
        assert folded == (factor not in ("per row", "input") and not turned)


def test_a_factor_that_changes_is_folded_again() -> None:
    net = ndl.nn.Sequential(ndl.nn.Linear(4, 4, layout="torch")).eval()
    factor = ndl.nn.Parameter(np.full(4, 2.0, "float32"))
    x = np.random.default_rng(0).standard_normal((3, 4)).astype("float32")
    exe = ndl.compile(lambda x: net(x) * factor, (x,))
    for value in (2.0, -0.5):
        factor.data = ndl.Tensor(np.full(4, value, "float32"))
        np.testing.assert_allclose(exe(x), (net(ndl.Tensor(x)) * value).numpy(), rtol=1e-5, atol=1e-6)
    assert exe.plan.names == ["matmul_packed"]


def test_small_numbers_stay_apart() -> None:
    """A weight times 1e-30 would lose its digits where the result need not."""
    net, x = nn.Linear(4, 4), torch.randn(3, 4)
    exe = ndl.compile(torch2needle.convert(nn.Sequential(net), x, dynamic=False), x)
    assert exe.plan.names == ["matmul_packed"]
    made = torch2needle.convert(net, x, dynamic=False)
    tiny = ndl.compile(lambda x: made(x) * 1e-37 * 1e37, (x.numpy(),))
    np.testing.assert_allclose(
        tiny(x.numpy()), made(ndl.Tensor(x.numpy())).numpy() * 1e-37 * 1e37, rtol=1e-4, atol=1e-6
    )


class Branches(nn.Module):
    """Python's sum begins with 0."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Conv2d(4, 4, k, padding=k // 2), nn.BatchNorm2d(4)) for k in (1, 3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(sum(b(x) for b in self.branches))


def test_sums_that_begin_with_zero() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 4, 6, 5)
    exe = compiled(Branches(), x, fused=True)
    assert not {"add", "add_scalar", "relu"} & set(exe.plan.names)
    assert exe.report.counts["ConvBatchNorm2dAddReLU"] == 1
    whole = ndl.compile(lambda x: x + 0.0, (np.arange(3),))  # of integers: a cast
    assert whole(np.arange(3)).dtype == "float32"


SHAPES = [(16, 1, 1), (1, 16, 1, 1), (1,), (), (1, 1, 1), (9, 7), (16, 9, 7), (1, 7), (2, 16, 1, 1), (2, 1, 1, 1)]


class Mapped(nn.Module):
    def __init__(self, channels: int, name: str, operand: torch.Tensor | None) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, channels, 3, padding=1), nn.Conv2d(channels, 4, 3, padding=1)
        self.name, self.operand = name, None if operand is None else nn.Parameter(operand)

    def forward(self, x: torch.Tensor, given: torch.Tensor | None = None) -> torch.Tensor:
        y, by = torch.relu(self.first(x)), given if self.operand is None else self.operand
        maps = {"mul": lambda: y * by, "sub": lambda: by - y, "max": lambda: torch.maximum(by, y)}
        return self.last(maps[self.name]())


@pytest.mark.parametrize("name", ["mul", "sub", "max"])
@pytest.mark.parametrize("channels", [5, 16, 20])
def test_operands_of_images(channels: int, name: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 9, 7)
    for shape in SHAPES:
        operand = torch.randn([channels if n == 16 else n for n in shape])
        fixed = compiled(Mapped(channels, name, operand), x)
        compiled(Mapped(channels, name, None), x, operand)
        if len(shape) != 2 and shape[-2:] != (9, 7):  # a factor of every channel, or of all
            assert fixed.plan.names.count("to_blocked") == fixed.plan.names.count("from_blocked") == 1

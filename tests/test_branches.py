"""Convolutions of one input whose results are added, which plans run as one."""

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


class Branches(nn.Module):
    """activation(convolutions, each with a batch norm, and a batch norm alone, added), as RepVGG and MobileOne train."""

    def __init__(
        self,
        kernels: tuple,
        groups: int = 1,
        norm: bool = True,
        alone: bool = False,
        activation: bool = True,
        stride: int = 1,
        dilation: int = 1,
        outputs: int = 8,
    ) -> None:
        super().__init__()
        self.first = nn.Conv2d(8, 8, 1)

        def branch(kernel: int | tuple[int, int]) -> nn.Module:
            pair = (kernel, kernel) if isinstance(kernel, int) else kernel
            padding = tuple(k // 2 * dilation for k in pair)
            conv = nn.Conv2d(8, outputs, pair, stride, padding, dilation, groups, bias=not norm)
            return nn.Sequential(conv, nn.BatchNorm2d(outputs)) if norm else conv

        self.branches = nn.ModuleList(map(branch, kernels))
        self.alone = nn.BatchNorm2d(8) if alone else None
        self.activation = nn.ReLU() if activation else nn.Identity()
        for m in self.modules():
            if isinstance(m, nn.BatchNorm2d):
                nn.init.uniform_(m.weight, 0.5, 1.5), nn.init.normal_(m.bias), nn.init.normal_(m.running_mean)
                nn.init.uniform_(m.running_var, 0.5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        y = sum(b(x) for b in self.branches)
        return self.activation(y if self.alone is None else y + self.alone(x))


def layers_of(net: nn.Module, fused: bool = False) -> list[str]:
    """The kernels of layers in the net's plan, which is compared with torch."""
    x = torch.randn(2, 8, 9, 7)
    made = torch2needle.convert(net.eval(), x, dynamic=False)
    exe = ndl.compile(operator_fusion.fuse(made) if fused else made, x)
    want = copy.deepcopy(net).double()(x.double()).detach().numpy()
    assert np.abs(exe(x).numpy() - want).max() <= 2e-6 * np.abs(want).max()
    return [
        k for k in exe.plan.names if "conv" in k or k in ("depthwise_blocked", "batch_norm", "add", "matmul", "relu")
    ]


@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("kernels", [(3, 1), (1, 3, 3), (5, 3, 1), (1, 1), ((1, 3), 3), ((3, 1), 1)], ids=str)
def test_branches_are_one_layer(kernels: tuple, groups: int) -> None:
    torch.manual_seed(0)
    for norm, alone, activation, fused in itertools.product((False, True), repeat=4):
        names = layers_of(Branches(kernels, groups, norm, alone, activation), fused)
        assert len(names) == (1 if "conv2d_depthwise" in names else 2)
    for stride, dilation, outputs in ((2, 1, 8), (1, 2, 16), (2, 3, 24)):
        net = Branches(kernels, groups, stride=stride, dilation=dilation, outputs=outputs)
        assert len(layers_of(net)) == (1 if "conv2d_depthwise" in layers_of(net) else 2)


class Apart(nn.Module):
    def __init__(self, case: str) -> None:
        super().__init__()
        self.a, self.b, self.case = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1), case
        if case == "taps outside":
            self.a, self.b = nn.Conv2d(8, 8, (1, 3), padding=(0, 1)), nn.Conv2d(8, 8, (3, 1), padding=(1, 0))
        if case == "other groups":
            self.b = nn.Conv2d(8, 8, 1, groups=2)
        if case == "other windows":
            self.b = nn.Conv2d(8, 8, 3, padding=2, dilation=2)
        if case == "a shifted window":
            self.a, self.b = nn.Conv2d(8, 8, 2, padding=1), nn.Conv2d(8, 8, 1, padding=0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(x)
        if self.case == "other inputs":
            return self.a(x) + self.b(x * x)
        if self.case == "read twice":
            y = self.b(x)
            return (self.a(x) + y) * y
        if self.case == "broadcast":
            return self.a(x) + self.b(x[:1])
        if self.case == "a shifted window":
            return self.a(x)[..., 1:, 1:] + self.b(x)
        return self.a(x) + self.b(x)


APART = ["taps outside", "other groups", "other windows", "other inputs", "read twice", "broadcast", "a shifted window"]


@pytest.mark.parametrize("case", APART)
def test_what_stays_apart(case: str) -> None:
    torch.manual_seed(0)
    assert sum("conv" in k or k == "matmul" for k in layers_of(Apart(case))) == 2


def test_weights_that_change_and_further_shapes() -> None:
    torch.manual_seed(0)
    net, x = Branches((3, 1), alone=True).eval(), torch.randn(2, 8, 9, 7)
    made = torch2needle.convert(net, x)
    exe = ndl.compile(made, x)
    for batch in (2, 3, 5, 7):
        y = torch.randn(batch, 8, 9, 7)
        np.testing.assert_allclose(exe(y).numpy(), net(y).detach().numpy(), rtol=1e-4, atol=1e-5)
    assert [f for kind in exe._shapes.kinds.values() for f in kind.faults] == []
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(0.5)
    made.load_state_dict(net.state_dict())
    np.testing.assert_allclose(exe(x).numpy(), net(x).detach().numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("norm", [False, True])
def test_steps_train_the_branches(norm: bool) -> None:
    torch.manual_seed(0)
    net, x, y = Branches((3, 1), norm=norm, alone=norm), torch.randn(4, 8, 6, 5), torch.randn(4, 8, 6, 5)
    net.train()
    made = torch2needle.convert(net, x)
    made.train()
    step = ndl.compile_step(made, ndl.nn.MSELoss(), ndl.optim.SGD(made.parameters(), lr=0.1), (x, y))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(net(x), y)
        loss.backward()
        optimizer.step()
        assert float(step(x, y)) == pytest.approx(float(loss.detach()), rel=1e-5)
    for name, value in net.state_dict().items():
        np.testing.assert_allclose(made.state_dict()[name].numpy(), value.numpy(), rtol=1e-4, atol=1e-5)

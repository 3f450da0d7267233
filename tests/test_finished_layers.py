"""Layers whose kernels finish with what follows, in plans of nets that nobody fused."""

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
    "3 x 3": lambda: nn.Conv2d(32, 32, 3, padding=1),
    "1 x 1": lambda: nn.Conv2d(32, 32, 1),
    "depthwise": lambda: nn.Conv2d(32, 32, 3, padding=1, groups=32),
    "in groups": lambda: nn.Conv2d(32, 32, 3, padding=1, groups=4),
    "transposed": lambda: nn.ConvTranspose2d(32, 32, 2, stride=2),
    "linear": lambda: nn.Linear(32, 32),
}
ACTIVATIONS = {
    "none": nn.Identity(),
    "relu": nn.ReLU(),
    "gelu": nn.GELU(),
    "elu": nn.ELU(0.7),
    "leaky": nn.LeakyReLU(0.3),
    "hardswish": nn.Hardswish(),
    "mish": nn.Mish(),
}


class Block(nn.Module):
    """activation(dropout(layer(first(x))) [+ x]), and another layer or none."""

    def __init__(self, layer: nn.Module, activation: nn.Module, added: str, more: bool) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32) if isinstance(layer, nn.Linear) else nn.Conv2d(32, 32, 1)
        self.layer, self.dropout, self.activation = layer, nn.Dropout(0.1), activation
        self.last = copy.deepcopy(self.first) if more else nn.Identity()
        self.added = added

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.dropout(self.layer(self.first(x)))
        if self.added == "the input":
            y = x + y
        elif self.added == "columns":
            y = y + x[..., :1]
        return self.last(self.activation(y))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("layer", LAYERS)
def test_layers_finish_with_what_follows(layer: str, activation: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 5, 32) if layer == "linear" else torch.randn(2, 32, 9, 7)
    for added, more in itertools.product(("", "the input", "columns"), (False, True)):
        if added and layer == "transposed":
            continue
        block = Block(LAYERS[layer](), ACTIVATIONS[activation], added, more).eval()
        exe = ndl.compile(torch2needle.convert(block, x, dynamic=False), x)
        want = copy.deepcopy(block).double()(x.double()).detach().numpy()
        assert np.abs(exe(x).numpy() - want).max() <= 3e-6 * np.abs(want).max()
        form = ("Add" if added == "the input" else "") + ("" if activation == "none" else "Activation")
        fired = {k for k in exe.report.counts if k.startswith("Layer")}
        assert fired == (
            {f"Layer{form}"} if form and added != "columns" else fired - {"LayerAdd", "LayerAddActivation"}
        )


class Shifted(nn.Module):
    """relu(layer(x) + shift), the shift of fewer axes than the sum: a constant, or an input."""

    def __init__(self, layer: nn.Module, shape: tuple[int, ...], constant: bool) -> None:
        super().__init__()
        self.layer, self.constant = layer, constant
        self.shift = nn.Buffer(torch.randn(shape))

    def forward(self, x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.layer(x) + (self.shift if self.constant else shift))


@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize("layer", [*LAYERS, "3 x 3 of a volume", "depthwise of a volume", "3"])
def test_layers_add_what_is_broadcast(layer: str, constant: bool) -> None:
    """Also with Winograd and in vectors: none reads a neighbour of what all pixels share."""
    others = {
        "3 x 3 of a volume": lambda: nn.Conv3d(32, 32, 3, padding=1),
        "depthwise of a volume": lambda: nn.Conv3d(32, 32, 3, padding=1, groups=32),
        "3": lambda: nn.Conv1d(32, 32, 3, padding=1),
    }
    torch.manual_seed(0)
    made = (LAYERS | others)[layer]()
    sizes = (2, 5, 32) if layer == "linear" else (2, 32, *{"3": (9,)}.get(layer, (3,) * ("volume" in layer) + (8, 14)))
    x = torch.randn(sizes)
    with torch.no_grad():
        whole = made(x).shape
    for kept in itertools.product((False, True), repeat=len(whole)):
        shape = tuple(n if k else 1 for n, k in zip(whole, kept, strict=True))
        block = Shifted(made, shape, constant).eval()
        given = (x, torch.randn(shape))
        got = ndl.compile(torch2needle.convert(block, given, dynamic=False), given)(*given)
        want = copy.deepcopy(block).double()(*(t.double() for t in given)).detach()
        np.testing.assert_allclose(got.numpy(), want.numpy(), rtol=0, atol=2e-5)


@pytest.mark.parametrize("left", [False, True])
def test_a_layers_input_is_added_to_its_result(left: bool) -> None:
    layer = ndl.nn.Linear(32, 32, layout="torch").eval()
    x = np.random.default_rng(0).standard_normal((4, 32)).astype("float32")

    def net(x: ndl.Tensor) -> ndl.Tensor:
        y = ndl.ops.relu(layer(x))
        return y + layer(y) if left else layer(y) + y

    exe = ndl.compile(net, (x,))
    assert exe.plan.names == ["matmul_packed", "matmul_packed"]
    np.testing.assert_allclose(exe(x), net(ndl.Tensor(x)).numpy(), rtol=1e-5, atol=1e-5)


def test_sums_that_go_where_a_layer_reads_stay_steps() -> None:
    layer = ndl.nn.Linear(32, 32, layout="torch").eval()
    x, z = np.random.default_rng(0).standard_normal((2, 4, 32)).astype("float32")

    def net(x: ndl.Tensor, z: ndl.Tensor) -> ndl.Tensor:
        y = ndl.ops.relu(x)
        return ndl.ops.relu((layer(y) + z) + y)  # the activation is written over y

    exe = ndl.compile(net, (x, z))
    np.testing.assert_allclose(exe(x, z), net(ndl.Tensor(x), ndl.Tensor(z)).numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("training", [False, True])
def test_identities_between_layers_do_not_part_them(training: bool) -> None:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), nn.Identity(), nn.BatchNorm2d(8), nn.Identity(), nn.ReLU(), nn.Identity()]
    net = torch2needle.convert(nn.Sequential(*layers).train(training), torch.randn(2, 3, 6, 5))
    fused = operator_fusion.fuse(net)
    assert fused.fusion_report.counts == {"ConvBatchNorm2dReLU": 1}
    assert fused.state_dict().keys() == net.state_dict().keys()
    assert "is Identity" in operator_fusion.explain(net, "1")
    x = ndl.Tensor(np.random.default_rng(0).standard_normal((2, 3, 6, 5)).astype("float32"))
    before = copy.deepcopy(net)
    np.testing.assert_allclose(fused(x).numpy(), before(x).numpy(), rtol=1e-5, atol=1e-5)


def test_an_identity_with_a_hook_is_called() -> None:
    net = ndl.nn.Sequential(ndl.nn.Linear(4, 4), ndl.nn.Identity(), ndl.nn.ReLU())
    net.modules[1].register_forward_hook(lambda layer, args, result: result * 2.0)
    fused = operator_fusion.fuse(net)
    x = ndl.Tensor(np.eye(4, dtype="float32"))
    assert not fused.fusion_report.counts
    np.testing.assert_array_equal(fused(x).numpy(), net(x).numpy())

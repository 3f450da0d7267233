"""Fusion of whole models, and the names under which fusion was first published."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import needle as ndl
import operator_fusion as of
from gpu_devices import emulated, everywhere, need_executor
from needle import nn
from test_fusion import Net, assert_same, bn, conv, data

pytestmark = everywhere


def test_original_names(capsys: Any) -> None:
    fusion = of.OperatorFusion()
    fused = fusion.fuse_sequential([conv(), bn(), nn.ReLU()])
    fusion.fuse_model(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    stats = fusion.get_fusion_stats()
    assert stats["total_fusions"] == 2
    assert stats["pattern_counts"] == {"ConvBatchNorm2dReLU": 1, "LinearReLU": 1}
    assert stats["fusion_log"][0]["module_paths"] == ["0", "1", "2"]
    assert fused(data(1, 4, 5, 5)).shape == (1, 4, 5, 5)
    fusion.print_fusion_report()
    assert "LinearReLU" in capsys.readouterr().out
    of.fuse_operators(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), verbose=True)
    assert "1 fusions" in capsys.readouterr().out


class BasicBlock(nn.Module):
    container = True

    def __init__(self, cin: int, cout: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv(cin, cout, stride=stride), bn(cout)
        self.conv2, self.bn2, self.relu = conv(cout, cout), bn(cout), nn.ReLU()
        self.down = None
        if stride > 1:
            self.down = nn.Sequential(nn.Conv(cin, cout, 1, stride, bias=False, layout="torch"), bn(cout))

    def forward(self, x: Any) -> Any:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(y + (x if self.down is None else self.down(x)))


def resnet18(width: int = 4) -> nn.Module:
    layers = [conv(3, width), bn(width), nn.ReLU(), nn.MaxPool2d(2)]
    cin = width
    for i in range(4):
        for stride in (1 if i == 0 else 2, 1):
            layers.append(BasicBlock(cin, width * 2**i, stride))
            cin = width * 2**i
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(cin, 5, layout="torch"))


@emulated
def test_resnet18_counts() -> None:
    net = resnet18()
    fused = of.fuse(net)
    assert fused.fusion_report.counts == {"ConvBatchNorm2dReLU": 9, "ConvBatchNorm2dAddReLU": 8, "ConvBatchNorm2d": 3}
    assert not fused.fusion_report.near_misses
    net.eval()
    x = data(2, 3, 32, 32)
    y = net(x).numpy()
    np.testing.assert_allclose(fused(x).numpy(), y, atol=1e-5 * np.abs(y).max())


def test_compiled_fused_net_matches() -> None:
    need_executor()
    net = resnet18().eval()
    x = data(2, 3, 32, 32)
    y = net(x).numpy()
    exe = ndl.compile(of.fuse(net), (x,))
    np.testing.assert_allclose(exe(x).numpy(), y, atol=2e-5 * np.abs(y).max())


def test_save_and_load(tmp_path: Any) -> None:
    net = resnet18().eval()
    fused, x = of.fuse(net), data(1, 3, 32, 32)
    ndl.save(fused, tmp_path / "net.safetensors")
    loaded = ndl.load(tmp_path / "net.safetensors")
    np.testing.assert_allclose(loaded(x).numpy(), fused(x).numpy(), rtol=1e-5, atol=1e-5)
    assert list(loaded.state_dict()) and set(loaded.state_dict()) == set(net.state_dict())


@pytest.mark.parametrize("norm", ["layer", "function"])
def test_instance_norm_with_statistics_trains_as_itself(norm: str) -> None:
    """In evaluation it records a batch norm, too."""

    def forward(n: Any, x: Any) -> Any:
        y = n.conv(x)
        if norm == "layer":
            return n.norm(y)
        return n.norm(y, n.mean, n.var, n.weight, n.bias)

    layer: nn.Module = nn.InstanceNorm(4, affine=True, track_running_stats=True)
    net = Net(forward, conv=conv(), norm=layer if norm == "layer" else nn.FunctionalInstanceNorm())
    if norm == "function":
        net.mean, net.var = (ndl.Tensor(np.ones(4, "float32"), requires_grad=False) for _ in range(2))
        net.weight, net.bias = (nn.Parameter(np.ones(4, "float32")) for _ in range(2))
    fused = of.fuse(net)
    assert not fused.fusion_report.counts
    assert_same(net, fused, data(3, 4, 5, 6))

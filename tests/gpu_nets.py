"""Small nets for tests of executables on GPU devices, and what they compute in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import needle as ndl
import operator_fusion
from needle import nn
from needle.autograd import Tensor
from needle.backend_ndarray import Device
from needle.graph import symbolic


def image(*shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape, dtype="float32")


class Block(nn.Module):
    """relu(norm(conv(relu(norm(conv(x))))) + x)"""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv(channels, channels, 3, padding=1, layout="torch") for _ in range(2))
        self.norm1, self.norm2 = (nn.BatchNorm2d(channels) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = ndl.ops.relu(self.norm1(self.conv1(x)))
        return ndl.ops.relu(self.norm2(self.conv2(y)) + x)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv(3, 8, 3, stride=2, padding=1, layout="torch"), nn.BatchNorm2d(8)
        self.block, self.depthwise = Block(8), nn.Conv(8, 8, 3, padding=1, groups=8, layout="torch")
        self.head = nn.Linear(8, 5, layout="torch")

    def forward(self, x: Tensor) -> Tensor:
        y = ndl.ops.max_pool2d(ndl.ops.relu(self.norm(self.stem(x))), 2)
        y = ndl.ops.silu(self.depthwise(self.block(y)))
        return self.head(ndl.ops.flatten(ndl.ops.adaptive_avg_pool2d(y, 1), 1))


class UNet(nn.Module):
    """Two levels; gives the map and its softmax over channels."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.deep = nn.Conv(2, 4, 3, padding=1, layout="torch"), nn.Conv(4, 8, 3, padding=1, layout="torch")
        self.up, self.last = nn.ConvTranspose2d(8, 4, 2, stride=2), nn.Conv(12, 3, 1, layout="torch")

    def forward(self, x: Tensor) -> Any:
        a = ndl.ops.relu(self.down(x))
        b = ndl.ops.relu(self.deep(ndl.ops.max_pool2d(a, 2)))
        wide = ndl.ops.interpolate(b, size=a.shape[2:], mode="bilinear")
        up = ndl.ops.relu(self.up(b))
        pads = (0, a.shape[3] - up.shape[3], 0, a.shape[2] - up.shape[2])
        maps = self.last(ndl.ops.concat((ndl.ops.pad(up, pads) + a, wide), 1))
        return {"maps": maps, "shares": ndl.ops.softmax(maps, 1)}


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 20, layout="torch"), nn.BatchNorm1d(20), nn.GELU(), nn.Linear(20, 5))


def transformer() -> nn.Module:
    return nn.Sequential(nn.TransformerEncoderLayer(16, 2, 24, batch_first=True))


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(6, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Any:
        y, (h, c) = self.lstm(x)
        return self.head(ndl.ops.reshape(y, (-1, 5))), h, c


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], tuple[int, ...]]] = {
    "mlp": (mlp, (3, 12), (10, 12)),
    "resnet": (ResNet, (1, 3, 12, 12), (2, 3, 9, 11)),
    "unet": (UNet, (1, 2, 8, 8), (2, 2, 7, 9)),
    "transformer": (transformer, (1, 7, 16), (2, 5, 16)),
    "lstm": (Lstm, (4, 2, 6), (2, 3, 6)),
}


def make(name: str) -> nn.Module:
    """The same weights in every call; statistics of batch norms are not those of new ones."""
    np.random.seed(0)
    net = NETS[name][0]().eval()
    for _, m in net.named_modules():
        if isinstance(m, nn.BatchNorm2d):
            for t in (m.running_mean, m.running_var, m.weight, m.bias):
                t.data = ndl.Tensor(np.random.rand(*t.shape).astype("float32") + 0.5)
    return net


def fused_form(net: nn.Module, x: np.ndarray) -> nn.Module:
    return operator_fusion.fuse(symbolic(net, (x,)))


def leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = tuple(value.values())
    return [x for v in value for x in leaves(v)] if isinstance(value, tuple | list) else [value]


def arrays(value: Any) -> list[np.ndarray]:
    return [np.asarray(x.numpy() if hasattr(x, "numpy") else x) for x in leaves(value)]


def exact(net: nn.Module, x: np.ndarray) -> list[np.ndarray]:
    """In float64; `net` is on the CPU again afterwards."""
    before = {n: t.numpy() for n, t in net.state_dict().items()}
    net.to(ndl.cpu_numpy(), "float64")
    want = arrays(net(Tensor(x.astype("float64"), device=ndl.cpu_numpy(), dtype="float64")))
    net.to(ndl.cpu(), "float32")
    assert all(np.array_equal(t.numpy(), before[n]) for n, t in net.state_dict().items())
    return want


def close(got: Any, want: Any, tolerance: float = 1e-5) -> None:
    got, want = arrays(got), arrays(want)
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape
        assert np.abs(a - b).max() <= tolerance * np.abs(b).max()


def resnet_on(device: Device, fused: bool = False) -> tuple[nn.Module, np.ndarray, list[np.ndarray]]:
    net, x = make("resnet"), image(2, 3, 9, 11)
    want = exact(net, x)
    net.to(device)
    return fused_form(net, x) if fused else net, x, want

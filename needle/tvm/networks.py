"""The networks that `needle.tvm.eval` measures, with the inputs that they take."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np

from needle import models, nn, ops
from needle.autograd import Tensor


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with batch norm and a shortcut (He et al., arXiv 1512.03385)."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(*conv_bn(width_in, width, stride), nn.ReLU(), *conv_bn(width, width, 1))
        same = stride == 1 and width_in == width
        self.shortcut = nn.Identity() if same else nn.Sequential(*conv_bn(width_in, width, stride, kernel=1))

    def forward(self, x: Tensor) -> Tensor:
        return ops.relu(ops.add(self.body(x), self.shortcut(x)))


def conv_bn(width_in: int, width: int, stride: int, kernel: int = 3) -> list[nn.Module]:
    return [
        nn.Conv(width_in, width, kernel, stride, bias=False, layout="torch", padding=kernel // 2),
        nn.BatchNorm2d(width),
    ]


def resnet18(num_classes: int = 10) -> nn.Module:
    """ResNet-18: images (N, 3, H, W) to scores (N, num_classes)."""
    widths = (64, 64, 128, 256, 512)
    blocks: list[nn.Module] = []
    for i in range(4):
        blocks += [BasicBlock(widths[i], widths[i + 1], 2 if i else 1), BasicBlock(widths[i + 1], widths[i + 1], 1)]
    return nn.Sequential(
        nn.Conv(3, 64, 7, 2, bias=False, layout="torch", padding=3),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(512, num_classes),
    )


class UNet(nn.Module):
    """Images (N, channels, H, W) to (N, classes, H, W), H and W multiples of 16 (Ronneberger et al., arXiv 1505.04597)."""

    def __init__(self, base: int = 8, channels: int = 3, classes: int = 2) -> None:
        super().__init__()
        steps = list(pairwise(base << i for i in range(5)))
        self.first = double_conv(channels, base)
        self.down = [double_conv(a, b) for a, b in steps]
        self.up = [nn.ConvTranspose2d(b, a, 2, 2) for a, b in steps]
        self.join = [double_conv(b, a) for a, b in steps]
        self.last = nn.Conv(base, classes, 1, layout="torch")

    def forward(self, x: Tensor) -> Tensor:
        skips = [self.first(x)]
        for layer in self.down:
            skips.append(layer(ops.max_pool2d(skips[-1], 2)))
        x = skips.pop()
        for up, join in zip(reversed(self.up), reversed(self.join), strict=True):
            x = join(ops.concat([skips.pop(), up(x)], 1))
        return self.last(x)


def double_conv(width_in: int, width: int) -> nn.Sequential:
    return nn.Sequential(*conv_bn(width_in, width, 1), nn.ReLU(), *conv_bn(width, width, 1), nn.ReLU())


class Scores(nn.Module):
    """Only the scores of a language model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)[0]


def mlp(width: int = 512) -> nn.Module:
    """784 inputs, two hidden layers of one width, 10 scores."""
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


def transformer() -> nn.Module:
    return Scores(nn.Transformer(128, 256, 2, num_head=4, dim_head=32, causal=True, batch_first=True, sequence_len=64))


def language_model() -> nn.Module:
    return Scores(models.LanguageModel(32, 100, 64, num_layers=2, seq_model="lstm"))


def images(size: int) -> Callable[[int], np.ndarray]:
    return lambda batch: np.random.randn(batch, 3, size, size).astype("float32")


# name -> (the network, inputs for a batch, usual batch)
NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any], int]] = {
    "mlp": (mlp, lambda batch: np.random.randn(batch, 512).astype("float32"), 64),
    "transformer": (transformer, lambda batch: np.random.randn(batch, 64, 128).astype("float32"), 8),
    "conv": (models.ResNet9, images(32), 8),
    "resnet18": (resnet18, images(64), 1),
    "unet": (UNet, images(64), 1),
    "lstm": (language_model, lambda batch: np.random.randint(0, 100, (16, batch)).astype("int64"), 8),
}


def network(name: str, seed: int = 0) -> nn.Module:
    """A network in evaluation, with random weights and running statistics that differ from the initial ones."""
    np.random.seed(seed)
    net = NETWORKS[name][0]()
    for path, t in net.named_buffers():
        low, high = (0.5, 1.5) if path.endswith("var") else (-0.1, 0.1)
        t.data = Tensor(np.random.uniform(low, high, t.shape).astype("float32"), dtype=t.dtype)
    return net.eval()

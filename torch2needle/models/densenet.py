"""DenseNet-121 (Huang et al. 2017, https://arxiv.org/abs/1608.06993): every layer reads the outputs of all layers before it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


class DenseLayer(nn.Module):
    """`growth` new channels from all channels so far, through a bottleneck of `width` channels."""

    def __init__(self, n_in: int, width: int, growth: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(n_in)
        self.relu1 = nn.ReLU(inplace=True)
        self.conv1 = nn.Conv2d(n_in, width, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.relu2 = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, growth, 3, padding=1, bias=False)

    def forward(self, parts: list[torch.Tensor]) -> torch.Tensor:
        x = self.conv1(self.relu1(self.norm1(torch.cat(parts, 1))))
        return self.conv2(self.relu2(self.norm2(x)))


class DenseBlock(nn.Module):
    def __init__(self, layers: int, n_in: int, width: int, growth: int) -> None:
        super().__init__()
        for i in range(layers):
            self.add_module(f"denselayer{i + 1}", DenseLayer(n_in + i * growth, width, growth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = [x]
        for layer in self.children():
            parts.append(layer(parts))
        return torch.cat(parts, 1)


class Transition(nn.Module):
    """Halves channels, height and width."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(n_in)
        self.relu = nn.ReLU(inplace=True)
        self.conv = nn.Conv2d(n_in, n_out, 1, bias=False)
        self.pool = nn.AvgPool2d(2, stride=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.pool(self.conv(self.relu(self.norm(x))))


class DenseNet(nn.Module):
    """`blocks`: how many layers each dense block has."""

    def __init__(self, blocks: Sequence[int], growth: int = 32, channels: int = 64, num_classes: int = 1000) -> None:
        super().__init__()
        self.features = nn.Sequential()
        self.features.add_module("conv0", nn.Conv2d(3, channels, 7, stride=2, padding=3, bias=False))
        self.features.add_module("norm0", nn.BatchNorm2d(channels))
        self.features.add_module("relu0", nn.ReLU(inplace=True))
        self.features.add_module("pool0", nn.MaxPool2d(3, stride=2, padding=1))
        for i, layers in enumerate(blocks, 1):
            self.features.add_module(f"denseblock{i}", DenseBlock(layers, channels, 4 * growth, growth))
            channels += layers * growth
            if i < len(blocks):
                self.features.add_module(f"transition{i}", Transition(channels, channels // 2))
                channels //= 2
        self.features.add_module("norm5", nn.BatchNorm2d(channels))
        self.classifier = nn.Linear(channels, num_classes)
        for m in self.modules():
            if isinstance(m, nn.Conv2d):
                nn.init.kaiming_normal_(m.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.relu(self.features(x), inplace=True)
        x = nn.functional.adaptive_avg_pool2d(x, (1, 1))
        return self.classifier(torch.flatten(x, 1))


def densenet121(num_classes: int = 1000) -> DenseNet:
    return DenseNet((6, 12, 24, 16), num_classes=num_classes)

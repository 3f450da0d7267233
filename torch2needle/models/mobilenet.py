"""MobileNetV2 (Sandler et al. 2018, https://arxiv.org/abs/1801.04381): inverted residuals around depthwise convolutions."""

from __future__ import annotations

import torch
from torch import nn

# Expansion, output channels, blocks and first stride of every stage: table 2 of the paper.
STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


def conv_bn_act(
    n_in: int, n_out: int, kernel: int, stride: int = 1, groups: int = 1, activation: type[nn.Module] | None = None
) -> nn.Sequential:
    """Convolution that keeps the size up to its stride, BatchNorm, and an activation in place."""
    layers = [
        nn.Conv2d(n_in, n_out, kernel, stride, padding=kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(n_out),
    ]
    return nn.Sequential(*layers, *([] if activation is None else [activation(inplace=True)]))


class InvertedResidual(nn.Module):
    def __init__(self, n_in: int, n_out: int, stride: int, expansion: int) -> None:
        super().__init__()
        width = n_in * expansion
        layers: list[nn.Module] = []
        if expansion != 1:
            layers.append(conv_bn_act(n_in, width, 1, activation=nn.ReLU6))
        layers.append(conv_bn_act(width, width, 3, stride, groups=width, activation=nn.ReLU6))
        layers += [nn.Conv2d(width, n_out, 1, bias=False), nn.BatchNorm2d(n_out)]
        self.conv = nn.Sequential(*layers)
        self.adds = stride == 1 and n_in == n_out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.conv(x) if self.adds else self.conv(x)


class MobileNetV2(nn.Module):
    def __init__(self, num_classes: int = 1000, dropout: float = 0.2) -> None:
        super().__init__()
        layers: list[nn.Module] = [conv_bn_act(3, 32, 3, 2, activation=nn.ReLU6)]
        n_in = 32
        for expansion, n_out, blocks, first in STAGES:
            for i in range(blocks):
                layers.append(InvertedResidual(n_in, n_out, first if i == 0 else 1, expansion))
                n_in = n_out
        layers.append(conv_bn_act(n_in, 1280, 1, activation=nn.ReLU6))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.Dropout(dropout), nn.Linear(1280, num_classes))
        for m in self.modules():
            if isinstance(m, nn.Conv2d):
                nn.init.kaiming_normal_(m.weight, mode="fan_out")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.adaptive_avg_pool2d(self.features(x), (1, 1))
        return self.classifier(torch.flatten(x, 1))


def mobilenet_v2(num_classes: int = 1000, dropout: float = 0.2) -> MobileNetV2:
    return MobileNetV2(num_classes, dropout)

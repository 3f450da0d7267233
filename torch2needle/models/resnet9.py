"""Two ResNets of nine layers for CIFAR-10: the course's, and the wide one of DAWNBench entries."""

from __future__ import annotations

import torch
from torch import nn


def conv_bn(n_in: int, n_out: int, kernel: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(n_in, n_out, kernel, stride, padding=(kernel - 1) // 2),
        nn.BatchNorm2d(n_out),
        nn.ReLU(),
    )


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.fn = nn.Sequential(conv_bn(width, width, 3), conv_bn(width, width, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fn(x) + x


class ResNet9(nn.Module):
    """The course's ResNet9: 431,946 parameters at 10 classes."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.features = nn.Sequential(
            conv_bn(3, 16, 7, 4),
            conv_bn(16, 32, 3, 2),
            Residual(32),
            conv_bn(32, 64, 3, 2),
            conv_bn(64, 128, 3, 2),
            Residual(128),
        )
        self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, num_classes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(x))


class ResNet9Wide(nn.Module):
    """Widths 64, 128, 256, 512: 6.6 million parameters at 10 classes."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.features = nn.Sequential(
            conv_bn(3, 64, 3),
            conv_bn(64, 128, 3),
            nn.MaxPool2d(2),
            Residual(128),
            conv_bn(128, 256, 3),
            nn.MaxPool2d(2),
            conv_bn(256, 512, 3),
            nn.MaxPool2d(2),
            Residual(512),
            nn.AdaptiveAvgPool2d(1),
        )
        self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(512, num_classes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(x))


def resnet9(num_classes: int = 10) -> ResNet9:
    return ResNet9(num_classes)


def resnet9_wide(num_classes: int = 10) -> ResNet9Wide:
    return ResNet9Wide(num_classes)

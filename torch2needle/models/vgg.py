"""VGG-16 (Simonyan and Zisserman 2015, https://arxiv.org/abs/1409.1556), with or without BatchNorm."""

from __future__ import annotations

import torch
from torch import nn

WIDTHS = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)  # 0: a 2x2 max-pool


class VGG(nn.Module):
    def __init__(
        self, num_classes: int = 1000, batch_norm: bool = False, dropout: float = 0.5, hidden: int = 4096
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        n_in = 3
        for width in WIDTHS:
            if width == 0:
                layers.append(nn.MaxPool2d(2, 2))
                continue
            layers.append(nn.Conv2d(n_in, width, 3, padding=1))
            layers += [nn.BatchNorm2d(width), nn.ReLU(inplace=True)] if batch_norm else [nn.ReLU(inplace=True)]
            n_in = width
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d((7, 7))
        self.classifier = nn.Sequential(
            nn.Linear(512 * 7 * 7, hidden),
            nn.ReLU(True),
            nn.Dropout(dropout),
            nn.Linear(hidden, hidden),
            nn.ReLU(True),
            nn.Dropout(dropout),
            nn.Linear(hidden, num_classes),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.avgpool(self.features(x))
        return self.classifier(torch.flatten(x, 1))


def vgg16(num_classes: int = 1000, batch_norm: bool = False, dropout: float = 0.5, hidden: int = 4096) -> VGG:
    """`hidden`: width of the classifier's layers."""
    return VGG(num_classes, batch_norm, dropout, hidden)

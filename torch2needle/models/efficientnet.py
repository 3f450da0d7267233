"""EfficientNet-B0 (Tan and Le 2019, https://arxiv.org/abs/1905.11946): inverted residuals with squeeze-and-excite and SiLU."""

from __future__ import annotations

import torch
from torch import nn

from .mobilenet import conv_bn_act

# Expansion, kernel, first stride, output channels and blocks of every stage: table 1 of the paper.
STAGES = (
    (1, 3, 1, 16, 1),
    (6, 3, 2, 24, 2),
    (6, 5, 2, 40, 2),
    (6, 3, 2, 80, 3),
    (6, 5, 1, 112, 3),
    (6, 5, 2, 192, 4),
    (6, 3, 1, 320, 1),
)


class SqueezeExcitation(nn.Module):
    """Scales every channel by a gate in (0, 1) computed from the means of all (Hu et al. 2018, arXiv:1709.01507)."""

    def __init__(self, width: int, squeezed: int) -> None:
        super().__init__()
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc1 = nn.Conv2d(width, squeezed, 1)
        self.fc2 = nn.Conv2d(squeezed, width, 1)
        self.activation = nn.SiLU(inplace=True)
        self.scale_activation = nn.Sigmoid()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.activation(self.fc1(self.avgpool(x)))
        return self.scale_activation(self.fc2(gate)) * x


class StochasticDepth(nn.Module):
    """In training a sample's branch is zero with probability p, else divided by 1 - p (Huang et al. 2016, arXiv:1603.09382)."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.drop = nn.Dropout3d(p)  # drops whole (C, H, W) volumes of an (N, 1, C, H, W)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(x.unsqueeze(1)).squeeze(1)


class MBConv(nn.Module):
    def __init__(self, n_in: int, n_out: int, kernel: int, stride: int, expansion: int, drop: float) -> None:
        super().__init__()
        width = n_in * expansion
        layers: list[nn.Module] = []
        if expansion != 1:
            layers.append(conv_bn_act(n_in, width, 1, activation=nn.SiLU))
        layers.append(conv_bn_act(width, width, kernel, stride, groups=width, activation=nn.SiLU))
        layers += [SqueezeExcitation(width, max(1, n_in // 4)), conv_bn_act(width, n_out, 1)]
        self.block = nn.Sequential(*layers)
        self.adds = stride == 1 and n_in == n_out
        self.stochastic_depth = StochasticDepth(drop) if drop > 0 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.block(x)
        if not self.adds:
            return out
        return (out if self.stochastic_depth is None else self.stochastic_depth(out)) + x


class EfficientNet(nn.Module):
    """`stochastic_depth`: the probability at the last block, growing linearly from 0 at the first."""

    def __init__(self, num_classes: int = 1000, dropout: float = 0.2, stochastic_depth: float = 0.0) -> None:
        super().__init__()
        layers: list[nn.Module] = [conv_bn_act(3, 32, 3, 2, activation=nn.SiLU)]
        n_in, done, total = 32, 0, sum(s[-1] for s in STAGES)
        for expansion, kernel, first, n_out, blocks in STAGES:
            stage = []
            for i in range(blocks):
                drop = stochastic_depth * done / total
                stage.append(MBConv(n_in, n_out, kernel, first if i == 0 else 1, expansion, drop if i else 0.0))
                n_in, done = n_out, done + 1
            layers.append(nn.Sequential(*stage))
        layers.append(conv_bn_act(n_in, 1280, 1, activation=nn.SiLU))
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential(nn.Dropout(dropout, inplace=True), nn.Linear(1280, num_classes))
        for m in self.modules():
            if isinstance(m, nn.Conv2d):
                nn.init.kaiming_normal_(m.weight, mode="fan_out")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.avgpool(self.features(x))
        return self.classifier(torch.flatten(x, 1))


def efficientnet_b0(num_classes: int = 1000, dropout: float = 0.2, stochastic_depth: float = 0.0) -> EfficientNet:
    return EfficientNet(num_classes, dropout, stochastic_depth)

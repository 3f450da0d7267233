"""A multi-layer perceptron."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import nn


class MLP(nn.Module):
    """Linear layers of the given sizes with ReLU between them; inputs are flattened."""

    def __init__(self, sizes: Sequence[int] = (784, 1024, 1024, 10)) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for n_in, n_out in itertools.pairwise(sizes):
            layers += [nn.Linear(n_in, n_out), nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(torch.flatten(x, 1))


def mlp(sizes: Sequence[int] = (784, 1024, 1024, 10)) -> MLP:
    return MLP(sizes)

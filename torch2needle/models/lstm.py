"""A classifier of sequences."""

from __future__ import annotations

import torch
from torch import nn


class LSTMClassifier(nn.Module):
    """Sequences (T, B, features) to logits (B, classes), from the last state of the top layer."""

    def __init__(self, features: int = 256, hidden: int = 256, layers: int = 2, classes: int = 10) -> None:
        super().__init__()
        self.lstm = nn.LSTM(features, hidden, layers)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][-1])


def lstm(features: int = 256, hidden: int = 256, layers: int = 2, classes: int = 10) -> LSTMClassifier:
    return LSTMClassifier(features, hidden, layers, classes)

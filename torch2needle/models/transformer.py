"""A Transformer encoder over tokens (Vaswani et al., 2017) with torch's own layers."""

from __future__ import annotations

import math

import torch
from torch import nn


def sinusoids(length: int, width: int) -> torch.Tensor:
    """Positions (1, length, width): sines in the even columns, cosines in the odd ones."""
    angle = torch.arange(length)[:, None] * torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(1)[None]


class TransformerClassifier(nn.Module):
    """Tokens (N, L) of int64, L <= max_length, to class scores (N, classes)."""

    def __init__(
        self,
        vocabulary: int = 1000,
        width: int = 128,
        heads: int = 4,
        layers: int = 2,
        feed_forward: int = 256,
        classes: int = 10,
        dropout: float = 0.1,
        max_length: int = 512,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position: torch.Tensor
        self.register_buffer("position", sinusoids(max_length, width))
        self.dropout = nn.Dropout(dropout)
        layer = nn.TransformerEncoderLayer(width, heads, feed_forward, dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.position[:, : tokens.shape[1]]
        return self.head(self.encoder(self.dropout(x)).mean(1))


def transformer(**kwargs: int) -> TransformerClassifier:
    """A small Transformer encoder for classification."""
    return TransformerClassifier(**kwargs)

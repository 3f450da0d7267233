"""Vision Transformer (Dosovitskiy et al., 2021) with attention written out, as many code bases do."""

from __future__ import annotations

import torch
from torch import nn


class Attention(nn.Module):
    """Self-attention of (N, L, width) with one projection for query, key and value."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.scale = heads, (width // heads) ** -0.5
        self.qkv = nn.Linear(width, 3 * width)
        self.drop = nn.Dropout(dropout)
        self.proj = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, length, width = x.shape[0], x.shape[1], x.shape[2]
        qkv = self.qkv(x).reshape(n, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        weights = self.drop(((q @ k.transpose(-2, -1)) * self.scale).softmax(dim=-1))
        return self.proj((weights @ v).transpose(1, 2).reshape(n, length, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attn = Attention(width, heads, dropout)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = nn.Sequential(
            nn.Linear(width, hidden), nn.GELU(), nn.Dropout(dropout), nn.Linear(hidden, width), nn.Dropout(dropout)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    """Images (N, 3, size, size) to class scores (N, classes): patches, a class token, `layers` blocks."""

    def __init__(
        self,
        size: int = 64,
        patch: int = 8,
        width: int = 128,
        heads: int = 4,
        layers: int = 4,
        classes: int = 10,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(torch.randn(1, (size // patch) ** 2 + 1, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, heads, 4 * width, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(x.shape[0], -1, -1), x], dim=1) + self.position
        return self.head(self.norm(self.blocks(x))[:, 0])


def vit(**kwargs: int) -> VisionTransformer:
    """A small Vision Transformer."""
    return VisionTransformer(**kwargs)

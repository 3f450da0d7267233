"""Weights that are computed from others or held in half precision, and layers that are computed twice to save memory."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint, checkpoint_sequential


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)

    def right_inverse(self, a: Tensor) -> Tensor:
        return a.triu()


class Positive(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.softplus(x)


class MonotoneNet(nn.Module):
    """Positive and symmetric weights by torch.nn.utils.parametrize, two on one. (N, 6)."""

    def __init__(self, dim: int = 6) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(dim, dim), nn.Linear(dim, dim)
        parametrize.register_parametrization(self.a, "weight", Positive())
        parametrize.register_parametrization(self.b, "weight", Symmetric())
        parametrize.register_parametrization(self.b, "weight", Positive(), unsafe=True)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.a(x))
        with parametrize.cached():
            return self.b(self.b(x))


class Discriminator(nn.Module):
    """Miyato et al. 2018: spectral norms of convolutions and a linear layer, old and new; a class embedding's product."""

    def __init__(self, width: int = 6, classes: int = 4) -> None:
        super().__init__()
        self.c1 = parametrizations.spectral_norm(nn.Conv2d(3, width, 3, padding=1))
        self.c2 = nn.utils.spectral_norm(nn.Conv2d(width, width, 4, 2, 1))
        self.fc = parametrizations.spectral_norm(nn.Linear(width, 1))
        self.embed = parametrizations.spectral_norm(nn.Embedding(classes, width))

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        x = F.leaky_relu(self.c2(F.leaky_relu(self.c1(x), 0.2)), 0.2).sum((2, 3))
        return self.fc(x) + (self.embed(label) * x).sum(1, keepdim=True)


class TemporalConvNet(nn.Module):
    """Bai et al. 2018: dilated causal convolutions with weight norm, the old one and the parametrization. (N, 3, L)."""

    def __init__(self, width: int = 6, levels: int = 3) -> None:
        super().__init__()
        norms = (nn.utils.weight_norm, parametrizations.weight_norm)
        sizes = [3] + [width] * levels
        self.convs = nn.ModuleList(norms[i % 2](nn.Conv1d(sizes[i], width, 3, dilation=2**i)) for i in range(levels))
        self.skip = parametrizations.weight_norm(nn.Conv1d(3, width, 1), dim=None)

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for i, conv in enumerate(self.convs):
            y = torch.relu(conv(F.pad(y, (2 * 2**i, 0))))
        return y + self.skip(x)


class OrthogonalRNN(nn.Module):
    """A recurrence whose matrix stays orthogonal: two kinds of the parametrization. (N, L, 4)."""

    def __init__(self, dim: int = 4, hidden: int = 6) -> None:
        super().__init__()
        self.inputs = nn.Linear(dim, hidden)
        self.recurrent = parametrizations.orthogonal(nn.Linear(hidden, hidden, bias=False), orthogonal_map="cayley")
        self.out = parametrizations.orthogonal(nn.Linear(hidden, 3, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.size(0), self.recurrent.in_features)
        for step in x.unbind(1):
            h = torch.tanh(self.inputs(step) + self.recurrent(h))
        return self.out(h)


class Block(nn.Module):
    def __init__(self, dim: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class BfloatEncoder(nn.Module):
    """Weights in bfloat16; ids come in, and the logits leave in float32."""

    def __init__(self, words: int = 30, dim: int = 8) -> None:
        super().__init__()
        self.embed, self.blocks, self.head = (
            nn.Embedding(words, dim),
            nn.Sequential(Block(dim), Block(dim)),
            nn.Linear(dim, 5),
        )
        self.to(torch.bfloat16)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(ids)).mean(1)).float()


class HalfConvNet(nn.Module):
    """Weights, input and output in float16. Images."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.GroupNorm(2, width), nn.SiLU())
        self.head = nn.Linear(width, 3)
        self.half()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean((2, 3)))


class CheckpointedStages(nn.Module):
    """Stages computed again in the backward pass, with dropout inside, by checkpoint and checkpoint_sequential."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dim) for _ in range(2))
        self.tail = nn.Sequential(nn.Linear(dim, dim), nn.Dropout(0.2), nn.ReLU(), nn.Linear(dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return checkpoint_sequential(self.tail, 2, x, use_reentrant=False)

"""A residual network of linear layers for MNIST."""

from __future__ import annotations

from typing import Any

from needle import nn
from needle.backend_ndarray import Device


def placement(device: Device | None, dtype: str) -> dict[str, Any]:
    """Keyword arguments for layers; none where all is as by default, so that `norm` may be any function of a number."""
    return {} if device is None and dtype == "float32" else {"device": device, "dtype": dtype}


def ResidualBlock(
    dim: int,
    hidden_dim: int,
    norm: Any = nn.BatchNorm1d,
    drop_prob: float = 0.1,
    device: Device | None = None,
    dtype: str = "float32",
) -> nn.Sequential:
    """ReLU(x + norm(linear(dropout(ReLU(norm(linear(x))))))) on (N, dim). norm: a class called with a number of features."""
    where = placement(device, dtype)
    body = nn.Sequential(
        nn.Linear(dim, hidden_dim, **where),
        norm(hidden_dim, **where),
        nn.ReLU(),
        nn.Dropout(drop_prob),
        nn.Linear(hidden_dim, dim, **where),
        norm(dim, **where),
    )
    return nn.Sequential(nn.Residual(body), nn.ReLU())


def MLPResNet(
    dim: int,
    hidden_dim: int = 100,
    num_blocks: int = 3,
    num_classes: int = 10,
    norm: Any = nn.BatchNorm1d,
    drop_prob: float = 0.1,
    device: Device | None = None,
    dtype: str = "float32",
) -> nn.Sequential:
    """(N, dim) to scores (N, num_classes): linear, ReLU, `num_blocks` residual blocks of hidden width hidden_dim // 2, linear."""
    where = placement(device, dtype)
    return nn.Sequential(
        nn.Linear(dim, hidden_dim, **where),
        nn.ReLU(),
        *(ResidualBlock(hidden_dim, hidden_dim // 2, norm, drop_prob, **where) for _ in range(num_blocks)),
        nn.Linear(hidden_dim, num_classes, **where),
    )

"""Small torch models as rows of plain data, (layer, arguments, options), drawn by family."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn

ACTIVATIONS = ("ReLU", "GELU", "Tanh", "SiLU", "Sigmoid", "ELU", "Softplus", "LeakyReLU", "Hardswish")
CHANNELS = (1, 2, 3, 4, 6)


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


class First(nn.Module):
    """The sequence of a recurrent layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[0]


class SelfAttention(nn.Module):
    def __init__(self, width: int, heads: int, bias: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, bias=bias, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.attention(x, x, x, need_weights=False)[0]


class Scale(nn.Module):
    """A parameter that no layer holds, of any shape that broadcasts."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(shape) / 4 + 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain


def dense_row(rng: random.Random, width: int) -> tuple[Any, int]:
    kind = rng.choice(("linear", "linear", "norm", "batch_norm", "activation", "dropout", "residual", "scale", "tied"))
    if kind == "linear":
        out = rng.choice((1, 2, 3, 5, 8))
        return ("Linear", (width, out), {"bias": rng.random() < 0.8}), out
    if kind == "batch_norm":
        return ("BatchNorm1d", (width,), norm_options(rng)), width
    row: Any = {
        "norm": ("LayerNorm", (width,), {"elementwise_affine": rng.random() < 0.8}),
        "activation": (rng.choice(ACTIVATIONS), (), {}),
        "dropout": ("Dropout", (0.0,), {}),
        "residual": ("residual", ("Linear", (width, width), {}), {}),
        "scale": ("scale", rng.choice(((), (1,), (width,), (1, width))), {}),
        "tied": ("tied", ("Linear", (width, width), {}), {}),
    }[kind]
    return row, width


def norm_options(rng: random.Random) -> dict[str, Any]:
    return {
        "momentum": rng.choice((0.1, 0.1, 0.5, 1.0, None)),
        "affine": rng.random() < 0.8,
        "track_running_stats": rng.random() < 0.85,
        "eps": rng.choice((1e-5, 1e-2)),
    }


def image_row(rng: random.Random, width: int, axes: int) -> tuple[Any, int]:
    kind = rng.choice(
        ("conv", "conv", "conv", "transposed", "batch_norm", "norm", "activation", "pool", "dropout", "scale")
    )
    if kind in ("conv", "transposed"):
        out, size = rng.choice(CHANNELS), rng.choice((1, 2, 3))
        groups = rng.choice([g for g in range(1, 5) if width % g == 0 and out % g == 0])
        options: dict[str, Any] = {"bias": rng.random() < 0.7, "groups": groups, "padding": rng.randrange(size)}
        options |= {"stride": rng.choice((1, 1, 2)), "dilation": rng.choice((1, 1, 1, 2))}
        if kind == "conv":
            options["padding"] = options["padding"] * options["dilation"] + rng.choice((0, 0, 1))
        name = "Conv" if kind == "conv" else "ConvTranspose"
        return (f"{name}{axes}d", (width, out, size), options), out
    if kind == "batch_norm":
        return (f"BatchNorm{axes}d", (width,), norm_options(rng)), width
    row: Any = {
        "norm": ("GroupNorm", (rng.choice([g for g in (1, 2, 3) if width % g == 0]), width), {}),
        "activation": (rng.choice(ACTIVATIONS), (), {}),
        "pool": (rng.choice((f"AvgPool{axes}d", f"MaxPool{axes}d")), (2,), {"stride": rng.choice((1, 2))}),
        "dropout": ("Dropout", (0.0,), {}),
        "scale": ("scale", (width, *[1] * axes), {}),
    }[kind]
    return row, width


def sequence_row(rng: random.Random, width: int) -> tuple[Any, int]:
    kind = rng.choice(("recurrent", "recurrent", "attention", "encoder", "norm", "linear", "activation"))
    if kind == "recurrent":
        name, out, both = rng.choice(("LSTM", "GRU", "RNN")), rng.choice((1, 2, 4)), rng.random() < 0.3
        options = {"batch_first": rng.random() < 0.7, "num_layers": rng.choice((1, 1, 2)), "bidirectional": both}
        return ("first", (name, (width, out), options | {"bias": rng.random() < 0.8}), {}), out * (1 + both)
    if kind == "linear":
        out = rng.choice((2, 4, 6))
        return ("Linear", (width, out), {}), out
    heads = rng.choice([h for h in (1, 2) if width % h == 0])
    encoder = {"dropout": 0.0, "batch_first": True, "norm_first": rng.random() < 0.5}
    encoder |= {"activation": rng.choice(("relu", "gelu"))}
    row: Any = {
        "attention": ("attention", (width, heads, rng.random() < 0.7), {}),
        "encoder": ("TransformerEncoderLayer", (width, heads, 5), encoder),
        "norm": ("LayerNorm", (width,), {}),
        "activation": (rng.choice(ACTIVATIONS), (), {}),
    }[kind]
    return row, width


def layer(row: Any, before: list[nn.Module]) -> nn.Module:
    name, args, options = row
    if name == "residual":
        return Residual(layer(args, []))
    if name == "first":
        return First(layer(args, []))
    if name == "attention":
        return SelfAttention(*args)
    if name == "scale":
        return Scale(*args)
    if name == "tied":
        made = layer(args, [])
        twin = next((m for m in before if isinstance(m, nn.Linear) and m.weight.shape == made.weight.shape), None)
        if twin is not None:
            made.weight = twin.weight  # type: ignore[assignment]
        return made
    return getattr(nn, name)(*args, **options)


def model(rows: list[Any]) -> nn.Module:
    """The layers one after the other, with biases and gains unlike their initial ones."""
    made: list[nn.Module] = []
    for row in rows:
        made.append(layer(row, made))
    net = nn.Sequential(*made)
    with torch.no_grad():
        for p in net.parameters():
            if p.ndim < 2:
                p.add_(torch.randn_like(p) / 4)
    return net

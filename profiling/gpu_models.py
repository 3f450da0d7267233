"""The models, training steps and layers that `scripts/gpu_check` measures on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from torch2needle import models

PRECISIONS = ("tf32", "float32", "float16")


@dataclass(frozen=True)
class Row:
    """A model or an op, its inputs and how it computes."""

    title: str
    build: Callable[[], tuple[Any, tuple]]  # a module or function and its inputs, on the CPU
    precision: str


def image_model(name: str, batch: int, size: int, **options: int) -> tuple[Any, tuple]:
    return models.randomize(getattr(models, name)(**options), seed=0).eval(), (torch.randn(batch, 3, size, size),)


class Encoder(torch.nn.Module):
    """An encoder on embeddings: `layers` post-norm layers with GELU (Devlin et al., 2019)."""

    def __init__(self, width: int, heads: int, hidden: int, layers: int) -> None:
        super().__init__()
        layer = torch.nn.TransformerEncoderLayer(width, heads, hidden, 0.0, "gelu", batch_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


BERT_BASE, SMALL = (768, 12, 3072, 12), (16, 2, 24, 1)


def encoder(batch: int, length: int, sizes: tuple[int, int, int, int]) -> tuple[Any, tuple]:
    return Encoder(*sizes).eval(), (torch.randn(batch, length, sizes[0]),)


def mlp(batch: int) -> tuple[Any, tuple]:
    return models.randomize(models.mlp(), seed=0).eval(), (torch.randn(batch, 784),)


def model_rows() -> list[Row]:
    """The most telling first, since the time may be up."""
    shapes = [(f"ResNet-50 @224, batch {b}", partial(image_model, "resnet50", b, 224)) for b in (32, 1, 128)]
    shapes += [(f"UNet 31 M @256, batch {b}", partial(image_model, "unet", b, 256)) for b in (1, 16)]
    shapes += [(f"BERT-base S=128, batch {b}", partial(encoder, b, 128, BERT_BASE)) for b in (1, 32)]
    shapes += [(f"MLP 784-1024-1024-10, batch {b}", partial(mlp, b)) for b in (64, 4096)]
    return [Row(title, build, precision) for precision in PRECISIONS for title, build in shapes]


def conv_bn_relu(batch: int, channels: int, out: int, size: int, kernel: int) -> tuple[Any, tuple]:
    conv = torch.nn.Conv2d(channels, out, kernel, padding=kernel // 2, bias=False)
    block = torch.nn.Sequential(conv, torch.nn.BatchNorm2d(out), torch.nn.ReLU()).eval()
    return block, (torch.randn(batch, channels, size, size).contiguous(memory_format=torch.channels_last),)


def linear_relu(rows: int, features: int, out: int) -> tuple[Any, tuple]:
    return torch.nn.Sequential(torch.nn.Linear(features, out), torch.nn.ReLU()).eval(), (torch.randn(rows, features),)


class Maps(torch.nn.Module):
    """Element-wise steps, of which some are several themselves."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.log1p(torch.relu(x) * 2) * torch.sigmoid(x) + x


def maps(rows: int, features: int) -> tuple[Any, tuple]:
    return Maps(), (torch.randn(rows, features),)


def op_rows() -> list[Row]:
    """Layers alone, as torch.ops.needle where it is built for this torch; most shapes are bound by memory."""
    convs = [(64, 64, 64, 56, 1), (64, 64, 256, 56, 1), (64, 64, 64, 56, 3), (1, 64, 64, 56, 3)]
    linears = [(1 << 20, 64, 64), (65536, 64, 64), (131072, 256, 256), (16384, 256, 256), (4096, 1024, 1024)]
    shapes = [
        (f"conv-bn-relu {b} x {c}-{o} @{s}, {k}x{k}", partial(conv_bn_relu, b, c, o, s, k)) for b, c, o, s, k in convs
    ]
    shapes += [(f"linear-relu {m} x {k}-{n}", partial(linear_relu, m, k, n)) for m, k, n in linears]
    layers = [Row(title, build, precision) for precision in ("float32", "tf32") for title, build in shapes]
    return [*layers, Row("maps 4096 x 4096", partial(maps, 4096, 4096), "float32")]


class Training(torch.nn.Module):
    """A model and its loss: what a training step with SGD computes, from inputs and labels."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model.train()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.model(x), y)


def training(build: Callable[[], tuple[Any, tuple]], labels: tuple[int, ...], classes: int) -> tuple[Any, tuple]:
    model, inputs = build()
    return Training(model), (*inputs, torch.randint(classes, labels))


def training_rows() -> list[Row]:
    """A step each: the loss, its gradients, the update."""
    resnet, unet = partial(image_model, "resnet50", 32, 224), partial(image_model, "unet", 4, 256)
    shapes = [
        ("ResNet-50 @224, training step of 32", partial(training, resnet, (32,), 1000)),
        ("UNet 31 M @256, training step of 4", partial(training, unet, (4, 256, 256), 2)),
        (
            "BERT-base S=128, training step of 32",
            partial(training, partial(encoder, 32, 128, BERT_BASE), (32, 768), 128),
        ),
        ("MLP 784-1024-1024-10, training step of 4096", partial(training, partial(mlp, 4096), (4096,), 10)),
    ]
    return [Row(title, build, precision) for precision in ("tf32", "float32") for title, build in shapes]


def small_rows() -> list[Row]:
    """One of each kind, for the emulation."""
    rows = [
        Row("conv-bn-relu 2 x 3-4 @6, 3x3", partial(conv_bn_relu, 2, 3, 4, 6, 3), "float32"),
        Row("linear-relu 5 x 8-4", partial(linear_relu, 5, 8, 4), "float32"),
        Row("maps 5 x 8", partial(maps, 5, 8), "float32"),
    ]
    rows.append(Row("UNet @16, batch 1", partial(image_model, "unet", 1, 16, base=2), "float32"))
    step = partial(training, partial(encoder, 2, 6, SMALL), (2, 16), 6)
    rows.append(Row("encoder S=6, training step of 2", step, "float32"))
    return rows + [Row("encoder S=6, batch 2", partial(encoder, 2, 6, SMALL), p) for p in PRECISIONS]


UNSEEN = Path(__file__).parent / "zoo" / "gpu_models.txt"


def timm_model(name: str) -> tuple[Any, tuple]:
    import timm

    model = timm.create_model(name, pretrained=False).eval()
    return model, (torch.randn(8, *model.default_cfg["input_size"]),)


def timm_rows() -> list[Row]:
    """Models that nothing here was tuned on, where timm is; measured when they are asked for."""
    names = UNSEEN.read_text().split()
    return [Row(f"timm {name}, batch 8", partial(timm_model, name), p) for p in ("tf32", "float32") for name in names]


def rows_of(device: str, words: list[str]) -> list[Row]:
    """Those whose title and precision hold one of the words; all but timm's without words."""
    rows = small_rows() if device == "emulation" else model_rows() + op_rows() + training_rows()
    rows += timm_rows() if any(w.startswith("timm") for w in words) and device != "emulation" else []
    return [r for r in rows if not words or any(w in f"{r.title}, {r.precision}" for w in words)]

"""Two converted models that train, with their curves: `python profiling/training_curves.py [--json FILE] [--picture FILE]`.

A small convolutional network on scikit-learn's digits (1,797 pictures of 8 x 8, a fifth kept for measuring), and a UNet that
segments made shapes: bright discs and squares on a dark, noisy ground. Both are torch modules, converted, trained by
`needle.compile_step` and measured by `needle.compile` on what training never saw.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import needle as ndl
import torch2needle

SHAPES = ("background", "disc", "square")


def digits_model() -> Any:
    from torch import nn

    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Dropout(0.2), nn.Linear(32 * 16, 10)),
    )


def batches(x: np.ndarray, y: np.ndarray, size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    order = np.random.permutation(len(x))
    for i in range(0, len(x), size):
        yield x[order[i : i + size]], y[order[i : i + size]]


def train_digits(epochs: int = 8, seed: int = 0) -> dict[str, list[float]]:
    """Loss of every step, and accuracy after every epoch."""
    import torch
    from sklearn.datasets import load_digits

    torch.manual_seed(seed)
    np.random.seed(seed)
    data = load_digits()
    x, y = (data.images[:, None] / 16).astype("float32"), data.target.astype("int64")
    order = np.random.permutation(len(x))
    x, y, kept = x[order], y[order], len(x) // 5
    net = torch2needle.convert(digits_model()).train()
    optimizer = ndl.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=0.01)
    step = ndl.compile_step(net, ndl.ops.cross_entropy, optimizer, (x[:64], y[:64]))
    found: dict[str, list[float]] = {"loss": [], "accuracy": []}
    for epoch in range(epochs):
        optimizer.lr = 3e-3 * (1 - epoch / epochs)
        found["loss"] += [float(step(*batch)) for batch in batches(x[kept:], y[kept:], 64)]
        net.eval()
        right = ndl.compile(net, x[:kept])(x[:kept]).argmax(1) == y[:kept]
        net.train()
        found["accuracy"].append(float(right.mean()))
    return found


def draw_shapes(count: int, size: int, draw: np.random.RandomState) -> tuple[np.ndarray, np.ndarray]:
    """Pictures (count, 3, size, size) and the class of every pixel: two bright shapes on a dark ground, with noise."""
    rows, columns = np.mgrid[:size, :size]
    labels = np.zeros((count, size, size), "int64")
    colours = draw.uniform(0, 0.4, (count, len(SHAPES), 3))
    colours[:, 1:] += 0.6
    for n in range(count):
        for kind in draw.randint(1, 3, 2):
            y, x, radius = draw.uniform(0, size, 2), draw.uniform(0, size), draw.uniform(size / 8, size / 4)
            far = np.hypot(rows - y[0], columns - x) if kind == 1 else np.maximum(abs(rows - y[0]), abs(columns - x))
            labels[n][far <= radius] = kind
    x = colours[np.arange(count)[:, None, None], labels].transpose(0, 3, 1, 2) + 0.1 * draw.randn(count, 3, size, size)
    return x.astype("float32"), labels


def overlap(found: np.ndarray, truth: np.ndarray) -> float:
    """Intersection over union, mean over the classes."""
    pairs = [((found == c) & (truth == c), (found == c) | (truth == c)) for c in range(len(SHAPES))]
    return float(np.mean([both.sum() / max(either.sum(), 1) for both, either in pairs]))


def train_shapes(steps: int = 160, size: int = 48, seed: int = 0) -> dict[str, list[float]]:
    """Loss of every step, and the overlap on 16 other pictures after every 20."""
    import torch

    from torch2needle.models import unet

    torch.manual_seed(seed)
    np.random.seed(seed)
    draw = np.random.RandomState(seed)
    net = torch2needle.convert(unet(n_classes=len(SHAPES), base=8)).train()
    optimizer = ndl.optim.Adam(net.parameters(), lr=4e-3)
    x, y = draw_shapes(8, size, draw)
    step = ndl.compile_step(net, ndl.ops.cross_entropy, optimizer, (x, y), clip_grad_norm=1.0)
    others, truth = draw_shapes(16, size, np.random.RandomState(seed + 1))
    found: dict[str, list[float]] = {"loss": [], "overlap": []}
    for i in range(steps):
        optimizer.lr = 4e-3 * (1 - i / steps)
        found["loss"].append(float(step(*draw_shapes(8, size, draw))))
        if i % 20 == 19:
            net.eval()
            found["overlap"].append(overlap(ndl.compile(net, others)(others).argmax(1), truth))
            net.train()
    return found


def picture(results: dict[str, dict[str, list[float]]], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(results), figsize=(9, 3.2), layout="constrained")
    for axis, (title, curves) in zip(axes, results.items(), strict=True):
        loss, (name, measured) = curves["loss"], list(curves.items())[1]
        axis.plot(loss, color="tab:blue", linewidth=0.8)
        axis.set(xlabel="step", ylabel="loss", yscale="log", title=f"{title}: {name} {measured[-1]:.3f}")
        beside = axis.twinx()
        places = [len(loss) * (i + 1) / len(measured) for i in range(len(measured))]
        beside.plot(places, measured, "o-", color="tab:orange", markersize=3)
        beside.set(ylabel=name, ylim=(0, 1.02))
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--picture", metavar="FILE")
    args = parser.parse_args()
    results = {"digits": train_digits(), "UNet on shapes": train_shapes()}
    for title, curves in results.items():
        name, measured = list(curves.items())[1]
        print(f"{title}: loss {curves['loss'][0]:.3f} to {curves['loss'][-1]:.4f}, {name} {measured[-1]:.4f}")
    if args.json:
        Path(args.json).write_text(json.dumps(results) + "\n")
    if args.picture:
        picture(results, args.picture)


if __name__ == "__main__":
    main()

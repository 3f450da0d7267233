"""Training over several epochs. Each function begins with `np.random.seed(4)` and takes the same options of `fit`."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np

from needle import nn, optim
from needle.backend_ndarray import Device
from needle.data import DataLoader, MNISTDataset, NDArrayDataset
from needle.data.datasets import mnist_files

from .checkpoint import load_checkpoint, save_checkpoint
from .loops import SEED, epoch, epoch_general_cifar10, epoch_general_ptb

Pair = tuple[float, float]


def fit(
    run: Callable[[], Pair],
    model: nn.Module,
    opt: optim.Optimizer,
    epochs: int,
    *,
    checkpoint: str | os.PathLike | None = None,
    resume: bool = False,
    schedule: Callable[[optim.Optimizer], optim.Schedule] | None = None,
    report: Callable[[int, Pair], None] | None = None,
) -> Pair:
    """Call `run` for every epoch and return what the last one gave.

    checkpoint: a file written after every epoch. resume: begin where that file ends. schedule: makes a schedule for the
    optimizer, stepped every epoch, by the loss where it follows a measure. report: called with the number of epochs done and
    the results of the last.
    """
    if epochs < 1:
        raise ValueError(f"[training] epochs expects at least 1, got {epochs}.")
    if resume and checkpoint is None:
        raise ValueError("[training] resume expects checkpoint=PATH, got None.")
    rates = schedule(opt) if schedule is not None else None
    done, results = 0, (0.0, 0.0)
    if resume and checkpoint is not None:
        done, saved = load_checkpoint(checkpoint, model, opt, rates)
        results = (float(saved[0]), float(saved[1]))
    for number in range(done, epochs):
        results = run()
        if isinstance(rates, optim.ReduceLROnPlateau):
            rates.step(results[1])
        elif rates is not None:
            rates.step()
        if checkpoint is not None:
            save_checkpoint(checkpoint, model, opt, number + 1, results, rates)
        if report is not None:
            report(number + 1, results)
    return results


def train_mnist(
    batch_size: int = 100,
    epochs: int = 10,
    optimizer: Callable[..., optim.Optimizer] = optim.Adam,
    lr: float = 0.001,
    weight_decay: float = 0.001,
    hidden_dim: int = 100,
    data_dir: str | os.PathLike = "data",
    *,
    split: int | None = None,
    workers: int = 0,
    device: Device | None = None,
    **options: Any,
) -> tuple[float, float, float, float]:
    """Train MLPResNet on a folder with MNIST's four files: (training error, training loss, test error, test loss) of the end.

    split: train on the first `split` images of the t10k files and test on the rest, for folders without the training files.
    Other options: see `fit`.
    """
    from needle.models import MLPResNet

    np.random.seed(SEED)
    test: Any = MNISTDataset(*mnist_files(data_dir, "t10k"))
    train: Any
    if split is None:
        train = MNISTDataset(*mnist_files(data_dir, "train"))
    elif not 0 < split < len(test):
        raise ValueError(f"[train_mnist] split expects 1 to {len(test) - 1}, got {split}.")
    else:
        train, test = NDArrayDataset(*test[:split]), NDArrayDataset(*test[split:])
    train_loader = DataLoader(train, batch_size, shuffle=True, workers=workers, device=device)
    test_loader = DataLoader(test, batch_size, workers=workers, device=device)
    model = MLPResNet(train[0][0].size, hidden_dim, device=device)
    opt = optimizer(model.parameters(), lr=lr, weight_decay=weight_decay)
    error, loss = fit(lambda: epoch(train_loader, model, opt), model, opt, epochs, **options)
    return (error, loss, *epoch(test_loader, model))


def train_cifar10(
    model: nn.Module,
    dataloader: DataLoader,
    n_epochs: int = 1,
    optimizer: Callable[..., optim.Optimizer] = optim.Adam,
    lr: float = 0.001,
    weight_decay: float = 0.001,
    loss_fn: Any = nn.SoftmaxLoss,
    **options: Any,
) -> Pair:
    """Train a classifier: (accuracy, loss) over the last epoch. Options: see `fit`."""
    np.random.seed(SEED)
    opt = optimizer(model.parameters(), lr=lr, weight_decay=weight_decay)
    return fit(lambda: epoch_general_cifar10(dataloader, model, loss_fn, opt), model, opt, n_epochs, **options)


def train_ptb(
    model: nn.Module,
    data: np.ndarray,
    seq_len: int = 40,
    n_epochs: int = 1,
    optimizer: Callable[..., optim.Optimizer] = optim.SGD,
    lr: float = 4.0,
    weight_decay: float = 0.0,
    loss_fn: Any = nn.SoftmaxLoss,
    clip: float | None = None,
    device: Device | None = None,
    dtype: str = "float32",
    **options: Any,
) -> Pair:
    """Train a language model on `batchify`'s array: (accuracy, loss) over the tokens of the last epoch. Options: see `fit`."""
    np.random.seed(SEED)
    opt = optimizer(model.parameters(), lr=lr, weight_decay=weight_decay)

    def run() -> Pair:
        return epoch_general_ptb(data, model, seq_len, loss_fn, opt, clip, device, dtype)

    return fit(run, model, opt, n_epochs, **options)

"""Logistic regression and a network of three layers on digits, every operation a TVM kernel.

python -m needle.course.tvm.mnist -l -m logreg|mlp|all [--data FOLDER]
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import needle as ndl
from needle import nn, ops, optim
from needle.autograd import Tensor
from needle.course.simple_ml import parse_mnist
from needle.data.datasets import mnist_files
from needle.training.command import positive, positive_float
from needle.tvm.command import exit_code, machine, write_json
from needle.tvm.eval import measure

from .executor import Executor, gradients, sgd_update, softmax_cross_entropy, variables

HIDDEN = (256, 100)
SHARE = 0.8  # of the samples to learn from, where training and test files are one


class Digits(NamedTuple):
    """Images (N, features) float32 in [0, 1] and class numbers (N,)."""

    train: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]


def read_digits(folder: str | None) -> Digits:
    """MNIST's files, gzip or plain; without the training files, the first 80 % of the t10k ones against the rest.

    Without a folder: scikit-learn's 1,797 digits, shuffled once and divided the same way.
    """
    if folder is None:
        try:
            from sklearn.datasets import load_digits
        except ImportError as e:
            raise ValueError(
                f"[mnist] scikit-learn's digits need `pip install '.[report]'` in a checkout, got: {e}."
            ) from e
        x, y = load_digits(return_X_y=True)
        order = np.random.RandomState(0).permutation(len(x))  # its order is by writers, whose hands differ
        return divided((x / 16).astype("float32")[order], y[order])
    test = parse_mnist(*mnist_files(folder, "t10k"))
    try:
        return Digits(parse_mnist(*mnist_files(folder, "train")), test)
    except FileNotFoundError:
        return divided(*test)


def divided(x: np.ndarray, y: np.ndarray) -> Digits:
    n = int(len(x) * SHARE)
    return Digits((x[:n], y[:n]), (x[n:], y[n:]))


class Classifier:
    """Linear layers with ReLU between them; its training step and its logits are executors over the same kernels."""

    def __init__(self, sizes: Sequence[int], learning_rate: float, *, scheduled: bool = True) -> None:
        random = np.random.RandomState(0)
        names = [f"{kind}{i}" for i in range(1, len(sizes)) for kind in ("W", "b")]
        x, labels, *self.weights = variables("X", "labels", *names)
        self.x, self.labels = x, labels
        self.values = []
        for n, m in itertools.pairwise(sizes):
            scale = np.sqrt(2 / n) if len(sizes) > 2 else 0.0
            self.values += [(random.randn(n, m) * scale).astype("float32"), np.zeros(m, "float32")]
        for weight, bias in zip(self.weights[::2], self.weights[1::2], strict=True):
            x = (x if weight is self.weights[0] else ops.relu(x)) @ weight + bias
        loss = softmax_cross_entropy(x, labels)
        found = gradients(loss, self.weights)
        updates = [sgd_update(w, g, learning_rate) for w, g in zip(self.weights, found, strict=True)]
        self.step = Executor([loss, *updates], scheduled=scheduled)
        self.logits = Executor([x], scheduled=scheduled)

    def epoch(self, x: np.ndarray, y: np.ndarray, batch: int) -> float:
        """Mean loss of one pass in whole batches, in the order of the samples."""
        rows, losses = np.eye(int(y.max()) + 1, dtype="float32")[y], []
        for start in range(0, len(x) - batch + 1, batch):
            part = slice(start, start + batch)
            feed = {self.x: x[part], self.labels: rows[part], **dict(zip(self.weights, self.values, strict=True))}
            loss, *self.values = self.step.run(feed)
            losses.append(loss.numpy()[0])
        return float(np.mean(losses))

    def accuracy(self, x: np.ndarray, y: np.ndarray) -> float:
        (logits,) = self.logits.run({self.x: x, **dict(zip(self.weights, self.values, strict=True))}, True)
        return float((logits.argmax(1) == y).mean())


MODELS: dict[str, Callable[[int, int], list[int]]] = {
    "logreg": lambda features, classes: [features, classes],
    "mlp": lambda features, classes: [features, *HIDDEN, classes],
}


def train(name: str, digits: Digits, args: argparse.Namespace) -> dict[str, Any]:
    """Print the epochs of a model and its test accuracy; the result has that and the seconds of an epoch."""
    x, y = digits.train
    sizes = MODELS[name](x.shape[1], int(y.max()) + 1)
    batch = min(args.batch_size, len(x))
    model = Classifier(sizes, args.lr)
    print(f"{name} {'-'.join(map(str, sizes))}: {len(x)} digits to learn, {len(digits.test[0])} to test, batch {batch}")
    model.epoch(x[:batch], y[:batch], batch)  # compiles the kernels
    times = []
    for number in range(1, args.epochs + 1):
        start = time.perf_counter()
        loss = model.epoch(x, y, batch)
        times.append(time.perf_counter() - start)
        print(f"epoch {number}/{args.epochs}: {f'loss {loss:.4f}, ' if args.loss else ''}{times[-1]:.3f} s", flush=True)
    accuracy, seconds = model.accuracy(*digits.test), float(np.median(times))
    print(f"{name}: test accuracy {accuracy:.4f}, {seconds:.3f} s per epoch", flush=True)
    result: dict[str, Any] = {"sizes": sizes, "learned": len(x), "tested": len(digits.test[0]), "batch": batch}
    result |= {"epochs": args.epochs, "accuracy": accuracy, "seconds": seconds}
    if args.compare:
        result["compared"] = compare(sizes, digits, args, batch)
    return result


def needle_epochs(
    sizes: Sequence[int], learning_rate: float
) -> dict[str, Callable[[np.ndarray, np.ndarray, int], Any]]:
    """The same network in needle: an epoch as `Classifier.epoch` runs it, eagerly; and a pass of the compiled network."""
    layers: list[nn.Module] = []
    for n, m in itertools.pairwise(sizes):
        layers += [nn.Linear(n, m), nn.ReLU()]
    model = nn.Sequential(*layers[:-1])
    rule, loss_of = optim.SGD(model.parameters(), lr=learning_rate), nn.SoftmaxLoss()

    def epoch(x: np.ndarray, y: np.ndarray, batch: int) -> None:
        for start in range(0, len(x) - batch + 1, batch):
            part = slice(start, start + batch)
            loss = loss_of(model(Tensor(x[part], requires_grad=False)), Tensor(y[part], requires_grad=False))
            rule.reset_grad()
            loss.backward()
            rule.step()

    def forward(x: np.ndarray, y: np.ndarray, batch: int) -> None:
        plan = ndl.compile(model, (x[:batch],))
        for start in range(0, len(x) - batch + 1, batch):
            plan(x[start : start + batch])

    return {"needle eager": epoch, "needle compiled, forward only": forward}


def compare(sizes: Sequence[int], digits: Digits, args: argparse.Namespace, batch: int) -> dict[str, Any]:
    """Seconds per epoch, medians of alternating ones, with scheduled products, TVM's default ones, and in needle.

    A compiled network of needle has no gradients: its number is a pass forward over the same digits, compilation included.
    """
    x, y = digits.train
    epochs: dict[str, Callable] = {
        **{kind: Classifier(sizes, args.lr, scheduled=kind == "scheduled").epoch for kind in ("scheduled", "default")},
        **needle_epochs(sizes, args.lr),
    }
    times = measure({kind: functools.partial(epoch, x, y, batch) for kind, epoch in epochs.items()}, args.rounds)
    seconds = {kind: float(np.median(t)) for kind, t in times.items()}
    ratio = seconds["default"] / seconds["scheduled"]
    print("seconds per epoch: " + ", ".join(f"{kind} {s:.3f}" for kind, s in seconds.items()))
    print(f"with scheduled products {ratio:.1f} times as fast as with default ones")
    return {"seconds": seconds, "default_over_scheduled": ratio}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m needle.course.tvm.mnist", description=__doc__)
    add = parser.add_argument
    add("-m", "--model", choices=(*MODELS, "all"), default="all", help="which model to train")
    add("-l", "--loss", action="store_true", help="print the loss of every epoch")
    add("--data", metavar="FOLDER", help="MNIST's IDX files (default: scikit-learn's digits)")
    add("--epochs", type=positive, default=15, help="passes over the digits (default 15)")
    add("--batch-size", type=positive, default=50, help="digits in a step (default 50)")
    add("--lr", type=positive_float, default=0.1, help="learning rate (default 0.1)")
    add("--compare", action="store_true", help="also time an epoch with TVM's default loops for matrix products")
    add("--rounds", type=positive, default=3, help="epochs of each kind for --compare (default 3)")
    add("--json", type=Path, metavar="FILE", help="write the numbers to this file")
    args = parser.parse_args(argv)

    def run() -> None:
        digits = read_digits(args.data)
        found = {name: train(name, digits, args) for name in (MODELS if args.model == "all" else (args.model,))}
        if args.json:
            write_json(args.json, {**machine(), **found})

    return exit_code(run)


if __name__ == "__main__":
    sys.exit(main())

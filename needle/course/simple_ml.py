"""A network of two layers by hand."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from needle import ops
from needle.autograd import Tensor
from needle.data.dataset import scaled
from needle.data.datasets import read_mnist


def parse_mnist(image_filename: str | os.PathLike, label_filename: str | os.PathLike) -> tuple[np.ndarray, np.ndarray]:
    """Images (N, 784) as float32 in [0, 1] and labels (N,) as uint8, from IDX files, gzip or plain."""
    x, y = read_mnist(image_filename, label_filename)
    return scaled(x.reshape(len(x), -1)), y


def softmax_loss(Z: Tensor, y_one_hot: Tensor) -> Tensor:
    """Mean cross entropy of logits (N, C) and labels as rows of the identity (N, C)."""
    if Z.shape != y_one_hot.shape:
        raise ValueError(f"[softmax_loss] y_one_hot expects shape {Z.shape}, got {y_one_hot.shape}.")
    losses = ops.logsumexp(Z, axes=(1,)) - ops.summation(Z * y_one_hot, axes=(1,))
    return ops.summation(losses) / Z.shape[0]


def one_hot(y: Any, classes: int, device: Any) -> Tensor:
    numbers = np.asarray(y)
    if ((numbers < 0) | (numbers >= classes) | (numbers != np.floor(numbers))).any():
        raise IndexError(
            f"[softmax_loss] labels expect whole numbers from 0 to {classes - 1}, got {numbers.max()} at most."
        )
    rows = np.eye(classes, dtype="float32")[numbers.astype("int64")]
    return Tensor(rows, device=device, requires_grad=False)


def nn_epoch(
    X: np.ndarray, y: np.ndarray, W1: Tensor, W2: Tensor, lr: float = 0.1, batch: int = 100
) -> tuple[Tensor, Tensor]:
    """One pass of gradient descent over relu(X W1) W2, in the order of the samples; the new (W1, W2), the given ones stay.

    X (N, d) float32, y (N,) integers, W1 (d, hidden), W2 (hidden, classes).
    """
    for start in range(0, len(X), batch):
        x = Tensor(X[start : start + batch], device=W1.device, dtype=W1.dtype, requires_grad=False)
        loss = softmax_loss(ops.relu(x @ W1) @ W2, one_hot(y[start : start + batch], W2.shape[1], W1.device))
        loss.backward()
        W1, W2 = (Tensor(w.detach() - g.detach() * lr) for w, g in ((W1, gradient(W1)), (W2, gradient(W2))))
    return W1, W2


def gradient(w: Tensor) -> Tensor:
    if w.grad is None:
        raise ValueError("[nn_epoch] W1 and W2 expect requires_grad=True, got False.")
    return w.grad


def loss_err(h: Tensor, y: np.ndarray) -> tuple[Any, Any]:
    """Mean cross entropy of logits (N, C) and the share of samples whose largest logit is not the label's."""
    loss = softmax_loss(h, one_hot(y, h.shape[-1], h.device))
    return loss.numpy(), np.mean(h.numpy().argmax(axis=1) != np.asarray(y))

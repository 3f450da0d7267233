"""The course's `simple_ml`."""

from needle.training import (
    epoch_general_cifar10,
    epoch_general_ptb,
    evaluate_cifar10,
    evaluate_ptb,
    loss_err,
    nn_epoch,
    parse_mnist,
    softmax_loss,
    train_cifar10,
    train_ptb,
)

__all__ = [
    "epoch_general_cifar10",
    "epoch_general_ptb",
    "evaluate_cifar10",
    "evaluate_ptb",
    "loss_err",
    "nn_epoch",
    "parse_mnist",
    "softmax_loss",
    "train_cifar10",
    "train_ptb",
]

"""Training loops of the course, checkpoints, early stopping, and a command line over them."""

from needle.course.simple_ml import loss_err, nn_epoch, parse_mnist, softmax_loss
from needle.exports import public

from .checkpoint import load_checkpoint, save_checkpoint
from .loops import (
    epoch,
    epoch_general_cifar10,
    epoch_general_ptb,
    evaluate_cifar10,
    evaluate_ptb,
)
from .stopping import EarlyStopping
from .train import train_cifar10, train_mnist, train_ptb

__all__ = public(globals())

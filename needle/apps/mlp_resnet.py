"""The course's `mlp_resnet`."""

from needle.models import MLPResNet, ResidualBlock
from needle.training import epoch, train_mnist

__all__ = ["MLPResNet", "ResidualBlock", "epoch", "train_mnist"]

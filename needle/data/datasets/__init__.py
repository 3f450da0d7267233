"""The datasets."""

from .arrays import NDArrayDataset
from .cifar10 import CIFAR10Dataset
from .mnist import MNISTDataset, read_mnist

__all__ = ["CIFAR10Dataset", "MNISTDataset", "NDArrayDataset", "read_mnist"]

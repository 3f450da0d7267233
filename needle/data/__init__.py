"""Datasets, transforms, loaders and text corpora."""

from needle.exports import public

from .corpus import Corpus, Dictionary, batchify, get_batch
from .dataset import Dataset, IndexedDataset
from .datasets import CIFAR10Dataset, MNISTDataset, NDArrayDataset
from .loader import DataLoader
from .transforms import RandomCrop, RandomFlipHorizontal, Transform

__all__ = public(globals())

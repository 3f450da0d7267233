"""Datasets, transforms, loaders and text corpora."""

from .corpus import Corpus, Dictionary, batchify, get_batch
from .dataset import Dataset, IndexedDataset
from .datasets import CIFAR10Dataset, MNISTDataset, NDArrayDataset
from .loader import DataLoader
from .transforms import RandomCrop, RandomFlipHorizontal, Transform

__all__ = [n for n in dir() if not n.startswith("_")]

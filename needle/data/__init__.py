"""Datasets, transforms, loaders and text corpora."""

from .corpus import Corpus, Dictionary, batchify, get_batch
from .dataset import Dataset, IndexedDataset
from .datasets import CIFAR10Dataset, MNISTDataset, NDArrayDataset
from .loader import DataLoader
from .transforms import RandomCrop, RandomFlipHorizontal, Transform

__all__ = [
    "CIFAR10Dataset",
    "Corpus",
    "DataLoader",
    "Dataset",
    "Dictionary",
    "IndexedDataset",
    "MNISTDataset",
    "NDArrayDataset",
    "RandomCrop",
    "RandomFlipHorizontal",
    "Transform",
    "batchify",
    "get_batch",
]

"""Datasets, transforms, samplers, loaders and text corpora."""

from needle.exports import public

from .collate import default_collate
from .corpus import Corpus, Dictionary, batchify, get_batch
from .dataset import Dataset, IndexedDataset
from .datasets import CIFAR10Dataset, MNISTDataset, NDArrayDataset, TensorDataset
from .folder import ImageFolder
from .loader import DataLoader
from .samplers import (
    BatchSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from .subsets import ConcatDataset, Subset, random_split
from .transforms import CenterCrop, Normalize, RandomCrop, RandomFlipHorizontal, Resize, Transform

__all__ = public(globals())

"""CIFAR-10 from its python batches."""

from __future__ import annotations

import functools
import os
from typing import Any

import numpy as np

from needle.data.dataset import IndexedDataset, Transforms, scaled
from needle.data.pickles import read_pickle

SHAPE = (3, 32, 32)
CLASSES = 10


def read_batch(path: str) -> tuple[np.ndarray, np.ndarray]:
    """Images (N, 3, 32, 32) and labels (N,) of one file, bytes."""
    content = read_pickle(path)
    data, labels = content.get(b"data"), content.get(b"labels")
    size = int(np.prod(SHAPE))
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != size:
        got = f"{data.dtype} {data.shape}" if isinstance(data, np.ndarray) else type(data).__name__
        raise ValueError(f"[CIFAR10Dataset] data of {path} expects bytes of shape (N, {size}), got {got}.")
    labels = labels.tolist() if isinstance(labels, np.ndarray) else labels
    if not isinstance(labels, list) or len(labels) != len(data):
        got = f"{len(labels)}" if isinstance(labels, list) else type(labels).__name__
        raise ValueError(f"[CIFAR10Dataset] labels of {path} expect a list of {len(data)}, got {got}.")
    if not all(type(label) is int and 0 <= label < CLASSES for label in labels):
        raise ValueError(f"[CIFAR10Dataset] labels of {path} expect numbers from 0 to {CLASSES - 1}, got others.")
    return data.reshape(-1, *SHAPE), np.asarray(labels, dtype="uint8")


class CIFAR10Dataset(IndexedDataset):
    """Images (3, 32, 32), float32 in [0, 1], and labels, from the folder cifar-10-batches-py. Transforms see 32 x 32 x 3.

    p: the course's argument; nothing reads it, since `RandomFlipHorizontal` has its own.
    """

    def __init__(
        self, base_folder: str | os.PathLike, train: bool, p: float = 0.5, transforms: Transforms | None = None
    ) -> None:
        super().__init__(transforms)
        self.p = p
        names = [f"data_batch_{i}" for i in range(1, 6)] if train else ["test_batch"]
        parts = [read_batch(os.path.join(base_folder, n)) for n in names]
        self.pixels = np.concatenate([x for x, _ in parts])
        self.y = np.concatenate([y for _, y in parts])

    @functools.cached_property
    def X(self) -> np.ndarray:
        """All images (N, 3, 32, 32) as float32, four times the memory of the bytes that are kept; made when first asked for."""
        return scaled(self.pixels)

    def __len__(self) -> int:
        return len(self.y)

    def read(self, index: Any) -> tuple[Any, ...]:
        return scaled(self.pixels[index]), self.y[index]

    def transform(self, x: Any, y: Any) -> tuple[Any, ...]:  # type: ignore[override]
        if not self.transforms:
            return x, y
        images = np.moveaxis(x.reshape(-1, *SHAPE), 1, -1)
        changed = np.moveaxis(self.apply_to_images(images), -1, 1)
        return changed.reshape(*x.shape[:-3], *changed.shape[1:]), y

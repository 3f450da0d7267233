"""What datasets are: indexable, with a length, and with transforms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Transforms = Sequence[Callable[[np.ndarray], np.ndarray]]


class Dataset:
    """Base. A subclass defines `__getitem__` (an int gives one sample, a tuple of arrays) and `__len__`."""

    indexed = False  # takes many numbers at once, and says how to read
    keeps_integers = False  # in batches; else they become float32, as all of the course's tensors

    def __init__(self, transforms: Transforms | None = None) -> None:
        self.transforms = transforms

    def __getitem__(self, index: Any) -> Any:
        raise NotImplementedError(f"[{type(self).__name__}] defines no __getitem__.")

    def __len__(self) -> int:
        raise NotImplementedError(f"[{type(self).__name__}] defines no __len__.")

    def apply_transforms(self, x: np.ndarray) -> np.ndarray:
        for transform in self.transforms or ():
            x = transform(x)
        return x

    def apply_to_images(self, images: np.ndarray) -> np.ndarray:
        """The transforms on every image of (N, H, W, C), in order."""
        return np.stack([self.apply_transforms(image) for image in images]) if len(images) else images


class IndexedDataset(Dataset):
    """A dataset that takes ints, slices and arrays of ints.

    `read(index)` gives arrays, draws nothing and may run in a prefetch thread; `transform(*arrays)` runs in the main thread.
    """

    indexed = True

    def read(self, index: Any) -> tuple[Any, ...]:
        raise NotImplementedError(f"[{type(self).__name__}] defines no read.")

    def transform(self, *arrays: Any) -> tuple[Any, ...]:
        return arrays

    def __getitem__(self, index: Any) -> tuple[Any, ...]:
        return self.transform(*self.read(index))


def scaled(pixels: np.ndarray) -> np.ndarray:
    """Bytes as float32 in [0, 1]."""
    return pixels.astype("float32") / np.float32(255)

"""MNIST and its relatives, from IDX files."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from needle.data.dataset import IndexedDataset, Transforms, scaled
from needle.data.idx import read_idx


def read_mnist(images: str | os.PathLike, labels: str | os.PathLike) -> tuple[np.ndarray, np.ndarray]:
    """(N, H, W) and (N,) bytes of a file of images and one of labels."""
    x, y = read_idx(images, 3), read_idx(labels, 1)
    if len(x) != len(y):
        raise ValueError(f"[MNIST] {os.fspath(labels)} expects {len(x)} labels, one per image, got {len(y)}.")
    if x.size == 0:
        raise ValueError(f"[MNIST] {os.fspath(images)} expects images of at least one pixel, got shape {x.shape}.")
    return x, y


class MNISTDataset(IndexedDataset):
    """Images (H*W,), float32 in [0, 1], and labels, bytes, from IDX files, gzip or plain.

    The index is an int, a slice or an array of ints. Transforms see H x W x 1.
    """

    def __init__(
        self, image_filename: str | os.PathLike, label_filename: str | os.PathLike, transforms: Transforms | None = None
    ) -> None:
        super().__init__(transforms)
        pixels, self.labels = read_mnist(image_filename, label_filename)
        self.image_shape = (*pixels.shape[1:], 1)
        self.pixels = pixels.reshape(len(pixels), -1)

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: Any) -> tuple[Any, ...]:
        return scaled(self.pixels[index]), self.labels[index]

    def transform(self, x: Any, y: Any) -> tuple[Any, ...]:  # type: ignore[override]
        if not self.transforms:
            return x, y
        changed = self.apply_to_images(x.reshape(-1, *self.image_shape))
        return changed.reshape(*x.shape[:-1], -1), y

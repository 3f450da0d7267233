"""The datasets: arrays in memory, MNIST and its relatives from IDX files, CIFAR-10 from its python batches."""

from __future__ import annotations

import functools
import math
import os
from typing import Any

import numpy as np

from needle.autograd import Tensor

from .dataset import IndexedDataset, Transforms, scaled
from .idx import read_idx
from .pickles import read_pickle

CIFAR10_SHAPE = (3, 32, 32)
CIFAR10_CLASSES = 10


class NDArrayDataset(IndexedDataset):
    """Sample i is row i of each numpy array."""

    def __init__(self, *arrays: Any) -> None:
        super().__init__()
        lengths = [len(a) for a in arrays]
        if len(set(lengths)) != 1:
            raise ValueError(f"[NDArrayDataset] arrays of one length are expected, got lengths {lengths}.")
        self.arrays = arrays

    def __len__(self) -> int:
        return len(self.arrays[0])

    def read(self, index: Any) -> tuple[Any, ...]:
        return tuple(a[index] for a in self.arrays)


class TensorDataset(IndexedDataset):
    """Sample i is row i of each tensor; integers stay integers."""

    keeps_integers = True

    def __init__(self, *tensors: Any) -> None:
        super().__init__()
        lengths = [len(t.shape) and t.shape[0] for t in tensors]
        if len(set(lengths)) != 1:
            raise ValueError(f"[TensorDataset] tensors of one length are expected, got lengths {lengths}.")
        self.tensors = tensors
        self.arrays = [t.numpy() if isinstance(t, Tensor) else np.asarray(t) for t in tensors]

    def __len__(self) -> int:
        return len(self.arrays[0])

    def read(self, index: Any) -> tuple[Any, ...]:
        return tuple(a[index] for a in self.arrays)

    def __getitem__(self, index: Any) -> tuple[Any, ...]:
        places = [t.device if isinstance(t, Tensor) else None for t in self.tensors]
        rows = zip(self.read(index), places, strict=True)
        return tuple(Tensor(a, device=d, dtype=str(a.dtype), requires_grad=False) for a, d in rows)


class ImageDataset(IndexedDataset):
    """Images, kept as bytes, and labels; samples are float32 in [0, 1]. The index is an int, a slice or an array of ints."""

    def __init__(self, pixels: np.ndarray, labels: np.ndarray, transforms: Transforms | None) -> None:
        super().__init__(transforms)
        self.pixels, self.labels = pixels, labels

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: Any) -> tuple[Any, ...]:
        return scaled(self.pixels[index]), self.labels[index]

    def transform(self, x: Any, y: Any) -> tuple[Any, ...]:  # type: ignore[override]
        return (self.transformed(x) if self.transforms else x), y

    def transformed(self, x: np.ndarray) -> np.ndarray:
        """Samples, one or several, after the transforms, which see H x W x C."""
        raise NotImplementedError(f"[{type(self).__name__}] defines no transformed.")


def mnist_files(folder: str | os.PathLike, kind: str) -> tuple[str, str]:
    """The files of images and of labels in `folder`, gzip first. kind: "train" or "t10k"."""

    def find(name: str) -> str:
        candidates = [os.path.join(folder, f"{kind}-{name}-ubyte{ending}") for ending in (".gz", "")]
        return next((c for c in candidates if os.path.isfile(c)), candidates[0])

    return find("images-idx3"), find("labels-idx1")


def read_mnist(images: str | os.PathLike, labels: str | os.PathLike) -> tuple[np.ndarray, np.ndarray]:
    """(N, H, W) and (N,) bytes of a file of images and one of labels."""
    x, y = read_idx(images, 3), read_idx(labels, 1)
    if len(x) != len(y):
        raise ValueError(f"[MNIST] {os.fspath(labels)} expects {len(x)} labels, one per image, got {len(y)}.")
    if x.size == 0:
        raise ValueError(f"[MNIST] {os.fspath(images)} expects images of at least one pixel, got shape {x.shape}.")
    return x, y


class MNISTDataset(ImageDataset):
    """Images (H*W,), float32 in [0, 1], and labels, bytes, from IDX files, gzip or plain. Transforms see H x W x 1."""

    def __init__(
        self, image_filename: str | os.PathLike, label_filename: str | os.PathLike, transforms: Transforms | None = None
    ) -> None:
        pixels, labels = read_mnist(image_filename, label_filename)
        super().__init__(pixels.reshape(len(pixels), -1), labels, transforms)
        self.image_shape = (*pixels.shape[1:], 1)

    def transformed(self, x: np.ndarray) -> np.ndarray:
        return self.apply_to_images(x.reshape(-1, *self.image_shape)).reshape(*x.shape[:-1], -1)


def read_cifar10(path: str) -> tuple[np.ndarray, np.ndarray]:
    """Images (N, 3, 32, 32) and labels (N,) of one file, bytes."""
    content = read_pickle(path)
    data, labels = content.get(b"data"), content.get(b"labels")
    size = math.prod(CIFAR10_SHAPE)
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != size:
        got = f"{data.dtype} {data.shape}" if isinstance(data, np.ndarray) else type(data).__name__
        raise ValueError(f"[CIFAR10Dataset] data of {path} expects bytes of shape (N, {size}), got {got}.")
    labels = labels.tolist() if isinstance(labels, np.ndarray) else labels
    if not isinstance(labels, list) or len(labels) != len(data):
        got = f"{len(labels)}" if isinstance(labels, list) else type(labels).__name__
        raise ValueError(f"[CIFAR10Dataset] labels of {path} expect a list of {len(data)}, got {got}.")
    if not all(type(label) is int and 0 <= label < CIFAR10_CLASSES for label in labels):
        raise ValueError(
            f"[CIFAR10Dataset] labels of {path} expect numbers from 0 to {CIFAR10_CLASSES - 1}, got others."
        )
    return data.reshape(-1, *CIFAR10_SHAPE), np.asarray(labels, dtype="uint8")


class CIFAR10Dataset(ImageDataset):
    """Images (3, 32, 32), float32 in [0, 1], and labels, from the folder cifar-10-batches-py. Transforms see 32 x 32 x 3.

    p: the course's argument; nothing reads it, since `RandomFlipHorizontal` has its own.
    """

    def __init__(
        self, base_folder: str | os.PathLike, train: bool, p: float = 0.5, transforms: Transforms | None = None
    ) -> None:
        names = [f"data_batch_{i}" for i in range(1, 6)] if train else ["test_batch"]
        parts = [read_cifar10(os.path.join(base_folder, n)) for n in names]
        pixels, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        super().__init__(pixels, labels, transforms)
        self.p, self.y = p, labels

    @functools.cached_property
    def X(self) -> np.ndarray:
        """All images (N, 3, 32, 32) as float32, four times the memory of the bytes that are kept; made when first asked for."""
        return scaled(self.pixels)

    def transformed(self, x: np.ndarray) -> np.ndarray:
        images = np.moveaxis(x.reshape(-1, *CIFAR10_SHAPE), 1, -1)
        changed = np.moveaxis(self.apply_to_images(images), -1, 1)
        return changed.reshape(*x.shape[:-3], *changed.shape[1:])

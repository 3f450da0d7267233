"""Images in folders, one for each class."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import takewhile
from typing import Any

import numpy as np

from .dataset import IndexedDataset, Transforms, scaled

ENDINGS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")


def read_image(path: str | os.PathLike) -> np.ndarray:
    """H x W x 3 bytes of an image file, by Pillow."""
    try:
        from PIL import Image
    except ImportError:
        raise ImportError("[ImageFolder] expects Pillow, which reads image files, got none; install pillow.") from None
    try:
        with Image.open(path) as image:
            return np.array(image.convert("RGB"))
    except FileNotFoundError:
        raise
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as e:
        raise ValueError(f"[ImageFolder] {os.fspath(path)} is no image that can be read: {e}") from None


def find_classes(root: str | os.PathLike[str]) -> list[str]:
    """The names of the folders in `root`, in order."""
    return sorted(entry.name for entry in os.scandir(os.fspath(root)) if entry.is_dir())


class ImageFolder(IndexedDataset):
    """Images root/CLASS/.../NAME.png, (3, H, W), float32 in [0, 1], and the numbers of their classes, the order of their names.

    transforms see H x W x 3; the first ones that draw no random numbers run where files are read, in `workers` if there are any.
    A batch expects images of one size: `Resize(256)`, `CenterCrop(224)`. Labels stay integers.
    """

    keeps_integers = True

    def __init__(
        self,
        root: str | os.PathLike,
        transforms: Transforms | None = None,
        target_transform: Callable[[int], Any] | None = None,
        loader: Callable[[str], np.ndarray] = read_image,
        is_valid_file: Callable[[str], bool] | None = None,
    ) -> None:
        super().__init__(transforms)
        self.root, self.target_transform, self.loader = os.fspath(root), target_transform, loader
        self.classes = find_classes(root)
        if not self.classes:
            raise FileNotFoundError(f"[ImageFolder] {self.root} expects a folder for each class, got none.")
        self.class_to_idx = {name: i for i, name in enumerate(self.classes)}
        wanted = is_valid_file or (lambda path: path.lower().endswith(ENDINGS))
        self.samples = [(p, i) for name, i in self.class_to_idx.items() for p in self.files(name) if wanted(p)]
        self.targets = [label for _, label in self.samples]
        empty = set(range(len(self.classes))) - set(self.targets)
        if empty:
            names = ", ".join(self.classes[i] for i in sorted(empty))
            raise FileNotFoundError(f"[ImageFolder] {self.root} expects images of every class, got none of {names}.")

    def files(self, name: str) -> list[str]:
        """All files below a class's folder, in order."""
        walk = sorted(os.walk(os.path.join(self.root, name), followlinks=True))
        return [os.path.join(folder, file) for folder, _, files in walk for file in sorted(files)]

    def __len__(self) -> int:
        return len(self.samples)

    def early(self) -> int:
        """How many transforms run where files are read."""
        return len(list(takewhile(lambda t: not getattr(t, "draws", True), self.transforms or ())))

    def image(self, path: str) -> np.ndarray:
        image = scaled(self.loader(path))
        for transform in (self.transforms or ())[: self.early()]:
            image = transform(image)
        return image

    def read(self, index: Any) -> tuple[Any, ...]:
        if np.ndim(index) == 0 and not isinstance(index, slice):
            path, label = self.samples[int(index)]
            return self.image(path), label
        chosen = np.arange(len(self))[index]
        return [self.image(self.samples[i][0]) for i in chosen], [self.samples[i][1] for i in chosen]

    def transform(self, x: Any, y: Any) -> tuple[Any, ...]:  # type: ignore[override]
        target = self.target_transform or (lambda label: label)
        if not isinstance(x, list):
            return self.finished(x), target(y)
        images, labels = [self.finished(image) for image in x], np.asarray([target(label) for label in y])
        shapes = sorted({image.shape for image in images})
        if len(shapes) > 1:
            raise ValueError(f"[ImageFolder] a batch expects images of one size, got {shapes[0]} and {shapes[1]}.")
        return (np.stack(images) if images else np.zeros((0, 3, 0, 0), "float32")), labels

    def finished(self, image: np.ndarray) -> np.ndarray:
        for transform in (self.transforms or ())[self.early() :]:
            image = transform(image)
        return np.ascontiguousarray(np.moveaxis(image, -1, 0))

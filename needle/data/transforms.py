"""Random changes of images H x W x C; they draw from numpy's global legacy stream."""

from __future__ import annotations

import numpy as np


class Transform:
    """Base: a callable from image to image."""

    def __call__(self, img: np.ndarray) -> np.ndarray:
        raise NotImplementedError(f"[{type(self).__name__}] defines no __call__.")


class RandomFlipHorizontal(Transform):
    """Left and right exchanged with probability p: one draw per image, `rand() < p`."""

    def __init__(self, p: float = 0.5) -> None:
        self.p = p

    def __call__(self, img: np.ndarray) -> np.ndarray:
        return img[:, ::-1, :] if np.random.rand() < self.p else img


class RandomCrop(Transform):
    """The image moved by up to `padding` pixels each way, zeros coming in: one draw of two per image, rows then columns."""

    def __init__(self, padding: int = 3) -> None:
        self.padding = padding

    def __call__(self, img: np.ndarray) -> np.ndarray:
        down, right = np.random.randint(low=-self.padding, high=self.padding + 1, size=2)
        out = np.zeros_like(img)
        rows, columns = img.shape[:2]
        to, source = zip(overlap(down, rows), overlap(right, columns), strict=True)
        out[to] = img[source]
        return out


def overlap(shift: int, size: int) -> tuple[slice, slice]:
    """Where in a crop of `size` that begins at `shift` the image lies, and which part of the image that is."""
    return slice(max(0, -shift), max(0, size - max(0, shift))), slice(max(0, shift), max(0, size + min(0, shift)))

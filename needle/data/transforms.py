"""Changes of images H x W x C. Random ones draw from numpy's global legacy stream."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class Transform:
    """Base: a callable from image to image."""

    draws = True  # random numbers; those that draw none may run in prefetch threads

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


class Resize(Transform):
    """The image at another size, (height, width), or with its shorter side so long: bilinear, smoothed where it shrinks.

    By Pillow, whose results are torchvision's.
    """

    draws = False

    def __init__(self, size: int | Sequence[int]) -> None:
        self.size = pair("Resize", size) if isinstance(size, Sequence) else whole("Resize", size)

    def __call__(self, img: np.ndarray) -> np.ndarray:
        from PIL import Image

        height, width = self.target(*img.shape[:2])
        if (height, width) == img.shape[:2]:
            return img
        resize = Image.Resampling.BILINEAR
        planes = [Image.fromarray(np.ascontiguousarray(plane, "float32")) for plane in np.moveaxis(img, -1, 0)]
        made = np.stack([np.asarray(plane.resize((width, height), resize)) for plane in planes], axis=-1)
        return made.astype(img.dtype) if img.dtype.kind == "f" else np.rint(made).astype(img.dtype)

    def target(self, height: int, width: int) -> tuple[int, int]:
        if isinstance(self.size, tuple):
            return self.size
        short, long = sorted((height, width))
        longer = int(self.size * long / short)
        return (self.size, longer) if height <= width else (longer, self.size)


class CenterCrop(Transform):
    """The middle of the image, (height, width) or so long both ways; zeros around images that are smaller."""

    draws = False

    def __init__(self, size: int | Sequence[int]) -> None:
        self.size = pair("CenterCrop", size if isinstance(size, Sequence) else (size, size))

    def __call__(self, img: np.ndarray) -> np.ndarray:
        missing = [max(0, want - have) for want, have in zip(self.size, img.shape, strict=False)]
        if any(missing):
            img = np.pad(img, [*((m // 2, (m + 1) // 2) for m in missing), (0, 0)])
        top, left = (round((have - want) / 2) for want, have in zip(self.size, img.shape, strict=False))
        return img[top : top + self.size[0], left : left + self.size[1]]


class Normalize(Transform):
    """Each channel less its mean, over its standard deviation."""

    draws = False

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self.mean, self.std = np.asarray(mean, dtype="float32"), np.asarray(std, dtype="float32")
        if (self.std == 0).any():
            raise ValueError(f"[Normalize] std expects numbers above 0, got {std}.")

    def __call__(self, img: np.ndarray) -> np.ndarray:
        return (img - self.mean) / self.std


def whole(label: str, value: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"[{label}] size expects whole numbers of at least 1, got {value!r}.")
    return value


def pair(label: str, value: Sequence[int]) -> tuple[int, int]:
    """Height and width."""
    if len(value) != 2:
        raise ValueError(f"[{label}] size expects height and width, got {value!r}.")
    return whole(label, value[0]), whole(label, value[1])


def overlap(shift: int, size: int) -> tuple[slice, slice]:
    """Where in a crop of `size` that begins at `shift` the image lies, and which part of the image that is."""
    return slice(max(0, -shift), max(0, size - max(0, shift))), slice(max(0, shift), max(0, size + min(0, shift)))

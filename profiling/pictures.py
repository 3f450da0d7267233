"""Real pictures: seeded crops of scikit-learn's two photographs."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_sample_images

MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's pixels, as torchvision's models expect
LEAST = 0.4  # share of the largest possible crop that the smallest one has, on each side


def picture_crops(n: int, height: int, width: int, seed: int = 0) -> torch.Tensor:
    """(n, 3, height, width) floats, normalised with ImageNet's mean and deviation; the two photographs take turns.

    A crop has the proportions that are asked for, a random size and place, and is resized bilinearly.
    """
    photographs = load_sample_images().images
    rng = np.random.default_rng(seed)
    crops = []
    for i in range(n):
        picture = photographs[i % len(photographs)]
        rows, columns = picture.shape[:2]
        scale = min(rows / height, columns / width) * rng.uniform(LEAST, 1)
        h, w = max(1, int(height * scale)), max(1, int(width * scale))
        top, left = rng.integers(rows - h + 1), rng.integers(columns - w + 1)
        crop = Image.fromarray(picture[top : top + h, left : left + w])
        crops.append(np.asarray(crop.resize((width, height), Image.Resampling.BILINEAR)))
    x = torch.from_numpy(np.stack(crops)).permute(0, 3, 1, 2).float() / 255
    return ((x - torch.tensor(MEAN)[:, None, None]) / torch.tensor(DEVIATION)[:, None, None]).contiguous()


def as_pixels(x: torch.Tensor) -> np.ndarray:
    """(h, w, 3) bytes of one normalised picture (3, h, w)."""
    x = x * torch.tensor(DEVIATION)[:, None, None] + torch.tensor(MEAN)[:, None, None]
    return (x.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy()

"""Datasets made of others: parts, several after each other, random splits."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from .dataset import Dataset, IndexedDataset


class Subset(IndexedDataset):
    """Samples `indices` of a dataset, in that order."""

    def __init__(self, dataset: Any, indices: Sequence[int] | np.ndarray) -> None:
        super().__init__()
        self.dataset, self.indices = dataset, np.asarray(indices, dtype="int64")
        self.keeps_integers = getattr(dataset, "keeps_integers", False)

    @property
    def indexed(self) -> bool:  # type: ignore[override]
        return getattr(self.dataset, "indexed", False)

    def __len__(self) -> int:
        return len(self.indices)

    def read(self, index: Any) -> tuple[Any, ...]:
        return self.dataset.read(self.indices[index])

    def transform(self, *arrays: Any) -> tuple[Any, ...]:
        return self.dataset.transform(*arrays)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, list | slice | np.ndarray) and not self.indexed:
            return [self.dataset[int(i)] for i in self.indices[index]]
        chosen = self.indices[index]
        return self.dataset[int(chosen) if np.ndim(chosen) == 0 else chosen]


class ConcatDataset(Dataset):
    """One dataset after the other, sample by sample."""

    def __init__(self, datasets: Iterable[Any]) -> None:
        super().__init__()
        self.datasets = list(datasets)
        if not self.datasets:
            raise ValueError("[ConcatDataset] expects at least one dataset, got none.")
        self.cumulative_sizes = list(accumulate(len(d) for d in self.datasets))
        self.keeps_integers = all(getattr(d, "keeps_integers", False) for d in self.datasets)

    def __len__(self) -> int:
        return self.cumulative_sizes[-1]

    def __getitem__(self, index: Any) -> Any:
        i = index + len(self) if index < 0 else index
        if not 0 <= i < len(self):
            raise IndexError(f"[ConcatDataset] expects numbers below {len(self)}, got {index}.")
        number = bisect_right(self.cumulative_sizes, i)
        return self.datasets[number][int(i - (self.cumulative_sizes[number - 1] if number else 0))]


def random_split(dataset: Any, lengths: Sequence[float]) -> list[Subset]:
    """Parts of these lengths, which are whole numbers or shares of one, drawn at random; what shares leave over goes round."""
    count = len(dataset)
    sizes: list[Any] = list(lengths)
    if math.isclose(sum(sizes), 1) and sum(sizes) <= count and not all(isinstance(n, int) for n in sizes):
        if any(not 0 <= share <= 1 for share in sizes):
            raise ValueError(f"[random_split] shares expect numbers from 0 to 1, got {sizes}.")
        sizes = [math.floor(count * share) for share in sizes]
        for i in range(count - sum(sizes)):
            sizes[i % len(sizes)] += 1
    if sum(sizes) != count or any(not isinstance(n, int) or n < 0 for n in sizes):
        raise ValueError(f"[random_split] lengths expect to add up to {count}, or shares to 1, got {list(lengths)}.")
    order, ends = np.random.permutation(count), list(accumulate(sizes))
    return [Subset(dataset, order[end - n : end]) for n, end in zip(sizes, ends, strict=True)]

"""The order in which a loader takes samples. What is random comes from numpy's global legacy stream, at each `iter`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import Any

import numpy as np


def size(label: str, name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"[{label}] {name} expects a whole number of at least 1, got {value!r}.")
    return value


class Sampler:
    """Base: an iterable of sample numbers, or of lists of them, with a length."""

    def __iter__(self) -> Iterator[Any]:
        raise NotImplementedError(f"[{type(self).__name__}] defines no __iter__.")

    def __len__(self) -> int:
        raise NotImplementedError(f"[{type(self).__name__}] defines no __len__.")


class SequentialSampler(Sampler):
    """0, 1, 2, ..."""

    def __init__(self, data_source: Sized) -> None:
        self.data_source = data_source

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self.data_source)))

    def __len__(self) -> int:
        return len(self.data_source)


class RandomSampler(Sampler):
    """All numbers in random order; with replacement, each number drawn from all.

    num_samples: how many, by default as many as there are; without replacement orders follow each other.
    """

    def __init__(self, data_source: Sized, replacement: bool = False, num_samples: int | None = None) -> None:
        self.data_source, self.replacement = data_source, replacement
        self._num_samples = None if num_samples is None else size("RandomSampler", "num_samples", num_samples)

    @property
    def num_samples(self) -> int:
        return len(self.data_source) if self._num_samples is None else self._num_samples

    def __iter__(self) -> Iterator[int]:
        count, left = len(self.data_source), self.num_samples
        if left and not count:
            raise ValueError(f"[RandomSampler] num_samples expects a dataset to draw from, got {left} of none.")
        if self.replacement:
            yield from np.random.randint(count, size=left).tolist() if left else ()
            return
        while left > 0:
            order = np.random.permutation(count)[:left]
            left -= len(order)
            yield from order.tolist()

    def __len__(self) -> int:
        return self.num_samples


class SubsetRandomSampler(Sampler):
    """The given numbers in random order."""

    def __init__(self, indices: Sequence[int]) -> None:
        self.indices = indices

    def __iter__(self) -> Iterator[int]:
        return (int(self.indices[i]) for i in np.random.permutation(len(self.indices)))

    def __len__(self) -> int:
        return len(self.indices)


class WeightedRandomSampler(Sampler):
    """So many numbers, each as likely as its weight says; weights need not add up to one."""

    def __init__(self, weights: Sequence[float], num_samples: int, replacement: bool = True) -> None:
        label, self.weights = "WeightedRandomSampler", np.asarray(weights, dtype="float64")
        if self.weights.ndim != 1 or not (self.weights >= 0).all() or not 0 < self.weights.sum() < np.inf:
            raise ValueError(f"[{label}] weights expects a list of numbers of at least 0, not all 0, got {weights!r}.")
        self.num_samples, self.replacement = size(label, "num_samples", num_samples), replacement
        if not replacement and num_samples > np.count_nonzero(self.weights):
            count = np.count_nonzero(self.weights)
            raise ValueError(f"[{label}] num_samples expects at most {count} without replacement, got {num_samples}.")

    def __iter__(self) -> Iterator[int]:
        chances = self.weights / self.weights.sum()
        return iter(np.random.choice(len(chances), self.num_samples, self.replacement, chances).tolist())

    def __len__(self) -> int:
        return self.num_samples


class BatchSampler(Sampler):
    """A sampler's numbers in lists of `batch_size`; drop_last: without a last list that is shorter."""

    def __init__(self, sampler: Iterable[int], batch_size: int, drop_last: bool = False) -> None:
        self.sampler, self.batch_size, self.drop_last = (
            sampler,
            size("BatchSampler", "batch_size", batch_size),
            drop_last,
        )

    def __iter__(self) -> Iterator[list[int]]:
        piece: list[int] = []
        for i in self.sampler:
            piece.append(i)
            if len(piece) == self.batch_size:
                yield piece
                piece = []
        if piece and not self.drop_last:
            yield piece

    def __len__(self) -> int:
        whole, rest = divmod(len(self.sampler), self.batch_size)  # type: ignore[arg-type]
        return whole + (rest > 0 and not self.drop_last)

"""DataLoader: batches of a dataset as Tensors."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from needle.autograd import Tensor
from needle.backend_ndarray import Device

from .dataset import Dataset, IndexedDataset

LARGEST_EXACT = 2**24  # float32 counts no further


class DataLoader:
    """Iterates over tuples of Tensors, (batch_size, ...) each; the last batch may be smaller.

    With `shuffle` each `iter` shuffles once, from numpy's global stream. Integers and bools become float32, as all of the
    course's tensors. `workers` threads read ahead; the results are the same as without.
    """

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int = 1,
        shuffle: bool = False,
        *,
        workers: int = 0,
        device: Device | None = None,
        dtype: str | None = None,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"[DataLoader] batch_size expects at least 1, got {batch_size}.")
        if workers < 0:
            raise ValueError(f"[DataLoader] workers expects at least 0, got {workers}.")
        if workers and not isinstance(dataset, IndexedDataset):
            name = type(dataset).__name__
            raise ValueError(f"[DataLoader] workers expects an IndexedDataset, which says how to read, got {name}.")
        self.dataset, self.batch_size, self.shuffle, self.workers = dataset, batch_size, shuffle, workers
        self.device, self.dtype = device, dtype
        self._current: Iterator[tuple[Tensor, ...]] = iter(())

    def __len__(self) -> int:
        return math.ceil(len(self.dataset) / self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        order = np.arange(len(self.dataset))
        if self.shuffle:
            np.random.shuffle(order)
        pieces = [order[i : i + self.batch_size] for i in range(0, len(order), self.batch_size)]
        self._current = batches(self.dataset, pieces, self.workers, self.device, self.dtype)
        return self._current

    def __next__(self) -> tuple[Tensor, ...]:
        """The next batch of the latest `iter`."""
        return next(self._current)


def batches(
    dataset: Dataset, pieces: list[np.ndarray], workers: int, device: Device | None, dtype: str | None
) -> Iterator[tuple[Tensor, ...]]:
    """The samples of each piece of the order as Tensors. Knows no loader: its threads end when the loader goes."""
    if isinstance(dataset, IndexedDataset):
        ahead = prefetch(dataset.read, pieces, workers) if workers else map(dataset.read, pieces)
        rows = (dataset.transform(*arrays) for arrays in ahead)
    else:
        rows = (stack_samples([dataset[int(i)] for i in piece]) for piece in pieces)
    for arrays in rows:
        yield tuple(Tensor(as_floats(a), device=device, dtype=dtype) for a in arrays)


def as_floats(array: Any) -> np.ndarray:
    array = np.asarray(array)
    if array.dtype.kind == "f":
        return array
    if array.dtype.kind not in "iub":
        raise ValueError(f"[DataLoader] a batch expects numbers, got dtype {array.dtype}.")
    largest = max(int(array.max()), -int(array.min())) if array.size else 0
    if largest > LARGEST_EXACT:
        raise ValueError(f"[DataLoader] integers expect at most 2**24, which float32 holds, got {largest}.")
    return array.astype("float32")


def stack_samples(samples: list[Any]) -> tuple[np.ndarray, ...]:
    """Samples, tuples or single values, as one array per column."""
    rows = [s if isinstance(s, tuple | list) else (s,) for s in samples]
    return tuple(np.stack([np.asarray(v) for v in column]) for column in zip(*rows, strict=True))


def prefetch(read: Callable[[Any], Any], pieces: list[Any], workers: int) -> Iterator[Any]:
    """`map(read, pieces)` with up to two reads per worker under way."""
    pending: deque[Future] = deque()
    with ThreadPoolExecutor(workers, thread_name_prefix="needle-data") as pool:
        try:
            for piece in pieces:
                pending.append(pool.submit(read, piece))
                if len(pending) > 2 * workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()

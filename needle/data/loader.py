"""DataLoader: batches of a dataset as Tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from numbers import Number
from typing import Any

import numpy as np

from needle.autograd import Tensor
from needle.backend_ndarray import Device

from .collate import as_tensor, default_collate
from .samplers import BatchSampler


class DataLoader:
    """Iterates over batches, tuples of Tensors, (batch_size, ...) each; the last batch may be smaller, or goes with `drop_last`.

    With `shuffle` each `iter` shuffles once, from numpy's global stream; `sampler` gives another order, `batch_sampler` lists
    of numbers, a batch each. Integers and bools become float32, as all of the course's tensors, unless the dataset, or
    `integers`, keeps them. Samples that are dicts make dicts of batches, nested tuples nested ones. `collate_fn` makes what it
    wants of a list of samples. `workers` threads read ahead; the results are the same as without.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        shuffle: bool = False,
        sampler: Iterable[int] | None = None,
        batch_sampler: Iterable[Any] | None = None,
        *,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        drop_last: bool = False,
        workers: int = 0,
        device: Device | None = None,
        dtype: str | None = None,
        integers: bool | None = None,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"[DataLoader] batch_size expects at least 1, got {batch_size}.")
        if workers < 0:
            raise ValueError(f"[DataLoader] workers expects at least 0, got {workers}.")
        if sampler is not None and shuffle:
            raise ValueError("[DataLoader] expects a sampler or shuffle, got both.")
        if batch_sampler is not None and (batch_size != 1 or shuffle or sampler is not None or drop_last):
            raise ValueError(
                "[DataLoader] batch_sampler expects no batch_size, shuffle, sampler or drop_last, got one."
            )
        self.indexed = getattr(dataset, "indexed", False) and collate_fn is None
        if workers and not self.indexed:
            name = type(dataset).__name__ if collate_fn is None else "collate_fn"
            raise ValueError(f"[DataLoader] workers expects an IndexedDataset, which says how to read, got {name}.")
        self.dataset, self.batch_size, self.shuffle, self.workers = dataset, batch_size, shuffle, workers
        self.sampler, self.batch_sampler, self.drop_last = sampler, batch_sampler, drop_last
        self.collate_fn, self.device, self.dtype = collate_fn, device, dtype
        self.integers = getattr(dataset, "keeps_integers", False) if integers is None else integers
        self._current: Iterator[Any] = iter(())

    def __len__(self) -> int:
        if self.batch_sampler is not None:
            return len(self.batch_sampler)  # type: ignore[arg-type]
        return len(
            BatchSampler(self.dataset if self.sampler is None else self.sampler, self.batch_size, self.drop_last)
        )

    def __iter__(self) -> Iterator[Any]:
        kind = (self.device, self.dtype, self.integers)
        join = joined(*kind) if self.indexed else None
        make = self.collate_fn or stacked(*kind)
        self._current = batches(self.dataset, self.pieces(), self.workers, join, make)
        return self._current

    def pieces(self) -> Iterable[np.ndarray]:
        """The numbers of each batch's samples."""
        if self.batch_sampler is not None:
            return (np.asarray(piece, dtype="int64") for piece in self.batch_sampler)
        if self.sampler is not None:
            return (np.asarray(piece) for piece in BatchSampler(self.sampler, self.batch_size, self.drop_last))
        order = np.arange(len(self.dataset))
        if self.shuffle:
            np.random.shuffle(order)
        return [order[i * self.batch_size : (i + 1) * self.batch_size] for i in range(len(self))]

    def __next__(self) -> Any:
        """The next batch of the latest `iter`."""
        return next(self._current)


def joined(device: Device | None, dtype: str | None, integers: bool) -> Callable[[tuple[Any, ...]], tuple[Tensor, ...]]:
    """What makes a batch of the arrays that an indexed dataset reads."""
    return lambda arrays: tuple(as_tensor(a, device, dtype, integers) for a in arrays)


def stacked(device: Device | None, dtype: str | None, integers: bool) -> Callable[[list[Any]], Any]:
    """What makes a batch of a list of samples; those that are single values make a tuple of one."""

    def make(samples: list[Any]) -> Any:
        rows = samples
        if not isinstance(samples[0], Mapping):
            parts = (s if isinstance(s, tuple | list) else (s,) for s in samples)
            rows = [tuple(np.asarray(v) if plain(v) else v for v in row) for row in parts]
        return default_collate(rows, device=device, dtype=dtype, integers=integers)

    return make


def plain(value: Any) -> bool:
    """A list of numbers is an array to the course."""
    return isinstance(value, tuple | list) and all(isinstance(v, Number) for v in value)


def batches(
    dataset: Any,
    pieces: Iterable[np.ndarray],
    workers: int,
    join: Callable[[tuple[Any, ...]], Any] | None,
    make: Callable[[list[Any]], Any],
) -> Iterator[Any]:
    """The samples of each piece of the order as a batch. Knows no loader: its threads end when the loader goes."""
    if join is None:
        yield from (make([dataset[int(i)] for i in piece]) for piece in pieces)
        return
    for arrays in prefetch(dataset.read, pieces, workers) if workers else map(dataset.read, pieces):
        yield join(dataset.transform(*arrays))


def prefetch(read: Callable[[Any], Any], pieces: Iterable[Any], workers: int) -> Iterator[Any]:
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

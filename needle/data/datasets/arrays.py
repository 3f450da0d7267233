"""Arrays in memory as a dataset."""

from __future__ import annotations

from typing import Any

from needle.data.dataset import IndexedDataset


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

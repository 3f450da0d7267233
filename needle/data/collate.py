"""Samples put together to batches."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Number
from typing import Any

import numpy as np

from needle.autograd import Tensor
from needle.backend_ndarray import Device

LARGEST_EXACT = 2**24  # float32 counts no further


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


def as_tensor(array: Any, device: Device | None, dtype: str | None, integers: bool) -> Tensor:
    """A batch as a Tensor: floats as they are, integers as float32 or, with `integers`, as int64; bools with them as bool."""
    array = np.asarray(array)
    if not integers or array.dtype.kind not in "iub":
        return Tensor(as_floats(array), device=device, dtype=dtype)
    kept = array if array.dtype.kind == "b" or array.dtype == np.int32 else array.astype("int64")
    return Tensor(kept, device=device, dtype=str(kept.dtype), requires_grad=False)


def default_collate(
    batch: list[Any], *, device: Device | None = None, dtype: str | None = None, integers: bool = True
) -> Any:
    """A list of samples as one of their kind: arrays, tensors and numbers are stacked; tuples, lists and dicts are gone into.

    Texts and what is None stay lists. dtype: of floats; integers: whether they stay integers or become float32.
    """
    first: Any = batch[0]
    options: Any = {"device": device, "dtype": dtype, "integers": integers}
    if isinstance(first, Mapping):
        return {key: default_collate([sample[key] for sample in batch], **options) for key in first}
    if isinstance(first, tuple | list):
        if any(len(sample) != len(first) for sample in batch):
            sizes = sorted({len(sample) for sample in batch})
            raise ValueError(f"[default_collate] samples expect to have as many parts each, got {sizes}.")
        parts = [default_collate(list(column), **options) for column in zip(*batch, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    if isinstance(first, Tensor):
        arrays = [sample.numpy() for sample in batch]
    elif isinstance(first, np.ndarray | np.generic | Number) or hasattr(first, "__array__"):
        arrays = [np.asarray(sample) for sample in batch]
    elif isinstance(first, str | bytes) or first is None:
        return list(batch)
    else:
        raise TypeError(
            f"[default_collate] expects arrays, numbers, texts, tuples, lists or dicts, got {type(first).__name__}."
        )
    if any(a.shape != arrays[0].shape for a in arrays):
        shapes = sorted({a.shape for a in arrays})
        raise ValueError(f"[default_collate] samples expect one shape, got {' and '.join(map(str, shapes[:2]))}.")
    return as_tensor(np.stack(arrays), device, dtype, integers)

"""Ops of which values, not shapes, say how large the result is. Eagerly they are exact; `compile` plans what is between them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from needle.autograd import Op, Tensor, op, tensor_method
from needle.backend_ndarray import NDArray
from needle.ops.common import broadcast_shape
from needle.ops.families import no_gradient
from needle.ops.shape.basic import broadcast_to, flatten, reshape
from needle.ops.shape.gather import index_tensors, take
from needle.ops.shape.indexing import getitem

__all__ = [
    "bincount",
    "masked_rows",
    "masked_select",
    "nonzero",
    "repeat_counts",
    "repeat_numbers",
    "unique",
    "unique_consecutive",
]


class Counted(Op):
    """Base: numpy computes, on the host. `infer` gives None: no shape says what comes out."""

    counts = True
    compute_infers = True
    gradient = no_gradient

    def infer(self, *inputs: Any) -> Any:
        return None

    def compute(self, *arrays: NDArray) -> Any:
        found = self.reference(*(a.numpy() for a in arrays))
        made = [NDArray(np.asarray(f, order="C"), arrays[0].device, str(f.dtype)) for f in self._results(found)]
        return tuple(made) if self.n_out > 1 else made[0]

    def _results(self, found: Any) -> Any:
        return found if self.n_out > 1 else (found,)


@op
class Nonzero(Counted):
    """The places (N, axes) of elements other than 0, in their order, int64."""

    def reference(self, x: np.ndarray) -> Any:
        return np.argwhere(x).astype("int64")


@tensor_method()
def nonzero(a: Tensor) -> Tensor:
    """torch.nonzero: (N, axes of a), int64."""
    return Nonzero()(a)


@op
class MaskedRows(Op):
    """x[mask]: the slices of x (N, ...) where a bool mask of its first axes holds."""

    counts = True

    def infer(self, x: Any, mask: Any) -> Any:
        if mask.dtype != "bool" or tuple(mask.shape) != tuple(x.shape[: len(mask.shape)]):
            raise IndexError(
                f"[getitem] mask expects bools of the first axes of x {tuple(x.shape)}, got {mask.dtype} {tuple(mask.shape)}."
            )

    def decompose(self, x: Tensor, mask: Tensor) -> Tensor:
        self.infer(x, mask)
        if not mask.shape:
            return take(reshape(x, (1, *x.shape)), flatten(getitem(nonzero(reshape(mask, (1,))), (slice(None), 0))))
        places = nonzero(mask)
        return index_tensors(x, [getitem(places, (slice(None), axis)) for axis in range(len(mask.shape))])


def masked_rows(a: Tensor, mask: Tensor) -> Tensor:
    """a[mask] of a mask of bools in the shape of the first axes of a: (number of True, *the other axes)."""
    return MaskedRows()(a, mask)


@op
class MaskedSelect(Op):
    """The elements of x (N,), in their order, where a bool mask, which broadcasts with x, holds."""

    counts = True

    def infer(self, x: Any, mask: Any) -> Any:
        if mask.dtype != "bool":
            raise ValueError(f"[{self.label}] mask expects dtype bool, got {mask.dtype}.")

    def decompose(self, x: Tensor, mask: Tensor) -> Tensor:
        self.infer(x, mask)
        shape = broadcast_shape(self.label, tuple(x.shape), tuple(mask.shape))
        return masked_rows(flatten(broadcast_to(x, shape)), flatten(broadcast_to(mask, shape)))


@tensor_method()
def masked_select(a: Tensor, mask: Tensor) -> Tensor:
    """torch.masked_select."""
    return MaskedSelect()(a, mask)


@op
class Unique(Counted):
    """The different elements, or with an axis its different slices, sorted; for each of x its number; how often each is there."""

    axis: int | None = None
    n_out = 3

    def reference(self, x: np.ndarray) -> Any:
        values, inverse, counts = np.unique(x, axis=self.axis, return_inverse=True, return_counts=True, equal_nan=False)
        shape = x.shape if self.axis is None else (x.shape[self.axis],)
        return values, inverse.reshape(shape).astype("int64"), counts.astype("int64")


def unique(a: Tensor, axis: int | None = None) -> Any:
    """(sorted different elements or slices, the number of each of a's among them, how often each is there)."""
    return Unique(axis)(a)


@op
class UniqueConsecutive(Counted):
    """As Unique, of neighbours alone and in their order."""

    axis: int | None = None
    n_out = 3

    def reference(self, x: np.ndarray) -> Any:
        axis = 0 if self.axis is None else self.axis
        rows = x.reshape(-1) if self.axis is None else np.moveaxis(x, axis, 0)
        differ = (rows[1:] != rows[:-1]).reshape(max(len(rows) - 1, 0), math.prod(rows.shape[1:])).any(1)
        first = np.concatenate([np.ones(min(len(rows), 1), bool), differ])
        begins = np.append(np.flatnonzero(first), len(rows))
        inverse = (np.cumsum(first) - 1).astype("int64")  # none of nothing
        values = rows[first] if self.axis is None else np.moveaxis(rows[first], 0, axis)
        return values, inverse.reshape(x.shape) if self.axis is None else inverse, np.diff(begins).astype("int64")


def unique_consecutive(a: Tensor, axis: int | None = None) -> Any:
    """Without repetitions of neighbours: (values, the place in them of every element, how often each was there).

    Flat for `axis=None`, else of slices along the axis. Values have a's dtype, places and counts are int64. As
    torch.unique_consecutive with `return_inverse` and `return_counts`.
    """
    return UniqueConsecutive(axis)(a)


@op
class Bincount(Counted):
    """How often each whole number from 0 on is among x (N,), or the sums of weights (N,) by them; at least `minlength`."""

    minlength: int = 0

    def reference(self, x: np.ndarray, *weights: np.ndarray) -> Any:
        if x.ndim != 1 or x.dtype.kind not in "iu" or (x.size and x.min() < 0):
            raise ValueError(f"[bincount] expects whole numbers (N,) from 0 on, got {x.dtype} {x.shape}.")
        counts = np.bincount(x, weights[0] if weights else None, self.minlength)
        return counts.astype("float32" if weights and weights[0].dtype == "float32" else counts.dtype)


@tensor_method()
def bincount(a: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """torch.bincount: int64 (M,), M at least `minlength` and beyond the largest number; float64 or float32 with weights."""
    return Bincount(minlength)(a, *(() if weights is None else (weights,)))


@op
class RepeatNumbers(Counted):
    """The numbers of `counts` (N,), each as often as it says: [0, 0, 2] of [2, 0, 1]."""

    def reference(self, counts: np.ndarray) -> Any:
        if counts.ndim > 1 or (counts.size and counts.min() < 0):
            raise ValueError(f"[repeat_interleave] repeats expect numbers from 0 on (N,), got shape {counts.shape}.")
        counts = np.atleast_1d(counts)
        return np.repeat(np.arange(len(counts), dtype="int64"), counts)


def repeat_numbers(counts: Tensor) -> Tensor:
    """The numbers from 0 on, each as often as `counts` (N,) says."""
    return RepeatNumbers()(counts)


def repeat_counts(a: Tensor, counts: Tensor, axis: int | None = None) -> Tensor:
    """torch.repeat_interleave with a number for each slice along an axis, without one of all elements."""
    numbers = repeat_numbers(counts)
    return take(flatten(a), numbers) if axis is None else take(a, numbers, axis)

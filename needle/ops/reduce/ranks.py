"""Order statistics: elements by their place in the order along an axis."""

from __future__ import annotations

import math
from typing import Any

from needle.autograd import Tensor, tensor_method
from needle.backend_ndarray import FLOATS
from needle.ops.math.elementwise import cast, where
from needle.ops.math.logic import isnan
from needle.ops.shape.basic import flatten, squeeze
from needle.ops.shape.indexing import getitem
from needle.ops.shape.join import along_axis

from .basic import some
from .sorting import argmax, known_rank, sort

__all__ = ["kthvalue", "median"]


@tensor_method()
def kthvalue(a: Tensor, k: int, axis: int = -1, keepdims: bool = False) -> tuple[Tensor, Tensor]:
    """(values, numbers) of the k-th smallest element, from 1 on, along an axis, which goes unless `keepdims`."""
    if isinstance(k, int) and k < 1:
        raise ValueError(f"[kthvalue] k expects at least 1, got {k}.")
    if known_rank(a) == 0:
        a, axis, keepdims = flatten(a), 0, False
    pair = sort(a, axis, count=k)
    last = [getitem(t, along_axis(axis, slice(k - 1, k))) for t in pair]
    values, numbers = last if keepdims else (squeeze(t, axis) for t in last)
    return values, numbers


@tensor_method()
def median(a: Tensor, axis: int | None = None, keepdims: bool = False) -> Any:
    """The lower one of two in the middle, of all elements: (); along an axis, which goes unless `keepdims`, (values, numbers).

    Where there is a NaN it is the first of those.
    """
    whole = axis is None or not a.ndim
    x, place = (flatten(a), 0) if axis is None or whole else (a, axis)
    keepdims = keepdims and not whole
    values, numbers = kthvalue(x, (x.shape[place] - 1) // 2 + 1, place, keepdims)
    if a.dtype in FLOATS:
        nan = isnan(x)
        found, first = some(nan, place, keepdims), argmax(cast(nan, "int64"), place, keepdims)
        values, numbers = where(found, math.nan, values), where(found, first, numbers)
    return values if axis is None else (values, numbers)

"""Arithmetic of views: which strides and offset show the same memory as another shape."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from .sizes import bounds, cached, larger, whole

Dims = tuple[int, ...]


@cached(maxsize=4096)
def contiguous_strides(shape: Dims) -> Dims:
    strides, n = [], 1
    for s in reversed(shape):
        strides.append(n)
        n *= s
    return tuple(reversed(strides))


def is_contiguous(shape: Dims, strides: Dims) -> bool:
    n = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != n:
            return False
        n *= size
    return True


@lru_cache(maxsize=1024)
def is_permutation(axes: Dims, ndim: int) -> bool:
    return len(axes) == ndim and len({a % ndim for a in axes}) == ndim


def resolve_shape(shape: Sequence[int], old: Sequence[int]) -> Dims:
    """`shape` with its -1 computed from `old`; raises when the sizes differ."""
    shape, total = tuple(map(whole, shape)), math.prod(old)
    if -1 in shape and shape.count(-1) == 1:
        known = math.prod(s for s in shape if s != -1)
        if known and total % known == 0:
            shape = tuple(total // known if s == -1 else s for s in shape)
    if any([n < 0 for n in shape]) or math.prod(shape) != total:
        raise ValueError(f"[reshape] expects a shape of {total} elements, got {shape}.")
    return shape


@cached(maxsize=1024)
def reduced_shapes(shape: Dims, axes: Dims) -> tuple[Dims, Dims]:
    """`shape` with 1 at `axes`, and without them."""
    kept = tuple(1 if d in axes else s for d, s in enumerate(shape))
    return kept, tuple(s for d, s in enumerate(shape) if d not in axes)


def broadcast_shapes(*shapes: Dims) -> Dims:
    """The shape to which all broadcast, as numpy's; raises ValueError where there is none."""
    ndim = max(map(len, shapes), default=0)
    made = []
    for sizes in zip(*((1,) * (ndim - len(s)) + tuple(s) for s in shapes), strict=True):
        found = [n for n in sizes if n != 1]
        if any(n != found[0] for n in found[1:]):
            raise ValueError(f"shapes {', '.join(map(str, shapes))} do not broadcast together")
        made.append(found[0] if found else 1)
    return tuple(made)


def broadcast_strides(shape: Dims, strides: Dims, to: Dims) -> Dims:
    """Strides that show `shape` as the shape `to`."""
    lead = len(to) - len(shape)
    if lead < 0 or any([have not in (1, want) for have, want in zip(shape, to[lead:], strict=True)]):
        raise ValueError(f"[broadcast_to] expects a shape that broadcasts to {to}, got {shape}.")
    return (0,) * lead + tuple([0 if n == 1 else s for n, s in zip(shape, strides, strict=True)])


@cached(maxsize=4096)
def runs_of(shape: Dims, strides: Dims) -> tuple[tuple[int, int], ...]:
    """(elements, stride) of axes that memory steps through as one, the last one first: the same for views of the same elements
    in the same order.
    """
    runs: list[tuple[int, int]] = []
    for n, stride in zip(reversed(shape), reversed(strides), strict=True):
        if n == 1:
            continue
        if runs and stride == runs[-1][0] * runs[-1][1]:
            runs[-1] = (runs[-1][0] * n, runs[-1][1])
        else:
            runs.append((n, stride))
    return tuple(runs) or ((1, 1),)


@cached(maxsize=4096)
def reshaped_strides(shape: Dims, strides: Dims, to: Dims) -> Dims | None:
    """Strides that show the elements of `shape`, in their order, as the shape `to` of as many; None where none do."""
    if is_contiguous(shape, strides) or not math.prod(shape):
        return contiguous_strides(to)
    made, at, runs = [], 0, runs_of(shape, strides)
    left, stride = runs[0]
    for n in reversed(to):
        if left == 1 and n != 1:
            at += 1
            left, stride = runs[at]
        if left % n:
            return None
        made.append(stride)
        left, stride = left // n, stride * n
    return tuple(reversed(made))


def flip_view(shape: Dims, strides: Dims, offset: int, axes: Sequence[int]) -> tuple[list[int], int]:
    """(strides, offset) that show `axes` backwards."""
    turned = list(strides)
    for a in axes:
        offset += max(0, shape[a] - 1) * turned[a]
        turned[a] = -turned[a]
    return turned, offset


def expand_index(index: Any, ndim: int) -> tuple:
    """An index as a tuple in which ... is written out."""
    index = index if isinstance(index, tuple) else (index,)
    for at, i in enumerate(index):
        if i is Ellipsis:
            fill = ndim - sum(j is not None for j in index) + 1
            return index[:at] + (slice(None),) * fill + index[at + 1 :]
    return index


def index_view(shape: Dims, strides: Dims, offset: int, index: Any) -> tuple[list[int], list[int], int]:
    """(shape, strides, offset) of x[index] for integers, slices, None and ..."""
    index = expand_index(index, len(shape))
    new_shape, new_strides, dim = [], [], 0
    for i in index:
        if i is None:
            new_shape.append(1)
            new_strides.append(0)
            continue
        if dim >= len(shape):
            raise IndexError(f"[getitem] too many indices for shape {shape}, got {len(index)}.")
        n, stride = shape[dim], strides[dim]
        dim += 1
        if isinstance(i, slice):
            start, stop, step = bounds(i, n)
            size = larger(0, -(-(stop - start) // step))
            new_shape.append(size)
            new_strides.append(stride * step)
            offset += start * stride if size else 0
            continue
        if isinstance(i, bool | np.bool_) or not hasattr(i, "__index__"):
            raise TypeError(f"[getitem] expects integers, slices, None and ..., got {type(i).__name__}.")
        i = whole(i) if isinstance(i, int) else operator.index(i)
        if not -n <= i < n:
            raise IndexError(f"[getitem] index {i} is out of range for axis {dim - 1} of size {n}.")
        offset += (i % n) * stride
    return [*new_shape, *shape[dim:]], [*new_strides, *strides[dim:]], offset

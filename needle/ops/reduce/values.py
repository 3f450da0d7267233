"""Tensors as Python's values: truth, numbers, text, comparison, and indexing with tensors, lists and masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from needle.autograd import Deferred, Tensor, TensorTuple, tensor_method
from needle.backend_ndarray import FLOATS, NDArray
from needle.ops.common import constant
from needle.ops.math.comparison import eq, ge, gt, le, lt, ne
from needle.ops.math.logic import bitwise, bitwise_not
from needle.ops.reduce.basic import amax, amin, every, prod, some, std, vector_norm
from needle.ops.reduce.sorting import max_along, min_along
from needle.ops.shape.gather import index_tensors
from needle.ops.shape.indexing import getitem
from needle.ops.shape.runtime_shape import moveaxis

ADVANCED = (Tensor, list, np.ndarray, NDArray)
COMPARABLE = (Tensor, NDArray, np.ndarray, np.generic, int, float, Deferred)


@tensor_method()
def item(a: Tensor) -> Any:
    """The only element, as a Python number."""
    values = a.numpy()
    if values.size != 1:
        raise ValueError(f"[item] expects a tensor of one element, got shape {values.shape}.")
    return values.item()


@tensor_method()
def tolist(a: Tensor) -> Any:
    """Nested lists of Python numbers; of a 0-d tensor its number."""
    return a.numpy().tolist()


@tensor_method("__bool__")
def truth_of(a: Tensor) -> bool:
    values = a.numpy()
    if values.size != 1:
        raise ValueError(f"[bool] expects a tensor of one element, got shape {values.shape}; use any() or all().")
    return bool(values.item())


@tensor_method("__float__")
def as_float(a: Tensor) -> float:
    return float(item(a))


@tensor_method("__int__")
def as_int(a: Tensor) -> int:
    return int(item(a))


@tensor_method("__index__")
def as_index(a: Tensor) -> int:
    if a.dtype in FLOATS:
        raise TypeError(f"[index] expects whole numbers, got dtype {a.dtype}.")
    return int(item(a))


@tensor_method("__format__")
def formatted(a: Tensor, spec: str) -> str:
    return format(item(a), spec) if spec else str(a)


@tensor_method("__contains__")
def contains(a: Tensor, value: Any) -> bool:
    """Whether any element equals `value`."""
    return isinstance(value, COMPARABLE) and bool(eq(a, value).numpy().any())


def comparison(f: Callable) -> Callable:
    def compared(a: Tensor, b: Any) -> Any:
        return f(a, b) if isinstance(b, COMPARABLE) or hasattr(b, "__dlpack__") else NotImplemented

    return compared


for function, method in ((prod, "prod"), (std, "std"), (every, "all"), (some, "any"), (vector_norm, "norm")):
    tensor_method(method)(function)


class Extremes(NamedTuple):
    """What torch gives for the largest or smallest elements along an axis."""

    values: Tensor
    indices: Tensor


def extremes(along: Callable, over: Callable) -> Callable:
    def found(a: Tensor, axes: Any = None, keepdims: bool = False, *, dim: Any = None, keepdim: bool = False) -> Any:
        """As numpy's with `axes` or `axis`; with torch's `dim` torch's pair of values and indices."""
        if dim is None:
            return over(a, axes, keepdims or keepdim)
        return Extremes(*along(a, dim, keepdims or keepdim))

    return found


tensor_method("max")(extremes(max_along, amax))
tensor_method("min")(extremes(min_along, amin))
for compare in (eq, ne, lt, le, gt, ge):
    tensor_method(f"__{compare.__name__}__")(comparison(compare))
for word in ("and", "or", "xor"):
    both = lambda a, b, word=word: bitwise(word, a, b)  # noqa: E731
    tensor_method(f"__{word}__", f"__r{word}__")(both)
tensor_method("__invert__")(bitwise_not)
for name in ("__eq__", "__ne__"):  # a tuple of tensors is the object that it is
    setattr(TensorTuple, name, getattr(object, name))
TensorTuple.__bool__ = lambda self: len(self) > 0  # type: ignore[attr-defined,method-assign]


# -- indexing ------------------------------------------------------------------------------------------------------------


def is_basic(item: Any) -> bool:
    return not isinstance(item, ADVANCED)


def index_numbers(a: Tensor, item: Any) -> list[Tensor]:
    """The integer tensors that an index of tensors or lists stands for: a mask is one for each of its axes."""
    if isinstance(item, Tensor) and item.dtype in ("int32", "int64"):
        return [item]
    values = item.numpy() if isinstance(item, Tensor | NDArray) else np.asarray(item)
    if not values.size and isinstance(item, list):
        values = values.astype("int64")
    if values.dtype.kind not in "iub":
        raise TypeError(f"[getitem] expects whole numbers or a mask, got a tensor of dtype {values.dtype}.")
    arrays = np.nonzero(values) if values.dtype == bool else [values]
    return [constant(n, a, "int64") for n in arrays]


@tensor_method("__getitem__")
def select(a: Tensor, index: Any) -> Tensor:
    """a[index]: integers, slices, None and ..., and tensors or lists of whole numbers and masks, as in numpy and torch."""
    items = index if isinstance(index, tuple) else (index,)
    if all(map(is_basic, items)):
        return getitem(a, index)
    plain: list[Any] = []  # the basic part, with whole axes where tensors stand
    numbers: list[Tensor] = []
    places: list[int] = []  # of the tensors among the items of `plain`
    axis = 0  # of a, at which the next item begins
    for i, item in enumerate(items):
        if is_basic(item):
            plain.append(item)
            axis = axis + (item is not None) if item is not Ellipsis else len(a.shape) - taken(items[i + 1 :])
            continue
        check_mask(a, item, axis)
        for n in index_numbers(a, item):
            numbers.append(n)
            places.append(len(plain))
            plain.append(slice(None))
            axis += 1
    x = getitem(a, tuple(plain))
    axes = [result_axis(plain, p) for p in places]
    if places != list(range(places[0], places[0] + len(places))):
        x, axes = moveaxis(x, tuple(axes), tuple(range(len(axes)))), [0]
    return index_tensors(x, numbers, axes[0])


def taken(items: tuple) -> int:
    """How many axes an index takes."""
    return sum(
        1 if is_basic(i) else np.ndim(i) if is_mask(i) else 1 for i in items if i is not None and i is not Ellipsis
    )


def is_mask(item: Any) -> bool:
    return (item if hasattr(item, "dtype") else np.asarray(item)).dtype == "bool"


def check_mask(a: Tensor, item: Any, axis: int) -> None:
    shape = tuple(np.shape(item)) if not hasattr(item, "shape") else tuple(item.shape)
    if is_mask(item) and tuple(a.shape[axis : axis + len(shape)]) != shape:
        raise IndexError(
            f"[getitem] a mask of shape {shape} does not fit axes {axis} and on of shape {tuple(a.shape)}."
        )


def result_axis(items: list[Any], place: int) -> int:
    """The axis of the result that item number `place` of a basic index makes; negative behind an ellipsis."""

    def count(part: list[Any]) -> int:
        return sum(i is None or isinstance(i, slice) for i in part)

    return -count(items[place:]) if any(i is Ellipsis for i in items[:place]) else count(items[:place])

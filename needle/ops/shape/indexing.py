"""Basic indexing: x[index] with integers, slices, None and ..., its gradient, and assignment."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable
from typing import Any

import numpy as np

from needle.autograd import Deferred, Op, Spec, Tensor, op, tensor_method
from needle.backend_ndarray import NDArray, call, sizes
from needle.backend_ndarray.strides import contiguous_strides, index_view
from needle.ops.common import as_operand, unbroadcast
from needle.ops.dtypes import fits_attribute
from needle.ops.families import samples_of
from needle.ops.shape.basic import View, reshaped

__all__ = ["getitem", "setitem"]


def encode_index(index: Any) -> tuple:
    """A basic index as an attribute: numbers, None, "..." and (start, stop, step) tuples, which may hold Dims."""
    items: list[Any] = []
    for i in index if isinstance(index, tuple) else (index,):
        if isinstance(i, slice):
            items.append((i.start, i.stop, i.step))
        elif i is Ellipsis:
            items.append("...")
        elif i is None or isinstance(i, Deferred):
            items.append(i)
        elif hasattr(i, "__index__") and not isinstance(i, bool | Tensor):
            items.append(sizes.whole(i) if isinstance(i, int) else operator.index(i))
        else:
            raise TypeError(f"[getitem] expects integers, slices, None and ..., got {type(i).__name__}.")
    return tuple(items)


def decode_index(index: tuple) -> tuple:
    return tuple(slice(*i) if isinstance(i, tuple) else Ellipsis if isinstance(i, str) else i for i in index)


def indexed_shape(shape: tuple[int, ...], index: tuple) -> tuple[int, ...]:
    """Shape of x[index], found on an array without memory."""
    if sizes.TRACES and sizes.has_sizes((shape, index)):
        return tuple(index_view(shape, contiguous_strides(shape), 0, decode_index(index))[0])
    try:
        return np.broadcast_to(np.empty((), "bool"), shape)[decode_index(index)].shape
    except IndexError as e:
        raise IndexError(f"[getitem] {e}, for shape {tuple(shape)}.") from None


@op
class GetItem(View):
    """x[index] for a basic index, in the form of `encode_index`."""

    index: tuple

    def infer(self, x: Any) -> Any:
        return Spec(indexed_shape(tuple(x.shape), self.index), x.dtype)

    def compute(self, x: Any) -> Any:
        return x[decode_index(self.index)]

    def taken(self, *inputs: Any) -> tuple[int, int, int] | None:
        shape, index = inputs[0].shape, [*decode_index(self.index)]
        if None in index or self.deferred():
            return None
        if Ellipsis in index:
            at = index.index(Ellipsis)
            index[at : at + 1] = [slice(None)] * (len(shape) - len(index) + 1)
        cuts = []
        for axis, (i, size) in enumerate(zip(index, shape, strict=False)):
            start, stop, step = i.indices(size) if isinstance(i, slice) else (i % size, i % size + 1, 1)
            if not isinstance(i, slice) or (start, stop, step) != (0, size, 1):
                cuts.append((axis, start, stop, step))
        if len(cuts) != 1:
            return None
        axis, start, stop, step = cuts[0]
        return (axis, start, stop) if step == 1 and start < stop and stop - start < shape[axis] else None

    def reference(self, x: np.ndarray) -> Any:
        return x[decode_index(self.index)]

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        return ScatterItem(self.index, tuple(node.inputs[0].shape))(out_grad)

    @classmethod
    def samples(cls) -> list:
        cases = [(slice(1, 4, 2), Ellipsis, 2), (None, -1), (Ellipsis, slice(None, 2)), (slice(None, None, 3), None, 1)]
        return [({"index": encode_index(c)}, [(5, 3, 4)]) for c in cases]


@tensor_method()
def getitem(a: Tensor, index: Any) -> Tensor:
    """a[index] with integers, slices, None and ..., of the shape that numpy gives; sizes in it may be symbolic."""
    return GetItem(encode_index(index))(a)


@op
class ScatterItem(Op):
    """Zeros of `shape` with x at [index]: the gradient of GetItem."""

    index: tuple
    shape: tuple

    def infer(self, x: Any) -> Any:
        want = indexed_shape(self.shape, self.index)
        if tuple(x.shape) != want:
            raise ValueError(f"[scatter_item] expects shape {want}, got {tuple(x.shape)}.")
        return Spec(self.shape, x.dtype)

    def compute(self, x: NDArray) -> Any:
        out = NDArray.empty(self.shape, x.dtype)
        out.fill(0.0)
        out[decode_index(self.index)] = x
        return out

    def reference(self, x: np.ndarray) -> Any:
        out = np.zeros(self.shape, x.dtype)
        out[decode_index(self.index)] = x
        return out

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        return GetItem(self.index)(out_grad)

    samples = samples_of(({"index": ((1, 4, 2), "...", 2), "shape": (5, 3, 4)}, [(2, 3)]))


def scattered(places: Iterable[tuple], parts: Iterable[Tensor], shape: tuple) -> Tensor:
    """Zeros of `shape` with every part added at its place, a basic index."""
    placed = (ScatterItem(encode_index(at), shape)(part) for at, part in zip(places, parts, strict=True))
    return functools.reduce(operator.add, placed)


@op
class SetItem(Op):
    """x with a second tensor, or attribute `value`, at [index]."""

    index: tuple
    value: Any = None
    mixes_floats = True
    updates = like_first = True

    def infer(self, x: Any, *part: Any) -> Any:
        want = indexed_shape(tuple(x.shape), self.index)
        for p in part:
            lead = (1,) * max(0, len(p.shape) - len(want))  # axes of size 1 in front fall away, as in numpy
            if tuple(p.shape[: len(lead)]) != lead or not broadcasts(tuple(p.shape[len(lead) :]), want):
                raise ValueError(f"[setitem] expects a value that broadcasts to {want}, got shape {tuple(p.shape)}.")
        return Spec(tuple(x.shape), str(x.dtype))

    def into(self, out: NDArray, *inputs: NDArray) -> None:
        if inputs[0] is not out:
            call("copy", [out], x=inputs[0])
        target = out[decode_index(self.index)]
        if len(inputs) == 1:
            call("fill", [target], value=float(self.value))
            return
        part = inputs[1]
        if part.ndim > target.ndim:  # reshaping copies what is not compact
            part = part.reshape(last_axes(part, target.ndim))
        call("copy", [target], x=part.broadcast_to(target.shape))

    def reference(self, x: np.ndarray, *part: np.ndarray) -> Any:
        out, rank = x.copy(), len(indexed_shape(x.shape, self.index))
        out[decode_index(self.index)] = part[0].reshape(last_axes(part[0], rank)) if part else self.value
        return out

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        kept = SetItem(self.index, 0.0)(out_grad)
        if len(node.inputs) == 1:
            return kept
        part = node.inputs[1]
        inner = getitem(out_grad, decode_index(self.index))
        return kept, reshaped(unbroadcast(inner, last_axes(part, len(inner.shape))), part.shape)

    @classmethod
    def samples(cls) -> list:
        index = encode_index((slice(1, 4, 2), Ellipsis, 2))
        return [
            ({"index": index}, [(5, 3, 4), (2, 3)]),
            ({"index": index}, [(5, 3, 4), (1, 2, 1)]),
            ({"index": index, "value": 1.5}, [(5, 3, 4)]),
        ]


def last_axes(x: Any, rank: int) -> tuple[int, ...]:
    """The shape of x without the axes in front of its last `rank` ones."""
    return x.shape[max(0, len(x.shape) - rank) :]


def broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    tail = to[len(to) - len(shape) :]
    return len(shape) <= len(to) and all(a in (1, b) for a, b in zip(shape, tail, strict=True))


def setitem(a: Tensor, index: Any, value: Any) -> Tensor:
    """A copy of a with `value`, a tensor or a number, at a basic index."""
    if isinstance(value, Tensor) or not fits_attribute(value):
        return SetItem(encode_index(index))(a, as_operand(value, a))
    return SetItem(encode_index(index), value)(a)

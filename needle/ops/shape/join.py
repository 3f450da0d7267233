"""Ops on several tensors: concat, stack, split, tuples; and dilation, the course's interleaving with zeros."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from needle.autograd import Op, Spec, Tensor, TensorTuple, op, tensor_method
from needle.backend_ndarray import NDArray, call
from needle.ops.common import check_axis
from needle.ops.dtypes import cast_array, result_dtype
from needle.ops.families import samples_of
from needle.ops.math.elementwise import add
from needle.ops.shape.basic import View
from needle.ops.shape.indexing import ScatterItem, encode_index, getitem

__all__ = [
    "Piece",
    "TupleGetItem",
    "chunk",
    "concat",
    "dilate",
    "make_tuple",
    "split",
    "split_sizes",
    "stack",
    "tuple_get_item",
    "undilate",
]


def along(axis: int, ndim: int, item: Any) -> tuple:
    """Index that applies `item` to one axis."""
    return (*(slice(None),) * (axis % ndim), item)


def along_axis(axis: int, item: Any) -> tuple:
    """As `along`, of a tensor whose number of axes may not be known."""
    whole = slice(None)
    return (Ellipsis, item, *(whole,) * (-axis - 1)) if axis < 0 else (*(whole,) * axis, item)


@op
class Concat(Op):
    """Tensors one after another along an axis."""

    axis: int = 0
    mixes_floats = True

    def infer(self, *xs: Any) -> Any:
        if not xs:
            raise ValueError("[concat] expects at least one tensor, got none.")
        axis, first = check_axis("concat", self.axis, xs[0].shape), tuple(xs[0].shape)
        for x in xs[1:]:
            shape = tuple(x.shape)
            if len(shape) != len(first) or shape[:axis] + shape[axis + 1 :] != first[:axis] + first[axis + 1 :]:
                raise ValueError(f"[concat] shapes {first} and {shape} differ outside axis {self.axis}.")
        return Spec((*first[:axis], sum(x.shape[axis] for x in xs), *first[axis + 1 :]), result_dtype(*xs))

    def into(self, out: NDArray, *inputs: NDArray) -> None:
        self.write(out, inputs, self.axis)

    @staticmethod
    def write(out: NDArray, inputs: Sequence[NDArray], axis: int) -> None:
        """The inputs one after another along an axis of `out`."""
        start = 0
        for x in inputs:
            part = out.narrow(axis, start, x.shape[axis])
            start += x.shape[axis]
            if not x.is_same_view(part):  # else its maker has written it in place
                call("copy", [part], x=x)

    def reference(self, *xs: np.ndarray) -> Any:
        dtype = self.infer(*xs).dtype
        return np.concatenate([cast_array(x, dtype) for x in xs], axis=self.axis)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        axis, start, grads = check_axis("concat", self.axis, out_grad.shape), 0, []
        for x in node.inputs:
            size = x.shape[axis]
            grads.append(Narrow(axis, start, size)(out_grad) if x.requires_grad else None)
            start += size
        return tuple(grads)

    samples = samples_of(({"axis": 1}, [(2, 3, 4), (2, 1, 4), (2, 5, 4)]), ({"axis": -1}, [(2, 3), (2, 2)]))


@op
class Narrow(View):
    """`size` elements from `start` on along an axis; graphs hold x[...]."""

    axis: int
    start: int
    size: int

    def must_decompose(self, x: Any) -> bool:
        return x.recorder is not None

    def infer(self, x: Any) -> Any:
        shape = list(x.shape)
        axis = check_axis("narrow", self.axis, shape)
        if not shape or not 0 <= self.start <= self.start + self.size <= shape[axis]:
            raise ValueError(
                f"[narrow] expects places of axis {axis} of {tuple(shape)}, got {self.size} from {self.start} on."
            )
        shape[axis] = self.size
        return Spec(tuple(shape), str(x.dtype))

    def compute(self, x: NDArray) -> Any:
        return x.narrow(self.axis, self.start, self.size)

    def reference(self, x: np.ndarray) -> Any:
        return x[self._index(x)]

    def decompose(self, x: Tensor) -> Tensor:
        return getitem(x, self._index(x))

    def _index(self, x: Any) -> tuple:
        self.infer(x)
        return (*(slice(None),) * (self.axis % len(x.shape)), slice(self.start, self.start + self.size))

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        x = node.inputs[0]
        return ScatterItem(encode_index(self._index(x)), tuple(x.shape))(out_grad)

    samples = samples_of(
        ({"axis": 1, "start": 2, "size": 3}, [(4, 7, 2)]),
        ({"axis": -2, "start": 2, "size": 3}, [(4, 7, 2)]),
        ({"axis": 0, "start": 0, "size": 1}, [(2,)]),
    )


def concat(tensors: Sequence[Tensor], axis: int = 0) -> Tensor:
    """Tensors one after another along an axis; their other sizes are equal. Dtypes are promoted as torch.cat does.

    Also `cat`. Raises ValueError for no tensor, and where other sizes differ.
    """
    return Concat(axis)(*tensors)


cat = concat


@op
class Stack(Op):
    """Tensors of one shape along a new axis."""

    axis: int = 0
    mixes_floats = True

    def infer(self, *xs: Any) -> Any:
        if not xs:
            raise ValueError("[stack] expects at least one tensor, got none.")
        shape = tuple(xs[0].shape)
        for x in xs:
            if tuple(x.shape) != shape:
                raise ValueError(f"[stack] shapes {shape} and {tuple(x.shape)} differ.")
        axis = check_axis("stack", self.axis, (*shape, 1))
        return Spec((*shape[:axis], len(xs), *shape[axis:]), result_dtype(*xs))

    def compute(self, *xs: NDArray) -> Any:
        spec = self.infer(*xs)
        out = NDArray.empty(*spec)
        for i, x in enumerate(xs):
            out[along(self.axis, spec.ndim, i)] = x
        return out

    def reference(self, *xs: np.ndarray) -> Any:
        dtype = self.infer(*xs).dtype
        return np.stack([cast_array(x, dtype) for x in xs], axis=self.axis)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        if len(node.inputs) == 1:  # of which a record has no tuple
            return (getitem(out_grad, along_axis(self.axis, 0)),)
        return split(out_grad, self.axis)

    def gradient_as_tuple(self, out_grad: Any, node: Tensor) -> tuple[Any, ...]:
        return tuple(self.gradient(out_grad, node))

    samples = samples_of(({"axis": 1}, [(2, 3)] * 3), ({"axis": -1}, [(2, 3)] * 2))


def stack(tensors: Sequence[Tensor], axis: int = 0) -> Tensor:
    """Tensors of one shape along a new axis, at place `axis` of the result. Dtypes are promoted as torch.stack does."""
    return Stack(axis)(*tensors)


class TupleOp(Op):
    """An op whose result is a TensorTuple of `parts` tensors, of one, too."""

    is_view = True
    n_out = property(lambda self: self.parts)  # type: ignore[assignment]

    def __call__(self, *inputs: Tensor) -> Any:
        out = Op.__call__(self, *inputs)
        if isinstance(out, Tensor) and not isinstance(out, TensorTuple) and out.recorder is None:
            out = TensorTuple._from_data(out.cached_data, out.op, out.inputs)
        return (out,) if isinstance(out, Tensor) and out.recorder is not None else out


@op
class Split(TupleOp):
    """The slices along an axis, without that axis: the inverse of Stack."""

    axis: int
    parts: int

    def infer(self, x: Any) -> Any:
        axis = check_axis("split", self.axis, x.shape)
        if x.shape[axis] != self.parts:
            raise ValueError(f"[split] axis {self.axis} expects size {self.parts}, got {x.shape[axis]}.")
        spec = Spec((*x.shape[:axis], *x.shape[axis + 1 :]), str(x.dtype))
        return spec if self.parts == 1 else (spec,) * self.parts

    def compute(self, x: Any) -> Any:
        return tuple(x[along(self.axis, x.ndim, i)] for i in range(self.parts))

    def reference(self, x: np.ndarray) -> Any:
        return self.compute(x)

    def gradient(self, out_grad: Any, node: Tensor) -> Any:
        return stack(list(out_grad), self.axis)


def split(a: Tensor, axis: int) -> Any:
    """TensorTuple of the slices of a along an axis, that axis removed."""
    return Split(axis, int(a.shape[axis]))(a)


def split_sizes(a: Tensor, sizes: int | Sequence[int], axis: int = 0) -> tuple[Tensor, ...]:
    """torch.split: pieces of the given sizes, or of one size (the last may be smaller), that keep the axis."""
    if isinstance(sizes, int):
        total = int(a.shape[axis])
        sizes = [min(sizes, total - i) for i in range(0, total, sizes)]
    pieces, start = [], 0
    for size in sizes:
        pieces.append(getitem(a, along_axis(axis, slice(start, start + size))))
        start += size
    return tuple(pieces)


@op
class Piece(Op):
    """Slice number `index` of the pieces of `size` along an axis, or of `pieces` about equal ones where that is given.

    The last piece may be smaller; with `even` the first ones are larger by one instead, as in torch.tensor_split. `count`:
    how many pieces the model was written for.
    """

    axis: int
    index: int
    size: Any = None
    pieces: Any = None
    even: bool = False
    count: Any = None

    def _bounds(self, total: int) -> tuple[int, int]:
        if self.even:
            small, larger = divmod(total, self.pieces)
            start = self.index * small + min(self.index, larger)
            return start, start + small + (self.index < larger)
        size = self.size if self.pieces is None else max(1, -(-total // self.pieces))
        if total and size < 1:
            raise ValueError(f"[split] expects pieces of 1 or more along axis {self.axis}, got {size}.")
        count = self.pieces if self.pieces is not None and total == 0 else max(1, -(-total // max(size, 1)))
        if self.index >= count or self.count not in (None, count):
            raise ValueError(
                f"[split] expects {self.count or self.index + 1} pieces along axis {self.axis}, got {count}."
            )
        return min(total, self.index * size), min(total, (self.index + 1) * size)

    def infer(self, x: Any) -> Any:
        axis = check_axis("split", self.axis, x.shape)
        start, stop = self._bounds(x.shape[axis])
        return Spec((*x.shape[:axis], stop - start, *x.shape[axis + 1 :]), str(x.dtype))

    def decompose(self, x: Tensor) -> Tensor:
        axis = check_axis("split", self.axis, x.shape)
        return getitem(x, along(axis, len(x.shape), slice(*self._bounds(x.shape[axis]))))

    @classmethod
    def samples(cls) -> list:
        x = [(2, 7, 3)]
        cases: list[dict[str, Any]] = [{"size": 3, "index": 2}, {"pieces": 2, "index": 1}]
        return [({"axis": 1, **c}, x) for c in (*cases, {"pieces": 3, "even": True, "index": 0, "count": 3})]


@tensor_method()
def chunk(a: Tensor, chunks: int, axis: int = 0) -> tuple[Tensor, ...]:
    """At most `chunks` pieces of equal size along an axis; the last may be smaller."""
    return split_sizes(a, -(-int(a.shape[axis]) // chunks), axis)


# -- tuples --------------------------------------------------------------------------------------------------------------


class PartialTuple(TensorTuple):
    """Gradient of a TensorTuple of which only some items are known; the others are zero."""

    def __init__(self, like: Tensor, items: dict[int, Tensor]) -> None:
        self.like, self.items = like, items
        self._init(None, None, (), any(t.requires_grad for t in items.values()))

    dtype = property(lambda self: self.like.dtype)

    def __len__(self) -> int:
        return len(self.like)

    def __getitem__(self, index: int) -> Tensor:
        if index in self.items:
            return self.items[index]
        from needle.init import zeros

        item = self.like[index]
        return zeros(*item.shape, device=item.device, dtype=item.dtype)

    def __add__(self, other: Any) -> PartialTuple:
        items = dict(self.items)
        for i in other.items if isinstance(other, PartialTuple) else range(len(other)):
            items[i] = add(items[i], other[i]) if i in items else other[i]
        return PartialTuple(self.like, items)


@op
class TupleGetItem(Op):
    """Item `index` of a TensorTuple."""

    index: int
    is_view = True
    is_item = True

    def infer(self, t: Any) -> Any:
        if isinstance(t, TensorTuple):
            a = t.cached_data[self.index]
            return Spec(tuple(a.shape), str(a.dtype))
        return t[self.index]

    def _run_elsewhere(self, inputs: Sequence[Tensor], arrays: Sequence[Any]) -> Any:
        """The item, wherever it is: there is nothing to check or to compute."""
        return arrays[0][self.index]

    def compute(self, items: Any) -> Any:
        return items[self.index]

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        return PartialTuple(node.inputs[0], {self.index: out_grad})


@tensor_method("__getitem__", of=TensorTuple)
def tuple_get_item(value: TensorTuple, index: int) -> Tensor:
    """Item `index` of a TensorTuple, which ops with several results give; negative ones count from the end."""
    index = range(len(value))[index]
    if value.op is not None and isinstance(value.op, MakeTuple):
        return value.inputs[index]
    return item_op(index)(value)


@lru_cache
def item_op(index: int) -> TupleGetItem:
    return TupleGetItem(index)


@op
class MakeTuple(TupleOp):
    """Several tensors as a TensorTuple."""

    parts: int

    def infer(self, *xs: Any) -> Any:
        specs = tuple(Spec(tuple(x.shape), str(x.dtype)) for x in xs)
        return specs[0] if self.parts == 1 else specs

    def compute(self, *xs: Any) -> Any:
        return xs

    reference = compute

    def gradient(self, out_grad: Any, node: Tensor) -> Any:
        return tuple(out_grad[i] for i in range(self.parts))


def make_tuple(*tensors: Tensor) -> Any:
    """Several tensors, of any shapes, as one TensorTuple, through which gradients flow; while a graph is recorded, the plain
    tuple of them."""
    if any(t.recorder is not None for t in tensors):
        return tensors  # graphs hold plain tuples
    return MakeTuple(len(tensors))(*tensors)


@tensor_method("__add__", of=TensorTuple)
def add_items(value: TensorTuple, other: Any) -> Any:
    """Item by item, as gradients of tuples add up."""
    if len(value) != len(other):
        raise ValueError(f"[add] expects a tuple of {len(value)} tensors, got {len(other)}.")
    return make_tuple(*(add(a, b) for a, b in zip(value, other, strict=True)))


# -- dilation ------------------------------------------------------------------------------------------------------------


def dilate(a: Tensor, axes: Any, dilation: int) -> Tensor:
    """`dilation` zeros after every element along the axes; axes that a has not are ignored."""
    axes = present_axes(axes, a.ndim)
    shape = tuple(s * (dilation + 1) if i in axes else s for i, s in enumerate(a.shape))
    return ScatterItem(encode_index(dilated_index(a.ndim, axes, dilation)), shape)(a)


def undilate(a: Tensor, axes: Any, dilation: int) -> Tensor:
    """The elements that `dilate` spread out."""
    axes = present_axes(axes, a.ndim)
    return getitem(a, dilated_index(a.ndim, axes, dilation))


def present_axes(axes: int | Sequence[int], ndim: int) -> list[int]:
    return [x % ndim for x in ((axes,) if isinstance(axes, int) else axes) if -ndim <= x < ndim]


def dilated_index(ndim: int, axes: Sequence[int], dilation: int) -> tuple:
    return tuple(slice(None, None, dilation + 1 if i in axes else 1) for i in range(ndim))

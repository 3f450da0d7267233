"""Writing by numbers: elements along an axis, slices of an axis, places of several axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from needle.autograd import Op, Spec, Tensor, op, tensor_method
from needle.backend_ndarray import FLOATS, NDArray, call
from needle.op import one_of
from needle.ops.common import as_operand, broadcast_shape, check_axis, constant, with_axis
from needle.ops.families import samples_of
from needle.ops.math.arithmetic import floor_divide
from needle.ops.math.comparison import eq
from needle.ops.math.elementwise import cast, maximum, where
from needle.ops.shape.basic import broadcast_to, flatten, reshape
from needle.ops.shape.gather import SCATTERS, check_index, check_range, gather, one_number, scatter_into, take
from needle.ops.shape.indexing import ScatterItem, encode_index, getitem
from needle.ops.shape.masked import MaskedPut, masked_put
from needle.ops.shape.runtime_shape import cast_like

__all__ = [
    "index_add",
    "index_copy",
    "index_fill",
    "index_put",
    "index_reduce",
    "scatter",
    "scatter_reduce",
]

UFUNCS = {"sum": np.add, "prod": np.multiply, "amax": np.maximum, "amin": np.minimum}


def ones_behind(x: Any, axis: int, count: int) -> tuple[int, ...]:
    """The shape in which `count` numbers stand along an axis of x."""
    return (count,) + (1,) * (len(x.shape) - axis - 1)


class Write(Op):
    """Base of ops that write where numbers of `index` along an axis say, and keep the rest of x, whose dtype all have.

    A plan for a buffer that takes the result, such as a decoder's cache, writes these elements alone. Elements that go to the
    same place do so in their order.
    """

    axis: int
    updates = like_first = True
    reduce: ClassVar[Any] = "set"

    def into(self, out: NDArray, *inputs: NDArray) -> None:
        x, index, source = inputs
        self.check_values(x, index, source)
        if x is not out:
            call("copy", [out], x=x)
        self.write(with_axis(out), index, source, self.axis % max(out.ndim, 1))

    def write(self, out: NDArray, index: NDArray, source: NDArray, axis: int) -> None:
        """Into an array with axes that holds what stays."""
        raise NotImplementedError

    def check_source(self, x: Any, source: Any) -> None:
        if source.dtype != x.dtype:
            raise ValueError(f"[{self.label}] source expects dtype {x.dtype}, got {source.dtype}.")

    def check_values(self, x: Any, index: Any, source: Any) -> None:
        if isinstance(index, NDArray):
            check_range(self.label, index, 0, with_axis(x).shape[self.axis])


@op
class Scatter(Write):
    """x with source[i][j] combined into place [index[i][j]][j], for axis 0; `reduce` is one of SCATTERS.

    `index` has at most the size of source on every axis, and at most that of x on the others; a source without axes is for all.
    """

    axis: int
    reduce: str = "set"  # type: ignore[misc]
    checks = one_of(reduce=SCATTERS)

    def infer(self, x: Any, index: Any, source: Any) -> Any:
        check_index(self.label, index)
        axis = check_axis(self.label, self.axis, x.shape)
        self.check_source(x, source)
        wide, own, given = ((*t.shape,) or (1,) for t in (x, index, source))
        given = given if source.shape else own
        fits = len(wide) == len(own) == len(given) and all(
            i <= s and (d == axis or i <= w) for d, (w, i, s) in enumerate(zip(wide, own, given, strict=True))
        )
        if not fits:
            raise ValueError(
                f"[{self.label}] index expects at most the sizes of source {tuple(source.shape)} and, but for axis {axis}, of "
                f"x {tuple(x.shape)}, got {tuple(index.shape)}."
            )
        return Spec(tuple(x.shape), str(x.dtype))

    def write(self, out: NDArray, index: NDArray, source: NDArray, axis: int) -> None:
        index = with_axis(index)
        source = source.broadcast_to(index.shape) if source.ndim == 0 else source[whole(index.shape)]
        part = tuple(slice(0, out.shape[d] if d == axis else s) for d, s in enumerate(index.shape))
        scatter_into(out[part], axis, index, source, self.reduce)

    def reference(self, x: np.ndarray, index: np.ndarray, source: np.ndarray) -> Any:
        out = np.atleast_1d(x.copy())
        index = np.atleast_1d(index)
        axis = self.axis % out.ndim
        values = np.broadcast_to(source, index.shape) if source.ndim == 0 else source[whole(index.shape)]
        for place in np.ndindex(index.shape):
            to = (*place[:axis], index[place], *place[axis + 1 :])
            out[to] = values[place] if self.reduce == "set" else UFUNCS[self.reduce](out[to], values[place])
        return out.reshape(x.shape)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        x, index, source = node.inputs
        axis = self.axis % max(len(x.shape), 1)

        def read(t: Tensor) -> Tensor:
            return gather(t, axis, index)

        def added(t: Tensor) -> Tensor:
            return Scatter(axis, "sum")(constant(np.zeros(x.shape), out_grad), index, cast_like(t, out_grad))

        value = source if not source.shape else getitem(source, whole(index.shape))
        if self.reduce == "sum":
            return out_grad, None, self._whole(read(out_grad), source)
        if self.reduce == "set":
            count, behind = (index.shape[axis], ones_behind(index, axis, -1)) if index.shape else (1, ())
            order = broadcast_to(constant(np.arange(count).reshape(behind), index), index.shape)
            stays = eq(read(Scatter(axis)(constant(np.zeros(x.shape), index), index, order)), order)
            of_x = Scatter(axis)(out_grad, index, constant(0.0, out_grad))
            return of_x, None, self._whole(where(stays, read(out_grad), 0.0), source)
        if self.reduce == "prod":
            none_x, none = eq(x, 0), eq(value, 0) if source.shape else broadcast_to(eq(value, 0), index.shape)
            zeros = added(none) + cast_like(none_x, out_grad)
            others = where(none_x, 1.0, x)
            factors = where(none, 1.0, value)
            product = out_grad * Scatter(axis, "prod")(others, index, factors)
            of_x = where(eq(zeros - cast_like(none_x, out_grad), 0), product / others, 0.0)
            of_source = where(eq(read(zeros) - cast_like(none, out_grad), 0), read(product) / factors, 0.0)
            return of_x, None, self._whole(of_source, source)
        hit_x, hit = eq(x, node), eq(value, read(node))  # equal ones share the gradient
        share = out_grad / (added(hit) + cast_like(hit_x, out_grad))
        return where(hit_x, share, 0.0), None, self._whole(where(hit, read(share), 0.0), source)

    def _whole(self, part: Tensor, source: Tensor) -> Tensor:
        """The gradient of `source`, of which `part` is where the index reaches."""
        if not source.shape:
            return part.sum().reshape(())
        shape = tuple(source.shape)
        return part if tuple(part.shape) == shape else ScatterItem(encode_index(whole(part.shape)), shape)(part)

    samples = samples_of(
        ({"axis": 0}, [(5, 3), Spec((4, 3), "int64"), (4, 3)]),
        ({"axis": -1}, [(3, 4, 5), Spec((2, 4, 2), "int32"), (2, 5, 3)]),
        ({"axis": 1, "reduce": "sum"}, [(2, 4, 3), Spec((2, 6, 3), "int64"), (2, 6, 3)]),
        ({"axis": 1, "reduce": "sum"}, [(3, 4, 3), Spec((2, 6, 2), "int64"), ()]),
        ({"axis": 0, "reduce": "prod"}, [(4, 3), Spec((5, 3), "int64"), (5, 3)]),
        ({"axis": 0, "reduce": "amax"}, [(4, 3), Spec((5, 3), "int64"), (5, 3)]),
        ({"axis": 1, "reduce": "amin"}, [(3, 4), Spec((3, 5), "int64"), (3, 5)]),
    )


def whole(shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(0, s) for s in shape)


@tensor_method()
def scatter(a: Tensor, axis: int, index: Tensor, source: Any, reduce: str = "set") -> Tensor:
    """torch.scatter: a with the elements of `source`, a tensor or a number, at the numbers of `index` along an axis; with reduce
    "sum", "prod", "amax", "amin" combined with what is there."""
    source = source if isinstance(source, Tensor) else cast_like(as_operand(source, a), a)
    return Scatter(axis, reduce)(a, index, source)


@op
class ScatterReduce(Op):
    """As Scatter, with "mean" beside its reductions; without `include_self` what x holds at written places does not count.

    along: `index` has one axis and says where slices of source go, as for IndexAdd.
    """

    axis: int
    reduce: str
    include_self: bool = True
    along: bool = False
    checks = one_of(reduce=(*SCATTERS[1:], "mean"))

    def infer(self, x: Any, index: Any, source: Any) -> Any:
        if self.along:
            return IndexAdd(self.axis).infer(x, index, source)
        return Scatter(self.axis).infer(x, index, source)

    def decompose(self, x: Tensor, index: Tensor, source: Tensor) -> Tensor:
        axis = self.axis % max(len(x.shape), 1)
        if self.along:
            ones = ones_behind(x, axis, math.prod(index.shape)) if source.shape else ()
            index = broadcast_to(reshape(index, ones), source.shape)
        kept = x if self.include_self else Scatter(axis)(x, index, constant(self._start(x), x))
        if self.reduce != "mean":
            return Scatter(axis, self.reduce)(kept, index, source)
        total = Scatter(axis, "sum")(kept, index, source)
        one = constant(1, x)
        counted = broadcast_to(one, x.shape) if x.shape else one
        counted = counted if self.include_self else Scatter(axis)(counted, index, constant(0, x))
        count = maximum(Scatter(axis, "sum")(counted, index, one), one)
        return total / count if x.dtype in FLOATS else floor_divide(total, count)

    def _start(self, x: Tensor) -> float:
        """What combined with any value is that value."""
        if self.reduce not in ("amax", "amin"):
            return float(self.reduce == "prod")
        low, high = (-math.inf, math.inf) if x.dtype in FLOATS else integer_range(x.dtype)
        return low if self.reduce == "amax" else high

    samples = samples_of(
        ({"axis": 0, "reduce": "mean"}, [(4, 3), Spec((5, 3), "int64"), (5, 3)]),
        ({"axis": 1, "reduce": "mean", "include_self": False}, [(3, 4), Spec((3, 5), "int64"), (3, 5)]),
        ({"axis": 0, "reduce": "amax", "include_self": False}, [(4, 3), Spec((2, 3), "int64"), (2, 3)]),
        ({"axis": -1, "reduce": "prod", "include_self": False, "along": True}, [(2, 4), Spec((3,), "int64"), (2, 3)]),
    )


def integer_range(dtype: str) -> tuple[Any, Any]:
    info = np.iinfo("uint8" if dtype == "bool" else dtype)
    return info.min, info.max


def scatter_reduce(
    a: Tensor, axis: int, index: Tensor, source: Tensor, reduce: str, include_self: bool = True
) -> Tensor:
    """torch.scatter_reduce; reduce: "sum", "prod", "mean", "amax", "amin"."""
    return ScatterReduce(axis, reduce, include_self)(a, index, source)


def index_reduce(a: Tensor, axis: int, index: Tensor, source: Tensor, reduce: str, include_self: bool = True) -> Tensor:
    """torch.index_reduce: as `scatter_reduce`, of slices; "prod", "mean", "amax" or "amin"."""
    return ScatterReduce(axis, reduce, include_self, along=True)(a, index, source)


@op
class IndexCopy(Write):
    """x with the slices of `source` along an axis at the numbers of `index`, 1-d; of equal ones the last stays."""

    axis: int

    def infer(self, x: Any, index: Any, source: Any) -> Any:
        check_index(self.label, index)
        axis = check_axis(self.label, self.axis, x.shape)
        self.check_source(x, source)
        number = tuple(index.shape) or (1,)
        want = (*x.shape[:axis], *number, *x.shape[axis + 1 :]) if x.shape else ()
        if len(number) != 1 or tuple(source.shape) != want:
            raise ValueError(f"[{self.label}] source expects shape {want}, got {tuple(source.shape)}.")
        return Spec(tuple(x.shape), str(x.dtype))

    def write(self, out: NDArray, index: NDArray, source: NDArray, axis: int) -> None:
        source = with_axis(source)
        numbers = index.reshape(ones_behind(out, axis, math.prod(index.shape))).broadcast_to(source.shape)
        scatter_into(out, axis, numbers, source, self.reduce)

    def reference(self, x: np.ndarray, index: np.ndarray, source: np.ndarray) -> Any:
        out = np.atleast_1d(x.copy())
        np.moveaxis(out, self.axis, 0)[np.atleast_1d(index)] = np.moveaxis(np.atleast_1d(source), self.axis, 0)
        return out.reshape(x.shape)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        x, index, source = node.inputs
        if not x.shape:
            return constant(0.0, x), None, out_grad
        count, axis = index.shape[0], self.axis % len(x.shape)
        order = constant(np.arange(count), index)
        last = take(index_copy(constant(np.zeros(x.shape[axis]), index), 0, index, order), index)
        stays = reshape(eq(last, order), ones_behind(x, axis, count))  # none with its number comes later
        of_source = where(stays, take(out_grad, index, axis), 0.0)
        return index_copy(out_grad, axis, index, constant(np.zeros(source.shape), source)), None, of_source

    samples = samples_of(
        ({"axis": 0}, [(5, 3), Spec((4,), "int64"), (4, 3)]),
        ({"axis": -2}, [(2, 3, 4, 5), Spec((2,), "int32"), (2, 3, 2, 5)]),
    )


@tensor_method()
def index_copy(a: Tensor, axis: int, index: Tensor, source: Tensor) -> Tensor:
    """torch.index_copy: a with the slices of `source` at the numbers of `index` along an axis."""
    return IndexCopy(axis)(a, index, source)


@op
class IndexAdd(IndexCopy):
    """x with the slices of `source` along an axis added at the numbers of `index`, 1-d."""

    reduce = "sum"

    def reference(self, x: np.ndarray, index: np.ndarray, source: np.ndarray) -> Any:
        out = np.atleast_1d(x.copy())
        np.add.at(
            np.moveaxis(out, self.axis, 0), np.atleast_1d(index), np.moveaxis(np.atleast_1d(source), self.axis, 0)
        )
        return out.reshape(x.shape)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        return out_grad, None, take(out_grad, node.inputs[1], self.axis) if out_grad.shape else out_grad


@tensor_method()
def index_add(a: Tensor, axis: int, index: Tensor, source: Tensor) -> Tensor:
    """a with the slices of `source` added at the numbers of `index` along an axis."""
    return IndexAdd(axis)(a, index, source)


@op
class IndexFill(Op):
    """x with a number at the numbers of `index`, 1-d, along an axis."""

    axis: int
    value: Any
    like_first = True

    def infer(self, x: Any, index: Any) -> Any:
        check_index(self.label, index)
        check_axis(self.label, self.axis, x.shape)
        return Spec(tuple(x.shape), str(x.dtype))

    def decompose(self, x: Tensor, index: Tensor) -> Tensor:
        axis = self.axis % max(len(x.shape), 1)
        numbers = one_number([flatten(index)], with_axis(x).shape[axis : axis + 1])
        shape = (*x.shape[:axis], numbers.shape[0], *x.shape[axis + 1 :]) if x.shape else ()
        return index_copy(x, axis, numbers, broadcast_to(constant(self.value, x), shape))

    samples = samples_of(({"axis": 1, "value": 2.5}, [(2, 4, 3), Spec((3,), "int64")]))


@tensor_method()
def index_fill(a: Tensor, axis: int, index: Tensor, value: Any) -> Tensor:
    """torch.index_fill; negative numbers count from the end."""
    return IndexFill(axis, value)(a, index)


@op
class IndexPut(Op):
    """x[..., i, j, ...] = values for integer tensors on neighbouring axes from `axis` on, negative numbers counted from the end.

    Of equal places the last value stays, or with `accumulate` all are added. `values` broadcast to x[..., i, j, ...].
    """

    axis: int
    accumulate: bool = False
    like_first = True

    def _wanted(self, x: Any, index: Sequence[Any]) -> tuple[int, ...]:
        axis = check_axis(self.label, self.axis, x.shape)
        if axis + len(index) > len(x.shape):
            raise IndexError(f"[{self.label}] too many indices for shape {tuple(x.shape)}, got {axis + len(index)}.")
        picked = broadcast_shape(self.label, *(tuple(i.shape) for i in index))
        return (*x.shape[:axis], *picked, *x.shape[axis + len(index) :])

    def _is_mask(self, index: Sequence[Any]) -> bool:
        """Whether one bool mask stands for integer tensors, which only a call without dtypes of before may tell."""
        return len(index) == 1 and index[0].dtype == "bool" and self.axis == 0 and not self.accumulate

    def infer(self, x: Any, values: Any, *index: Any) -> Any:
        if self._is_mask(index):
            return MaskedPut().infer(x, index[0], values)
        for i in index:
            check_index(self.label, i)
        want = self._wanted(x, index)
        if broadcast_shape(self.label, tuple(values.shape), want) != want:
            raise ValueError(
                f"[{self.label}] values expect a shape that broadcasts to {want}, got {tuple(values.shape)}."
            )
        return Spec(tuple(x.shape), str(x.dtype))

    def decompose(self, x: Tensor, values: Tensor, *index: Tensor) -> Tensor:
        if self._is_mask(index):
            return masked_put(x, index[0], values)
        axis, want = self.axis % len(x.shape), self._wanted(x, index)
        sizes, after = x.shape[axis : axis + len(index)], axis + len(index)
        numbers = flatten(one_number(index, sizes))
        shape = (*x.shape[:axis], math.prod(sizes), *x.shape[after:])
        source = broadcast_to(cast(values, x.dtype), want)
        source = reshape(source, (*shape[:axis], math.prod(numbers.shape), *shape[axis + 1 :]))
        write = IndexAdd if self.accumulate else IndexCopy
        if len(index) == 1:  # an array that the plan may write where it is
            return write(axis)(x, numbers, source)
        return reshape(write(axis)(reshape(x, shape), numbers, source), x.shape)

    samples = samples_of(
        ({"axis": 1}, [(2, 4, 5, 3), (2, 2, 3, 3), Spec((2, 1), "int64"), Spec((3,), "int64")]),
        ({"axis": 0, "accumulate": True}, [(4, 3), (3,), Spec((2, 3), "int64")]),
    )


@tensor_method()
def index_put(a: Tensor, indices: Sequence[Tensor], values: Any, axis: int = 0, accumulate: bool = False) -> Tensor:
    """a with `values`, a tensor or a number, at integer tensors on the axes from `axis` on."""
    return IndexPut(axis, accumulate)(a, as_operand(values, a), *indices)

"""Picking by numbers: rows of an axis, elements along an axis, several index tensors at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from needle.autograd import Op, Spec, Tensor, op, tensor_method
from needle.backend_ndarray import NDArray, call
from needle.backend_ndarray.kernels import call_map
from needle.backend_ndarray.ndarray import PLANNING
from needle.backend_ndarray.sizes import whole
from needle.backend_ndarray.strides import reshaped_strides
from needle.ops.common import broadcast_shape, check_axis, constant, with_axis
from needle.ops.dtypes import cast_array
from needle.ops.families import no_gradient, samples_of
from needle.ops.math.comparison import ge, lt
from needle.ops.math.elementwise import where
from needle.ops.math.logic import logical_or
from needle.ops.shape.basic import broadcast_to, reshape

__all__ = ["gather", "index_tensors", "take", "take_along"]

SCATTERS: tuple[str, ...] = ("set", "sum", "prod", "amax", "amin")  # a place among them is the kernel's number


def check_index(label: str, index: Any) -> None:
    if index.dtype not in ("int32", "int64"):
        raise ValueError(f"[{label}] index expects dtype int32 or int64, got {index.dtype}.")


def axis_first(ndim: int, axis: int) -> list[int]:
    return [axis, *(i for i in range(ndim) if i != axis)]


def check_range(label: str, index: NDArray, low: int, high: int) -> None:
    """Raise IndexError for numbers outside of [low, high), where their values are known."""
    if PLANNING.builder is None:
        values = index.read()
        if values.size and (values.min() < low or values.max() >= high):
            raise IndexError(
                f"[{label}] index expects numbers in [{low}, {high}), got {values.min()} to {values.max()}."
            )


def row_numbers(label: str, index: NDArray, size: int, wrap: bool = True) -> NDArray:
    """Numbers of rows for the kernels, with `wrap` negative ones counted from the end; checked where their values are known."""
    check_range(label, index, -size if wrap else 0, size)
    return wrapped_array(index, size) if wrap else index


def wrapped_array(index: NDArray, size: int) -> NDArray:
    """Numbers of which negative ones count from the end; those that many elements share are there once."""
    once = index[tuple(slice(0, 1) if step == 0 else slice(None) for step in index.strides)]
    out = NDArray.empty(once.shape, once.dtype)
    call_map("wrapped", out, [once], (size,))
    return out.broadcast_to(index.shape)


@op
class Wrapped(Op):
    """Numbers along an axis of `size`, negative ones counted from the end."""

    size: Any

    def infer(self, index: Any) -> Any:
        check_index(self.label, index)
        return Spec(tuple(index.shape), str(index.dtype))

    def compute(self, index: NDArray) -> Any:
        return wrapped_array(index, whole(self.size))

    def reference(self, index: np.ndarray) -> Any:
        return np.where(index < 0, index + self.size, index).astype(index.dtype)

    gradient = no_gradient

    samples = samples_of(({"size": 3}, [Spec((4, 3), "int64")]))


def three_axes(x: NDArray, axis: int) -> NDArray:
    """x as (everything before the axis, the axis, everything behind): a view, or a copy where its strides allow none."""
    shape = (math.prod(x.shape[:axis]), x.shape[axis], math.prod(x.shape[axis + 1 :]))
    strides = reshaped_strides(x.shape, x.strides, shape)
    return x.compact().reshape(shape) if strides is None else x.strided(shape, strides)


def scatter_into(out: NDArray, axis: int, index: NDArray, source: NDArray, reduce: str) -> None:
    """The kernel on a part of an array that is there; index and source have its shape but for the axis."""
    table, rows, numbers = (three_axes(a, axis) for a in (out, source, index))
    call("scatter", [table], rows=rows, numbers=numbers, reduce=SCATTERS.index(reduce))
    if table._handle is not out._handle:
        call("copy", [out], x=table.reshape(out.shape))


@op
class Take(Op):
    """x at the numbers of `index` along an axis; the index's axes stand in its place. wrap: negative ones count from the end."""

    axis: int = 0
    wrap: bool = True

    def infer(self, x: Any, index: Any) -> Any:
        check_index("take", index)
        axis = check_axis("take", self.axis, x.shape)
        return Spec((*x.shape[:axis], *index.shape, *x.shape[axis + 1 :]), str(x.dtype))

    def compute(self, x: NDArray, index: NDArray) -> Any:
        x = with_axis(x)
        axis = self.axis % x.ndim
        source = cast_array(x, "int32" if x.dtype == "bool" else x.dtype)
        table = source.permute(axis_first(x.ndim, axis)).reshape((x.shape[axis], -1 if x.size else 0))
        numbers = row_numbers("take", index.reshape((-1,)), x.shape[axis], self.wrap)
        out = NDArray.empty((numbers.shape[0], table.shape[1]), table.dtype)
        call("gather_rows", [out], table=table, numbers=numbers)
        rest = [s for i, s in enumerate(x.shape) if i != axis]
        k = index.ndim
        order = [*range(k, k + axis), *range(k), *range(k + axis, k + len(rest))]
        return cast_array(out.reshape((*index.shape, *rest)).permute(order), x.dtype)

    def reference(self, x: np.ndarray, index: np.ndarray) -> Any:
        return np.take(with_axis(x), index, axis=self.axis)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        x, index = node.inputs
        if not x.shape:
            flat = TakeGrad(0, 1)(reshape(out_grad, (-1,)), reshape(index, (-1,)))
            return reshape(flat, ()), None
        return TakeGrad(self.axis % len(x.shape), x.shape[self.axis])(out_grad, index), None

    samples = samples_of(
        ({"axis": 0}, [(5, 3), Spec((2, 4), "int64")]),
        ({"axis": -2}, [(2, 4, 3), Spec((6,), "int32")]),
    )


@op
class TakeGrad(Op):
    """Zeros of `size` along an axis with the rows of a gradient added at the numbers of `index`: the gradient of Take."""

    axis: int
    size: int

    def infer(self, g: Any, index: Any) -> Any:
        check_index(self.label, index)
        stop = self.axis + len(index.shape)
        if self.axis < 0 or self.size < 0 or tuple(g.shape[self.axis : stop]) != tuple(index.shape):
            raise ValueError(
                f"[{self.label}] expects the index's shape {tuple(index.shape)} from axis {self.axis} of the gradient on, "
                f"got {tuple(g.shape)}."
            )
        return Spec((*g.shape[: self.axis], self.size, *g.shape[self.axis + len(index.shape) :]), str(g.dtype))

    def _rows_first(self, g: Any, index: Any) -> Any:
        """g as (numbers, everything else)."""
        k = index.ndim
        place = list(range(self.axis, self.axis + k))
        moved = [*place, *(i for i in range(g.ndim) if i not in place)]
        ordered = g.permute(moved) if isinstance(g, NDArray) else g.transpose(moved)
        return ordered.reshape((index.size, math.prod(n for i, n in enumerate(g.shape) if i not in place)))

    def compute(self, g: NDArray, index: NDArray) -> Any:
        rows, shape = self._rows_first(g, index), self.infer(g, index).shape
        out = NDArray.empty((self.size, rows.shape[1]), g.dtype)
        call(
            "scatter_add_rows", [out], rows=rows, numbers=row_numbers("take", index.reshape((-1,)), self.size), skip=-1
        )
        rest = [s for i, s in enumerate(shape) if i != self.axis]
        return out.reshape((self.size, *rest)).permute([int(i) for i in np.argsort(axis_first(len(shape), self.axis))])

    def reference(self, g: np.ndarray, index: np.ndarray) -> Any:
        out = np.zeros(self.infer(g, index).shape, g.dtype)
        rest = [s for i, s in enumerate(out.shape) if i != self.axis]
        np.add.at(np.moveaxis(out, self.axis, 0), index.reshape(-1), self._rows_first(g, index).reshape(-1, *rest))
        return out

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        return Take(self.axis)(out_grad, node.inputs[1]), None

    samples = samples_of(({"axis": 1, "size": 5}, [(2, 4, 3), Spec((4,), "int64")]))


def take(a: Tensor, index: Tensor, axis: int = 0, wrap: bool = True) -> Tensor:
    """a at the numbers of `index` (int32 or int64, any shape) along an axis; without `wrap` negative ones are refused."""
    return Take(axis, wrap)(a, index)


@op
class Gather(Op):
    """Elements along an axis: out[i][j] = x[index[i][j]][j] for axis 0. `index` is at most as long as x on other axes.

    wrap: negative numbers count from the end.
    """

    axis: int
    wrap: bool = True

    def infer(self, x: Any, index: Any) -> Any:
        check_index("gather", index)
        axis = check_axis("gather", self.axis, x.shape)
        fits = len(x.shape) == len(index.shape) and all(
            i <= s for d, (i, s) in enumerate(zip(index.shape, x.shape, strict=True)) if d != axis
        )
        if not fits:
            raise ValueError(f"[gather] index expects at most shape {tuple(x.shape)}, got {tuple(index.shape)}.")
        return Spec(tuple(index.shape), str(x.dtype))

    def compute(self, x: NDArray, index: NDArray) -> Any:
        shape, dtype = self.infer(x, index)
        table, numbers = with_axis(x), with_axis(index)
        axis = self.axis % table.ndim
        numbers = row_numbers("gather", numbers, table.shape[axis], self.wrap)
        part = tuple(slice(0, table.shape[d] if d == axis else s) for d, s in enumerate(numbers.shape))
        out = NDArray.empty(shape or (1,), dtype)
        three = [three_axes(a, axis) for a in (table[part], numbers, out)]
        call("gather", three[2:], x=three[0], numbers=three[1])
        return out.reshape(shape)

    def decompose(self, x: Tensor, index: Tensor) -> Tensor:
        return take(reshape(x, (-1,)), flat_places(x.shape, self.axis, index)) if x.shape else take(x, index)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        x, index = node.inputs
        return GatherGrad(self.axis, tuple(x.shape))(out_grad, index), None

    samples = samples_of(
        ({"axis": 0}, [(4, 3), Spec((2, 3), "int64")]),
        ({"axis": -1}, [(2, 3, 4), Spec((2, 2, 5), "int64")]),
    )


def flat_places(shape: Sequence[int], axis: int, index: Tensor) -> Tensor:
    """Where, among all elements of an array of `shape`, those are that an index of Gather names; beyond the last one where a
    number is outside of its axis."""
    axis %= len(shape)
    grid = np.indices(index.shape, sparse=True)
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    place = sum(g * s for d, (g, s) in enumerate(zip(grid, strides, strict=True)) if d != axis)
    number = Wrapped(shape[axis])(index)
    inside = constant(np.asarray(place, "int64"), index, "int64") + number * strides[axis]
    return where(outside(number, shape[axis]), math.prod(shape), inside)


@op
class GatherGrad(Op):
    """Zeros of `shape` with the elements of a gradient added where Gather took them from by `index`."""

    axis: int
    shape: tuple

    def infer(self, g: Any, index: Any) -> Any:
        taken = Gather(self.axis).infer(Spec(self.shape, str(g.dtype)), index)
        if tuple(g.shape) != taken.shape:
            raise ValueError(f"[{self.label}] gradient expects shape {taken.shape}, got {tuple(g.shape)}.")
        return Spec(self.shape, str(g.dtype))

    def compute(self, g: NDArray, index: NDArray) -> Any:
        out = NDArray.empty(self.shape or (1,), g.dtype)
        out.fill(0)
        axis, rows = self.axis % out.ndim, with_axis(g)
        numbers = wrapped_array(with_axis(index), out.shape[axis])
        part = tuple(slice(0, out.shape[d] if d == axis else s) for d, s in enumerate(rows.shape))
        scatter_into(out[part], axis, numbers, rows, "sum")
        return out.reshape(self.shape)

    def reference(self, g: np.ndarray, index: np.ndarray) -> Any:
        out = np.zeros(self.shape or (1,), g.dtype)
        numbers = index.reshape(index.shape or (1,))
        places = [*np.indices(numbers.shape)]
        places[self.axis % out.ndim] = numbers
        np.add.at(out, tuple(places), g.reshape(numbers.shape))
        return out.reshape(self.shape)

    def decompose(self, g: Tensor, index: Tensor) -> Tensor:
        if not self.shape:
            return g
        places = reshape(flat_places(self.shape, self.axis, index), (-1,))
        return reshape(TakeGrad(0, math.prod(self.shape))(reshape(g, (-1,)), places), self.shape)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        return Gather(self.axis)(out_grad, node.inputs[1]), None

    samples = samples_of(
        ({"axis": 0, "shape": (4, 3)}, [(2, 3), Spec((2, 3), "int64")]),
        ({"axis": -1, "shape": (2, 3, 4)}, [(2, 2, 5), Spec((2, 2, 5), "int32")]),
        ({"axis": 1, "shape": (3, 5, 20)}, [(3, 1, 20), Spec((3, 1, 20), "int64")]),
    )


@tensor_method()
def gather(a: Tensor, axis: int, index: Tensor, wrap: bool = True) -> Tensor:
    """torch.gather; with `wrap` negative numbers count from the end."""
    return Gather(axis, wrap)(a, index)


@op
class TakeAlong(Op):
    """As Gather, with x and the index broadcast together on the other axes."""

    axis: int

    def _shape(self, x: Any, index: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
        axis = check_axis("take_along", self.axis, x.shape)
        ones = [tuple(1 if d == axis else s for d, s in enumerate(t.shape)) for t in (x, index)]
        both = broadcast_shape("take_along", *ones)
        return tuple((*both[:axis], t.shape[axis], *both[axis + 1 :]) for t in (x, index))  # type: ignore[return-value]

    def infer(self, x: Any, index: Any) -> Any:
        check_index("take_along", index)
        return Spec(self._shape(x, index)[1], str(x.dtype))

    def decompose(self, x: Tensor, index: Tensor) -> Tensor:
        wide, numbers = self._shape(x, index)
        return gather(broadcast_to(x, wide), self.axis, broadcast_to(index, numbers))

    samples = samples_of(({"axis": 1}, [(2, 4, 3), Spec((2, 2, 1), "int64")]))


def take_along(a: Tensor, index: Tensor, axis: int) -> Tensor:
    """numpy.take_along_axis."""
    return TakeAlong(axis)(a, index)


def one_number(index: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """The place among all elements of axes of these sizes that an index for each of them names; beyond the last one where one
    of them is outside of its axis."""
    number: Any = None
    beyond: Any = None  # its own axis, where the number in all of them may still be a valid one
    for i, size in zip(index, sizes, strict=True):
        wrapped = Wrapped(size)(i)
        if len(index) == 1:
            return wrapped
        number = wrapped if number is None else number * size + wrapped
        beyond = outside(wrapped, size) if beyond is None else logical_or(beyond, outside(wrapped, size))
    return where(beyond, math.prod(sizes), number)  # type: ignore[arg-type]


def outside(number: Tensor, size: int) -> Tensor:
    return logical_or(lt(number, 0), ge(number, size))


@op
class IndexTensors(Op):
    """x[..., i, j, ...] for integer tensors on neighbouring axes from `axis` on; their broadcast shape stands in their place."""

    axis: int

    def infer(self, x: Any, *index: Any) -> Any:
        for i in index:
            check_index("getitem", i)
        axis = check_axis("getitem", self.axis, x.shape)
        if axis + len(index) > len(x.shape):
            raise IndexError(f"[getitem] too many indices for shape {tuple(x.shape)}, got {axis + len(index)}.")
        picked = broadcast_shape("getitem", *(tuple(i.shape) for i in index))
        return Spec((*x.shape[:axis], *picked, *x.shape[axis + len(index) :]), str(x.dtype))

    def decompose(self, x: Tensor, *index: Tensor) -> Tensor:
        axis = self.axis % len(x.shape)
        after = axis + len(index)
        flat = reshape(x, (*x.shape[:axis], math.prod(x.shape[axis:after]), *x.shape[after:]))
        return take(flat, one_number(index, x.shape[axis:after]), axis)

    samples = samples_of(({"axis": 1}, [(2, 4, 5, 3), Spec((2, 1), "int64"), Spec((3,), "int64")]))


def index_tensors(a: Tensor, indices: Sequence[Tensor], axis: int = 0) -> Tensor:
    """a indexed by integer tensors on the axes from `axis` on."""
    if len(indices) == 1:
        return take(a, indices[0], axis)
    return IndexTensors(axis)(a, *indices)

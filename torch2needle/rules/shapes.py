"""Rules of shapes, views and joining. Sizes may be symbolic; ops resolve negative axes when they run."""

from __future__ import annotations

import builtins
import math
import operator
from collections.abc import Callable, Sequence
from functools import reduce
from itertools import pairwise
from typing import Any

import torch

from needle import ops
from needle.autograd import Unsupported
from needle.backend_ndarray import FLOATS
from needle.graph.record import SymbolicShape
from needle.ops.shape.join import along_axis as at

from .arithmetic import DtypeOf
from .reductions import axes
from .registry import rule
from .tables import functions

T = torch.Tensor


def varargs(values: tuple, named: Any = None) -> tuple:
    """f(1, 2), f((1, 2)), f(x.shape) and f(size=(1, 2)), whose keyword is `named`, alike."""
    if named is not None:
        return tuple(named)
    return (
        tuple(values[0]) if len(values) == 1 and isinstance(values[0], tuple | list | SymbolicShape) else tuple(values)
    )


def listed(f: Callable) -> Callable:
    """f(input, tuple) for methods that take numbers one by one, as one sequence, or by keyword."""
    return lambda input, numbers, named, *rest: f(input, varargs(numbers, named), *rest)


def back_in_shape(base: Any, value: Any, *_: Any, **__: Any) -> Any:
    """For views that only change the shape: what the base becomes when the view is written."""
    return ops.reshape_like(value, base)


def unchanged(base: Any, value: Any, *_: Any, **__: Any) -> Any:
    """For views of all elements in the same shape."""
    return value


def beside_gradients(base: Any, value: Any, *_: Any, **__: Any) -> Any:
    """For detached views: gradients do not see the write, and pass to what there was before."""
    if base.dtype not in FLOATS:
        return value
    return ops.straight_through(value, base)


def overlaps(base: Any, value: Any, *_: Any, **__: Any) -> Any:
    """For views of which several elements are one of the base, so that a write to a part changes others."""
    raise Unsupported("it writes a view whose elements share memory with each other; clone it first")


# -- joining -------------------------------------------------------------------------------------------------------------


@rule(torch.cat, torch.concat, torch.concatenate)
def cat(tensors: Sequence[Any], dim: int = 0) -> Any:
    full = next((t for t in tensors if getattr(t, "spec", None) is None or t.spec.shape != (0,)), None)
    spec = getattr(full, "spec", None)
    if full is None or (spec is not None and spec.ndim == 1):
        return ops.concat(list(tensors), dim)
    return ops.concat([p for t in tensors for p in part_beside(full, t, dim)], dim)


def part_beside(full: Any, t: Any, dim: int) -> list[Any]:
    """What is joined for t beside `full`: of shape (0,), as caches begin, it takes part in the dtype alone, if at all."""
    mine, theirs = getattr(t, "spec", None), getattr(full, "spec", None)
    if mine is None or mine.shape != (0,):
        return [t]
    if theirs is not None and theirs.dtype == mine.dtype:
        return []
    return [ops.cast_like(ops.getitem(full, at(dim, slice(0, 0))), t)]


functions("tensors, dim=0", {(torch.stack,): ops.stack})


@rule(torch.hstack)
def hstack(tensors: Sequence[Any]) -> Any:
    tensors = [ops.flatten(t) if t.ndim == 0 else t for t in tensors]
    return cat(tensors, 0 if tensors[0].ndim == 1 else 1)


@rule(torch.vstack, torch.row_stack)
def vstack(tensors: Sequence[Any]) -> Any:
    rows = [ops.unsqueeze(ops.flatten(t), 0) if t.ndim < 2 else t for t in tensors]
    return ops.concat(rows, 0)


# -- views of all elements -----------------------------------------------------------------------------------------------


def reshaped(input: Any, shape: Any) -> Any:
    return ops.reshape(input, shape=tuple(shape))


def viewed(input: Any, shape: tuple) -> Any:
    if len(shape) == 1 and isinstance(shape[0], torch.dtype):
        raise Unsupported("view(dtype) reinterprets memory")
    return reshaped(input, shape)


functions(
    "input, start_dim=0, end_dim=-1",
    {(torch.flatten, T.flatten, torch.ravel, T.ravel): ops.flatten},
    view="maybe",
    put=back_in_shape,
)
functions("input, dim, sizes", {(torch.unflatten, T.unflatten): ops.unflatten}, view="always", put=back_in_shape)
functions("input, *numbers, size=None", {(T.view,): listed(viewed)}, view="always", put=back_in_shape)
functions("input, *numbers, shape=None", {(T.reshape,): listed(reshaped)}, view="maybe", put=back_in_shape)
functions("input, shape", {(torch.reshape,): reshaped}, view="maybe", put=back_in_shape)
functions("input, other", {(T.view_as,): ops.reshape_like}, view="always", put=back_in_shape)
functions("input, other", {(T.reshape_as,): ops.reshape_like}, view="maybe", put=back_in_shape)
functions("input, dim", {(torch.unsqueeze, T.unsqueeze, T.unsqueeze_): ops.unsqueeze}, view="always", put=back_in_shape)
functions("input, dim=None", {(torch.squeeze, T.squeeze, T.squeeze_): ops.squeeze}, view="always", put=back_in_shape)


def permuted_back(base: Any, value: Any, *axes: Any, dims: Any = None) -> Any:
    given = varargs(axes) if dims is None else dims
    order = [d % len(given) for d in given]
    return ops.permute(value, tuple(order.index(i) for i in range(len(order))))


def permuted(input: Any, dims: Any) -> Any:
    return ops.permute(input, tuple(dims))


functions("input, dims", {(torch.permute,): permuted}, view="always", put=permuted_back)
functions("input, *numbers, dims=None", {(T.permute,): listed(permuted)}, view="always", put=permuted_back)
functions(
    "input, dim0, dim1",
    {
        (
            *(torch.transpose, T.transpose, T.transpose_),
            *(torch.swapaxes, T.swapaxes, T.swapaxes_, torch.swapdims, T.swapdims, T.swapdims_),
        ): lambda input, dim0, dim1: ops.transpose(input, (dim0, dim1))
    },
    view="always",
    put=lambda base, value, dim0, dim1: ops.transpose(value, (dim0, dim1)),
)
functions("input", {(torch.t, T.t, T.t_): ops.permute}, view="always", put=lambda base, value: ops.permute(value))
functions(
    "input, source, destination",
    {(torch.movedim, T.movedim, torch.moveaxis, T.moveaxis): ops.moveaxis},
    view="always",
    put=lambda base, value, source, destination: ops.moveaxis(value, destination, source),
)


def expanded(input: Any, size: Any, implicit: bool = False) -> Any:
    return ops.broadcast_to(input, shape=tuple(size))


functions("input, *numbers, size=None, implicit=False", {(T.expand,): listed(expanded)}, view="always", put=overlaps)
functions("input, size", {(torch.broadcast_to, T.broadcast_to): expanded}, view="always", put=overlaps)
functions("input, other", {(T.expand_as,): ops.broadcast_like}, view="always", put=overlaps)
functions("input, memory_format=None", {(T.contiguous,): lambda input: input}, view="maybe", put=unchanged)
functions("input, *, memory_format=None", {(T.clone, torch.clone): lambda input: input})
functions("input", {(T.detach_,): ops.stop_gradient}, view="always")
functions("input", {(torch.detach, T.detach): ops.stop_gradient}, view="always", put=beside_gradients)


# -- copies --------------------------------------------------------------------------------------------------------------


def tiled(input: Any, repeats: Any) -> Any:
    return ops.tile(input, tuple(repeats))


functions("input, *numbers, repeats=None", {(T.repeat,): listed(tiled)})
functions("input, *numbers, dims=None", {(T.tile,): listed(tiled), (T.flip,): listed(ops.flip)})
functions("input, dims", {(torch.tile,): tiled, (torch.flip,): ops.flip})
functions(
    "input",
    {
        (torch.fliplr, T.fliplr): lambda input: ops.flip(input, 1),
        (torch.flipud, T.flipud): lambda input: ops.flip(input, 0),
    },
)
functions(
    "input, diagonal=0",
    {
        (torch.tril, T.tril, T.tril_): ops.tril,
        (torch.triu, T.triu, T.triu_): ops.triu,
    },
)


functions("input, shifts, dims=None", {(torch.roll, T.roll): lambda x, shifts, dims: ops.roll(x, shifts, axes(dims))})


# -- pieces --------------------------------------------------------------------------------------------------------------


class Pieces:
    """The pieces of a tensor whose number is not known: `a, b = x.split(4)` asks for single ones."""

    def __init__(self, make: Callable[[int], Any], what: str) -> None:
        self.make, self.what = make, what

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, int) or index < 0:
            self.__len__()
        return self.make(index)

    def __len__(self) -> int:
        raise Unsupported(f"{self.what} gives a number of pieces that depends on the size; pass example=")

    def __iter__(self) -> Any:
        return iter(range(len(self)))


class Absent(Pieces):
    """A result that a rule does not give, such as the indices of a pool: whoever reads it is refused."""

    def __init__(self, why: str) -> None:
        self.why = why

    def __getitem__(self, index: Any) -> Any:
        raise Unsupported(self.why)

    def __len__(self) -> int:
        raise Unsupported(self.why)


def known_size(input: Any, dim: int) -> Any:
    """The example's size of an axis, or None without an example."""
    spec = getattr(input, "spec", None)
    if spec is not None and not -spec.ndim <= dim < spec.ndim:
        raise Unsupported(f"axis {dim} is out of range for shape {tuple(spec.shape)}")
    return None if spec is None else spec.shape[dim]


def joined(base: Any, value: Any, _: Any = None, dim: int = 0, **__: Any) -> Any:
    return ops.concat(list(value), dim)


@rule(torch.chunk, T.chunk, torch.unsafe_chunk, T.unsafe_chunk, view="always", put=joined)
def chunk(input: Any, chunks: int, dim: int = 0) -> Any:
    total = known_size(input, dim)
    count = chunks if not total else max(1, -(-total // max(1, -(-total // chunks))))
    return tuple(ops.Piece(dim, i, pieces=chunks, count=count)(input) for i in range(count))


@rule(torch.split, T.split, torch.functional.split, torch.unsafe_split, T.unsafe_split, view="always", put=joined)
def split(tensor: Any, split_size_or_sections: Any, dim: int = 0) -> Any:
    size = split_size_or_sections
    if isinstance(size, tuple | list):
        return ops.split_sizes(tensor, size, dim)
    total = known_size(tensor, dim)
    step = size if isinstance(size, int) else size.node.meta.get("example")
    if total is None or step is None:
        return Pieces(lambda i: ops.Piece(dim, i, size=size)(tensor), "split")
    count = max(1, -(-total // max(1, step)))
    return tuple(ops.Piece(dim, i, size=size, count=count)(tensor) for i in range(count))


@rule(torch.tensor_split, T.tensor_split, view="always", put=joined)
def tensor_split(input: Any, indices_or_sections: Any, dim: int = 0) -> Any:
    if isinstance(indices_or_sections, int):
        n = indices_or_sections
        return tuple(ops.Piece(dim, i, pieces=n, even=True)(input) for i in range(n))
    bounds = [0, *indices_or_sections, None]
    return tuple(ops.getitem(input, at(dim, slice(a, b))) for a, b in pairwise(bounds))


@rule(torch.unbind, T.unbind, view="always", put=lambda base, value, dim=0: ops.stack(list(value), dim))
def unbind(input: Any, dim: int = 0) -> Any:
    count = known_size(input, dim)
    if count is None:
        return Pieces(lambda i: ops.getitem(input, at(dim, i)), "unbind")
    if not count:  # no piece would tell that another input has some
        raise Unsupported(f"unbind expects an axis that is not empty, got size 0 in axis {dim}")
    return tuple(ops.squeeze(ops.Piece(dim, i, size=1, count=count)(input), dim) for i in range(count))


@rule(torch.broadcast_tensors, view="maybe")
def broadcast_tensors(*tensors: Any) -> Any:
    given = tensors[0] if len(tensors) == 1 and isinstance(tensors[0], tuple | list) else tensors
    like = reduce(operator.mul, given)  # of which only the shape counts
    return tuple(ops.broadcast_like(x, like) for x in given)


# -- sizes and attributes ------------------------------------------------------------------------------------------------


functions("input, dim=None", {(T.size,): lambda x, dim: x.shape if dim is None else x.shape[dim]})
functions(
    "input",
    {
        (T.dim, T.ndimension): lambda x: x.ndim,
        (T.numel, torch.numel, T.nelement): lambda x: math.prod(x.shape[i] for i in range(x.ndim)),
        (len,): lambda x: len(x) if isinstance(x, tuple | list | Pieces) else x.shape[0],
        (T.is_floating_point, torch.is_floating_point): lambda x: x.dtype.startswith("float"),
    },
)


def dtype_of(input: Any) -> Any:
    try:
        return getattr(torch, input.dtype)
    except Unsupported:
        return DtypeOf(input)


ATTRIBUTES: dict[str, Callable[[Any], Any]] = {
    "shape": lambda x: x.shape,
    "ndim": lambda x: x.ndim,
    "dtype": dtype_of,
    "device": lambda x: torch.device("cpu"),
    "is_cuda": lambda x: False,
    "T": ops.permute,
    "mT": ops.transpose,
    "data": ops.stop_gradient,
}


def attribute_written(base: Any, value: Any, name: str) -> Any:
    if name not in ("T", "mT"):
        raise Unsupported(f"it writes through .{name}, which hides the write from gradients")
    return ATTRIBUTES[name](value)


@rule(builtins.getattr, view="always", put=attribute_written)
def get_attribute(input: Any, name: str) -> Any:
    if name not in ATTRIBUTES:
        raise Unsupported(f"the attribute {name} of a tensor has no rule")
    return ATTRIBUTES[name](input)

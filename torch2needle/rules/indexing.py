"""Rules of indexing, picking and assignment."""

from __future__ import annotations

import operator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from needle import ops
from needle.autograd import Spec, Tensor, Unsupported
from needle.ops.math.comparison import Comparison, ScalarComparison
from needle.ops.math.elementwise import Where
from needle.ops.math.logic import Bitwise, BitwiseNot
from needle.ops.reduce.sorting import known_rank
from needle.ops.reduce.values import result_axis
from needle.ops.shape.basic import View
from needle.ops.shape.join import Concat

from .counted import nonzero
from .registry import rule
from .shapes import at
from .tables import functions

T = torch.Tensor


def is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and gives_bools(index.node)  # type: ignore[attr-defined]


def gives_bools(node: Any) -> bool:
    """Whether a value is of dtype bool: by its spec, else by what makes it."""
    spec = node.meta.get("spec")
    if isinstance(spec, Spec) or node.kind != "op":
        return isinstance(spec, Spec) and spec.dtype == "bool"
    if isinstance(node.target, Comparison | ScalarComparison):
        return True
    values = node.args[1:] if isinstance(node.target, Where) else node.args
    return isinstance(node.target, View | Concat | Bitwise | BitwiseNot | Where) and all(map(gives_bools, values))


def constant_value(symbol: Any) -> Any:
    """The values of a parameter, buffer or constant; None for a tensor computed from the input."""
    return symbol.node.meta["tensor"].numpy() if symbol.node.kind == "param" else None


def index_numbers(input: Any, item: Any) -> list[Tensor]:
    """The integer tensors that an index of tensors or lists stands for: a constant mask is one for each of its axes."""
    if isinstance(item, Tensor):
        if not is_mask(item):
            return [item]
        value = constant_value(item)
        if value is None:
            return list(nonzero(item, as_tuple=True))
    else:
        value = np.asarray(item)
    arrays = np.nonzero(value) if value.dtype == bool else [value]
    return [Tensor(a, device=input.device, dtype="int64", requires_grad=False) for a in arrays]


def is_basic(item: Any) -> bool:
    return not isinstance(item, Tensor | list | np.ndarray)


def shares_memory(input: Any, index: Any) -> str | None:
    """Slices and numbers give views, lists and tensors copies; a tensor of one number counts as that number."""
    items = index if isinstance(index, tuple) else (index,)
    if not all(is_basic(i) for i in items):
        specs = [getattr(i, "spec", None) for i in items if isinstance(i, Tensor)]
        return "maybe" if any(s is None or not s.shape for s in specs) else None
    return None if any(isinstance(i, bool) for i in items) else "always"


class Parts(NamedTuple):
    """An index with tensors in two steps: x[plain], then integer tensors on axes of that."""

    plain: tuple
    numbers: list[Tensor]
    axes: list[int]

    def first(self, x: Any) -> Any:
        return x if all(isinstance(i, slice) and i == slice(None) for i in self.plain) else ops.getitem(x, self.plain)

    def are_neighbours(self) -> bool:
        return self.axes == list(range(self.axes[0], self.axes[0] + len(self.axes)))


def parts_of(input: Any, items: tuple) -> Parts:
    plain: list[Any] = []  # the basic part, with whole axes where tensors stand
    numbers: list[Tensor] = []
    places: list[int] = []  # of the tensors among the items of `plain`
    for item in items:
        found = None if is_basic(item) else index_numbers(input, item)
        if found is None:
            plain.append(item)
        for n in found or ():
            numbers.append(n)
            places.append(len(plain))
            plain.append(slice(None))
    return Parts(tuple(plain), numbers, [result_axis(plain, p) for p in places])


@rule(operator.getitem, view=shares_memory, put=lambda base, value, index: setitem(base, index, value))
def getitem(input: Any, index: Any) -> Any:
    items = index if isinstance(index, tuple) else (index,)
    if all(is_basic(i) for i in items):
        return ops.getitem(input, index)
    if len(items) == 1 and is_mask(items[0]) and constant_value(items[0]) is None:
        return ops.masked_rows(input, items[0])
    parts = parts_of(input, items)
    x = parts.first(input)
    if parts.are_neighbours():
        return ops.index_tensors(x, parts.numbers, parts.axes[0])
    front = tuple(range(len(parts.axes)))
    return ops.index_tensors(ops.moveaxis(x, tuple(parts.axes), front), parts.numbers)


@rule(operator.setitem)
def setitem(input: Any, index: Any, value: Any) -> Any:
    items = index if isinstance(index, tuple) else (index,)
    if all(is_basic(i) for i in items):
        return ops.setitem(input, index, value)
    masks = [i for i in items if is_mask(i) and constant_value(i) is None]
    if masks:
        return set_masked(input, items, value)
    return put_numbers(input, items, value)


def put_numbers(input: Any, items: tuple, value: Any, accumulate: bool = False) -> Any:
    """input[items] = value, or += value where places are equal, for an index with integer tensors."""
    parts = parts_of(input, items)
    x = parts.first(input)
    if parts.are_neighbours():
        made = ops.index_put(x, parts.numbers, value, parts.axes[0], accumulate)
    else:
        axes, front = tuple(parts.axes), tuple(range(len(parts.axes)))
        made = ops.index_put(ops.moveaxis(x, axes, front), parts.numbers, value, 0, accumulate)
        made = ops.moveaxis(made, front, axes)
    return made if x is input else ops.setitem(input, parts.plain, made)


def set_masked(input: Any, items: tuple, value: Any) -> Any:
    """input[items] = value for an index with one mask that depends on the input, behind whole axes."""
    place = next(i for i, item in enumerate(items) if isinstance(item, Tensor))
    mask: Any = items[place]
    behind = [i for i in items[place + 1 :] if i is not Ellipsis and i != slice(None)]
    if behind or any(not isinstance(i, slice) or i != slice(None) for i in items[:place]):
        raise Unsupported("a mask that depends on the input is assigned at behind whole axes and before none")
    if not isinstance(value, Tensor):
        return ops.masked_fill(input, shifted_mask(input, mask, place) if place else mask, value, leading=not place)
    if place:
        return ops.where(shifted_mask(input, mask, place), ops.cast_like(value, input), input)
    return ops.masked_put(input, mask, value)


def shifted_mask(input: Any, mask: Any, place: int) -> Any:
    """A mask on the axes from `place` on, so that it broadcasts with the input."""
    if input.spec is None or mask.spec is None:
        raise Unsupported("assignment at a mask needs shapes; pass example=")
    for _ in range(len(input.spec.shape) - place - len(mask.spec.shape)):
        mask = ops.unsqueeze(mask, -1)
    return mask


@rule(T.copy_, torch.ops.aten.copy.default)
def copy_(input: Any, src: Any, non_blocking: bool = False) -> Any:
    return ops.setitem(input, Ellipsis, src)


@rule(
    torch.select, T.select, view="always", put=lambda base, value, dim, index: ops.setitem(base, at(dim, index), value)
)
def select(input: Any, dim: int, index: Any) -> Any:
    return ops.getitem(input, at(dim, index))


def narrowed(dim: int, start: Any, length: Any) -> tuple:
    if isinstance(start, int) and start < 0:
        raise Unsupported("narrow expects a start from the front, got a negative one")
    return at(dim, slice(start, start + length))


@rule(
    torch.narrow,
    T.narrow,
    view="always",
    put=lambda base, value, dim, start, length: ops.setitem(base, narrowed(dim, start, length), value),
)
def narrow(input: Any, dim: int, start: Any, length: Any) -> Any:
    return ops.getitem(input, narrowed(dim, start, length))


@rule(torch.index_select, T.index_select)
def index_select(input: Any, dim: int, index: Any) -> Any:
    picked = ops.take(input, index, dim, wrap=False)
    return ops.reshape(picked, ()) if known_rank(input) == 0 else picked


functions("input, dim, index, *, sparse_grad=False", {(torch.gather, T.gather): partial(ops.gather, wrap=False)})
functions("input, index", {(torch.take, T.take): lambda input, index: ops.take(ops.flatten(input), index)})


@rule(torch.take_along_dim, T.take_along_dim)
def take_along_dim(input: Any, indices: Any, dim: int | None = None) -> Any:
    return ops.take_along_dim(input, indices, dim)

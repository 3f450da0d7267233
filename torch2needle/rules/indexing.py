"""Rules of indexing, picking and assignment."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import torch

from needle import ops
from needle.autograd import Tensor, Unsupported
from needle.ops.reduce.values import result_axis

from .registry import rule
from .shapes import at
from .tables import functions

T = torch.Tensor


def is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.spec is not None and index.spec.dtype == "bool"  # type: ignore[attr-defined]


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
            raise Unsupported("a mask that depends on the input picks as many elements as are true; use where")
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


@rule(operator.getitem, view=shares_memory, put=lambda base, value, index: setitem(base, index, value))
def getitem(input: Any, index: Any) -> Any:
    items = index if isinstance(index, tuple) else (index,)
    if all(is_basic(i) for i in items):
        return ops.getitem(input, index)
    plain: list[Any] = []  # the basic part, with whole axes where tensors stand
    numbers: list[Tensor] = []
    places: list[int] = []  # of the tensors among the items of `plain`
    for item in items:
        if is_basic(item):
            plain.append(item)
            continue
        for n in index_numbers(input, item):
            numbers.append(n)
            places.append(len(plain))
            plain.append(slice(None))
    x = input
    if any(i != slice(None) for i in plain if not isinstance(i, int)) or any(isinstance(i, int) for i in plain):
        x = ops.getitem(input, tuple(plain))
    axes = [result_axis(plain, p) for p in places]
    if places != list(range(places[0], places[0] + len(places))):
        x, axes = ops.moveaxis(x, tuple(axes), tuple(range(len(axes)))), [0]
    return ops.index_tensors(x, numbers, axes[0])


@rule(operator.setitem)
def setitem(input: Any, index: Any, value: Any) -> Any:
    items = index if isinstance(index, tuple) else (index,)
    if all(is_basic(i) for i in items):
        return ops.setitem(input, index, value)
    mask = items[0]
    if len(items) > 1 or not isinstance(mask, Tensor) or not (is_mask(mask) or mask.spec is None):  # type: ignore[attr-defined]
        raise Unsupported("assignment expects slices or one bool mask, got integer tensors")
    if isinstance(value, Tensor):
        raise Unsupported("assignment at a mask expects a number, got a tensor; use where")
    return ops.masked_fill(input, mask, value, leading=True)


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


functions(
    "input, dim, index", {(torch.index_select, T.index_select): lambda input, dim, index: ops.take(input, index, dim)}
)
functions("input, dim, index, source", {(torch.index_copy, T.index_copy): ops.index_copy})
functions("input, dim, index, *, sparse_grad=False", {(torch.gather, T.gather): ops.gather})
functions("input, index", {(torch.take, T.take): lambda input, index: ops.take(ops.flatten(input), index)})


@rule(torch.take_along_dim, T.take_along_dim)
def take_along_dim(input: Any, indices: Any, dim: int | None = None) -> Any:
    if dim is None:
        return ops.take(ops.flatten(input), ops.flatten(indices))
    return ops.take_along(input, indices, dim)

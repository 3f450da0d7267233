"""Rules of writes by numbers and masks: scatter, index_add and their like. `index_put` and assignment are in indexing.py."""

from __future__ import annotations

from typing import Any

import torch

from needle import ops
from needle.autograd import Tensor

from .registry import rule
from .tables import functions

T = torch.Tensor
REDUCTIONS = {"add": "sum", "multiply": "prod"}  # what scatter's `reduce` is called elsewhere


@rule(torch.scatter, T.scatter, T.scatter_)
def scatter(input: Any, dim: int, index: Any, src: Any = None, value: Any = None, *, reduce: str | None = None) -> Any:
    source = value if src is None else src
    return ops.scatter(input, dim, index, source, "set" if reduce is None else REDUCTIONS[reduce])


functions(
    "input, dim, index, src",
    {
        (torch.scatter_add, T.scatter_add, T.scatter_add_): lambda input, dim, index, src: ops.scatter(
            input, dim, index, src, "sum"
        )
    },
)
functions(
    "input, dim, index, src, reduce, *, include_self=True",
    {(torch.scatter_reduce, T.scatter_reduce, T.scatter_reduce_): ops.scatter_reduce},
)
functions(
    "input, dim, index, source, reduce, *, include_self=True",
    {(torch.index_reduce, T.index_reduce, T.index_reduce_): ops.index_reduce},
)
functions("input, dim, index, source", {(torch.index_copy, T.index_copy, T.index_copy_): ops.index_copy})


@rule(torch.index_add, T.index_add, T.index_add_)
def index_add(input: Any, dim: int, index: Any, source: Any, *, alpha: Any = 1) -> Any:
    return ops.index_add(input, dim, index, source if alpha == 1 else source * alpha)


@rule(torch.index_fill, T.index_fill, T.index_fill_)
def index_fill(input: Any, dim: int, index: Any, value: Any) -> Any:
    if isinstance(value, Tensor):
        there = ops.index_fill(ops.full_like(input, False, None, "bool"), dim, index, True)
        return ops.where(there, ops.cast_like(value, input), input)
    return ops.index_fill(input, dim, index, value)


@rule(torch.put, T.put, T.put_)
def put(input: Any, index: Any, source: Any, accumulate: bool = False) -> Any:
    flat = ops.flatten(input)
    return ops.reshape_like(ops.index_put(flat, (ops.flatten(index),), ops.flatten(source), 0, accumulate), input)


functions("input, mask, source", {(torch.masked_scatter, T.masked_scatter, T.masked_scatter_): ops.masked_scatter})

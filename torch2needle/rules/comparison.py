"""Rules of comparisons, logic and selection by masks."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from needle import ops
from needle.autograd import Tensor
from needle.ops.shape.creation import Number

from .counted import nonzero
from .registry import rule
from .tables import functions

T = torch.Tensor


def either_way(f: Callable, mirrored: Callable) -> Callable:
    """f, or its mirror image where the number stands on the left."""
    return lambda input, other: f(input, other) if isinstance(input, Tensor) else mirrored(other, input)


def bitwise(name: str) -> Callable:
    f = partial(ops.bitwise, name)
    return either_way(lambda a, b: f(a, beside(b, a)), lambda a, b: f(a, beside(b, a)))


def beside(value: Any, like: Any) -> Any:
    """A number as one whose dtype is the tensor's, of narrow dtypes, too."""
    return value if isinstance(value, Tensor) else Number(value)(like)


def shifted(right: bool) -> Callable:
    return lambda a, b: ops.shift(a if isinstance(a, Tensor) else beside(a, b), beside(b, a), right)


def stored(f: Callable) -> Callable:
    """In place the dtype stays, also where no example tells it."""
    return lambda input, other: ops.cast_like(f(input, other), input)


functions(
    "input, other",
    {
        (torch.eq, T.eq, operator.eq): either_way(ops.eq, ops.eq),
        (torch.ne, torch.not_equal, T.ne, T.not_equal, operator.ne): either_way(ops.ne, ops.ne),
        (torch.lt, torch.less, T.lt, T.less, operator.lt): either_way(ops.lt, ops.gt),
        (torch.le, torch.less_equal, T.le, T.less_equal, operator.le): either_way(ops.le, ops.ge),
        (torch.gt, torch.greater, T.gt, T.greater, operator.gt): either_way(ops.gt, ops.lt),
        (torch.ge, torch.greater_equal, T.ge, T.greater_equal, operator.ge): either_way(ops.ge, ops.le),
        (torch.logical_and, T.logical_and): ops.logical_and,
        (T.logical_and_,): stored(ops.logical_and),
        (T.logical_or_,): stored(ops.logical_or),
        (T.logical_xor_,): stored(ops.logical_xor),
        (torch.logical_or, T.logical_or): ops.logical_or,
        (torch.logical_xor, T.logical_xor): ops.logical_xor,
        (torch.bitwise_and, T.bitwise_and, operator.and_): bitwise("and"),
        (torch.bitwise_or, T.bitwise_or, operator.or_): bitwise("or"),
        (torch.bitwise_xor, T.bitwise_xor, operator.xor): bitwise("xor"),
        (torch.bitwise_left_shift, T.bitwise_left_shift, T.__lshift__, operator.lshift): shifted(False),
        (torch.bitwise_right_shift, T.bitwise_right_shift, T.__rshift__, operator.rshift): shifted(True),
        (T.bitwise_left_shift_, operator.ilshift): stored(shifted(False)),
        (T.bitwise_right_shift_, operator.irshift): stored(shifted(True)),
        (T.bitwise_and_, operator.iand): stored(bitwise("and")),
        (T.bitwise_or_, operator.ior): stored(bitwise("or")),
        (T.bitwise_xor_, operator.ixor): stored(bitwise("xor")),
    },
)
functions(
    "input",
    {
        (torch.logical_not, T.logical_not): ops.logical_not,
        (T.logical_not_,): lambda x: ops.cast_like(ops.logical_not(x), x),
        (torch.bitwise_not, T.bitwise_not, T.bitwise_not_, operator.invert): ops.bitwise_not,
        (torch.isnan, T.isnan): ops.isnan,
        (torch.isreal, T.isreal): lambda x: ops.full_like(x, True, None, "bool"),
        (torch.isinf, T.isinf): ops.isinf,
        (torch.isfinite, T.isfinite): ops.isfinite,
    },
)


@rule(torch.where)
def where(condition: Any, input: Any = None, other: Any = None) -> Any:
    if input is None or other is None:
        return nonzero(condition, as_tuple=True)
    return select(condition, input, other)


def select(condition: Any, yes: Any, no: Any) -> Any:
    """A number takes part in the tensor's dtype, which may be known only when the model runs."""
    if isinstance(yes, Tensor) and isinstance(no, Tensor):
        return ops.where(condition, yes, no)
    if isinstance(yes, Tensor):
        return ops.masked_fill(yes, ops.logical_not(condition), no, promotes=True)
    if isinstance(no, Tensor):
        return ops.masked_fill(no, condition, yes, promotes=True)
    kinds = {type(yes), type(no)}
    dtype = "float32" if float in kinds else "bool" if kinds == {bool} else "int64"
    return ops.where(condition, *(ops.full_like(condition, v, dtype=dtype) for v in (yes, no)))


functions("input, condition, other", {(T.where,): lambda input, condition, other: select(condition, input, other)})


@rule(torch.masked_fill, T.masked_fill, T.masked_fill_)
def masked_fill(input: Any, mask: Any, value: Any) -> Any:
    if isinstance(value, Tensor):
        return ops.where(mask, ops.cast_like(value, input), input)
    return ops.masked_fill(input, mask, value)

"""Rules of comparisons, logic and selection by masks."""

from __future__ import annotations

import operator
from typing import Any

import torch

from needle import ops
from needle.autograd import Tensor, Unsupported
from torch2needle.registry import rule

T = torch.Tensor


def compared(f: Any, mirrored: Any, input: Any, other: Any) -> Any:
    """f, or its mirror image where the number stands on the left."""
    return f(input, other) if isinstance(input, Tensor) else mirrored(other, input)


@rule(torch.eq, T.eq, operator.eq)
def eq(input: Any, other: Any) -> Any:
    return compared(ops.eq, ops.eq, input, other)


@rule(torch.ne, torch.not_equal, T.ne, T.not_equal, operator.ne)
def ne(input: Any, other: Any) -> Any:
    return compared(ops.ne, ops.ne, input, other)


@rule(torch.lt, torch.less, T.lt, T.less, operator.lt)
def lt(input: Any, other: Any) -> Any:
    return compared(ops.lt, ops.gt, input, other)


@rule(torch.le, torch.less_equal, T.le, T.less_equal, operator.le)
def le(input: Any, other: Any) -> Any:
    return compared(ops.le, ops.ge, input, other)


@rule(torch.gt, torch.greater, T.gt, T.greater, operator.gt)
def gt(input: Any, other: Any) -> Any:
    return compared(ops.gt, ops.lt, input, other)


@rule(torch.ge, torch.greater_equal, T.ge, T.greater_equal, operator.ge)
def ge(input: Any, other: Any) -> Any:
    return compared(ops.ge, ops.le, input, other)


@rule(torch.logical_and, T.logical_and)
def logical_and(input: Any, other: Any) -> Any:
    return ops.logical_and(input, other)


@rule(torch.logical_or, T.logical_or)
def logical_or(input: Any, other: Any) -> Any:
    return ops.logical_or(input, other)


@rule(torch.logical_xor, T.logical_xor)
def logical_xor(input: Any, other: Any) -> Any:
    return ops.logical_xor(input, other)


@rule(torch.logical_not, T.logical_not)
def logical_not(input: Any) -> Any:
    return ops.logical_not(input)


def bitwise(name: str, input: Any, other: Any) -> Any:
    return ops.bitwise(name, input, other) if isinstance(input, Tensor) else ops.bitwise(name, other, input)


@rule(torch.bitwise_and, T.bitwise_and, operator.and_)
def bitwise_and(input: Any, other: Any) -> Any:
    return bitwise("and", input, other)


@rule(torch.bitwise_or, T.bitwise_or, operator.or_)
def bitwise_or(input: Any, other: Any) -> Any:
    return bitwise("or", input, other)


@rule(torch.bitwise_xor, T.bitwise_xor, operator.xor)
def bitwise_xor(input: Any, other: Any) -> Any:
    return bitwise("xor", input, other)


# In place the dtype stays, also where no example tells it.


@rule(T.bitwise_and_, operator.iand)
def bitwise_and_(input: Any, other: Any) -> Any:
    return ops.cast_like(bitwise("and", input, other), input)


@rule(T.bitwise_or_, operator.ior)
def bitwise_or_(input: Any, other: Any) -> Any:
    return ops.cast_like(bitwise("or", input, other), input)


@rule(T.bitwise_xor_, operator.ixor)
def bitwise_xor_(input: Any, other: Any) -> Any:
    return ops.cast_like(bitwise("xor", input, other), input)


@rule(torch.bitwise_not, T.bitwise_not, T.bitwise_not_, operator.invert)
def bitwise_not(input: Any) -> Any:
    return ops.bitwise_not(input)


@rule(torch.isnan, T.isnan)
def isnan(input: Any) -> Any:
    return ops.isnan(input)


@rule(torch.isinf, T.isinf)
def isinf(input: Any) -> Any:
    return ops.isinf(input)


@rule(torch.isfinite, T.isfinite)
def isfinite(input: Any) -> Any:
    return ops.isfinite(input)


@rule(torch.where)
def where(condition: Any, input: Any = None, other: Any = None) -> Any:
    if input is None or other is None:
        raise Unsupported("where(condition) has as many results as the condition has true elements")
    return select(condition, input, other)


@rule(T.where)
def where_method(input: Any, condition: Any, other: Any) -> Any:
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


@rule(torch.masked_fill, T.masked_fill, T.masked_fill_)
def masked_fill(input: Any, mask: Any, value: Any) -> Any:
    if isinstance(value, Tensor):
        return ops.where(mask, ops.cast_like(value, input), input)
    return ops.masked_fill(input, mask, value)

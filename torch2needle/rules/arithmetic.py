"""Rules of element-wise arithmetic, comparison-free maths and reductions."""

from __future__ import annotations

import operator
from typing import Any

import torch

from needle import ops
from needle.autograd import Tensor, Unsupported
from torch2needle.registry import rule

T = torch.Tensor


def dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def scaled(other: Any, alpha: Any) -> Any:
    return other if alpha == 1 else other * alpha


@rule(torch.add, T.add, T.add_, operator.add, operator.iadd, T.__add__, T.__radd__)
def add(input: Any, other: Any, *, alpha: Any = 1) -> Any:
    return input + scaled(other, alpha)


@rule(torch.sub, torch.subtract, T.sub, T.sub_, operator.sub, operator.isub)
def sub(input: Any, other: Any, *, alpha: Any = 1) -> Any:
    return input - scaled(other, alpha)


@rule(torch.mul, torch.multiply, T.mul, T.mul_, operator.mul, operator.imul)
def mul(input: Any, other: Any) -> Any:
    return input * other


@rule(torch.div, torch.divide, torch.true_divide, T.div, T.div_, operator.truediv, operator.itruediv)
def div(input: Any, other: Any, *, rounding_mode: str | None = None) -> Any:
    if rounding_mode is not None:
        raise Unsupported(f"rounding_mode expects None, got {rounding_mode}")
    return input / other


@rule(torch.matmul, torch.mm, torch.bmm, T.matmul, T.mm, T.bmm, operator.matmul)
def matmul(input: Any, other: Any) -> Any:
    return ops.matmul(input, other)


@rule(torch.neg, T.neg, T.neg_, operator.neg)
def neg(input: Any) -> Any:
    return -input


@rule(torch.pow, T.pow, T.pow_, operator.pow, operator.ipow)
def pow(input: Any, exponent: Any) -> Any:
    if not isinstance(input, Tensor):
        raise Unsupported("pow expects a tensor as its base, got a number")
    return input**exponent


@rule(torch.exp, T.exp, T.exp_)
def exp(input: Any) -> Any:
    return ops.exp(input)


@rule(torch.log, T.log, T.log_)
def log(input: Any) -> Any:
    return ops.log(input)


@rule(torch.sqrt, T.sqrt, T.sqrt_)
def sqrt(input: Any) -> Any:
    return ops.sqrt(input)


@rule(torch.rsqrt, T.rsqrt, T.rsqrt_)
def rsqrt(input: Any) -> Any:
    return ops.rsqrt(input)


@rule(torch.abs, T.abs, T.abs_, operator.abs)
def absolute(input: Any) -> Any:
    return ops.absolute(input)


@rule(torch.clamp, torch.clip, T.clamp, T.clamp_, T.clip)
def clamp(input: Any, min: Any = None, max: Any = None) -> Any:
    return ops.clamp(input, min, max)


@rule(torch.maximum, T.maximum)
def maximum(input: Any, other: Any) -> Any:
    return ops.maximum(input, other)


@rule(torch.minimum, T.minimum)
def minimum(input: Any, other: Any) -> Any:
    return ops.minimum(input, other)


def cast(input: Any, dtype: Any) -> Any:
    return input if dtype is None else ops.cast(input, dtype_name(dtype))


@rule(torch.mean, T.mean)
def mean(input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    return ops.mean(cast(input, dtype), dim, keepdims=keepdim)


@rule(torch.sum, T.sum)
def sum(input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    return ops.summation(cast(input, dtype), dim, keepdims=keepdim)


@rule(T.float)
def to_float(input: Any) -> Any:
    return cast(input, "float32")

"""Rules that make tensors of complex numbers."""

from __future__ import annotations

from typing import Any

import torch

from needle import ops
from needle.autograd import Tensor, Unsupported
from needle.complex_numbers import Complex

from .complex_numbers import is_complex, part_dtype
from .creation import filled
from .registry import FUNCTION_RULES, complex_rule
from .shapes import varargs

T, aten = torch.Tensor, torch.ops.aten


def constant(like: Any, value: Any, shape: Any, dtype: Any) -> Any:
    """`value` in a shape, complex where the dtype is, or without one where `like` or the value is."""
    part = like.real if isinstance(like, Complex) else like
    if dtype is not None and not is_complex(dtype):
        if isinstance(value, complex | Complex):
            raise Unsupported(f"a value of {dtype} expects a real number")
        return filled(part, value, shape, dtype)
    if isinstance(value, Tensor | Complex):
        raise Unsupported("a complex tensor filled with the value of another one is not supported")
    dtype = dtype if dtype is None else part_dtype(dtype)
    if dtype is None and not isinstance(like, Complex):
        dtype = torch.get_default_dtype()
    return Complex(*(filled(part, v * 1.0, shape, dtype) for v in (value.real, value.imag)))


@complex_rule(torch.zeros_like, torch.empty_like)
def zeros_like(input: Any, *, dtype: Any = None, **_: Any) -> Any:
    return constant(input, 0, None, dtype)


@complex_rule(torch.ones_like)
def ones_like(input: Any, *, dtype: Any = None, **_: Any) -> Any:
    return constant(input, 1, None, dtype)


@complex_rule(torch.full_like)
def full_like(input: Any, fill_value: Any, *, dtype: Any = None, **_: Any) -> Any:
    if dtype is None and isinstance(input, Tensor) and isinstance(fill_value, complex):  # it stays real, as in torch
        if fill_value.imag:
            raise Unsupported("a real tensor takes no complex value")
        return filled(input, fill_value.real, None, None)
    return constant(input, fill_value, None, dtype)


@complex_rule(T.new_zeros, T.new_empty)
def new_zeros(input: Any, *numbers: Any, size: Any = None, dtype: Any = None, **_: Any) -> Any:
    return constant(input, 0, varargs(numbers, size), dtype)


@complex_rule(T.new_ones)
def new_ones(input: Any, *numbers: Any, size: Any = None, dtype: Any = None, **_: Any) -> Any:
    return constant(input, 1, varargs(numbers, size), dtype)


@complex_rule(T.new_full)
def new_full(input: Any, size: Any, fill_value: Any, *, dtype: Any = None, **_: Any) -> Any:
    return constant(input, fill_value, tuple(size), dtype)


@complex_rule(torch.zeros, torch.empty)
def zeros(*numbers: Any, size: Any = None, dtype: Any = None, like: Any, **_: Any) -> Any:
    return constant(like, 0, varargs(numbers, size), dtype)


@complex_rule(torch.ones)
def ones(*numbers: Any, size: Any = None, dtype: Any = None, like: Any, **_: Any) -> Any:
    return constant(like, 1, varargs(numbers, size), dtype)


@complex_rule(torch.eye)
def eye(n: Any, m: Any = None, *, dtype: Any = None, like: Any, **_: Any) -> Any:
    part = part_dtype(dtype or torch.complex64)
    return ops.complex_pair(
        FUNCTION_RULES[torch.eye](n, m, dtype=part, like=like.real if isinstance(like, Complex) else like), 0.0
    )


@complex_rule(torch.linspace)
def linspace(start: Any, end: Any, steps: Any, *, dtype: Any = None, like: Any, **_: Any) -> Any:
    if isinstance(start, Tensor | Complex) or isinstance(end, Tensor | Complex):
        raise Unsupported("complex numbers between tensors are not supported")
    part, real = part_dtype(dtype or torch.complex64), FUNCTION_RULES[torch.linspace]
    given = {"dtype": part, "like": like.real if isinstance(like, Complex) else like}
    return ops.complex_pair(real(start.real, end.real, steps, **given), real(start.imag, end.imag, steps, **given))


@complex_rule(torch.full)
def full(size: Any, fill_value: Any, *, dtype: Any = None, like: Any, **_: Any) -> Any:
    return constant(like, fill_value, tuple(size), dtype)


complex_rule(T.zero_)(lambda input: constant(input, 0, None, None))
complex_rule(T.fill_, aten.fill.Tensor, aten.fill.Scalar)(lambda input, value: constant(input, value, None, None))

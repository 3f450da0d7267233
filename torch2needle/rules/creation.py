"""Rules of tensors that a forward makes from sizes and dtypes of others, and of numbers computed from sizes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from needle import ops
from needle.autograd import Tensor, Unsupported
from needle.graph import Dim
from needle.ops.shape.creation import LIKE

from .arithmetic import DtypeOf, cast, dtype_name
from .registry import rule
from .shapes import varargs
from .tables import functions

T = torch.Tensor


def filled(like: Any, value: Any, shape: Any = None, dtype: Any = None) -> Any:
    if isinstance(value, Tensor):
        value = ops.cast_like(value, like) if dtype is None else cast(value, dtype)
        return ops.broadcast_like(value, like) if shape is None else ops.broadcast_to(value, shape=shape)
    if isinstance(dtype, DtypeOf):
        full = ops.full_like(dtype.tensor, value, () if shape is None else shape)
        return ops.broadcast_like(full, like) if shape is None else full
    return ops.full_like(like, value, shape, None if dtype is None else dtype_name(dtype))


REALS = ("truediv", "log", "log2", "log10")  # of which Python makes a float


def is_whole(number: Any) -> bool:
    """Whether Python has it as an int, of arithmetic on sizes, too."""
    if not isinstance(number, Dim):
        return isinstance(number, int)
    operator = number.node.target
    return operator in ("size", "floor") or (operator not in REALS and all(map(is_whole, number.node.args)))


def default_dtype(dtype: Any, *numbers: Any) -> Any:
    """The given dtype, or what torch makes of the numbers."""
    if dtype is not None:
        return dtype
    if any(isinstance(n, bool) for n in numbers):
        return torch.bool
    return torch.int64 if all(map(is_whole, numbers)) else torch.get_default_dtype()


def placed(like: Any, dtype: Any) -> tuple[Any, str]:
    """The tensor and the dtype that a progression is made of."""
    return (dtype.tensor, LIKE) if isinstance(dtype, DtypeOf) else (like, dtype_name(dtype))


functions(
    "input, *, dtype=None, **_",
    {
        (torch.zeros_like, torch.empty_like): lambda input, dtype: filled(input, 0, dtype=dtype),
        (torch.ones_like,): lambda input, dtype: filled(input, 1, dtype=dtype),
    },
)
functions(
    "input, fill_value, *, dtype=None, **_",
    {(torch.full_like,): lambda input, value, dtype: filled(input, value, dtype=dtype)},
)
functions(
    "input, *numbers, size=None, dtype=None, **_",
    {
        (T.new_zeros, T.new_empty): lambda input, numbers, size, dtype: filled(input, 0, varargs(numbers, size), dtype),
        (T.new_ones,): lambda input, numbers, size, dtype: filled(input, 1, varargs(numbers, size), dtype),
    },
)
functions(
    "input, size, stride, *, dtype=None, **_",
    {(T.new_empty_strided,): lambda input, size, stride, dtype: filled(input, 0, tuple(size), dtype)},
)
functions(
    "input, size, fill_value, *, dtype=None, **_",
    {(T.new_full,): lambda input, size, value, dtype: filled(input, value, tuple(size), dtype)},
)
functions("input", {(T.zero_,): lambda input: filled(input, 0)})
functions("input, value", {(T.fill_, torch.ops.aten.fill.Tensor, torch.ops.aten.fill.Scalar): filled})

# `like`: the tensor whose size or dtype the call mentions; the interpreter hands it in.


functions(
    "*numbers, size=None, dtype=None, like, **_",
    {
        (torch.zeros, torch.empty): lambda numbers, size, dtype, like: full(
            varargs(numbers, size), 0.0, dtype=dtype, like=like
        ),
        (torch.ones,): lambda numbers, size, dtype, like: full(varargs(numbers, size), 1.0, dtype=dtype, like=like),
    },
)


@rule(torch.full)
def full(size: Any, fill_value: Any, *, dtype: Any = None, like: Any, **_: Any) -> Any:
    return filled(like, fill_value, tuple(size), default_dtype(dtype, fill_value))


@rule(torch.arange)
def arange(start: Any = 0, end: Any = None, step: Any = 1, *, dtype: Any = None, like: Any, **_: Any) -> Any:
    start, end = (0, start) if end is None else (start, end)
    like, name = placed(like, default_dtype(dtype, start, end, step))
    return ops.arange_like(like, start, end, step, name)


@rule(torch.eye)
def eye(n: Any, m: Any = None, *, dtype: Any = None, like: Any, **_: Any) -> Any:
    rows = ops.unsqueeze(ops.arange_like(like, 0, n), 1)
    columns = ops.arange_like(like, 0, n if m is None else m)
    return cast(ops.eq(rows, columns), dtype or torch.get_default_dtype())


@rule(torch.linspace)
def linspace(start: Any, end: Any, steps: Any, *, dtype: Any = None, like: Any, **_: Any) -> Any:
    like, name = placed(like, dtype or torch.get_default_dtype())
    return ops.linspace_like(like, start, end, steps, name)


@rule(torch.tensor)
def tensor(data: Any, *, dtype: Any = None, like: Any, **_: Any) -> Any:
    if not isinstance(data, Dim):
        raise Unsupported("a tensor of sizes is not supported; write it with arange, full or zeros")
    return filled(like, data, (), default_dtype(dtype, data))


@rule(torch.scalar_tensor)
def scalar_tensor(s: Any, *, dtype: Any = None, like: Any, **_: Any) -> Any:
    return filled(like, s, (), dtype or torch.get_default_dtype())


# -- numbers -------------------------------------------------------------------------------------------------------------


def number(x: Any, like: Any) -> Any:
    """A size as a tensor, or the number that a tensor holds, which has no gradient."""
    if isinstance(x, Tensor):
        return ops.stop_gradient(ops.reshape(x, ()))
    return filled(like, x, (), torch.get_default_dtype()) if isinstance(x, Dim) else x


def of_number(f: Callable) -> Callable:
    return lambda x, like: f(number(x, like))


functions(
    "x, *, like=None",
    {
        **{(getattr(math, n),): of_number(getattr(ops, n)) for n in ("cos", "exp", "expm1", "log1p")},
        **{(getattr(math, n),): of_number(getattr(ops, n)) for n in ("sin", "tan", "tanh")},
        (math.sqrt,): lambda x, like: (number(x, like) if isinstance(x, Tensor) else x) ** 0.5,
    },
)


@rule(math.pow)
def power(x: Any, y: Any, *, like: Any = None) -> Any:
    tensors = isinstance(x, Tensor) or isinstance(y, Tensor)
    return number(x, like) ** number(y, like) if tensors else x**y


@rule(math.log)
def log(x: Any, base: Any = None, *, like: Any = None) -> Any:
    if isinstance(x, Dim) and not isinstance(base, Tensor):
        return x.logarithm(math.e if base is None else base)
    logs = [math.log(n) if isinstance(n, int | float) else ops.log(number(n, like)) for n in (x, base) if n is not None]
    return logs[0] if base is None else logs[0] / logs[1]


def of_size(f: Callable) -> Callable:
    """`f` of math, which keeps a size a number."""
    name = f.__name__
    return lambda x, like: x.function(name) if isinstance(x, Dim) else getattr(ops, name)(number(x, like))


functions("x, *, like=None", {(f,): of_size(f) for f in (math.log2, math.log10, math.isqrt)})
functions("values, *, like=None", {(math.prod,): lambda values, like: math.prod(values)})

"""Rules of element-wise arithmetic, maths, casts and matrix products."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from needle import ops
from needle.autograd import Tensor, Unsupported
from needle.graph import Dim
from needle.ops.linalg.basic import product

from .registry import rule
from .tables import functions

T = torch.Tensor
DTYPES = ("float32", "float64", "int32", "int64", "bool")
NARROW = ("int8", "uint8", "int16", "uint16")  # kept in int32
HALVES = ("float16", "bfloat16")  # computed in float32, which the report says


class DtypeOf:
    """`x.dtype` of a symbol whose dtype is not known: good for a cast, but not to branch on."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __eq__(self, other: object) -> bool:
        raise Unsupported("control flow depends on a dtype; pass example=")

    __hash__ = object.__hash__


def dtype_name(dtype: Any) -> str:
    name = str(dtype).removeprefix("torch.")
    name = "float32" if name in HALVES else name
    if name not in DTYPES:
        raise Unsupported(f"needle has the dtypes {', '.join(DTYPES)}, got {name}")
    return name


def cast(input: Any, dtype: Any) -> Any:
    if dtype is None:
        return input
    if isinstance(dtype, DtypeOf):
        return ops.cast_like(input, dtype.tensor)
    name = str(dtype).removeprefix("torch.")
    return ops.narrowed(input, name) if name in NARROW else ops.cast(input, dtype_name(dtype))


def scaled(input: Any, number: Any, *others: Any) -> Any:
    """The input times alpha, beta or value in an operation on the others, too: in the dtype that the result has."""
    if not isinstance(input, Tensor) or not all(isinstance(o, Tensor) for o in others):
        return input if number == 1 else input * number
    specs = [getattr(t, "spec", None) for t in (input, *others)]
    if all(s is not None and s.dtype == "float32" for s in specs):
        return input if number == 1 else input * number
    return ops.scaled(input, number, *others)


# -- arithmetic ----------------------------------------------------------------------------------------------------------


@rule(torch.add, T.add, T.add_, operator.add, operator.iadd, T.__add__, T.__radd__)
def add(input: Any, other: Any, *, alpha: Any = 1) -> Any:
    return input + (other if alpha == 1 else scaled(other, alpha, input))


@rule(torch.sub, torch.subtract, T.sub, T.sub_, T.subtract, operator.sub, operator.isub)
def sub(input: Any, other: Any, *, alpha: Any = 1) -> Any:
    return input - (other if alpha == 1 else scaled(other, alpha, input))


@rule(torch.rsub, T.__rsub__)
def rsub(input: Any, other: Any, *, alpha: Any = 1) -> Any:
    return other - (input if alpha == 1 else scaled(input, alpha, other))


@rule(
    *(torch.div, torch.divide, torch.true_divide, T.div, T.div_, T.divide, T.true_divide),
    *(operator.truediv, operator.itruediv),
)
def div(input: Any, other: Any, *, rounding_mode: str | None = None) -> Any:
    if rounding_mode is None:
        return input / other
    if rounding_mode not in ("floor", "trunc"):
        raise Unsupported(f"rounding_mode expects floor, trunc or None, got {rounding_mode}")
    return ops.floor_divide(input, other, rounding_mode)


functions(
    "input, tensor1, tensor2, *, value=1",
    {
        (torch.addcmul, T.addcmul, T.addcmul_): lambda x, a, b, value: x + scaled(a, value, x, b) * b,
        (torch.addcdiv, T.addcdiv, T.addcdiv_): lambda x, a, b, value: x + scaled(a, value, x, b) / b,
    },
)


functions("input, end, weight", {(torch.lerp, T.lerp, T.lerp_): ops.lerp})
functions(
    "input, other",
    {
        (torch.mul, torch.multiply, T.mul, T.mul_, T.multiply, operator.mul, operator.imul): operator.mul,
        (torch.floor_divide, T.floor_divide, T.floor_divide_, operator.floordiv, operator.ifloordiv): ops.floor_divide,
        (torch.remainder, T.remainder, T.remainder_, operator.mod, operator.imod): ops.remainder,
        (torch.fmod, T.fmod, T.fmod_): ops.fmod,
        (torch.maximum, T.maximum): ops.maximum,
        (torch.minimum, T.minimum): ops.minimum,
        (torch.atan2, torch.arctan2, T.atan2, T.atan2_, T.arctan2): ops.atan2,
        (torch.hypot, T.hypot, T.hypot_): ops.hypot,
        (torch.fmax, T.fmax): ops.fmax,
        (torch.fmin, T.fmin): ops.fmin,
    },
)
functions(
    "input", {(torch.positive, T.positive, operator.pos): lambda x: x}, view="same", put=lambda base, value: value
)
functions(
    "input, exponent",
    {
        (torch.pow, T.pow, T.pow_, operator.pow, operator.ipow): operator.pow,
        (T.__rpow__,): lambda input, exponent: exponent**input,
    },
)


# -- functions of one tensor ---------------------------------------------------------------------------------------------

UNARY: dict[tuple, Callable] = {
    (torch.neg, torch.negative, T.neg, T.neg_, T.negative, operator.neg): operator.neg,
    (torch.square, T.square, T.square_): lambda x: x**2,
    (torch.exp, T.exp, T.exp_): ops.exp,
    (torch.exp2, T.exp2, T.exp2_, torch.special.exp2): ops.exp2,
    (torch.expm1, T.expm1, T.expm1_, torch.special.expm1): ops.expm1,
    (torch.log, T.log, T.log_): ops.log,
    (torch.log1p, T.log1p, T.log1p_, torch.special.log1p): ops.log1p,
    (torch.log2, T.log2, T.log2_): ops.log2,
    (torch.log10, T.log10, T.log10_): ops.log10,
    (torch.sqrt, T.sqrt, T.sqrt_): ops.sqrt,
    (torch.rsqrt, T.rsqrt, T.rsqrt_): ops.rsqrt,
    (torch.reciprocal, T.reciprocal, T.reciprocal_): ops.reciprocal,
    (torch.sin, T.sin, T.sin_): ops.sin,
    (torch.cos, T.cos, T.cos_): ops.cos,
    (torch.tan, T.tan, T.tan_): ops.tan,
    (torch.asin, torch.arcsin, T.asin, T.asin_, T.arcsin, T.arcsin_): ops.asin,
    (torch.acos, torch.arccos, T.acos, T.acos_, T.arccos, T.arccos_): ops.acos,
    (torch.atan, torch.arctan, T.atan, T.atan_, T.arctan, T.arctan_): ops.atan,
    (torch.sinh, T.sinh, T.sinh_): ops.sinh,
    (torch.cosh, T.cosh, T.cosh_): ops.cosh,
    (torch.asinh, torch.arcsinh, T.asinh, T.asinh_, T.arcsinh, T.arcsinh_): ops.asinh,
    (torch.acosh, torch.arccosh, T.acosh, T.acosh_, T.arccosh, T.arccosh_): ops.acosh,
    (torch.atanh, torch.arctanh, T.atanh, T.atanh_, T.arctanh, T.arctanh_): ops.atanh,
    (torch.erfc, T.erfc, T.erfc_, torch.special.erfc): ops.erfc,
    (torch.erf, T.erf, T.erf_, torch.special.erf): ops.erf,
    (torch.abs, torch.absolute, T.abs, T.abs_, T.absolute, operator.abs): ops.absolute,
    (torch.sign, T.sign, T.sign_, torch.sgn, T.sgn): ops.sign,
    (torch.floor, T.floor, T.floor_): ops.floor,
    (torch.ceil, T.ceil, T.ceil_): ops.ceil,
    (torch.trunc, torch.fix, T.trunc, T.trunc_, T.fix): ops.trunc,
    (torch.frac, T.frac, T.frac_): ops.frac,
}
functions("input", UNARY)


@rule(torch.round, T.round, T.round_, torch.special.round)
def round(input: Any, *, decimals: int = 0) -> Any:
    return ops.round(input) if decimals == 0 else ops.round(input * 10.0**decimals) / 10.0**decimals


# -- limits --------------------------------------------------------------------------------------------------------------


@rule(torch.clamp_min, T.clamp_min, T.clamp_min_)
def clamp_min(input: Any, min: Any) -> Any:
    return ops.at_least(input, min) if isinstance(min, Tensor) else ops.clamp_min(input, min)


@rule(torch.clamp_max, T.clamp_max, T.clamp_max_)
def clamp_max(input: Any, max: Any) -> Any:
    return ops.at_most(input, max) if isinstance(max, Tensor) else ops.clamp_max(input, max)


def is_finite(limit: Any) -> bool:
    return isinstance(limit, int | Dim) or (isinstance(limit, float) and math.isfinite(limit))


@rule(torch.clamp, torch.clip, T.clamp, T.clamp_, T.clip, T.clip_)
def clamp(input: Any, min: Any = None, max: Any = None) -> Any:
    if is_finite(min) and is_finite(max):
        return ops.clamp(input, min, max)
    if isinstance(min, Tensor) and isinstance(max, Tensor):
        input = scaled(input, 1, min, max)
    if min is not None:
        input = clamp_min(input, min)
    return input if max is None else clamp_max(input, max)


# -- casts ---------------------------------------------------------------------------------------------------------------


def itself(base: Any, value: Any, *_: Any, **__: Any) -> Any:
    """What a write makes of a tensor that the call gave as it is."""
    return value


functions(
    "input, memory_format=None",
    {
        (T.float,): lambda x: cast(x, "float32"),
        (T.half, T.bfloat16): lambda x: cast(x, "float32"),
        (T.double,): lambda x: cast(x, "float64"),
        (T.long,): lambda x: cast(x, "int64"),
        (T.int,): lambda x: cast(x, "int32"),
        (T.bool,): lambda x: cast(x, "bool"),
        (T.byte,): lambda x: cast(x, "uint8"),
        (T.char,): lambda x: cast(x, "int8"),
        (T.short,): lambda x: cast(x, "int16"),
    },
    view="maybe",
    put=itself,
)
functions("input, other", {(T.type_as,): ops.cast_like}, view="maybe", put=itself)


@rule(T.type, view="maybe", put=itself)
def type(input: Any, dtype: Any = None, non_blocking: bool = False) -> Any:
    if dtype is None:
        raise Unsupported("type() without a dtype returns a string")
    if isinstance(dtype, torch.dtype | DtypeOf):
        return cast(input, dtype)
    return cast(input, str(getattr(dtype, "dtype", None) or getattr(torch, str(dtype).rpartition(".")[2])().dtype))


@rule(T.to, view="maybe", put=itself)
def to(input: Any, *args: Any, dtype: Any = None, device: Any = None, other: Any = None, **_: Any) -> Any:
    for a in args:
        if isinstance(a, torch.dtype | DtypeOf):
            dtype = a
        elif isinstance(a, Tensor):
            other = a
    return ops.cast_like(input, other) if other is not None else cast(input, dtype)


@rule(T.cpu, T.cuda, view="same", put=itself)
def to_device(input: Any, *_: Any, **__: Any) -> Any:
    return input


# -- matrix products -----------------------------------------------------------------------------------------------------


functions(
    "input, other",
    {
        (torch.matmul, torch.linalg.matmul, T.matmul, operator.matmul, operator.imatmul): product,
        (torch.inner, T.inner): ops.inner,
    },
)
functions("input, mat2", {(torch.mm, torch.bmm, T.mm, T.bmm, torch.sparse.mm): product})  # of dense ones, in either
functions("input, vec", {(torch.mv, T.mv): product})
functions("input, tensor", {(torch.dot, T.dot): ops.matmul})
functions(
    "input, vec2",
    {(torch.outer, torch.ger, T.outer, T.ger): ops.outer},
)


@rule(torch.addmm, T.addmm, torch.baddbmm, T.baddbmm, torch.addmv, T.addmv)
def addmm(input: Any, mat1: Any, mat2: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    specs = [getattr(t, "spec", None) for t in (input, mat1, mat2)]
    known = [s for s in specs if s is not None and s.dtype == "float32"]
    if beta == alpha == 1 and len(known) == 3:
        bias, _, weight = known
        if weight.ndim == 2 and tuple(bias.shape) == tuple(weight.shape[1:]):  # (in, out), as GPT-2's layers have it
            return ops.linear(mat1, mat2, input, "needle")
    return added(input, ops.matmul(mat1, mat2), beta, alpha)


@rule(torch.addbmm, T.addbmm)
def addbmm(input: Any, batch1: Any, batch2: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    return added(input, ops.summation(ops.matmul(batch1, batch2), 0), beta, alpha)


def added(input: Any, product: Any, beta: Any, alpha: Any) -> Any:
    """With beta 0 the input plays no part, whatever its values."""
    return scaled(product, alpha) if beta == 0 else scaled(input, beta) + scaled(product, alpha)


@rule(torch.einsum, view="mode")  # of one operand, such as "ij->ji"
def einsum(equation: str, *operands: Any, path: Any = None) -> Any:  # path: an order that torch found
    many = operands[0] if len(operands) == 1 and isinstance(operands[0], list | tuple) else operands
    return ops.einsum(equation, *many)


functions("input1, input2, weight, bias=None", {(F.bilinear,): ops.bilinear})

"""Rules of element-wise arithmetic, maths, casts and matrix products."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
import torch.nn.functional as F

from needle import ops
from needle.autograd import Tensor, Unsupported
from needle.graph import Dim
from needle.ops.linalg import product
from torch2needle.cells import written_by
from torch2needle.registry import rule

T = torch.Tensor
DTYPES = ("float32", "float64", "int32", "int64", "bool")
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
    return ops.cast_like(input, dtype.tensor) if isinstance(dtype, DtypeOf) else ops.cast(input, dtype_name(dtype))


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


@rule(torch.mul, torch.multiply, T.mul, T.mul_, T.multiply, operator.mul, operator.imul)
def mul(input: Any, other: Any) -> Any:
    return input * other


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


@rule(torch.floor_divide, T.floor_divide, T.floor_divide_, operator.floordiv, operator.ifloordiv)
def floor_divide(input: Any, other: Any) -> Any:
    return ops.floor_divide(input, other)


@rule(torch.remainder, T.remainder, T.remainder_, operator.mod, operator.imod)
def remainder(input: Any, other: Any) -> Any:
    return ops.remainder(input, other)


@rule(torch.fmod, T.fmod, T.fmod_)
def fmod(input: Any, other: Any) -> Any:
    return ops.fmod(input, other)


@rule(torch.addcmul, T.addcmul, T.addcmul_)
def addcmul(input: Any, tensor1: Any, tensor2: Any, *, value: Any = 1) -> Any:
    return input + scaled(tensor1, value, input, tensor2) * tensor2


@rule(torch.addcdiv, T.addcdiv, T.addcdiv_)
def addcdiv(input: Any, tensor1: Any, tensor2: Any, *, value: Any = 1) -> Any:
    return input + scaled(tensor1, value, input, tensor2) / tensor2


@rule(torch.lerp, T.lerp, T.lerp_)
def lerp(input: Any, end: Any, weight: Any) -> Any:
    """From the nearer end, so that each is met exactly."""
    from_start, from_end = input + (end - input) * weight, end - (end - input) * (1 - weight)
    if isinstance(weight, Tensor):
        return ops.where(ops.lt(ops.absolute(weight), 0.5), from_start, from_end)
    return from_start if abs(weight) < 0.5 else from_end


@rule(torch.neg, torch.negative, T.neg, T.neg_, T.negative, operator.neg)
def neg(input: Any) -> Any:
    return -input


@rule(torch.positive, T.positive, operator.pos, view="same")
@written_by(lambda base, value: value)
def positive(input: Any) -> Any:
    return input


@rule(torch.pow, T.pow, T.pow_, operator.pow, operator.ipow)
def pow(input: Any, exponent: Any) -> Any:
    return input**exponent


@rule(T.__rpow__)
def rpow(input: Any, exponent: Any) -> Any:
    return exponent**input


@rule(torch.square, T.square, T.square_)
def square(input: Any) -> Any:
    return input**2


# -- functions of one tensor ---------------------------------------------------------------------------------------------


@rule(torch.exp, T.exp, T.exp_)
def exp(input: Any) -> Any:
    return ops.exp(input)


@rule(torch.exp2, T.exp2, T.exp2_)
def exp2(input: Any) -> Any:
    return ops.exp(input * math.log(2))


@rule(torch.expm1, T.expm1, T.expm1_)
def expm1(input: Any) -> Any:
    return ops.expm1(input)


@rule(torch.log, T.log, T.log_)
def log(input: Any) -> Any:
    return ops.log(input)


@rule(torch.log1p, T.log1p, T.log1p_)
def log1p(input: Any) -> Any:
    return ops.log1p(input)


@rule(torch.log2, T.log2, T.log2_)
def log2(input: Any) -> Any:
    return ops.log(input) * (1 / math.log(2))


@rule(torch.log10, T.log10, T.log10_)
def log10(input: Any) -> Any:
    return ops.log(input) * (1 / math.log(10))


@rule(torch.sqrt, T.sqrt, T.sqrt_)
def sqrt(input: Any) -> Any:
    return ops.sqrt(input)


@rule(torch.rsqrt, T.rsqrt, T.rsqrt_)
def rsqrt(input: Any) -> Any:
    return ops.rsqrt(input)


@rule(torch.reciprocal, T.reciprocal, T.reciprocal_)
def reciprocal(input: Any) -> Any:
    return ops.reciprocal(input)


@rule(torch.sin, T.sin, T.sin_)
def sin(input: Any) -> Any:
    return ops.sin(input)


@rule(torch.cos, T.cos, T.cos_)
def cos(input: Any) -> Any:
    return ops.cos(input)


@rule(torch.tan, T.tan, T.tan_)
def tan(input: Any) -> Any:
    return ops.sin(input) / ops.cos(input)


@rule(torch.erf, T.erf, T.erf_, torch.special.erf)
def erf(input: Any) -> Any:
    return ops.erf(input)


@rule(torch.abs, torch.absolute, T.abs, T.abs_, T.absolute, operator.abs)
def absolute(input: Any) -> Any:
    return ops.absolute(input)


@rule(torch.sign, T.sign, T.sign_, torch.sgn, T.sgn)
def sign(input: Any) -> Any:
    return ops.sign(input)


@rule(torch.floor, T.floor, T.floor_)
def floor(input: Any) -> Any:
    return ops.floor(input)


@rule(torch.ceil, T.ceil, T.ceil_)
def ceil(input: Any) -> Any:
    return ops.ceil(input)


@rule(torch.round, T.round, T.round_)
def round(input: Any, *, decimals: int = 0) -> Any:
    return ops.round(input) if decimals == 0 else ops.round(input * 10.0**decimals) / 10.0**decimals


@rule(torch.trunc, torch.fix, T.trunc, T.trunc_, T.fix)
def trunc(input: Any) -> Any:
    return ops.trunc(input)


@rule(torch.frac, T.frac, T.frac_)
def frac(input: Any) -> Any:
    return ops.frac(input)


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


@rule(torch.maximum, T.maximum)
def maximum(input: Any, other: Any) -> Any:
    return ops.maximum(input, other)


@rule(torch.minimum, T.minimum)
def minimum(input: Any, other: Any) -> Any:
    return ops.minimum(input, other)


@rule(torch.fmax, T.fmax)
def fmax(input: Any, other: Any) -> Any:
    return ops.fmax(input, other)


@rule(torch.fmin, T.fmin)
def fmin(input: Any, other: Any) -> Any:
    return ops.fmin(input, other)


# -- casts ---------------------------------------------------------------------------------------------------------------


@rule(T.float, view="maybe")
def to_float(input: Any, memory_format: Any = None) -> Any:
    return cast(input, "float32")


@rule(T.half, T.bfloat16, view="maybe")
def to_half(input: Any, memory_format: Any = None) -> Any:
    return cast(input, "float32")


@rule(T.double, view="maybe")
def to_double(input: Any, memory_format: Any = None) -> Any:
    return cast(input, "float64")


@rule(T.long, view="maybe")
def to_long(input: Any, memory_format: Any = None) -> Any:
    return cast(input, "int64")


@rule(T.int, view="maybe")
def to_int(input: Any, memory_format: Any = None) -> Any:
    return cast(input, "int32")


@rule(T.bool, view="maybe")
def to_bool(input: Any, memory_format: Any = None) -> Any:
    return cast(input, "bool")


@rule(T.type_as, view="maybe")
def type_as(input: Any, other: Any) -> Any:
    return ops.cast_like(input, other)


@rule(T.type, view="maybe")
def type(input: Any, dtype: Any = None, non_blocking: bool = False) -> Any:
    if dtype is None:
        raise Unsupported("type() without a dtype returns a string")
    if isinstance(dtype, torch.dtype | DtypeOf):
        return cast(input, dtype)
    return cast(input, str(getattr(dtype, "dtype", None) or getattr(torch, str(dtype).rpartition(".")[2])().dtype))


@rule(T.to, view="maybe")
def to(input: Any, *args: Any, dtype: Any = None, device: Any = None, other: Any = None, **_: Any) -> Any:
    for a in args:
        if isinstance(a, torch.dtype | DtypeOf):
            dtype = a
        elif isinstance(a, Tensor):
            other = a
    return ops.cast_like(input, other) if other is not None else cast(input, dtype)


@rule(T.cpu, T.cuda, view="same")
@written_by(lambda base, value, *_, **__: value)
def to_device(input: Any, *_: Any, **__: Any) -> Any:
    return input


# -- matrix products -----------------------------------------------------------------------------------------------------


@rule(torch.matmul, torch.linalg.matmul, T.matmul, operator.matmul, operator.imatmul)
def matmul(input: Any, other: Any) -> Any:
    return product(input, other)


@rule(torch.mm, torch.bmm, T.mm, T.bmm)
def mm(input: Any, mat2: Any) -> Any:
    return product(input, mat2)


@rule(torch.mv, T.mv)
def mv(input: Any, vec: Any) -> Any:
    return product(input, vec)


@rule(torch.dot, T.dot)
def dot(input: Any, tensor: Any) -> Any:
    return ops.matmul(input, tensor)


@rule(torch.inner, T.inner)
def inner(input: Any, other: Any) -> Any:
    return ops.inner(input, other)


@rule(torch.outer, torch.ger, T.outer, T.ger)
def outer(input: Any, vec2: Any) -> Any:
    return ops.unsqueeze(input, 1) * ops.unsqueeze(vec2, 0)


@rule(torch.addmm, T.addmm, torch.baddbmm, T.baddbmm, torch.addmv, T.addmv)
def addmm(input: Any, mat1: Any, mat2: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    return added(input, ops.matmul(mat1, mat2), beta, alpha)


@rule(torch.addbmm, T.addbmm)
def addbmm(input: Any, batch1: Any, batch2: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    return added(input, ops.summation(ops.matmul(batch1, batch2), 0), beta, alpha)


def added(input: Any, product: Any, beta: Any, alpha: Any) -> Any:
    """With beta 0 the input plays no part, whatever its values."""
    return scaled(product, alpha) if beta == 0 else scaled(input, beta) + scaled(product, alpha)


@rule(torch.einsum, view="mode")  # of one operand, such as "ij->ji"
def einsum(equation: str, *operands: Any) -> Any:
    many = operands[0] if len(operands) == 1 and isinstance(operands[0], list | tuple) else operands
    return ops.einsum(equation, *many)


@rule(F.bilinear)
def bilinear(input1: Any, input2: Any, weight: Any, bias: Any = None) -> Any:
    left = ops.matmul(ops.unsqueeze(ops.unsqueeze(input1, -2), -2), weight)  # (..., out, 1, in2)
    y = ops.squeeze(ops.matmul(left, ops.unsqueeze(ops.unsqueeze(input2, -2), -1)), (-2, -1))
    return y if bias is None else y + bias

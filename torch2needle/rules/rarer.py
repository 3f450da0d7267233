"""Rules of rarer functions: divisors, floats by their bits, modes, norms that are held, few bits, results of other sizes."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np
import torch

from needle import ops
from needle.autograd import Tensor, Unsupported
from needle.backend_ndarray import FLOATS
from needle.graph import Dim
from needle.ops.common import constant

from .registry import rule
from .shapes import joined, unchanged, varargs
from .special import with_tensors
from .tables import functions

T = torch.Tensor
POWERS = np.ldexp(1.0, np.arange(-1074, 1024))


# -- whole numbers -------------------------------------------------------------------------------------------------------


def gcd(a: Any, b: Any) -> Any:
    """Euclid's algorithm, for as many steps as neighbours in Fibonacci's sequence need."""
    for x in (a, b):
        if x.dtype in FLOATS or x.dtype == "bool":
            raise ValueError(f"[gcd] expects whole numbers, got {x.dtype}.")
    a, b = ops.absolute(a + b * 0), ops.absolute(b + a * 0)
    for _ in range(91 if a.dtype == "int64" else 46):
        done = ops.eq(b, 0)
        a, b = ops.where(done, a, b), ops.where(done, b, ops.remainder(a, ops.where(done, 1, b)))
    return a


def lcm(a: Any, b: Any) -> Any:
    common = gcd(a, b)
    return ops.absolute(ops.floor_divide(a, ops.where(ops.eq(common, 0), 1, common)) * b)


functions("input, other", {(torch.gcd, T.gcd): with_tensors(gcd), (torch.lcm, T.lcm): with_tensors(lcm)})


# -- floats by their bits ------------------------------------------------------------------------------------------------


def power_of_two(exponent: Any) -> Any:
    """2 ** exponent to the last bit, of whole numbers from -1074 to 1023."""
    return ops.take(constant(POWERS, exponent, "float64"), exponent + 1074)


def fraction(x: Any) -> tuple[Any, Any]:
    """(m, exponent) with |m| in [1/2, 1) and x = m 2 ** exponent, of float64; what is not normal has exponent 0."""
    plain = ops.logical_and(ops.isfinite(x), ops.ge(ops.absolute(x), 2.0**-1022))
    safe = ops.where(plain, x, 0.5)
    guess = ops.cast(ops.floor(ops.log2(ops.absolute(ops.stop_gradient(safe)))), "int64") + 1
    half = ops.floor_divide(guess, 2)  # 2 ** -guess may be beyond the numbers
    m = safe * power_of_two(-half) * power_of_two(half - guess)
    large, small = (ops.cast(c, "int64") for c in (ops.ge(ops.absolute(m), 1), ops.lt(ops.absolute(m), 0.5)))
    m = m * power_of_two(small - large)
    return ops.where(plain, m, x), ops.where(plain, guess + large - small, 0)


class Frexp(NamedTuple):
    """torch.frexp."""

    mantissa: Any
    exponent: Any


@rule(torch.frexp, T.frexp)
def frexp(input: Any) -> Frexp:
    m, exponent = fraction(ops.cast(input, "float64"))
    return Frexp(ops.cast(m, input.dtype), ops.cast(exponent, "int32"))


# -- values and norms ----------------------------------------------------------------------------------------------------


class Mode(NamedTuple):
    """torch.mode."""

    values: Any
    indices: Any


@rule(torch.mode, T.mode)
def mode(input: Any, dim: int = -1, keepdim: bool = False) -> Mode:
    """The smallest of the values that are there most often, and its last place."""
    if input.ndim == 0:
        return Mode(input, ops.full_like(input, 0, dtype="int64"))
    x = ops.moveaxis(input, dim, -1)
    alike = ops.eq(ops.unsqueeze(x, -1), ops.unsqueeze(x, -2))
    often = ops.summation(ops.cast(alike, "int64"), -1)
    often = ops.clamp_min(often, 1)  # NaN is like no number
    best = ops.eq(often, ops.amax(often, -1, True))
    wide = ops.stop_gradient(ops.cast(x, "float64") if x.dtype in FLOATS else ops.cast(x, "int64"))
    beyond = math.inf if x.dtype in FLOATS else 2**63 - 1
    least = ops.amin(ops.where(best, wide, beyond), -1, True)
    chosen = ops.logical_and(best, ops.eq(wide, least))
    place = ops.arange_like(x, 0, x.shape[-1])
    index = ops.amax(ops.where(chosen, place, 0), -1, True)
    values = ops.gather(x, -1, index)
    found = (ops.moveaxis(v, -1, dim) if keepdim else ops.squeeze(v, -1) for v in (values, index))
    return Mode(*found)


@rule(torch.renorm, T.renorm)
def renorm(input: Any, p: float, dim: int, maxnorm: float) -> Any:
    axes = tuple(i for i in range(input.ndim) if i != dim % input.ndim)
    norm = ops.vector_norm(input, p, axes, True)
    long = ops.gt(norm, maxnorm)
    return input * ops.where(long, maxnorm / (ops.where(long, norm, 1.0) + 1e-7), 1.0)


# -- numbers of few bits, as they are trained with ------------------------------------------------------------------------


def fake_quantized(x: Any, scale: Any, zero: Any, least: int, most: int) -> Any:
    """Whole steps of `scale`, within `least` and `most`; gradients pass where they are within."""
    place = ops.round(x * (1 / scale)) + zero
    inside = ops.logical_and(ops.ge(place, least), ops.le(place, most))
    value = (ops.clamp(place, least, most) - zero) * scale
    passing = ops.where(inside, x, 0.0)
    return passing + ops.stop_gradient(value - passing)


@rule(torch.fake_quantize_per_tensor_affine)
def fake_quantize_per_tensor(input: Any, scale: Any, zero_point: Any, quant_min: int, quant_max: int) -> Any:
    scale, zero = (numbers(v, input) for v in (scale, zero_point))
    return fake_quantized(input, scale, zero, quant_min, quant_max)


@rule(torch.fake_quantize_per_channel_affine)
def fake_quantize_per_channel(
    input: Any, scale: Any, zero_point: Any, axis: int, quant_min: int, quant_max: int
) -> Any:
    shape = tuple(-1 if i == axis % input.ndim else 1 for i in range(input.ndim))
    scale, zero = (ops.reshape(numbers(v, input), shape) for v in (scale, zero_point))
    return fake_quantized(input, scale, zero, quant_min, quant_max)


def numbers(value: Any, like: Any) -> Any:
    """Of one dtype with x, and without a gradient, as in torch."""
    return ops.stop_gradient(ops.cast(value, like.dtype)) if isinstance(value, Tensor) else value


# -- runs of rows --------------------------------------------------------------------------------------------------------


@rule(torch.segment_reduce)
def segment_reduce(
    data: Any,
    reduce: str,
    *,
    lengths: Any = None,
    indices: Any = None,
    offsets: Any = None,
    axis: int = 0,
    unsafe: bool = False,
    initial: Any = None,
) -> Any:
    if indices is not None or axis != 0 or (lengths is None) == (offsets is None):
        raise Unsupported("segment_reduce expects lengths or offsets, and axis 0")
    given = lengths if offsets is None else offsets
    if given.ndim != 1:
        raise Unsupported("segment_reduce expects lengths or offsets (N,)")
    begins = ops.getitem(offsets, slice(1, None)) if lengths is None else ops.cumsum(lengths, 0)
    numbers = ops.searchsorted(begins, ops.arange_like(data, 0, data.shape[0]), True)
    name = {"max": "amax", "min": "amin"}.get(reduce, reduce)
    none = {"sum": 0.0, "prod": 1.0, "amax": -math.inf, "amin": math.inf, "mean": math.nan}[name]
    if name == "mean" and initial is not None:
        raise Unsupported("the mean of segments expects no initial value")
    size = (begins.shape[0], *tuple(data.shape)[1:])
    start = ops.full_like(data, none if initial is None else initial, size)
    if name == "sum":
        return ops.index_add(start, 0, numbers, data)
    return ops.index_reduce(start, 0, numbers, data, name, name != "mean")


# -- other sizes ---------------------------------------------------------------------------------------------------------


@rule(T.sum_to_size, view="maybe")
def sum_to_size(input: Any, *size: Any) -> Any:
    size = varargs(size)
    lead = input.ndim - len(size)
    ones = tuple(lead + i for i, n in enumerate(size) if isinstance(n, int) and n == 1)
    made = ops.summation(input, (*range(lead), *ones), True) if lead or ones else input
    return ops.reshape(made, tuple(made.shape)[lead:]) if lead else made


def larger(a: Any, b: Any) -> Any:
    """Of two sizes."""
    return a.larger(b) if isinstance(a, Dim) else b.larger(a) if isinstance(b, Dim) else max(a, b)


@rule(torch.nonzero_static, T.nonzero_static)
def nonzero_static(input: Any, *, size: Any, fill_value: int = -1) -> Any:
    """The first `size` places, in order, filled up: each is written in the row of its rank, others in one that is cut off."""
    flat = ops.flatten(ops.ne(input, 0) if input.dtype != "bool" else input)
    ranks = ops.cumsum(ops.cast(flat, "int64"), 0) - 1
    rows = ops.where(ops.logical_and(flat, ops.lt(ranks, size)), ranks, size)
    rest, places = ops.arange_like(input, 0, flat.shape[0]), []
    for n in reversed(tuple(input.shape)):
        places.append(ops.remainder(rest, larger(n, 1)))
        rest = ops.floor_divide(rest, larger(n, 1))
    none = ops.full_like(input, fill_value, (size + 1, len(places)), dtype="int64")
    if not places:
        return ops.getitem(none, slice(0, size))
    return ops.getitem(ops.index_copy(none, 0, rows, ops.stack(places[::-1], 1)), slice(0, size))


@rule(torch._C._nn.pad_sequence)
def pad_sequence(
    sequences: Any, batch_first: bool = False, padding_value: float = 0.0, padding_side: str = "right"
) -> Any:
    longest = functools.reduce(larger, (t.shape[0] for t in sequences))
    rows = []
    for t in sequences:
        missing = longest - t.shape[0]
        sides = (missing, 0) if padding_side == "left" else (0, missing)
        rows.append(ops.pad(t, (0, 0) * (t.ndim - 1) + sides, "constant", padding_value))
    return ops.stack(rows, 0 if batch_first else 1)


# -- older names ---------------------------------------------------------------------------------------------------------


class Triangular(NamedTuple):
    """torch.triangular_solve."""

    solution: Any
    cloned_coefficient: Any


@rule(torch.triangular_solve, T.triangular_solve)
def triangular_solve(
    input: Any, A: Any, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> Triangular:
    left, above = (ops.transpose(A), not upper) if transpose else (A, upper)
    return Triangular(ops.solve_triangular(left, input, above, True, unitriangular), A)


@rule(T.to_dense, view=lambda input, dtype=None, **_: "same" if dtype is None else "maybe", put=unchanged)
def to_dense(input: Any, dtype: Any = None, *, masked_grad: Any = None) -> Any:
    if dtype is not None:
        raise Unsupported("to_dense expects no dtype of dense tensors")
    return input


functions(
    "input, split_sizes, dim=0",
    {(torch.unsafe_split_with_sizes, T.unsafe_split_with_sizes): ops.split_sizes},
    view="always",
    put=joined,
)

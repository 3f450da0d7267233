"""Rules of calls that take or make complex numbers. What is not listed here takes none, and the interpreter says so."""

from __future__ import annotations

import builtins
import functools
import inspect
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from needle import ops
from needle.autograd import Tensor, Unsupported
from needle.complex_numbers import DTYPES, Complex
from needle.ops.fourier import complex as numbers

from . import aten as _aten
from . import comparison, embedding, indexing, matrices, reductions, special
from .arithmetic import cast
from .creation import filled
from .registry import FUNCTION_RULES, complex_rule, method, rule
from .shapes import ATTRIBUTES, Pieces, varargs
from .tables import functions

LOADED = (_aten, comparison, embedding, indexing, matrices, reductions, special)  # whose rules are taken below
T, aten = torch.Tensor, torch.ops.aten


def is_complex(value: Any) -> bool:
    """Whether an argument makes a call one of complex numbers."""
    return isinstance(value, Complex | complex) or (isinstance(value, torch.dtype) and value.is_complex)


def part_dtype(dtype: torch.dtype) -> torch.dtype:
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise Unsupported(f"needle has the complex dtypes {', '.join(DTYPES)}, got {name}")
    return getattr(torch, DTYPES[name])


def whole(value: Any) -> Complex:
    """As a Complex, of numbers, too."""
    if isinstance(value, Complex):
        return value
    return ops.complex_pair(value, 0.0) if isinstance(value, Tensor) else Complex(value.real, value.imag * 1.0)


# -- by parts ------------------------------------------------------------------------------------------------------------


def by_parts(f: Callable, promoted: tuple[str, ...] = ()) -> Callable:
    """A rule that moves or adds numbers, of real and imaginary parts; `promoted` arguments may be real beside complex ones."""
    signature = inspect.signature(f)

    def parted(g: Callable, bound: inspect.BoundArguments) -> Any:
        for name in promoted:
            if name in bound.arguments:
                value = bound.arguments[name]
                many = isinstance(value, tuple | list)
                bound.arguments[name] = type(value)(map(whole, value)) if many else whole(value)
        name, first = next(iter(bound.arguments.items()))
        if not promoted and not isinstance(first, Complex):
            raise Unsupported("complex numbers beside real ones in this call are not supported")
        if isinstance(dtype := bound.arguments.get("dtype"), torch.dtype):
            if not dtype.is_complex:  # the real part alone is cast
                bound.arguments[name] = first.real
                return g(*bound.args, **bound.kwargs)
            bound.arguments["dtype"] = dtype.to_real()
        made = ops.complex_map(g, *bound.args, **bound.kwargs)
        if isinstance(made, Complex) and isinstance(made.real, Pieces):
            return Pieces(lambda i: Complex(made.real[i], made.imag[i]), made.real.what)
        return made

    @functools.wraps(f)
    def convert(*args: Any, **kwargs: Any) -> Any:
        return parted(f, signature.bind(*args, **kwargs))

    put = getattr(f, "put", None)
    convert.put = put and (lambda base, value, *args, **named: ops.complex_map(put, base, value, *args, **named))  # type: ignore[attr-defined]
    return convert


PARTS: dict[tuple[str, ...], tuple] = {
    (): (
        *(
            torch.flatten,
            T.flatten,
            torch.ravel,
            T.ravel,
            torch.unflatten,
            T.unflatten,
            T.view,
            T.reshape,
            torch.reshape,
        ),
        *(T.view_as, T.reshape_as, torch.unsqueeze, T.unsqueeze, T.unsqueeze_, torch.squeeze, T.squeeze, T.squeeze_),
        *(torch.permute, T.permute, torch.transpose, T.transpose, T.transpose_, torch.swapaxes, T.swapaxes),
        *(torch.swapdims, T.swapdims, torch.t, T.t, torch.movedim, T.movedim, torch.moveaxis, T.moveaxis, T.expand),
        *(torch.broadcast_to, T.broadcast_to, T.expand_as, torch.diagonal, T.diagonal, T.contiguous, T.clone),
        *(torch.clone, torch.detach, T.detach, T.detach_, T.repeat, T.tile, T.flip, torch.tile, torch.flip),
        *(torch.fliplr, T.fliplr, torch.flipud, T.flipud, torch.tril, T.tril, torch.triu, T.triu, torch.roll, T.roll),
        *(torch.chunk, T.chunk, torch.split, T.split, torch.tensor_split, T.tensor_split, torch.unbind, T.unbind),
        *(operator.getitem, torch.select, T.select, torch.narrow, T.narrow, torch.index_select, T.index_select),
        *(torch.gather, T.gather, T.cpu, T.cuda, torch.sum, T.sum, torch.mean, T.mean, torch.cumsum, T.cumsum),
        *(torch.neg, torch.negative, T.neg, T.neg_, T.negative, operator.neg, torch.positive, T.positive, operator.pos),
        *(
            aten.slice.Tensor,
            aten.index.Tensor,
            aten.alias.default,
            aten.lift_fresh.default,
            aten.lift_fresh_copy.default,
        ),
        *(aten.detach_copy.default, aten.split_with_sizes.default, aten.numpy_T.default, aten.mT.default),
    ),
    ("tensors",): (torch.cat, torch.concat, torch.concatenate, torch.stack, torch.hstack, torch.vstack),
    ("value",): (operator.setitem,),
    ("src",): (T.copy_, aten.copy.default, aten.slice_scatter.default),
}
for _promoted, _targets in PARTS.items():
    for _target in _targets:
        _f = FUNCTION_RULES[_target]
        complex_rule(_target, view=getattr(_f, "view", None), put=None)(_made := by_parts(_f, _promoted))
        _made.put = by_parts(_f, _promoted).put  # type: ignore[attr-defined]


# -- sizes and attributes ------------------------------------------------------------------------------------------------


def of_real_part(f: Callable) -> Callable:
    return functools.wraps(f)(lambda input, *args, **named: f(input.real, *args, **named))


for _target in (T.size, T.dim, T.ndimension, T.numel, torch.numel, T.nelement, builtins.len, aten.sym_size.int):
    _f = FUNCTION_RULES[_target]
    complex_rule(_target)(of_real_part(_f))

functions("input", {(T.is_complex, torch.is_complex): lambda input: False})
complex_rule(T.is_complex, torch.is_complex)(lambda input: True)
complex_rule(T.is_floating_point, torch.is_floating_point)(lambda input: False)


def dtype_of(input: Complex) -> torch.dtype:
    return getattr(torch, input.dtype)


COMPLEX_ATTRIBUTES: dict[str, Callable[[Any], Any]] = {
    "real": lambda z: z.real,
    "imag": lambda z: z.imag,
    "shape": lambda z: z.real.shape,
    "ndim": lambda z: z.real.ndim,
    "dtype": dtype_of,
    "device": lambda z: torch.device("cpu"),
    "is_cuda": lambda z: False,
    **{n: (lambda z, n=n: z.map(ATTRIBUTES[n])) for n in ("T", "mT", "data")},  # type: ignore[misc]
    "H": lambda z: ops.conj(z.map(ops.permute)),
    "mH": lambda z: ops.conj(z.map(ops.transpose)),
}


def attribute_written(base: Complex, value: Any, name: str) -> Complex:
    if name in ("real", "imag"):
        return Complex(value, base.imag) if name == "real" else Complex(base.real, value)
    if name not in ("T", "mT", "H", "mH"):
        raise Unsupported(f"it writes through .{name}, which hides the write from gradients")
    return COMPLEX_ATTRIBUTES[name](value)


@complex_rule(builtins.getattr, view="always", put=attribute_written)
def get_attribute(input: Any, name: str) -> Any:
    if name not in COMPLEX_ATTRIBUTES:
        raise Unsupported(f"the attribute {name} of complex numbers has no rule")
    return COMPLEX_ATTRIBUTES[name](input)


# -- there and back ------------------------------------------------------------------------------------------------------


def either(*targets: Any, view: Any = None, put: Callable | None = None) -> Callable[[Callable], Callable]:
    """The rule of real and of complex arguments."""

    def register(f: Callable) -> Callable:
        rule(*targets, view=view, put=put)(f)
        return complex_rule(*targets, view=view, put=put)(f)

    return register


rule(torch.complex)(lambda real, imag: ops.complex_pair(real, imag))
rule(torch.polar)(lambda abs, angle: ops.polar(abs, angle))
rule(torch.view_as_complex, view="always", put=lambda base, value: ops.view_as_real(value))(
    lambda input: ops.view_as_complex(input)
)
complex_rule(torch.view_as_real, view="always", put=lambda base, value: ops.view_as_complex(value))(
    lambda input: ops.view_as_real(input)
)
complex_rule(torch.real, view="always", put=lambda base, value: Complex(value, base.imag))(lambda input: input.real)
complex_rule(torch.imag, view="always", put=lambda base, value: Complex(base.real, value))(lambda input: input.imag)
rule(torch.real, view="same", put=lambda base, value: value)(lambda input: input)
either(torch.conj, T.conj, aten._conj.default, view="always", put=lambda base, value: ops.conj(value))(
    lambda input: ops.conj(input)
)
either(torch.conj_physical, T.conj_physical, T.conj_physical_, aten._conj_physical.default, view="maybe")(
    lambda input: ops.conj(input)
)
either(torch.resolve_conj, T.resolve_conj, torch.resolve_neg, T.resolve_neg, view="maybe")(lambda input: input)
ATTRIBUTES["real"] = lambda x: x


def as_complex(input: Any, dtype: torch.dtype) -> Complex:
    part = part_dtype(dtype)
    return (
        input.map(lambda x: cast(x, part)) if isinstance(input, Complex) else ops.complex_pair(cast(input, part), 0.0)
    )


either(method("cfloat"), view="maybe")(lambda input, memory_format=None: as_complex(input, torch.complex64))
either(method("cdouble"), view="maybe")(lambda input, memory_format=None: as_complex(input, torch.complex128))


@complex_rule(T.to, T.type, view="maybe")
def to(input: Any, *args: Any, dtype: Any = None, device: Any = None, other: Any = None, **_: Any) -> Any:
    for a in args:
        dtype, other = (
            (a, other) if isinstance(a, torch.dtype) else (dtype, a if isinstance(a, Tensor | Complex) else other)
        )
    if isinstance(other, Complex):
        part = other.real
        return (
            input.map(lambda x: ops.cast_like(x, part))
            if isinstance(input, Complex)
            else ops.complex_pair(ops.cast_like(input, part), 0.0)
        )
    if other is not None or (dtype is not None and not is_complex(dtype)):
        raise Unsupported("a cast of complex numbers to real ones drops imaginary parts; take .real")
    return input if dtype is None else as_complex(input, dtype)


complex_rule(T.type_as, view="maybe")(lambda input, other: to(input, other))


# -- new tensors ---------------------------------------------------------------------------------------------------------


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
def new_zeros(input: Any, *size: Any, dtype: Any = None, **_: Any) -> Any:
    return constant(input, 0, varargs(size), dtype)


@complex_rule(T.new_ones)
def new_ones(input: Any, *size: Any, dtype: Any = None, **_: Any) -> Any:
    return constant(input, 1, varargs(size), dtype)


@complex_rule(T.new_full)
def new_full(input: Any, size: Any, fill_value: Any, *, dtype: Any = None, **_: Any) -> Any:
    return constant(input, fill_value, tuple(size), dtype)


@complex_rule(torch.zeros, torch.empty)
def zeros(*size: Any, dtype: Any = None, like: Any, **_: Any) -> Any:
    return constant(like, 0, varargs(size), dtype)


@complex_rule(torch.ones)
def ones(*size: Any, dtype: Any = None, like: Any, **_: Any) -> Any:
    return constant(like, 1, varargs(size), dtype)


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


# -- arithmetic ----------------------------------------------------------------------------------------------------------


def times_number(other: Any, alpha: Any) -> Any:
    return other if isinstance(alpha, int | float) and alpha == 1 else numbers.complex_multiply(whole(other), alpha)


@complex_rule(torch.add, T.add, T.add_, operator.add, operator.iadd, T.__add__, T.__radd__)
def add(input: Any, other: Any, *, alpha: Any = 1) -> Any:
    return numbers.complex_add(input, times_number(other, alpha))


@complex_rule(torch.sub, torch.subtract, T.sub, T.sub_, T.subtract, operator.sub, operator.isub)
def sub(input: Any, other: Any, *, alpha: Any = 1) -> Any:
    return numbers.complex_subtract(input, times_number(other, alpha))


@complex_rule(torch.rsub, T.__rsub__)
def rsub(input: Any, other: Any, *, alpha: Any = 1) -> Any:
    return numbers.complex_subtract(other, times_number(input, alpha))


@complex_rule(
    *(torch.div, torch.divide, torch.true_divide, T.div, T.div_, T.divide, T.true_divide),
    *(operator.truediv, operator.itruediv),
)
def div(input: Any, other: Any, *, rounding_mode: str | None = None) -> Any:
    if rounding_mode is not None:
        raise Unsupported("complex quotients have no rounding_mode")
    return numbers.complex_divide(input, other)


complex_rule(torch.mul, torch.multiply, T.mul, T.mul_, T.multiply, operator.mul, operator.imul)(
    lambda input, other: numbers.complex_multiply(input, other)
)
complex_rule(torch.pow, T.pow, T.pow_, operator.pow, operator.ipow)(
    lambda input, exponent: numbers.complex_power(input, exponent)
)
complex_rule(T.__rpow__)(lambda input, exponent: numbers.complex_power(exponent, input))
complex_rule(torch.eq, T.eq, operator.eq)(lambda input, other: numbers.complex_equal(input, other))
complex_rule(torch.ne, T.ne, operator.ne)(lambda input, other: numbers.complex_differs(input, other))

UNARY: dict[tuple, Callable[[Any], Any]] = {
    (torch.abs, torch.absolute, T.abs, T.absolute, operator.abs): ops.magnitude,
    (torch.angle, T.angle): ops.angle,
    (torch.square, T.square, T.square_): lambda z: numbers.complex_multiply(z, z),
    (torch.reciprocal, T.reciprocal, T.reciprocal_): lambda z: numbers.complex_divide(1.0, z),
    (torch.exp, T.exp, T.exp_): numbers.complex_exp,
    (torch.log, T.log, T.log_): numbers.complex_log,
    (torch.sqrt, T.sqrt, T.sqrt_): numbers.complex_sqrt,
    (torch.sin, T.sin, T.sin_): numbers.complex_sin,
    (torch.cos, T.cos, T.cos_): numbers.complex_cos,
    (torch.sgn, T.sgn, T.sgn_): numbers.complex_sign,
    (torch.isfinite, T.isfinite): lambda z: ops.logical_and(ops.isfinite(z.real), ops.isfinite(z.imag)),
    (torch.isnan, T.isnan): lambda z: ops.logical_or(ops.isnan(z.real), ops.isnan(z.imag)),
    (torch.isreal, T.isreal): lambda z: ops.eq(z.imag, 0.0),
    (torch.isinf, T.isinf): lambda z: ops.logical_or(ops.isinf(z.real), ops.isinf(z.imag)),
}


def of_one(f: Callable) -> Callable:
    return lambda input: f(input)


for _targets, _f in UNARY.items():
    complex_rule(*_targets)(of_one(_f))
rule(torch.angle, T.angle)(lambda input: ops.angle(input))


@complex_rule(torch.where)
def where(condition: Any, input: Any, other: Any) -> Any:
    a, b = whole(input), whole(other)
    return ops.complex_pair(ops.where(condition, a.real, b.real), ops.where(condition, a.imag, b.imag), True)


complex_rule(T.where)(lambda input, condition, other: where(condition, input, other))


@complex_rule(torch.masked_fill, T.masked_fill, T.masked_fill_)
def masked_fill(input: Any, mask: Any, value: Any) -> Any:
    if not isinstance(input, Complex):
        raise Unsupported("a real tensor takes no complex value")
    value = whole(value)
    return Complex(ops.where(mask, value.real, input.real), ops.where(mask, value.imag, input.imag))


# -- products ------------------------------------------------------------------------------------------------------------


def of_products(f: Callable) -> Callable:
    return functools.wraps(f)(lambda *args, **named: ops.multilinear(f, *args, *named.values()))


for _target in (
    *(torch.matmul, torch.linalg.matmul, T.matmul, operator.matmul, operator.imatmul, torch.inner, T.inner, torch.mm),
    *(torch.bmm, T.mm, T.bmm, torch.mv, T.mv, torch.dot, T.dot, torch.outer, torch.ger, T.outer, T.ger),
):
    _f = FUNCTION_RULES[_target]
    complex_rule(_target)(of_products(_f))


complex_rule(torch.vdot, T.vdot)(lambda input, other: ops.multilinear(ops.matmul, ops.conj(input), other))


@complex_rule(torch.einsum)
def einsum(equation: str, *operands: Any) -> Any:
    many = operands[0] if len(operands) == 1 and isinstance(operands[0], list | tuple) else operands
    return numbers.complex_einsum(equation, *many)


@complex_rule(F.linear)
def linear(input: Any, weight: Any, bias: Any = None) -> Any:
    y = ops.multilinear(lambda x, w: FUNCTION_RULES[F.linear](x, w), input, weight)
    return y if bias is None else numbers.complex_add(y, bias)


@complex_rule(F.pad, aten.constant_pad_nd.default)
def pad(input: Any, pad: Any, mode: str = "constant", value: Any = None) -> Any:
    value = whole(value or 0)
    if mode != "constant":
        return input.map(lambda x: ops.pad(x, tuple(pad), mode))
    return Complex(ops.pad(input.real, tuple(pad), mode, value.real), ops.pad(input.imag, tuple(pad), mode, value.imag))

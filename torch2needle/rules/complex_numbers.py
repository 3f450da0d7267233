"""Rules of what complex numbers are made of, their attributes and casts. A call without a complex rule takes none."""

from __future__ import annotations

import builtins
import functools
from collections.abc import Callable
from typing import Any

import torch

from needle import ops
from needle.autograd import Tensor, Unsupported
from needle.complex_numbers import DTYPES, Complex

from . import aten as _aten
from . import lowered
from .arithmetic import cast
from .registry import FUNCTION_RULES, complex_rule, method, rule
from .shapes import ATTRIBUTES
from .tables import functions

LOADED = (_aten, lowered)  # whose rules are taken below
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


def from_real(make: Callable[[Callable], Callable], *targets: Any) -> None:
    """The rules that `make` makes of those that the targets have for real numbers, with their arguments."""
    for target in dict.fromkeys(targets):
        f = FUNCTION_RULES[target]
        complex_rule(target)(functools.wraps(f)(make(f)))


# -- sizes and attributes ------------------------------------------------------------------------------------------------


def of_real_part(f: Callable) -> Callable:
    return lambda input, *args, **named: f(input.real, *args, **named)


from_real(
    of_real_part,
    *(T.size, T.dim, T.ndimension, T.numel, torch.numel, T.nelement, builtins.len, aten.sym_size.int),
)

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

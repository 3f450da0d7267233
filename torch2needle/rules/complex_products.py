"""Rules of complex numbers that are made of real ones' products: convolutions, systems of equations, norms, moments."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from needle import ops
from needle.autograd import Tensor, Unsupported
from needle.complex_numbers import Complex
from needle.ops.fourier import complex as numbers

from . import convolution, linalg, reductions
from .complex_numbers import whole
from .registry import FUNCTION_RULES, complex_rule

LOADED = (convolution, linalg, reductions)  # whose rules are taken below
T, L = torch.Tensor, torch.linalg


# -- convolutions --------------------------------------------------------------------------------------------------------


def of_convolution(f: Callable, axes: int) -> Callable:
    """A convolution, which is linear in input and weight; its bias (C,) is added behind."""
    signature = inspect.signature(f)

    def convert(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        input, weight, bias = (given.arguments.pop(n, None) for n in ("input", "weight", "bias"))
        y = ops.multilinear(lambda x, w: f(x, w, **given.arguments), input, weight)
        if bias is None:
            return y
        return numbers.complex_add(y, whole(bias).map(lambda b: ops.reshape(b, (-1, *(1,) * axes))))

    convert.__signature__ = signature  # type: ignore[attr-defined]
    convert.__name__ = f.__name__
    return convert


for _axes in (1, 2, 3):
    for _kind in ("conv", "conv_transpose"):
        _public = [getattr(place, f"{_kind}{_axes}d") for place in (F, torch)]
        complex_rule(*_public)(of_convolution(FUNCTION_RULES[_public[0]], _axes))


# -- norms and moments ---------------------------------------------------------------------------------------------------


def of_size(*targets: Any) -> None:
    """The call of real numbers, of magnitudes."""
    for target in targets:
        f = FUNCTION_RULES[target]

        def convert(input: Any, *args: Any, f: Callable = f, **kwargs: Any) -> Any:
            if not isinstance(input, Complex):
                raise Unsupported("norms of real numbers expect a real dtype")
            if isinstance(dtype := kwargs.get("dtype"), torch.dtype) and dtype.is_complex:
                kwargs["dtype"] = dtype.to_real()
            return f(ops.magnitude(input), *args, **kwargs)

        convert.__signature__ = inspect.signature(f)  # type: ignore[attr-defined]
        complex_rule(target)(convert)


of_size(torch.norm, L.vector_norm)


@complex_rule(L.norm)
def norm(input: Any, ord: Any = None, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    if dtype is not None or (ord in ("nuc", 2, -2) and (not isinstance(dim, int) and (dim or input.real.ndim == 2))):
        raise Unsupported("norms of complex numbers expect no dtype, and no singular values")
    return FUNCTION_RULES[L.norm](ops.magnitude(input), ord, dim, keepdim)


@complex_rule(L.matrix_norm)
def matrix_norm(A: Any, ord: Any = "fro", dim: Any = (-2, -1), keepdim: bool = False, *, dtype: Any = None) -> Any:
    if dtype is not None or ord in ("nuc", 2, -2):
        raise Unsupported("norms of complex numbers expect no dtype, and no singular values")
    return FUNCTION_RULES[L.matrix_norm](ops.magnitude(A), ord, dim, keepdim)


def variance(*args: Any, **kwargs: Any) -> Any:
    """Of the real and of the imaginary parts, together."""
    z = args[0]
    of_part = FUNCTION_RULES[torch.var]
    return of_part(z.real, *args[1:], **kwargs) + of_part(z.imag, *args[1:], **kwargs)


def deviation(*args: Any, **kwargs: Any) -> Any:
    return ops.sqrt(variance(*args, **kwargs))


for _f, _targets in ((variance, (torch.var, T.var)), (deviation, (torch.std, T.std))):
    _f.__signature__ = inspect.signature(FUNCTION_RULES[torch.var])  # type: ignore[attr-defined]
    complex_rule(*_targets)(_f)


# -- systems of equations ------------------------------------------------------------------------------------------------


def real_form(a: Any) -> Tensor:
    """The real matrix of twice the size that does the same to a real part above an imaginary one."""
    a = whole(a)
    top, below = ops.concat([a.real, -a.imag], -1), ops.concat([a.imag, a.real], -1)
    return ops.concat([top, below], -2)


def halves(x: Tensor, last: int) -> list[Tensor]:
    """Both halves along the first of the last axes."""
    pair = ops.unflatten(x, -last, (2, -1))
    return [ops.getitem(pair, (Ellipsis, i, *(slice(None),) * last)) for i in range(2)]


@complex_rule(L.solve)
def solve(A: Any, B: Any, *, left: bool = True) -> Any:
    b = whole(B)
    if not left:
        return solve(whole(A).map(ops.transpose), b.map(ops.transpose)).map(ops.transpose)
    vector = b.real.ndim == 1
    if not vector and b.real.ndim < whole(A).real.ndim:
        raise Unsupported("solve of complex numbers expects b (..., N, M) or (N,), got fewer axes than A has")
    parts = [ops.unsqueeze(p, -1) if vector else p for p in (b.real, b.imag)]
    x = ops.solve(real_form(A), ops.concat(parts, -2))
    made = Complex(*halves(x, 2))
    return made.map(lambda p: ops.squeeze(p, -1)) if vector else made


def inverse(A: Any) -> Any:
    return Complex(*halves(halves(ops.inv(real_form(A)), 1)[0], 2))


complex_rule(L.inv)(lambda A: inverse(A))
complex_rule(torch.inverse, T.inverse)(lambda input: inverse(input))

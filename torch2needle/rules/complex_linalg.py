"""Rules of torch.linalg of complex numbers: equations and factors by real matrices of twice the size, norms, moments."""

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

from . import complex_parts, linalg, norms, ordering, reductions
from .complex_numbers import from_real, whole
from .registry import COMPLEX_RULES, FUNCTION_RULES, complex_rule

LOADED = (complex_parts, norms, ordering)  # whose rules are taken below
T, L, aten = torch.Tensor, torch.linalg, torch.ops.aten


# -- real matrices of twice the size ------------------------------------------------------------------------------------


def real_form(a: Any) -> Tensor:
    """The real matrix (..., 2 M, 2 N) that does the same to the parts of each number in turn."""
    a = whole(a)
    rows = [ops.stack(pair, -1) for pair in ([a.real, -a.imag], [a.imag, a.real])]  # (..., M, N, 2) each
    return ops.flatten(ops.flatten(ops.stack(rows, -3), -2), -3, -2)


def complex_form(x: Tensor) -> Complex:
    """The matrices of a real form, from its every other column."""
    first = ops.getitem(x, (Ellipsis, slice(None, None, 2)))
    return in_turn(first)


def in_turn(x: Tensor) -> Complex:
    """Of rows (..., 2 M, K) of real and imaginary parts in turn."""
    return Complex(*(ops.getitem(x, (Ellipsis, slice(i, None, 2), slice(None))) for i in range(2)))


def through_real_form(f: Callable) -> Callable:
    """What is the same for real forms: inverses, exponentials, powers, Cholesky factors (their diagonals are real)."""
    return lambda A, *args, **kwargs: complex_form(f(real_form(A), *args, **kwargs))


from_real(
    through_real_form,
    *(L.inv, torch.inverse, T.inverse, L.pinv, torch.pinverse, T.pinverse, torch.matrix_exp, T.matrix_exp),
    *(L.matrix_exp, torch.matrix_power, T.matrix_power, L.matrix_power, L.cholesky, torch.cholesky, T.cholesky),
    *(torch.cholesky_inverse, T.cholesky_inverse),
)


def once(f: Callable) -> Callable:
    """What the real form has twice, in order: singular values, eigenvalues."""
    return lambda A, *args, **kwargs: ops.getitem(f(real_form(A), *args, **kwargs), (Ellipsis, slice(None, None, 2)))


from_real(once, L.svdvals, L.eigvalsh)


def by_columns(solve: Callable[[Tensor, Tensor], Tensor], a: Complex, b: Complex) -> Complex:
    """solve(real form of a, b) of matrices b, or of vectors where b has one axis less than a and the sizes of its rows."""
    if is_vector(a.real, b.real):
        return by_columns(solve, a, b.map(lambda p: ops.unsqueeze(p, -1))).map(lambda p: ops.squeeze(p, -1))
    return in_turn(solve(real_form(a), ops.flatten(ops.stack([b.real, b.imag], -2), -3, -2)))


def is_vector(a: Any, b: Any) -> bool:
    if b.ndim == 1:
        return True
    return b.ndim == a.ndim - 1 and tuple(b.spec.shape) == tuple(a.spec.shape)[:-1]


@complex_rule(L.solve)
def solve(A: Any, B: Any, *, left: bool = True) -> Any:
    a, b = whole(A), whole(B)
    if not left:
        return by_columns(ops.solve, a.map(ops.transpose), b.map(ops.transpose)).map(ops.transpose)
    return by_columns(ops.solve, a, b)


@complex_rule(L.solve_triangular)
def solve_triangular(input: Any, B: Any, *, upper: bool, left: bool = True, unitriangular: bool = False) -> Any:
    """Of the triangle, as of any matrix."""
    triangle = whole(input).map(lambda p: ops.triangle(p, upper, (1 if upper else -1) if unitriangular else 0))
    if unitriangular:
        triangle = Complex(triangle.real + ops.eye_of(triangle.real), triangle.imag)
    return solve(triangle, B, left=left)


@complex_rule(torch.cholesky_solve, T.cholesky_solve)
def cholesky_solve(input: Any, input2: Any, upper: bool = False) -> Any:
    f = FUNCTION_RULES[torch.cholesky_solve]
    return by_columns(lambda a, b: f(b, a, upper), whole(input2), whole(input))


# -- norms and moments ---------------------------------------------------------------------------------------------------


def of_size(f: Callable) -> Callable:
    """The call of real numbers, of magnitudes."""

    def convert(input: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(input, Complex):
            raise Unsupported("norms of real numbers expect a real dtype")
        if isinstance(dtype := kwargs.get("dtype"), torch.dtype) and dtype.is_complex:
            kwargs["dtype"] = dtype.to_real()
        return f(ops.magnitude(input), *args, **kwargs)

    return convert


from_real(of_size, torch.norm, T.norm, L.vector_norm)


@complex_rule(L.matrix_norm)
def matrix_norm(A: Any, ord: Any = "fro", dim: Any = (-2, -1), keepdim: bool = False, *, dtype: Any = None) -> Any:
    if dtype is not None:
        raise Unsupported("norms of complex matrices expect no dtype")
    if ord not in linalg.SPECTRAL:
        return linalg.matrix_norm(ops.magnitude(A), ord, dim, keepdim)
    values = COMPLEX_RULES[L.svdvals](A.map(lambda x: ops.moveaxis(x, tuple(dim), (-2, -1))))
    return linalg.spectral_norm(values, ord, sorted(d % A.real.ndim for d in dim) if keepdim else [])


@complex_rule(L.norm)
def norm(input: Any, ord: Any = None, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    if ord in linalg.SPECTRAL and not isinstance(dim, int) and (dim or input.real.ndim == 2):
        return matrix_norm(input, ord, tuple(dim or (-2, -1)), keepdim, dtype=dtype)
    if dtype is not None:
        raise Unsupported("norms of complex numbers expect no dtype")
    return linalg.norm(ops.magnitude(input), ord, dim, keepdim)


@complex_rule(L.cond)
def cond(input: Any, p: Any = None) -> Any:
    if p in (None, 2, -2):
        most, least = (matrix_norm(input, n) for n in (2, -2))
        return least / most if p == -2 else most / least
    return matrix_norm(input, p) * matrix_norm(COMPLEX_RULES[L.inv](input), p)


@complex_rule(torch.dist, T.dist)
def dist(input: Any, other: Any, p: float = 2.0) -> Any:
    return ops.vector_norm(ops.magnitude(numbers.complex_subtract(input, other)), float(p), None, False)


@complex_rule(F.normalize)
def normalize(input: Any, p: float = 2.0, dim: Any = 1, eps: float = 1e-12) -> Any:
    return input / ops.clamp_min(ops.vector_norm(ops.magnitude(input), float(p), reductions.axes(dim), True), eps)


def variance(*args: Any, **kwargs: Any) -> Any:
    """Of the real and of the imaginary parts, together."""
    z = args[0]
    of_part = FUNCTION_RULES[torch.var]
    return of_part(z.real, *args[1:], **kwargs) + of_part(z.imag, *args[1:], **kwargs)


def deviation(*args: Any, **kwargs: Any) -> Any:
    return ops.sqrt(variance(*args, **kwargs))


def beside_mean(f: Callable) -> Callable:
    def convert(*args: Any, **kwargs: Any) -> tuple:
        given = signature.bind(*args, **kwargs).arguments
        dim, keepdim = given.get("dim"), given.get("keepdim", False)
        mean = COMPLEX_RULES[torch.mean](args[0], None if isinstance(dim, bool) else dim, keepdim)
        return f(*args, **kwargs), mean

    return convert


signature = inspect.signature(FUNCTION_RULES[torch.var])
for _f, _targets in (
    (variance, (torch.var, T.var)),
    (deviation, (torch.std, T.std)),
    (beside_mean(variance), (torch.var_mean,)),
    (beside_mean(deviation), (torch.std_mean,)),
):
    _f.__signature__ = signature  # type: ignore[attr-defined]
    complex_rule(*_targets)(_f)

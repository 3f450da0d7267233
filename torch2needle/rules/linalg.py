"""Rules of torch.linalg: equations, factors, determinants, norms of matrices, and torch's older names of them."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch

from needle import ops
from needle.autograd import Tensor, Unsupported
from needle.ops.reduce.sorting import known_rank

from .arithmetic import cast
from .reductions import axes
from .registry import rule
from .shapes import Absent
from .tables import functions

T, L, aten = torch.Tensor, torch.linalg, torch.ops.aten
SPECTRAL = {"nuc": ops.summation, 2: ops.amax, -2: ops.amin}  # norms by singular values
LU_KEPT = Absent("needle gives no LU factors beside this result; take them from torch.linalg.lu_factor_ex")


class Checked(NamedTuple):
    """torch.linalg.solve_ex."""

    result: Any
    info: Any


class CheckedInverse(NamedTuple):
    """torch.linalg.inv_ex."""

    inverse: Any
    info: Any


class CheckedCholesky(NamedTuple):
    """torch.linalg.cholesky_ex."""

    L: Any
    info: Any


class LogDeterminant(NamedTuple):
    """torch.linalg.slogdet."""

    sign: Any
    logabsdet: Any


class PackedLU(NamedTuple):
    """torch.linalg.lu_factor."""

    LU: Any
    pivots: Any


class CheckedLU(NamedTuple):
    """torch.linalg.lu_factor_ex."""

    LU: Any
    pivots: Any
    info: Any


class PLU(NamedTuple):
    """torch.linalg.lu."""

    P: Any
    L: Any
    U: Any


class QR(NamedTuple):
    """torch.linalg.qr."""

    Q: Any
    R: Any


class Eigen(NamedTuple):
    """torch.linalg.eigh."""

    eigenvalues: Any
    eigenvectors: Any


class SVD(NamedTuple):
    """torch.linalg.svd."""

    U: Any
    S: Any
    Vh: Any


class OldSVD(NamedTuple):
    """torch.svd."""

    U: Any
    S: Any
    V: Any


class LeastSquares(NamedTuple):
    """torch.linalg.lstsq."""

    solution: Any
    residuals: Any
    rank: Any
    singular_values: Any


# -- systems of equations ------------------------------------------------------------------------------------------------


def solved(a: Any, b: Any, left: bool, check: bool) -> Any:
    if left:
        return ops.solve(a, b, check)
    return ops.transpose(ops.solve(ops.transpose(a), ops.transpose(b), check))


functions("A, B, *, left=True", {(L.solve,): lambda a, b, left: solved(a, b, left, True)})


@rule(L.solve_ex)
def solve_ex(A: Any, B: Any, *, left: bool = True, check_errors: bool = False) -> Checked:
    return Checked(solved(A, B, left, check_errors), ops.lu_factor(A)[3])


@rule(aten._linalg_solve_ex.default)
def solve_below(A: Any, B: Any, *, left: bool = True, check_errors: bool = False) -> tuple:
    return *solve_ex(A, B, left=left, check_errors=check_errors)[:1], LU_KEPT, LU_KEPT, ops.lu_factor(A)[3]


functions("A", {(L.inv,): ops.inv})
functions("input", {(torch.inverse, T.inverse): ops.inv})


@rule(L.inv_ex)
def inv_ex(A: Any, *, check_errors: bool = False) -> CheckedInverse:
    return CheckedInverse(ops.inv(A, check_errors), ops.lu_factor(A)[3])


@rule(L.solve_triangular)
def solve_triangular(input: Any, B: Any, *, upper: bool, left: bool = True, unitriangular: bool = False) -> Any:
    return ops.solve_triangular(input, B, upper, left, unitriangular)


functions("input, upper=False", {(L.cholesky, torch.cholesky, T.cholesky): lambda a, upper: ops.cholesky(a, upper)[0]})


@rule(L.cholesky_ex)
def cholesky_ex(input: Any, *, upper: bool = False, check_errors: bool = False) -> CheckedCholesky:
    return CheckedCholesky(*ops.cholesky(input, upper, check_errors))


functions("input, input2, upper=False", {(torch.cholesky_solve, T.cholesky_solve): ops.cholesky_solve})
functions("input, upper=False", {(torch.cholesky_inverse, T.cholesky_inverse): ops.cholesky_inverse})


@rule(L.lu_factor)
def lu_factor(A: Any, *, pivot: bool = True) -> PackedLU:
    return PackedLU(*lu_factor_ex(A, pivot=pivot)[:2])


@rule(L.lu_factor_ex)
def lu_factor_ex(A: Any, *, pivot: bool = True, check_errors: bool = False) -> CheckedLU:
    if not pivot or check_errors:
        raise Unsupported("LU factors expect pivot=True and check_errors=False")
    factors, _, pivots, info = ops.lu_factor(A)
    return CheckedLU(factors, pivots, info)


@rule(L.lu)
def lu(A: Any, *, pivot: bool = True) -> PLU:
    if not pivot:
        raise Unsupported("LU factors expect pivot=True")
    found = ops.lu_factor(A)
    return PLU(ops.permutation(found[1], found[0]), *ops.lu_parts(found[0]))


@rule(L.lu_solve)
def lu_solve(LU: Any, pivots: Any, B: Any, *, left: bool = True, adjoint: bool = False) -> Any:
    return ops.lu_solve(LU, pivots, B, left, adjoint)


@rule(torch.lu_solve, T.lu_solve)
def old_lu_solve(b: Any, LU_data: Any, LU_pivots: Any) -> Any:
    return ops.lu_solve(LU_data, LU_pivots, b)


@rule(L.lstsq)
def lstsq(input: Any, b: Any, rcond: Any = None, *, driver: str | None = None) -> LeastSquares:
    given = tolerance(rcond, "rcond")
    why = "needle gives no {} of least squares: their size depends on the rank"
    return LeastSquares(
        ops.lstsq(input, b, given),
        Absent(why.format("residuals")),
        ops.matrix_rank(input, given),
        Absent(why.format("singular values")),
    )


@rule(L.tensorinv)
def tensorinv(input: Any, ind: int = 2) -> Any:
    first, last = tuple(input.shape[:ind]), tuple(input.shape[ind:])
    return ops.reshape(ops.inv(ops.reshape(input, (math.prod(first), -1))), (*last, *first))


@rule(L.tensorsolve)
def tensorsolve(input: Any, other: Any, dims: Any = None) -> Any:
    if dims is not None:
        input = ops.moveaxis(input, tuple(dims), tuple(range(input.ndim - len(dims), input.ndim)))
    size = math.prod(other.shape)
    x = ops.solve(ops.reshape(input, (size, -1)), ops.flatten(other))
    return ops.reshape(x, tuple(input.shape[other.ndim :]))


# -- determinants --------------------------------------------------------------------------------------------------------

functions("A", {(L.det,): ops.det, (L.slogdet,): lambda a: LogDeterminant(*ops.slogdet(a))})
functions("input", {(torch.det, T.det): ops.det})
functions("input", {(torch.slogdet, T.slogdet): lambda a: LogDeterminant(*ops.slogdet(a))})


@rule(torch.logdet, T.logdet)
def logdet(input: Any) -> Any:
    sign, size = ops.slogdet(input)
    return ops.where(ops.lt(sign, 0), math.nan, size)


@rule(aten._linalg_det.default)
def det_below(A: Any) -> tuple:
    return ops.det(A), LU_KEPT, LU_KEPT


@rule(aten._linalg_slogdet.default)
def slogdet_below(A: Any) -> tuple:
    return (*ops.slogdet(A), LU_KEPT, LU_KEPT)


# -- orthogonal factors --------------------------------------------------------------------------------------------------


@rule(L.qr)
def qr(A: Any, mode: str = "reduced") -> QR:
    if mode not in ("reduced", "complete", "r"):
        raise Unsupported(f"mode expects reduced, complete or r, got {mode}")
    q, r = ops.qr(A, mode)
    return QR(Absent("mode r gives no Q") if mode == "r" else q, r)


functions("input, some=True", {(torch.qr, T.qr): lambda a, some: qr(a, "reduced" if some else "complete")})
functions("input, tau", {(L.householder_product,): ops.householder_product})
functions("input, input2", {(torch.orgqr, T.orgqr): ops.householder_product})


@rule(torch.ormqr, T.ormqr)
def ormqr(input: Any, input2: Any, input3: Any, left: bool = True, transpose: bool = False) -> Any:
    """The product with all columns of Q: those beyond `input2` are of reflections that leave all as it is."""
    missing = input.shape[-2] - input2.shape[-1]
    extra = input.shape[-2] - input.shape[-1]
    q = ops.householder_product(ops.pad(input, (0, extra)), ops.pad(input2, (0, missing)))
    q = ops.transpose(q) if transpose else q
    return ops.matmul(q, input3) if left else ops.matmul(input3, q)


def lower(UPLO: str) -> bool:
    if UPLO.upper() not in ("L", "U"):
        raise Unsupported(f"UPLO expects L or U, got {UPLO}")
    return UPLO.upper() == "L"


functions(
    "input, UPLO='L'",
    {
        (L.eigh,): lambda a, UPLO: Eigen(*ops.eigh(a, lower(UPLO))),
        (L.eigvalsh,): lambda a, UPLO: ops.eigvalsh(a, lower(UPLO)),
    },
)


@rule(aten._linalg_eigh.default)
def eigh_below(A: Any, UPLO: str = "L", compute_v: bool = True) -> tuple:
    return tuple(ops.eigh(A, lower(UPLO)))


@rule(L.eig, L.eigvals)
def eig(input: Any) -> Any:
    raise Unsupported("eigenvalues of matrices that are not symmetric are not supported; see torch.linalg.eigh")


@rule(L.svd)
def svd(A: Any, full_matrices: bool = True, *, driver: str | None = None) -> SVD:
    return SVD(*ops.svd(A, full_matrices))


functions("A, *, driver=None", {(L.svdvals,): lambda a, driver: ops.svdvals(a)})


@rule(torch.svd, T.svd)
def old_svd(input: Any, some: bool = True, compute_uv: bool = True) -> OldSVD:
    if not compute_uv:
        raise Unsupported("compute_uv expects True; torch.linalg.svdvals gives values alone")
    u, s, vt = ops.svd(input, not some)
    return OldSVD(u, s, ops.transpose(vt))


@rule(aten._linalg_svd.default)
def svd_below(A: Any, full_matrices: bool = False, compute_uv: bool = True, *, driver: Any = None) -> tuple:
    return ops.svd(A, full_matrices and compute_uv)


def tolerance(value: Any, name: str) -> Any:
    if isinstance(value, Tensor):
        raise Unsupported(f"{name} expects a number, got a tensor")
    return None if value is None else float(value)


@rule(L.pinv)
def pinv(input: Any, rcond: Any = None, hermitian: bool = False, *, atol: Any = None, rtol: Any = None) -> Any:
    return ops.pinv(
        ops.symmetric(input) if hermitian else input,
        tolerance(rcond if rtol is None else rtol, "rtol"),
        tolerance(atol, "atol") or 0.0,
    )


functions("input, rcond=1e-15", {(torch.pinverse, T.pinverse): lambda a, rcond: ops.pinv(a, tolerance(rcond, "rcond"))})


@rule(L.matrix_rank)
def matrix_rank(input: Any, tol: Any = None, hermitian: bool = False, *, atol: Any = None, rtol: Any = None) -> Any:
    least = tolerance(atol if tol is None else tol, "atol")
    return ops.matrix_rank(ops.symmetric(input) if hermitian else input, tolerance(rtol, "rtol"), least or 0.0)


functions("input", {(torch.matrix_exp, T.matrix_exp, L.matrix_exp): ops.matrix_exp})


@rule(torch.matrix_power, T.matrix_power, L.matrix_power)
def matrix_power(input: Any, n: int) -> Any:
    if n < 0:
        return matrix_power(ops.inv(input), -n)
    if n == 0:
        return ops.eye_of(input)
    half = matrix_power(input, n // 2) if n > 1 else None
    square = None if half is None else ops.matmul(half, half)
    return input if square is None else ops.matmul(square, input) if n % 2 else square


# -- norms ---------------------------------------------------------------------------------------------------------------


def spectral_norm(values: Any, ord: Any, kept: list[int]) -> Any:
    """Of singular values (..., N), with axes of size 1 at the places `kept`."""
    return functools.reduce(ops.unsqueeze, kept, SPECTRAL[ord](values, -1))


@rule(L.matrix_norm)
def matrix_norm(input: Any, ord: Any = "fro", dim: Any = (-2, -1), keepdim: bool = False, *, dtype: Any = None) -> Any:
    x, (rows, columns) = cast(input, dtype), dim
    if ord == "fro":
        return ops.vector_norm(x, 2.0, (rows, columns), keepdim)
    if ord in SPECTRAL:
        values = ops.svdvals(ops.moveaxis(x, (rows, columns), (-2, -1)))
        return spectral_norm(values, ord, sorted(d % input.ndim for d in dim) if keepdim else [])
    if ord not in (1, -1, math.inf, -math.inf):
        raise Unsupported(f"ord expects fro, nuc, 1, -1, 2, -2, inf or -inf, got {ord}")
    along, over = (rows, columns) if abs(ord) == 1 else (columns, rows)
    sums = ops.summation(ops.absolute(x), along, True)
    found = (ops.amax if ord > 0 else ops.amin)(sums, over, True)
    return found if keepdim else ops.squeeze(found, tuple(dim))


@rule(L.norm)
def norm(input: Any, ord: Any = None, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    pair = (dim is None and ord is not None and input.ndim == 2) or (isinstance(dim, tuple | list) and len(dim) == 2)
    if (pair and ord is not None) or isinstance(ord, str):
        return matrix_norm(input, ord, (-2, -1) if dim is None else tuple(dim), keepdim, dtype=dtype)
    if dim is None and ord is not None and input.ndim != 1:
        raise Unsupported(f"ord expects a vector or a matrix, got {input.ndim} axes")
    return ops.vector_norm(
        cast(input, dtype),
        2.0 if ord is None else float(ord),
        dim or None if isinstance(dim, tuple | list) else dim,
        keepdim,
    )


@rule(torch.norm, T.norm)
def old_norm(
    input: Any, p: Any = "fro", dim: Any = None, keepdim: bool = False, out: Any = None, dtype: Any = None
) -> Any:
    if p == "nuc":
        return matrix_norm(input, "nuc", (-2, -1) if dim is None else tuple(dim), keepdim, dtype=dtype)
    return ops.vector_norm(cast(input, dtype), 2.0 if p in ("fro", None) else float(p), axes(dim), keepdim)


@rule(torch.nuclear_norm)
def nuclear_norm(input: Any, dim: Any = (-2, -1), keepdim: bool = False) -> Any:
    return matrix_norm(input, "nuc", *(((-2, -1), dim) if isinstance(dim, bool) else (tuple(dim), keepdim)))


@rule(torch.frobenius_norm)
def frobenius_norm(input: Any, dim: Any = (), keepdim: bool = False) -> Any:
    return ops.vector_norm(input, 2.0, axes(dim), keepdim)


@rule(torch.norm_except_dim)
def norm_except_dim(v: Any, pow: int = 2, dim: int = 0) -> Any:
    rank = known_rank(v)
    if rank is None:
        raise Unsupported("norms over all axes but one need the number of axes; pass example=")
    return ops.vector_norm(
        v, float(pow), None if dim == -1 else tuple(i for i in range(rank) if i != dim % rank), dim != -1
    )


@rule(L.cond)
def cond(input: Any, p: Any = None) -> Any:
    if p in (None, 2, -2):
        values = ops.svdvals(input)
        most, least = ops.amax(values, -1), ops.amin(values, -1)
        return least / most if p == -2 else most / least
    inverse, info = inv_ex(input)
    of_inverse = ops.where(ops.eq(info, 0), matrix_norm(inverse, p), math.inf)
    return matrix_norm(input, p) * of_inverse


# -- others ------------------------------------------------------------------------------------------------------


@rule(torch.vander)
def falling_vander(x: Any, N: int | None = None, increasing: bool = False) -> Any:
    return vander(x, N) if increasing else ops.flip(vander(x, N), -1)


@rule(L.vander)
def vander(x: Any, N: int | None = None) -> Any:
    return ops.unsqueeze(x, -1) ** ops.arange_like(x, 0, x.shape[-1] if N is None else N)

"""LU factors of batches of matrices, what they are made of, and solutions by them."""

from __future__ import annotations

from typing import Any

import numpy as np

from needle.autograd import Op, Spec, Tensor, op
from needle.backend_ndarray import dtype_name
from needle.ops.common import constant
from needle.ops.families import no_gradient, samples_of
from needle.ops.linalg.basic import matmul
from needle.ops.linalg.solving import OfMatrices, SolveTriangular, eye_like
from needle.ops.math.comparison import eq
from needle.ops.math.elementwise import cast, where
from needle.ops.shape.basic import broadcast_to, transpose, unsqueeze
from needle.ops.shape.join import make_tuple
from needle.ops.shape.runtime_shape import triangle

__all__ = ["lu_factor", "lu_parts", "lu_solve", "permutation", "pivot_order"]


@op
class Lu(OfMatrices):
    """(L below the diagonal and U, order, pivots, info) with A[order] = L U, rows exchanged for the largest pivot.

    pivots are LAPACK's exchanges; info (int32) is 0, else the first column, from 1 on, without a pivot.
    """

    n_out = 4

    def infer(self, a: Any) -> Any:
        batch, m, n = self.shape_of(a)
        k = min(m, n)
        return (
            Spec((*batch, m, n), dtype_name(a.dtype)),
            Spec((*batch, m), "int64"),
            Spec((*batch, k), "int32"),
            Spec(batch, "int32"),
        )

    def reference(self, a: np.ndarray) -> Any:
        a = a.copy()
        batch, m, n = a.shape[:-2], *a.shape[-2:]
        flat = a.reshape(int(np.prod(batch)), m, n)
        order, pivots = np.tile(np.arange(m), (len(flat), 1)), np.zeros((len(flat), min(m, n)), "int32")
        info = np.zeros(len(flat), "int32")
        for i, f in enumerate(flat):
            for k in range(min(m, n)):
                best = k + int(np.argmax(np.abs(f[k:, k])))
                pivots[i, k] = best + 1
                f[[k, best]], order[i, [k, best]] = f[[best, k]], order[i, [best, k]]
                if f[k, k] == 0:
                    info[i] = info[i] or k + 1
                    continue
                f[k + 1 :, k] /= f[k, k]
                f[k + 1 :, k + 1 :] -= np.outer(f[k + 1 :, k], f[k, k + 1 :])
        return a, order.reshape(*batch, m), pivots.reshape(*batch, min(m, n)), info.reshape(batch)

    def gradient(self, out_grad: Any, node: Tensor) -> Any:
        m, n = node.inputs[0].shape[-2:]
        if m != n:
            raise ValueError(f"[lu] has a gradient of square matrices alone, got ({m}, {n}).")
        factors, grad = node[0], out_grad[0]
        low = matmul(transpose(unit_lower(factors)), triangle(grad, False, -1))
        high = matmul(triangle(grad, True), transpose(triangle(factors, True)))
        inner = triangle(low, False, -1) + triangle(high, True)
        left = SolveTriangular(True, True)(transpose(factors), inner)  # L^-T inner
        both = transpose(SolveTriangular(True)(factors, transpose(left)))  # ... U^-T
        return matmul(permutation(node[1], grad), both)


def unit_lower(factors: Tensor) -> Tensor:
    """L (N, N) of LU factors."""
    return triangle(factors, False, -1) + eye_like(factors, factors.shape[-1])


@op
class LuParts(Op):
    """(L (..., M, K), U (..., K, N)) of LU factors."""

    n_out = 2

    def infer(self, factors: Any) -> Any:
        *batch, m, n = factors.shape
        k, dtype = min(m, n), str(factors.dtype)
        return Spec((*batch, m, k), dtype), Spec((*batch, k, n), dtype)

    def decompose(self, factors: Tensor) -> Any:
        m, n = factors.shape[-2:]
        k = min(m, n)
        low = triangle(factors[..., :k], False, -1) + eye_like(factors, m, k)
        return make_tuple(low, triangle(factors[..., :k, :], True))

    samples = samples_of(({}, [(2, 4, 3)]), ({}, [(3, 4)]))


@op
class Permutation(Op):
    """The matrix (..., M, M), in the dtype of `like`, that brings rows to the places `order` (..., M)."""

    def infer(self, order: Any, like: Any) -> Any:
        return Spec((*order.shape, order.shape[-1]), str(like.dtype))

    def decompose(self, order: Tensor, like: Tensor) -> Tensor:
        rows = constant(np.arange(order.shape[-1])[:, None], order, "int64")
        return cast(eq(unsqueeze(order, -2), rows), like.dtype)

    samples = samples_of(({}, [Spec((2, 4), "int64"), (1,)]))


def permutation(order: Tensor, like: Tensor) -> Tensor:
    """P with A = P L U, from the rows of A that L U has."""
    return Permutation()(order, like)


def lu_factor(a: Tensor) -> Any:
    """(LU factors, order of rows, pivots, info): `Lu`."""
    return Lu()(a)


def lu_parts(factors: Tensor) -> Any:
    """(L, U)."""
    return LuParts()(factors)


@op
class PivotOrder(Op):
    """The rows (..., M) that LAPACK's pivots (..., K), exchanges from 1 on, bring to the top in turn; M: `rows`, else K."""

    rows: int | None = None

    def infer(self, pivots: Any) -> Any:
        *batch, n = pivots.shape
        return Spec((*batch, n if self.rows is None else self.rows), "int64")

    def decompose(self, pivots: Tensor) -> Tensor:
        shape = self.infer(pivots).shape
        numbers = constant(np.arange(shape[-1]), pivots, "int64")
        order = broadcast_to(numbers, shape)
        for k in range(pivots.shape[-1]):
            to = cast(pivots[..., k : k + 1], "int64") - 1
            here, there = eq(numbers, k), eq(numbers, to)
            mine = order[..., k : k + 1]
            other = (cast(there, "int64") * order).sum(-1)
            order = where(there, mine, where(here, unsqueeze(other, -1), order))
        return order

    gradient = no_gradient

    samples = samples_of(({}, [Spec((2, 3), "int32")]))


def pivot_order(pivots: Tensor, rows: int) -> Tensor:
    """The order of `rows` rows that pivots of LU factors bring about."""
    return PivotOrder(rows)(pivots)


def lu_solve(factors: Tensor, pivots: Tensor, b: Tensor, left: bool = True, adjoint: bool = False) -> Tensor:
    """torch.linalg.lu_solve."""
    if not left:
        return transpose(lu_solve(factors, pivots, transpose(b), True, not adjoint))
    p = permutation(PivotOrder()(pivots), factors)
    if adjoint:
        y = SolveTriangular(False)(transpose(factors), b)
        return matmul(p, SolveTriangular(True, True)(transpose(factors), y))
    y = SolveTriangular(False, True)(factors, matmul(transpose(p), b))
    return SolveTriangular(True)(factors, y)

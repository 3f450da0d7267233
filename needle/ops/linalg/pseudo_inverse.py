"""Pseudo-inverses of batches of matrices, ranks, and least squares by them."""

from __future__ import annotations

from typing import Any

import numpy as np

from needle.autograd import Op, Spec, Tensor, op
from needle.backend_ndarray import dtype_name
from needle.ops.common import alias
from needle.ops.families import samples_of
from needle.ops.linalg.basic import MatMul, matmul
from needle.ops.linalg.solving import OfMatrices, OrVector, eye_like
from needle.ops.linalg.spectral import Svd, svdvals
from needle.ops.math.comparison import gt
from needle.ops.math.elementwise import maximum
from needle.ops.reduce.basic import summation
from needle.ops.shape.basic import transpose
from needle.ops.shape.runtime_shape import triangle

__all__ = ["lstsq", "matrix_rank", "pinv", "symmetric"]


@op
class Pinv(OfMatrices):
    """The pseudo-inverse (..., N, M) of (..., M, N); singular values up to atol or rtol times the largest count as 0.

    rtol None: the larger of M and N times the dtype's smallest step at 1.
    """

    rtol: float | None = None
    atol: float = 0.0

    def infer(self, a: Any) -> Any:
        batch, m, n = self.shape_of(a)
        return Spec((*batch, n, m), dtype_name(a.dtype))

    def tolerance(self, a: Any) -> float:
        if self.rtol is not None:
            return self.rtol
        return max(a.shape[-2:]) * float(np.finfo(dtype_name(a.dtype)).eps) if self.atol == 0 else 0.0

    def numbers(self, a: Any) -> dict[str, Any]:
        return {"rtol": self.tolerance(a), "atol": self.atol}

    def reference(self, a: np.ndarray) -> Any:
        if not np.isfinite(a).all():
            raise ValueError("[pinv] expects finite numbers, got others.")
        u, s, vt = Svd().reference(a)
        least = np.maximum(self.atol, self.tolerance(a) * s.max(-1, initial=0, keepdims=True))
        over = np.where(s > least, 1 / np.where(s > least, s, 1), 0).astype(a.dtype)
        return np.swapaxes(vt, -1, -2) * over[..., None, :] @ np.swapaxes(u, -1, -2)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        """Golub and Pereyra, The differentiation of pseudo-inverses, 1973."""
        a, p = node.inputs[0], node
        (m, n), pt, back = a.shape[-2:], transpose(p), transpose(out_grad)
        left = eye_like(a, m) - matmul(a, p)
        right = eye_like(a, n) - matmul(p, a)
        one = matmul(matmul(left, back), matmul(p, pt))
        other = matmul(matmul(pt, p), matmul(back, right))
        return one + other - matmul(matmul(pt, out_grad), pt)

    samples = samples_of(({}, [(4, 3)]), ({}, [(2, 3, 5)]))


def pinv(a: Tensor, rtol: float | None = None, atol: float = 0.0) -> Tensor:
    """torch.linalg.pinv."""
    return Pinv(rtol, atol)(a)


@op
class Symmetric(Op):
    """The symmetric matrices of lower triangles (..., N, N); as in torch, what has no elements needs not be square."""

    def infer(self, a: Any) -> Any:
        if len(a.shape) < 2 or (a.shape[-1] != a.shape[-2] and 0 not in a.shape):
            raise ValueError(f"[symmetric] expects matrices (..., N, N), got shape {tuple(a.shape)}.")
        return Spec(tuple(a.shape), dtype_name(a.dtype))

    def decompose(self, a: Tensor) -> Tensor:
        return alias(a) if 0 in a.shape else triangle(a, False) + transpose(triangle(a, False, -1))

    samples = samples_of(({}, [(2, 3, 3)]))


def symmetric(a: Tensor) -> Tensor:
    """The symmetric matrices whose lower triangles those of a are."""
    return Symmetric()(a)


@op
class MatrixRank(Op):
    """The number (int64) of singular values over atol and rtol times the largest; rtol as of Pinv."""

    rtol: float | None = None
    atol: float = 0.0

    has_expression = False

    def infer(self, a: Any) -> Any:
        return Spec(Pinv().infer(a).shape[:-2], "int64")

    def decompose(self, a: Tensor) -> Tensor:
        values = svdvals(a)
        least = maximum(values[..., :1] * Pinv(self.rtol, self.atol).tolerance(a), self.atol)
        return summation(gt(values, least), -1)

    samples = samples_of(({}, [(2, 3, 4)]), ({"rtol": 0.4}, [(3, 3)]))


def matrix_rank(a: Tensor, rtol: float | None = None, atol: float = 0.0) -> Tensor:
    """torch.linalg.matrix_rank."""
    return MatrixRank(rtol, atol)(a)


@op
class Lstsq(OrVector):
    """x (..., N, K) of the smallest norm among those of the smallest |A x - b|; b (..., M, K) or (..., M)."""

    rtol: float | None = None

    def infer_columns(self, a: Any, b: Any) -> Any:
        return MatMul().infer(Pinv().infer(a), b)

    def of_columns(self, a: Tensor, b: Tensor) -> Tensor:
        return matmul(pinv(a, self.rtol), b)

    samples = samples_of(({}, [(4, 3), (4, 2)]), ({}, [(2, 3, 4), (2, 3)]))


def lstsq(a: Tensor, b: Tensor, rtol: float | None = None) -> Tensor:
    """The solution of torch.linalg.lstsq, by the pseudo-inverse."""
    return Lstsq(rtol)(a, b)

"""Orthogonal factors of batches of matrices: QR, eigenvectors, singular values; exponentials."""

from __future__ import annotations

from typing import Any

import numpy as np

from needle.autograd import Op, Spec, Tensor, Unsupported, op, tensor_method
from needle.backend_ndarray import dtype_name
from needle.ops.common import constant
from needle.ops.families import samples_of
from needle.ops.linalg.basic import matmul
from needle.ops.linalg.solving import OfMatrices, SolveTriangular, eye_like
from needle.ops.shape.basic import broadcast_to, transpose, unsqueeze
from needle.ops.shape.join import PartialTuple, concat, make_tuple
from needle.ops.shape.runtime_shape import stop_gradient, triangle

__all__ = [
    "eigh",
    "eigvalsh",
    "eye_of",
    "householder_product",
    "matrix_exp",
    "qr",
    "svd",
    "svdvals",
]


def known(out_grad: Any, count: int) -> list[Any]:
    """Gradients of the results, None of those that nothing was made of."""
    if isinstance(out_grad, PartialTuple):
        return [out_grad.items.get(i) for i in range(count)]
    return list(out_grad)


def total(*terms: Any) -> Any:
    """The sum of those that are not None."""
    there = [t for t in terms if t is not None]
    return sum(there[1:], there[0]) if there else None


@op
class Qr(OfMatrices):
    """(Q (..., M, K), R (..., K, N)) of (..., M, N) by Householder's reflections, signs as LAPACK's.

    K is the smaller of M and N, or M if `complete`.
    """

    complete: bool = False
    n_out = 2

    def infer(self, a: Any) -> Any:
        batch, m, n = self.shape_of(a)
        k, dtype = m if self.complete else min(m, n), dtype_name(a.dtype)
        return Spec((*batch, m, k), dtype), Spec((*batch, k, n), dtype)

    def numbers(self, *arrays: Any) -> dict[str, Any]:
        return {}

    def reference(self, a: np.ndarray) -> Any:
        q, r = np.linalg.qr(a, "complete" if self.complete else "reduced")
        return q, r

    def must_decompose(self, a: Any) -> bool:
        return a.requires_grad and a.shape[-2] < a.shape[-1]

    def decompose(self, a: Tensor) -> Any:
        """Of a wide matrix: Q is that of its first columns."""
        m = a.shape[-2]
        if m >= a.shape[-1]:
            raise Unsupported(
                "[qr] has neither a kernel for these inputs nor a decomposition; factor the matrix on the CPU"
            )
        q, r = Qr()(a[..., :m])
        return make_tuple(q, concat([r, matmul(transpose(q), a[..., m:])], -1))

    def gradient(self, out_grad: Any, node: Tensor) -> Any:
        """Walter, Lehmann and Lamour, On evaluating higher-order derivatives of the QR decomposition, 2012."""
        m, n = node.inputs[0].shape[-2:]
        if self.complete and m > n:
            raise ValueError(f"[qr] has a gradient of reduced factors alone, got complete ones of ({m}, {n}).")
        grad_q, grad_r = known(out_grad, 2)
        q, r = node[0], node[1]
        inner = total(
            None if grad_r is None else matmul(grad_r, transpose(r)),
            None if grad_q is None else -matmul(transpose(q), grad_q),
        )
        inner = triangle(inner, True)
        grad = total(grad_q, matmul(q, inner + transpose(triangle(inner, True, 1))))
        return transpose(SolveTriangular(True)(r, transpose(grad)))

    samples = samples_of(({}, [(4, 3)]), ({}, [(2, 3, 3)]), ({"complete": True}, [(2, 3, 5)]))


def qr(a: Tensor, mode: str = "reduced") -> Any:
    """torch.linalg.qr: (Q, R), mode "reduced" or "complete"."""
    return Qr(mode == "complete")(a)


@op
class HouseholderProduct(Op):
    """The first N columns of the product of reflections 1 - t v v^T, t in (..., K).

    v are columns of (..., M, N), with 1 at their places and 0 above.
    """

    def infer(self, a: Any, tau: Any) -> Any:
        *batch, m, n = a.shape
        if m < n or tau.shape[-1] > n or tuple(tau.shape[:-1]) != tuple(batch):
            shapes = f"{tuple(a.shape)} and {tuple(tau.shape)}"
            raise ValueError(f"[{self.label}] expects (..., M, N), M >= N, and up to N factors, got {shapes}.")
        return Spec(tuple(a.shape), str(a.dtype))

    def decompose(self, a: Tensor, tau: Tensor) -> Tensor:
        m, n = self.infer(a, tau).shape[-2:]
        product = eye_like(a, m, n)
        vectors = triangle(a, False, -1) + product
        for i in reversed(range(tau.shape[-1])):
            v = vectors[..., i : i + 1]
            product = product - matmul(v * unsqueeze(tau[..., i : i + 1], -1), matmul(transpose(v), product))
        return product

    samples = samples_of(({}, [(4, 3), (3,)]), ({}, [(2, 4, 2), (2, 2)]))


def householder_product(a: Tensor, tau: Tensor) -> Tensor:
    """torch.linalg.householder_product."""
    return HouseholderProduct()(a, tau)


@op
class Eigh(OfMatrices):
    """(values (..., N), ascending, vectors (..., N, N), in columns) of symmetric matrices, of which the lower triangle is read.

    Signs of vectors, and vectors of equal values, are not unique.
    """

    n_out = 2
    square = True

    def infer(self, a: Any) -> Any:
        batch, n, _ = self.shape_of(a)
        dtype = dtype_name(a.dtype)
        return Spec((*batch, n), dtype), Spec((*batch, n, n), dtype)

    def reference(self, a: np.ndarray) -> Any:
        finite = np.isfinite(a).all((-1, -2), keepdims=True)
        values, vectors = np.linalg.eigh(np.where(finite, a, 0))
        return np.where(finite[..., 0], values, np.nan).astype(a.dtype), np.where(finite, vectors, np.nan).astype(
            a.dtype
        )

    def gradient(self, out_grad: Any, node: Tensor) -> Any:
        values, vectors = node[0], node[1]
        grad_values, grad_vectors = known(out_grad, 2)
        inner = None
        if grad_vectors is not None:
            n = values.shape[-1]
            gaps = unsqueeze(values, -2) - unsqueeze(values, -1) + eye_like(values, n)
            inner = matmul(transpose(vectors), grad_vectors) / gaps * constant(1 - np.eye(n), values)
        by_values = None if grad_values is None else vectors * unsqueeze(grad_values, -2)
        return matmul(total(by_values, None if inner is None else matmul(vectors, inner)), transpose(vectors))


def eigh(a: Tensor, lower: bool = True) -> Any:
    """torch.linalg.eigh: (values, vectors) of symmetric matrices, by the lower or the upper triangle."""
    return Eigh()(a if lower else transpose(a))


def eigvalsh(a: Tensor, lower: bool = True) -> Tensor:
    """torch.linalg.eigvalsh."""
    return eigh(a, lower)[0]


@op
class Svd(OfMatrices):
    """(U (..., M, K), singular values (..., K), descending, V^T (..., K, N)), K the smaller of M and N.

    Signs of vectors, and vectors of equal values, are not unique.
    """

    n_out = 3

    def infer(self, a: Any) -> Any:
        batch, m, n = self.shape_of(a)
        k, dtype = min(m, n), dtype_name(a.dtype)
        return Spec((*batch, m, k), dtype), Spec((*batch, k), dtype), Spec((*batch, k, n), dtype)

    def reference(self, a: np.ndarray) -> Any:
        if not np.isfinite(a).all():
            raise ValueError("[svd] expects finite numbers, got others.")
        return tuple(np.linalg.svd(a, full_matrices=False))

    def gradient(self, out_grad: Any, node: Tensor) -> Any:
        """Townsend, Differentiating the singular value decomposition, 2016."""
        u, s, vt = node[0], node[1], node[2]
        grad_u, grad_s, grad_vt = known(out_grad, 3)
        m, n = node.inputs[0].shape[-2:]
        k = min(m, n)
        row, column = unsqueeze(s, -2), unsqueeze(s, -1)
        gaps = (row - column) * (row + column) + eye_like(s, k)
        off = constant(1 - np.eye(k), s)

        def skew(x: Tensor) -> Tensor:
            return (x - transpose(x)) / gaps * off

        grad = None if grad_s is None else matmul(u * unsqueeze(grad_s, -2), vt)
        if grad_u is not None:
            common = matmul(transpose(u), grad_u)
            grad = total(grad, matmul(matmul(u, skew(common) * row), vt))
            if m > k:
                grad = grad + matmul((grad_u - matmul(u, common)) / row, vt)
        if grad_vt is not None:
            common = matmul(grad_vt, transpose(vt))
            grad = total(grad, matmul(matmul(u, column * skew(transpose(common))), vt))
            if n > k:
                grad = grad + matmul(u, (grad_vt - matmul(common, vt)) / column)
        return grad


@op
class Basis(Op):
    """Orthonormal columns (..., M, K) and, without a gradient, M - K more."""

    has_expression = False

    def infer(self, u: Any) -> Any:
        return Spec((*u.shape[:-1], u.shape[-2]), str(u.dtype))

    def decompose(self, u: Tensor) -> Tensor:
        k = u.shape[-1]
        if k == u.shape[-2]:
            return u
        return concat([u, Qr(True)(stop_gradient(u))[0][..., k:]], -1)


def svd(a: Tensor, full: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """torch.linalg.svd: (U, singular values, V^T); full: U and V square."""
    u, s, vt = Svd()(a)
    return (Basis()(u), s, transpose(Basis()(transpose(vt)))) if full else (u, s, vt)


def svdvals(a: Tensor) -> Tensor:
    """torch.linalg.svdvals."""
    return Svd()(a)[1]


@op
class Eye(Op):
    """The identity of the shape and dtype of (..., N, N)."""

    def infer(self, a: Any) -> Any:
        if len(a.shape) < 2 or a.shape[-1] != a.shape[-2]:
            raise ValueError(f"[{self.label}] expects matrices (..., N, N), got shape {tuple(a.shape)}.")
        return Spec(tuple(a.shape), str(a.dtype))

    def decompose(self, a: Tensor) -> Tensor:
        return broadcast_to(eye_like(a, self.infer(a).shape[-1]), a.shape)

    samples = samples_of(({}, [(2, 3, 3)]))


def eye_of(a: Tensor) -> Tensor:
    """The identity of the shape of a."""
    return Eye()(a)


@op
class MatrixExp(OfMatrices):
    """e to the power of (..., N, N), by a series of its half, quarter, ... and squares."""

    square = True

    def infer(self, a: Any) -> Any:
        self.shape_of(a)
        return Spec(tuple(a.shape), dtype_name(a.dtype))

    def reference(self, a: np.ndarray) -> Any:
        norm = np.abs(a).sum(-1).max(-1, initial=0)
        halvings = np.where(norm > 0.5, np.ceil(np.log2(np.maximum(norm, 0.5))) + 1, 0)[..., None, None]
        scaled, power = a / 2.0**halvings, np.broadcast_to(np.eye(a.shape[-1], dtype=a.dtype), a.shape)
        for k in range(14, 0, -1):
            power = np.eye(a.shape[-1], dtype=a.dtype) + scaled @ power / k
        for k in range(int(halvings.max(initial=0))):
            power = np.where(k < halvings, power @ power, power)
        return power.astype(a.dtype)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        """Mathias, A chain rule for matrix functions, 1996: a block of the exponential of twice the size."""
        turned, n = transpose(node.inputs[0]), out_grad.shape[-1]
        top = concat([turned, out_grad], -1)
        below = concat([turned * 0.0, turned], -1)
        return MatrixExp()(concat([top, below], -2))[..., :n, n:]

    samples = samples_of(({}, [(3, 3)]), ({}, [(2, 4, 4)]), ({}, [(1, 1)]))


@tensor_method()
def matrix_exp(a: Tensor) -> Tensor:
    """torch.linalg.matrix_exp."""
    return MatrixExp()(a)

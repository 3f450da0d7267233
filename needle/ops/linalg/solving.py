"""Systems of equations: solutions, substitution, inverses and Cholesky factors of batches of matrices."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from needle.autograd import Op, Spec, Tensor, op, tensor_method
from needle.backend_ndarray import NDArray, call, cpu, dtype_name, promote
from needle.backend_ndarray.kernels import PLANNING
from needle.ops.common import broadcast_shape, constant, unbroadcast
from needle.ops.families import samples_of
from needle.ops.linalg.basic import matmul
from needle.ops.shape.basic import reshape, transpose, unsqueeze
from needle.ops.shape.runtime_shape import triangle

__all__ = [
    "cholesky",
    "cholesky_inverse",
    "cholesky_solve",
    "inv",
    "solve",
    "solve_triangular",
]

KINDS = ("float32", "float64")


def eye_like(a: Tensor, rows: int, columns: int | None = None) -> Tensor:
    """A matrix with ones on its diagonal, in the dtype of a."""
    return constant(np.eye(rows, columns), a)


class OfMatrices(Op):
    """Base: of matrices (..., M, N) of floats, by the kernel of its name, which takes the attributes."""

    compute_infers = True
    has_expression = False
    operands: ClassVar[tuple[str, ...]] = ("a",)
    square: ClassVar[bool] = False

    def shape_of(self, *inputs: Any) -> tuple[tuple[int, ...], int, int]:
        """(batch, M, N) of the first input."""
        dtypes = {dtype_name(x.dtype) for x in inputs}
        if not dtypes <= set(KINDS):
            raise ValueError(f"[{self.label}] expects float32 or float64, got {', '.join(sorted(dtypes))}.")
        shape = tuple(inputs[0].shape)
        if len(shape) < 2 or (self.square and shape[-1] != shape[-2]):
            expected = "(..., N, N)" if self.square else "(..., M, N)"
            raise ValueError(f"[{self.label}] expects matrices {expected}, got shape {shape}.")
        return shape[:-2], shape[-2], shape[-1]

    def ready(self, *arrays: NDArray) -> tuple[NDArray, ...]:
        """Operands as the kernel takes them."""
        return arrays

    def numbers(self, *arrays: Any) -> dict[str, Any]:
        """The kernel's attributes."""
        return self.attributes()

    def compute(self, *arrays: NDArray) -> Any:
        if arrays[0].device != cpu() and PLANNING.builder is None:  # devices without these kernels: on the host
            found = self.reference(*(a.read() for a in arrays))
            made = [
                NDArray(np.asarray(f, order="C"), dtype=str(f.dtype)) for f in (found if self.n_out > 1 else (found,))
            ]
            return tuple(made) if self.n_out > 1 else made[0]
        specs = self.infer(*arrays)
        outs = [NDArray.empty(*s) for s in (specs if self.n_out > 1 else (specs,))]
        call(self.label, outs, **dict(zip(self.operands, self.ready(*arrays), strict=True)), **self.numbers(*arrays))
        return tuple(outs) if self.n_out > 1 else outs[0]


class Solving(OfMatrices):
    """Base: x of A x = b, of matrices A (..., N, N) and b (..., N, M), batches broadcast."""

    operands = ("a", "b")
    square = True

    def infer(self, a: Any, b: Any) -> Any:
        batch, n, _ = self.shape_of(a, b)
        if len(b.shape) < 2 or b.shape[-2] != n:
            raise ValueError(f"[{self.label}] b expects {n} rows, got shape {tuple(b.shape)}.")
        batch = broadcast_shape(self.label, batch, tuple(b.shape[:-2]))
        return Spec((*batch, n, b.shape[-1]), promote(dtype_name(a.dtype), dtype_name(b.dtype)))

    def ready(self, *arrays: NDArray) -> tuple[NDArray, ...]:
        (shape, dtype), n = self.infer(*arrays), arrays[0].shape[-1]
        a, b = (x.as_dtype(dtype) for x in arrays)
        return a.broadcast_to((*shape[:-2], n, n)), b.broadcast_to(shape)

    def through(self, a: Tensor, grad: Tensor) -> Tensor:
        """A^-T grad."""
        raise NotImplementedError

    def of_matrix(self, grad: Tensor) -> Tensor:
        """What counts of a gradient of A."""
        return grad

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        a, b = node.inputs
        back = self.through(a, out_grad)
        grad_a = None
        if a.requires_grad:
            grad_a = unbroadcast(self.of_matrix(matmul(-back, transpose(node))), a.shape)
        return grad_a, unbroadcast(back, b.shape) if b.requires_grad else None


@op
class Solve(Solving):
    """A^-1 b by an LU factorisation. check: a singular A is an error, else its result is not finite."""

    check: bool = True

    def reference(self, a: np.ndarray, b: np.ndarray) -> Any:
        try:
            return np.linalg.solve(a, b)
        except np.linalg.LinAlgError:
            if self.check:
                raise ValueError("[solve] expects matrices that have an inverse, got a singular one.") from None
            spec = self.infer(a, b)
            return np.full(spec.shape, np.nan, spec.dtype)

    def through(self, a: Tensor, grad: Tensor) -> Tensor:
        return Solve(self.check)(transpose(a), grad)

    samples = samples_of(({}, [(3, 3), (3, 2)]), ({}, [(2, 1, 4, 4), (3, 4, 1)]))


@op
class SolveTriangular(Solving):
    """T^-1 b of the upper or lower triangle T of A; unit: its diagonal counts as ones."""

    upper: bool
    unit: bool = False

    def reference(self, a: np.ndarray, b: np.ndarray) -> Any:
        n, spec = a.shape[-1], self.infer(a, b)
        x = np.array(np.broadcast_to(b, spec.shape), spec.dtype)
        for i in reversed(range(n)) if self.upper else range(n):
            known = slice(i + 1, n) if self.upper else slice(0, i)
            x[..., i, :] -= (a[..., i : i + 1, known] @ x[..., known, :])[..., 0, :]
            x[..., i, :] /= 1 if self.unit else a[..., i, i, None]
        return x

    def through(self, a: Tensor, grad: Tensor) -> Tensor:
        return SolveTriangular(not self.upper, self.unit)(transpose(a), grad)

    def of_matrix(self, grad: Tensor) -> Tensor:
        return triangle(grad, self.upper, (1 if self.upper else -1) * self.unit)

    samples = samples_of(
        ({"upper": False, "unit": True}, [(3, 3), (3, 2)]), ({"upper": True, "unit": True}, [(2, 1, 4, 4), (3, 4, 1)])
    )


class OrVector(Op):
    """Base: of b as columns (..., N, M), or a vector as torch tells it: (N,), or of A's axes but the last one."""

    has_expression = False

    def of_columns(self, a: Tensor, b: Tensor) -> Tensor:
        raise NotImplementedError

    def infer_columns(self, a: Any, b: Any) -> Any:
        raise NotImplementedError

    def is_vector(self, a: Any, b: Any) -> bool:
        return len(b.shape) == 1 or tuple(b.shape) == tuple(a.shape[:-1])

    def infer(self, a: Any, b: Any) -> Any:
        if not self.is_vector(a, b):
            return self.infer_columns(a, b)
        spec = self.infer_columns(a, Spec((*b.shape, 1), str(b.dtype)))
        return Spec(spec.shape[:-1], spec.dtype)

    def decompose(self, a: Tensor, b: Tensor) -> Tensor:
        if not self.is_vector(a, b):
            return self.of_columns(a, b)
        x = self.of_columns(a, unsqueeze(b, -1))
        return reshape(x, x.shape[:-1])


@op
class SolveVector(OrVector):
    """Solve with b as torch.linalg.solve takes it."""

    check: bool = True

    def infer_columns(self, a: Any, b: Any) -> Any:
        return Solve(self.check).infer(a, b)

    def of_columns(self, a: Tensor, b: Tensor) -> Tensor:
        return Solve(self.check)(a, b)

    samples = samples_of(({}, [(3, 3), (3,)]), ({}, [(2, 4, 4), (2, 4)]), ({}, [(4, 4), (2, 4, 2)]))


def solve(a: Tensor, b: Tensor, check: bool = True) -> Tensor:
    """torch.linalg.solve: A^-1 b of A (..., N, N) and b (..., N, M) or vectors (..., N)."""
    return SolveVector(check)(a, b)


def solve_triangular(a: Tensor, b: Tensor, upper: bool, left: bool = True, unitriangular: bool = False) -> Tensor:
    """torch.linalg.solve_triangular: T^-1 b, or b T^-1, of the upper or lower triangle T of a."""
    if left:
        return SolveTriangular(upper, unitriangular)(a, b)
    return transpose(SolveTriangular(not upper, unitriangular)(transpose(a), transpose(b)))


@op
class Inverse(Op):
    """A^-1 of (..., N, N)."""

    check: bool = True

    has_expression = False

    def infer(self, a: Any) -> Any:
        return Solve(self.check).infer(a, Spec(tuple(a.shape[-2:]), str(a.dtype)))

    def decompose(self, a: Tensor) -> Tensor:
        return Solve(self.check)(a, eye_like(a, self.infer(a).shape[-1]))

    samples = samples_of(({}, [(3, 3)]), ({}, [(2, 1, 1)]))


@tensor_method("inverse")
def inv(a: Tensor, check: bool = True) -> Tensor:
    """torch.linalg.inv."""
    return Inverse(check)(a)


@op
class Cholesky(OfMatrices):
    """(L, info) with A = L L^T, of which the lower triangle is read.

    check: other matrices are an error; else their L is NaN, and info (int32) the first minor that is not positive.
    """

    check: bool = True
    n_out = 2
    square = True

    def infer(self, a: Any) -> Any:
        batch, n, _ = self.shape_of(a)
        return Spec((*batch, n, n), dtype_name(a.dtype)), Spec(batch, "int32")

    def reference(self, a: np.ndarray) -> Any:
        n = a.shape[-1]
        flat = a.reshape(int(np.prod(a.shape[:-2])), n, n)
        factor, info = np.zeros_like(flat), np.zeros(len(flat), "int32")
        for i, m in enumerate(flat):
            for k in range(n):
                rest = m[k, k] - factor[i, k, :k] @ factor[i, k, :k]
                if not rest > 0:
                    info[i], factor[i] = k + 1, np.nan
                    break
                factor[i, k, k] = np.sqrt(rest)
                factor[i, k + 1 :, k] = (m[k + 1 :, k] - factor[i, k + 1 :, :k] @ factor[i, k, :k]) / factor[i, k, k]
        if self.check and info.any():
            raise ValueError("[cholesky] expects positive-definite matrices, got another one.")
        return factor.reshape(a.shape), info.reshape(a.shape[:-2])

    def gradient(self, out_grad: Any, node: Tensor) -> Any:
        """Murray, Differentiation of the Cholesky decomposition, 2016."""
        factor = node[0]
        inner = triangle(matmul(transpose(factor), out_grad[0]), False)
        inner = inner + transpose(triangle(inner, False, -1))
        left = SolveTriangular(True)(transpose(factor), inner)
        return transpose(SolveTriangular(True)(transpose(factor), transpose(left))) * 0.5


def cholesky(a: Tensor, upper: bool = False, check: bool = True) -> tuple[Tensor, Tensor]:
    """(L, info) with a = L L^T, or U = L^T of the upper triangle."""
    factor, info = Cholesky(check)(transpose(a) if upper else a)
    return (transpose(factor) if upper else factor), info


def cholesky_solve(b: Tensor, factor: Tensor, upper: bool = False) -> Tensor:
    """torch.cholesky_solve: (L L^T)^-1 b."""
    low = transpose(factor) if upper else factor
    return SolveTriangular(True)(transpose(low), SolveTriangular(False)(low, b))


def cholesky_inverse(factor: Tensor, upper: bool = False) -> Tensor:
    """torch.cholesky_inverse: (L L^T)^-1."""
    low = transpose(factor) if upper else factor
    half = InverseTriangle()(low)
    return matmul(transpose(half), half)


@op
class InverseTriangle(Op):
    """L^-1 of the lower triangle of (..., N, N)."""

    has_expression = False

    def infer(self, a: Any) -> Any:
        return SolveTriangular(False).infer(a, a)

    def decompose(self, a: Tensor) -> Tensor:
        return SolveTriangular(False)(a, eye_like(a, self.infer(a).shape[-1]))

"""Determinants of batches of matrices."""

from __future__ import annotations

from typing import Any

import numpy as np

from needle.autograd import Spec, Tensor, op, tensor_method
from needle.backend_ndarray import dtype_name
from needle.ops.common import constant
from needle.ops.families import samples_of
from needle.ops.linalg.basic import matmul
from needle.ops.linalg.solving import OfMatrices, inv
from needle.ops.linalg.spectral import Svd
from needle.ops.math.elementwise import where
from needle.ops.reduce.basic import prod
from needle.ops.shape.basic import reshape, transpose, unsqueeze

__all__ = ["det", "slogdet"]


@op
class Det(OfMatrices):
    """The determinants (...) of (..., N, N)."""

    square = True

    def infer(self, a: Any) -> Any:
        return Spec(self.shape_of(a)[0], dtype_name(a.dtype))

    def reference(self, a: np.ndarray) -> Any:
        return np.linalg.det(a).astype(a.dtype)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        """The cofactors, by singular values, so that singular matrices have them, too."""
        a = node.inputs[0]
        u, s, vt = Svd()(a)
        n = a.shape[-1]
        others = where(constant(np.eye(n, dtype=bool), a, "bool"), 1.0, unsqueeze(s, -2))
        weight = prod(others, -1) * unsqueeze(out_grad * Det()(matmul(u, vt)), -1)
        return matmul(u * unsqueeze(weight, -2), vt)

    samples = samples_of(({}, [(3, 3)]), ({}, [(2, 3, 1, 1)]), ({}, [(2, 4, 4)]))


@tensor_method()
def det(a: Tensor) -> Tensor:
    """torch.linalg.det."""
    return Det()(a)


@op
class Slogdet(OfMatrices):
    """(sign, log |det|) (...) of (..., N, N); of a singular matrix 0 and -inf."""

    n_out = 2
    square = True

    def infer(self, a: Any) -> Any:
        spec = Spec(self.shape_of(a)[0], dtype_name(a.dtype))
        return spec, spec

    def reference(self, a: np.ndarray) -> Any:
        with np.errstate(divide="ignore"):
            sign, log_abs = np.linalg.slogdet(a)
        return np.asarray(sign, a.dtype), np.asarray(log_abs, a.dtype)

    def gradient(self, out_grad: Any, node: Tensor) -> Any:
        grad = reshape(out_grad[1], (*out_grad[1].shape, 1, 1))
        return transpose(inv(node.inputs[0], check=False)) * grad

    samples = samples_of(({}, [(3, 3)]), ({}, [(2, 4, 4)]))


@tensor_method()
def slogdet(a: Tensor) -> Any:
    """torch.linalg.slogdet: (sign, log of the determinant's size)."""
    return Slogdet()(a)

"""Matrix products."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from needle.autograd import Op, Spec, Tensor, Unsupported, one_of, op, tensor_method
from needle.backend_ndarray import NDArray, call, dtype_name, promote
from needle.backend_ndarray.kernels import PLAIN, attributes
from needle.ops.common import Layer, as_operand, broadcast_shape, rows_of, unbroadcast
from needle.ops.dtypes import cast_array, result_dtype
from needle.ops.families import samples_of
from needle.ops.math.activation import activation_code
from needle.ops.math.elementwise import cast
from needle.ops.reduce.basic import summation
from needle.ops.shape.basic import broadcast_to, reshape, reshaped, transpose

__all__ = ["inner", "linear", "matmul"]


@op
class MatMul(Op):
    """a @ b: (..., M, K) times (..., K, N), leading axes broadcast; a 1-d operand is a row or a column, as in numpy."""

    compute_infers = True

    def infer(self, a: Any, b: Any) -> Any:
        if not a.shape or not b.shape:
            raise ValueError(f"[matmul] operands need at least one axis, got {tuple(a.shape)} and {tuple(b.shape)}.")
        inner = b.shape[-2] if len(b.shape) > 1 else b.shape[0]
        if a.shape[-1] != inner:
            raise ValueError(
                f"[matmul] b expects {a.shape[-1]} rows, got {inner}, for {tuple(a.shape)} @ {tuple(b.shape)}."
            )
        batch = broadcast_shape("matmul", tuple(a.shape[:-2]), tuple(b.shape[:-2]))
        return Spec((*batch, *a.shape[-2:-1], *(b.shape[-1:] if len(b.shape) > 1 else ())), self._dtype(a, b))

    def _dtype(self, a: Any, b: Any) -> str:
        dtype = promote(dtype_name(a.dtype), dtype_name(b.dtype))
        if dtype == "bool":
            raise ValueError("[matmul] operands expect numbers, got bools on both sides.")
        return dtype

    def flops(self, out: Any, a: Any, b: Any) -> int:
        return 2 * prod(out.shape) * a.shape[-1]

    def compute(self, a: NDArray, b: NDArray) -> Any:
        if len(a.shape) == len(b.shape) == 2 and a.shape[1] == b.shape[0]:
            return a @ b
        shape = self.infer(a, b).shape
        a = a.reshape((1, -1)) if a.ndim == 1 else a
        b = b.reshape((-1, 1)) if b.ndim == 1 else b
        one_product = b.ndim == 2 and a.ndim > 2 and a.is_compact()  # over all rows
        out = rows_of(a) @ b if one_product else a @ b
        return out if out.shape == shape else out.reshape(shape)

    def reference(self, a: np.ndarray, b: np.ndarray) -> Any:
        dtype = self._dtype(a, b)
        return cast_array(a, dtype) @ cast_array(b, dtype)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        a, b = node.inputs
        a2 = reshaped(a, (1, *a.shape) if a.ndim == 1 else a.shape)
        b2 = reshaped(b, (*b.shape, 1) if b.ndim == 1 else b.shape)
        batch = broadcast_shape("matmul", a2.shape[:-2], b2.shape[:-2])
        g = reshaped(out_grad, (*batch, a2.shape[-2], b2.shape[-1]))
        grad_a = grad_b = None
        if a.requires_grad:
            grad_a = reshaped(unbroadcast(matmul(g, transpose(b2)), a2.shape), a.shape)
        if b.requires_grad:
            if b2.ndim == 2 and a2.ndim > 2:  # one product instead of a batch of them and a sum
                a2, g = rows_of(a2), rows_of(g)
            grad_b = reshaped(unbroadcast(matmul(transpose(a2), g), b2.shape), b.shape)
        return grad_a, grad_b

    @classmethod
    def samples(cls) -> list:
        shapes = [
            ((5, 7), (7, 3)),
            ((2, 1, 5, 7), (3, 7, 4)),
            ((2, 5, 7), (7, 3)),
            ((7,), (7, 3)),
            ((2, 5, 7), (7,)),
            ((7,), (7,)),
        ]
        return [({}, list(s)) for s in shapes]


@tensor_method("matmul", "__matmul__")
def matmul(a: Tensor, b: Any) -> Tensor:
    """a @ b: (..., M, K) times (..., K, N) is (..., M, N), the leading axes broadcast. As torch.matmul.

    A 1-d operand is a row or a column, whose axis the result lacks. Raises ValueError where K differs, or for 0-d operands.
    """
    return MatMul()(a, as_operand(b, a))


@tensor_method("__rmatmul__")
def rmatmul(a: Tensor, b: Any) -> Tensor:
    """b @ a for an array b."""
    return MatMul()(as_operand(b, a), a)


@op
class EinsumProduct(Op):
    """a @ b as torch.einsum has it: of bools whether any pair is true; of two dtypes only where nothing is summed, in b's."""

    def infer(self, a: Any, b: Any) -> Any:
        if a.dtype == b.dtype == "bool":
            return Spec(MatMul().infer(Spec(a.shape, "int64"), b).shape, "bool")
        spec = MatMul().infer(a, b)
        return spec if prod(spec.shape) * a.shape[-1] else Spec(spec.shape, str(b.dtype))

    def decompose(self, a: Tensor, b: Tensor) -> Tensor:
        dtype = self.infer(a, b).dtype
        return cast(matmul(cast(a, "int64") if dtype == "bool" else a, b), dtype)

    samples = samples_of(({}, [(5, 7), Spec((7, 3), "float64")]), ({}, [Spec((5, 7), "bool"), Spec((7, 3), "bool")]))


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b as in torch.einsum; dtypes that are not known count as one, of floats."""
    try:
        return matmul(a, b) if a.dtype == b.dtype != "bool" else EinsumProduct()(a, b)
    except Unsupported:
        return matmul(a, b)


@op
class Inner(Op):
    """Sums of products over the last axes of a (..., K) and b (..., K): their other axes one after another."""

    def infer(self, a: Any, b: Any) -> Any:
        if not a.shape or not b.shape:
            return Spec(broadcast_shape("inner", tuple(a.shape), tuple(b.shape)), result_dtype(a, b))
        if a.shape[-1] != b.shape[-1]:
            raise ValueError(f"[inner] last axes expect one size, got {tuple(a.shape)} and {tuple(b.shape)}.")
        return Spec((*a.shape[:-1], *b.shape[:-1]), MatMul()._dtype(a, b))

    def decompose(self, a: Tensor, b: Tensor) -> Tensor:
        shape = self.infer(a, b).shape
        if not a.shape or not b.shape:
            return a * b
        k = a.shape[-1]
        rows, others = (reshape(t, (prod(t.shape[:-1]), k)) for t in (a, b))
        return reshape(matmul(rows, transpose(others)), shape)

    samples = samples_of(({}, [(5,), (5,)]), ({}, [(2, 3, 4), (5, 4)]))


@tensor_method()
def inner(a: Tensor, b: Tensor) -> Tensor:
    """Products summed over the last axes of both."""
    return Inner()(a, b)


LAYOUTS: tuple[str, ...] = ("torch", "needle")


@op
class Linear(Layer):
    """x @ weight + bias over the last axis of x. layout: "torch" weight (out, in), "needle" weight (in, out)."""

    layout_of_weight: str = "torch"
    checks = one_of(layout_of_weight=LAYOUTS)
    compute_infers = False  # `finished` does not
    channel_axis = property(lambda self: int(self.layout_of_weight == "needle"))  # type: ignore[assignment]

    def infer(self, x: Any, weight: Any, bias: Any = None) -> Any:
        rows, columns = weight.shape if self.layout_of_weight == "needle" else reversed(weight.shape)
        if not x.shape or x.shape[-1] != rows:
            raise ValueError(f"[linear] weight expects {rows} input features, got shape {tuple(x.shape)}.")
        if bias is not None and prod(bias.shape) != columns:
            raise ValueError(f"[linear] bias expects {columns} values, got shape {tuple(bias.shape)}.")
        dtype = dtype_name(x.dtype)
        for other in (weight,) if bias is None else (weight, bias):
            dtype = promote(dtype, dtype_name(other.dtype))
        return Spec((*x.shape[:-1], columns), dtype)

    def sources(self, axis: int, out: Any, *inputs: Any) -> list[int | None] | None:
        return [axis, *[None] * (len(inputs) - 1)] if axis < len(out.shape) - 1 else None

    def takes_norm(self, out: Any) -> bool:
        return len(out.shape) == 2

    def flops(self, out: Any, x: Any, *rest: Any) -> int:
        return 2 * prod(out.shape) * x.shape[-1]

    def matrix(self, weight: NDArray) -> NDArray:
        """The weight as (in, out)."""
        return weight if self.layout_of_weight == "needle" else weight.permute((1, 0))

    def finished(self, activation: str, alpha: float, x: Any, weight: Any, bias: Any = None) -> NDArray:  # type: ignore[override]
        matrix = self.matrix(weight)
        rows = x if len(x.shape) == 2 else rows_of(x)
        dtype = promote(x.dtype, matrix.dtype)
        if bias is not None:
            dtype = promote(dtype, bias.dtype)
            bias = (bias if len(bias.shape) == 1 else bias.reshape((-1,))).as_dtype(dtype)
        ins = [rows.as_dtype(dtype), matrix.as_dtype(dtype), bias]
        to, shape = (rows.shape[0], matrix.shape[1]), (*x.shape[:-1], matrix.shape[1])
        code = activation_code(activation)
        attrs = attributes("matmul", activation=code, alpha=alpha) if code else PLAIN
        return NDArray.made("matmul", ins, dtype, to, shape, attrs)

    def into(
        self,
        out: NDArray,
        x: NDArray,
        weight: NDArray,
        bias: Any = None,
        *,
        activation: str = "none",
        alpha: float = 0.0,
    ) -> None:
        a, b = (v.as_dtype(out.dtype) for v in (rows_of(x), self.matrix(weight)))
        bias = None if bias is None else bias.reshape((-1,)).as_dtype(out.dtype)
        code = activation_code(activation)
        call("matmul", [rows_of(out)], a=a, b=b, bias=bias, activation=code, alpha=alpha)

    def reference(self, x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None = None) -> Any:
        out = x @ (weight if self.layout_of_weight == "needle" else weight.T)
        return out if bias is None else out + bias.reshape(-1)

    def decompose(self, x: Tensor, weight: Tensor, *bias: Tensor) -> Tensor:
        product = matmul(x, weight if self.layout_of_weight == "needle" else transpose(weight))
        if not bias:
            return product
        row = bias[0] if product.ndim > 1 else reshaped(bias[0], product.shape)
        return product + broadcast_to(row, product.shape)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        x, weight, *biases = node.inputs
        rows, g = (t if len(t.shape) == 2 else rows_of(t) for t in (x, out_grad))
        a, b, other = (rows, g, "torch") if self.layout_of_weight == "needle" else (g, rows, "needle")
        grad_x = linear(out_grad, weight, layout=other) if x.requires_grad else None
        grad_w = matmul(transpose(a), b) if weight.requires_grad else None
        return grad_x, grad_w, *(reshaped(summation(g, (0,)), t.shape) if t.requires_grad else None for t in biases)

    @classmethod
    def samples(cls) -> list:
        torch, needle = {"layout_of_weight": "torch"}, {"layout_of_weight": "needle"}
        return [(torch, [(4, 7), (5, 7), (5,)]), (needle, [(2, 3, 7), (7, 5), (1, 5)]), (torch, [(7,), (5, 7)])]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, layout: str = "torch") -> Tensor:
    """(*, out) of x (*, in) and bias (out,): x @ weight.T + bias (layout "torch", weight (out, in)) or
    x @ weight + bias ("needle", weight (in, out))."""
    return Linear(layout)(x, weight, *(() if bias is None else (bias,)))

"""Products of groups of rows with a matrix each, as mixtures of experts have them."""

from __future__ import annotations

from math import prod
from typing import Any

from needle.autograd import Op, Spec, Tensor, op
from needle.backend_ndarray import NDArray, call
from needle.ops.dtypes import result_dtype
from needle.ops.families import samples_of
from needle.ops.linalg.basic import matmul
from needle.ops.math.comparison import eq, le
from needle.ops.math.elementwise import cast, where
from needle.ops.reduce.basic import summation
from needle.ops.shape.basic import permute, unsqueeze
from needle.ops.shape.creation import arange_like

__all__ = ["grouped_matmul", "grouped_outer"]

ENDS = Spec((3,), "int32")


def check(label: str, fits: bool, a: Any, b: Any, ends: Any) -> None:
    if not fits or len(ends.shape) != 1 or ends.dtype not in ("int32", "int64"):
        shapes = f"{tuple(a.shape)}, {tuple(b.shape)} and {ends.dtype} {tuple(ends.shape)}"
        raise ValueError(
            f"[{label}] rows, matrices and integer ends of the groups expect sizes that agree, got {shapes}."
        )


def members(rows: Tensor, ends: Tensor) -> Tensor:
    """(G, S, 1) of bool: which of S rows belong to which group; as many ends as lie before a row are the number of its group."""
    place = unsqueeze(arange_like(rows, 0, rows.shape[0]), 0)
    group = summation(cast(le(unsqueeze(ends, 1), place), "int64"), 0)
    return unsqueeze(eq(unsqueeze(arange_like(ends, 0, ends.shape[0]), 1), group), 2)


def apart(rows: Tensor, ends: Tensor) -> Tensor:
    """(G, S, K): for every group its rows, and zeros where the others are."""
    return where(members(rows, ends), unsqueeze(rows, 0), 0.0)


class Grouped(Op):
    """Of rows in groups, by the kernel of the CPU that has its name."""

    def into(self, out: NDArray, a: NDArray, b: NDArray, ends: NDArray) -> None:
        call(self.label, [out], a=a, b=b, ends=ends)


@op
class GroupedMatMul(Grouped):
    """Rows (S, K) times the matrix of their group, b (G, K, N): (S, N). Group g ends before row ends[g], an int32 or int64, where
    the next one begins (ends in another order count as if sorted); rows behind the last end give zeros."""

    label = "grouped_matmul"

    def infer(self, a: Any, b: Any, ends: Any) -> Any:
        fits = len(a.shape) == 2 and len(b.shape) == 3 and a.shape[1] == b.shape[1] and ends.shape[:1] == b.shape[:1]
        check(self.label, fits, a, b, ends)
        return Spec((a.shape[0], b.shape[2]), result_dtype(a, b))

    def flops(self, out: Any, a: Any, b: Any, ends: Any) -> int:
        return 2 * prod(out.shape) * a.shape[1]

    def decompose(self, a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
        self.infer(a, b, ends)
        return summation(matmul(apart(a, ends), b), 0)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        a, b, ends = node.inputs
        return grouped_matmul(out_grad, permute(b, (0, 2, 1)), ends), grouped_outer(a, out_grad, ends), None

    samples = samples_of(({}, [(6, 4), (3, 4, 5), ENDS]))


@op
class GroupedOuter(Grouped):
    """The transposed rows of every group of a (S, M) times its rows of b (S, N): (G, M, N); zeros for a group without rows."""

    def infer(self, a: Any, b: Any, ends: Any) -> Any:
        check(self.label, len(a.shape) == len(b.shape) == 2 and a.shape[0] == b.shape[0], a, b, ends)
        return Spec((ends.shape[0], a.shape[1], b.shape[1]), result_dtype(a, b))

    def flops(self, out: Any, a: Any, b: Any, ends: Any) -> int:
        return 2 * prod(out.shape[1:]) * a.shape[0]

    def decompose(self, a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
        self.infer(a, b, ends)
        return matmul(permute(apart(a, ends), (0, 2, 1)), b)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        a, b, ends = node.inputs
        return grouped_matmul(b, permute(out_grad, (0, 2, 1)), ends), grouped_matmul(a, out_grad, ends), None

    samples = samples_of(({}, [(6, 4), (6, 5), ENDS]))


def grouped_matmul(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """Rows (S, K) times the matrix of their group, (G, K, N); group g ends before row ends[g]: torch's grouped_mm of rows."""
    return GroupedMatMul()(a, b, ends)


def grouped_outer(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """a_g^T b_g of the rows of every group: (S, M) and (S, N) give (G, M, N)."""
    return GroupedOuter()(a, b, ends)

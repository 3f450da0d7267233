"""Rows of a table by their numbers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from needle.autograd import Op, Spec, Tensor, op
from needle.backend_ndarray import NDArray, call
from needle.backend_ndarray.ndarray import PLANNING
from needle.ops.dtypes import cast_array
from needle.ops.families import samples_of
from needle.ops.math.comparison import eq, ne
from needle.ops.math.elementwise import cast
from needle.ops.shape.basic import unsqueeze
from needle.ops.shape.creation import full_like

__all__ = ["embedding", "one_hot"]


def as_numbers(indices: Any) -> Any:
    """The indices as integers; the course keeps word numbers in floats."""
    return indices if indices.dtype in ("int32", "int64") else cast_array(indices, "int64")


def check_numbers(label: str, indices: Any, count: int) -> None:
    """Raise for an index that is no whole number in [0, count). In a plan its kernel looks at them."""
    if (
        isinstance(indices, Spec)
        or math.prod(indices.shape) == 0
        or (PLANNING.builder is not None and isinstance(indices, NDArray))
    ):
        return
    values = indices.read() if isinstance(indices, NDArray) else indices
    if values.dtype.kind == "f" and not (values == np.floor(values)).all():
        broken = values[values != np.floor(values)].flat[0]
        raise IndexError(f"[{label}] index expects whole numbers, got {broken:g}.")
    low, high = values.min(), values.max()
    if low < 0 or high >= count:
        raise IndexError(f"[{label}] index expects 0 to {count - 1}, got {int(low if low < 0 else high)}.")


@op
class Embedding(Op):
    """weight[indices]: indices (*), weight (N, D) to (*, D). The row `padding_idx` (negative: from the end) gets no gradient.

    With scale_grad_by_freq, a row's gradient is divided by how often its index was given. In an executable on a GPU, an index
    outside of the table gives a row of NaN.
    """

    padding_idx: Any = None
    scale_grad_by_freq: bool = False

    def infer(self, indices: Any, weight: Any) -> Spec:
        if len(weight.shape) != 2:
            raise ValueError(f"[embedding] weight expects shape (N, D), got {tuple(weight.shape)}.")
        if self.padding_idx is not None and not -weight.shape[0] <= self.padding_idx < weight.shape[0]:
            raise ValueError(
                f"[embedding] padding_idx is out of range for {weight.shape[0]} rows, got {self.padding_idx}."
            )
        return Spec((*indices.shape, weight.shape[1]), str(weight.dtype))

    def is_weight(self, index: int) -> bool:
        return index == 1

    def check_values(self, indices: Any, weight: Any) -> None:
        check_numbers("embedding", indices, weight.shape[0])

    def into(self, out: NDArray, *inputs: NDArray) -> None:
        indices, weight = inputs
        self.check_values(indices, weight)
        indices = as_numbers(indices)
        count = math.prod(indices.shape)
        call("gather_rows", [out.reshape((count, weight.shape[1]))], table=weight, numbers=indices.reshape((count,)))

    def reference(self, indices: np.ndarray, weight: np.ndarray) -> np.ndarray:
        self.check_values(indices, weight)
        return weight[as_numbers(indices)]

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        indices, weight = node.inputs
        rows = weight.shape[0]
        skip = -1 if self.padding_idx is None else self.padding_idx % rows
        return None, embedding_grad(indices, out_grad, rows, skip, self.scale_grad_by_freq)

    samples = samples_of(
        ({}, [Spec((3, 5), "int64"), (7, 18)]),
        ({}, [Spec((9,), "int32"), (4, 3)]),
    )


def embedding(
    indices: Tensor, weight: Tensor, padding_idx: int | None = None, scale_grad_by_freq: bool = False
) -> Tensor:
    """Rows of weight (N, D) by indices (*) of an integer dtype: (*, D). IndexError for an index outside of the table.

    padding_idx: a row without a gradient; scale_grad_by_freq: a row's gradient is divided by how often `indices` has it.
    """
    return Embedding(padding_idx, scale_grad_by_freq)(indices, weight)


def embedding_grad(indices: Tensor, out_grad: Tensor, rows: int, skip: int, scale_by_freq: bool) -> Tensor:
    """See EmbeddingGrad; scale_by_freq: divided by how often an index is given."""
    if scale_by_freq:
        ones = full_like(out_grad, 1.0, (*indices.shape, 1))
        out_grad = out_grad / embedding(indices, EmbeddingGrad(rows)(indices, ones))
    return EmbeddingGrad(rows, skip)(indices, out_grad)


@op
class EmbeddingGrad(Op):
    """The gradient of a table of `rows` rows from its rows' gradients: those of one index summed; row `skip` stays zero."""

    rows: int
    skip: int = -1

    def infer(self, indices: Any, out_grad: Any) -> Spec:
        if tuple(out_grad.shape[:-1]) != tuple(indices.shape):
            raise ValueError(
                f"[embedding_grad] gradient expects shape {tuple(indices.shape)} + (D,), got {tuple(out_grad.shape)}."
            )
        return Spec((self.rows, out_grad.shape[-1]), str(out_grad.dtype))

    def compute(self, indices: NDArray, out_grad: NDArray) -> NDArray:
        out = NDArray.empty(*self.infer(indices, out_grad))
        count, size = math.prod(indices.shape), out_grad.shape[-1]
        numbers = as_numbers(indices).reshape((count,))
        check_numbers("embedding_grad", numbers, self.rows)
        call("scatter_add_rows", [out], rows=out_grad.reshape((count, size)), numbers=numbers, skip=self.skip)
        return out

    def reference(self, indices: np.ndarray, out_grad: np.ndarray) -> np.ndarray:
        out = np.zeros((self.rows, out_grad.shape[-1]), out_grad.dtype)
        numbers = as_numbers(indices)
        check_numbers("embedding_grad", numbers, self.rows)
        np.add.at(out, numbers, out_grad)
        if self.skip >= 0:
            out[self.skip] = 0
        return out

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        indices = node.inputs[0]
        rows = embedding(indices, out_grad)
        if self.skip >= 0:
            rows = rows * cast(unsqueeze(ne(indices, self.skip), -1), rows.dtype)
        return None, rows

    samples = samples_of(
        ({"rows": 7}, [Spec((3, 5), "int64"), (3, 5, 18)]),
        ({"rows": 4, "skip": 2}, [Spec((9,), "int32"), (9, 3)]),
    )


def one_hot(indices: Tensor, num_classes: int) -> Tensor:
    """(*, num_classes) of int64: 1 at each index, so nothing in the row of an index that is no class."""
    classes = np.arange(num_classes, dtype="int64")
    return cast(eq(unsqueeze(indices, -1), classes), "int64")

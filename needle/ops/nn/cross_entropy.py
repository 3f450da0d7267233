"""The loss of classifiers: softmax and negative log-likelihood in one op."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from needle.autograd import Op, Spec, Tensor, op
from needle.backend_ndarray import NDArray, call
from needle.ops.common import constant, gradient_of_decomposition
from needle.ops.dtypes import float_dtype
from needle.ops.families import samples_of
from needle.ops.nn.embedding import as_numbers, check_numbers, one_hot
from needle.ops.reduce.basic import mean, summation
from needle.ops.reduce.softmax import softmax, takes_columns
from needle.ops.shape.basic import permute, unsqueeze

__all__ = ["softmax_loss"]


def rows_of(logits: Any) -> Any:
    """Logits (N, C, *) of either array class as rows (N * ..., C)."""
    ndim, classes = len(logits.shape), logits.shape[1]
    if ndim == 2:
        return logits
    axes = (0, *range(2, ndim), 1)
    last = logits.transpose(axes) if isinstance(logits, np.ndarray) else logits.permute(axes).compact()
    return last.reshape((math.prod(last.shape[:-1]), classes))


def from_rows(rows: Any, shape: tuple[int, ...]) -> Any:
    """What `rows_of` undoes: an array (N, C, *) of rows (N * ..., C)."""
    ndim = len(shape)
    if ndim == 2:
        return rows
    last = rows.reshape((shape[0], *shape[2:], shape[1]))
    axes = (0, ndim - 1, *range(1, ndim - 1))
    return last.transpose(axes) if isinstance(rows, np.ndarray) else last.permute(axes).compact()


@op
class CrossEntropy(Op):
    """-log softmax(logits)[label] at every place: logits (N, C, *), labels (N, *) of class numbers to (N, *).

    In an executable, a number that is no class gives NaN.
    """

    def infer(self, logits: Any, labels: Any) -> Spec:
        shape, places = tuple(logits.shape), tuple(labels.shape)
        if len(shape) < 2 or places != (shape[0], *shape[2:]):
            raise ValueError(f"[cross_entropy] expects logits (N, C) and labels (N,), got {shape} and {places}.")
        return Spec(places, float_dtype(logits.dtype))

    def check_values(self, logits: Any, labels: Any) -> None:
        check_numbers("cross_entropy", labels, logits.shape[1])

    def compute(self, logits: NDArray, labels: NDArray) -> NDArray:
        self.check_values(logits, labels)
        n, classes, *places = logits.shape
        columns = math.prod(places)
        if places and takes_columns("cross_entropy_columns", logits, 1):
            out = NDArray.empty((n, columns))
            numbers = as_numbers(labels).reshape((n, columns))
            call("cross_entropy_columns", [out], logits=logits.reshape((n, classes, columns)), labels=numbers)
            return out.reshape(labels.shape)
        out = NDArray.empty((math.prod(labels.shape),), float_dtype(logits.dtype))
        rows = rows_of(logits.as_dtype(out.dtype)).compact()
        call("cross_entropy", [out], logits=rows, labels=as_numbers(labels).compact().reshape(out.shape))
        return out.reshape(labels.shape)

    def reference(self, logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
        self.check_values(logits, labels)
        rows, numbers = rows_of(logits), as_numbers(labels).ravel()
        shifted = rows - rows.max(1, keepdims=True)
        return (np.log(np.exp(shifted).sum(1)) - shifted[np.arange(len(numbers)), numbers]).reshape(labels.shape)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        return CrossEntropyGrad()(*node.inputs, out_grad), None

    samples = samples_of(
        ({}, [(7, 5), Spec((7,), "int64")]),
        ({}, [(3, 33), Spec((3,), "int32")]),
        ({}, [(2, 5, 3, 4), Spec((2, 3, 4), "int64")]),
    )


@op
class CrossEntropyGrad(Op):
    """(softmax - one hot) * gradient: of logits (N, C, *), from them, labels (N, *) and the losses' gradient (N, *)."""

    def infer(self, logits: Any, labels: Any, out_grad: Any) -> Spec:
        losses = CrossEntropy().infer(logits, labels)
        if tuple(out_grad.shape) != losses.shape:
            raise ValueError(f"[{self.label}] gradient expects shape {losses.shape}, got {tuple(out_grad.shape)}.")
        return Spec(tuple(logits.shape), str(out_grad.dtype))

    def compute(self, logits: NDArray, labels: NDArray, out_grad: NDArray) -> NDArray:
        n, classes, *places = logits.shape
        columns = math.prod(places)
        if places and out_grad.dtype == logits.dtype and takes_columns("cross_entropy_columns_grad", logits, 1):
            out = NDArray.empty((n, classes, columns))
            numbers, grads = (a.reshape((n, columns)) for a in (as_numbers(labels), out_grad))
            images = logits.reshape((n, classes, columns))
            call("cross_entropy_columns_grad", [out], logits=images, labels=numbers, dloss=grads)
            return out.reshape(logits.shape)
        count = math.prod(labels.shape)
        out = NDArray.empty((count, logits.shape[1]), out_grad.dtype)
        numbers, grads = (a.compact().reshape((count,)) for a in (as_numbers(labels), out_grad))
        rows = rows_of(logits.as_dtype(out.dtype)).compact()
        call("cross_entropy_grad", [out], logits=rows, labels=numbers, dloss=grads)
        return from_rows(out, logits.shape)

    def reference(self, logits: np.ndarray, labels: np.ndarray, out_grad: np.ndarray) -> np.ndarray:
        rows, numbers = rows_of(logits), as_numbers(labels).ravel()
        out = np.exp(rows - rows.max(1, keepdims=True))
        out /= out.sum(1, keepdims=True)
        out[np.arange(len(numbers)), numbers] -= 1
        return from_rows(out * out_grad.reshape(-1, 1), logits.shape)

    def decompose(self, logits: Tensor, labels: Tensor, out_grad: Tensor) -> Tensor:
        last = len(logits.shape) - 1
        truth = permute(one_hot(labels, logits.shape[1]), (0, last, *range(1, last)))
        return (softmax(logits, 1) - truth) * unsqueeze(out_grad, 1)

    gradient = gradient_of_decomposition

    samples = samples_of(
        ({}, [(7, 5), Spec((7,), "int64"), (7,)]),
        ({}, [(2, 5, 3), Spec((2, 3), "int64"), (2, 3)]),
    )


def as_labels(labels: Any, logits: Tensor) -> Tensor:
    """Class numbers, or probabilities, of a list or of another library as a Tensor on the device of the logits."""
    if isinstance(labels, Tensor):
        return labels
    for plain in ("detach", "cpu"):  # of torch's tensors
        labels = getattr(labels, plain)() if hasattr(labels, plain) else labels
    numbers = np.asarray(labels)
    if numbers.dtype.kind not in "biuf":
        raise TypeError(f"[cross_entropy] labels expect class numbers, got {numbers.dtype}.")
    if numbers.dtype.kind != "f":
        return constant(numbers.astype("int64"), logits, "int64")
    return constant(numbers, logits, str(numbers.dtype) if hasattr(labels, "dtype") else logits.dtype)


def softmax_loss(logits: Tensor, labels: Any, reduction: str = "mean") -> Tensor:
    """The course's cross entropy: -log softmax(logits)[label] of logits (N, C, *) and class numbers (N, *), none of which is
    ignored.

    reduction: mean, sum or none. IndexError for a number that is no class.
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"[cross_entropy] reduction expects mean, sum or none, got {reduction}.")
    losses = CrossEntropy()(logits, as_labels(labels, logits))
    return losses if reduction == "none" else summation(losses) if reduction == "sum" else mean(losses)

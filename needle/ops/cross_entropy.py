"""The loss of classifiers: softmax and negative log-likelihood in one op."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from needle.autograd import Op, Spec, Tensor, op
from needle.backend_ndarray import NDArray, call

from . import expressions
from .common import float_dtype, gradient_of_decomposition
from .elementwise import multiply, subtract
from .embedding import as_numbers, check_numbers, one_hot
from .reduce import mean, summation
from .shape import permute, reshape, unsqueeze
from .softmax import softmax


@op
class CrossEntropy(Op):
    """-log softmax(logits)[label] per row: logits (N, C), labels (N,) of class numbers to (N,).

    In an executable, a number that is no class gives NaN.
    """

    def infer(self, logits: Any, labels: Any) -> Spec:
        if len(logits.shape) != 2 or tuple(labels.shape) != tuple(logits.shape[:1]):
            raise ValueError(
                f"[cross_entropy] expects logits (N, C) and labels (N,), got {tuple(logits.shape)} and {tuple(labels.shape)}."
            )
        return Spec(tuple(labels.shape), float_dtype(logits.dtype))

    def compute(self, logits: NDArray, labels: NDArray) -> NDArray:
        check_numbers("cross_entropy", labels, logits.shape[1])
        labels = as_numbers(labels)
        out = NDArray.empty(labels.shape, float_dtype(logits.dtype))
        call("cross_entropy", [out], [logits.as_dtype(out.dtype).compact(), labels])
        return out

    def reference(self, logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
        check_numbers("cross_entropy", labels, logits.shape[1])
        labels = as_numbers(labels)
        shifted = logits - logits.max(1, keepdims=True)
        return np.log(np.exp(shifted).sum(1)) - shifted[np.arange(len(labels)), labels]

    def te(self, t: Any, out: Any, logits: Any, labels: Any) -> Any:
        return expressions.cross_entropy(t, out, logits, labels)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        return CrossEntropyGrad()(*node.inputs, out_grad), None

    @classmethod
    def samples(cls) -> list:
        return [({}, [(7, 5), Spec((7,), "int64")]), ({}, [(3, 33), Spec((3,), "int32")])]


@op
class CrossEntropyGrad(Op):
    """Gradient of the logits from logits (N, C), labels (N,) and the losses' gradient (N,): (softmax - one hot) * gradient."""

    def infer(self, logits: Any, labels: Any, out_grad: Any) -> Spec:
        losses = CrossEntropy().infer(logits, labels)
        if tuple(out_grad.shape) != losses.shape:
            raise ValueError(f"[{self.label}] gradient expects shape {losses.shape}, got {tuple(out_grad.shape)}.")
        return Spec(tuple(logits.shape), str(out_grad.dtype))

    def compute(self, logits: NDArray, labels: NDArray, out_grad: NDArray) -> NDArray:
        out = NDArray.empty(logits.shape, out_grad.dtype)
        call("cross_entropy_grad", [out], [logits.as_dtype(out.dtype).compact(), as_numbers(labels), out_grad])
        return out

    def reference(self, logits: np.ndarray, labels: np.ndarray, out_grad: np.ndarray) -> np.ndarray:
        out = np.exp(logits - logits.max(1, keepdims=True))
        out /= out.sum(1, keepdims=True)
        out[np.arange(len(labels)), as_numbers(labels)] -= 1
        return out * out_grad[:, None]

    def decompose(self, logits: Tensor, labels: Tensor, out_grad: Tensor) -> Tensor:
        return multiply(subtract(softmax(logits, 1), one_hot(labels, logits.shape[1])), unsqueeze(out_grad, 1))

    gradient = gradient_of_decomposition

    @classmethod
    def samples(cls) -> list:
        return [({}, [(7, 5), Spec((7,), "int64"), (7,)])]


def as_labels(labels: Any, logits: Tensor) -> Tensor:
    """Class numbers of a list or of another library as a Tensor on the device of the logits."""
    if isinstance(labels, Tensor):
        return labels
    for plain in ("detach", "cpu"):  # of torch's tensors
        labels = getattr(labels, plain)() if hasattr(labels, plain) else labels
    numbers = np.asarray(labels)
    if numbers.dtype.kind not in "biuf":
        raise TypeError(f"[cross_entropy] labels expect class numbers, got {numbers.dtype}.")
    dtype = "float64" if numbers.dtype.kind == "f" else "int64"
    return Tensor(numbers.astype(dtype), device=logits.device, dtype=dtype, requires_grad=False)


def cross_entropy(logits: Tensor, labels: Any, reduction: str = "mean") -> Tensor:
    """-log softmax(logits)[label]. logits (N, C, *); labels (N, *): class numbers of any dtype, in a Tensor, list or array.

    reduction: mean, sum or none. IndexError for a number that is no class.
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"[cross_entropy] reduction expects mean, sum or none, got {reduction}.")
    labels = as_labels(labels, logits)
    shape, places = tuple(logits.shape), tuple(labels.shape)
    if len(shape) > 2 and places == (shape[0], *shape[2:]):
        rows = reshape(permute(logits, (0, *range(2, len(shape)), 1)), (math.prod(places), shape[1]))
        losses = reshape(CrossEntropy()(rows, reshape(labels, (math.prod(places),))), places)
    else:
        losses = CrossEntropy()(logits, labels)
    return losses if reduction == "none" else summation(losses) if reduction == "sum" else mean(losses)


softmax_loss = cross_entropy

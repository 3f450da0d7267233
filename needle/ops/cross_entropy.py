"""The loss of classifiers: softmax and negative log-likelihood in one op."""

from __future__ import annotations

from typing import Any

import numpy as np

from needle.autograd import Op, Spec, Tensor, op
from needle.backend_ndarray import NDArray, call

from . import expressions
from .common import float_dtype, gradient_of_decomposition
from .elementwise import multiply, subtract
from .embedding import as_numbers, check_numbers, one_hot
from .reduce import mean, summation
from .shape import unsqueeze
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
        labels = as_numbers(labels)
        check_numbers("cross_entropy", labels, logits.shape[1])
        out = NDArray.empty(labels.shape, float_dtype(logits.dtype))
        call("cross_entropy", [out], [logits.as_dtype(out.dtype).compact(), labels])
        return out

    def reference(self, logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
        labels = as_numbers(labels)
        check_numbers("cross_entropy", labels, logits.shape[1])
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


def cross_entropy(logits: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
    """-log softmax(logits)[label]. logits (N, C); labels (N,): class numbers of any dtype. reduction: mean, sum or none."""
    losses = CrossEntropy()(logits, labels)
    return losses if reduction == "none" else summation(losses) if reduction == "sum" else mean(losses)


softmax_loss = cross_entropy

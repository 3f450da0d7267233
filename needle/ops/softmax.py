"""Softmax, its logarithm, and losses built on it."""

from __future__ import annotations

from typing import Any

import numpy as np

from needle.autograd import Op, Spec, Tensor, op, tensor_method
from needle.backend_ndarray import NDArray, call

from .common import as_axes, check_axes, check_axis


def last_axis(axis: int, ndim: int) -> tuple[tuple[int, ...], bool]:
    """The permutation that swaps `axis` with the last one, and whether it moves anything."""
    axes = list(range(ndim))
    axes[axis], axes[-1] = axes[-1], axes[axis]
    return tuple(axes), axis != ndim - 1


class RowOp(Op):
    """Ops on vectors along one axis; `kernel_name` works on rows."""

    axis: int
    kernel_name = ""

    def infer(self, x: Any, *_: Any) -> Spec:
        check_axis(self.kernel_name, self.axis, x.shape)
        return Spec(tuple(x.shape), x.dtype)

    def compute(self, *arrays: NDArray) -> NDArray:
        shape, ndim = arrays[0].shape, arrays[0].ndim
        axes, moved = last_axis(self.axis % ndim, ndim)
        arrays = tuple((a.permute(axes) if moved else a).compact() for a in arrays)
        rows = [a.reshape((-1, shape[self.axis])) if a.size else a for a in arrays]
        out = NDArray.empty(arrays[0].shape, arrays[0].dtype)
        if out.size:
            call(self.kernel_name, [out.reshape(rows[0].shape)], rows)
        return out.permute(axes).compact() if moved else out


@op
class Softmax(RowOp):
    """exp(x - max) / sum."""

    axis: int = -1
    kernel_name = "softmax"

    def reference(self, x: np.ndarray) -> np.ndarray:
        e = np.exp(x - x.max(self.axis, keepdims=True))
        return e / e.sum(self.axis, keepdims=True)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        inner = (out_grad * node).sum(self.axis, keepdims=True)
        return node * (out_grad - inner)

    @classmethod
    def samples(cls) -> list:
        return [({}, [(4, 33)]), ({"axis": 1}, [(2, 5, 3)])]


@tensor_method()
def softmax(x: Tensor, axis: int = -1) -> Tensor:
    return Softmax(axis)(x)


@op
class LogSoftmax(RowOp):
    """x - max - log(sum(exp(x - max)))."""

    axis: int = -1
    kernel_name = "log_softmax"

    def reference(self, x: np.ndarray) -> np.ndarray:
        s = x - x.max(self.axis, keepdims=True)
        return s - np.log(np.exp(s).sum(self.axis, keepdims=True))

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        from .maths import exp

        return out_grad - exp(node) * out_grad.sum(self.axis, keepdims=True)

    @classmethod
    def samples(cls) -> list:
        return [({}, [(4, 33)]), ({"axis": 0}, [(5, 3)])]


@tensor_method()
def log_softmax(x: Tensor, axis: int = -1) -> Tensor:
    return LogSoftmax(axis)(x)


logsoftmax = log_softmax


@op
class LogSumExp(Op):
    """log of the sum of exponentials over `axes`, which disappear."""

    axes: Any = None

    @property
    def label(self) -> str:
        return "logsumexp"

    def infer(self, x: Any) -> Spec:
        axes = check_axes("logsumexp", self.axes, x.shape)
        return Spec(tuple(s for d, s in enumerate(x.shape) if d not in axes), x.dtype)

    def compute(self, x: NDArray) -> NDArray:
        axes = check_axes("logsumexp", self.axes, x.shape)
        top = x.reduce("max", axes, True)
        total = x.ewise("sub", top).exp().reduce("sum", axes, True).log().ewise("add", top)
        return total.reshape(self.infer(x).shape)

    def reference(self, x: np.ndarray) -> np.ndarray:
        axes = check_axes("logsumexp", self.axes, x.shape)
        top = x.max(axes, keepdims=True)
        return np.log(np.exp(x - top).sum(axes)) + top.reshape(self.infer(x).shape)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        from .maths import exp
        from .shape import broadcast_to, reshape

        (x,) = node.inputs
        axes = check_axes("logsumexp", self.axes, x.shape)
        kept = tuple(1 if d in axes else s for d, s in enumerate(x.shape))
        spread = lambda t: broadcast_to(reshape(t, kept), x.shape)  # noqa: E731
        return spread(out_grad) * exp(x - spread(node))

    @classmethod
    def samples(cls) -> list:
        return [({}, [(3, 5)]), ({"axes": (1,)}, [(4, 33)]), ({"axes": (0, 2)}, [(2, 5, 3)])]


def logsumexp(x: Tensor, axes: Any = None) -> Tensor:
    return LogSumExp(as_axes(axes))(x)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean of -log_softmax(logits)[label]; logits (batch, classes), labels (batch,) of any number dtype."""
    from needle.init import one_hot

    if len(logits.shape) != 2 or tuple(labels.shape) != tuple(logits.shape[:1]):
        raise ValueError(f"[cross_entropy] expects (batch, classes) and (batch,), got {tuple(logits.shape)} and {tuple(labels.shape)}.")
    chosen = one_hot(logits.shape[1], labels, device=logits.device, dtype=logits.dtype)
    return (log_softmax(logits, 1) * chosen).sum() * (-1.0 / logits.shape[0])


softmax_loss = cross_entropy

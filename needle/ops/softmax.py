"""Softmax, its logarithm, logsumexp."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from needle.autograd import Op, Spec, Tensor, op, tensor_method
from needle.backend_ndarray import NDArray, call

from .common import as_axes, cast_array, check_axes, check_axis, float_dtype, with_axis
from .elementwise import multiply, negate, subtract
from .maths import exp
from .reduce import summation
from .shape import broadcast_to, reshape


def on_rows(kernel: str, axis: int, **arrays: NDArray) -> NDArray:
    """A kernel over rows, run over any axis."""
    shape = next(iter(arrays.values())).shape
    given = {n: with_axis(a.as_dtype(float_dtype(a.dtype))) for n, a in arrays.items()}
    rank = max(1, len(shape))
    order = [i for i in range(rank) if i != axis % rank] + [axis % rank]
    rows, moved = {}, ()
    for n, a in given.items():
        m = a.permute(order)
        moved, rows[n] = m.shape, m.reshape((math.prod(m.shape[:-1]), m.shape[-1]))
    out = NDArray.empty(rows[n].shape, rows[n].dtype)
    call(kernel, [out], **rows)
    return out.reshape(moved).permute([int(i) for i in np.argsort(order)]).compact().reshape(shape)


class RowOp(Op):
    """A function of whole rows along attribute `axis`."""

    def infer(self, x: Any, *others: Any) -> Any:
        check_axis(self.label, self.attributes()["axis"], x.shape)
        if any(tuple(o.shape) != tuple(x.shape) for o in others):
            shapes = ", ".join(str(tuple(t.shape)) for t in (x, *others))
            raise ValueError(f"[{self.label}] expects one shape, got {shapes}.")
        return Spec(tuple(x.shape), float_dtype(x.dtype))

    @classmethod
    def samples(cls) -> list:
        return [({"axis": -1}, [(4, 33)]), ({"axis": 1}, [(2, 3, 5)])]


@op
class Softmax(RowOp):
    """e ** x over its sum along the axis."""

    axis: int = -1

    def compute(self, x: NDArray) -> Any:
        return on_rows("softmax", self.axis, x=x)

    def reference(self, x: np.ndarray) -> Any:
        shape, x = x.shape, with_axis(cast_array(x, float_dtype(x.dtype)))
        e = np.exp(x - x.max(self.axis, keepdims=True, initial=-np.inf))
        y = e / e.sum(self.axis, keepdims=True)
        return y if shape else y.reshape(())

    def relax(self, t: Any, out: Any, x: Any) -> Any:
        return t.relax.op.nn.softmax(x, self.axis)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        return SoftmaxGrad(self.axis)(node, out_grad)


@tensor_method()
def softmax(a: Tensor, axis: int = -1) -> Tensor:
    return Softmax(axis)(a)


@op
class SoftmaxGrad(RowOp):
    """From y = softmax(x) and its gradient: the gradient of x."""

    axis: int = -1

    def compute(self, y: NDArray, dy: NDArray) -> Any:
        return on_rows("softmax_grad", self.axis, y=y, dy=dy)

    def reference(self, y: np.ndarray, dy: np.ndarray) -> Any:
        return y * (dy - (y * dy).sum(self.axis, keepdims=True))

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        y, dy = node.inputs
        dot = summation(multiply(y, dy), self.axis, keepdims=True)
        dot_out = summation(multiply(out_grad, y), self.axis, keepdims=True)
        grad_y = subtract(multiply(out_grad, subtract(dy, dot)), multiply(dy, dot_out))
        return grad_y, SoftmaxGrad(self.axis)(y, out_grad)

    @classmethod
    def samples(cls) -> list:
        return [({"axis": -1}, [(4, 33), (4, 33)])]


@op
class LogSoftmax(RowOp):
    """The logarithm of softmax."""

    axis: int = -1

    def compute(self, x: NDArray) -> Any:
        return on_rows("log_softmax", self.axis, x=x)

    def reference(self, x: np.ndarray) -> Any:
        shape, x = x.shape, with_axis(cast_array(x, float_dtype(x.dtype)))
        x = x - x.max(self.axis, keepdims=True, initial=-np.inf)
        y = x - np.log(np.exp(x).sum(self.axis, keepdims=True))
        return y if shape else y.reshape(())

    def relax(self, t: Any, out: Any, x: Any) -> Any:
        return t.relax.op.nn.log_softmax(x, self.axis)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        return LogSoftmaxGrad(self.axis)(node, out_grad)


@tensor_method("log_softmax", "logsoftmax")
def log_softmax(a: Tensor, axis: int = -1) -> Tensor:
    return LogSoftmax(axis)(a)


logsoftmax = log_softmax


@op
class LogSoftmaxGrad(RowOp):
    """From y = log_softmax(x) and its gradient: the gradient of x."""

    axis: int = -1

    def compute(self, y: NDArray, dy: NDArray) -> Any:
        return on_rows("log_softmax_grad", self.axis, y=y, dy=dy)

    def reference(self, y: np.ndarray, dy: np.ndarray) -> Any:
        return dy - np.exp(y) * dy.sum(self.axis, keepdims=True)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        y, dy = node.inputs
        weighted = multiply(exp(y), out_grad)
        total = summation(dy, self.axis, keepdims=True)
        return negate(multiply(weighted, total)), subtract(out_grad, summation(weighted, self.axis, keepdims=True))

    @classmethod
    def samples(cls) -> list:
        return [({"axis": -1}, [(4, 33), (4, 33)])]


@op
class LogSumExp(Op):
    """log of the sum of e ** x over axes (None: all), which vanish or have size 1."""

    axes: Any = None
    keepdims: bool = False

    def infer(self, x: Any) -> Any:
        axes, keep = check_axes("logsumexp", self.axes, x.shape), self.keepdims
        shape = tuple(1 if i in axes else s for i, s in enumerate(x.shape) if keep or i not in axes)
        return Spec(shape, float_dtype(x.dtype))

    def compute(self, x: NDArray) -> Any:
        axes = check_axes("logsumexp", self.axes, x.shape)
        kept = [i for i in range(x.ndim) if i not in axes]
        shape = self.infer(x).shape
        x = x.as_dtype(float_dtype(x.dtype))
        count = math.prod(x.shape[i] for i in axes if x.shape)
        rows = x.permute([*kept, *axes] if x.shape else []).reshape((math.prod(shape), count))
        out = NDArray.empty((rows.shape[0], 1), x.dtype)
        out.fill(-math.inf) if count == 0 else call("logsumexp", [out], x=rows)
        return out.reshape(shape)

    def reference(self, x: np.ndarray) -> Any:
        axes, x = as_axes(self.axes), cast_array(x, float_dtype(x.dtype))
        shape, x = self.infer(x).shape, with_axis(x)
        top = x.max(axes, keepdims=True, initial=-np.inf)
        top = np.where(top - top == 0, top, 0)  # infinite: the sum itself is 0 or infinite
        return (np.log(np.exp(x - top).sum(axes, keepdims=True)) + top).reshape(shape)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        x = node.inputs[0]
        axes = check_axes("logsumexp", self.axes, x.shape)
        kept = tuple(1 if i in axes else s for i, s in enumerate(x.shape))
        spread: Callable[[Tensor], Tensor] = lambda t: broadcast_to(reshape(t, kept), x.shape)  # noqa: E731
        return multiply(spread(out_grad), exp(subtract(x, spread(node))))

    @classmethod
    def samples(cls) -> list:
        return [({"axes": a}, [(3, 4, 5)]) for a in (None, 1, (0, -1))] + [({"axes": 1, "keepdims": True}, [(3, 4, 5)])]


@tensor_method()
def logsumexp(a: Tensor, axes: Any = None, keepdims: bool = False) -> Tensor:
    return LogSumExp(as_axes(axes), keepdims)(a)

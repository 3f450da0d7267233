"""Softmax, its logarithm, logsumexp."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from needle.autograd import Op, Spec, Tensor, op, tensor_method
from needle.backend_ndarray import NDArray, call
from needle.ops.common import as_axes, check_axes, check_axis, reduced_shape, with_axis
from needle.ops.dtypes import cast_array, float_dtype
from needle.ops.families import family, samples_of
from needle.ops.math.maths import exp
from needle.ops.reduce.basic import summation
from needle.ops.shape.basic import broadcast_to, reshape

__all__ = ["log_softmax", "logsoftmax", "logsumexp", "softmax"]


COLUMNS = {  # kernels for columns, and whether of the logarithm
    "softmax": ("softmax_columns", False),
    "log_softmax": ("softmax_columns", True),
    "softmax_grad": ("softmax_columns_grad", False),
    "log_softmax_grad": ("softmax_columns_grad", True),
}
FEW = 4  # columns that are not worth it


def takes_columns(kernel: str, x: NDArray, axis: int) -> bool:
    """Whether a kernel over columns reduces `axis` of x: not where its elements are neighbours, which rows then are."""
    wide = math.prod(x.shape[axis + 1 :]) >= FEW and x.strides[axis] != 1
    return wide and x.dtype == "float32" and kernel in x.device.kernels


def on_rows(kernel: str, axis: int, **arrays: NDArray) -> NDArray:
    """A kernel over rows, run over any axis."""
    shape = next(iter(arrays.values())).shape
    given = {n: with_axis(a.as_dtype(float_dtype(a.dtype))) for n, a in arrays.items()}
    rank = max(1, len(shape))
    axis %= rank
    x = next(iter(given.values()))
    whole = (math.prod(shape[:axis]), shape[axis] if shape else 1, math.prod(shape[axis + 1 :]))
    columns, logarithm = COLUMNS[kernel]
    if takes_columns(columns, x, axis):
        out = NDArray.empty(whole)
        call(columns, [out], **{n: a.reshape(whole) for n, a in given.items()}, logarithm=logarithm)
        return out.reshape(shape)
    order = [i for i in range(rank) if i != axis] + [axis]
    rows, moved = {}, ()
    for n, a in given.items():
        m = a.permute(order)
        moved, rows[n] = m.shape, m.reshape((math.prod(m.shape[:-1]), m.shape[-1]))
    out = NDArray.empty(rows[n].shape, rows[n].dtype)
    call(kernel, [out], **rows)
    return out.reshape(moved).permute(sorted(range(rank), key=order.__getitem__)).compact().reshape(shape)


@family
class RowOp(Op):
    """A function of whole rows along attribute `axis`."""

    axis: int = -1
    arguments: ClassVar[tuple[str, ...]] = ("x",)  # of the kernel, which has the op's name

    def infer(self, x: Any, *others: Any) -> Any:
        check_axis(self.label, self.axis, x.shape)
        if any(tuple(o.shape) != tuple(x.shape) for o in others):
            shapes = ", ".join(str(tuple(t.shape)) for t in (x, *others))
            raise ValueError(f"[{self.label}] expects one shape, got {shapes}.")
        return Spec(tuple(x.shape), float_dtype(x.dtype))

    def below_top(self, x: np.ndarray) -> np.ndarray:
        """x, with an axis, less the largest of each row."""
        x = with_axis(cast_array(x, float_dtype(x.dtype)))
        return x - x.max(self.axis, keepdims=True, initial=-np.inf)

    def compute(self, *arrays: NDArray) -> Any:
        return on_rows(self.label, self.axis, **dict(zip(self.arguments, arrays, strict=True)))

    samples = samples_of(({"axis": -1}, [(4, 33)]), ({"axis": 1}, [(2, 3, 5)]))


class RowGrad(RowOp):
    """From the result of a RowOp and its gradient."""

    arguments = ("y", "dy")
    samples = samples_of(({"axis": -1}, [(4, 33), (4, 33)]))


@op
class Softmax(RowOp):
    """e ** x over its sum along the axis."""

    def reference(self, x: np.ndarray) -> Any:
        e = np.exp(self.below_top(x))
        y = e / e.sum(self.axis, keepdims=True)
        return y if x.shape else y.reshape(())

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        return SoftmaxGrad(self.axis)(node, out_grad)


@tensor_method()
def softmax(a: Tensor, axis: int = -1) -> Tensor:
    """e ** x over its sum along `axis`, without overflow; the shape stays. As torch.softmax."""
    return Softmax(axis)(a)


@op
class SoftmaxGrad(RowGrad):
    """From y = softmax(x) and its gradient: the gradient of x."""

    def reference(self, y: np.ndarray, dy: np.ndarray) -> Any:
        return y * (dy - (y * dy).sum(self.axis, keepdims=True))

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        y, dy = node.inputs
        dot = summation(y * dy, self.axis, keepdims=True)
        dot_out = summation(out_grad * y, self.axis, keepdims=True)
        grad_y = out_grad * (dy - dot) - dy * dot_out
        return grad_y, SoftmaxGrad(self.axis)(y, out_grad)


@op
class LogSoftmax(RowOp):
    """The logarithm of softmax."""

    def reference(self, x: np.ndarray) -> Any:
        low = self.below_top(x)
        y = low - np.log(np.exp(low).sum(self.axis, keepdims=True))
        return y if x.shape else y.reshape(())

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        return LogSoftmaxGrad(self.axis)(node, out_grad)


@tensor_method("log_softmax", "logsoftmax")
def log_softmax(a: Tensor, axis: int = -1) -> Tensor:
    """The logarithm of `softmax` along `axis`, without overflow; the shape stays. As torch.log_softmax. Also `logsoftmax`."""
    return LogSoftmax(axis)(a)


logsoftmax = log_softmax


@op
class LogSoftmaxGrad(RowGrad):
    """From y = log_softmax(x) and its gradient: the gradient of x."""

    def reference(self, y: np.ndarray, dy: np.ndarray) -> Any:
        return dy - np.exp(y) * dy.sum(self.axis, keepdims=True)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        y, dy = node.inputs
        weighted = exp(y) * out_grad
        total = summation(dy, self.axis, keepdims=True)
        return -(weighted * total), out_grad - summation(weighted, self.axis, keepdims=True)


@op
class LogSumExp(Op):
    """log of the sum of e ** x over axes (None: all), which vanish or have size 1."""

    axes: Any = None
    keepdims: bool = False

    def infer(self, x: Any) -> Any:
        axes = check_axes("logsumexp", self.axes, x.shape)
        return Spec(reduced_shape(x.shape, axes, self.keepdims), float_dtype(x.dtype))

    def compute(self, x: NDArray) -> Any:
        axes = check_axes("logsumexp", self.axes, x.shape)
        kept = [i for i in range(x.ndim) if i not in axes]
        shape = self.infer(x).shape
        x = x.as_dtype(float_dtype(x.dtype))
        count = math.prod(x.shape[i] for i in axes if x.shape)
        first, after = (axes[0], axes[-1] + 1) if axes else (0, 0)
        columns = math.prod(x.shape[after:])
        if count and axes == tuple(range(first, after)) and takes_columns("logsumexp_columns", x, after - 1):
            before = math.prod(x.shape[:first])
            out = NDArray.empty((before, 1, columns))
            call("logsumexp_columns", [out], x=x.reshape((before, count, columns)))
            return out.reshape(shape)
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
        kept = reduced_shape(x.shape, check_axes("logsumexp", self.axes, x.shape), True)
        spread: Callable[[Tensor], Tensor] = lambda t: broadcast_to(reshape(t, kept), x.shape)  # noqa: E731
        return spread(out_grad) * exp(x - spread(node))

    samples = samples_of(
        *[({"axes": a}, [(3, 4, 5)]) for a in (None, 1, (0, -1))], ({"axes": 1, "keepdims": True}, [(3, 4, 5)])
    )


@tensor_method()
def logsumexp(a: Tensor, axes: Any = None, keepdims: bool = False) -> Tensor:
    """log(sum(e ** x)) over `axes` (None: all), without overflow; they vanish or, with `keepdims`, have size 1. As
    torch.logsumexp.
    """
    return LogSumExp(as_axes(axes), keepdims)(a)

"""Batch normalisation."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from needle.autograd import Op, Spec, Tensor, TensorTuple, op, vjp
from needle.backend_ndarray import NDArray, call, cpu
from needle.ops.families import samples_of
from needle.ops.math.activation import activation_code
from needle.ops.math.elementwise import WeightedSum
from needle.ops.math.maths import rsqrt
from needle.ops.reduce.basic import mean, summation
from needle.ops.shape.basic import reshape

__all__ = ["batch_norm"]


def channel_shape(x: Any) -> tuple[int, ...]:
    """Shape under which a value per channel broadcasts over x (N, C, *)."""
    return (1, -1, *(1,) * (len(x.shape) - 2))


def as_rows(x: NDArray) -> NDArray:
    """x (N, C, *) as (N, C, S); on GPUs, whose kernels take any strides, a view of images in either order of memory."""
    if x.ndim == 4 and x.device != cpu():
        (height, width), (down, right) = x.shape[2:], x.strides[2:]
        if 1 in (height, width) or down == width * right:
            return x.strided((*x.shape[:2], height * width), (*x.strides[:2], down if width == 1 else right))
    n, channels, *sizes = x.shape
    size = math.prod(sizes)
    return x.compact().strided((n, channels, size), (channels * size, size, 1))


def dense(*vectors: NDArray) -> list[NDArray]:
    """Values per channel as the kernels read them: without gaps."""
    return [v.compact() for v in vectors]


def check_channels(label: str, x: Any, *values: Any) -> None:
    if len(x.shape) < 2:
        raise ValueError(f"[{label}] expects shape (N, C, ...), got {tuple(x.shape)}.")
    for v in values:
        if tuple(v.shape) != (x.shape[1],):
            raise ValueError(f"[{label}] input has {x.shape[1]} channels, but a parameter has shape {tuple(v.shape)}.")


def other_axes(x: Any) -> tuple[int, ...]:
    return (0, *range(2, len(x.shape)))


class Positive(tuple):
    """In samples: the shape of an input that has to be positive."""


@op
class BatchNorm(Op):
    """(x - mean) / sqrt(var + eps) * weight + bias per channel, with given statistics. x (N, C, *)."""

    eps: float = 1e-5
    compute_infers = True

    def infer(self, x: Any, mean: Any, var: Any, weight: Any, bias: Any) -> Any:
        check_channels("batch_norm", x, mean, var, weight, bias)
        return Spec(tuple(x.shape), str(x.dtype))

    def is_weight(self, index: int) -> bool:
        return index > 0

    def into(self, out: NDArray, x: NDArray, *values: NDArray, activation: str = "none", alpha: float = 0.0) -> None:
        """`values`: mean, variance, weight, bias; `out` may be x."""
        named = dict(zip(("mean", "var", "weight", "bias"), dense(*values), strict=True))
        code = activation_code(activation)
        call("batch_norm", [as_rows(out)], x=as_rows(x), **named, eps=self.eps, activation=code, alpha=alpha)

    def reference(self, x: np.ndarray, mean: np.ndarray, var: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> Any:
        shape = channel_shape(x)
        scale = weight / np.sqrt(var + self.eps)
        return (x - mean.reshape(shape)) * scale.reshape(shape) + bias.reshape(shape)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        x, mean_, var, weight, _ = node.inputs
        shape, axes = channel_shape(x), other_axes(x)
        inverse = rsqrt(var + self.eps)
        centred = x - reshape(mean_, shape)
        grad_b = summation(out_grad, axes)
        grad_w = summation(out_grad * centred, axes) * inverse
        scale = weight * inverse
        grad_mean = -(grad_b * scale) if mean_.requires_grad else None
        grad_var = None
        if var.requires_grad:
            grad_var = grad_w * weight * (inverse * inverse) * -0.5
        return out_grad * reshape(scale, shape), grad_mean, grad_var, grad_w, grad_b

    samples = samples_of(
        ({"eps": 1e-3}, [(2, 5, 4, 3), (5,), Positive((5,)), (5,), (5,)]),
        ({}, [(4, 3), (3,), Positive((3,)), (3,), (3,)]),
        ({}, [(2, 3, 2, 3, 4), (3,), Positive((3,)), (3,), (3,)]),
    )


@op
class BatchNormTrain(Op):
    """(y, mean, biased variance, 1 / sqrt(var + eps)) of x (N, C, *) from its own statistics; only y carries a gradient."""

    eps: float = 1e-5
    n_out = 4

    def infer(self, x: Any, weight: Any, bias: Any) -> Any:
        check_channels("batch_norm", x, weight, bias)
        per_channel = Spec((x.shape[1],), str(x.dtype))
        return (Spec(tuple(x.shape), str(x.dtype)), per_channel, per_channel, per_channel)

    def compute(self, x: NDArray, weight: NDArray, bias: NDArray) -> Any:
        return self.onto(NDArray.empty(x.shape, x.dtype), x, weight, bias)

    def onto(self, y: NDArray, x: NDArray, weight: NDArray, bias: NDArray) -> Any:
        """The results, of which the image is written to memory given for it."""
        stats = [NDArray.empty(weight.shape, x.dtype) for _ in range(3)]
        w, b = dense(weight, bias)
        attrs = {"eps": self.eps, "activation": 0, "alpha": 0}
        call("batch_norm_train", [as_rows(y), *stats], x=as_rows(x), weight=w, bias=b, **attrs)
        return (y, *stats)

    def reference(self, x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> Any:
        axes, shape = other_axes(x), channel_shape(x)
        m, v = x.mean(axes), x.var(axes)
        inverse = 1 / np.sqrt(v + self.eps)
        return (x - m.reshape(shape)) * (inverse * weight).reshape(shape) + bias.reshape(shape), m, v, inverse

    def gradient(self, out_grad: Any, node: Any) -> Any:
        x, weight, _ = node.inputs
        m, _, inverse = statistics(node)
        grads = BatchNormTrainGrad(self.eps)(x, m, inverse, weight, out_grad[0])
        return grads[0], grads[1], grads[2]

    samples = samples_of(({}, [(4, 5, 4, 3), (5,), (5,)]), ({"eps": 1e-3}, [(6, 3), (3,), (3,)]))


def statistics(results: Any) -> tuple[Tensor, ...]:
    """The results of a BatchNormTrain that carry no gradient: mean, variance and inverse."""
    if isinstance(results, TensorTuple):
        return tuple(map(Tensor.make_const, results.cached_data[1:]))
    return tuple(results[i].detach() for i in (1, 2, 3))  # recorded ones


@op
class BatchNormTrainGrad(Op):
    """(dx, dweight, dbias) from x, its mean and 1 / sqrt(var + eps), the weight and the gradient of y."""

    eps: float
    n_out = 3

    def infer(self, x: Any, mean: Any, inverse: Any, weight: Any, dy: Any) -> Any:
        shape = tuple(x.shape)
        wanted, given = (*[shape[1:2]] * 3, shape), (mean.shape, inverse.shape, weight.shape, dy.shape)
        if len(shape) < 2 or given != wanted:
            raise ValueError(f"[{self.label}] expects shapes {wanted} beside x {shape}, got {given}.")
        per_channel = Spec(shape[1:2], str(x.dtype))
        return (Spec(shape, str(x.dtype)), per_channel, per_channel)

    def compute(self, *ins: NDArray) -> Any:
        return self.onto(NDArray.empty(ins[0].shape, ins[0].dtype), *ins)

    def onto(self, dx: NDArray, x: NDArray, mean: NDArray, inverse: NDArray, weight: NDArray, dy: NDArray) -> Any:
        """The results, of which the image is written to memory given for it."""
        dw, db = (NDArray.empty(weight.shape, x.dtype) for _ in range(2))
        values = dict(zip(("mean", "inverse", "weight"), dense(mean, inverse, weight), strict=True))
        call("batch_norm_train_grad", [as_rows(dx), dw, db], x=as_rows(x), **values, dy=as_rows(dy))
        return dx, dw, db

    def reference(
        self, x: np.ndarray, mean: np.ndarray, inverse: np.ndarray, weight: np.ndarray, dy: np.ndarray
    ) -> Any:
        axes, shape = other_axes(x), channel_shape(x)
        n = x.size // x.shape[1]
        normal = (x - mean.reshape(shape)) * inverse.reshape(shape)
        db, dw = dy.sum(axes), (dy * normal).sum(axes)
        scale = (weight * inverse).reshape(shape)
        return scale * (dy - (db.reshape(shape) + normal * dw.reshape(shape)) / n), dw, db

    def gradient(self, out_grad: Any, node: Any) -> Any:
        """Second derivative by differentiating the first in terms of ops; mean and inverse are recomputed from x."""
        from needle.ops.shape.join import make_tuple

        x, _, _, weight, dy = node.inputs
        axes, shape = other_axes(x), channel_shape(x)
        n = math.prod(x.shape[a] for a in axes)
        centred = x - mean(x, axes, keepdims=True)
        inv = rsqrt(mean(centred * centred, axes, keepdims=True) + self.eps)
        normal = centred * inv
        db, dw = summation(dy, axes), summation(dy * normal, axes)
        inner = (reshape(db, shape) + normal * reshape(dw, shape)) * (1 / n)
        dx = reshape(weight, shape) * inv * (dy - inner)
        gx, gw, gdy = vjp(make_tuple(dx, dw, db), out_grad, (x, weight, dy))
        return gx, None, None, gw, gdy


def batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
    unbiased: bool = True,
) -> Tensor:
    """Batch normalisation of x (N, C, *). In training it uses the batch's statistics and moves the running ones towards them
    by `momentum`: the variance unbiased (n - 1) as in torch, or biased as in needle. Without running ones it always trains."""
    from needle.init import ones, zeros

    if weight is None or bias is None:
        known = [t for t in (running_mean, weight, bias) if t is not None]
        where: dict[str, Any] = {"device": x.device, "dtype": (known[0] if known else x).dtype, "requires_grad": False}
        channels = known_size(known[0], 0) if known else known_size(x, 1)
        weight = ones(channels, **where) if weight is None else weight
        bias = zeros(channels, **where) if bias is None else bias
    if not training and running_mean is not None and running_var is not None:
        return BatchNorm(eps)(x, running_mean, running_var, weight, bias)
    normalised = BatchNormTrain(eps)(x, weight, bias)
    if running_mean is not None and running_var is not None:
        batch_mean, batch_var, _ = statistics(normalised)
        count = math.prod(x.shape[a] for a in other_axes(x))
        move(running_mean, batch_mean, momentum)
        move(running_var, batch_var, momentum, count / max(count - 1, 1) if unbiased else 1)
    return normalised[0]


def count_batch(batches: Tensor | None, x: Tensor) -> Tensor | None:
    """A count of batches, one more now that x is normalised by its own statistics; a recorded inference leaves it alone."""
    recorder = x.recorder
    if batches is None or (recorder is not None and not recorder.trains):
        return batches
    if recorder is None and batches.recorder is None:
        return put(batches, batches.cached_data + 1)
    batches.data = counted = recorder.current(batches) + 1
    return counted


def put(buffer: Tensor, array: Any) -> Tensor:
    """An array as the buffer's value, in its dtype and of its shape."""
    if isinstance(array, NDArray) and array.shape == buffer.shape and array.dtype == buffer.dtype:
        buffer.cached_data = array
        buffer.touch()
    else:  # numpy's rules let a layer take wider inputs
        buffer.data = Tensor(array, device=buffer.device, dtype=buffer.dtype)
    return buffer


def known_size(t: Any, axis: int) -> int:
    """A size as a number, also of a symbol whose spec is known."""
    spec = getattr(t, "spec", None)
    return (t if spec is None else spec).shape[axis]


def move(running: Tensor, batch: Tensor, momentum: float | Tensor | None, scale: float = 1) -> None:
    """Move a running statistic towards `scale` times the batch's."""
    if momentum is None:
        raise ValueError("[batch_norm] momentum expects a number in training, got None.")
    known = running if batch.recorder is None else batch.recorder.current(running)  # by an earlier call, too
    if isinstance(momentum, Tensor):  # of a recorded step that averages over all batches
        running.data = known * (1 - momentum) + batch.detach() * (momentum * scale)
        return
    moved = WeightedSum(1 - momentum, momentum * scale)(known, batch.detach())
    if moved.recorder is None:
        put(running, moved.cached_data)
    else:
        running.data = moved

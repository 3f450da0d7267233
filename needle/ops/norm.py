"""Batch normalisation (Ioffe and Szegedy, 2015) over (N, C, *), per channel."""

from __future__ import annotations

from typing import Any

import numpy as np

from needle.autograd import Deferred, Op, Spec, Tensor, op
from needle.backend_ndarray import NDArray, call


def rows(a: Any) -> Any:
    """(N, C, S) form of an (N, C, *) array."""
    return a.reshape((a.shape[0], a.shape[1], -1 if a.size else 0))


def per_channel(v: Any, ndim: int) -> Any:
    return v.reshape((-1,) + (1,) * (ndim - 2))


def check_channels(x: Any, vectors: tuple[Any, ...]) -> None:
    if len(x.shape) < 2:
        raise ValueError(f"[batch_norm] expects an input of rank 2 or more, got {len(x.shape)}.")
    for v in vectors:
        if tuple(v.shape) != (x.shape[1],):
            raise ValueError(f"[batch_norm] expects vectors of {x.shape[1]} channels, got shape {tuple(v.shape)}.")


@op
class BatchNorm(Op):
    """(x - mean) / sqrt(var + eps) * weight + bias with given statistics; inputs x, mean, var, weight, bias."""

    eps: float = 1e-5
    layout = "any"

    @property
    def label(self) -> str:
        return "batch_norm"

    def is_weight(self, index: int) -> bool:
        return index > 0

    def infer(self, x: Any, *vectors: Any) -> Spec:
        check_channels(x, vectors)
        return Spec(tuple(x.shape), x.dtype)

    def compute(self, x: NDArray, *vectors: NDArray) -> NDArray:
        out = NDArray.empty(x.shape, x.dtype)
        call("batch_norm", [rows(out)], [rows(x), *vectors], self.eps, 0, 0)
        return out

    def lower(self, builder: Any, inputs: list[NDArray], out: NDArray) -> None:
        x, *vectors = inputs
        if len(x.shape) == 5:
            call("batch_norm", [out], inputs, self.eps, 0, 0)
        else:
            call("batch_norm", [rows(out)], [rows(x), *vectors], self.eps, 0, 0)

    def reference(self, x: np.ndarray, *vectors: np.ndarray) -> np.ndarray:
        mean, var, weight, bias = (per_channel(v, x.ndim) for v in vectors)
        return (x - mean) / np.sqrt(var + x.dtype.type(self.eps)) * weight + bias

    def decompose(self, x: Tensor, mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        from .elementwise import rsqrt
        from .shape import reshape

        shape = (-1,) + (1,) * (len(x.shape) - 2)
        scale = weight * rsqrt(var + self.eps)
        return x * reshape(scale, shape) + reshape(bias - mean * scale, shape)

    @classmethod
    def samples(cls) -> list:
        return [({}, [(2, 5, 3, 4), (5,), "positive (5,)", (5,), (5,)])]


@op
class BatchNormTrain(Op):
    """Normalises with the batch's own statistics; outputs y, mean, biased variance, 1 / sqrt(variance + eps)."""

    eps: float = 1e-5
    n_out = 4

    @property
    def label(self) -> str:
        return "batch_norm_train"

    def infer(self, x: Any, weight: Any, bias: Any) -> tuple[Spec, ...]:
        check_channels(x, (weight, bias))
        if x.shape[0] * int(np.prod(x.shape[2:])) < 2:
            raise ValueError(f"[batch_norm] expects more than one value per channel in training, got shape {tuple(x.shape)}.")
        vector = Spec((x.shape[1],), x.dtype)
        return (Spec(tuple(x.shape), x.dtype), vector, vector, vector)

    def compute(self, x: NDArray, weight: NDArray, bias: NDArray) -> tuple[NDArray, ...]:
        x = x.compact()
        y, (mean, var, inv) = NDArray.empty(x.shape), (NDArray.empty(weight.shape) for _ in range(3))
        call("batch_norm_train", [rows(y), mean, var, inv], [rows(x), weight, bias], self.eps, 0, 0)
        return (y, mean, var, inv)

    def reference(self, x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> tuple[np.ndarray, ...]:
        axes = (0, *range(2, x.ndim))
        mean, var = x.mean(axes), x.var(axes)
        inv = 1 / np.sqrt(var + x.dtype.type(self.eps))
        y = (x - per_channel(mean, x.ndim)) * per_channel(inv * weight, x.ndim) + per_channel(bias, x.ndim)
        return (y, mean, var, inv)

    def gradient(self, out_grad: Any, node: Any) -> Any:
        x, weight, _ = node.inputs
        mean, inv = (Tensor.make_const(node.cached_data[i]) for i in (1, 3))
        grads = BatchNormTrainGrad()(x, mean, inv, weight, out_grad[0])
        return tuple(grads[i] for i in range(3))

    @classmethod
    def samples(cls) -> list:
        return [({}, [(3, 5, 2, 3), (5,), (5,)]), ({}, [(4, 3), (3,), (3,)])]


@op
class BatchNormTrainGrad(Op):
    """Gradients of BatchNormTrain's y with respect to x, weight and bias; inputs x, mean, inv_std, weight, dy."""

    n_out = 3

    @property
    def label(self) -> str:
        return "batch_norm_train_grad"

    def gradient(self, out_grad: Any, node: Any) -> Any:
        raise NotImplementedError("[batch_norm] has no second derivative in training mode.")

    def infer(self, x: Any, mean: Any, inv: Any, weight: Any, dy: Any) -> tuple[Spec, ...]:
        vector = Spec((x.shape[1],), x.dtype)
        return (Spec(tuple(x.shape), x.dtype), vector, vector)

    def compute(self, x: NDArray, mean: NDArray, inv: NDArray, weight: NDArray, dy: NDArray) -> tuple[NDArray, ...]:
        x, dy = x.compact(), dy.compact()
        dx, dw, db = NDArray.empty(x.shape), NDArray.empty(weight.shape), NDArray.empty(weight.shape)
        call("batch_norm_train_grad", [rows(dx), dw, db], [rows(x), mean, inv, weight, rows(dy)])
        return (dx, dw, db)

    def reference(self, x: np.ndarray, mean: np.ndarray, inv: np.ndarray, weight: np.ndarray, dy: np.ndarray) -> Any:
        axes, count = (0, *range(2, x.ndim)), x.size // x.shape[1]
        centred = (x - per_channel(mean, x.ndim)) * per_channel(inv, x.ndim)
        db, dw = dy.sum(axes), (dy * centred).sum(axes)
        dx = dy - per_channel(db / count, x.ndim) - centred * per_channel(dw / count, x.ndim)
        return (dx * per_channel(weight * inv, x.ndim), dw, db)


def batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: Any = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    unbiased: bool = True,
) -> Tensor:
    """Batch normalisation of x (N, C, *). In training uses the batch's statistics and moves the running ones:
    running = (1 - momentum) running + momentum batch, with the unbiased variance as torch, or the biased one."""
    from needle.init import constant

    if isinstance(training, Deferred):
        training = training.value()  # type: ignore[attr-defined]
    channels = 0
    if weight is None or bias is None:
        channels = x.shape[1] if running_mean is None else running_mean.shape[0]
    weight = constant(channels, c=1.0) if weight is None else weight
    bias = constant(channels, c=0.0) if bias is None else bias
    if not training:
        if running_mean is None or running_var is None:
            raise ValueError("[batch_norm] expects running statistics when not training, got None.")
        return BatchNorm(eps)(x, running_mean, running_var, weight, bias)
    y, mean, var, _ = BatchNormTrain(eps)(x, weight, bias)
    if running_mean is not None and running_var is not None:
        if unbiased:
            count = x.size // x.shape[1]
            var = var * (count / (count - 1))
        running_mean.data = running_mean.detach() * (1 - momentum) + mean.detach() * momentum
        running_var.data = running_var.detach() * (1 - momentum) + var.detach() * momentum
    return y

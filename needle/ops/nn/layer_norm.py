"""Normalisation of each sample: over its last axes, over groups of its channels, by its root mean square."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from needle.autograd import Op, Spec, Tensor, op
from needle.backend_ndarray import NDArray, call
from needle.ops.families import samples_of
from needle.ops.math.elementwise import maximum
from needle.ops.math.maths import rsqrt
from needle.ops.math.power import power_scalar
from needle.ops.nn.norm import batch_norm, channel_shape, move
from needle.ops.nn.row_norm_grad import RowNormGrad
from needle.ops.reduce.basic import mean, vector_norm
from needle.ops.shape.basic import Pad, reshape
from needle.ops.shape.indexing import getitem

__all__ = ["group_norm", "instance_norm", "layer_norm", "local_response_norm", "normalize", "rms_norm"]


BOTH = {"has_weight": True, "has_bias": True}


class RowNorm(Op):
    """Ops whose inputs are x, [weight], [bias], as their attributes `has_weight` and `has_bias` say."""

    def split(self, inputs: Any) -> tuple[Any, Any, Any]:
        """x, weight or None, bias or None."""
        x, *rest = inputs
        weight = rest.pop(0) if self.attributes()["has_weight"] else None
        return x, weight, rest[0] if rest else None

    def is_weight(self, index: int) -> bool:
        return index > 0

    def sources(self, axis: int, out: Any, *inputs: Any) -> list[int | None] | None:
        last = self.attributes().get("axes")  # those that are normalised; others have no such axes
        return [axis, *[None] * (len(inputs) - 1)] if last and axis < len(out.shape) - last else None

    def check_last(self, axes: int, x: Any, *values: Any) -> Spec:
        """As `check`, for values of the shape of the last axes."""
        if not 0 < axes <= len(x.shape):
            raise ValueError(f"[{self.label}] expects at least {axes} axes, got shape {tuple(x.shape)}.")
        return self.check(x, tuple(x.shape[-axes:]), *values)

    def check(self, x: Any, shape: tuple[int, ...], *values: Any) -> Spec:
        """The result's shape and dtype; `values` are a weight and a bias of `shape`, or None."""
        for label, v in zip(("weight", "bias"), values, strict=False):
            if v is not None and tuple(v.shape) != shape:
                raise ValueError(f"[{self.label}] {label} expects shape {shape}, got {tuple(v.shape)}.")
            if v is not None and v.dtype != x.dtype:
                raise ValueError(f"[{self.label}] {label} expects the input's dtype {x.dtype}, got {v.dtype}.")
        return Spec(tuple(x.shape), str(x.dtype))


def affine(y: Any, weight: Any, bias: Any) -> Any:
    """y * weight + bias, of arrays or tensors, where there are such."""
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def filled(count: int, value: float, dtype: str) -> NDArray:
    out = NDArray.empty((count,), dtype)
    out.fill(value)
    return out


@op
class LayerNorm(RowNorm):
    """(x - mean) / sqrt(var + eps) * weight + bias over the last `axes` axes; weight and bias of their shape.

    Ba, Kiros and Hinton, arXiv 1607.06450.
    """

    axes: int = 1
    eps: float = 1e-5
    has_weight: bool = False
    has_bias: bool = False
    compute_infers = True

    def infer(self, *inputs: Any) -> Spec:
        return self.check_last(self.axes, *self.split(inputs))

    def into(self, out: NDArray, *inputs: NDArray) -> None:
        x, weight, bias = self.split(inputs)
        size = math.prod(x.shape[-self.axes :])
        rows = math.prod(x.shape[: -self.axes])
        weight, bias = (None if v is None else v.compact() for v in (weight, bias))
        stats = [NDArray.empty((rows,), x.dtype) for _ in range(2)]
        matrix, target = (a.reshape((rows, size)) for a in (x, out))
        call("layer_norm", [target, *stats], x=matrix, weight=weight, bias=bias, eps=self.eps)

    def reference(self, *inputs: np.ndarray) -> np.ndarray:
        x, weight, bias = self.split(inputs)
        last = tuple(range(-self.axes, 0))
        return affine((x - x.mean(last, keepdims=True)) / np.sqrt(x.var(last, keepdims=True) + self.eps), weight, bias)

    def decompose(self, *inputs: Tensor) -> Tensor:
        x, weight, bias = self.split(inputs)
        last = tuple(range(-self.axes, 0))
        centred = x - mean(x, last, keepdims=True)
        variance = mean(centred * centred, last, keepdims=True)
        return affine(centred * rsqrt(variance + self.eps), weight, bias)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        x, weight, bias = self.split(node.inputs)
        values = () if weight is None else (weight,)
        found = RowNormGrad(self.axes, self.eps, False, weight is not None, bias is not None)(x, *values, out_grad)
        return (found,) if weight is None and bias is None else tuple(found)

    samples = samples_of(
        (BOTH, [(4, 33), (33,), (33,)]),
        ({**BOTH, "axes": 2, "eps": 1e-3}, [(2, 3, 4, 5), (4, 5), (4, 5)]),
        ({"has_weight": True}, [(2, 3, 20), (20,)]),
        ({"has_bias": True}, [(5, 18), (18,)]),
        ({"axes": 2}, [(3, 4)]),
    )


def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, axes: int = 1, eps: float = 1e-5
) -> Tensor:
    """Layer normalisation over the last `axes` axes of x, whose shape weight and bias have."""
    values = [v for v in (weight, bias) if v is not None]
    return LayerNorm(axes, eps, weight is not None, bias is not None)(x, *values)


@op
class RMSNorm(RowNorm):
    """x / sqrt(mean(x ** 2) + eps) * weight over the last `axes` axes; eps None: the dtype's.

    Zhang and Sennrich, arXiv 1910.07467.
    """

    axes: int = 1
    eps: Any = None
    has_weight: bool = False
    has_bias = False
    compute_infers = True

    def infer(self, *inputs: Any) -> Spec:
        return self.check_last(self.axes, *self.split(inputs))

    def added(self, x: Any) -> float:
        """What is added to the mean of squares."""
        return float(np.finfo(str(x.dtype)).eps) if self.eps is None else self.eps

    def into(self, out: NDArray, *inputs: NDArray) -> None:
        x, weight, _ = self.split(inputs)
        rows = math.prod(x.shape[: -self.axes]), math.prod(x.shape[-self.axes :])
        weight = None if weight is None else weight.compact()
        call("rms_norm", [out.reshape(rows)], x=x.reshape(rows), weight=weight, eps=self.added(x))

    def reference(self, *inputs: np.ndarray) -> np.ndarray:
        x, weight, _ = self.split(inputs)
        squares = (x * x).mean(tuple(range(-self.axes, 0)), keepdims=True)
        return affine(x / np.sqrt(squares + self.added(x)), weight, None)

    def decompose(self, *inputs: Tensor) -> Tensor:
        x, weight, _ = self.split(inputs)
        eps = self.added(x)
        scale = rsqrt(mean(x * x, tuple(range(-self.axes, 0)), keepdims=True) + eps)
        return x * scale if weight is None else x * scale * weight

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        x, *weight = node.inputs
        found = RowNormGrad(self.axes, self.added(x), True, self.has_weight)(x, *weight, out_grad)
        return tuple(found) if weight else (found,)

    samples = samples_of(
        ({"has_weight": True}, [(4, 33), (33,)]),
        ({"axes": 2, "eps": 1e-3, "has_weight": True}, [(2, 3, 4, 5), (4, 5)]),
        ({}, [(5, 7)]),
    )


def rms_norm(x: Tensor, weight: Tensor | None = None, axes: int = 1, eps: float | None = None) -> Tensor:
    """Root-mean-square normalisation over the last `axes` axes of x, whose shape weight has."""
    return RMSNorm(axes, eps, weight is not None)(x, *([] if weight is None else [weight]))


@op
class GroupNorm(RowNorm):
    """Each sample of x (N, C, *) normalised over groups of C / groups channels; weight and bias (C,). groups None: C of them,
    which is instance normalisation.

    Wu and He, arXiv 1803.08494; Ulyanov et al., arXiv 1607.08022.
    """

    groups: Any = 1
    eps: float = 1e-5
    has_weight: bool = False
    has_bias: bool = False
    compute_infers = True

    def infer(self, *inputs: Any) -> Spec:
        x, *values = self.split(inputs)
        if len(x.shape) < 2:
            raise ValueError(f"[group_norm] expects shape (N, C, ...), got {tuple(x.shape)}.")
        channels = x.shape[1]
        if self.groups is not None and (self.groups < 1 or channels % self.groups):
            raise ValueError(f"[group_norm] groups expects a divisor of {channels} channels, got {self.groups}.")
        return self.check(x, (channels,), *values)

    def rows(self, x: Any) -> tuple[int, int]:
        """(groups of all samples, elements of each)."""
        rows = x.shape[0] * (x.shape[1] if self.groups is None else self.groups)
        return rows, math.prod(x.shape) // max(rows, 1)

    def into(self, out: NDArray, *inputs: NDArray) -> None:
        if not out.is_compact():  # as (N, H, W, C) in memory, in which groups are no rows
            whole = NDArray.empty(out.shape, out.dtype)
            self.into(whole, *inputs)
            call("copy", [out], x=whole)
            return
        x, weight, bias = self.split(inputs)
        LayerNorm(1, self.eps).into(out.reshape(self.rows(x)), x.reshape(self.rows(x)))
        if weight is None and bias is None:
            return
        n, channels = x.shape[:2]
        zero, one = (filled(channels, v, x.dtype) for v in (0.0, 1.0))
        image = out.reshape((n, channels, math.prod(x.shape[2:])))
        scale, shift = one if weight is None else weight.compact(), zero if bias is None else bias.compact()
        values = {"mean": zero, "var": one, "weight": scale, "bias": shift}
        call("batch_norm", [image], x=image, **values, eps=0, activation=0, alpha=0)  # one pass for scale and shift

    def decompose(self, *inputs: Tensor) -> Tensor:
        x, weight, bias = self.split(inputs)
        y = reshape(LayerNorm(1, self.eps)(reshape(x, self.rows(x))), x.shape)
        return affine(y, *(None if v is None else reshape(v, channel_shape(x)) for v in (weight, bias)))

    samples = samples_of(
        ({**BOTH, "groups": 2}, [(3, 6, 5, 4), (6,), (6,)]),
        ({**BOTH, "groups": None, "eps": 1e-3}, [(2, 3, 19), (3,), (3,)]),
        ({"groups": 2, "has_weight": True}, [(2, 12), (12,)]),
        ({"groups": 1, "has_bias": True}, [(2, 3, 2, 3, 2), (3,)]),
        ({"groups": 3}, [(2, 3, 4, 4)]),
    )


def group_norm(
    x: Tensor, groups: int | None, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Group normalisation of x (N, C, *) with weight and bias (C,); groups None: every channel by itself."""
    values = [v for v in (weight, bias) if v is not None]
    return GroupNorm(groups, eps, weight is not None, bias is not None)(x, *values)


def instance_norm(
    x: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Each channel of each sample of x (N, C, *) normalised by its own statistics, which the running ones, if given, move
    towards (their mean over the batch, the variance unbiased); without use_input_stats by the running ones."""
    if not use_input_stats:
        return batch_norm(x, running_mean, running_var, weight, bias, False, momentum, eps)
    if x.recorder is None and math.prod(x.shape[2:]) == 1:
        raise ValueError(f"[instance_norm] expects more than one element per channel, got shape {tuple(x.shape)}.")
    if running_mean is not None and running_var is not None:
        data, axes = x.detach(), tuple(range(2, len(x.shape)))
        count = math.prod(x.shape[2:])
        centre = mean(data, axes, keepdims=True)
        distance = data - centre
        move(running_mean, mean(reshape(centre, x.shape[:2]), 0), momentum)
        spread = mean(distance * distance, (0, *axes))
        move(running_var, spread * (count / max(count - 1, 1)), momentum)
    return group_norm(x, None, weight, bias, eps)


@op
class LocalResponseNorm(Op):
    """x / (k + alpha * mean of x ** 2 over `size` neighbouring channels) ** beta; x (N, C, *), zeros beyond its channels.

    Krizhevsky et al., ImageNet Classification with Deep Convolutional Neural Networks (2012), with alpha / size for alpha.
    """

    size: int
    alpha: float = 1e-4
    beta: float = 0.75
    k: float = 1.0

    def infer(self, x: Any) -> Spec:
        if len(x.shape) < 2:
            raise ValueError(f"[local_response_norm] expects shape (N, C, ...), got {tuple(x.shape)}.")
        if self.size < 1 or x.shape[1] < 1:
            raise ValueError(f"[local_response_norm] expects a size and channels of at least 1, got {self.size}.")
        return Spec(tuple(x.shape), str(x.dtype))

    def decompose(self, x: Tensor) -> Tensor:
        n, channels = x.shape[:2]
        rows = reshape(x, (n, channels, math.prod(x.shape[2:])))
        before, after = (min(side, channels - 1) for side in (self.size // 2, (self.size - 1) // 2))
        squares = Pad(((before, after), (0, 0)))(rows * rows)
        total = getitem(squares, (slice(None), slice(0, channels)))
        for i in range(1, before + after + 1):
            total = total + getitem(squares, (slice(None), slice(i, i + channels)))
        scale = power_scalar(total * (self.alpha / self.size) + self.k, self.beta)
        return reshape(rows / scale, x.shape)

    samples = samples_of(
        ({"size": 5, "alpha": 0.7}, [(2, 6, 4, 3)]),
        ({"size": 2, "alpha": 0.5, "beta": 0.5, "k": 2.0}, [(2, 4, 5)]),
    )


def local_response_norm(x: Tensor, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0) -> Tensor:
    """Normalisation of x (N, C, *) by `size` neighbouring channels."""
    return LocalResponseNorm(size, alpha, beta, k)(x)


def normalize(x: Tensor, p: float = 2.0, axis: Any = 1, eps: float = 1e-12) -> Tensor:
    """x / max(its p-norm along the axis or axes, eps), p >= 1 or infinite. A row of zeros has gradient 1 / eps, as in torch."""
    if p < 1:
        raise ValueError(f"[normalize] p expects a number of at least 1, got {p}.")
    return x / maximum(vector_norm(x, p, axis, keepdims=True), eps)

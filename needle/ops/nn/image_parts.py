"""What plans that keep images in a layout of their own make of other ops on images (needle/targets).

Batch normalisation in training is `BatchNormMoments`, then `BatchNorm` by them; backward `BatchNormGradSums`, then
`BatchNormGradApply`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from needle.autograd import Op, Spec, Tensor, op
from needle.backend_ndarray import NDArray, call
from needle.ops.families import samples_of
from needle.ops.math.maths import rsqrt
from needle.ops.nn.layer_norm import BOTH, GroupNorm, LayerNorm, RowNorm
from needle.ops.nn.norm import BatchNormTrainGrad, channel_shape, check_channels, other_axes
from needle.ops.nn.volumes import FramesOfVolume, VolumeOfFrames
from needle.ops.reduce.basic import mean, summation
from needle.ops.shape.basic import permute, reshape
from needle.ops.shape.indexing import getitem
from needle.ops.shape.join import make_tuple

__all__: list[str] = []


@op
class BatchNormMoments(Op):
    """(mean, biased variance, 1 / sqrt(variance + eps)) per channel of x (N, C, *)."""

    eps: float
    n_out = 3

    def infer(self, x: Any) -> Any:
        check_channels(self.label, x)
        return (Spec((x.shape[1],), str(x.dtype)),) * 3

    def reference(self, x: np.ndarray) -> Any:
        axes = other_axes(x)
        variance = x.var(axes)
        return x.mean(axes), variance, 1 / np.sqrt(variance + self.eps)

    def decompose(self, x: Tensor) -> Any:
        axes = other_axes(x)
        middle = mean(x, axes)
        centred = x - reshape(middle, channel_shape(x))
        variance = mean(centred * centred, axes)
        return make_tuple(middle, variance, rsqrt(variance + self.eps))

    samples = samples_of(({"eps": 1e-5}, [(4, 5, 4, 3)]), ({"eps": 1e-3}, [(6, 3)]))


@op
class BatchNormGradSums(Op):
    """(dweight, dbias) from x (N, C, *), its mean and 1 / sqrt(var + eps), and the gradient of the result."""

    n_out = 2

    def infer(self, x: Any, mean: Any, inverse: Any, dy: Any) -> Any:
        found = BatchNormTrainGrad(0.0).infer(x, mean, inverse, mean, dy)
        return found[1], found[2]

    def reference(self, x: np.ndarray, mean: np.ndarray, inverse: np.ndarray, dy: np.ndarray) -> Any:
        return BatchNormTrainGrad(0.0).reference(x, mean, inverse, np.ones_like(mean), dy)[1:]

    def decompose(self, x: Tensor, mean: Tensor, inverse: Tensor, dy: Tensor) -> Any:
        shape, axes = channel_shape(x), other_axes(x)
        normal = (x - reshape(mean, shape)) * reshape(inverse, shape)
        return make_tuple(summation(dy * normal, axes), summation(dy, axes))

    samples = samples_of(({}, [(4, 5, 4, 3), (5,), (5,), (4, 5, 4, 3)]), ({}, [(6, 3), (3,), (3,), (6, 3)]))


@op
class BatchNormGradApply(Op):
    """weight inverse (dy - (dbias + normal dweight) / n), normal = (x - mean) inverse and n the values per channel: dx."""

    def infer(self, x: Any, mean: Any, inverse: Any, weight: Any, dy: Any, dweight: Any, dbias: Any) -> Spec:
        check_channels(self.label, x, dweight, dbias)
        return BatchNormTrainGrad(0.0).infer(x, mean, inverse, weight, dy)[0]

    def is_weight(self, index: int) -> bool:
        return index not in (0, 4)

    def reference(self, x: np.ndarray, *rest: np.ndarray) -> Any:
        mean, inverse, weight, dy, dweight, dbias = rest
        values = (v.reshape(channel_shape(x)) for v in (mean, inverse, weight, dweight, dbias))
        mean, inverse, weight, dweight, dbias = values
        return weight * inverse * (dy - (dbias + (x - mean) * inverse * dweight) / (x.size // x.shape[1]))

    def decompose(self, x: Tensor, *rest: Tensor) -> Tensor:
        mean, inverse, weight, dy, dweight, dbias = rest
        values = (reshape(v, channel_shape(x)) for v in (mean, inverse, weight, dweight, dbias))
        mean, inverse, weight, dweight, dbias = values
        return weight * inverse * (dy - (dbias + (x - mean) * inverse * dweight) * (1 / max(x.size // x.shape[1], 1)))

    samples = samples_of(
        ({}, [(4, 5, 4, 3), (5,), (5,), (5,), (4, 5, 4, 3), (5,), (5,)]),
        ({}, [(6, 3), (3,), (3,), (3,), (6, 3), (3,), (3,)]),
    )


@op
class ChannelSums(Op):
    """Sum of x (N, C, *) per channel, (C,): the gradient of a bias."""

    def infer(self, x: Any) -> Spec:
        check_channels(self.label, x)
        return Spec((x.shape[1],), str(x.dtype))

    def reference(self, x: np.ndarray) -> Any:
        return x.sum(other_axes(x))

    def decompose(self, x: Tensor) -> Tensor:
        return summation(x, other_axes(x))

    samples = samples_of(({}, [(4, 5, 4, 3)]), ({}, [(1, 33, 1, 1)]))


@op
class ChannelSlice(Op):
    """Channels from `start` to `stop` of x (N, C, *)."""

    start: int
    stop: int

    def infer(self, x: Any) -> Spec:
        check_channels(self.label, x)
        if not 0 <= self.start <= self.stop <= x.shape[1]:
            raise ValueError(
                f"[{self.label}] expects a part of {x.shape[1]} channels, got {self.start} to {self.stop}."
            )
        return Spec((x.shape[0], self.stop - self.start, *x.shape[2:]), str(x.dtype))

    def reference(self, x: np.ndarray) -> Any:
        return x[:, self.start : self.stop]

    def decompose(self, x: Tensor) -> Tensor:
        return getitem(x, (slice(None), slice(self.start, self.stop)))

    samples = samples_of(({"start": 1, "stop": 4}, [(2, 5, 4, 3)]))


LAST, FIRST = (0, 2, 3, 1), (0, 3, 1, 2)  # channels behind the pixels, and in front of them again


@op
class PixelNorm(RowNorm):
    """Layer norm of the channels of every pixel of x (N, C, H, W), with weight and bias (C,)."""

    eps: float
    has_weight: bool = False
    has_bias: bool = False

    def _rows(self) -> LayerNorm:
        return LayerNorm(1, self.eps, self.has_weight, self.has_bias)

    def infer(self, x: Any, *values: Any) -> Spec:
        return self.check(x, (x.shape[1],), *self.split((x, *values))[1:])

    def into(self, out: NDArray, *inputs: NDArray) -> None:
        x, *values = inputs
        call("copy", [out], x=self._rows().compute(x.permute(LAST), *values).permute(FIRST))

    def reference(self, x: np.ndarray, *values: np.ndarray) -> np.ndarray:
        return self._rows().reference(x.transpose(LAST), *values).transpose(FIRST)

    def decompose(self, x: Tensor, *values: Tensor) -> Tensor:
        return permute(self._rows()(permute(x, LAST), *values), FIRST)

    samples = samples_of(
        ({"eps": 1e-5, **BOTH}, [(2, 5, 4, 3), (5,), (5,)]), ({"eps": 1e-3, "has_bias": True}, [(1, 3, 1, 2), (3,)])
    )


@op
class VolumeNorm(Op):
    """The group norm `norm` of volumes that lie as images x (N D, C, H, W), `depth` frames each; its weight and bias (C,)."""

    norm: GroupNorm
    depth: int

    def infer(self, *inputs: Any) -> Spec:
        return self.norm.infer(*inputs)

    def is_weight(self, index: int) -> bool:
        return index > 0

    def decompose(self, x: Tensor, *values: Tensor) -> Tensor:
        return FramesOfVolume()(self.norm(VolumeOfFrames(self.depth)(x), *values))

    samples = samples_of(
        ({"norm": GroupNorm(2, 1e-5, **BOTH), "depth": 3}, [(6, 4, 2, 5), (4,), (4,)]),
        ({"norm": GroupNorm(None), "depth": 2}, [(2, 3, 4, 3)]),
    )

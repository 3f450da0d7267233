"""Normalisation layers. Their parameters and buffers have torch's names and shapes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, ClassVar

from needle import init, ops
from needle.autograd import Tensor
from needle.backend_ndarray import Device, cpu_numpy, promote
from needle.ops.nn.norm import count_batch

from .arguments import check_divides
from .function import Function
from .module import Module, Parameter

__all__ = [
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "GroupNorm",
    "InstanceNorm",
    "InstanceNorm1d",
    "InstanceNorm2d",
    "InstanceNorm3d",
    "LayerNorm",
    "LayerNorm1d",
    "LocalResponseNorm",
    "RMSNorm",
]


def promoted(x: Tensor, *parameters: Tensor | None) -> list[Any]:
    """All in one dtype where numpy's rules hold, under which a layer of float32 takes float64 inputs; else as they are."""
    given = [t for t in (x, *parameters) if t is not None]
    if x.recorder is not None or x.device != cpu_numpy() or len({t.dtype for t in given}) == 1:
        return [x, *parameters]
    dtype = functools.reduce(promote, (t.dtype for t in given))
    return [t if t is None or t.dtype == dtype else ops.cast(t, dtype) for t in (x, *parameters)]


def affine_of(
    shape: Sequence[int], device: Device | None, dtype: str, weight: bool, bias: bool = True
) -> tuple[Tensor | None, Tensor | None]:
    """A layer's weight, ones, and bias, zeros; None where it has none."""
    where: dict[str, Any] = {"device": device, "dtype": dtype}
    ones = Parameter(init.ones(*shape), **where) if weight else None
    return ones, Parameter(init.zeros(*shape), **where) if weight and bias else None


def statistics_of(
    dim: int, device: Device | None, dtype: str, tracked: bool, counted: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Running mean and variance and torch's count of batches; None where a layer keeps none."""
    return (
        init.zeros(dim, device=device, dtype=dtype) if tracked else None,
        init.ones(dim, device=device, dtype=dtype) if tracked else None,
        init.zeros(device=device, dtype="int64") if tracked and counted else None,
    )


class BatchNorm2d(Module):
    """Batch normalisation over (N, C, H, W) per channel (Ioffe and Szegedy, 2015).

    running = (1 - momentum) running + momentum batch; running_var follows the biased batch variance, or torch's unbiased one
    with unbiased=True. momentum None: the average over all batches. `count_batches` (always on then) adds torch's buffer
    num_batches_tracked.
    """

    mode_dependent = True

    def __init__(
        self,
        dim: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        device: Device | None = None,
        dtype: str = "float32",
        affine: bool = True,
        track_running_stats: bool = True,
        unbiased: bool = False,
        count_batches: bool = False,
    ) -> None:
        super().__init__()
        self.dim, self.eps, self.momentum, self.unbiased = dim, eps, momentum, unbiased
        self.weight, self.bias = affine_of((dim,), device, dtype, affine)
        counted = count_batches or momentum is None
        made = statistics_of(dim, device, dtype, track_running_stats, counted)
        self.running_mean, self.running_var, self.num_batches_tracked = made

    def forward(self, x: Tensor) -> Tensor:
        if x.recorder is None and x.ndim < 2:
            raise ValueError(f"[{type(self).__name__}] expects (N, C) or more axes, got shape {x.shape}.")
        momentum = self.momentum
        count = count_batch(self.num_batches_tracked, x) if self.training else None
        if momentum is None and count is not None:
            counts = x.recorder is None or x.recorder.trains  # else nothing is written, and shapes are asked for
            momentum = 1 / (count.item() if x.recorder is None else ops.cast(count, x.dtype)) if counts else 0.0
        known = x.recorder is None or x.recorder.trains
        if self.training and self.unbiased and known and x.size == x.shape[1] > 0:
            raise ValueError(
                f"[{type(self).__name__}] expects more than one value per channel in training, got shape {x.shape}."
            )
        own = self.training or self.running_mean is None
        x, weight, bias = promoted(x, self.weight, self.bias)
        rule = (own, momentum, self.eps, self.unbiased)
        return ops.batch_norm(x, self.running_mean, self.running_var, weight, bias, *rule)

    def extra_repr(self) -> str:
        return f"{self.dim}, eps={self.eps}, momentum={self.momentum}"


class BatchNorm1d(BatchNorm2d):
    """Batch normalisation over (N, C) or (N, C, L)."""


class BatchNorm3d(BatchNorm2d):
    """Batch normalisation over (N, C, D, H, W)."""


class InstanceNorm(Module):
    """Each channel of each sample normalised by itself: x (N, C, *) with `rank` axes after the channels, or one sample (C, *).

    Tensors as torch's: weight and bias (C,) if affine; running statistics, used in evaluation, if track_running_stats, which
    momentum None leaves as they are.
    """

    def __init__(
        self,
        dim: int,
        rank: int = 2,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = False,
        track_running_stats: bool = False,
        device: Device | None = None,
        dtype: str = "float32",
    ) -> None:
        super().__init__()
        self.dim, self.rank, self.eps, self.momentum = dim, rank, eps, momentum
        self.mode_dependent = track_running_stats  # type: ignore[misc]
        self.weight, self.bias = affine_of((dim,), device, dtype, affine)
        # torch has the count, too, and never counts.
        made = statistics_of(dim, device, dtype, track_running_stats, True)
        self.running_mean, self.running_var, self.num_batches_tracked = made

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim == self.rank + 1:
            return ops.squeeze(self.forward(ops.unsqueeze(x, 0)), 0)
        own = self.training or self.running_mean is None
        x, weight, bias = promoted(x, self.weight, self.bias)
        return ops.instance_norm(
            x, self.running_mean, self.running_var, weight, bias, own, self.momentum or 0.0, self.eps
        )

    def extra_repr(self) -> str:
        return f"{self.dim}, eps={self.eps}"


class InstanceNorm1d(InstanceNorm):
    """`InstanceNorm` of x (N, C, L) or (C, L), with torch's arguments."""

    axes: ClassVar[int] = 1

    def __init__(
        self,
        dim: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = False,
        track_running_stats: bool = False,
        device: Device | None = None,
        dtype: str = "float32",
    ) -> None:
        super().__init__(dim, self.axes, eps, momentum, affine, track_running_stats, device, dtype)


class InstanceNorm2d(InstanceNorm1d):
    """`InstanceNorm` of x (N, C, H, W) or (C, H, W), with torch's arguments."""

    axes = 2


class InstanceNorm3d(InstanceNorm1d):
    """`InstanceNorm` of x (N, C, D, H, W) or (C, D, H, W), with torch's arguments."""

    axes = 3


class GroupNorm(Module):
    """Each sample of (N, C, *) normalised over groups of num_channels / num_groups channels; weight and bias (C,) if affine."""

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: Device | None = None,
        dtype: str = "float32",
    ) -> None:
        super().__init__()
        check_divides("GroupNorm", "num_channels", "num_groups", num_groups, num_channels)
        self.num_groups, self.num_channels, self.eps = num_groups, num_channels, eps
        self.weight, self.bias = affine_of((num_channels,), device, dtype, affine)

    def forward(self, x: Tensor) -> Tensor:
        x, weight, bias = promoted(x, self.weight, self.bias)
        return ops.group_norm(x, self.num_groups, weight, bias, self.eps)

    def extra_repr(self) -> str:
        return f"{self.num_groups}, {self.num_channels}, eps={self.eps}"


class LocalResponseNorm(Function, function=ops.local_response_norm):
    """See ops.local_response_norm; x (N, C, *)."""

    size: int
    alpha: float = 1e-4
    beta: float = 0.75
    k: float = 1.0


def check_normalized(label: str, normalized: tuple[int, ...], x: Any) -> None:
    """Raises where x, as far as its shape is known, does not end in the shape that a layer was made for."""
    spec = x if x.recorder is None else x.spec
    if spec is not None and tuple(spec.shape)[-len(normalized) :] != normalized:
        ends = ", ".join(map(str, normalized))
        raise ValueError(f"[{label}] x expects shape (..., {ends}), got {tuple(spec.shape)}.")


class RMSNorm(Module):
    """Division by the root mean square over the last axes, of shape `normalized_shape`, which weight has.

    eps None: the dtype's.
    """

    def __init__(
        self,
        normalized_shape: int | tuple[int, ...],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Device | None = None,
        dtype: str = "float32",
    ) -> None:
        super().__init__()
        self.normalized_shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        self.eps = eps
        self.weight, _ = affine_of(self.normalized_shape, device, dtype, elementwise_affine, False)

    def forward(self, x: Tensor) -> Tensor:
        check_normalized("RMSNorm", self.normalized_shape, x)
        x, weight = promoted(x, self.weight)
        return ops.rms_norm(x, weight, len(self.normalized_shape), self.eps)

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, eps={self.eps}"


class LayerNorm(Module):
    """Layer normalisation over the last axes, of shape `normalized_shape`, which weight and bias have, too."""

    def __init__(
        self,
        normalized_shape: int | tuple[int, ...],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Device | None = None,
        dtype: str = "float32",
    ) -> None:
        super().__init__()
        self.normalized_shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        self.eps = eps
        self.weight, self.bias = affine_of(self.normalized_shape, device, dtype, elementwise_affine, bias)

    def forward(self, x: Tensor) -> Tensor:
        check_normalized(type(self).__name__, self.normalized_shape, x)
        x, weight, bias = promoted(x, self.weight, self.bias)
        return ops.layer_norm(x, weight, bias, len(self.normalized_shape), self.eps)

    extra_repr = RMSNorm.extra_repr


class LayerNorm1d(LayerNorm):
    """Normalises each row of (batch, dim); parameters `weight` and `bias` of shape (dim,)."""

    def __init__(self, dim: int, eps: float = 1e-5, device: Device | None = None, dtype: str = "float32") -> None:
        super().__init__(dim, eps, device=device, dtype=dtype)
        self.dim = dim

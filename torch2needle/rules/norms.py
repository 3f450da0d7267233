"""Rules of normalisations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from needle import nn as needle_nn
from needle import ops
from needle.autograd import Unsupported
from needle.graph import Mode

from .layer_calls import call_layer
from .reductions import axes
from .registry import rule
from .tables import functions, layers

# -- modules -------------------------------------------------------------------------------------------------------------


BATCH = "dim=num_features eps momentum affine track_running_stats=running_mean? count_batches=num_batches_tracked?"

layers(BATCH, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, unbiased=True)
layers(BATCH, nn.SyncBatchNorm, to=needle_nn.BatchNorm2d, unbiased=True)  # in training the statistics of this process
layers("normalized_shape eps elementwise_affine=weight? bias?", nn.LayerNorm)
layers("normalized_shape eps elementwise_affine=weight?", nn.RMSNorm)
layers("num_groups num_channels eps affine", nn.GroupNorm)
layers("size alpha beta k", nn.LocalResponseNorm)


def instance_norm_layer(momentum: float | None, **fields: Any) -> Any:
    return needle_nn.InstanceNorm(momentum=0.0 if momentum is None else momentum, **fields)


for _rank, _class in enumerate((nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d), 1):
    _fields = "dim=num_features eps momentum affine track_running_stats=running_mean?"
    layers(_fields, _class, to=instance_norm_layer, rank=_rank)


# -- functions -----------------------------------------------------------------------------------------------------------


def by_statistics(f: Callable, layer: Callable, refusal: str) -> Callable:
    """f with the statistics that the flag says, as a layer where the flag follows a module's."""

    def convert(
        x: Any, mean: Any, var: Any, weight: Any, bias: Any, training: Any, momentum: float, eps: float, *count: Any
    ) -> Any:
        if isinstance(training, Mode):
            return call_layer(training, layer(momentum, eps), x, mean, var, weight, bias, *count)
        if training and mean is not None:
            raise Unsupported(refusal)
        return f(x, mean, var, weight, bias, training, momentum, eps)

    return convert


def weights_first(f: Callable) -> Callable:
    return lambda x, weight, bias, mean, var, *rest: f(x, mean, var, weight, bias, *rest)


def counted_batch_norm(
    x: torch.Tensor, mean: Any, var: Any, weight: Any, bias: Any, training: bool, momentum: Any, eps: float, count: Any
) -> torch.Tensor:
    """F.batch_norm in a forward that counts its batches in training, as torch's layers do: what capture makes of both."""
    if training:
        count.add_(1)
    return F.batch_norm(x, mean, var, weight, bias, training, momentum, eps)


counted_batch_norm.stands_for = F.batch_norm  # type: ignore[attr-defined]
MOVES = "moves running statistics in evaluation, too; pass"
batch_norm = by_statistics(
    ops.batch_norm, needle_nn.FunctionalBatchNorm, f"training=True {MOVES} training=self.training"
)
instance_norm = by_statistics(
    ops.instance_norm, needle_nn.FunctionalInstanceNorm, f"use_input_stats=True {MOVES} self.training"
)
functions(
    "input, running_mean, running_var, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5",
    {(F.batch_norm,): batch_norm},
)
functions("x, mean, var, weight, bias, training, momentum, eps, count", {(counted_batch_norm,): batch_norm})
functions(
    "input, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled",
    {(torch.batch_norm,): weights_first(batch_norm)},
)
functions(
    "input, running_mean=None, running_var=None, weight=None, bias=None, use_input_stats=True, momentum=0.1, eps=1e-5",
    {(F.instance_norm,): instance_norm},
)
functions(
    "input, weight, bias, running_mean, running_var, use_input_stats, momentum, eps, cudnn_enabled",
    {(torch.instance_norm,): weights_first(instance_norm)},
)


def layer_norm(x: Any, normalized_shape: Any, weight: Any, bias: Any, eps: float) -> Any:
    return ops.layer_norm(x, weight, bias, len(normalized_shape), eps)


functions("input, normalized_shape, weight=None, bias=None, eps=1e-5", {(F.layer_norm,): layer_norm})
functions(
    "input, normalized_shape, weight=None, bias=None, eps=1e-5, cudnn_enable=True", {(torch.layer_norm,): layer_norm}
)
functions(
    "input, normalized_shape, weight=None, eps=None",
    {(F.rms_norm, torch.rms_norm): lambda x, shape, weight, eps: ops.rms_norm(x, weight, len(shape), eps)},
)
functions("input, num_groups, weight=None, bias=None, eps=1e-5", {(F.group_norm,): ops.group_norm})
functions(
    "input, num_groups, weight=None, bias=None, eps=1e-5, cudnn_enabled=True", {(torch.group_norm,): ops.group_norm}
)
functions("input, size, alpha=1e-4, beta=0.75, k=1.0", {(F.local_response_norm,): ops.local_response_norm})


@rule(F.normalize)
def normalize(input: Any, p: float = 2.0, dim: Any = 1, eps: float = 1e-12, out: Any = None) -> Any:
    if out is not None:
        raise Unsupported("out= is not supported")
    return ops.normalize(input, p, axes(dim), eps)


@rule(torch._weight_norm)
def weight_norm(v: Any, g: Any, dim: int = 0) -> Any:
    """What both forms of torch.nn.utils.weight_norm call; dim -1 takes the norm of all (Salimans and Kingma, 2016)."""
    axes = tuple(i for i in range(v.ndim) if dim == -1 or i != dim)
    return v * (g / ops.vector_norm(v, 2.0, axes, dim != -1))

"""Rules of normalisations."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from needle import nn as needle_nn
from needle import ops
from needle.autograd import Unsupported
from needle.graph import Mode
from torch2needle.layer_calls import call_layer
from torch2needle.registry import rule
from torch2needle.rules.reductions import axes

# -- modules -------------------------------------------------------------------------------------------------------------


def batch_norm_arguments(m: Any) -> dict[str, Any]:
    return {
        "dim": m.num_features,
        "eps": m.eps,
        "momentum": m.momentum,
        "affine": m.affine,
        "track_running_stats": m.running_mean is not None,
        "unbiased": True,
        "count_batches": m.num_batches_tracked is not None,
    }


@rule(nn.BatchNorm1d)
def batch_norm1d(m: nn.BatchNorm1d) -> Any:
    return needle_nn.BatchNorm1d(**batch_norm_arguments(m))


@rule(nn.BatchNorm2d)
def batch_norm2d(m: nn.BatchNorm2d) -> Any:
    return needle_nn.BatchNorm2d(**batch_norm_arguments(m))


@rule(nn.BatchNorm3d)
def batch_norm3d(m: nn.BatchNorm3d) -> Any:
    return needle_nn.BatchNorm3d(**batch_norm_arguments(m))


@rule(nn.SyncBatchNorm)
def sync_batch_norm(m: nn.SyncBatchNorm) -> Any:
    """In training with the statistics of this process alone."""
    return needle_nn.BatchNorm2d(**batch_norm_arguments(m))


def instance_norm_layer(m: Any, rank: int) -> Any:
    return needle_nn.InstanceNorm(
        m.num_features, rank, m.eps, 0.0 if m.momentum is None else m.momentum, m.affine, m.running_mean is not None
    )


@rule(nn.InstanceNorm1d)
def instance_norm1d(m: nn.InstanceNorm1d) -> Any:
    return instance_norm_layer(m, 1)


@rule(nn.InstanceNorm2d)
def instance_norm2d(m: nn.InstanceNorm2d) -> Any:
    return instance_norm_layer(m, 2)


@rule(nn.InstanceNorm3d)
def instance_norm3d(m: nn.InstanceNorm3d) -> Any:
    return instance_norm_layer(m, 3)


@rule(nn.LayerNorm)
def layer_norm_layer(m: nn.LayerNorm) -> Any:
    return needle_nn.LayerNorm(tuple(m.normalized_shape), m.eps, m.weight is not None, m.bias is not None)


@rule(nn.RMSNorm)
def rms_norm_layer(m: nn.RMSNorm) -> Any:
    return needle_nn.RMSNorm(tuple(m.normalized_shape), m.eps, m.weight is not None)


@rule(nn.GroupNorm)
def group_norm_layer(m: nn.GroupNorm) -> Any:
    return needle_nn.GroupNorm(m.num_groups, m.num_channels, m.eps, m.affine)


@rule(nn.LocalResponseNorm)
def local_response_norm_layer(m: nn.LocalResponseNorm) -> Any:
    return needle_nn.LocalResponseNorm(m.size, m.alpha, m.beta, m.k)


# -- functions -----------------------------------------------------------------------------------------------------------


@rule(F.batch_norm)
def batch_norm(
    input: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: Any = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    if not isinstance(training, Mode):
        if training and running_mean is not None:
            raise Unsupported("training=True moves running statistics in evaluation, too; pass training=self.training")
        return ops.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    layer = needle_nn.FunctionalBatchNorm(momentum, eps)
    return call_layer(training, layer, input, running_mean, running_var, weight, bias)


@rule(torch.batch_norm)
def torch_batch_norm(
    input: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: Any,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Any:
    return batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)


@rule(F.instance_norm)
def instance_norm(
    input: Any,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    use_input_stats: Any = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    if isinstance(use_input_stats, Mode):
        layer = needle_nn.FunctionalInstanceNorm(momentum, eps)
        return call_layer(use_input_stats, layer, input, running_mean, running_var, weight, bias)
    if use_input_stats and running_mean is not None:
        raise Unsupported("use_input_stats=True moves running statistics in evaluation, too; pass self.training")
    return ops.instance_norm(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)


@rule(torch.instance_norm)
def torch_instance_norm(
    input: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    use_input_stats: Any,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Any:
    return instance_norm(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)


@rule(F.layer_norm)
def layer_norm(input: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Any:
    return ops.layer_norm(input, weight, bias, len(normalized_shape), eps)


@rule(torch.layer_norm)
def torch_layer_norm(
    input: Any,
    normalized_shape: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Any:
    return ops.layer_norm(input, weight, bias, len(normalized_shape), eps)


@rule(F.rms_norm, torch.rms_norm)
def rms_norm(input: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    return ops.rms_norm(input, weight, len(normalized_shape), eps)


@rule(F.group_norm)
def group_norm(input: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Any:
    return ops.group_norm(input, num_groups, weight, bias, eps)


@rule(torch.group_norm)
def torch_group_norm(
    input: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, cudnn_enabled: bool = True
) -> Any:
    return ops.group_norm(input, num_groups, weight, bias, eps)


@rule(F.local_response_norm)
def local_response_norm(input: Any, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0) -> Any:
    return ops.local_response_norm(input, size, alpha, beta, k)


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

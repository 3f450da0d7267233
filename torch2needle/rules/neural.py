"""Rules of torch.nn.functional and the activations among torch's functions."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from needle import ops
from needle.autograd import Unsupported
from needle.graph import Mode
from torch2needle.layer_calls import call_layer
from torch2needle.registry import rule
from torch2needle.rules.arithmetic import cast

T = torch.Tensor


@rule(F.relu, F.relu_, torch.relu, torch.relu_, T.relu, T.relu_)
def relu(input: Any, inplace: bool = False) -> Any:
    return ops.relu(input)


@rule(F.relu6)
def relu6(input: Any, inplace: bool = False) -> Any:
    return ops.relu6(input)


@rule(F.leaky_relu, F.leaky_relu_)
def leaky_relu(input: Any, negative_slope: float = 0.01, inplace: bool = False) -> Any:
    return ops.leaky_relu(input, negative_slope)


@rule(F.sigmoid, torch.sigmoid, torch.sigmoid_, T.sigmoid, T.sigmoid_)
def sigmoid(input: Any) -> Any:
    return ops.sigmoid(input)


@rule(F.tanh, torch.tanh, torch.tanh_, T.tanh, T.tanh_)
def tanh(input: Any) -> Any:
    return ops.tanh(input)


@rule(F.silu)
def silu(input: Any, inplace: bool = False) -> Any:
    return ops.silu(input)


@rule(F.gelu)
def gelu(input: Any, approximate: str = "none") -> Any:
    return ops.gelu(input, approximate)


@rule(F.hardswish)
def hardswish(input: Any, inplace: bool = False) -> Any:
    return ops.hardswish(input)


@rule(F.hardsigmoid)
def hardsigmoid(input: Any, inplace: bool = False) -> Any:
    return ops.hardsigmoid(input)


@rule(F.elu, F.elu_)
def elu(input: Any, alpha: float = 1.0, inplace: bool = False) -> Any:
    return ops.elu(input, alpha)


def axis_of(dim: int | None) -> int:
    if dim is None:
        raise Unsupported("dim=None depends on the rank; give it a dim")
    return dim


@rule(F.softmax)
def softmax(input: Any, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None) -> Any:
    return ops.softmax(cast(input, dtype), axis_of(dim))


@rule(torch.softmax, T.softmax)
def softmax_method(input: Any, dim: int, dtype: Any = None) -> Any:
    return ops.softmax(cast(input, dtype), dim)


@rule(F.log_softmax)
def log_softmax(input: Any, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None) -> Any:
    return ops.log_softmax(cast(input, dtype), axis_of(dim))


@rule(torch.log_softmax, T.log_softmax)
def log_softmax_method(input: Any, dim: int, dtype: Any = None) -> Any:
    return ops.log_softmax(cast(input, dtype), dim)


@rule(F.linear)
def linear(input: Any, weight: Any, bias: Any = None) -> Any:
    return ops.linear(input, weight, bias)


@rule(F.conv2d)
def conv2d(
    input: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> Any:
    return ops.conv2d(input, weight, bias, stride, padding, dilation, groups)


@rule(F.conv_transpose2d)
def conv_transpose2d(
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Any:
    return ops.conv_transpose2d(input, weight, bias, stride, padding, output_padding, groups, dilation)


@rule(F.max_pool2d, torch.max_pool2d)
def max_pool2d(
    input: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    if return_indices:
        raise Unsupported("return_indices=True is not supported")
    return ops.max_pool2d(input, kernel_size, stride or None, padding, dilation, ceil_mode)


@rule(F.avg_pool2d)
def avg_pool2d(
    input: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Any:
    return ops.avg_pool2d(input, kernel_size, stride or None, padding, ceil_mode, count_include_pad, divisor_override)


@rule(F.adaptive_avg_pool2d)
def adaptive_avg_pool2d(input: Any, output_size: Any) -> Any:
    return ops.adaptive_avg_pool2d(input, output_size)


@rule(F.interpolate)
def interpolate(
    input: Any,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Any:
    if mode not in ("nearest", "bilinear"):
        raise Unsupported(f"mode expects nearest or bilinear, got {mode}")
    if recompute_scale_factor or antialias:
        raise Unsupported("recompute_scale_factor=True and antialias=True are not supported")
    return ops.interpolate(input, tuple(size) if isinstance(size, list) else size, scale_factor, mode, align_corners)


@rule(F.dropout, view="maybe")
def dropout(input: Any, p: float = 0.5, training: Any = True, inplace: bool = False) -> Any:
    if training is False or p == 0:
        return input
    if not isinstance(training, Mode):
        raise Unsupported("training=True holds in evaluation, too; pass training=self.training")
    from needle.nn import Dropout

    return call_layer(training, Dropout(p), input)


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
    from needle.nn.functional import FunctionalBatchNorm

    return call_layer(training, FunctionalBatchNorm(momentum, eps), input, running_mean, running_var, weight, bias)


@rule(nn.ZeroPad2d, nn.ConstantPad2d)
def constant_pad2d(m: Any) -> Any:
    from needle.nn.functional import ConstantPad2d

    return ConstantPad2d(m.padding, getattr(m, "value", 0.0))


@rule(nn.Dropout2d)
def dropout2d(m: nn.Dropout2d) -> Any:
    raise Unsupported("Dropout2d drops whole channels, for which needle has no layer")

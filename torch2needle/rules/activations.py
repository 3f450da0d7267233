"""Rules of activations: modules, functions and tensor methods. `relu_` and `inplace=True` are the interpreter's concern."""

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
from needle.nn.basic import axis_of

from .arithmetic import cast
from .layer_calls import call_layer
from .registry import rule
from .tables import functions, layers

T = torch.Tensor

layers("", nn.ReLU, nn.ReLU6, nn.SELU, nn.SiLU, nn.Mish, nn.Sigmoid, nn.LogSigmoid, nn.Hardsigmoid, nn.Hardswish)
layers("", nn.Tanh, nn.Tanhshrink, nn.Softsign, nn.Softmax2d)
layers("negative_slope", nn.LeakyReLU)
layers("alpha", nn.ELU, nn.CELU)
layers("approximate", nn.GELU)
layers("min_val max_val", nn.Hardtanh)
layers("lambd", nn.Hardshrink, nn.Softshrink)
layers("beta threshold", nn.Softplus)
layers("threshold value", nn.Threshold)
layers("num_parameters", nn.PReLU)
layers("lower upper", nn.RReLU)
layers("axis=dim", nn.GLU, nn.Softmax, nn.LogSoftmax, nn.Softmin)

functions(
    "input, inplace=False",
    {
        (F.relu, F.relu_, torch.relu, torch.relu_, T.relu, T.relu_): ops.relu,
        (F.relu6,): ops.relu6,
        (F.selu, F.selu_, torch.selu, torch.selu_): ops.selu,
        (F.silu,): ops.silu,
        (F.mish,): ops.mish,
        (F.hardsigmoid,): ops.hardsigmoid,
        (F.hardswish,): ops.hardswish,
    },
)
functions(
    "input",
    {
        (F.sigmoid, torch.sigmoid, torch.sigmoid_, T.sigmoid, T.sigmoid_, torch.special.expit): ops.sigmoid,
        (F.logsigmoid,): ops.logsigmoid,
        (F.tanh, torch.tanh, torch.tanh_, T.tanh, T.tanh_): ops.tanh,
        (F.tanhshrink,): ops.tanhshrink,
        (F.softsign,): ops.softsign,
    },
)
functions("input, negative_slope=0.01, inplace=False", {(F.leaky_relu, F.leaky_relu_): ops.leaky_relu})
functions("input, alpha=1.0, inplace=False", {(F.elu,): ops.elu, (F.celu, F.celu_, torch.celu, torch.celu_): ops.celu})


@rule(torch.ops.aten.elu.default)
def aten_elu(input: Any, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Any:
    """selu and celu are this one, too."""
    if scale == input_scale == 1:
        return ops.elu(input, alpha)
    below = ops.expm1(ops.clamp_max(input, 0.0) * input_scale) * alpha
    return ops.where(ops.gt(input, 0), input, below) * scale


functions("input, approximate='none'", {(F.gelu,): ops.gelu})
functions("input, min_val=-1.0, max_val=1.0, inplace=False", {(F.hardtanh, F.hardtanh_): ops.hardtanh})
functions(
    "input, lambd=0.5",
    {(F.hardshrink, torch.hardshrink, T.hardshrink): ops.hardshrink, (F.softshrink,): ops.softshrink},
)
functions("input, beta=1.0, threshold=20.0", {(F.softplus,): ops.softplus})
functions(
    "input, threshold, value, inplace=False",
    {(F.threshold, F.threshold_, torch.threshold): ops.threshold},  # type: ignore[attr-defined]
)
functions("input, weight", {(F.prelu, torch.prelu, T.prelu): ops.prelu})
functions("input, dim=-1", {(F.glu,): ops.glu})


@rule(F.rrelu, F.rrelu_, torch.rrelu, torch.rrelu_)
def rrelu(input: Any, lower: float = 1 / 8, upper: float = 1 / 3, training: Any = False, inplace: bool = False) -> Any:
    if isinstance(training, Mode):
        return call_layer(training, needle_nn.RReLU(lower, upper), input)
    if training:
        raise Unsupported("training=True holds in evaluation, too; pass training=self.training")
    return ops.leaky_relu(input, (lower + upper) / 2)


@rule(F.elu_)
def elu_(input: Any, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Any:
    if scale != 1 or input_scale != 1:
        raise Unsupported(f"scale and input_scale expect 1, got {scale} and {input_scale}")
    return ops.elu(input, alpha)


def after_cast(f: Callable) -> Callable:
    """f(input, dim) in a dtype."""
    return lambda input, dim, dtype: f(cast(input, dtype), dim)


functions(
    "input, dim=None, _stacklevel=3, dtype=None",
    {
        (F.softmax,): after_cast(lambda input, dim: ops.softmax(input, axis_of(input, dim))),
        (F.log_softmax,): after_cast(lambda input, dim: ops.log_softmax(input, axis_of(input, dim))),
        (F.softmin,): after_cast(lambda input, dim: ops.softmax(-input, axis_of(input, dim))),
    },
)
functions(
    "input, dim, dtype=None",
    {
        (torch.softmax, T.softmax, torch.special.softmax): after_cast(ops.softmax),
        (torch.log_softmax, T.log_softmax, torch.special.log_softmax): after_cast(ops.log_softmax),
    },
)

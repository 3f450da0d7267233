"""Rules of activations: modules, functions and tensor methods. `relu_` and `inplace=True` are the interpreter's concern."""

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
from torch2needle.rules.arithmetic import cast

T = torch.Tensor

# Modules whose needle layer takes arguments of the same names: the rule of each reads them from the torch module.
LAYERS: dict[type[nn.Module], tuple[type[needle_nn.Module], tuple[str, ...]]] = {
    nn.ReLU: (needle_nn.ReLU, ()),
    nn.ReLU6: (needle_nn.ReLU6, ()),
    nn.LeakyReLU: (needle_nn.LeakyReLU, ("negative_slope",)),
    nn.ELU: (needle_nn.ELU, ("alpha",)),
    nn.SELU: (needle_nn.SELU, ()),
    nn.CELU: (needle_nn.CELU, ("alpha",)),
    nn.GELU: (needle_nn.GELU, ("approximate",)),
    nn.SiLU: (needle_nn.SiLU, ()),
    nn.Mish: (needle_nn.Mish, ()),
    nn.Sigmoid: (needle_nn.Sigmoid, ()),
    nn.LogSigmoid: (needle_nn.LogSigmoid, ()),
    nn.Hardsigmoid: (needle_nn.Hardsigmoid, ()),
    nn.Hardswish: (needle_nn.Hardswish, ()),
    nn.Hardtanh: (needle_nn.Hardtanh, ("min_val", "max_val")),
    nn.Tanh: (needle_nn.Tanh, ()),
    nn.Tanhshrink: (needle_nn.Tanhshrink, ()),
    nn.Hardshrink: (needle_nn.Hardshrink, ("lambd",)),
    nn.Softshrink: (needle_nn.Softshrink, ("lambd",)),
    nn.Softplus: (needle_nn.Softplus, ("beta", "threshold")),
    nn.Softsign: (needle_nn.Softsign, ()),
    nn.Threshold: (needle_nn.Threshold, ("threshold", "value")),
    nn.PReLU: (needle_nn.PReLU, ("num_parameters",)),
    nn.RReLU: (needle_nn.RReLU, ("lower", "upper")),
    nn.Softmax2d: (needle_nn.Softmax2d, ()),
}


@rule(*LAYERS)
def activation(m: Any) -> Any:
    layer, names = next(LAYERS[c] for c in type(m).__mro__ if c in LAYERS)
    return layer(**{n: getattr(m, n) for n in names})


@rule(nn.GLU)
def glu_layer(m: nn.GLU) -> Any:
    return needle_nn.GLU(m.dim)


@rule(nn.Softmax)
def softmax_layer(m: nn.Softmax) -> Any:
    return needle_nn.Softmax(m.dim)


@rule(nn.LogSoftmax)
def log_softmax_layer(m: nn.LogSoftmax) -> Any:
    return needle_nn.LogSoftmax(m.dim)


@rule(nn.Softmin)
def softmin_layer(m: nn.Softmin) -> Any:
    return needle_nn.Softmin(m.dim)


@rule(F.relu, F.relu_, torch.relu, torch.relu_, T.relu, T.relu_)
def relu(input: Any, inplace: bool = False) -> Any:
    return ops.relu(input)


@rule(F.relu6)
def relu6(input: Any, inplace: bool = False) -> Any:
    return ops.relu6(input)


@rule(F.leaky_relu, F.leaky_relu_)
def leaky_relu(input: Any, negative_slope: float = 0.01, inplace: bool = False) -> Any:
    return ops.leaky_relu(input, negative_slope)


@rule(F.prelu, torch.prelu, T.prelu)
def prelu(input: Any, weight: Any) -> Any:
    return ops.prelu(input, weight)


@rule(F.rrelu, F.rrelu_, torch.rrelu, torch.rrelu_)
def rrelu(input: Any, lower: float = 1 / 8, upper: float = 1 / 3, training: Any = False, inplace: bool = False) -> Any:
    if isinstance(training, Mode):
        return call_layer(training, needle_nn.RReLU(lower, upper), input)
    if training:
        raise Unsupported("training=True holds in evaluation, too; pass training=self.training")
    return ops.leaky_relu(input, (lower + upper) / 2)


@rule(F.elu)
def elu(input: Any, alpha: float = 1.0, inplace: bool = False) -> Any:
    return ops.elu(input, alpha)


@rule(F.elu_)
def elu_(input: Any, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Any:
    if scale != 1 or input_scale != 1:
        raise Unsupported(f"scale and input_scale expect 1, got {scale} and {input_scale}")
    return ops.elu(input, alpha)


@rule(F.selu, F.selu_, torch.selu, torch.selu_)
def selu(input: Any, inplace: bool = False) -> Any:
    return ops.selu(input)


@rule(F.celu, F.celu_, torch.celu, torch.celu_)
def celu(input: Any, alpha: float = 1.0, inplace: bool = False) -> Any:
    return ops.celu(input, alpha)


@rule(F.gelu)
def gelu(input: Any, approximate: str = "none") -> Any:
    return ops.gelu(input, approximate)


@rule(F.silu)
def silu(input: Any, inplace: bool = False) -> Any:
    return ops.silu(input)


@rule(F.mish)
def mish(input: Any, inplace: bool = False) -> Any:
    return ops.mish(input)


@rule(F.sigmoid, torch.sigmoid, torch.sigmoid_, T.sigmoid, T.sigmoid_, torch.special.expit)
def sigmoid(input: Any) -> Any:
    return ops.sigmoid(input)


@rule(F.logsigmoid)
def logsigmoid(input: Any) -> Any:
    return ops.logsigmoid(input)


@rule(F.hardsigmoid)
def hardsigmoid(input: Any, inplace: bool = False) -> Any:
    return ops.hardsigmoid(input)


@rule(F.hardswish)
def hardswish(input: Any, inplace: bool = False) -> Any:
    return ops.hardswish(input)


@rule(F.hardtanh, F.hardtanh_)
def hardtanh(input: Any, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> Any:
    return ops.hardtanh(input, min_val, max_val)


@rule(F.tanh, torch.tanh, torch.tanh_, T.tanh, T.tanh_)
def tanh(input: Any) -> Any:
    return ops.tanh(input)


@rule(F.tanhshrink)
def tanhshrink(input: Any) -> Any:
    return ops.tanhshrink(input)


@rule(F.hardshrink, torch.hardshrink, T.hardshrink)
def hardshrink(input: Any, lambd: float = 0.5) -> Any:
    return ops.hardshrink(input, lambd)


@rule(F.softshrink)
def softshrink(input: Any, lambd: float = 0.5) -> Any:
    return ops.softshrink(input, lambd)


@rule(F.softplus)
def softplus(input: Any, beta: float = 1.0, threshold: float = 20.0) -> Any:
    return ops.softplus(input, beta, threshold)


@rule(F.softsign)
def softsign(input: Any) -> Any:
    return ops.softsign(input)


@rule(F.threshold, F.threshold_, torch.threshold)  # type: ignore[attr-defined]
def threshold(input: Any, threshold: float, value: float, inplace: bool = False) -> Any:
    return ops.threshold(input, threshold, value)


@rule(F.glu)
def glu(input: Any, dim: int = -1) -> Any:
    return ops.glu(input, dim)


def axis_of(input: Any, dim: int | None) -> int:
    """None is torch's old rule, which depends on the rank."""
    if dim is not None:
        return dim
    return 0 if input.ndim in (0, 1, 3) else 1


@rule(F.softmax)
def softmax(input: Any, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None) -> Any:
    return ops.softmax(cast(input, dtype), axis_of(input, dim))


@rule(torch.softmax, T.softmax, torch.special.softmax)
def softmax_method(input: Any, dim: int, dtype: Any = None) -> Any:
    return ops.softmax(cast(input, dtype), dim)


@rule(F.log_softmax)
def log_softmax(input: Any, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None) -> Any:
    return ops.log_softmax(cast(input, dtype), axis_of(input, dim))


@rule(torch.log_softmax, T.log_softmax, torch.special.log_softmax)
def log_softmax_method(input: Any, dim: int, dtype: Any = None) -> Any:
    return ops.log_softmax(cast(input, dtype), dim)


@rule(F.softmin)
def softmin(input: Any, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None) -> Any:
    return ops.softmax(-cast(input, dtype), axis_of(input, dim))

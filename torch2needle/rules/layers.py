"""Rules of module classes: torch module to needle layer, in torch's layout. The converter fills the parameters."""

from __future__ import annotations

from typing import Any

from torch import nn

from needle import nn as needle_nn
from needle.autograd import Unsupported
from torch2needle.registry import rule


def require(condition: bool, reason: str) -> None:
    if not condition:
        raise Unsupported(reason)


@rule(nn.Conv2d)
def conv2d(m: nn.Conv2d) -> Any:
    require(m.padding_mode == "zeros", f"padding_mode expects zeros, got {m.padding_mode}")
    return needle_nn.Conv(
        m.in_channels,
        m.out_channels,
        m.kernel_size,
        stride=m.stride,
        bias=m.bias is not None,
        padding=m.padding,
        dilation=m.dilation,
        groups=m.groups,
        layout="torch",
    )


@rule(nn.ConvTranspose2d)
def conv_transpose2d(m: nn.ConvTranspose2d) -> Any:
    return needle_nn.ConvTranspose2d(
        m.in_channels,
        m.out_channels,
        m.kernel_size,
        stride=m.stride,
        padding=m.padding,
        output_padding=m.output_padding,
        groups=m.groups,
        bias=m.bias is not None,
        dilation=m.dilation,
    )


@rule(nn.Linear)
def linear(m: nn.Linear) -> Any:
    return needle_nn.Linear(m.in_features, m.out_features, bias=m.bias is not None, layout="torch")


def batch_norm_arguments(m: Any) -> dict[str, Any]:
    require(m.momentum is not None, "momentum=None (a cumulative average) is not supported; set a number")
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


@rule(nn.ReLU)
def relu(m: nn.ReLU) -> Any:
    return needle_nn.ReLU()


@rule(nn.ReLU6)
def relu6(m: nn.ReLU6) -> Any:
    return needle_nn.ReLU6()


@rule(nn.LeakyReLU)
def leaky_relu(m: nn.LeakyReLU) -> Any:
    return needle_nn.LeakyReLU(m.negative_slope)


@rule(nn.Sigmoid)
def sigmoid(m: nn.Sigmoid) -> Any:
    return needle_nn.Sigmoid()


@rule(nn.Tanh)
def tanh(m: nn.Tanh) -> Any:
    return needle_nn.Tanh()


@rule(nn.SiLU)
def silu(m: nn.SiLU) -> Any:
    return needle_nn.SiLU()


@rule(nn.GELU)
def gelu(m: nn.GELU) -> Any:
    return needle_nn.GELU(m.approximate)


@rule(nn.Hardswish)
def hardswish(m: nn.Hardswish) -> Any:
    return needle_nn.Hardswish()


@rule(nn.Hardsigmoid)
def hardsigmoid(m: nn.Hardsigmoid) -> Any:
    return needle_nn.Hardsigmoid()


@rule(nn.ELU)
def elu(m: nn.ELU) -> Any:
    return needle_nn.ELU(m.alpha)


@rule(nn.Softmax)
def softmax(m: nn.Softmax) -> Any:
    if m.dim is None:
        raise Unsupported("dim=None depends on the rank; give softmax its dim")
    return needle_nn.Softmax(m.dim)


@rule(nn.LogSoftmax)
def log_softmax(m: nn.LogSoftmax) -> Any:
    if m.dim is None:
        raise Unsupported("dim=None depends on the rank; give log_softmax its dim")
    return needle_nn.LogSoftmax(m.dim)


@rule(nn.MaxPool2d)
def max_pool2d(m: nn.MaxPool2d) -> Any:
    require(not m.return_indices, "return_indices=True is not supported")
    return needle_nn.MaxPool2d(m.kernel_size, m.stride, m.padding, m.dilation, m.ceil_mode)


@rule(nn.AvgPool2d)
def avg_pool2d(m: nn.AvgPool2d) -> Any:
    return needle_nn.AvgPool2d(m.kernel_size, m.stride, m.padding, m.ceil_mode, m.count_include_pad, m.divisor_override)


@rule(nn.AdaptiveAvgPool2d)
def adaptive_avg_pool2d(m: nn.AdaptiveAvgPool2d) -> Any:
    return needle_nn.AdaptiveAvgPool2d(m.output_size)


@rule(nn.Dropout, view="maybe")
def dropout(m: nn.Dropout) -> Any:
    return needle_nn.Dropout(m.p)


@rule(nn.Identity, view="always")
def identity(m: nn.Identity) -> Any:
    return needle_nn.Identity()


@rule(nn.Flatten, view="maybe")
def flatten(m: nn.Flatten) -> Any:
    return needle_nn.Flatten(m.start_dim, m.end_dim)


@rule(nn.Upsample, nn.UpsamplingBilinear2d, nn.UpsamplingNearest2d)
def upsample(m: nn.Upsample) -> Any:
    require(m.mode in ("nearest", "bilinear"), f"mode expects nearest or bilinear, got {m.mode}")
    require(not m.recompute_scale_factor, "recompute_scale_factor=True is not supported")
    return needle_nn.Upsample(m.size, m.scale_factor, m.mode, m.align_corners)

"""Rules of convolutions over one, two and three axes, plain and transposed: modules and functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from needle import nn as needle_nn
from needle import ops
from torch2needle.registry import rule, rule_family


def arguments(m: Any) -> dict[str, Any]:
    """What the layers of both kinds take."""
    return {
        "in_channels": m.in_channels,
        "out_channels": m.out_channels,
        "kernel_size": m.kernel_size,
        "stride": m.stride,
        "padding": m.padding,
        "dilation": m.dilation,
        "groups": m.groups,
        "bias": m.bias is not None,
    }


@rule(nn.Conv1d)
def conv1d_module(m: nn.Conv1d) -> Any:
    return needle_nn.Conv1d(**arguments(m), padding_mode=m.padding_mode)


@rule(nn.Conv2d)
def conv2d_module(m: nn.Conv2d) -> Any:
    return needle_nn.Conv(**arguments(m), padding_mode=m.padding_mode, layout="torch")


@rule(nn.Conv3d)
def conv3d_module(m: nn.Conv3d) -> Any:
    return needle_nn.Conv3d(**arguments(m), padding_mode=m.padding_mode)


@rule(nn.ConvTranspose1d)
def conv_transpose1d_module(m: nn.ConvTranspose1d) -> Any:
    return needle_nn.ConvTranspose1d(**arguments(m), output_padding=m.output_padding)


@rule(nn.ConvTranspose2d)
def conv_transpose2d_module(m: nn.ConvTranspose2d) -> Any:
    return needle_nn.ConvTranspose2d(**arguments(m), output_padding=m.output_padding)


@rule(nn.ConvTranspose3d)
def conv_transpose3d_module(m: nn.ConvTranspose3d) -> Any:
    return needle_nn.ConvTranspose3d(**arguments(m), output_padding=m.output_padding)


@rule_family(
    {
        ops.conv1d: (F.conv1d, torch.conv1d),
        ops.conv2d: (F.conv2d, torch.conv2d),
        ops.conv3d: (F.conv3d, torch.conv3d),
    }
)
def conv(op: Callable) -> Callable:
    def convert(
        input: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
    ) -> Any:
        return op(input, weight, bias, stride, padding, dilation, groups)

    return convert


@rule_family(
    {
        ops.conv_transpose1d: (F.conv_transpose1d, torch.conv_transpose1d),
        ops.conv_transpose2d: (F.conv_transpose2d, torch.conv_transpose2d),
        ops.conv_transpose3d: (F.conv_transpose3d, torch.conv_transpose3d),
    }
)
def conv_transpose(op: Callable) -> Callable:
    def convert(
        input: Any,
        weight: Any,
        bias: Any = None,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        dilation: Any = 1,
    ) -> Any:
        return op(input, weight, bias, stride, padding, output_padding, groups, dilation)

    return convert

"""Rules of pooling over one, two and three axes: modules and functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from needle import nn as needle_nn
from needle import ops
from needle.autograd import Unsupported
from torch2needle.registry import rule, rule_family


def require_no_indices(return_indices: bool) -> None:
    if return_indices:
        raise Unsupported("return_indices=True is not supported: needle's pools return values only")


@rule(nn.MaxPool1d)
def max_pool1d_module(m: nn.MaxPool1d) -> Any:
    require_no_indices(m.return_indices)
    return needle_nn.MaxPool1d(m.kernel_size, m.stride, m.padding, m.dilation, m.ceil_mode)


@rule(nn.MaxPool2d)
def max_pool2d_module(m: nn.MaxPool2d) -> Any:
    require_no_indices(m.return_indices)
    return needle_nn.MaxPool2d(m.kernel_size, m.stride, m.padding, m.dilation, m.ceil_mode)


@rule(nn.MaxPool3d)
def max_pool3d_module(m: nn.MaxPool3d) -> Any:
    require_no_indices(m.return_indices)
    return needle_nn.MaxPool3d(m.kernel_size, m.stride, m.padding, m.dilation, m.ceil_mode)


@rule(nn.AvgPool1d)
def avg_pool1d_module(m: nn.AvgPool1d) -> Any:
    return needle_nn.AvgPool1d(m.kernel_size, m.stride, m.padding, m.ceil_mode, m.count_include_pad)


@rule(nn.AvgPool2d)
def avg_pool2d_module(m: nn.AvgPool2d) -> Any:
    return needle_nn.AvgPool2d(m.kernel_size, m.stride, m.padding, m.ceil_mode, m.count_include_pad, m.divisor_override)


@rule(nn.AvgPool3d)
def avg_pool3d_module(m: nn.AvgPool3d) -> Any:
    return needle_nn.AvgPool3d(m.kernel_size, m.stride, m.padding, m.ceil_mode, m.count_include_pad, m.divisor_override)


@rule(nn.AdaptiveAvgPool1d)
def adaptive_avg_pool1d_module(m: nn.AdaptiveAvgPool1d) -> Any:
    return needle_nn.AdaptiveAvgPool1d(m.output_size)


@rule(nn.AdaptiveAvgPool2d)
def adaptive_avg_pool2d_module(m: nn.AdaptiveAvgPool2d) -> Any:
    return needle_nn.AdaptiveAvgPool2d(m.output_size)


@rule(nn.AdaptiveAvgPool3d)
def adaptive_avg_pool3d_module(m: nn.AdaptiveAvgPool3d) -> Any:
    return needle_nn.AdaptiveAvgPool3d(m.output_size)


@rule(nn.AdaptiveMaxPool1d)
def adaptive_max_pool1d_module(m: nn.AdaptiveMaxPool1d) -> Any:
    require_no_indices(m.return_indices)
    return needle_nn.AdaptiveMaxPool1d(m.output_size)


@rule(nn.AdaptiveMaxPool2d)
def adaptive_max_pool2d_module(m: nn.AdaptiveMaxPool2d) -> Any:
    require_no_indices(m.return_indices)
    return needle_nn.AdaptiveMaxPool2d(m.output_size)


@rule(nn.AdaptiveMaxPool3d)
def adaptive_max_pool3d_module(m: nn.AdaptiveMaxPool3d) -> Any:
    require_no_indices(m.return_indices)
    return needle_nn.AdaptiveMaxPool3d(m.output_size)


@rule_family(
    {
        ops.max_pool1d: (F.max_pool1d, torch.max_pool1d),
        ops.max_pool2d: (F.max_pool2d, torch.max_pool2d),
        ops.max_pool3d: (F.max_pool3d, torch.max_pool3d),
    }
)
def max_pool(op: Callable) -> Callable:
    def convert(
        input: Any,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> Any:
        require_no_indices(return_indices)
        return op(input, kernel_size, stride or None, padding, dilation, ceil_mode)

    return convert


@rule(F.max_pool1d_with_indices, F.max_pool2d_with_indices, F.max_pool3d_with_indices, torch.max_pool1d_with_indices)
def max_pool_with_indices(input: Any, *args: Any, **kwargs: Any) -> Any:
    return require_no_indices(True)


@rule(F.avg_pool1d, torch.avg_pool1d)
def avg_pool1d(
    input: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> Any:
    return ops.avg_pool1d(input, kernel_size, stride or None, padding, ceil_mode, count_include_pad)


@rule_family({ops.avg_pool2d: (F.avg_pool2d,), ops.avg_pool3d: (F.avg_pool3d,)})
def avg_pool(op: Callable) -> Callable:
    def convert(
        input: Any,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Any:
        return op(input, kernel_size, stride or None, padding, ceil_mode, count_include_pad, divisor_override)

    return convert


@rule_family(
    {
        ops.adaptive_avg_pool1d: (F.adaptive_avg_pool1d, torch.adaptive_avg_pool1d),
        ops.adaptive_avg_pool2d: (F.adaptive_avg_pool2d,),
        ops.adaptive_avg_pool3d: (F.adaptive_avg_pool3d,),
    }
)
def adaptive_avg_pool(op: Callable) -> Callable:
    return lambda input, output_size: op(input, output_size)


@rule_family(
    {
        ops.adaptive_max_pool1d: (F.adaptive_max_pool1d,),
        ops.adaptive_max_pool2d: (F.adaptive_max_pool2d,),
        ops.adaptive_max_pool3d: (F.adaptive_max_pool3d,),
    }
)
def adaptive_max_pool(op: Callable) -> Callable:
    def convert(input: Any, output_size: Any, return_indices: bool = False) -> Any:
        require_no_indices(return_indices)
        return op(input, output_size)

    return convert


INDEXED = (F.adaptive_max_pool1d_with_indices, F.adaptive_max_pool2d_with_indices, F.adaptive_max_pool3d_with_indices)


@rule(torch.adaptive_max_pool1d, *INDEXED)
def adaptive_max_pool_with_indices(input: Any, output_size: Any, return_indices: bool = True) -> Any:
    return require_no_indices(True)

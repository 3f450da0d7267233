"""Rules of pooling over one, two and three axes: modules and functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from needle import ops

from .registry import rule
from .tables import functions, layers, refuse

INDICES = {"return_indices": ": needle's pools return values only"}
AVERAGE = "kernel_size stride padding ceil_mode count_include_pad"

layers("kernel_size stride padding dilation ceil_mode", nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, refused=INDICES)
layers(AVERAGE, nn.AvgPool1d)
layers(f"{AVERAGE} divisor_override", nn.AvgPool2d, nn.AvgPool3d)
layers("output_size", nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)
layers("output_size", nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d, refused=INDICES)


def windows(f: Callable) -> Callable:
    """f(input, kernel_size, stride, ...), where aten writes an absent stride as an empty list."""
    return lambda input, kernel_size, stride, *rest: f(input, kernel_size, stride or None, *rest)


functions(
    "input, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False, return_indices=False",
    {
        (F.max_pool1d, torch.max_pool1d): windows(ops.max_pool1d),
        (F.max_pool2d, torch.max_pool2d): windows(ops.max_pool2d),
        (F.max_pool3d, torch.max_pool3d): windows(ops.max_pool3d),
    },
    refused=INDICES,
)
functions(
    "input, kernel_size, stride=None, padding=0, ceil_mode=False, count_include_pad=True",
    {(F.avg_pool1d, torch.avg_pool1d): windows(ops.avg_pool1d)},
)
functions(
    "input, kernel_size, stride=None, padding=0, ceil_mode=False, count_include_pad=True, divisor_override=None",
    {(F.avg_pool2d,): windows(ops.avg_pool2d), (F.avg_pool3d,): windows(ops.avg_pool3d)},
)
functions(
    "input, output_size",
    {
        (F.adaptive_avg_pool1d, torch.adaptive_avg_pool1d): ops.adaptive_avg_pool1d,
        (F.adaptive_avg_pool2d,): ops.adaptive_avg_pool2d,
        (F.adaptive_avg_pool3d,): ops.adaptive_avg_pool3d,
    },
)
functions(
    "input, output_size, return_indices=False",
    {
        (F.adaptive_max_pool1d,): ops.adaptive_max_pool1d,
        (F.adaptive_max_pool2d,): ops.adaptive_max_pool2d,
        (F.adaptive_max_pool3d,): ops.adaptive_max_pool3d,
    },
    refused=INDICES,
)


@rule(
    *(F.max_pool1d_with_indices, F.max_pool2d_with_indices, F.max_pool3d_with_indices),
    *(F.adaptive_max_pool1d_with_indices, F.adaptive_max_pool2d_with_indices, F.adaptive_max_pool3d_with_indices),
    *(torch.max_pool1d_with_indices, torch.adaptive_max_pool1d),
)
def max_pool_with_indices(input: Any, *args: Any, **kwargs: Any) -> Any:
    refuse({"return_indices": True}, INDICES)

"""Rules of convolutions over one, two and three axes, plain and transposed: modules and functions."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from needle import nn as needle_nn
from needle import ops

from .registry import rule
from .tables import functions, layers

FIELDS = "in_channels out_channels kernel_size stride padding dilation groups bias?"

layers(f"{FIELDS} padding_mode", nn.Conv1d, nn.Conv3d)
layers(f"{FIELDS} padding_mode", nn.Conv2d, to=needle_nn.Conv, layout="torch")
layers(f"{FIELDS} output_padding", nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)

functions(
    "input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1",
    {
        (F.conv1d, torch.conv1d): ops.conv1d,
        (F.conv2d, torch.conv2d): ops.conv2d,
        (F.conv3d, torch.conv3d): ops.conv3d,
    },
)
functions(
    "input, weight, bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1",
    {
        (F.conv_transpose1d, torch.conv_transpose1d): ops.conv_transpose1d,
        (F.conv_transpose2d, torch.conv_transpose2d): ops.conv_transpose2d,
        (F.conv_transpose3d, torch.conv_transpose3d): ops.conv_transpose3d,
    },
)


@rule(F.conv_tbc, torch.conv_tbc)
def conv_tbc(input: Any, weight: Any, bias: Any, pad: Any = 0) -> Any:
    """Of (time, batch, channels), the weight being (width, in, out)."""
    y = ops.conv1d(ops.permute(input, (1, 2, 0)), ops.permute(weight, (2, 1, 0)), bias, 1, pad)
    return ops.permute(y, (2, 0, 1))

"""Rules of torch.nn.functional."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F

from needle import ops
from torch2needle.registry import rule


@rule(F.linear)
def linear(input: Any, weight: Any, bias: Any = None) -> Any:
    return ops.linear(input, weight, bias)

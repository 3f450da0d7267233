"""Rules of grouped matrix products, of which offsets say where each group ends."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from needle import ops
from needle.autograd import Unsupported

from .arithmetic import cast
from .registry import rule


def turned(x: Any) -> Any:
    return ops.transpose(x, (-2, -1))


@rule(F.grouped_mm, torch._grouped_mm)
def grouped_mm(mat_a: Any, mat_b: Any, *, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Any:
    if bias is not None:
        raise Unsupported("bias is not supported, as in torch")
    ranks = (mat_a.ndim, mat_b.ndim)
    if ranks == (3, 3):
        product = ops.matmul(mat_a, mat_b)
    elif offs is None:
        raise Unsupported("offs expects the ends of the groups")
    elif ranks == (2, 3):  # of rows
        product = ops.grouped_matmul(mat_a, mat_b, offs)
    elif ranks == (3, 2):  # of columns
        product = turned(ops.grouped_matmul(turned(mat_b), turned(mat_a), offs))
    else:  # of what is summed
        product = ops.grouped_outer(turned(mat_a), mat_b, offs)
    return cast(product, out_dtype)


@rule("torch.ops.transformers.grouped_mm_fallback.default")
def grouped_mm_fallback(input: Any, weight: Any, offs: Any) -> Any:
    """What mixtures of experts of `transformers` call where torch's own does not run."""
    return ops.grouped_matmul(input, weight, offs)

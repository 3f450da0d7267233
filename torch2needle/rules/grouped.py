"""Rules of grouped matrix products, of which offsets say where each group ends."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from needle import ops
from needle.autograd import Unsupported

from .arithmetic import cast
from .registry import rule


def members(like: Any, size: Any, ends: Any) -> Any:
    """(G, size) of bool: which of `size` places belongs to which group, whose ends are given."""
    place = ops.arange_like(like, 0, size)
    before = ops.lt(ops.unsqueeze(place, 0), ops.unsqueeze(ends, 1))
    started = ops.concat([ops.full_like(ends, 0, (1,)), ops.getitem(ends, slice(0, -1))], 0)
    return ops.logical_and(before, ops.ge(ops.unsqueeze(place, 0), ops.unsqueeze(started, 1)))


@rule(F.grouped_mm, torch._grouped_mm)
def grouped_mm(mat_a: Any, mat_b: Any, *, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Any:
    """Every group's product is one of all rows, of which the others count as zeros."""
    if bias is not None:
        raise Unsupported("bias is not supported, as in torch")
    ranks = (mat_a.ndim, mat_b.ndim)
    if ranks == (3, 3):
        return cast(ops.matmul(mat_a, mat_b), out_dtype)
    if offs is None:
        raise Unsupported("offs expects the ends of the groups")
    if ranks == (2, 3):  # of rows
        mine = ops.unsqueeze(members(mat_a, mat_a.shape[0], offs), 2)
        product = ops.summation(ops.matmul(ops.where(mine, ops.unsqueeze(mat_a, 0), 0.0), mat_b), 0)
    elif ranks == (3, 2):  # of columns
        mine = ops.unsqueeze(members(mat_b, mat_b.shape[1], offs), 1)
        product = ops.summation(ops.matmul(mat_a, ops.where(mine, ops.unsqueeze(mat_b, 0), 0.0)), 0)
    else:  # of what is summed
        mine = ops.unsqueeze(members(mat_a, mat_a.shape[1], offs), 1)
        product = ops.matmul(ops.where(mine, ops.unsqueeze(mat_a, 0), 0.0), mat_b)
    return cast(product, out_dtype)

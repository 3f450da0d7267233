"""Rules of what reads at given places: grids, windows, bags of embeddings, distances, sorted numbers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from needle import ops
from needle.autograd import Tensor, Unsupported
from needle.ops.common import as_operand

from .arithmetic import cast
from .embedding import check
from .registry import rule
from .shapes import Absent, overlaps, unchanged, varargs
from .tables import functions

T = torch.Tensor
aten = torch.ops.aten


@rule(F.grid_sample)
def grid_sample(
    input: Any, grid: Any, mode: str = "bilinear", padding_mode: str = "zeros", align_corners: bool | None = None
) -> Any:
    return ops.grid_sample(input, grid, mode, padding_mode, bool(align_corners))


MODES, PADDINGS = ("bilinear", "nearest", "bicubic"), ("zeros", "border", "reflection")  # by torch's numbers
functions(
    "input, grid, interpolation_mode, padding_mode, align_corners",
    {
        (
            *(torch.grid_sampler, aten.grid_sampler.default),
            *(aten.grid_sampler_2d.default, aten.grid_sampler_3d.default),
        ): lambda x, grid, mode, padding, align: ops.grid_sample(x, grid, MODES[mode], PADDINGS[padding], align)
    },
)
functions(
    "theta, size, align_corners=None",
    {(F.affine_grid,): lambda theta, size, align: ops.affine_grid(theta, size, bool(align))},
)
functions("theta, size, align_corners", {(torch.affine_grid_generator,): ops.affine_grid})
functions("input, dimension, size, step", {(T.unfold,): ops.sliding_windows}, view="always", put=overlaps)


def dense_strided(x: Any, order: Any, size: Any, stride: Any, offset: int) -> Any:
    """torch.as_strided of a tensor whose elements lie in memory as those of x.permute(order) do, without gaps; offset: from the
    first of them."""
    x = x.permute(order).contiguous()
    return x.as_strided(size, stride, x.storage_offset() + offset)


def dense_strided_copy(x: Any, order: Any, size: Any, stride: Any, offset: int) -> Any:
    """torch.as_strided_copy, likewise."""
    return dense_strided(x, order, size, stride, offset).clone()


@rule(dense_strided, view="always", put=overlaps)
def strided(x: Any, order: Any, size: Any, stride: Any, offset: int) -> Any:
    place: Any = ops.full_like(x, offset, (1,) * len(size), dtype="int64")
    for axis, (n, step) in enumerate(zip(size, stride, strict=True)):
        line = ops.arange_like(x, 0, n) * step
        place = place + ops.reshape(line, tuple(-1 if i == axis else 1 for i in range(len(size))))
    return ops.take(ops.flatten(ops.permute(x, order)), ops.reshape(place, tuple(size)), 0)


functions("x, order, size, stride, offset", {(dense_strided_copy,): strided})


@rule(torch.cartesian_prod, view=lambda *tensors: "same" if len(varargs(tensors)) == 1 else None, put=unchanged)
def cartesian_prod(*tensors: Any) -> Any:
    tensors = varargs(tensors)  # aten gives a list
    if len(tensors) == 1:
        return tensors[0]
    return ops.stack([ops.flatten(t) for t in meshgrid(*tensors, indexing="ij")], 1)


@rule(torch.meshgrid, view="always", put=overlaps)
def meshgrid(*tensors: Any, indexing: str | None = None) -> Any:
    given = list(tensors[0]) if isinstance(tensors[0], tuple | list) else list(tensors)
    lines = [ops.unsqueeze(t, 0) if t.ndim == 0 else t for t in given]
    swaps = indexing == "xy" and len(lines) > 1
    lines[:2] = lines[1::-1] if swaps else lines[:2]
    sizes, made = tuple(t.shape[0] for t in lines), []
    for i, t in enumerate(lines):
        for _ in range(len(lines) - 1 - i):
            t = ops.unsqueeze(t, -1)
        made.append(ops.broadcast_to(t, shape=sizes))
    return (made[1], made[0], *made[2:]) if swaps else tuple(made)


functions("x1, x2, p=2.0, compute_mode=None", {(torch.cdist,): lambda a, b, p, _: ops.cdist(a, b, p)})


functions("input, p=2.0", {(F.pdist, torch.pdist): ops.pdist})


@rule(torch.searchsorted)
def searchsorted(
    sorted_sequence: Any,
    input: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Any = None,
) -> Any:
    if not isinstance(sorted_sequence, Tensor):
        raise Unsupported("sorted_sequence expects a tensor")
    if sorter is not None:
        sorted_sequence = ops.gather(sorted_sequence, -1, sorter)
    found = ops.searchsorted(sorted_sequence, as_operand(input, sorted_sequence), right or side == "right")
    return cast(found, torch.int32) if out_int32 else found


@rule(torch.bucketize)
def bucketize(input: Any, boundaries: Any, *, out_int32: bool = False, right: bool = False) -> Any:
    return searchsorted(boundaries, input, out_int32=out_int32, right=right)


def check_bags(scale_grad_by_freq: bool) -> None:
    """torch divides by how often another index is given."""
    if scale_grad_by_freq:
        raise Unsupported("scale_grad_by_freq=True of bags is not supported")


@rule(F.embedding_bag)
def embedding_bag(
    input: Any,
    weight: Any,
    offsets: Any = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Any = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Any:
    check(max_norm)
    check_bags(scale_grad_by_freq)
    if offsets is not None:
        return ops.embedding_bag(input, weight, offsets, mode, per_sample_weights, include_last_offset, padding_idx)
    if padding_idx is not None:
        raise Unsupported("padding_idx needs offsets; pass example= to capture with torch.export")
    rows = ops.embedding(input, weight)
    if per_sample_weights is not None:
        rows = rows * ops.unsqueeze(per_sample_weights, -1)
    return {"sum": ops.summation, "mean": ops.mean, "max": ops.amax}[mode](rows, 1)


@rule(torch.embedding_bag, aten.embedding_bag.padding_idx, aten._embedding_bag.default)
def aten_embedding_bag(
    weight: Any,
    indices: Any,
    offsets: Any,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Any = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Any:
    check_bags(scale_grad_by_freq)
    padding = None if padding_idx is None or padding_idx < 0 else padding_idx
    named = ("sum", "mean", "max")[mode]
    made = ops.embedding_bag(indices, weight, offsets, named, per_sample_weights, include_last_offset, padding)
    return (made, *(Absent("needle's bags of embeddings return the sums alone") for _ in range(3)))

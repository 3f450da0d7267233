"""Rules of aten overloads whose name or arguments are not those of a torch function; the others share that function's rule."""

from __future__ import annotations

import math
from typing import Any

import torch

from needle import ops
from needle.autograd import Tensor, Unsupported
from needle.graph import Dim
from torch2needle.capture import stop_gradient
from torch2needle.cells import written_by
from torch2needle.registry import rule, rule_family
from torch2needle.rules import creation
from torch2needle.rules.indexing import getitem, setitem
from torch2needle.rules.resizing import fold, interpolate, pad, unfold
from torch2needle.rules.shapes import Absent, at, back_in_shape, joined
from torch2needle.structure import plain

aten = torch.ops.aten
END = 2**63 - 1  # how aten writes the end of an axis


# -- the same value ------------------------------------------------------------------------------------------------------


@rule(aten.alias.default, view="always")
@written_by(back_in_shape)
def alias(input: Any) -> Any:
    return input


@rule(aten.lift_fresh.default, view="same")
@written_by(lambda base, value: value)
def lifted(input: Any) -> Any:
    return input


@rule(aten.lift_fresh_copy.default, aten.detach_copy.default)
def copied(input: Any) -> Any:
    return input


@rule(aten.detach_.default, view="always")
def detach_(input: Any) -> Any:
    return ops.stop_gradient(input)


@rule(stop_gradient, view="always")
def stopped(value: Any) -> Any:
    """Of a call with several results."""
    return plain(value, lambda v: ops.stop_gradient(v) if isinstance(v, Tensor) else v)


@rule(aten.numpy_T.default, view="always")
@written_by(lambda base, value: ops.permute(value))
def numpy_t(input: Any) -> Any:
    return ops.permute(input)


@rule(aten.mT.default, view="always")
@written_by(lambda base, value: ops.transpose(value))
def m_t(input: Any) -> Any:
    return ops.transpose(input)


# -- indexing ------------------------------------------------------------------------------------------------------------


def span(dim: int, start: Any, end: Any, step: int) -> tuple:
    return at(dim, slice(start, None if isinstance(end, int) and end >= END else end, None if step == 1 else step))


@rule(aten.slice.Tensor, view="always")
@written_by(
    lambda base, value, dim=0, start=None, end=None, step=1: ops.setitem(base, span(dim, start, end, step), value)
)
def slice_tensor(input: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    return ops.getitem(input, span(dim, start, end, step))


def index_of(indices: Any) -> tuple:
    """aten's list of tensors, with None for whole axes, as torch's index."""
    items = [slice(None) if i is None else i for i in indices]
    while items and isinstance(items[-1], slice):
        items.pop()
    return tuple(items)


@rule(aten.index.Tensor)
def index(input: Any, indices: Any) -> Any:
    return getitem(input, index_of(indices))


@rule(aten.index_put.default, aten.index_put_.default)
def index_put(input: Any, indices: Any, values: Any, accumulate: bool = False) -> Any:
    if accumulate:
        raise Unsupported("accumulate=True adds up where indices repeat")
    return setitem(input, index_of(indices), values)


@rule(aten.slice_scatter.default)
def slice_scatter(input: Any, src: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    return ops.setitem(input, span(dim, start, end, step), src)


@rule(aten.split_with_sizes.default, view="always")
@written_by(joined)
def split_with_sizes(input: Any, split_sizes: Any, dim: int = 0) -> Any:
    return ops.split_sizes(input, split_sizes, dim)


# -- images --------------------------------------------------------------------------------------------------------------


MODES = {
    "nearest": ("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d"),
    "nearest-exact": ("_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d"),
    "linear": ("upsample_linear1d",),
    "bilinear": ("upsample_bilinear2d",),
    "bicubic": ("upsample_bicubic2d",),
    "trilinear": ("upsample_trilinear3d",),
    "bilinear, antialias": ("_upsample_bilinear2d_aa",),
    "bicubic, antialias": ("_upsample_bicubic2d_aa",),
}


def resized(mode: str) -> Any:
    def upsample(input: Any, output_size: Any, align_corners: bool | None = None, scale_factors: Any = None) -> Any:
        name, _, antialias = mode.partition(", ")
        scales = None if output_size is not None else scale_factors
        return interpolate(input, output_size, scales, name, align_corners, antialias=bool(antialias))

    upsample.__name__ = upsample.__qualname__ = f"upsample_{mode.replace(', ', '_').replace('-', '_')}"
    return upsample


for _mode, _names in MODES.items():
    rule(*(getattr(aten, n).vec for n in _names))(resized(_mode))


@rule(aten.constant_pad_nd.default)
def constant_pad_nd(input: Any, pad: Any, value: float = 0) -> Any:
    return ops.pad(input, tuple(pad), "constant", value)


for _name, _mode in (("reflection", "reflect"), ("replication", "replicate")):
    for _rank in (1, 2, 3):
        rule(getattr(aten, f"{_name}_pad{_rank}d").default)(
            lambda input, padding, mode=_mode: pad(input, padding, mode)
        )


@rule(aten.im2col.default)
def im2col(input: Any, kernel_size: Any, dilation: Any, padding: Any, stride: Any) -> Any:
    return unfold(input, kernel_size, dilation, padding, stride)


@rule(aten.col2im.default)
def col2im(input: Any, output_size: Any, kernel_size: Any, dilation: Any, padding: Any, stride: Any) -> Any:
    return fold(input, output_size, kernel_size, dilation, padding, stride)


@rule_family(
    {
        ops.adaptive_max_pool1d: (aten.adaptive_max_pool1d.default,),
        ops.adaptive_max_pool2d: (aten.adaptive_max_pool2d.default,),
        ops.adaptive_max_pool3d: (aten.adaptive_max_pool3d.default,),
    }
)
def adaptive_max_pool(op: Any) -> Any:
    """Values without their indices."""
    return lambda input, output_size: (op(input, output_size), Absent("needle's pools return values without indices"))


# -- numbers -------------------------------------------------------------------------------------------------------------


@rule(aten.sym_size.int)
def sym_size(input: Any, dim: int) -> Any:
    return input.shape[dim]


@rule(aten.sym_numel.default)
def sym_numel(input: Any) -> Any:
    return math.prod(input.shape)


@rule(torch.sym_float)
def sym_float(a: Any, *, like: Any = None) -> Any:
    return a * 1.0


@rule(torch.sym_int)
def sym_int(a: Any, *, like: Any = None) -> Any:
    return math.floor(a)


@rule(torch.sym_sum)
def sym_sum(args: Any, *, like: Any = None) -> Any:
    return sum(args)


@rule(torch.sym_max)
def sym_max(a: Any, b: Any, *, like: Any = None) -> Any:
    return a.larger(b) if isinstance(a, Dim) else b.larger(a)


@rule(torch.sym_min)
def sym_min(a: Any, b: Any, *, like: Any = None) -> Any:
    return a.smaller(b) if isinstance(a, Dim) else b.smaller(a)


@rule(aten.arange.default)
def arange(end: Any, *, dtype: Any = None, like: Any, **_: Any) -> Any:
    return creation.arange(end, dtype=dtype, like=like)

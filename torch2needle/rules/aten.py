"""Rules of aten overloads whose name or arguments are not those of a torch function; the others share that function's rule."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

from needle import ops
from needle.autograd import Tensor, Unsupported
from needle.backend_ndarray import FLOATS
from needle.graph import Dim, map_structure

from . import creation
from .indexing import getitem, put_numbers, setitem
from .registry import rule
from .shapes import at, back_in_shape, joined, unchanged
from .tables import functions

aten = torch.ops.aten
END = 2**63 - 1  # how aten writes the end of an axis


@rule(aten._has_compatible_shallow_copy_type.default)
def data_set(input: Any, from_: Any) -> Any:
    """All that a program holds of `input.data = from_`."""
    raise Unsupported("it gives a tensor other memory by `.data = ...`; write into it by copy_ under torch.no_grad")


# -- the same value ------------------------------------------------------------------------------------------------------


functions("input", {(aten.alias.default,): lambda x: x}, view="always", put=back_in_shape)
functions("input", {(aten.lift_fresh.default,): lambda x: x}, view="same", put=unchanged)
functions("input", {(aten.lift_fresh_copy.default, aten.detach_copy.default): lambda x: x})
functions("input", {(aten.detach_.default,): ops.stop_gradient}, view="always")
functions("input", {(aten.numpy_T.default,): ops.permute}, view="always", put=lambda base, value: ops.permute(value))
functions(
    "input",
    {(aten.mT.default, aten.mH.default, aten.matrix_H.default): ops.transpose},
    view="always",
    put=lambda base, value: ops.transpose(value),
)


def stop_gradient(value: Any) -> Any:
    """What captures write behind a call with several results without gradients: its tensors, detached."""
    return tree_map(lambda t: t.detach() if isinstance(t, torch.Tensor) else t, value)


@rule(stop_gradient, view="always")
def stopped(value: Any) -> Any:
    return map_structure(value, lambda v: ops.stop_gradient(v) if isinstance(v, Tensor) else v)


LIBRARY = torch.library.Library("torch2needle", "FRAGMENT")
LIBRARY.define("straight_through(Tensor value, Tensor x) -> Tensor")
LIBRARY.impl("straight_through", lambda value, x: value.clone(), "CompositeExplicitAutograd")
torch.library.register_fake("torch2needle::straight_through")(lambda value, x: torch.empty_like(value))
torch.library.register_autograd("torch2needle::straight_through", lambda ctx, grad: (None, grad))
# What captures write for a value with gradients of its own: it goes on as it is, its gradient to x.
STRAIGHT_THROUGH = torch.ops.torch2needle.straight_through.default
functions("value, x", {(STRAIGHT_THROUGH,): ops.straight_through})


@rule(aten._local_scalar_dense.default, aten.item.default)
def item(input: Any) -> Any:
    """A number of floats stays a tensor of one element, without a gradient."""
    if input.dtype not in FLOATS:
        raise Unsupported("a whole number that a value says is not known at conversion")
    return ops.stop_gradient(ops.reshape(input, ()))


# -- indexing ------------------------------------------------------------------------------------------------------------


def span(start: Any, end: Any, step: int) -> slice:
    first = None if isinstance(start, int) and start == 0 else start
    return slice(first, None if isinstance(end, int) and end >= END else end, None if step == 1 else step)


@rule(
    aten.slice.Tensor,
    view="always",
    put=lambda base, value, dim=0, start=None, end=None, step=1: ops.setitem(
        base, at(dim, span(start, end, step)), value
    ),
)
def slice_tensor(input: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    part = span(start, end, step)
    whole = part.start is part.stop is part.step is None
    return input if whole else ops.getitem(input, at(dim, part))


def index_of(indices: Any) -> tuple:
    """aten's list of tensors, with None for whole axes, as torch's index."""
    items = [slice(None) if i is None else i for i in indices]
    while items and isinstance(items[-1], slice):
        items.pop()
    return tuple(items)


functions("input, indices", {(aten.index.Tensor,): lambda input, indices: getitem(input, index_of(indices))})


@rule(aten.index_put.default, aten.index_put_.default, torch.index_put, torch.Tensor.index_put, torch.Tensor.index_put_)
def index_put(input: Any, indices: Any, values: Any, accumulate: bool = False) -> Any:
    items = index_of(indices)
    return put_numbers(input, items, values, True) if accumulate else setitem(input, items, values)


@rule(aten.slice_scatter.default)
def slice_scatter(input: Any, src: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    return ops.setitem(input, at(dim, span(start, end, step)), src)


functions("input, split_sizes, dim=0", {(aten.split_with_sizes.default,): ops.split_sizes}, view="always", put=joined)


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


def resized(mode: str) -> Callable:
    name, _, antialias = mode.partition(", ")

    def upsample(input: Any, output_size: Any, align_corners: bool | None, scale_factors: Any) -> Any:
        factors = None if output_size is not None else scale_factors
        return ops.interpolate(input, output_size, factors, name, align_corners, antialias=bool(antialias))

    return upsample


functions(
    "input, output_size, align_corners=None, scale_factors=None",
    {tuple(getattr(aten, n).vec for n in names): resized(mode) for mode, names in MODES.items()},
)


def padded(mode: str) -> Callable:
    return lambda input, padding: ops.pad(input, tuple(padding), mode, None)


functions(
    "input, pad, value=0",
    {(aten.constant_pad_nd.default,): lambda input, pad, value: ops.pad(input, tuple(pad), "constant", value)},
)
functions(
    "input, padding",
    {
        (getattr(aten, f"{name}_pad{rank}d").default,): padded(mode)
        for name, mode in (("reflection", "reflect"), ("replication", "replicate"))
        for rank in (1, 2, 3)
    },
)
functions("input, kernel_size, dilation, padding, stride", {(aten.im2col.default,): ops.unfold})
functions("input, output_size, kernel_size, dilation, padding, stride", {(aten.col2im.default,): ops.fold})


# -- numbers -------------------------------------------------------------------------------------------------------------


functions("input, dim", {(aten.sym_size.int,): lambda x, dim: x.shape[dim]})
functions("input", {(aten.sym_numel.default,): lambda x: math.prod(x.shape)})
functions(
    "a, *, like=None",
    {
        (torch.sym_float,): lambda a, like: a * 1.0,
        (torch.sym_int, math.trunc): lambda a, like: math.trunc(a),
    },
)
functions("number, ndigits=None, *, like=None", {(round,): lambda number, ndigits, like: round(number, ndigits)})
functions("args, *, like=None", {(torch.sym_sum,): lambda args, like: sum(args)})
functions(
    "a, b, *, like=None",
    {
        (torch.sym_max,): lambda a, b, like: a.larger(b) if isinstance(a, Dim) else b.larger(a),
        (torch.sym_min,): lambda a, b, like: a.smaller(b) if isinstance(a, Dim) else b.smaller(a),
    },
)


@rule(aten.arange.default)
def arange(end: Any, *, dtype: Any = None, like: Any, **_: Any) -> Any:
    return creation.arange(end, dtype=dtype, like=like)

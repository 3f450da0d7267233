"""Rules of aten calls below autograd, which transforms of torch.func and traced TorchScript make."""

from __future__ import annotations

from typing import Any

import torch

from needle import ops
from needle.autograd import Unsupported

from .arithmetic import cast
from .indexing import setitem
from .norms import layer_norm
from .registry import rule
from .shapes import Absent, back_in_shape
from .tables import functions

aten = torch.ops.aten

functions(
    "input, size",
    {(aten._unsafe_view.default,): lambda input, size: ops.reshape(input, tuple(size))},
    view="always",
    put=back_in_shape,
)
functions(
    "input, dim, half_to_float",
    {
        (aten._softmax.default,): lambda input, dim, half_to_float: ops.softmax(input, dim),
        (aten._log_softmax.default,): lambda input, dim, half_to_float: ops.log_softmax(input, dim),
    },
)

PLAIN = {1: ops.conv1d, 2: ops.conv2d, 3: ops.conv3d}
TRANSPOSED = {1: ops.conv_transpose1d, 2: ops.conv_transpose2d, 3: ops.conv_transpose3d}


@rule(aten.convolution.default, aten._convolution.default)
def convolution(
    input: Any,
    weight: Any,
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: Any,
    **_: Any,  # of _convolution: how cuDNN chooses
) -> Any:
    rank = len(stride)
    given = [tuple(v) for v in (stride, padding, dilation, output_padding)]
    if transposed:
        return TRANSPOSED[rank](input, weight, bias, given[0], given[1], given[3], groups, given[2])
    return PLAIN[rank](input, weight, bias, *given[:3], groups)


@rule(aten.native_layer_norm.default)
def native_layer_norm(input: Any, normalized_shape: Any, weight: Any, bias: Any, eps: float) -> Any:
    kept = Absent("needle's norms return no statistics")
    return layer_norm(input, normalized_shape, weight, bias, eps), kept, kept


@rule(aten.diagonal_scatter.default, torch.diagonal_scatter, torch.Tensor.diagonal_scatter)
def diagonal_scatter(input: Any, src: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    rank = input.ndim
    last = [d % rank for d in (dim1, dim2)]
    order = [d for d in range(rank) if d not in last] + last
    step = ops.arange_like(input, 0, src.shape[-1])
    place = (Ellipsis, step + max(-offset, 0), step + max(offset, 0))
    return ops.permute(setitem(ops.permute(input, tuple(order)), place, src), tuple(map(order.index, range(rank))))


@rule(aten._to_copy.default, view="maybe")
def to_copy(input: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> Any:
    if device is not None and device.type == "meta":
        raise Unsupported("a tensor on the device meta has no values")
    return cast(input, dtype)


functions("input", {(aten._is_all_true.default,): ops.every, (aten._is_any_true.default,): ops.some})

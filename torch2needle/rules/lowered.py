"""Rules of aten calls below autograd, which transforms of torch.func and traced TorchScript make."""

from __future__ import annotations

from typing import Any

import torch

from needle import ops
from needle.autograd import Unsupported

from .arithmetic import cast
from .creation import filled
from .norms import layer_norm
from .registry import complex_rule, rule
from .shapes import back_in_shape
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


def moments(x: Any, axes: Any, eps: float) -> tuple[Any, Any]:
    """Mean and 1 / sqrt(var + eps), as norms save them; left out of graphs that read neither."""
    return ops.mean(x, axes, keepdims=True), ops.rsqrt(ops.variance(x, axes, 0, True) + eps)


@rule(aten.native_layer_norm.default)
def native_layer_norm(input: Any, normalized_shape: Any, weight: Any, bias: Any, eps: float) -> Any:
    last = tuple(range(-len(normalized_shape), 0))
    return (layer_norm(input, normalized_shape, weight, bias, eps), *moments(input, last, eps))


@rule(aten.native_group_norm.default)
def native_group_norm(input: Any, weight: Any, bias: Any, N: Any, C: Any, HxW: Any, group: int, eps: float) -> Any:
    rows = ops.reshape(input, (N, group, C // group * HxW))
    saved = [ops.squeeze(t, -1) for t in moments(rows, -1, eps)]
    return (ops.group_norm(input, group, weight, bias, eps), *saved)


def batch_norm(input: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, eps: float) -> Any:
    """The result and, in training, what the call saves; in evaluation torch's CPU saves nothing."""
    if not training:
        empty = ops.full_like(input, 0, (0,))
        return ops.batch_norm(input, mean, var, weight, bias, False, 0.0, eps), empty, empty
    if mean is not None:
        raise Unsupported("training=True moves running statistics in evaluation, too; pass training=self.training")
    axes = (0, *range(2, input.ndim))
    saved = [ops.reshape(t, (-1,)) for t in moments(input, axes, eps)]
    return (ops.batch_norm(input, None, None, weight, bias, True, 0.0, eps), *saved)


functions(
    "input, weight, bias, running_mean, running_var, training, momentum, eps",
    {
        (aten._native_batch_norm_legit.default, torch.native_batch_norm): lambda x, w, b, mean, var, training, _, eps: (
            batch_norm(x, w, b, mean, var, training, eps)
        )
    },
)
functions(
    "input, weight, bias, training, momentum, eps",
    {
        (aten._native_batch_norm_legit.no_stats,): lambda x, w, b, training, _, eps: batch_norm(
            x, w, b, None, None, True, eps
        )
    },
)
functions(
    "input, weight, bias, running_mean, running_var, momentum, eps",
    {
        (aten._native_batch_norm_legit_no_training.default,): lambda x, w, b, mean, var, _, eps: batch_norm(
            x, w, b, mean, var, False, eps
        )
    },
)


# -- what calls become below autograd ------------------------------------------------------------------------------------


functions(
    "input, output_size",
    {
        (aten._adaptive_avg_pool2d.default,): ops.adaptive_avg_pool2d,
        (aten._adaptive_avg_pool3d.default,): ops.adaptive_avg_pool3d,
    },
)
functions("x1, x2, p, compute_mode", {(aten._cdist_forward.default,): lambda a, b, p, _: ops.cdist(a, b, p)})
functions("input, p=2.0", {(aten._pdist_forward.default,): ops.pdist})
functions(
    "size, stride, *, dtype=None, like, **_",
    {
        (aten.empty_strided.default,): lambda size, stride, dtype, like: filled(
            like, 0, tuple(size), dtype or torch.float32
        )
    },
)


@rule(aten.native_dropout.default)
def native_dropout(input: Any, p: float, train: bool | None) -> Any:
    if train is not False:
        raise Unsupported("train=True holds in evaluation, too, and draws random numbers")
    return input, ops.cast(ops.full_like(input, 1), "bool")


NORMS = (None, "ortho", "forward")  # of a transform there, by aten's number
BACK = NORMS[::-1]  # of one the way back, which is unscaled where that there has no norm


@rule(aten._fft_r2c.default)
def fft_r2c(input: Any, dim: Any, normalization: int, onesided: bool) -> Any:
    transform = ops.rfftn if onesided else ops.fftn
    return transform(input, None, tuple(dim), NORMS[normalization])


@complex_rule(aten._fft_c2c.default)
def fft_c2c(input: Any, dim: Any, normalization: int, forward: bool) -> Any:
    if forward:
        return ops.fftn(input, None, tuple(dim), NORMS[normalization])
    return ops.ifftn(input, None, tuple(dim), BACK[normalization])


@complex_rule(aten._fft_c2r.default)
def fft_c2r(input: Any, dim: Any, normalization: int, last_dim_size: Any) -> Any:
    axes = tuple(dim)
    sizes = [input.shape[d] for d in axes[:-1]] + [last_dim_size]
    return ops.irfftn(input, tuple(sizes), axes, BACK[normalization])


@rule(aten._trilinear.default)
def trilinear(
    i1: Any, i2: Any, i3: Any, expand1: Any, expand2: Any, expand3: Any, sumdim: Any, unroll_dim: int = 1
) -> Any:
    """The sum of products of three tensors, each with new axes at those places."""
    product = None
    for t, places in ((i1, expand1), (i2, expand2), (i3, expand3)):
        for axis in sorted(places):
            t = ops.unsqueeze(t, axis)
        product = t if product is None else product * t
    return ops.summation(product, tuple(sumdim))


@rule(aten._to_copy.default, view="maybe")
def to_copy(input: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> Any:
    if device is not None and device.type == "meta":
        raise Unsupported("a tensor on the device meta has no values")
    return cast(input, dtype)


functions("input", {(aten._is_all_true.default,): ops.every, (aten._is_any_true.default,): ops.some})

"""Rules of aten's gradients, which transforms of torch.func and programs lowered below autograd call by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from needle import ops
from needle.ops.nn.embedding import embedding_grad
from needle.ops.nn.sampling import CDist, PDist
from needle.ops.pulled_back import PulledBack, pulled_back

from .lowered import convolution
from .pooling import windows
from .registry import rule
from .sampling import MODES, PADDINGS
from .shapes import Absent
from .tables import functions

aten = torch.ops.aten
UNASKED = Absent("the call does not ask for this gradient")


@rule(aten.convolution_backward.default)
def convolution_backward(
    grad_output: Any,
    input: Any,
    weight: Any,
    bias_sizes: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
    output_mask: Any,
) -> Any:
    def forward(x: Any, w: Any) -> Any:
        return convolution(x, w, None, stride, padding, dilation, transposed, output_padding, groups)

    of_input, of_weight = pulled_back(forward, grad_output, input, weight)
    of_bias = ops.summation(grad_output, (0, *range(2, 2 + len(stride)))) if output_mask[2] else UNASKED
    return (*(g if asked else UNASKED for g, asked in zip((of_input, of_weight), output_mask, strict=False)), of_bias)


def pulling(f: Callable) -> Callable:
    """The gradient of f's first argument as a call of aten's, which gets that of f's result before f's arguments."""
    return lambda grad, x, *rest: pulled_back(lambda x: f(x, *rest), grad, x)[0]


def averaged(grad: Any, x: Any, n: int) -> Any:
    pool = (ops.adaptive_avg_pool1d, ops.adaptive_avg_pool2d, ops.adaptive_avg_pool3d)[n - 1]
    return pulled_back(lambda x: pool(x, tuple(grad.shape[i - n] for i in range(n))), grad, x)[0]


def by_places(grad: Any, x: Any, places: Any, n: int) -> Any:
    """Of maxima over the last n axes at these places: of several windows with one maximum, their gradients add up."""
    flat, places, grad = (ops.flatten(t, -n) for t in (ops.full_like(x, 0.0), places, grad))
    return ops.reshape_like(ops.scatter(flat, -1, places, grad, "sum"), x)


def by_window_places(grad: Any, x: Any, *window_and_places: Any, n: int) -> Any:
    return by_places(grad, x, window_and_places[-1], n)


for _n in (1, 2, 3):
    functions(
        "grad_output, input, padding",
        {
            (getattr(aten, f"replication_pad{_n}d_backward").default,): pulling(
                lambda x, padding: ops.pad(x, tuple(padding), "replicate")
            )
        },
    )
for _n in (2, 3):
    functions(
        "grad_output, input, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override",
        {(getattr(aten, f"avg_pool{_n}d_backward").default,): pulling(windows(getattr(ops, f"avg_pool{_n}d")))},
    )
    functions(
        "grad_output, input", {(getattr(aten, f"_adaptive_avg_pool{_n}d_backward").default,): partial(averaged, n=_n)}
    )
    functions(
        "grad_output, input, indices",
        {(getattr(aten, f"adaptive_max_pool{_n}d_backward").default,): partial(by_places, n=_n)},
    )
    functions(
        "grad_output, input, kernel_size, stride, padding, dilation, ceil_mode, indices",
        {(getattr(aten, f"max_pool{_n}d_with_indices_backward").default,): partial(by_window_places, n=_n)},
    )
functions(
    "grad, input, p, pdist", {(aten._pdist_backward.default,): lambda grad, x, p, _: PulledBack(PDist(p), 0)(x, grad)}
)
functions(
    "grad, x1, x2, p, cdist",
    {(aten._cdist_backward.default,): lambda grad, a, b, p, _: PulledBack(CDist(p), 0)(a, b, grad)},
)


@rule(aten.grid_sampler_2d_backward.default, aten.grid_sampler_3d_backward.default)
def grid_sampler_backward(
    grad_output: Any,
    input: Any,
    grid: Any,
    interpolation_mode: int,
    padding_mode: int,
    align_corners: bool,
    output_mask: Any,
) -> Any:
    how = (MODES[interpolation_mode], PADDINGS[padding_mode], align_corners)
    grads = pulled_back(lambda x, grid: ops.grid_sample(x, grid, *how), grad_output, input, grid)
    return asked_for(grads, output_mask)


@rule(aten.embedding_dense_backward.default)
def embedding_backward(
    grad_output: Any, indices: Any, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> Any:
    return embedding_grad(indices, grad_output, num_weights, padding_idx, scale_grad_by_freq)


def norm_backward(grad: Any, input: Any, mean: Any, rstd: Any, axes: tuple) -> tuple[Any, Any]:
    """The gradient of (input - mean) * rstd's input, and the normalised input itself; grad is that of the result."""
    normal = (input - mean) * rstd
    rest = grad - ops.mean(grad, axes, keepdims=True) - normal * ops.mean(grad * normal, axes, keepdims=True)
    return rest * rstd, normal


def asked_for(grads: tuple, mask: Any) -> tuple:
    return tuple(g if asked and g is not None else UNASKED for g, asked in zip(grads, mask, strict=True))


@rule(aten.native_layer_norm_backward.default)
def layer_norm_backward(
    grad_out: Any, input: Any, normalized_shape: Any, mean: Any, rstd: Any, weight: Any, bias: Any, output_mask: Any
) -> Any:
    count = len(normalized_shape)
    grad = grad_out if weight is None else grad_out * weight
    of_input, normal = norm_backward(grad, input, mean, rstd, tuple(range(-count, 0)))
    first = tuple(range(input.ndim - count))
    sums = [ops.summation(t, first) if first else t for t in (grad_out * normal, grad_out)]
    return asked_for((of_input, *sums), output_mask)


@rule(aten.native_group_norm_backward.default)
def group_norm_backward(
    grad_out: Any,
    input: Any,
    mean: Any,
    rstd: Any,
    weight: Any,
    N: Any,
    C: Any,
    HxW: Any,
    group: int,
    output_mask: Any,
) -> Any:
    shape = (N, group, C // group, HxW)
    x, dy = ops.reshape(input, shape), ops.reshape(grad_out, shape)
    mean, rstd = (ops.unsqueeze(ops.unsqueeze(ops.reshape(t, (N, group)), -1), -1) for t in (mean, rstd))
    grad = dy if weight is None else dy * ops.reshape(weight, (group, C // group, 1))
    of_input, normal = norm_backward(grad, x, mean, rstd, (2, 3))
    sums = [ops.reshape(ops.summation(t, (0, 3)), (C,)) for t in (dy * normal, dy)]
    return asked_for((ops.reshape_like(of_input, input), *sums), output_mask)

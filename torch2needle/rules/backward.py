"""Rules of aten's gradients, which transforms of torch.func and programs lowered below autograd call by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from needle import ops
from needle.autograd import Tensor, vjp
from needle.ops.nn.embedding import EmbeddingGrad

from .embedding import check
from .lowered import convolution
from .pooling import windows
from .registry import rule
from .shapes import Absent
from .tables import functions

aten = torch.ops.aten
UNASKED = Absent("the call does not ask for this gradient")


def leaf(t: Tensor) -> Tensor:
    """The same value at which a gradient ends."""
    made = copy.copy(t)
    made.op, made.inputs, made.requires_grad = None, (), True
    return made


def pulled_back(f: Callable, out_grad: Any, *inputs: Any) -> tuple[Any, ...]:
    """The gradients of f's inputs, from its result's."""
    given = [leaf(t) for t in inputs]
    recorder = given[0].recorder
    before, recorder.trains = (
        recorder.trains,
        True,
    )  # so that ops without a gradient of their own are what they are made of
    try:
        return vjp(f(*given), out_grad, given)
    finally:
        recorder.trains = before


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


@rule(aten.avg_pool2d_backward.default)
def avg_pool2d_backward(
    grad_output: Any,
    input: Any,
    kernel_size: Any,
    stride: Any,
    padding: Any,
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Any:
    options = (padding, ceil_mode, count_include_pad, divisor_override)
    return pulled_back(lambda x: windows(ops.avg_pool2d)(x, kernel_size, stride, *options), grad_output, input)[0]


functions(
    "grad_output, input",
    {
        (aten._adaptive_avg_pool2d_backward.default,): lambda grad, x: pulled_back(
            lambda x: ops.adaptive_avg_pool2d(x, tuple(grad.shape[-2:])), grad, x
        )[0]
    },
)


@rule(aten.max_pool2d_with_indices_backward.default)
def max_pool2d_backward(
    grad_output: Any,
    input: Any,
    kernel_size: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    ceil_mode: bool,
    indices: Any,
) -> Any:
    """By the places that the call has: of several windows with one maximum, their gradients add up."""
    flat = ops.flatten(input * 0, -2)
    made = ops.scatter(flat, -1, ops.flatten(indices, -2), ops.flatten(grad_output, -2), "sum")
    return ops.reshape_like(made, input)


@rule(aten.embedding_dense_backward.default)
def embedding_backward(
    grad_output: Any, indices: Any, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> Any:
    check(None, scale_grad_by_freq, False)
    return EmbeddingGrad(num_weights, padding_idx)(indices, grad_output)


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

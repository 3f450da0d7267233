"""Gradients of `torch.ops.needle.*`, in torch's own operations, so that they have gradients themselves and compile.

Where an activation's slope cannot be told from its result (GELU, SiLU and others), the op runs without it and torch adds it, so
that nothing is computed twice. A convolution with a batch norm by given statistics is one with folded weights: its gradients
are those of the folded one by the chain rule.
"""

from __future__ import annotations

from typing import Any

import torch

aten = torch.ops.aten
Maybe = torch.Tensor | None

FROM_OUTPUT = {
    "none": lambda g, y: g,
    "relu": lambda g, y: aten.threshold_backward(g, y, 0),
    "relu6": lambda g, y: aten.hardtanh_backward(g, y, 0, 6),
    "sigmoid": lambda g, y: aten.sigmoid_backward(g, y),
    "tanh": lambda g, y: aten.tanh_backward(g, y),
}


def through_activation(ctx: Any, grad: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """The gradient before the activation."""
    return FROM_OUTPUT[ctx.activation](grad, output)


def keep(ctx: Any, tensors: tuple, output: torch.Tensor, activation: str) -> None:
    ctx.activation = activation
    ctx.save_for_backward(*tensors, output)


def refuse_statistics(op: str, mean: torch.Tensor, var: torch.Tensor) -> None:
    if mean.requires_grad or var.requires_grad:
        raise RuntimeError(f"[{op}] running_mean and running_var have no gradient, as in torch.")


# ---- linear ----------------------------------------------------------------------------------------------------------


def setup_linear(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
    x, weight, _, activation, _ = inputs
    keep(ctx, (x, weight), output, activation)


def linear_backward(ctx: Any, grad: torch.Tensor) -> tuple:
    x, weight, y = ctx.saved_tensors
    g = through_activation(ctx, grad, y)
    rows = g.reshape(-1, weight.shape[0])
    grad_x = grad_weight = grad_bias = None
    if ctx.needs_input_grad[0]:
        grad_x = (rows @ weight).reshape(x.shape)
    if ctx.needs_input_grad[1]:
        grad_weight = rows.t() @ x.reshape(-1, weight.shape[1])
    if ctx.needs_input_grad[2]:
        grad_bias = rows.sum(0)
    return grad_x, grad_weight, grad_bias, None, None


# ---- convolutions ----------------------------------------------------------------------------------------------------


def convolution_backward(
    g: torch.Tensor, x: torch.Tensor, w: torch.Tensor, conv: tuple, transposed: bool, mask: tuple[bool, bool, bool]
) -> tuple[Maybe, Maybe, Maybe]:
    """Gradients of x, w and bias; conv: stride, padding, dilation, output padding, groups."""
    stride, padding, dilation, output_padding, groups = conv
    return aten.convolution_backward(
        g, x, w, [g.shape[1]], stride, padding, dilation, transposed, output_padding, groups, mask
    )


def setup_conv2d(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
    x, w, _, *ctx.geometry, activation, _ = inputs
    keep(ctx, (x, w), output, activation)


def conv2d_backward(ctx: Any, grad: torch.Tensor) -> tuple:
    x, w, y = ctx.saved_tensors
    stride, padding, dilation, groups = ctx.geometry
    g = through_activation(ctx, grad, y)
    conv = (stride, padding, dilation, [0, 0], groups)
    return *convolution_backward(g, x, w, conv, False, ctx.needs_input_grad[:3]), *[None] * 6


def transposed_backward(ctx: Any, grad: torch.Tensor) -> tuple:
    x, w, y = ctx.saved_tensors
    stride, padding, output_padding, groups, dilation = ctx.geometry
    g = through_activation(ctx, grad, y)
    conv = (stride, padding, dilation, output_padding, groups)
    return *convolution_backward(g, x, w, conv, True, ctx.needs_input_grad[:3]), *[None] * 7


# ---- batch norm ------------------------------------------------------------------------------------------------------


def setup_conv2d_bn(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
    x, w, bias, mean, var, gamma, _, *ctx.geometry, ctx.eps, activation, _ = inputs
    refuse_statistics("conv2d_bn_act", mean, var)
    keep(ctx, (x, w, bias, mean, var, gamma), output, activation)


def conv2d_bn_backward(ctx: Any, grad: torch.Tensor) -> tuple:
    x, w, bias, mean, var, gamma, y = ctx.saved_tensors
    stride, padding, dilation, groups = ctx.geometry
    needs_x, needs_w, needs_bias, _, _, needs_gamma, needs_beta = ctx.needs_input_grad[:7]
    g = through_activation(ctx, grad, y)
    inverse = (var + ctx.eps).rsqrt()
    scale = inverse if gamma is None else gamma * inverse
    conv = (stride, padding, dilation, [0, 0], groups)
    grad_x = grad_w = grad_gamma = None
    if needs_x:
        grad_x = convolution_backward(g * scale.reshape(-1, 1, 1), x, w, conv, False, (True, False, False))[0]
    _, of_folded, of_shift = convolution_backward(g, x, w, conv, False, (False, needs_w or needs_gamma, True))
    if needs_w:
        grad_w = of_folded * scale.reshape(-1, 1, 1, 1)
    if needs_gamma:  # the sum of g (conv(x, w) - mean), without another pass over the images
        offset = -mean if bias is None else bias - mean
        grad_gamma = ((of_folded * w).sum((1, 2, 3)) + of_shift * offset) * inverse
    grad_bias = of_shift * scale if needs_bias else None
    return grad_x, grad_w, grad_bias, None, None, grad_gamma, of_shift if needs_beta else None, *[None] * 7


def setup_batch_norm(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
    x, mean, var, gamma, _, ctx.eps, activation, _ = inputs
    refuse_statistics("batch_norm_act", mean, var)
    keep(ctx, (x, mean, var, gamma), output, activation)


def batch_norm_backward(ctx: Any, grad: torch.Tensor) -> tuple:
    x, mean, var, gamma, y = ctx.saved_tensors
    g = through_activation(ctx, grad, y)
    needs = [ctx.needs_input_grad[i] for i in (0, 3, 4)]
    if x.numel() == 0:  # torch's function below would divide by zero
        zeros = [torch.zeros_like(t) if needed else None for t, needed in zip((x, var, var), needs, strict=True)]
        return zeros[0], None, None, zeros[1], zeros[2], None, None, None
    grad_x, grad_gamma, grad_beta = aten.native_batch_norm_backward(
        g, x, gamma, mean, var, None, None, False, ctx.eps, needs
    )
    return grad_x, None, None, grad_gamma, grad_beta, None, None, None


LINEAR = (setup_linear, linear_backward)
CONV2D = (setup_conv2d, conv2d_backward)
CONV2D_BN = (setup_conv2d_bn, conv2d_bn_backward)
TRANSPOSED = (setup_conv2d, transposed_backward)
BATCH_NORM = (setup_batch_norm, batch_norm_backward)

"""Gradients of `torch.ops.needle.*`.

First derivatives in float32 on a CPU are needle's (`torch.ops.needle_gradients.*`, csrc/torch/gradients.cpp) where torch's are
not faster; others are in torch's own operations, so that they have gradients themselves. Where an activation's slope cannot be
told from its result (GELU, SiLU and others), the op runs without it and torch adds it, so that nothing is computed twice. A
convolution with a batch norm by given statistics is one with folded weights: its gradients are those of the folded one by the
chain rule.
"""

from __future__ import annotations

import math
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


def has_kernel(*tensors: torch.Tensor) -> bool:
    """Whether needle's own derivative does: nothing differentiates or maps it, and all of it is float32 on a CPU."""
    functorch = torch._C._functorch
    if (
        torch.is_grad_enabled()
        or torch._C._are_functorch_transforms_active()
        or functorch.is_legacy_batchedtensor(tensors[0])
    ):
        return False
    return all(t.dtype is torch.float32 and t.is_cpu and t.numel() > 0 for t in tensors)


def kernel(name: str) -> Any:
    return getattr(torch.ops.needle_gradients, name).default


def spread(given: Any, needed: tuple[bool, ...]) -> list[Maybe]:
    """The gradients of those that need one, and None for the others."""
    found = iter(given)
    return [next(found) if n else None for n in needed]


def bits(needed: tuple[bool, ...]) -> int:
    return sum(n << i for i, n in enumerate(needed))


def refuse_statistics(op: str, mean: torch.Tensor, var: torch.Tensor) -> None:
    if mean.requires_grad or var.requires_grad:
        raise RuntimeError(f"[{op}] running_mean and running_var have no gradient, as in torch.")


# ---- linear ----------------------------------------------------------------------------------------------------------


def setup_linear(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
    x, weight, _, activation, _ = inputs
    keep(ctx, (x, weight), output, activation)


def linear_backward(ctx: Any, grad: torch.Tensor) -> tuple:
    x, weight, y = ctx.saved_tensors
    needed = ctx.needs_input_grad[:3]
    if has_kernel(grad, x, weight):
        rows, outputs = x.reshape(-1, x.shape[-1]), y.reshape(-1, weight.shape[0])
        found = kernel("linear_bias_act")(
            grad.reshape(outputs.shape), rows, weight, outputs, ctx.activation, bits(needed)
        )
        grads = spread(found, needed)
        if grads[0] is not None:
            grads[0] = grads[0].reshape(x.shape)
        return *grads, None, None
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
) -> tuple[Any, Any, Any]:
    """Gradients of x, w and bias, those of the mask; conv: stride, padding, dilation, output padding, groups."""
    stride, padding, dilation, output_padding, groups = conv
    return aten.convolution_backward(
        g, x, w, [g.shape[1]], stride, padding, dilation, transposed, output_padding, groups, mask
    )


def torch_is_faster(x: torch.Tensor, stride: list[int], groups: int) -> tuple[bool, bool]:
    """For the gradient of x, and for those of the weight and the bias."""
    channels = x.shape[1]
    last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    depthwise = last and groups == channels > 1
    return depthwise or (channels < 16 and max(stride) > 1), depthwise


def setup_conv2d(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
    x, w, _, *ctx.geometry, activation, _ = inputs
    keep(ctx, (x, w), output, activation)


def conv2d_backward(ctx: Any, grad: torch.Tensor) -> tuple:
    x, w, y = ctx.saved_tensors
    stride, padding, dilation, groups = ctx.geometry
    needed = ctx.needs_input_grad[:3]
    own = (False, False, False)
    if has_kernel(grad, x, w):
        theirs, all_theirs = torch_is_faster(x, stride, groups)
        own = (needed[0] and not theirs, needed[1] and not all_theirs, needed[2] and not all_theirs)
    found: list[Maybe] = [None] * 3
    if any(own):
        operands = (grad, x, w, y, stride, padding, dilation, groups, ctx.activation)
        found = spread(kernel("conv2d_bias_act")(*operands, bits(own)), own)
    if own != needed:
        g = through_activation(ctx, grad, y)
        conv = (stride, padding, dilation, [0, 0], groups)
        (of_x, of_w, of_bias), (own_x, own_w, own_bias) = needed, own
        mask = (of_x and not own_x, of_w and not own_w, of_bias and not own_bias)
        rest = convolution_backward(g, x, w, conv, False, mask)
        found = [o if r is None else r for o, r in zip(found, rest, strict=True)]
    return *found, *[None] * 6


def transposed_backward(ctx: Any, grad: torch.Tensor) -> tuple:
    x, w, y = ctx.saved_tensors
    stride, padding, output_padding, groups, dilation = ctx.geometry
    needed = ctx.needs_input_grad[:3]
    if has_kernel(grad, x, w):
        found = kernel("conv_transpose2d_bias_act")(
            grad, x, w, y, stride, padding, dilation, groups, ctx.activation, bits(needed)
        )
        return *spread(found, needed), *[None] * 7
    g = through_activation(ctx, grad, y)
    conv = (stride, padding, dilation, output_padding, groups)
    return *convolution_backward(g, x, w, conv, True, needed), *[None] * 7


# ---- batch norm ------------------------------------------------------------------------------------------------------


def scale_of(var: torch.Tensor, gamma: Maybe, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """What a batch norm multiplies by, and that without its weight."""
    inverse = (var + eps).rsqrt()
    return inverse if gamma is None else gamma * inverse, inverse


def input_gradient(
    g: torch.Tensor, x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor, conv: tuple
) -> torch.Tensor | None:
    return convolution_backward(g * scale.reshape(-1, 1, 1), x, w, conv, False, (True, False, False))[0]


def setup_conv2d_bn(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
    x, w, bias, mean, var, gamma, _, *ctx.geometry, ctx.eps, activation, _ = inputs
    refuse_statistics("conv2d_bn_act", mean, var)
    keep(ctx, (x, w, bias, mean, var, gamma), output, activation)


def conv2d_bn_backward(ctx: Any, grad: torch.Tensor) -> tuple:
    x, w, bias, mean, var, gamma, y = ctx.saved_tensors
    stride, padding, dilation, groups = ctx.geometry
    needs_x, needs_w, needs_bias, _, _, needs_gamma, needs_beta = ctx.needs_input_grad[:7]
    conv = (stride, padding, dilation, [0, 0], groups)
    if has_kernel(grad, x, w):
        found: list[Maybe] = [None] * 5
        theirs = needs_x and torch_is_faster(x, stride, 1)[0]
        needed = (needs_x and not theirs, needs_w, needs_bias, needs_gamma, needs_beta)
        operands = (grad, x, w, bias, mean, var, gamma, y, *ctx.geometry, ctx.eps, ctx.activation)
        if any(needed):
            found = spread(kernel("conv2d_bn_act")(*operands, bits(needed)), needed)
        if theirs:
            g = through_activation(ctx, grad, y)
            found[0] = input_gradient(g, x, w, scale_of(var, gamma, ctx.eps)[0], conv)
        return *found[:3], None, None, *found[3:], *[None] * 7
    g = through_activation(ctx, grad, y)
    scale, inverse = scale_of(var, gamma, ctx.eps)
    grad_x: Maybe = None
    grad_w = grad_gamma = None
    if needs_x:
        grad_x = input_gradient(g, x, w, scale, conv)
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
    last = x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    # torch misreads a gradient in another layout than x
    g = g.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
    grad_x, grad_gamma, grad_beta = aten.native_batch_norm_backward(
        g, x, gamma, mean, var, None, None, False, ctx.eps, needs
    )
    return grad_x, None, None, grad_gamma, grad_beta, None, None, None


# ---- attention -------------------------------------------------------------------------------------------------------


def setup_attention(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
    query, key, value, mask, ctx.is_causal, ctx.scale = inputs
    ctx.save_for_backward(query, key, value, mask)


def attention_backward(ctx: Any, grad: torch.Tensor) -> tuple:
    query, key, value, mask = ctx.saved_tensors
    if has_kernel(grad, query, key, value):
        found = kernel("attention")(grad, query, key, value, mask, ctx.is_causal, ctx.scale)
    else:
        scale = max(1, query.shape[-1]) ** -0.5 if ctx.scale is None else ctx.scale
        scores = query @ key.transpose(-1, -2) * scale
        if ctx.is_causal:
            scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), -math.inf)
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
        nothing = (scores == -math.inf).all(-1, keepdim=True)  # a query that sees no key
        p = scores.masked_fill(nothing, 0).softmax(-1).masked_fill(nothing, 0)
        slope = grad @ value.transpose(-1, -2)
        slope = p * (slope - (p * slope).sum(-1, keepdim=True)) * scale
        found = slope @ key, slope.transpose(-1, -2) @ query, p.transpose(-1, -2) @ grad
    return *(g if n else None for g, n in zip(found, ctx.needs_input_grad[:3], strict=True)), None, None, None


LINEAR = (setup_linear, linear_backward)
CONV2D = (setup_conv2d, conv2d_backward)
CONV2D_BN = (setup_conv2d_bn, conv2d_bn_backward)
TRANSPOSED = (setup_conv2d, transposed_backward)
BATCH_NORM = (setup_batch_norm, batch_norm_backward)
ATTENTION = (setup_attention, attention_backward)

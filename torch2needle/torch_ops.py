"""`torch.ops.needle.*`: needle's fused kernels inside PyTorch. Importing this module loads and registers them.

linear_relu, linear_bias_act, conv2d_bias_relu, conv2d_bias_act, conv2d_bn_relu, conv2d_bn_act, conv_transpose2d_bias_act,
batch_norm_relu, batch_norm_act, attention: arguments as in torch.nn.functional, activations as in needle
(`needle.ops.activation.CODES`), batch norms by their running statistics. float32 runs in needle's kernels; other dtypes, and
devices without the kernel, run the unfused form (`torch.ops.needle_unfused.*`). All have gradients and shapes without data, and
run in float32 under autocast. csrc/torch/README.md says more.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import needle
from needle import _core

from .bridges import torch_gradients

NEEDLE, UNFUSED = torch.ops.needle, torch.ops.needle_unfused
LIBRARY = Path(needle.__file__).parent / "libneedle_torch.so"
GPU_LIBRARY = "libneedle_hip.so" if torch.version.hip else "libneedle_cuda.so"


def layout_of(x: torch.Tensor) -> torch.memory_format:
    """The layout of results: channels last where images x have them so, unless x is dense the other way, too."""
    last = x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return torch.channels_last if last else torch.contiguous_format


def images(x: torch.Tensor, *size: Any) -> torch.Tensor:
    return torch.empty(size, dtype=x.dtype, device=x.device, memory_format=layout_of(x))


WINOGRAD = {"auto": 4, "f2": 2, "off": 0}


def set_winograd(winograd: str) -> None:
    """Which of Winograd's algorithms this process may use on CPUs: "auto" (any), "f2" or "off", as for `needle.compile`."""
    if winograd not in WINOGRAD:
        raise ValueError(f'[set_winograd] expected "auto", "f2" or "off", got {winograd!r}.')
    ctypes.CDLL(str(LIBRARY)).needle_torch_winograd(WINOGRAD[winograd])


# ---- shapes without data ---------------------------------------------------------------------------------------------


def linear_shape(input, weight, *_):
    return input.new_empty((*input.shape[:-1], weight.shape[0]))


def conv2d_shape(input, weight, bias, stride, padding, dilation, *_):
    pairs = zip(input.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
    size = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in pairs]
    return images(input, input.shape[0], weight.shape[0], *size)


def conv2d_bn_shape(input, weight, bias, running_mean, running_var, bn_weight, bn_bias, *geometry):
    return conv2d_shape(input, weight, bias, *geometry)


def conv_transpose2d_shape(input, weight, bias, stride, padding, output_padding, groups, dilation, *_):
    pairs = zip(input.shape[2:], weight.shape[2:], stride, padding, dilation, output_padding, strict=True)
    size = [(n - 1) * s - 2 * p + d * (k - 1) + o + 1 for n, k, s, p, d, o in pairs]
    return images(input, input.shape[0], weight.shape[1] * groups, *size)


def batch_norm_shape(input, *_):
    return images(input, *input.shape)


def attention_shape(query, key, value, *_):
    size = (*query.shape[:-1], value.shape[-1])
    if query.ndim != 4:
        return query.new_empty(size)
    return query.new_empty((size[0], size[2], size[1], size[3])).transpose(1, 2)


def needed_of(needs: int, shapes: tuple[Callable, ...]) -> list[torch.Tensor]:
    return [shape() for i, shape in enumerate(shapes) if needs >> i & 1]


def linear_gradients(grad, input, weight, output, activation, needs):
    vector = partial(weight.new_empty, weight.shape[:1])
    return needed_of(needs, (partial(input.new_empty, input.shape), partial(weight.new_empty, weight.shape), vector))


def conv_gradients(grad, input, weight, output, *rest):
    vector = partial(weight.new_empty, output.shape[1:2])
    return needed_of(rest[-1], (partial(images, input, *input.shape), partial(weight.new_empty, weight.shape), vector))


def conv2d_bn_gradients(grad, input, weight, *rest):
    vector = partial(weight.new_empty, weight.shape[:1])
    shapes = (partial(images, input, *input.shape), partial(weight.new_empty, weight.shape), vector, vector, vector)
    return needed_of(rest[-1], shapes)


def attention_gradients(grad, *operands):
    likes = [torch.empty_like(t) for t in operands[:3]]
    return [t if t.stride(-1) == 1 else t.new_empty(t.shape) for t in likes]


# ---- unfused forms, in the layout of the fused ones ------------------------------------------------------------------


def activate(x: torch.Tensor, activation: str, alpha: float = 0.0) -> torch.Tensor:
    if activation == "none":
        return x
    if activation == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    if activation in ("leaky_relu", "elu"):
        return getattr(F, activation)(x, alpha)
    return getattr(torch, activation)(x) if activation in ("relu", "sigmoid", "tanh") else getattr(F, activation)(x)


def unfused_linear(input, weight, bias, *activation):
    return activate(F.linear(input, weight, bias).contiguous(), *activation)


def unfused_conv2d(input, weight, bias, stride, padding, dilation, groups, *activation):
    y = F.conv2d(input, weight, bias, stride, padding, dilation, groups)
    return activate(y.contiguous(memory_format=layout_of(input)), *activation)


def unfused_conv2d_bn(
    input, weight, bias, mean, var, gamma, beta, stride, padding, dilation, groups, *eps_and_activation
):
    y = unfused_conv2d(input, weight, bias, stride, padding, dilation, groups, "none")
    return unfused_batch_norm(y, mean, var, gamma, beta, *eps_and_activation)


def unfused_conv_transpose2d(input, weight, bias, stride, padding, output_padding, groups, dilation, *activation):
    y = F.conv_transpose2d(input, weight, bias, stride, padding, output_padding, groups, dilation)
    return activate(y.contiguous(memory_format=layout_of(input)), *activation)


def unfused_batch_norm(input, mean, var, weight, bias, eps, *activation):
    y = F.batch_norm(input, mean, var, weight, bias, False, 0.0, eps)
    return activate(y.contiguous(memory_format=layout_of(input)), *activation)


def unfused_attention(query, key, value, attn_mask, is_causal, scale):
    if attn_mask is not None and attn_mask.ndim < 2:
        attn_mask = attn_mask.expand(1, key.shape[-2])
    if is_causal and attn_mask is not None:  # torch takes one of the two
        seen = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        attn_mask = attn_mask & seen if attn_mask.dtype == torch.bool else attn_mask.masked_fill(~seen, -math.inf)
        is_causal = False
    y = F.scaled_dot_product_attention(query, key, value, attn_mask, 0.0, is_causal, scale=scale)
    return y.transpose(1, 2).contiguous().transpose(1, 2) if y.ndim == 4 else y.contiguous()


# ---- forms with ReLU -------------------------------------------------------------------------------------------------


def linear_relu(input, weight, bias=None):
    return NEEDLE.linear_bias_act(input, weight, bias)


def conv2d_bias_relu(input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
    return NEEDLE.conv2d_bias_act(input, weight, bias, stride, padding, dilation, groups)


def conv2d_bn_relu(input, weight, bias, running_mean, running_var, bn_weight=None, bn_bias=None, *geometry_and_eps):
    return NEEDLE.conv2d_bn_act(input, weight, bias, running_mean, running_var, bn_weight, bn_bias, *geometry_and_eps)


def batch_norm_relu(input, running_mean, running_var, weight=None, bias=None, eps=1e-5):
    return NEEDLE.batch_norm_act(input, running_mean, running_var, weight, bias, eps)


# ---- registration ----------------------------------------------------------------------------------------------------

# op: (shape without data, unfused form, what backward keeps, backward)
OPS: dict[str, tuple[Callable, Callable, Callable, Callable]] = {
    "linear_bias_act": (linear_shape, unfused_linear, *torch_gradients.LINEAR),
    "conv2d_bias_act": (conv2d_shape, unfused_conv2d, *torch_gradients.CONV2D),
    "conv2d_bn_act": (conv2d_bn_shape, unfused_conv2d_bn, *torch_gradients.CONV2D_BN),
    "conv_transpose2d_bias_act": (conv_transpose2d_shape, unfused_conv_transpose2d, *torch_gradients.TRANSPOSED),
    "batch_norm_act": (batch_norm_shape, unfused_batch_norm, *torch_gradients.BATCH_NORM),
    "attention": (attention_shape, unfused_attention, *torch_gradients.ATTENTION),
}
GRADIENTS: dict[str, Callable] = {
    "linear_bias_act": linear_gradients,
    "conv2d_bias_act": conv_gradients,
    "conv2d_bn_act": conv2d_bn_gradients,
    "conv_transpose2d_bias_act": conv_gradients,
    "attention": attention_gradients,
}
WITH_RELU = (linear_relu, conv2d_bias_relu, conv2d_bn_relu, batch_norm_relu)


def filled(name: str, f: Callable) -> Callable:
    """f(every argument of the op, in order): torch leaves out those that equal their defaults, and may name the others."""
    arguments = getattr(NEEDLE, name).default._schema.arguments

    def call(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip((a.name for a in arguments), args, strict=False)) | kwargs
        return f(*(given.get(a.name, a.default_value) for a in arguments))

    return call


def has_gradient(name: str, arguments: tuple) -> bool:
    """Whether the op has a gradient of its own.

    It has none for an activation whose slope its result does not tell; attention has one in float32 on a CPU, not for its mask.
    """
    if name == "attention":
        query, _, _, mask = arguments[:4]
        return query.dtype == torch.float32 and query.is_cpu and not (mask is not None and mask.requires_grad)
    return arguments[-2] in torch_gradients.FROM_OUTPUT


def with_gradient(name: str, form: Callable, setup: Callable, backward: Callable) -> Callable:
    """What runs for tensors that may need gradients: the op with its own gradient, or a form that torch differentiates."""
    op = getattr(NEEDLE, name).default
    defaults = [a.default_value if a.has_default_value() else None for a in op._schema.arguments]
    redispatch, below, after = op.redispatch, torch._C._AutoDispatchBelowAutograd, torch._C._after_autograd_keyset
    any_requires_grad, is_grad_enabled = torch._C._any_requires_grad, torch.is_grad_enabled

    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> torch.Tensor:
            *inputs, keyset = args
            with below():
                y = redispatch(keyset, *inputs)
            setup(ctx, inputs, y)
            return y

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple:
            return *backward(ctx, grad), None

    def kernel(keyset: Any, *args: Any) -> torch.Tensor:
        keyset &= after
        if not (is_grad_enabled() and any_requires_grad(*args)):
            return redispatch(keyset, *args)
        args = (*args, *defaults[len(args) :])  # the dispatcher leaves out what equals its default
        if has_gradient(name, args):
            return Fused.apply(*args, keyset)
        return form(*args) if name == "attention" else activate(op(*args[:-2], "none", 0.0), *args[-2:])

    return kernel


def load() -> list[Any]:
    """Loads the library, hands it the kernel tables, and registers what is written in Python, in the libraries it returns."""
    if not LIBRARY.exists():
        raise ImportError(
            f"[torch_ops] {LIBRARY.name} is not built: install from the sources with `NEEDLE_TORCH=1 pip install .`."
        )
    torch.ops.load_library(str(LIBRARY))
    opener = ctypes.CDLL(str(LIBRARY)).needle_torch_open
    opener.restype = ctypes.c_char_p
    gpu = Path(os.environ.get("NEEDLE_GPU_LIBRARIES", LIBRARY.parent)) / GPU_LIBRARY
    for is_gpu, path in [(0, Path(_core.__file__)), (1, gpu)][: 1 + gpu.exists()]:
        error = opener(is_gpu, str(path).encode())
        if error:
            raise ImportError(f"[torch_ops] {path.name} gave no kernels: {error.decode()}.")
    fused, unfused = (torch.library.Library(name, "IMPL") for name in ("needle", "needle_unfused"))
    for function in WITH_RELU:
        fused.impl(function.__name__, function, "CompositeImplicitAutograd")
    for name, (shape, form, *gradient) in OPS.items():
        unfused.impl(name, filled(name, form), "CompositeImplicitAutograd")
        qualified = f"needle::{name}"
        torch.library.register_fake(qualified, filled(name, shape))
        fused.impl(name, with_gradient(name, form, *gradient), "Autograd", with_keyset=True)
        for device in ("cpu", "cuda"):
            torch.library.register_autocast(qualified, device, torch.float32)
    for name, shape in GRADIENTS.items():
        torch.library.register_fake(f"needle_gradients::{name}", shape)
    return [fused, unfused]


_LIBRARIES = load()  # registrations last as long as these objects

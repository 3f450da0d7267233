"""What no capture sees, found before one is tried: hooks on gradients, modules and inputs that are not plain tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as global_hooks
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from needle.autograd import Unsupported

from ..report import dotted

HALVES = (torch.float16, torch.bfloat16)  # computed in float32
GLOBAL_HOOKS = (
    *("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks", "_global_backward_pre_hooks"),
    "_global_forward_hooks_always_called",
)


def refuse_unseen(model: Any, example: Any) -> None:
    """Raises Unsupported for what a converted model would lack without a word."""
    for t in tree_leaves(example):
        if isinstance(t, torch.Tensor):
            refuse_tensor("the example", t)
    if not isinstance(model, nn.Module):
        return
    if any(getattr(global_hooks, name, None) for name in GLOBAL_HOOKS):
        raise Unsupported(
            "[convert] expects no hooks for all modules, got some of torch.nn.modules.module.register_module_*_hook."
        )
    for path, m in model.named_modules():
        where = path or "the model"
        if m._backward_hooks or m._backward_pre_hooks:
            raise Unsupported(f"[convert] expects no backward hooks, which needle does not call, got one on {where}.")
        if type(m).__module__.startswith(("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized")):
            raise Unsupported(
                f"[convert] expects layers of real numbers, got a quantized {type(m).__name__} at {where}."
            )
        others = ((name, t) for name, t in vars(m).items() if isinstance(t, torch.Tensor))
        for name, t in (*m._parameters.items(), *m._buffers.items(), *others):
            if t is not None:
                refuse_tensor(dotted(path, name), t)


def refuse_tensor(name: str, t: torch.Tensor) -> None:
    if is_lazy(t):
        raise Unsupported(f"[convert] expects values for {name}, got a lazy tensor; call the model once before.")
    functorch = torch._C._functorch
    if functorch.is_functorch_wrapped_tensor(t):
        raise Unsupported(f"[convert] expects a plain tensor for {name}, got one inside torch.vmap or torch.func.")
    if t.is_nested or t.layout != torch.strided:
        layout = "nested" if t.is_nested else str(t.layout).removeprefix("torch.")
        remedy = "" if t.is_nested else "; its to_dense() converts"
        raise Unsupported(f"[convert] expects a dense tensor for {name}, got a {layout} one{remedy}.")
    if t.device.type == "meta":
        raise Unsupported(f"[convert] expects values for {name}, got a tensor on the meta device.")
    if t.dtype is torch.complex32:
        raise Unsupported(f"[convert] expects complex64 or complex128 for {name}, got complex32.")
    if t.is_quantized:
        raise Unsupported(f"[convert] expects plain numbers for {name}, got {t.dtype}.")
    if t._backward_hooks or getattr(t, "_post_accumulate_grad_hooks", None):
        raise Unsupported(f"[convert] expects no hooks on gradients, which needle does not call, got one on {name}.")

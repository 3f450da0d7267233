"""Autograd functions of a user: whether the gradients that they give are the derivatives of what they compute.

Capture follows what such a function computes, and its graph has the derivative of that. Most are written to save memory and give
the same one; straight-through estimators and reversed gradients do not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from .calls import Call
from .differences import difference
from .guard import Writes, plain_conditions, same_chance, untouched

COTANGENTS = (1.0, 1e-3, 1e3)  # sizes of the gradients that come in: a function may clip them
Slopes = list[torch.Tensor]


def slopes(function: Callable, model: nn.Module, call: Call, training: bool | None) -> list[Slopes]:
    """Gradients of a call's results with respect to real inputs and all parameters, for cotangents of several sizes."""
    writes = Writes()
    leaves: list[torch.Tensor] = []

    def leaf(t: Any) -> Any:
        if not isinstance(t, torch.Tensor) or not t.is_floating_point():
            return t.clone() if isinstance(t, torch.Tensor) else t
        leaves.append(t.detach().clone().requires_grad_())
        return leaves[-1] * 1  # which the forward may write

    with (
        same_chance(),
        untouched(model),
        torch.inference_mode(False),
        torch.enable_grad(),
        plain_conditions(),
        writes,
        torch.autograd.graph.allow_mutation_on_saved_tensors(),  # of a function's inside, as values that nothing writes
    ):
        if training is not None:
            model.train(training)
        try:
            args, kwargs = pytree.tree_map(leaf, call)
            result = function(*args, **kwargs)
            outs = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor) and t.requires_grad]
            wanted = [*leaves, *(p for p in model.parameters() if p.requires_grad)]
            return [gradients(outs, wanted, size) for size in COTANGENTS] if outs else []
        finally:
            writes.undo()


def gradients(outs: list[torch.Tensor], wanted: list[torch.Tensor], size: float) -> Slopes:
    draw = torch.Generator().manual_seed(0)
    cotangents = [size * torch.randn(t.shape, generator=draw, dtype=t.dtype).to(t.device) for t in outs]
    found = torch.autograd.grad(outs, wanted, cotangents, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(w) if g is None else g for g, w in zip(found, wanted, strict=True)]


def same_slopes(run: Callable, model: nn.Module, calls: list[Call], training: bool | None) -> bool | None:
    """Whether there are gradients; None where the graph's are not those that the model's own autograd functions give."""
    some = False
    try:
        for call in calls:
            ours, theirs = (slopes(f, model, call, training) for f in (run, model))
            some = some or bool(theirs)
            pairs = (zip(a, b, strict=True) for a, b in zip(ours, theirs, strict=True))
            if any(difference(a, b) for pair in pairs for a, b in pair):
                return None
    except Exception:
        return None
    return some

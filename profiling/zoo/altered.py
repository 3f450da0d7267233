"""A model with what a capture must not overlook: a hook that changes a layer's result, a layer without gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

import needle as ndl
from torch2needle.capture.behaviour import flat
from torch2needle.capture.structure import PLAIN, plain_result


def middle(model: nn.Module, given: dict[str, torch.Tensor]) -> nn.Module | None:
    """The layer in the middle of those that a call calls, of those with parameters whose result is a tensor, if any is."""
    found: dict[nn.Module, None] = {}

    def note(module: nn.Module, _: Any, result: Any) -> None:
        if module is not model and isinstance(result, torch.Tensor) and any(True for _ in module.parameters()):
            found[module] = None

    own = (m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule))  # those take no hooks
    handles = [m.register_forward_hook(note) for m in own]
    try:
        with torch.no_grad():
            model(**given)
    finally:
        for h in handles:
            h.remove()
    return list(found)[len(found) // 2] if found else None


@contextmanager
def hook(layer: nn.Module) -> Iterator[None]:
    handle = layer.register_forward_hook(lambda m, args, result: result * 1.5)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def no_grad(layer: nn.Module) -> Iterator[None]:
    before = vars(layer).get("forward")
    layer.forward = torch.no_grad()(layer.forward)  # type: ignore[method-assign]
    try:
        yield
    finally:
        del layer.forward
        if before is not None:
            layer.forward = before


CHANGES: dict[str, Callable] = {"hook": hook, "no_grad": no_grad}


def trained(model: nn.Module | ndl.nn.Module, given: dict[str, Any]) -> set[str]:
    """The names of the parameters that a call's results pass gradients to."""
    forget(model)
    for p in model.parameters():
        p.grad = None
    with torch.enable_grad():
        made = flat(plain_result(model(**given), leaves=(ndl.Tensor, *PLAIN)), ndl.Tensor)
        results = [t for t in made if getattr(t, "requires_grad", False)]
        if results:
            sum((r.sum() for r in results[1:]), results[0].sum()).backward()
    forget(model)
    return {name for name, p in model.named_parameters() if p.grad is not None}


def forget(model: nn.Module | ndl.nn.Module) -> None:
    """What a model may keep from its calls in evaluation, as LeViT does its biases."""
    model.train().eval()

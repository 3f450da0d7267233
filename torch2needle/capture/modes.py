"""Training flags that functions are given, and whether a graph passes gradients on in training as its model does."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverloadPacket
from torch.overrides import TorchFunctionMode

from ..rules.overloads import FLAGS
from .behaviour import behaviour
from .calls import Call, other_batch, resized
from .differences import lost_gradients
from .tracing import user_lines


@functools.cache
def flagged(name: str) -> list[list[str]]:
    """The arguments of those overloads of a function that have a training flag."""
    packet = getattr(torch.ops.aten, name, None)
    overloads = packet.overloads() if isinstance(packet, OpOverloadPacket) else ()
    named = [[a.name for a in getattr(packet, o)._schema.arguments] for o in overloads]
    return [names for names in named if any(flag in names for flag in FLAGS)]


class Flags(TorchFunctionMode):
    """Notes the training flags that functions are given, by the user's lines: torch.export keeps those of forwards alone."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, set[bool]] = {}

    def around(self, function: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return call

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        named = [dict(zip(names, args, strict=False)) for names in flagged(getattr(func, "__name__", ""))]
        for given in (kwargs, *named):
            for name in FLAGS:
                if isinstance(given.get(name), bool):
                    for line in user_lines():
                        self.found.setdefault(line, set()).add(given[name])
        return func(*args, **kwargs)


def trains_alike(run: Callable, model: nn.Module, call: Call, chooses: bool | frozenset[int]) -> bool:
    """Whether graph and model pass gradients to the same parameters in training."""
    calls = [resized(call, other_batch(call))]  # a batch norm takes no single image
    try:
        ours, theirs = (behaviour(f, model, calls, True) for f in (run, model))
    except Exception:
        return False
    return not lost_gradients(ours, theirs, chooses)

"""Training flags: those that functions are given, and whether a graph that evaluates differs from its model in training."""

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
from .calls import SMALLER, Call, other_batch, resized, shuffled
from .differences import disagreement, lost_gradients
from .nodes import user_lines


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


def changing(model: nn.Module, call: Call) -> set[str]:
    """Lines whose calls are given a training flag that is False in evaluation and True in training."""
    seen: list[dict[str, set[bool]]] = []
    for training in (False, True):
        flags = Flags()
        try:
            behaviour(flags.around(model), model, [resized(call, other_batch(call))], training)
        except Exception:
            return set()
        seen.append(flags.found)
    return {line for line, given in seen[0].items() if given == {False} and seen[1].get(line) == {True}}


def differs_in_training(run: Callable, model: nn.Module, call: Call, chooses: bool | frozenset[int]) -> bool:
    """Whether the graph of a model in evaluation mode gives something else than the model in training mode."""
    for given in (call, resized(call, other_batch(call))):  # a batch norm takes no single image
        try:
            theirs, ours = (behaviour(f, model, [shuffled(given, SMALLER)], True) for f in (model, run))
            return bool(disagreement(ours, theirs) or lost_gradients(ours, theirs, chooses))
        except Exception:
            continue
    return False


def trains_alike(run: Callable, model: nn.Module, call: Call, chooses: bool | frozenset[int]) -> bool:
    """Whether graph and model pass gradients to the same parameters in training."""
    calls = [resized(call, other_batch(call))]  # a batch norm takes no single image
    try:
        ours, theirs = (behaviour(f, model, calls, True) for f in (run, model))
    except Exception:
        return False
    return not lost_gradients(ours, theirs, chooses)

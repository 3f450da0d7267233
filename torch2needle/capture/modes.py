"""Training flags: those that functions are given, and whether a graph that evaluates differs from its model in training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

from ..rules.overloads import FLAGS, PROBABILITIES
from .behaviour import behaviour
from .calls import SMALLER, Call, other_batch, resized, shuffled
from .differences import disagreement, lost_gradients
from .flags import FLAG, drops, flagged, is_probability
from .nodes import user_lines


class Flags(TorchFunctionMode):
    """Notes the training flags and probabilities that functions are given, in the order of the calls, by the user's lines:
    torch.export keeps those of forwards alone."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[tuple[str, str], list[Any]] = {}

    def around(self, function: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return call

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        given = kwargs
        for names in flagged(func):
            given = given | dict(zip(names, args, strict=False))
        wanted = (*FLAGS, *PROBABILITIES) if drops(func) else FLAGS
        for name in (n for n in wanted if isinstance(given.get(n), bool | int | float)):
            for line in dict.fromkeys(user_lines()):
                self.found.setdefault((line, FLAG if name in FLAGS else name), []).append(given[name])
        return func(*args, **kwargs)


def changing(model: nn.Module, call: Call) -> dict[tuple[str, str], list[Any]]:
    """Flags that are False in evaluation and True in training, and probabilities that are 0 and more, call by call; also where
    training alone makes the calls."""
    seen: list[dict[tuple[str, str], list[Any]]] = []
    for training in (False, True):
        flags = Flags()
        try:
            behaviour(flags.around(model), model, [resized(call, other_batch(call))], training)
        except Exception:
            return {}
        seen.append(flags.found)
    found = {}
    for key, trained in seen[1].items():
        evaluated = seen[0].get(key, [0.0] * len(trained))
        if len(trained) == len(evaluated) and all(map(changes, trained, evaluated)):
            found[key] = trained
    return found


def changes(trained: Any, evaluated: Any) -> bool:
    return (trained and not evaluated) if isinstance(trained, bool) else is_probability(trained, evaluated)


def differs_in_training(run: Callable, model: nn.Module, call: Call, chooses: bool | frozenset[int]) -> bool:
    """Whether the graph of a model in evaluation mode gives something else than the model in training mode, or fails there."""
    for given in (call, resized(call, other_batch(call))):  # a batch norm takes no single image
        try:
            theirs, ours = (behaviour(f, model, [shuffled(given, SMALLER)], True) for f in (model, run))
            return bool(disagreement(ours, theirs) or lost_gradients(ours, theirs, chooses))
        except Exception:
            continue
    return True


def trains_alike(run: Callable, model: nn.Module, call: Call, chooses: bool | frozenset[int]) -> bool:
    """Whether graph and model pass gradients to the same parameters in training."""
    calls = [resized(call, other_batch(call))]  # a batch norm takes no single image
    try:
        ours, theirs = (behaviour(f, model, calls, True) for f in (run, model))
    except Exception:
        return False
    return not lost_gradients(ours, theirs, chooses)

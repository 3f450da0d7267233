"""Training flags: those that functions are given, and whether a graph that evaluates differs from its model in training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from torch import nn
from torch.overrides import TorchFunctionMode

from ..rules.overloads import FLAGS, PROBABILITIES, drops
from .behaviour import Behaviour, behaviour
from .calls import SMALLER, Call, other_batch, resized, shuffled
from .differences import disagreement, lost_gradients
from .flags import FLAG, flagged, is_probability
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


class Run(NamedTuple):
    """A model's in one mode."""

    call: Call
    behaviour: Behaviour
    flags: dict[tuple[str, str], list[Any]]


def run_in(model: nn.Module, call: Call, training: bool) -> Run | None:
    """None where the model fails."""
    flags = Flags()
    try:
        return Run(call, behaviour(flags.around(model), model, [call], training), flags.found)
    except Exception:
        return None


def in_training(model: nn.Module, call: Call) -> Iterator[Run]:
    """Runs of a model in training mode, on the example and on another batch, since a batch norm takes no single image."""
    for given in (call, resized(call, other_batch(call))):
        if run := run_in(model, shuffled(given, SMALLER), True):
            yield run


def changing(model: nn.Module, trained: Run | None) -> dict[tuple[str, str], list[Any]]:
    """Flags that are False in evaluation and True in training, and probabilities that are 0 and more, call by call; also where
    training alone makes the calls. trained: the model's run in training."""
    evaluated = None if trained is None else run_in(model, trained.call, False)
    if trained is None or evaluated is None:
        return {}
    pairs = {k: (v, evaluated.flags.get(k, [0.0] * len(v))) for k, v in trained.flags.items()}
    return {k: t for k, (t, e) in pairs.items() if len(t) == len(e) and all(map(changes, t, e))}


def changes(trained: Any, evaluated: Any) -> bool:
    return (trained and not evaluated) if isinstance(trained, bool) else is_probability(trained, evaluated)


def differs_in_training(
    run: Callable, model: nn.Module, trained: Iterable[Run], chooses: bool | frozenset[int]
) -> bool:
    """Whether the graph of a model in evaluation mode gives something else than the model's runs in training, or fails there."""
    for theirs in trained:
        try:
            ours = behaviour(run, model, [theirs.call], True)
            return bool(disagreement(ours, theirs.behaviour) or lost_gradients(ours, theirs.behaviour, chooses))
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

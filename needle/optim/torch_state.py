"""The state of torch's optimizers: what a checkpoint of torch holds, read as needle's, and needle's written as torch's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from needle.backend_ndarray.functions import numpy_of

if TYPE_CHECKING:
    from .base import Optimizer

# What torch's groups hold beside options: parameters, and what its schedules remember.
OTHERS = ("params", "param_names", "max_lr", "min_lr", "max_momentum", "base_momentum")


def from_torch(optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """What `state_dict` of torch's optimizer of the same name says, as `state_dict` of `optimizer` would.

    Parameters are counted through the groups, as torch counts them.
    """
    label, own = type(optimizer).__name__, {theirs: name for name, theirs in optimizer.torch_names.items()}
    held: dict[int, dict[str, np.ndarray]] = {}
    for number, arrays in state["state"].items():
        given = {name: np.array(numpy_of(a)) for name, a in arrays.items() if a is not None}
        if unknown := [name for name in given if name not in own]:
            raise ValueError(f"[{label}] the state of torch expects {', '.join(own) or 'nothing'}, got {unknown[0]}.")
        if given:
            held[number] = {own[name]: a for name, a in given.items()}
    groups = state["param_groups"]
    places: dict[int, int] = {}
    for group in groups:
        places |= {number: len(places) + i for i, number in enumerate(group["params"])}
    options = [{k: option(v) for k, v in g.items() if k not in OTHERS} for g in groups]
    return {
        "kind": label,
        "rule": "torch",
        "step": max((int(a["step"]) for a in held.values() if "step" in a), default=0),
        "sizes": [len(g["params"]) for g in groups],
        "options": options,
        "state": {places[number]: arrays for number, arrays in held.items()},
    }


def as_torch(optimizer: Optimizer) -> dict[str, Any]:
    """The state as torch's optimizer of the same name has it, of numpy arrays; ValueError for rules that torch has not."""
    label, names = type(optimizer).__name__, optimizer.torch_names
    if optimizer.rule != "torch" or not names:
        raise ValueError(
            f"[{label}] torch's state expects an optimizer of torch's by its rule, got rule {optimizer.rule}."
        )
    own, first, groups = optimizer.state_dict(), 0, []
    for group in optimizer.param_groups:
        size = len(group["params"])
        groups.append(group.options() | {"params": list(range(first, first + size))})
        first += size
    held = {
        i: {names[n]: a if n in optimizer.slots else a.astype("float32") for n, a in arrays.items() if n in names}
        for i, arrays in own["state"].items()  # counts and products are of float32 in torch
    }
    return {"state": held, "param_groups": groups}


def option(value: Any) -> Any:
    return value.item() if getattr(value, "shape", None) == () else value


# What a schedule counts; the rest of what it holds are its options.
MOVING = ("epoch", "best", "bad_epochs", "cooldown_counter", "base_lrs")


def schedule_from_torch(schedule: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    """What `state_dict` of torch's schedule of the same name says, as that of `schedule` would; its options must be the same."""
    label, inner = type(schedule).__name__, state.get("_schedulers", ())
    for name, own in vars(schedule).items():
        given = state.get(name, state.get(f"_{name}", own))
        given = sorted(given.elements()) if isinstance(given, Counter) else given
        plain = all(isinstance(v, int | float | str) for v in (own if isinstance(own, list) else [own]))
        if plain and name not in MOVING and given != own:
            raise ValueError(f"[{label}] the state of torch expects {name} {own}, got {given}.")
    epoch = state["last_epoch"] if "last_epoch" in state else inner[0]["last_epoch"]
    made = {
        "kind": label,
        "epoch": max(epoch, 0),  # -1: not begun, in a sequence
        "base_lr": list(state.get("base_lrs", schedule.base_lrs)),
        "lr": [option(rate) for rate in state["_last_lr"]],
        "schedules": inner,
    }
    theirs = {"best": "best", "bad_epochs": "num_bad_epochs", "cooldown_counter": "cooldown_counter"}
    return made | {own: state[name] for own, name in theirs.items() if name in state}

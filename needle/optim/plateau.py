"""Rates that follow a measure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .base import Optimizer
from .group import number
from .schedule import Schedule, as_list, per_group
from .torch_state import schedule_from_torch


def better(value: float, best: float, mode: str, threshold: float, threshold_mode: str = "abs") -> bool:
    """Whether a measure has improved by more than `threshold`, as it is ("abs") or as a part of `best` ("rel")."""
    sign = 1 if mode == "max" else -1
    margin = threshold * (best if threshold_mode == "rel" else 1)
    return sign * value > sign * (best + sign * margin) if math.isfinite(best) else sign * value > sign * best


def one_of(label: str, name: str, value: Any, *names: str) -> str:
    if value not in names:
        raise ValueError(f"[{label}] {name} expects {' or '.join(names)}, got {value!r}.")
    return value


class ReduceLROnPlateau(Schedule):
    """Times `factor` once a measure, given to `step`, has not improved for more than `patience` epochs.

    min_lr: the least rate, of all groups or a list with one for each. cooldown: epochs after a change that do not count.
    eps: smaller changes are not made.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        mode: str = "min",
        factor: float = 0.1,
        patience: int = 10,
        threshold: float = 1e-4,
        threshold_mode: str = "rel",
        cooldown: int = 0,
        min_lr: float | list[float] = 0.0,
        eps: float = 1e-8,
    ) -> None:
        label = "ReduceLROnPlateau"
        self.factor = number(label, "factor", factor, below=1.0)
        self.mode = one_of(label, "mode", mode, "min", "max")
        self.threshold_mode = one_of(label, "threshold_mode", threshold_mode, "rel", "abs")
        self.patience, self.threshold, self.cooldown, self.eps = patience, threshold, cooldown, eps
        self.min_lrs = per_group(label, "min_lr", min_lr, optimizer)
        self.optimizer, self.epoch = optimizer, 0
        self.base_lrs = self.get_last_lr()
        self.restart()

    def restart(self) -> None:
        """Forget the measures so far."""
        self.best = math.inf if self.mode == "min" else -math.inf
        self.bad_epochs = self.cooldown_counter = 0

    def step(self, metrics: Any = None) -> None:  # type: ignore[override]
        """metrics: the measure, a number or a tensor of one."""
        if metrics is None:
            raise TypeError("[ReduceLROnPlateau] step expects the measure that it follows, got none.")
        value = float(metrics.item() if hasattr(metrics, "item") else metrics)
        self.epoch += 1
        if better(value, self.best, self.mode, self.threshold, self.threshold_mode):
            self.best, self.bad_epochs = value, 0
        else:
            self.bad_epochs += 1
        if self.cooldown_counter > 0:
            self.cooldown_counter -= 1
            self.bad_epochs = 0
        if self.bad_epochs > self.patience:
            self.reduce()
            self.cooldown_counter, self.bad_epochs = self.cooldown, 0

    def reduce(self) -> None:
        for group, least in zip(self.optimizer.param_groups, self.min_lrs, strict=True):
            rate = max(group["lr"] * self.factor, least)
            if group["lr"] - rate > self.eps:
                group["lr"] = rate

    def state_dict(self) -> dict[str, Any]:
        kept = ("epoch", "best", "bad_epochs", "cooldown_counter")
        return {"kind": "ReduceLROnPlateau", **{name: getattr(self, name) for name in kept}, "lr": self.get_last_lr()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `state_dict` of this schedule, or of torch's of the same name and options, gave."""
        state = schedule_from_torch(self, state) if "_last_lr" in state else state
        if state["kind"] != "ReduceLROnPlateau":
            raise ValueError(f"[ReduceLROnPlateau] the state expects to be of this schedule, got {state['kind']}.")
        rates = per_group("ReduceLROnPlateau", "lr", as_list(state["lr"]), self.optimizer)
        self.epoch, self.best = state["epoch"], float(state["best"])
        self.bad_epochs, self.cooldown_counter = state["bad_epochs"], state["cooldown_counter"]
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

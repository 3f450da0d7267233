"""When to stop: a measure that improves no longer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from needle.nn import Module
from needle.optim.group import number
from needle.optim.plateau import better, one_of


class EarlyStopping:
    """`if stopping.step(loss): break` leaves a loop once the measure has not improved for `patience` calls, one after the other.

    min_delta: smaller changes are no improvement. mode: "min", or "max" for a measure that is to grow. model: its tensors at the
    best call are kept; `restore()`, and the call that says to stop, put them back.
    """

    def __init__(
        self, patience: int = 10, min_delta: float = 0.0, mode: str = "min", model: Module | None = None
    ) -> None:
        label = "EarlyStopping"
        if type(patience) is not int or patience < 0:
            raise ValueError(f"[{label}] patience expects a whole number of at least 0, got {patience!r}.")
        self.model, self.patience = model, patience
        self.min_delta, self.mode = number(label, "min_delta", min_delta), one_of(label, "mode", mode, "min", "max")
        self.best = math.inf if mode == "min" else -math.inf
        self.best_step = self.count = self.bad = 0
        self.kept: dict[str, np.ndarray] = {}

    @property
    def stopped(self) -> bool:
        return self.bad >= max(self.patience, 1)

    def step(self, value: Any) -> bool:
        """Take the measure, a number or a tensor of one; whether to stop."""
        measure = float(value.item() if hasattr(value, "item") else value)
        self.count += 1
        if better(measure, self.best, self.mode, self.min_delta):
            self.best, self.best_step, self.bad = measure, self.count, 0
            if self.model is not None:
                self.kept = {name: np.array(t.numpy()) for name, t in self.model.state_dict().items()}
            return False
        self.bad += 1
        if self.stopped:
            self.restore()
        return self.stopped

    def restore(self) -> None:
        """Put the best tensors back, if there was a best call."""
        if self.model is not None and self.kept:
            self.model.load_state_dict(self.kept)

    def state_dict(self) -> dict[str, Any]:
        names = ("best", "best_step", "count", "bad")
        return {name: getattr(self, name) for name in names} | {"kept": dict(self.kept)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best, self.best_step = float(state["best"]), int(state["best_step"])
        self.count, self.bad, self.kept = int(state["count"]), int(state["bad"]), dict(state["kept"])

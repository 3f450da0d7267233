"""Learning rates over time: each schedule writes `optimizer.lr`, at once and after every `step`. Formulas are torch's."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

from .base import Optimizer


class Schedule:
    """Base: `value(epoch)` gives the rate, from `base_lr`, the optimizer's rate before any schedule.

    `step()` begins the next epoch (or batch, if that is how often it is called).
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.base_lr: float = optimizer.__dict__.setdefault("base_lr", optimizer.lr)
        self.epoch = 0
        optimizer.lr = float(self.value(0))

    def value(self, epoch: int) -> float:
        raise NotImplementedError(f"[{type(self).__name__}] defines no value.")

    def step(self) -> None:
        self.epoch += 1
        self.optimizer.lr = float(self.value(self.epoch))

    def state_dict(self) -> dict[str, Any]:
        return {"kind": type(self).__name__, "epoch": self.epoch, "base_lr": self.base_lr}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        label = type(self).__name__
        if state["kind"] != label:
            raise ValueError(f"[{label}] the state expects to be of this schedule, got {state['kind']}.")
        self.epoch, self.base_lr = int(state["epoch"]), float(state["base_lr"])
        self.optimizer.lr = float(self.value(self.epoch))


class StepLR(Schedule):
    """Times gamma every `step_size` epochs."""

    def __init__(self, optimizer: Optimizer, step_size: int, gamma: float = 0.1) -> None:
        self.step_size, self.gamma = step_size, gamma
        super().__init__(optimizer)

    def value(self, epoch: int) -> float:
        return self.base_lr * self.gamma ** (epoch // self.step_size)


class MultiStepLR(Schedule):
    """Times gamma at every epoch of `milestones`."""

    def __init__(self, optimizer: Optimizer, milestones: Sequence[int], gamma: float = 0.1) -> None:
        self.milestones, self.gamma = sorted(milestones), gamma
        super().__init__(optimizer)

    def value(self, epoch: int) -> float:
        return self.base_lr * self.gamma ** bisect_right(self.milestones, epoch)


class ExponentialLR(Schedule):
    """Times gamma every epoch."""

    def __init__(self, optimizer: Optimizer, gamma: float) -> None:
        self.gamma = gamma
        super().__init__(optimizer)

    def value(self, epoch: int) -> float:
        return self.base_lr * self.gamma**epoch


class CosineAnnealingLR(Schedule):
    """Half a cosine from the base rate to `eta_min` in `T_max` epochs, and back up after (Loshchilov and Hutter, 2017)."""

    def __init__(self, optimizer: Optimizer, T_max: int, eta_min: float = 0.0) -> None:
        self.T_max, self.eta_min = T_max, eta_min
        super().__init__(optimizer)

    def value(self, epoch: int) -> float:
        return self.eta_min + (self.base_lr - self.eta_min) * (1 + math.cos(math.pi * epoch / self.T_max)) / 2


class LinearLR(Schedule):
    """Warm-up: the base rate times a factor that goes straight from `start_factor` to `end_factor` in `total_iters` epochs."""

    def __init__(
        self, optimizer: Optimizer, start_factor: float = 1 / 3, end_factor: float = 1.0, total_iters: int = 5
    ) -> None:
        self.start_factor, self.end_factor, self.total_iters = start_factor, end_factor, total_iters
        super().__init__(optimizer)

    def value(self, epoch: int) -> float:
        done = min(epoch, self.total_iters) / self.total_iters
        return self.base_lr * (self.start_factor + (self.end_factor - self.start_factor) * done)


class OneCycleLR(Schedule):
    """Up to `max_lr` and down to almost nothing within `total_steps` (Smith and Topin, 2018); momentum stays as it is."""

    def __init__(
        self,
        optimizer: Optimizer,
        max_lr: float,
        total_steps: int,
        pct_start: float = 0.3,
        anneal_strategy: str = "cos",
        div_factor: float = 25.0,
        final_div_factor: float = 1e4,
    ) -> None:
        if anneal_strategy not in ("cos", "linear"):
            raise ValueError(f"[OneCycleLR] anneal_strategy expects cos or linear, got {anneal_strategy}.")
        self.max_lr, self.total_steps, self.pct_start, self.anneal_strategy = (
            max_lr,
            total_steps,
            pct_start,
            anneal_strategy,
        )
        self.first_lr = max_lr / div_factor
        self.last_lr = self.first_lr / final_div_factor
        super().__init__(optimizer)

    def value(self, epoch: int) -> float:
        if epoch > self.total_steps:
            raise ValueError(f"[OneCycleLR] has {self.total_steps} steps in all, got {epoch}.")
        top = self.pct_start * self.total_steps - 1
        if epoch <= top:
            return self.between(self.first_lr, self.max_lr, epoch / top if top else 1.0)
        return self.between(self.max_lr, self.last_lr, (epoch - top) / (self.total_steps - 1 - top))

    def between(self, start: float, end: float, done: float) -> float:
        if self.anneal_strategy == "linear":
            return start + (end - start) * done
        return end + (start - end) / 2 * (1 + math.cos(math.pi * done))


class SequentialLR(Schedule):
    """One schedule after the other: number i begins anew at epoch milestones[i - 1]."""

    def __init__(self, optimizer: Optimizer, schedulers: Sequence[Schedule], milestones: Sequence[int]) -> None:
        if len(milestones) != len(schedulers) - 1:
            raise ValueError(f"[SequentialLR] expects {len(schedulers) - 1} milestones, got {len(milestones)}.")
        self.schedulers, self.milestones = list(schedulers), list(milestones)
        super().__init__(optimizer)

    def value(self, epoch: int) -> float:
        i = bisect_right(self.milestones, epoch)
        return self.schedulers[i].value(epoch - (self.milestones[i - 1] if i else 0))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for s in self.schedulers:
            s.base_lr = float(state["base_lr"])
        super().load_state_dict(state)

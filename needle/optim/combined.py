"""Several schedules of one optimizer: one after the other, or all at once."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

from .base import Optimizer
from .plateau import ReduceLROnPlateau
from .schedule import Schedule
from .torch_state import schedule_from_torch


class Several(Schedule):
    """Base: schedules whose state is part of its own."""

    schedulers: list[Schedule]

    def take(self, optimizer: Optimizer, schedulers: Sequence[Schedule]) -> None:
        label = type(self).__name__
        if any(isinstance(s, ReduceLROnPlateau) for s in schedulers):
            raise ValueError(f"[{label}] expects schedules that step without a measure, got ReduceLROnPlateau.")
        if any(s.optimizer is not optimizer for s in schedulers):
            raise ValueError(f"[{label}] expects schedules of its optimizer, got one of another.")
        self.schedulers = list(schedulers)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"schedules": [s.state_dict() for s in self.schedulers]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        state = schedule_from_torch(self, state) if "_last_lr" in state else state
        super().load_state_dict(state)
        rates = [g["lr"] for g in self.optimizer.param_groups]
        for schedule, inner in zip(self.schedulers, state.get("schedules", ()), strict=False):
            schedule.load_state_dict(inner)
        for group, lr in zip(self.optimizer.param_groups, rates, strict=True):
            group.data["lr"] = lr


class SequentialLR(Several):
    """One schedule after the other: number i begins anew at epoch milestones[i - 1]."""

    def __init__(self, optimizer: Optimizer, schedulers: Sequence[Schedule], milestones: Sequence[int]) -> None:
        if not schedulers or len(milestones) != len(schedulers) - 1:
            raise ValueError(
                f"[SequentialLR] expects schedules and one milestone less, got {len(schedulers)} and {len(milestones)}."
            )
        self.take(optimizer, schedulers)
        self.milestones = list(milestones)
        for group in optimizer.param_groups:
            group["lr"] = group.setdefault("initial_lr", group["lr"])
        super().__init__(optimizer)

    def current(self, epoch: int) -> tuple[Schedule, int]:
        """The schedule of that epoch and the epoch at which it began."""
        i = bisect_right(self.milestones, epoch)
        return self.schedulers[i], self.milestones[i - 1] if i else 0

    def values(self, epoch: int, base_lrs: Sequence[float]) -> list[float]:
        schedule, start = self.current(epoch)
        return schedule.values(epoch - start, base_lrs)

    def write(self, before: Sequence[float] | None) -> None:
        schedule, start = self.current(self.epoch)
        if self.epoch == start:
            schedule.restart()
        else:
            schedule.step()

    def resume(self, epoch: int, base_lrs: list[float]) -> None:
        super().resume(epoch, base_lrs)
        for i, (schedule, start) in enumerate(zip(self.schedulers, (0, *self.milestones), strict=True)):
            end = self.milestones[i] - 1 if i < len(self.milestones) else epoch
            schedule.resume(max(0, min(epoch, end) - start), base_lrs)


class ChainedScheduler(Several):
    """All schedules at once: each scales what those before it left."""

    def __init__(self, schedulers: Sequence[Schedule], optimizer: Optimizer | None = None) -> None:
        if not schedulers:
            raise ValueError("[ChainedScheduler] expects at least one schedule, got none.")
        self.optimizer = schedulers[0].optimizer if optimizer is None else optimizer
        self.take(self.optimizer, schedulers)
        self.epoch, self.base_lrs = 0, list(schedulers[0].base_lrs)

    def values(self, epoch: int, base_lrs: Sequence[float]) -> list[float]:
        raise NotImplementedError("[ChainedScheduler] rates follow from steps alone.")

    def step(self) -> None:
        for schedule in self.schedulers:
            schedule.step()
        self.epoch += 1

    def restart(self) -> None:
        self.epoch = 0
        for group, base in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            group.data["lr"] = base
        for schedule in self.schedulers:
            schedule.epoch = 0
            schedule.write(schedule.base_lrs)

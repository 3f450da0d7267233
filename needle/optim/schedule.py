"""Learning rates over time: each schedule writes the groups' rates, at once and after every `step`. Formulas are torch's."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from .base import Optimizer
from .group import number


def positive(label: str, name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"[{label}] {name} expects a whole number of at least 1, got {value!r}.")
    return value


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


class Schedule:
    """Base: `value(epoch, base_lr)` gives a group's rate, from its rate before any schedule.

    `step()` begins the next epoch (or batch, if that is how often it is called). What others did to a rate meanwhile, by hand or
    by another schedule, stays: each scales what it finds, as torch's do.
    """

    floor = 0.0  # the schedule scales what a rate has above this
    absolute: ClassVar[bool] = False  # sets rates whatever they were

    def __init__(self, optimizer: Optimizer) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"[{type(self).__name__}] expects a needle optimizer, got {type(optimizer).__name__}.")
        self.optimizer, self.epoch = optimizer, 0
        self.base_lrs: list[float] = [g.setdefault("initial_lr", g["lr"]) for g in optimizer.param_groups]
        self.write(self.base_lrs)

    def value(self, epoch: int, base_lr: float) -> float:
        raise NotImplementedError(f"[{type(self).__name__}] defines no value.")

    def step(self) -> None:
        before = [self.value(self.epoch, base) for base in self.base_lrs]
        self.epoch += 1
        self.write(before)

    def restart(self) -> None:
        """Begin anew at epoch 0, whatever the rates are."""
        self.epoch = 0
        self.write(None)

    def write(self, before: Sequence[float] | None) -> None:
        """The rates of this epoch; `before`: what they would be now by this schedule alone, None: set, do not scale."""
        groups, label = self.optimizer.param_groups, type(self).__name__
        if len(groups) != len(self.base_lrs):
            raise ValueError(f"[{label}] expects the {len(self.base_lrs)} groups it was made for, got {len(groups)}.")
        new = [float(self.value(self.epoch, base)) for base in self.base_lrs]
        for group, lr, old in zip(groups, new, before or new, strict=True):
            if before is not None and not self.absolute and group["lr"] != old:
                above = old - self.floor
                changed = group["lr"] - self.floor
                lr = self.floor + changed * (lr - self.floor) / above if above else group["lr"] + lr - old
            group.data["lr"] = lr  # unchecked: one step past a cycle's end it is below zero, in torch, too

    def state_dict(self) -> dict[str, Any]:
        """{"kind", "epoch", "base_lr", "lr"}: numbers, or lists of them where there are several groups."""
        rates = [g["lr"] for g in self.optimizer.param_groups]
        several = len(rates) > 1
        made = {"kind": type(self).__name__, "epoch": self.epoch}
        return made | {
            "base_lr": self.base_lrs if several else self.base_lrs[0],
            "lr": rates if several else rates[0],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        label, groups = type(self).__name__, self.optimizer.param_groups
        if state["kind"] != label:
            raise ValueError(f"[{label}] the state expects to be of this schedule, got {state['kind']}.")
        epoch, bases = state["epoch"], as_list(state["base_lr"])
        if len(bases) != len(groups) or type(epoch) is not int or epoch < 0:
            raise ValueError(
                f"[{label}] expects an epoch and {len(groups)} rates, got {epoch!r} and {len(bases)} rates."
            )
        self.resume(epoch, [number(label, "base_lr", base) for base in bases])
        rates = as_list(state.get("lr", [self.value(epoch, base) for base in self.base_lrs]))
        if len(rates) != len(groups):
            raise ValueError(f"[{label}] the state expects {len(groups)} rates, got {len(rates)}.")
        for group, lr, base in zip(groups, rates, self.base_lrs, strict=True):
            group.data["lr"] = float(lr)
            group["initial_lr"] = base

    def resume(self, epoch: int, base_lrs: list[float]) -> None:
        self.epoch, self.base_lrs = epoch, base_lrs


class StepLR(Schedule):
    """Times gamma every `step_size` epochs."""

    def __init__(self, optimizer: Optimizer, step_size: int, gamma: float = 0.1) -> None:
        self.step_size, self.gamma = positive("StepLR", "step_size", step_size), gamma
        super().__init__(optimizer)

    def value(self, epoch: int, base_lr: float) -> float:
        return base_lr * self.gamma ** (epoch // self.step_size)


class MultiStepLR(Schedule):
    """Times gamma at every epoch of `milestones`."""

    def __init__(self, optimizer: Optimizer, milestones: Sequence[int], gamma: float = 0.1) -> None:
        self.milestones, self.gamma = sorted(milestones), gamma
        super().__init__(optimizer)

    def value(self, epoch: int, base_lr: float) -> float:
        return base_lr * self.gamma ** bisect_right(self.milestones, epoch)


class ExponentialLR(Schedule):
    """Times gamma every epoch."""

    def __init__(self, optimizer: Optimizer, gamma: float) -> None:
        self.gamma = gamma
        super().__init__(optimizer)

    def value(self, epoch: int, base_lr: float) -> float:
        return base_lr * self.gamma**epoch


class CosineAnnealingLR(Schedule):
    """Half a cosine from the base rate to `eta_min` in `T_max` epochs, and back up after (Loshchilov and Hutter, 2017)."""

    def __init__(self, optimizer: Optimizer, T_max: int, eta_min: float = 0.0) -> None:
        self.T_max, self.eta_min = positive("CosineAnnealingLR", "T_max", T_max), eta_min
        self.floor = eta_min
        super().__init__(optimizer)

    def value(self, epoch: int, base_lr: float) -> float:
        return self.eta_min + (base_lr - self.eta_min) * (1 + math.cos(math.pi * epoch / self.T_max)) / 2


class LinearLR(Schedule):
    """Warm-up: the base rate times a factor that goes straight from `start_factor` to `end_factor` in `total_iters` epochs."""

    def __init__(
        self, optimizer: Optimizer, start_factor: float = 1 / 3, end_factor: float = 1.0, total_iters: int = 5
    ) -> None:
        if not (0 < start_factor <= 1 and 0 <= end_factor <= 1):
            raise ValueError(
                f"[LinearLR] expects factors of at most 1, the first above 0, got {start_factor} and {end_factor}."
            )
        self.start_factor, self.end_factor = start_factor, end_factor
        self.total_iters = positive("LinearLR", "total_iters", total_iters)
        super().__init__(optimizer)

    def value(self, epoch: int, base_lr: float) -> float:
        done = min(epoch, self.total_iters) / self.total_iters
        return base_lr * (self.start_factor + (self.end_factor - self.start_factor) * done)


class OneCycleLR(Schedule):
    """Up to `max_lr` and down to almost nothing within `total_steps` (Smith and Topin, 2018).

    max_lr: of all groups, or a list with one for each. total_steps: or `epochs` times `steps_per_epoch`. cycle_momentum: takes
    momentum, or the first of betas, from `max_momentum` to `base_momentum` and back; by default where the optimizer steps by
    rule torch.
    """

    absolute = True

    def __init__(
        self,
        optimizer: Optimizer,
        max_lr: float | Sequence[float],
        total_steps: int | None = None,
        pct_start: float = 0.3,
        anneal_strategy: str = "cos",
        div_factor: float = 25.0,
        final_div_factor: float = 1e4,
        *,
        epochs: int | None = None,
        steps_per_epoch: int | None = None,
        cycle_momentum: bool | None = None,
        base_momentum: float = 0.85,
        max_momentum: float = 0.95,
    ) -> None:
        label, groups = "OneCycleLR", optimizer.param_groups
        if anneal_strategy not in ("cos", "linear"):
            raise ValueError(f"[{label}] anneal_strategy expects cos or linear, got {anneal_strategy}.")
        if total_steps is None:
            if epochs is None or steps_per_epoch is None:
                raise ValueError(f"[{label}] expects total_steps, or epochs and steps_per_epoch, got neither.")
            total_steps = positive(label, "epochs", epochs) * positive(label, "steps_per_epoch", steps_per_epoch)
        self.total_steps, self.pct_start = (
            positive(label, "total_steps", total_steps),
            number(label, "pct_start", pct_start),
        )
        if self.pct_start > 1:
            raise ValueError(f"[{label}] pct_start expects a number from 0 to 1, got {pct_start}.")
        self.anneal_strategy, self.div_factor, self.final_div_factor = anneal_strategy, div_factor, final_div_factor
        rates = list(max_lr) if isinstance(max_lr, Sequence) else [max_lr] * len(groups)
        if len(rates) != len(groups):
            raise ValueError(f"[{label}] max_lr expects a rate for each of {len(groups)} groups, got {len(rates)}.")
        self.max_lr = max_lr
        self.cycle_momentum = optimizer.rule == "torch" if cycle_momentum is None else cycle_momentum
        self.base_momentum, self.max_momentum = base_momentum, max_momentum
        self.cycled = "beta1" if "betas" in groups[0] else "momentum" if "momentum" in groups[0] else ""
        if self.cycle_momentum and not self.cycled:
            raise ValueError(
                f"[{label}] cycle_momentum expects an optimizer with momentum or betas, got {type(optimizer).__name__}."
            )
        for group, rate in zip(groups, rates, strict=True):
            group["initial_lr"] = number(label, "max_lr", rate) / div_factor
        super().__init__(optimizer)

    def value(self, epoch: int, base_lr: float) -> float:
        return self.between((base_lr, base_lr * self.div_factor, base_lr / self.final_div_factor), epoch)

    def write(self, before: Sequence[float] | None) -> None:
        super().write(before)
        if self.cycle_momentum:
            momentum = self.between((self.max_momentum, self.base_momentum, self.max_momentum), self.epoch)
            for group in self.optimizer.param_groups:
                group[self.cycled] = momentum

    def between(self, ends: tuple[float, float, float], epoch: int) -> float:
        """From the first end to the second and on to the third."""
        if epoch > self.total_steps:
            raise ValueError(f"[OneCycleLR] has {self.total_steps} steps in all, got {epoch}.")
        top, last = self.pct_start * self.total_steps - 1, self.total_steps - 1
        if epoch <= top or top == last:
            start, end, done = *ends[:2], epoch / top if top else 1.0
        else:
            start, end, done = *ends[1:], (epoch - top) / (last - top)
        if self.anneal_strategy == "linear":
            return start + (end - start) * done
        return end + (start - end) / 2 * (1 + math.cos(math.pi * done))


class SequentialLR(Schedule):
    """One schedule after the other: number i begins anew at epoch milestones[i - 1]."""

    def __init__(self, optimizer: Optimizer, schedulers: Sequence[Schedule], milestones: Sequence[int]) -> None:
        if not schedulers or len(milestones) != len(schedulers) - 1:
            raise ValueError(
                f"[SequentialLR] expects schedules and one milestone less, got {len(schedulers)} and {len(milestones)}."
            )
        if any(s.optimizer is not optimizer for s in schedulers):
            raise ValueError("[SequentialLR] expects schedules of its optimizer, got one of another.")
        self.schedulers, self.milestones = list(schedulers), list(milestones)
        for group in optimizer.param_groups:
            group["lr"] = group.setdefault("initial_lr", group["lr"])
        super().__init__(optimizer)

    def current(self, epoch: int) -> tuple[Schedule, int]:
        """The schedule of that epoch and the epoch at which it began."""
        i = bisect_right(self.milestones, epoch)
        return self.schedulers[i], self.milestones[i - 1] if i else 0

    def value(self, epoch: int, base_lr: float) -> float:
        schedule, start = self.current(epoch)
        return schedule.value(epoch - start, base_lr)

    def write(self, before: Sequence[float] | None) -> None:
        schedule, start = self.current(self.epoch)
        if self.epoch == start:
            schedule.restart()
        else:
            schedule.step()

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"schedules": [s.state_dict() for s in self.schedulers]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        rates = [g["lr"] for g in self.optimizer.param_groups]
        for schedule, inner in zip(self.schedulers, state.get("schedules", ()), strict=False):
            schedule.load_state_dict(inner)
        for group, lr in zip(self.optimizer.param_groups, rates, strict=True):
            group.data["lr"] = lr

    def resume(self, epoch: int, base_lrs: list[float]) -> None:
        super().resume(epoch, base_lrs)
        for i, (schedule, start) in enumerate(zip(self.schedulers, (0, *self.milestones), strict=True)):
            end = self.milestones[i] - 1 if i < len(self.milestones) else epoch
            schedule.resume(max(0, min(epoch, end) - start), base_lrs)

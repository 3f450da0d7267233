"""Learning rates over time: each schedule writes the groups' rates, at once and after every `step`. Formulas are torch's."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from .base import Optimizer
from .group import number
from .torch_state import schedule_from_torch


def positive(label: str, name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"[{label}] {name} expects a whole number of at least 1, got {value!r}.")
    return value


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def per_group(label: str, name: str, value: Any, optimizer: Optimizer) -> list[Any]:
    """One value for each of the optimizer's groups, of a list of them or of one for all."""
    count = len(optimizer.param_groups)
    values = list(value) if isinstance(value, list | tuple) else [value] * count
    if len(values) != count:
        raise ValueError(f"[{label}] {name} expects one for each of {count} groups, got {len(values)}.")
    return values


class Schedule:
    """Base: `value(epoch, base_lr)` gives a group's rate, from its rate before any schedule.

    `step()` begins the next epoch (or batch, if that is how often it is called). What others did to a rate meanwhile, by hand or
    by another schedule, stays: each scales what it finds, as torch's do.
    """

    floor = 0.0  # the schedule scales what a rate has above this
    absolute: ClassVar[bool] = False  # sets rates whatever they were
    counts: ClassVar[tuple[type, ...]] = (int,)  # what its epochs are

    def __init__(self, optimizer: Optimizer) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"[{type(self).__name__}] expects a needle optimizer, got {type(optimizer).__name__}.")
        self.optimizer, self.epoch = optimizer, 0
        self.base_lrs: list[float] = [g.setdefault("initial_lr", g["lr"]) for g in optimizer.param_groups]
        self.write(self.base_lrs)

    @property
    def last_epoch(self) -> int:
        return self.epoch

    def get_last_lr(self) -> list[float]:
        """The groups' rates."""
        return [g["lr"] for g in self.optimizer.param_groups]

    def value(self, epoch: int, base_lr: float) -> float:
        raise NotImplementedError(f"[{type(self).__name__}] defines no value.")

    def values(self, epoch: int, base_lrs: Sequence[float]) -> list[float]:
        """The rates of all groups; for schedules that differ from group to group."""
        return [float(self.value(epoch, base)) for base in base_lrs]

    def step(self) -> None:
        before = self.values(self.epoch, self.base_lrs)
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
        new = self.values(self.epoch, self.base_lrs)
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
        """Take what `state_dict` of this schedule, or of torch's of the same name and options, gave."""
        state = schedule_from_torch(self, state) if "_last_lr" in state else state
        label, groups = type(self).__name__, self.optimizer.param_groups
        if state["kind"] != label:
            raise ValueError(f"[{label}] the state expects to be of this schedule, got {state['kind']}.")
        epoch, bases = state["epoch"], as_list(state["base_lr"])
        if len(bases) != len(groups) or type(epoch) not in self.counts or epoch < 0:
            raise ValueError(
                f"[{label}] expects an epoch and {len(groups)} rates, got {epoch!r} and {len(bases)} rates."
            )
        self.resume(epoch, [number(label, "base_lr", base) for base in bases])
        rates = as_list(state["lr"] if "lr" in state else self.values(epoch, self.base_lrs))
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


class ConstantLR(Schedule):
    """Times `factor` for the first `total_iters` epochs."""

    def __init__(self, optimizer: Optimizer, factor: float = 1 / 3, total_iters: int = 5) -> None:
        if not 0 <= factor <= 1:
            raise ValueError(f"[ConstantLR] factor expects a number from 0 to 1, got {factor}.")
        self.factor, self.total_iters = factor, positive("ConstantLR", "total_iters", total_iters)
        super().__init__(optimizer)

    def value(self, epoch: int, base_lr: float) -> float:
        return base_lr * self.factor if epoch < self.total_iters else base_lr


class PolynomialLR(Schedule):
    """Down to zero in `total_iters` epochs: what is left of them, to a power."""

    def __init__(self, optimizer: Optimizer, total_iters: int = 5, power: float = 1.0) -> None:
        self.total_iters, self.power = positive("PolynomialLR", "total_iters", total_iters), power
        super().__init__(optimizer)

    def value(self, epoch: int, base_lr: float) -> float:
        return base_lr * (1 - min(epoch, self.total_iters) / self.total_iters) ** self.power


class LambdaLR(Schedule):
    """The base rate times what a function of the epoch gives; one function, or a list with one for each group.

    Functions are not part of `state_dict`.
    """

    absolute = True

    def __init__(self, optimizer: Optimizer, lr_lambda: Callable[[int], float] | list[Callable[[int], float]]) -> None:
        self.lr_lambdas = per_group(type(self).__name__, "lr_lambda", lr_lambda, optimizer)
        super().__init__(optimizer)

    def values(self, epoch: int, base_lrs: Sequence[float]) -> list[float]:
        return [float(base * f(epoch)) for base, f in zip(base_lrs, self.lr_lambdas, strict=True)]


class MultiplicativeLR(LambdaLR):
    """The rate of the epoch before times what a function of the epoch, from 1 on, gives."""

    absolute = False

    def values(self, epoch: int, base_lrs: Sequence[float]) -> list[float]:
        factors = [math.prod(f(e) for e in range(1, epoch + 1)) for f in self.lr_lambdas]
        return [float(base * factor) for base, factor in zip(base_lrs, factors, strict=True)]

    def step(self) -> None:
        self.epoch += 1
        for group, f in zip(self.optimizer.param_groups, self.lr_lambdas, strict=True):
            group.data["lr"] = float(group["lr"] * f(self.epoch))

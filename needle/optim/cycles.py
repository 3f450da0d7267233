"""Schedules that go up and down: one cycle, cycles of one length, cosines that begin anew."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from .base import Optimizer
from .group import number
from .plateau import one_of
from .schedule import Schedule, per_group, positive


class CosineAnnealingWarmRestarts(Schedule):
    """Half a cosine from the base rate to `eta_min` in `T_0` epochs, then anew, `T_mult` times as long each time.

    `step(epoch)` goes to that epoch, also between two (Loshchilov and Hutter, 2017).
    """

    absolute = True
    counts = (int, float)

    def __init__(self, optimizer: Optimizer, T_0: int, T_mult: int = 1, eta_min: float = 0.0) -> None:
        label = "CosineAnnealingWarmRestarts"
        self.T_0, self.T_mult = positive(label, "T_0", T_0), positive(label, "T_mult", T_mult)
        self.eta_min = eta_min
        super().__init__(optimizer)

    def value(self, epoch: float, base_lr: float) -> float:
        length = self.T_0
        if self.T_mult == 1:
            epoch %= length
        while epoch >= length:
            epoch, length = epoch - length, length * self.T_mult
        return self.eta_min + (base_lr - self.eta_min) * (1 + math.cos(math.pi * epoch / length)) / 2

    def step(self, epoch: float | None = None) -> None:
        if epoch is None:
            return super().step()
        self.epoch = number("CosineAnnealingWarmRestarts", "epoch", epoch)  # type: ignore[assignment]
        return self.write(None)

    @property
    def last_epoch(self) -> int:
        return math.floor(self.epoch)


class Cycle(Schedule):
    """Base: a schedule of rates and, where `cycle_momentum`, of momentum, or the first of betas, against them.

    cycle_momentum None: where the optimizer steps by rule torch. base_momentum, max_momentum: of all groups, or lists.
    """

    absolute = True

    def __init__(
        self,
        optimizer: Optimizer,
        cycle_momentum: bool | None,
        base_momentum: float | Sequence[float],
        max_momentum: float | Sequence[float],
    ) -> None:
        label, groups = type(self).__name__, optimizer.param_groups
        self.cycle_momentum = optimizer.rule == "torch" if cycle_momentum is None else cycle_momentum
        self.base_momentum = per_group(label, "base_momentum", base_momentum, optimizer)
        self.max_momentum = per_group(label, "max_momentum", max_momentum, optimizer)
        self.cycled = "beta1" if "betas" in groups[0] else "momentum" if "momentum" in groups[0] else ""
        if self.cycle_momentum and not self.cycled:
            raise ValueError(
                f"[{label}] cycle_momentum expects an optimizer with momentum or betas, got {type(optimizer).__name__}."
            )
        super().__init__(optimizer)

    def momentum(self, epoch: int, least: float, most: float) -> float:
        raise NotImplementedError(f"[{type(self).__name__}] defines no momentum.")

    def write(self, before: Sequence[float] | None) -> None:
        super().write(before)
        if self.cycle_momentum:
            for group, *ends in zip(self.optimizer.param_groups, self.base_momentum, self.max_momentum, strict=True):
                group[self.cycled] = self.momentum(self.epoch, *ends)


class OneCycleLR(Cycle):
    """Up to `max_lr` and down to almost nothing within `total_steps` (Smith and Topin, 2018).

    max_lr: of all groups, or a list with one for each. total_steps: or `epochs` times `steps_per_epoch`. cycle_momentum: takes
    momentum, or the first of betas, from `max_momentum` to `base_momentum` and back; by default where the optimizer steps by
    rule torch. three_phase: down to where it began in as many steps as up, and only then to almost nothing.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        max_lr: float | Sequence[float],
        total_steps: int | None = None,
        epochs: int | None = None,
        steps_per_epoch: int | None = None,
        pct_start: float = 0.3,
        anneal_strategy: str = "cos",
        cycle_momentum: bool | None = None,
        base_momentum: float | Sequence[float] = 0.85,
        max_momentum: float | Sequence[float] = 0.95,
        div_factor: float = 25.0,
        final_div_factor: float = 1e4,
        three_phase: bool = False,
    ) -> None:
        label = "OneCycleLR"
        given = {"epochs": epochs, "steps_per_epoch": steps_per_epoch}
        counts = [positive(label, name, value) for name, value in given.items() if value is not None]
        if total_steps is None:
            if len(counts) < 2:
                raise ValueError(f"[{label}] expects total_steps, or epochs and steps_per_epoch, got neither.")
            total_steps = math.prod(counts)
        self.total_steps = positive(label, "total_steps", total_steps)
        self.pct_start = number(label, "pct_start", pct_start)
        if self.pct_start > 1:
            raise ValueError(f"[{label}] pct_start expects a number from 0 to 1, got {pct_start}.")
        self.anneal_strategy = one_of(label, "anneal_strategy", anneal_strategy, "cos", "linear")
        self.div_factor, self.final_div_factor, self.three_phase = div_factor, final_div_factor, three_phase
        self.max_lr = max_lr
        for group, rate in zip(optimizer.param_groups, per_group(label, "max_lr", max_lr, optimizer), strict=True):
            group["initial_lr"] = number(label, "max_lr", rate) / div_factor
        super().__init__(optimizer, cycle_momentum, base_momentum, max_momentum)

    def value(self, epoch: int, base_lr: float) -> float:
        return self.between(base_lr, base_lr * self.div_factor, base_lr / self.final_div_factor, epoch)

    def momentum(self, epoch: int, least: float, most: float) -> float:
        return self.between(most, least, most, epoch)

    def between(self, first: float, top: float, last: float, epoch: int) -> float:
        """From `first` to `top`, back where there are three phases, and on to `last`."""
        if epoch > self.total_steps:
            raise ValueError(f"[OneCycleLR] has {self.total_steps} steps in all, got {epoch}.")
        up, end = self.pct_start * self.total_steps - 1, self.total_steps - 1
        phases = [(up, first, top), (end, top, last)]
        if self.three_phase:
            phases[1:] = [(2 * up, top, first), (end, first, last)]
        i = next(i for i, (stop, *_) in enumerate(phases) if epoch <= stop or stop == end)
        begin = phases[i - 1][0] if i else 0.0
        stop, a, b = phases[i]
        done = (epoch - begin) / (stop - begin) if stop > begin else 1.0
        if self.anneal_strategy == "linear":
            return a + (b - a) * done
        return b + (a - b) / 2 * (1 + math.cos(math.pi * done))


# How high a cycle, or an iteration, is beside the first, and whether the number of the one or of the other says so.
HEIGHTS: dict[str, tuple[Callable[[float, float], float], str]] = {
    "triangular": (lambda gamma, cycle: 1.0, "cycle"),
    "triangular2": (lambda gamma, cycle: 1 / 2 ** (cycle - 1), "cycle"),
    "exp_range": (lambda gamma, iteration: gamma**iteration, "iterations"),
}


class CyclicLR(Cycle):
    """Up from `base_lr` to `max_lr` in `step_size_up` steps and down in `step_size_down`, again and again (Smith, 2017).

    mode: cycles stay as high ("triangular"), halve ("triangular2") or fade by gamma each step ("exp_range"). scale_fn: how high
    instead, of the number of the cycle from 1 on, or of the step (scale_mode "iterations"). cycle_momentum: takes momentum, or
    the first of betas, from `max_momentum` to `base_momentum` and back; by default where the optimizer steps by rule torch.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        base_lr: float | list[float],
        max_lr: float | list[float],
        step_size_up: int = 2000,
        step_size_down: int | None = None,
        mode: str = "triangular",
        gamma: float = 1.0,
        scale_fn: Callable[[float], float] | None = None,
        scale_mode: str = "cycle",
        cycle_momentum: bool | None = None,
        base_momentum: float | list[float] = 0.8,
        max_momentum: float | list[float] = 0.9,
    ) -> None:
        label = "CyclicLR"
        self.up = positive(label, "step_size_up", step_size_up)
        self.down = self.up if step_size_down is None else positive(label, "step_size_down", step_size_down)
        self.mode, self.gamma, self.scale_fn = mode, gamma, scale_fn
        self.scale_mode = one_of(label, "scale_mode", scale_mode, "cycle", "iterations")
        if scale_fn is None:
            self.scale_mode = HEIGHTS[one_of(label, "mode", mode, *HEIGHTS)][1]
        self.max_lrs = per_group(label, "max_lr", max_lr, optimizer)
        bases = [number(label, "base_lr", rate) for rate in per_group(label, "base_lr", base_lr, optimizer)]
        for group, rate in zip(optimizer.param_groups, bases, strict=True):
            group["lr"] = rate
        super().__init__(optimizer, cycle_momentum, base_momentum, max_momentum)
        self.base_lrs = bases  # torch's first rate is the one before any schedule, where there was one

    def values(self, epoch: int, base_lrs: Sequence[float]) -> list[float]:
        return [base + (top - base) * self.height(epoch) for base, top in zip(base_lrs, self.max_lrs, strict=True)]

    def momentum(self, epoch: int, least: float, most: float) -> float:
        return most - (most - least) * self.height(epoch)

    def height(self, epoch: int) -> float:
        """From 0 at the base to 1 at the top of the first cycle."""
        length = self.up + self.down
        cycle, place = 1 + epoch // length, epoch % length
        part = place / self.up if place <= self.up else (length - place) / self.down
        at = cycle if self.scale_mode == "cycle" else epoch
        return part * (self.scale_fn(at) if self.scale_fn else HEIGHTS[self.mode][0](self.gamma, at))

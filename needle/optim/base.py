"""What all optimizers share. They write parameters in place, keep their state outside the tape and never change gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from needle.autograd import Tensor
from needle.backend_ndarray import NDArray, call
from needle.nn.module import Parameter

from .clip import clip_grad_norm


class Optimizer:
    """Base: `params`, `lr`, `reset_grad`, `step`. State arrays are made at a parameter's first step.

    A subclass names its numbers (`options`) and state arrays (`slots`) and defines `kernel` and `formula`.
    """

    options: ClassVar[tuple[str, ...]] = ("lr",)
    lr: float

    def __init__(self, params: Iterable[Parameter]) -> None:
        self.params = list(params)
        self.state: dict[int, list[Any]] = {}
        self.t = 0  # steps so far

    @property
    def slots(self) -> tuple[str, ...]:
        return ()

    def reset_grad(self) -> None:
        for p in self.params:
            p.grad = None

    zero_grad = reset_grad

    def step(self) -> None:
        for i, p in enumerate(self.params):
            if p.grad is not None and p.grad.shape != p.shape:
                label, got = type(self).__name__, p.grad.shape
                raise ValueError(f"[{label}] the gradient of parameter {i} expects shape {p.shape}, got {got}.")
        self.t += 1
        groups: dict[Any, list[tuple[Parameter, Any, list[Any]]]] = {}  # what one kernel call steps together
        turns: dict[int, int] = {}  # a parameter given twice is stepped twice, one time after the other
        for i, p in enumerate(self.params):
            if p.grad is None:
                continue
            data, grad = p.cached_data, p.grad.realize_cached_data()
            first = i not in self.state
            if first:
                self.state[i] = [zeros_like(data) for _ in self.slots]
            if isinstance(data, np.ndarray):
                self.formula(data, grad, self.state[i], first)
                continue
            if not data.is_compact():
                p.data = Tensor.make_const(data.compact())  # the kernels write contiguous memory
            turn = turns[id(p)] = turns.get(id(p), -1) + 1
            groups.setdefault((turn, first, data.dtype, data.device), []).append((p, grad.compact(), self.state[i]))
        for (_, first, *_), group in groups.items():
            name, *attrs = self.kernel(first)
            outs = [a for p, _, state in group for a in self.operands(p.cached_data, state)]
            call(name, outs, [grad for _, grad, _ in group], *attrs)
            for p, _, _ in group:
                p.touch()

    def kernel(self, first: bool) -> tuple[Any, ...]:
        """The kernel that steps parameters on a device, and its attributes; `first`: at their first step."""
        raise NotImplementedError(f"[{type(self).__name__}] defines no kernel.")

    def operands(self, data: Any, state: list[Any]) -> list[Any]:
        """What the kernel writes for a parameter."""
        return [data, *state]

    def formula(self, data: np.ndarray, grad: np.ndarray, state: list[Any], first: bool) -> None:
        """The step in numpy, in place."""
        raise NotImplementedError(f"[{type(self).__name__}] defines no formula.")

    def clip_grad_norm(self, max_norm: float = 0.25) -> float:
        """See `needle.optim.clip_grad_norm`."""
        return clip_grad_norm(self.params, max_norm)

    # -- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """{"kind", "step", "options": {name: number}, "state": {parameter's place: {slot: numpy array}}}, all copies."""
        arrays = {
            i: {
                slot: np.array(a if isinstance(a, np.ndarray) else a.numpy())
                for slot, a in zip(self.slots, s, strict=True)
            }
            for i, s in self.state.items()
        }
        options = {name: getattr(self, name) for name in self.options}
        return {"kind": type(self).__name__, "step": self.t, "options": options, "state": arrays}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `state_dict` of an optimizer of the same kind over parameters of the same shapes gave."""
        label = type(self).__name__
        if state["kind"] != label:
            raise ValueError(f"[{label}] the state expects to be of this optimizer, got {state['kind']}.")
        if set(state["options"]) != set(self.options):
            raise ValueError(f"[{label}] the state expects options {self.options}, got {tuple(state['options'])}.")
        before = {name: getattr(self, name) for name in self.options}
        self._set(state["options"])
        try:
            loaded = {int(i): self._arrays(int(i), arrays) for i, arrays in state["state"].items()}
        except ValueError:
            self._set(before)
            raise
        self.state, self.t = loaded, int(state["step"])

    def _set(self, options: Mapping[str, Any]) -> None:
        for name in self.options:
            setattr(self, name, options[name])

    def _arrays(self, i: int, arrays: Mapping[str, np.ndarray]) -> list[Any]:
        label = type(self).__name__
        if not 0 <= i < len(self.params):
            raise ValueError(f"[{label}] the state expects {len(self.params)} parameters, got number {i}.")
        if set(arrays) != set(self.slots):
            raise ValueError(f"[{label}] the state expects arrays {self.slots}, got {tuple(arrays)}.")
        p, made = self.params[i], []
        for slot in self.slots:
            if tuple(arrays[slot].shape) != tuple(p.shape):
                raise ValueError(
                    f"[{label}] {slot} of parameter {i} expects shape {p.shape}, got {arrays[slot].shape}."
                )
            made.append(Tensor(arrays[slot], device=p.device, dtype=p.dtype).cached_data)
        return made


def zeros_like(a: Any) -> Any:
    if isinstance(a, np.ndarray):
        return np.zeros_like(a)
    out = NDArray.empty(a.shape, a.dtype, a.device)
    out.fill(0.0)
    return out

"""Averages of a model's parameters over its training, and the model with them for a while."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from needle.autograd import Tensor
from needle.backend_ndarray import FLOATS
from needle.nn.module import Module

from .group import number


class Average:
    """Base: `weight()` is how much of a new value an average takes. The first `update` takes values as they are.

    use_buffers: running statistics are averaged, too; else the model's own stay, as in torch.optim.swa_utils.AveragedModel.
    """

    def __init__(self, model: Module, use_buffers: bool = False) -> None:
        if not isinstance(model, Module):
            raise TypeError(f"[{type(self).__name__}] expects a needle module, got {type(model).__name__}.")
        self.model, self.use_buffers = model, use_buffers
        self.count = 0  # updates so far
        self.values: dict[str, Any] = {name: t.cached_data + 0 for name, t in self.tensors()}
        self.applied = False

    def weight(self) -> float:
        raise NotImplementedError(f"[{type(self).__name__}] defines no weight.")

    def tensors(self) -> list[tuple[str, Tensor]]:
        """What is averaged, by path."""
        found = list(self.model.named_parameters())
        return found + [(n, t) for n, t in self.model.named_buffers() if t.dtype in FLOATS] * self.use_buffers

    def update(self) -> None:
        """Take the model's values of now, usually after each step of an optimizer."""
        if self.applied:
            raise RuntimeError(f"[{type(self).__name__}] update expects the model's own parameters, got the averages.")
        own, weight = dict(self.tensors()), self.weight() if self.count else 1.0
        if own.keys() != self.values.keys():
            name = min(own.keys() ^ self.values.keys())
            raise ValueError(f"[{type(self).__name__}] expects the parameters it was made for, got a change of {name}.")
        for name, t in own.items():
            kept = self.kept(name, t)
            self.values[name] = t.cached_data * weight + kept * (1 - weight) if weight < 1 else t.cached_data + 0
        self.count += 1

    def kept(self, name: str, tensor: Tensor) -> Any:
        """The average, where and as the model's tensor is."""
        a, data = self.values[name], tensor.cached_data
        if (
            type(a) is not type(data)
            or a.dtype != data.dtype
            or getattr(a, "device", None) != getattr(data, "device", None)
        ):
            a = self.values[name] = Tensor(a, device=tensor.device, dtype=tensor.dtype).cached_data
        return a

    @contextmanager
    def apply(self) -> Iterator[Module]:
        """The model with its averages inside the block; after it, its own values."""
        if self.applied:
            raise RuntimeError(f"[{type(self).__name__}] the averages are in the model already.")
        own = [(t, t.cached_data, self.kept(name, t)) for name, t in self.tensors()]
        self.applied = True
        try:
            for t, _, average in own:
                t.data = Tensor.make_const(average)
            yield self.model
        finally:
            for t, before, _ in own:
                t.data = Tensor.make_const(before)
            self.applied = False

    def state_dict(self) -> dict[str, Any]:
        """Copies: {"kind", "count", "values": {path: numpy array}}."""
        values = {name: np.array(a if isinstance(a, np.ndarray) else a.numpy()) for name, a in self.values.items()}
        return {"kind": type(self).__name__, "count": self.count, "values": values}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        label, own, values = type(self).__name__, dict(self.tensors()), state["values"]
        if state["kind"] != label:
            raise ValueError(f"[{label}] the state expects to be of this kind, got {state['kind']}.")
        if values.keys() != own.keys():
            name = min(own.keys() ^ values.keys())
            raise ValueError(f"[{label}] the state expects the model's parameters, got another set: {name}.")
        for name, t in own.items():
            if tuple(values[name].shape) != tuple(t.shape):
                raise ValueError(f"[{label}] {name} expects shape {tuple(t.shape)}, got {tuple(values[name].shape)}.")
        self.values = {n: Tensor(values[n], device=t.device, dtype=t.dtype).cached_data for n, t in own.items()}
        self.count = int(state["count"])


class EMA(Average):
    """Exponential moving averages: average = decay average + (1 - decay) value."""

    def __init__(self, model: Module, decay: float = 0.999, use_buffers: bool = False) -> None:
        self.decay = number("EMA", "decay", decay)
        if self.decay > 1:
            raise ValueError(f"[EMA] decay expects a number from 0 to 1, got {decay}.")
        super().__init__(model, use_buffers)

    def weight(self) -> float:
        return 1 - self.decay

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"decay": self.decay}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.decay = float(state["decay"])


class SWA(Average):
    """The mean of all values taken (Izmailov et al., arXiv 1803.05407)."""

    def weight(self) -> float:
        return 1 / (self.count + 1)

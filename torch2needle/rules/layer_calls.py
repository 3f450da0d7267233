"""Functional calls that depend on the mode become calls of small layers beside the module that makes them."""

from __future__ import annotations

from typing import Any

from needle.autograd import Tensor
from needle.graph import Mode
from needle.nn.module import Module


def hang(mode: Mode, layer: Module) -> str:
    """The path of `layer`, which has no tensors of its own, below the module whose flag it follows."""
    stem, owner = type(layer).__name__.lower(), mode.module
    name = next(n for i in range(1 << 30) if (n := f"{stem}_{i}") not in owner.__dict__)
    owner.__dict__[name] = layer
    layer.training = owner.training
    return f"{mode.path}.{name}" if mode.path else name


class Probability(Mode):
    """Of dropping: `p` where the module trains, 0 else."""

    def __init__(self, module: Module, path: str, p: float) -> None:
        super().__init__(module, path)
        self.p = p

    def value(self) -> float:  # type: ignore[override]
        return self.p * super().value()


def call_layer(mode: Mode, layer: Module, x: Tensor, *args: Any) -> Any:
    """Hang `layer` below the module whose flag it follows, and call it."""
    x.recorder.leaf_paths[id(layer)] = hang(mode, layer)
    return layer(x, *args)

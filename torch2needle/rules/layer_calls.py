"""Functional calls that depend on the mode become calls of small layers beside the module that makes them."""

from __future__ import annotations

from typing import Any

from needle.autograd import Tensor
from needle.graph import Mode
from needle.nn.module import Module


def call_layer(mode: Mode, layer: Module, x: Tensor, *args: Any) -> Any:
    """Hang `layer`, which has no tensors of its own, below the module whose flag it follows, and call it."""
    stem, owner = type(layer).__name__.lower(), mode.module
    name = next(n for i in range(1 << 30) if (n := f"{stem}_{i}") not in owner.__dict__)
    owner.__dict__[name] = layer
    layer.training = owner.training
    path = f"{mode.path}.{name}" if mode.path else name
    x.recorder.leaf_paths[id(layer)] = path
    return layer(x, *args)

"""What a model's forward writes, taken back after runs that are to change nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from needle.autograd import Tensor
from needle.backend_ndarray import NDArray, call
from needle.nn.functional import WriteBuffer
from needle.nn.module import Module, Parameter

from .module import GraphModule


@contextmanager
def state_kept(model: Any) -> Iterator[None]:
    """What runs of a Module write into its tensors meanwhile is taken back; anything else has none."""
    before = [(t, t.cached_data, t.numpy()) for t in written(model)] if isinstance(model, Module) else []
    try:
        yield
    finally:
        for t, array, values in before:
            moved, t.cached_data = t.cached_data is not array, array
            if moved or t.numpy().tobytes() != values.tobytes():
                if isinstance(array, np.ndarray):
                    array[...] = values
                else:
                    call("copy", [array], x=NDArray(values, device=t.device, dtype=t.dtype))
                t.touch()


def written(model: Module) -> list[Tensor]:
    """The buffers, which a forward may write, and the parameters that graphs write."""
    found = {id(t): t for _, t in model.named_tensors() if not isinstance(t, Parameter)}
    for _, net in model.named_modules():
        if not isinstance(net, GraphModule):
            continue
        for node in net.graph:
            if node.kind == "module" and isinstance(net.get_submodule(node.target), WriteBuffer):
                target = node.args[0]
                if target.kind == "param":
                    found[id(net.constant(target))] = net.constant(target)
    return list(found.values())

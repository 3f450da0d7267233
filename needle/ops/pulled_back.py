"""The gradient of what has none of its own, where sizes are not known yet."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from needle.autograd import Op, Spec, Tensor, Unsupported, op, vjp
from needle.backend_ndarray import FLOATS
from needle.op import TAPE, recording
from needle.ops.common import alias
from needle.ops.families import samples_of
from needle.ops.nn.conv_nd import Conv1d

__all__: list[str] = []


def pulled_back(f: Callable, out_grad: Any, *inputs: Any) -> tuple[Any, ...]:
    """The gradients of f's inputs, from its result's; None of what it does not depend on."""
    again = TAPE.recording and any(t.requires_grad for t in (*inputs, out_grad))  # the gradients need some themselves
    given = [t if t.dtype not in FLOATS else alias(t) if again and t.requires_grad else leaf(t) for t in inputs]
    recorder = given[0].recorder
    with recording(True):
        if recorder is None:
            found = vjp(f(*given), out_grad, given)
            return found if again else tuple(g if g is None else g.detach() for g in found)
        before, recorder.trains = recorder.trains, True  # an op without a gradient of its own is what it is made of
        try:
            return vjp(f(*given), out_grad, given)
        finally:
            recorder.trains = before


def leaf(t: Tensor) -> Tensor:
    """The same value at which a gradient ends."""
    made = copy.copy(t)
    made.op, made.inputs, made.requires_grad = None, (), True
    return made


class PulledBackLater:
    """On the tape in the place of an op whose gradient is that of what it decomposes into, while sizes are not known."""

    def __init__(self, op: Op) -> None:
        self.op = op

    def gradient_as_tuple(self, out_grad: Any, node: Tensor) -> tuple[Any, ...]:
        given = node.inputs
        return tuple(PulledBack(self.op, i)(*given, out_grad) if t.requires_grad else None for i, t in enumerate(given))


@op
class PulledBack(Op):
    """The gradient of input number `place` of the op `forward`. Inputs: the op's, and its result's gradient."""

    forward: Op
    place: int

    def infer(self, *inputs: Any) -> Spec:
        *given, grad = inputs
        out = self.forward.infer(*given)
        if tuple(grad.shape) != tuple(out.shape):
            raise ValueError(f"[{self.label}] expects a gradient of shape {tuple(out.shape)}, got {tuple(grad.shape)}.")
        return Spec(tuple(given[self.place].shape), str(given[self.place].dtype))

    def decompose(self, *inputs: Tensor) -> Any:
        *given, grad = inputs
        found = pulled_back(self.forward, grad, *given)[self.place]
        if found is None:
            raise Unsupported(f"[{self.label}] {self.forward.label} has no gradient of its input {self.place}.")
        return found

    samples = samples_of(({"forward": Conv1d((2,), (1, 0)), "place": 1}, [(2, 3, 7), (4, 3, 2), (2, 4, 4)]))

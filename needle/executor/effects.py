"""What a training step does beside its results: buffers and parameters that its plan writes in place.

early: as soon as the value is there and nothing reads the old one (`order.py`), else when the step has come to its end.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from needle.autograd import Tensor
from needle.backend_ndarray import NDArray
from needle.backend_ndarray.kernels import call

from .builder import Builder


class Write(NamedTuple):
    """A buffer takes a value that the step computes."""

    tensor: Tensor
    label: str = "write"
    early: bool = False

    def plan(self, builder: Builder, value: NDArray) -> None:
        call("copy", [state(builder, self.tensor)], x=value)


class Update(NamedTuple):
    """The optimizer steps a parameter by its gradient. arrays: tensors over the optimizer's state, by name."""

    optimizer: Any
    group: int
    parameter: Tensor
    arrays: dict[str, Tensor]
    label: str
    early: bool = True

    def plan(self, builder: Builder, value: NDArray) -> None:
        held = {slot: state(builder, t) for slot, t in self.arrays.items()}
        name, attrs = self.optimizer.kernel(self.optimizer.param_groups[self.group], 1, True)
        outs = self.optimizer.operands(state(builder, self.parameter), held, tuple(held))
        builder.call(name, outs, {"grad": value.compact(), **attrs})


def state(builder: Builder, tensor: Tensor) -> NDArray:
    return builder.constant(builder.pool.parameter(tensor), True)

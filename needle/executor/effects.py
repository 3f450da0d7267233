"""What a plan does beside its results: buffers and parameters that it writes in place.

early: as soon as the value is there and nothing reads the old one (`order.py`), else when the step has come to its end.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from needle.autograd import Tensor
from needle.backend_ndarray import NDArray
from needle.backend_ndarray.kernels import call
from needle.graph import Graph, Node

from .builder import Builder


class Write(NamedTuple):
    """A buffer takes a value that the plan computes, unless it was computed where the buffer is."""

    tensor: Tensor
    label: str = "write"
    early: bool = False

    def plan(self, builder: Builder, value: NDArray) -> None:
        place = state(builder, self.tensor)
        if value is not place:
            call("copy", [place], x=value)


class Update(NamedTuple):
    """The optimizer steps a parameter by its gradient. arrays: tensors over the optimizer's state, by name."""

    optimizer: Any
    group: int
    parameter: Tensor
    arrays: dict[str, Tensor]
    label: str
    early: bool = True

    def plan(self, builder: Builder, value: NDArray) -> None:
        if self.optimizer.composed:  # its ops stand in the graph
            return
        held = {slot: state(builder, t) for slot, t in self.arrays.items()}
        name, attrs = self.optimizer.kernel(self.optimizer.param_groups[self.group], 1, True)
        outs = self.optimizer.operands(state(builder, self.parameter), held, tuple(held))
        builder.call(name, outs, {"grad": value.compact(), **attrs})


def changes(graph: Graph, tensors: Iterable[Tensor]) -> None:
    """Note the graph's parameters that lie in the memory of `tensors`, which its plan writes."""
    changing = {id(t.cached_data._handle) for t in tensors}
    for node in graph:
        if node.kind == "param":  # which may be a part of a changing one's memory
            node.meta["state"] = id(node.meta["tensor"].cached_data._handle) in changing


def updated_in_place(graph: Graph) -> dict[Node, Node]:
    """The ops that change a part of a buffer where it is, each with the buffer's node: nothing else reads what they change."""
    effects, users, found = graph.output.meta.get("effects", ()), graph.users(), dict[Node, Node]()
    for effect, value in zip(effects, graph.output.args[1] if effects else (), strict=True):
        chain, node = [], value
        while node.kind == "op" and node.target.updates and users[node.args[0]] == [node]:
            chain.append(node)
            node = node.args[0]
        if isinstance(effect, Write) and node.kind == "param" and node.meta["tensor"] is effect.tensor:
            found.update(dict.fromkeys(chain, node))
    return found


def state(builder: Builder, tensor: Tensor) -> NDArray:
    return builder.constant(builder.pool.parameter(tensor), True)

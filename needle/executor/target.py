"""What the executor asks of a target: how it keeps values, what ops become there, which steps are one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from needle.backend_ndarray import Device, NDArray
from needle.graph.engine import Rules
from needle.op import Op

from .settings import Choice
from .step import Halo

if TYPE_CHECKING:
    from needle.graph import Graph, Node

    from .builder import Builder
    from .planner import Planner

Lowering = Callable[..., Any]


class Layout:
    """Where the values of one plan lie. This one keeps every value as a plain array.

    A target with a layout of its own ("native", as blocks of channels) says which values have it; a value may lie in both.
    """

    kernels: Sequence[str] = ()  # of the steps that lead from one layout to the other

    def __init__(self, planner: Planner) -> None:
        self.planner = planner

    def wants(self, node: Node) -> bool:
        """Whether the value of `node` is made in the native layout."""
        return False

    def place(self, node: Node) -> None:
        """A native value has its home: whatever else may lie in it."""

    def reads(self, node: Node) -> list[bool]:
        """Which inputs a native node reads in the native layout."""
        return [False] * len(node.args)

    def operands(self, node: Node, ins: list[NDArray]) -> list[NDArray]:
        """The inputs of a native node as its kernel takes them."""
        return ins

    def around(self, node: Node, index: int) -> Halo:
        """What a native node reads around one of its inputs."""
        raise NotImplementedError

    def allocate(self, node: Node) -> NDArray:
        """Native memory for a value."""
        raise NotImplementedError

    def enter(self, node: Node) -> NDArray:
        """Memory for a plain value as a native one; `load` copies it."""
        raise NotImplementedError

    def constant(self, node: Node, plain: NDArray) -> NDArray | None:
        """A constant as a native value that is made once, where that can be."""
        return None

    def load(self, out: NDArray, plain: NDArray) -> None:
        raise NotImplementedError

    def leave(self, node: Node) -> NDArray:
        """Memory for a native value as a plain one; `store` copies it."""
        return NDArray.empty(node.meta["spec"].shape)

    def store(self, out: NDArray, native: NDArray) -> None:
        raise NotImplementedError


class Target:
    """A kind of device: what differs from other kinds is here, in its lowerings and in its rules.

    numpy: ops that eager calls compute in numpy do so between plans
    complete: dtypes for which it has all kernels
    guard_zone: bytes before and behind every buffer of a guarded plan
    traces_sizes: plans for further shapes may come from one whose sizes were traced
    """

    layout: type[Layout] = Layout
    numpy = False
    complete: Sequence[str] = ()
    guard_zone = 0
    traces_sizes = False

    def __init__(self, name: str) -> None:
        self.name = name
        self.lowerings: dict[type[Op], tuple[Lowering, bool]] = {}
        self.rules = Rules("compile")  # of graphs, over ops, and of plans, over kernels
        TARGETS[name] = self

    def lowers(self, *ops: type[Op], makes: bool = False) -> Callable[[Lowering], Lowering]:
        """Decorator: what the ops and their subclasses become, f(builder, op, inputs, out); where the default does not do,
        which is the op's `into`, else its `compute`, run on virtual memory.

        makes: f(builder, op, inputs) returns the value, in memory of its own.
        """

        def register(f: Lowering) -> Lowering:
            self.lowerings |= dict.fromkeys(ops, (f, makes))
            return f

        return register

    def lowering(self, op: Op) -> tuple[Lowering, bool] | None:
        return next((self.lowerings[c] for c in type(op).__mro__ if c in self.lowerings), None)

    def splits(self, graph: Graph) -> dict[Node, Callable[..., Any]]:
        """The ops of several passes that it plans pass by pass, with what each becomes: f(*inputs), of its outputs."""
        return {}

    def folds(self, op: Op) -> bool:
        """Whether an op has to be rewritten by `rules` before it is planned."""
        return False

    def can_fold(self, op: Op, inputs: Sequence[Any], constant: Collection[int], disable: Collection[str]) -> bool:
        """Whether it will be, for inputs of these shapes, some of which are constant; else it is decomposed."""
        return False

    def prepared(self, graph: Graph) -> Graph:
        """The graph in a form to which its rules apply; the same results."""
        return graph

    def arranged(self, graph: Graph) -> Graph:
        """The graph in an order or form that its layout can use; the same ops on the same values."""
        return graph

    def memory(self, op: Op, spec: Any, ins: Sequence[NDArray], leaves: bool) -> NDArray:
        """Memory for a plain result; leaves: only the plan's outputs read it."""
        return NDArray.empty(spec.shape, spec.dtype) if leaves else op.memory(spec)

    def holds(self, op: Op, home: NDArray, ins: Sequence[NDArray], leaves: bool) -> bool:
        """Whether an op may write its plain result into this memory of an input, as `memory` would have it."""
        return home.is_compact()

    def row(self, builder: Builder, name: str, named: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """The kernel and arguments that stand for a call, such as the row that takes a precision."""
        return name, named

    def check(self, choice: Choice, device: Device) -> None:
        """Raises ValueError for settings that the target does not have."""
        self.rules.select(disable=choice.disable)

    def machine(self, device: Device) -> list[Any]:
        """What measured times hold for."""
        raise NotImplementedError

    def describe(self, info: Any) -> str:
        """Where and how a plan runs, for its first line."""
        return ""


TARGETS: dict[str, Target] = {}  # filled by needle.targets


def target_of(device: Device) -> Target:
    return TARGETS[device.target]


__all__ = ["TARGETS", "Layout", "Lowering", "Target", "target_of"]

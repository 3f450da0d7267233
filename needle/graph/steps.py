"""Steps: every graph node that is one op, whichever way it was spelled."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

from needle import nn
from needle.autograd import Deferred, Op, Tensor
from needle.ops.math.elementwise import AddScalar
from needle.ops.nn.norm import BatchNorm

from .graph import Graph, Node
from .module import GraphModule, Mode
from .record import Recorder, Symbol
from .structure import map_structure


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """A graph node read as one op. A layer's step has the op that its forward records, its parameters among the inputs.

    op: an Op; in a plan the kernel's name
    inputs: nodes of the graph, or of the layer's own recording: its parameters and what is computed from them alone
    layer, path: of a module node; mode: the layer's training flag where the op depends on it, else False
    count: the parameter node of num_batches_tracked, if the layer has one
    """

    node: Node
    op: Any
    inputs: tuple[Node, ...]
    layer: nn.Module | None = None
    path: str = ""
    mode: Any = False
    count: Node | None = None


class Steps(dict[Node, Step]):
    """The step of every node that is one op; other nodes have none. `net`: whose layers a graph calls, if any."""

    def __init__(self, graph: Graph, net: GraphModule | None = None) -> None:
        super().__init__()
        self.net, self.graph = net, graph
        self.taken: dict[Node, Any] = {}  # steps that rules have made part of something, as far as rewriting has come
        self.order = {n: i for i, n in enumerate(graph)}
        self.users = graph.users()
        for node in graph:
            if node.kind == "op" and node.target.n_out == 1:
                self[node] = Step(node, node.target, node.args)

    def layer(self, node: Node) -> nn.Module | None:
        return self.net.get_submodule(node.target) if self.net and node.kind == "module" else None

    def tensor(self, node: Node) -> Any:
        """A parameter's tensor; None for other nodes."""
        if node.kind != "param":
            return None
        return self.net.tensor(node.target) if self.net and isinstance(node.target, str) else node.target

    def touched(self, node: Node) -> set[int]:
        """Identities of the tensors that a node reads or writes besides its data inputs."""
        layer = self.layer(node)
        own = layer.named_tensors() if layer else ()
        return {id(t) for _, t in own} | {id(t) for t in map(self.tensor, node.inputs()) if t is not None}

    def stand_in(self, node: Node, op: Op) -> Step:
        """The node's step, or one for a node that is no op of its own, such as a dropout inside a match."""
        return self.get(node) or Step(node, op, (), self.layer(node), node.target if node.kind == "module" else "")


def find_steps(net: GraphModule) -> Steps:
    paths: dict[int, str] = {}
    for path, tensor in net.named_tensors():
        paths.setdefault(id(tensor), path)
    steps = Steps(net.graph, net)
    for node in net.graph:
        step = layer_step(node, net.get_submodule(node.target), paths) if node.kind == "module" else None
        if step is not None:
            steps[node] = step
    return steps


def layer_step(node: Node, layer: nn.Module, paths: dict[int, str]) -> Step | None:
    """The call of a layer as a step, from what its forward records in evaluation; None when that is not one op."""
    if any(layer.named_children()):
        return None
    mode = Mode(layer, node.target) if layer.mode_dependent else False
    tensors = [t for t in layer.__dict__.values() if isinstance(t, Tensor)]  # constants go where these are
    recorder = Recorder(static=True, device=tensors[0].device if tensors else None)
    recorder.param_paths = paths
    outer: dict[Node, Node] = {}

    def enter(x: Any) -> Any:
        if not isinstance(x, Node):
            return x
        symbol = recorder.input(x.name, x.meta.get("spec"))
        outer[symbol.node] = x
        return symbol

    args = map_structure(node.args, enter)
    kwargs = args[-1] if args and isinstance(args[-1], dict) else {}
    if lacks_statistics(layer, args):
        return Step(node, BatchNorm(layer.eps), (node.args[0],), layer, node.target, mode)  # type: ignore
    stand_in = copy.copy(layer)
    stand_in.training = False
    for name, value in layer.__dict__.items():
        if isinstance(value, Tensor):  # recorded, so that what the layer computes from its weights is, too
            stand_in.__dict__[name] = recorder.param(value)
    try:
        result = stand_in.forward(*(args[:-1] if kwargs else args), **kwargs)
    except Exception:  # it needs sizes or values, so it is more than one op
        return None
    if not isinstance(result, Symbol) or result.node.kind != "op":
        return None
    last = result.node
    if not all(n is last or n in outer or of_parameters(n) for n in recorder.graph):
        return None
    op = last.target
    if mode and hasattr(op, "training"):
        op = dataclasses.replace(op, training=mode)
    elif mode and not (isinstance(op, BatchNorm) and trains_as_batch_norm(layer)):
        return None  # in training it is another op
    tracked = getattr(layer, "num_batches_tracked", None)
    count = None if tracked is None else recorder.param(tracked).node
    if isinstance(layer, nn.FunctionalBatchNorm) and len(node.args) > 5:
        count = node.args[5]
    return Step(node, op, tuple(outer.get(n, n) for n in last.args), layer, node.target, mode, count)


def trains_as_batch_norm(layer: nn.Module) -> bool:
    """An instance norm with running statistics records a batch norm, too, but in evaluation alone."""
    return type(layer).forward in (nn.BatchNorm2d.forward, nn.FunctionalBatchNorm.forward)


def lacks_statistics(layer: nn.Module, args: tuple) -> bool:
    """True for a batch norm that always takes the batch's statistics."""
    if isinstance(layer, nn.FunctionalBatchNorm):
        return len(args) < 3 or args[1] is None or args[2] is None
    return isinstance(layer, nn.BatchNorm2d) and layer.running_mean is None


def of_parameters(node: Node) -> bool:
    """Whether a value depends on parameters alone."""
    left, seen = [node], {node}
    while left:
        n = left.pop()
        if n.kind not in ("param", "op"):
            return False
        more = [i for i in n.inputs() if i not in seen] if n.kind == "op" else []
        seen.update(more)
        left += more
    return True


def passes_on(node: Node, layer: nn.Module | None = None) -> bool:
    """Whether a node's value is its first input: of an identity without hooks, and of 0 + x, with which Python's `sum` begins."""
    if node.kind == "module":
        return type(layer) is nn.Identity and not layer.has_hooks and isinstance(node.args[0], Node)
    if node.kind != "op" or not isinstance(node.target, AddScalar) or isinstance(node.target.scalar, Deferred):
        return False
    spec = node.meta.get("spec")
    return node.target.scalar == 0 and spec is not None and spec == node.args[0].meta.get("spec")


def count_calls(graph: Graph) -> int:
    """Nodes that compute; what a weight goes through before it is packed is not counted."""
    fixed: set[Node] = set()  # what depends on parameters alone
    for n in graph:
        if n.kind == "param" or (n.kind == "op" and all(i in fixed for i in n.inputs())):
            fixed.add(n)
    return sum(n.kind == "module" or (n.kind == "op" and n not in fixed) for n in graph)

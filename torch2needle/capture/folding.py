"""Before conversion: leaves out what nothing reads, and computes with torch what depends on neither inputs nor parameters."""

from __future__ import annotations

import collections
from functools import partial
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator
from torch.utils import _pytree as pytree

from ..rules.overloads import draws, is_overload
from ..rules.registry import find_function_rule, is_inplace


def fold(graph: fx.Graph, constants: dict[str, torch.Tensor], fixed: dict[str, torch.Tensor]) -> None:
    """Replace such nodes, where others read them, by entries of `constants`; `fixed`: attributes with constant values."""
    moving = moving_nodes(graph, fixed)
    folded = [n for n in graph.nodes if n not in moving]
    written = any(is_inplace(n.target) for n in folded if n.op == "call_function")
    values: dict[fx.Node, Any] = {}

    def read(user: fx.Node, n: fx.Node) -> Any:
        """What stands for `n` in its user: the value as it is at that place of the graph."""
        value = values.get(n, n)
        if not isinstance(value, torch.Tensor):
            return value
        key = f"constant_{n.name}" + (f"_{value._version}" if written else "")
        if key not in constants:
            constants[key] = value.clone() if written else value
        with graph.inserting_before(user):
            made = graph.get_attr(key)
        made.meta = dict(n.meta)
        return made

    with torch.no_grad():
        for node in list(graph.nodes):
            if node in moving:
                read_by = partial(read, node)
                node.args = fx.node.map_arg(node.args, read_by)
                node.kwargs = fx.node.map_arg(node.kwargs, read_by)
            elif node.op == "get_attr":
                value = fixed[str(node.target)].detach()
                values[node] = value.clone() if written else value
            else:
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    for node in reversed(folded):
        graph.erase_node(node)


def drop_unread(graph: fx.Graph) -> None:
    """Erase what nothing reads, with the writes into it: sizes for checks, weights that were drawn and then replaced."""
    memory, reads = Memory(graph), collections.defaultdict[Any, set](set)
    for node in graph.nodes:
        reads[memory.of(node)].update(map(memory.of, node.all_input_nodes))
    kept = {memory.of(n) for n in graph.nodes if n.op != "call_function" or has_effects(n)}
    todo = list(kept)
    while todo:
        found = reads[todo.pop()] - kept
        kept |= found
        todo += found
    for node in reversed(list(graph.nodes)):
        if memory.of(node) not in kept:
            graph.erase_node(node)


def has_effects(node: fx.Node) -> bool:
    """Of calls that are not torch's own nobody knows what they do, and calls without a value are there for something: a check, or
    what torch asks before `x.data = y`."""
    if node.meta.get("val") is None:
        return True
    if is_overload(node.target):
        return node.target.namespace != "aten"  # type: ignore[union-attr]
    return isinstance(node.target, HigherOrderOperator)


def moving_nodes(graph: fx.Graph, fixed: dict[str, torch.Tensor]) -> set[fx.Node]:
    """Nodes that depend on inputs, parameters or chance, or share memory with what such a node writes or sees written."""
    memory = Memory(graph)
    last_write = {memory.of(n.args[0]): i for i, n in enumerate(graph.nodes) if writes(n)}
    moving: set[fx.Node] = set()
    while True:
        before, first = len(moving), dict[Any, int]()
        for i, node in enumerate(graph.nodes):
            if node not in moving and (
                moves(node, fixed, last_write, memory) or not moving.isdisjoint(node.all_input_nodes)
            ):
                moving.add(node)
            if node in moving:
                first.setdefault(memory.of(node), i)
        shared = {m for m, i in first.items() if last_write.get(m, -1) >= i}
        moving.update(n for n in graph.nodes if memory.of(n) in shared)
        if len(moving) == before:
            return moving


def writes(node: fx.Node) -> bool:
    return (
        node.op == "call_function" and is_inplace(node.target) and bool(node.args) and isinstance(node.args[0], fx.Node)
    )


def moves(node: fx.Node, fixed: dict[str, torch.Tensor], last_write: dict[Any, int], memory: Memory) -> bool:
    """True for what is no constant whatever its inputs are. A buffer that the forward writes is state."""
    if node.op == "get_attr":
        return str(node.target) not in fixed or memory.of(node) in last_write
    if node.op != "call_function" or isinstance(node.target, HigherOrderOperator):
        return True
    return draws(node.target)


class Memory:
    """Which nodes share memory: by the storages of their recorded values, and by what schemas say."""

    def __init__(self, graph: fx.Graph) -> None:
        self.parent: dict[Any, Any] = {}
        for node in graph.nodes:
            for t in pytree.tree_leaves(node.meta.get("val")):
                if isinstance(t, torch.Tensor):
                    self.join(node, t.untyped_storage()._cdata)
            if is_overload(node.target):
                for arg, value in zip(node.target._schema.arguments, node.args, strict=False):
                    if arg.alias_info is not None and isinstance(value, fx.Node):
                        self.join(node, value)
                if getattr(find_function_rule(node.target), "view", None) == "mode":
                    self.join(node, node.all_input_nodes[0])  # torch.export copies where torch may not

    def of(self, key: Any) -> Any:
        while key in self.parent:
            key = self.parent[key]
        return key

    def join(self, a: Any, b: Any) -> None:
        a, b = self.of(a), self.of(b)
        if a != b:
            self.parent[a] = b

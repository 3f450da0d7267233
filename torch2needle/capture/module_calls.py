"""Aten calls of one layer back into a call of the layer, so that both captures give the same graph."""

from __future__ import annotations

import operator
from typing import Any, cast

import torch
from torch import fx, nn

from ..rules.overloads import is_overload
from ..rules.registry import find_module_rule, is_inplace
from .nodes import tensor_of, written
from .packing import ROWS


def call_modules(graph: fx.Graph, model: nn.Module) -> None:
    """Replace each run of calls that a module with a rule made of one tensor by a call of the module, where that is all."""
    groups: dict[str, list[fx.Node]] = {}
    paths: dict[str, str] = {}
    for node in graph.nodes:
        found = leaf_call(node, model)
        if found is not None:
            groups.setdefault(found[0], []).append(node)
            paths[found[0]] = found[1]
    changed = {id(tensor_of(root, model)) for n in graph.nodes if (root := written(n)) is not None}
    for key, nodes in groups.items():
        if not any(id(t) in changed for t in model.get_submodule(paths[key]).parameters()):
            replace(graph, model, paths[key], nodes)


def leaf_call(node: fx.Node, model: nn.Module) -> tuple[str, str] | None:
    """(call, path) of the outermost module with a rule in which the node was called."""
    if node.op != "call_function":
        return None
    for key, (path, _) in (node.meta.get("nn_module_stack") or {}).items():
        path = path.partition("@")[0]
        if path and is_layer(model.get_submodule(path)):
            return key, path
    return None


def is_layer(module: nn.Module) -> bool:
    """Of torch's own, only those that make one tensor of one."""
    several = isinstance(module, nn.RNNCellBase | nn.Bilinear) or any(True for _ in module.children())
    return find_module_rule(module) is not None and not (several and type(module).__module__.startswith("torch.nn."))


def is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def replace(graph: fx.Graph, model: nn.Module, path: str, nodes: list[fx.Node]) -> None:
    module, inside = model.get_submodule(path), set(nodes)
    own = {id(t) for t in (*module.parameters(), *module.buffers())}
    if isinstance(module, nn.RNNBase):
        return replace_recurrent(graph, path, nodes)
    results = [n for n in nodes if any(u not in inside for u in n.users)]
    inputs = dict.fromkeys(i for n in nodes for i in n.all_input_nodes if i not in inside and is_tensor(i))
    given = [i for i in inputs if id(tensor_of(i, model)) not in own]
    if len(results) != 1 or len(given) != 1 or not is_tensor(results[0]):
        return
    if any(is_inplace(n.target) and n.args[0] is given[0] for n in nodes) and not getattr(module, "inplace", False):
        return
    with graph.inserting_before(results[0]):
        call = graph.call_module(path, (given[0],))
    call.meta = dict(results[0].meta)
    results[0].replace_all_uses_with(call, lambda user: user not in inside)
    for n in reversed(nodes):
        graph.erase_node(n)


def replace_recurrent(graph: fx.Graph, path: str, nodes: list[fx.Node]) -> None:
    """One call of torch's lstm, gru or rnn; states that the layer makes are left to needle's."""
    inside = set(nodes)
    cores = [n for n in nodes if "hx" in argument_names(n)]
    items = [u for c in cores for u in c.users if u.target is operator.getitem]
    if len(cores) == 1 and cores[0].target is ROWS:
        x, lengths, state, *_ = cast(tuple[fx.Node, fx.Node, list[fx.Node]], cores[0].args)
        put_call(graph, path, cores[0], (x, *as_state(state)), {"lengths": lengths})
        return
    if len(cores) != 1 or any(u not in inside for n in nodes if n not in items for u in n.users):
        return
    x, state = cast(tuple[fx.Node, Any], cores[0].args[:2])
    given = state if isinstance(state, list | tuple) else [state]
    made = [n in inside or n.op == "get_attr" for n in given]
    if x in inside or any(made) != all(made):
        return
    put_call(graph, path, cores[0], (x,) if all(made) else (x, *as_state(given)), {})
    for n in reversed(nodes):
        if n not in (cores[0], *items):
            graph.erase_node(n)


def as_state(parts: list[fx.Node]) -> list[Any]:
    """The argument of a layer that holds its state, if one is given."""
    return [tuple(parts) if len(parts) > 1 else parts[0]] if parts else []


def put_call(graph: fx.Graph, path: str, core: fx.Node, args: tuple, kwargs: dict[str, Any]) -> None:
    """The layer's call in the place of `core`, whose results are the output and the parts of the state."""
    items = [u for u in core.users if u.target is operator.getitem]
    with graph.inserting_before(core):
        call = graph.call_module(path, args, kwargs)
        call.meta = {k: v for k, v in core.meta.items() if k != "val"}
        several = "lstm" in str(core.target) or (core.target is ROWS and len(core.args[4]) == 2)  # type: ignore[arg-type]
        second = graph.call_function(operator.getitem, (call, 1)) if several else call
        for item in items:
            place = cast(int, item.args[1])
            new = graph.call_function(
                operator.getitem, (second, place - 1) if place and second is not call else (call, place)
            )
            for n in {new, second} - {call}:
                n.meta = dict(item.meta if n is new else call.meta)
            item.replace_all_uses_with(new)
    for n in (*items, core):
        graph.erase_node(n)


def argument_names(node: fx.Node) -> list[str]:
    return [a.name for a in node.target._schema.arguments] if is_overload(node.target) else []  # type: ignore[union-attr]

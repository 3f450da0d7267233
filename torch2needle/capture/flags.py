"""Training flags in a captured graph: what differs between its captures in training and in evaluation."""

from __future__ import annotations

import functools
import inspect
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch._ops import OpOverloadPacket

from ..report import dotted
from ..rules.norms import counted_batch_norm
from ..rules.overloads import FLAGS, PROBABILITIES, drops, is_overload
from .nodes import node_location, owner_path

# torch's modules with layers whose flag is their own
MODES = ("batchnorm", "instancenorm", "dropout", "activation", "rnn")
FLAG = FLAGS[0]  # the name of all of them
# Gives flags and probabilities that change with the mode, by the user's line and name: what each call is given in training.
Changing = Callable[[], dict[tuple[str, str], list[Any]]]
BATCH_NORM = inspect.signature(F.batch_norm)


class TrainingFlag:
    """Stands for `self.training` of the module at `path` in a captured call, or for a probability `p` in training and 0 else."""

    def __init__(self, path: str, p: float | None = None) -> None:
        self.path, self.p = path, p

    def value(self, training: bool) -> bool | float:
        return training if self.p is None else self.p * training

    def __repr__(self) -> str:
        return f"training({self.path})" if self.p is None else f"{self.p} * training({self.path})"


class Differ(Exception):
    """Training and evaluation run different graphs."""


@functools.cache
def flagged(function: Any) -> list[list[str]]:
    """The arguments of those overloads of a function that have a training flag or a probability of dropping."""
    if is_overload(function):
        named = [[a.name for a in function._schema.arguments]]
    elif inspect.isfunction(function):
        named = [[*inspect.signature(function).parameters]]
    else:
        packet = getattr(torch.ops.aten, getattr(function, "__name__", ""), None)
        overloads = packet.overloads() if isinstance(packet, OpOverloadPacket) else ()
        named = [[a.name for a in getattr(packet, o)._schema.arguments] for o in overloads]
    return [names for names in named if any(flag in names for flag in FLAGS) or drops(function)]


def is_count(node: fx.Node) -> bool:
    """Whether a call is `self.num_batches_tracked.add_(1)` of the module that makes it."""
    if (node.op, node.target, node.args[1:], node.kwargs) != ("call_method", "add_", (1,), {}) or node.users:
        return False
    read = node.args[0]
    return isinstance(read, fx.Node) and read.target == dotted(owner_path(node), "num_batches_tracked")


def join_counts(base: fx.Graph, train: fx.Graph, evaluate: fx.Graph) -> None:
    """Batch norms before which their modules count batches in training alone become calls of counted_batch_norm.

    They are those of layers that inherit torch's, whose own forward goes on after it, as an activation's.
    """

    def by_owner(graph: fx.Graph, wanted: Any) -> dict[str, list[fx.Node]]:
        found = defaultdict(list)
        for node in graph.nodes:
            if wanted(node):
                found[owner_path(node)].append(node)
        return found

    graphs = list(dict.fromkeys((base, train, evaluate)))
    counts = {g: by_owner(g, is_count) for g in graphs}
    norms = {g: by_owner(g, lambda n: n.target is F.batch_norm) for g in graphs}
    for path, counted in counts[train].items():
        name = dotted(path, "num_batches_tracked")
        reads = sum(n.op == "get_attr" and n.target == name for n in train.nodes)
        if (
            counts[evaluate].get(path)
            or any(len(norms[g][path]) != len(counted) for g in graphs)
            or reads > len(counted)
        ):
            continue
        for graph in graphs:
            for node in counts[graph].get(path, ()):
                read = node.all_input_nodes[0]
                graph.erase_node(node)
                if not read.users:
                    graph.erase_node(read)
            for node in norms[graph][path]:
                given = BATCH_NORM.bind(*node.args, **node.kwargs)
                given.apply_defaults()
                with graph.inserting_before(node):
                    count = graph.get_attr(name)
                    joined = graph.call_function(counted_batch_norm, (*given.arguments.values(), count))
                joined.meta = count.meta = dict(node.meta)
                node.replace_all_uses_with(joined)
                graph.erase_node(node)


def is_probability(train: Any, evaluate: Any) -> bool:
    """Whether a number is 0 in evaluation and some share in training, or 0 as well."""
    numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in (train, evaluate))
    return numbers and evaluate == 0 <= train <= 1


def mark_flags(base: Any, train: Any, evaluate: Any, path: str, place: dict[fx.Node, int], dropping: bool) -> Any:
    """`base` with a TrainingFlag wherever the two captures have True in training and False in evaluation.

    place: of every node in its graph. dropping: whether the call is one of DROPPING, whose probability may be that, too.
    """
    if isinstance(train, tuple | list) and type(train) is type(evaluate) and len(train) == len(evaluate) == len(base):
        return type(train)(mark_flags(*v, path, place, dropping) for v in zip(base, train, evaluate, strict=True))
    if isinstance(train, dict) and isinstance(evaluate, dict) and train.keys() == evaluate.keys() == base.keys():
        return {k: mark_flags(base[k], train[k], evaluate[k], path, place, dropping) for k in train}
    if isinstance(train, fx.Node) and isinstance(evaluate, fx.Node):
        same = place[train] == place[evaluate] == place.get(base)
    elif train is True and evaluate is False:
        return TrainingFlag(path)
    elif dropping and is_probability(train, evaluate):
        return TrainingFlag(path, float(train)) if train else 0.0
    else:
        same = type(train) is type(evaluate) and (repr(train) == repr(evaluate) == repr(base))
    if not same:
        raise Differ
    return base


def flags_in_both_modes(graph: fx.Graph, train: fx.Graph, evaluate: fx.Graph) -> None:
    """Mark the training flags of `graph`, or raise Differ and leave it as it is."""
    if not len(graph.nodes) == len(train.nodes) == len(evaluate.nodes):
        raise Differ
    place = {n: i for g in (graph, train, evaluate) for i, n in enumerate(g.nodes)}
    marked = []
    for b, t, e in zip(graph.nodes, train.nodes, evaluate.nodes, strict=True):
        if not (b.op, b.target) == (t.op, t.target) == (e.op, e.target):
            raise Differ
        marked.append(
            (
                b,
                *(
                    mark_flags(*args, owner_path(b), place, drops(b.target))
                    for args in ((b.args, t.args, e.args), (b.kwargs, t.kwargs, e.kwargs))
                ),
            )
        )
    for node, args, kwargs in marked:
        if (args, kwargs) != (node.args, node.kwargs):
            node.args, node.kwargs = args, kwargs


def follow_training(graph: fx.Graph, evaluate: fx.Graph | None) -> None:
    """Flags and probabilities of a graph that runs in training alone follow the modules that make the calls, but for those that
    the same lines of `evaluate`, the graph of evaluation, have."""
    always = {(node_location(n), n.target) for n in evaluate.nodes if given_flags(n)} if evaluate else set()
    for node in graph.nodes:
        for name, p in given_flags(node) if (node_location(node), node.target) not in always else ():
            put_argument(node, name, TrainingFlag(module_path(node), p))


def given_flags(node: fx.Node) -> list[tuple[str, float | None]]:
    """The arguments of a call that are True for a training flag, with None, else those that are a probability of dropping."""
    given = arguments(node) if node.op == "call_function" and flagged(node.target) else {}
    flags: list[tuple[str, float | None]] = [(n, None) for n in FLAGS if given.get(n) is True]
    rates = [(n, given.get(n)) for n in PROBABILITIES if given and drops(node.target)]
    return flags or [(n, p) for n, p in rates if is_probability(p, 0.0) and p]


def follow_modes(graph: fx.Graph, flags: dict[str, bool] | None, changing: Changing) -> None:
    """Flags that their module's flag gave become the module's: `flags` by path, None for a program without its modules."""
    dropping: dict[tuple[str, str], list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        if node.op != "call_function" or not is_overload(node.target):
            continue
        path = module_path(node)
        for i, name in enumerate(next(iter(flagged(node.target)), ())):
            if name in PROBABILITIES and drops(node.target):
                dropping[node_location(node), name].append(node)
            if name not in FLAGS or i >= len(node.args) or (flags is not None and node.args[i] != flags.get(path)):
                continue
            if own_class(node) or (flags is not None and (node_location(node), FLAG) in changing()):
                node.update_arg(i, TrainingFlag(path))
    if flags is None:
        return
    for key, nodes in dropping.items():
        given = changing().get(key, [])
        if len(set(given)) == 1:
            given = given[:1] * len(nodes)
        if len(given) == len(nodes):
            for node, p in zip(nodes, given, strict=True):
                follow_probability(node, key[1], p, flags.get(module_path(node), False))


def follow_probability(node: fx.Node, name: str, p: float, training: bool) -> None:
    """The probability of a call, which is `p` in training alone, follows the module that makes the call."""
    if p and arguments(node).get(name, 0.0) == p * training:
        put_argument(node, name, TrainingFlag(module_path(node), p))


def arguments(node: fx.Node) -> dict[str, Any]:
    """What a call of a `flagged` function is given, by name."""
    return dict(zip(flagged(node.target)[0], node.args, strict=False)) | node.kwargs


def put_argument(node: fx.Node, name: str, value: Any) -> None:
    """Gives such a call another value for an argument."""
    place = flagged(node.target)[0].index(name)
    if place < len(node.args):
        node.update_arg(place, value)
    else:
        node.update_kwarg(name, value)


def module_path(node: fx.Node) -> str:
    return owner_path(node).partition("@")[0]


def own_class(node: fx.Node) -> bool:
    """True for calls that torch's own modules with a mode make, which is all that a program without its modules tells."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    *where, family, _ = str(stack[-1][1]).split(".") if stack else ("", "")
    return where == ["torch", "nn", "modules"] and family in MODES

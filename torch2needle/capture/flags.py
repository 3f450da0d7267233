"""Training flags in a captured graph: what differs between its captures in training and in evaluation."""

from __future__ import annotations

import inspect
from collections import defaultdict
from typing import Any

import torch.nn.functional as F
from torch import fx

from ..report import dotted
from ..rules.norms import counted_batch_norm
from .nodes import owner_path

BATCH_NORM = inspect.signature(F.batch_norm)


class TrainingFlag:
    """Stands for `self.training` of the module at `path` in a captured call."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __repr__(self) -> str:
        return f"training({self.path})"


class Differ(Exception):
    """Training and evaluation run different graphs."""


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


def mark_flags(base: Any, train: Any, evaluate: Any, path: str, place: dict[fx.Node, int]) -> Any:
    """`base` with a TrainingFlag wherever the two captures have True in training and False in evaluation.

    place: of every node in its graph.
    """
    if isinstance(train, tuple | list) and type(train) is type(evaluate) and len(train) == len(evaluate) == len(base):
        return type(train)(mark_flags(b, t, e, path, place) for b, t, e in zip(base, train, evaluate, strict=True))
    if isinstance(train, dict) and isinstance(evaluate, dict) and train.keys() == evaluate.keys() == base.keys():
        return {k: mark_flags(base[k], train[k], evaluate[k], path, place) for k in train}
    if isinstance(train, fx.Node) and isinstance(evaluate, fx.Node):
        same = place[train] == place[evaluate] == place.get(base)
    elif train is True and evaluate is False:
        return TrainingFlag(path)
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
                    mark_flags(*args, owner_path(b), place)
                    for args in ((b.args, t.args, e.args), (b.kwargs, t.kwargs, e.kwargs))
                ),
            )
        )
    for node, args, kwargs in marked:
        if (args, kwargs) != (node.args, node.kwargs):
            node.args, node.kwargs = args, kwargs

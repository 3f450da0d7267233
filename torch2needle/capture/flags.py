"""Training flags in a captured graph: what differs between its captures in training and in evaluation."""

from __future__ import annotations

from typing import Any

from torch import fx

from .nodes import owner_path


class TrainingFlag:
    """Stands for `self.training` of the module at `path` in a captured call."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __repr__(self) -> str:
        return f"training({self.path})"


class Differ(Exception):
    """Training and evaluation run different graphs."""


def mark_flags(base: Any, train: Any, evaluate: Any, path: str) -> Any:
    """`base` with a TrainingFlag wherever the two captures have True in training and False in evaluation."""
    if isinstance(train, tuple | list) and type(train) is type(evaluate) and len(train) == len(evaluate) == len(base):
        return type(train)(mark_flags(b, t, e, path) for b, t, e in zip(base, train, evaluate, strict=True))
    if isinstance(train, dict) and isinstance(evaluate, dict) and train.keys() == evaluate.keys() == base.keys():
        return {k: mark_flags(base[k], train[k], evaluate[k], path) for k in train}
    if isinstance(train, fx.Node) and isinstance(evaluate, fx.Node):
        same = train.name == evaluate.name == getattr(base, "name", None)
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
    marked = []
    for b, t, e in zip(graph.nodes, train.nodes, evaluate.nodes, strict=True):
        if not (b.op, b.target) == (t.op, t.target) == (e.op, e.target):
            raise Differ
        marked.append(
            (
                b,
                *(
                    mark_flags(*args, owner_path(b))
                    for args in ((b.args, t.args, e.args), (b.kwargs, t.kwargs, e.kwargs))
                ),
            )
        )
    for node, args, kwargs in marked:
        if (args, kwargs) != (node.args, node.kwargs):
            node.args, node.kwargs = args, kwargs

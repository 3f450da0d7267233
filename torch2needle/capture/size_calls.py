"""Captured calls without tensors: of sizes, tuples and numbers."""

from __future__ import annotations

import inspect
import operator
from typing import Any

import torch

from needle.autograd import Tensor, Unsupported
from needle.graph import Dim, ModuleRecorder, Symbol
from needle.graph.graph import COMPARISONS

from ..rules.arithmetic import DtypeOf
from ..rules.complex_numbers import is_complex
from ..rules.overloads import draws, is_overload
from ..rules.registry import COMPLEX_RULES, bind, find_function_rule
from ..rules.shapes import Pieces


def mentioned(values: list[Any]) -> Any:
    """A tensor whose size or dtype is among `values`, or None."""
    for v in values:
        if isinstance(v, DtypeOf):
            return v.tensor
        if isinstance(v, Dim):
            node = v.node
            while node.target != "size":
                node = next(a.node for a in node.args if isinstance(a, Dim))
            return node.args[0]
    return None


def call_of_sizes(recorder: ModuleRecorder, target: Any, args: tuple, kwargs: dict[str, Any], values: list[Any]) -> Any:
    """Python's own result, or a rule's for tensors made of sizes. values: all that the arguments hold."""
    for v in values:
        if isinstance(v, Pieces):
            len(v)  # says what is not known
    like = mentioned(values)
    if draws(target):
        # what makes numbers of no input depends on one all the same
        like = next((n for n in recorder.graph.nodes if n.kind == "input"), None) if like is None else like
        if like is None or find_function_rule(target) is None:
            raise Unsupported("it draws random numbers, which conversion would freeze")
    rules = COMPLEX_RULES if any(map(is_complex, values)) else None
    rule = None if like is None else find_function_rule(target, rules)
    if rule is not None and "like" in inspect.signature(rule).parameters:
        hook = like if isinstance(like, Tensor) else Symbol(like, recorder, like.meta.get("spec"))
        if is_overload(target):
            bound = bind(rule, target, args, kwargs, rules)
            bound.arguments["like"] = hook
            return rule(*bound.args, **bound.kwargs)
        return rule(*args, like=hook, **kwargs)
    if target in (torch.finfo, torch.iinfo) and any(isinstance(v, DtypeOf) for v in values):
        raise Unsupported("it depends on a dtype, which an example tells; pass example=")
    sizes = [v for v in args if isinstance(v, Dim)]
    asks = sizes and getattr(operator, name := target.__name__, None) is target and name in COMPARISONS
    return sizes[0].compared(name, *args) if asks else target(*args, **kwargs)

"""What a model, or a captured graph in torch's stead, gives in some calls, and leaves as it was."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from .asked import whether_compiled
from .calls import Call, fresh, tensors
from .flags import TrainingFlag
from .functional import Gradients
from .guard import (
    Writes,
    autocasts,
    data_set_by,
    gradient_hooks,
    has_storage,
    own_gradients,
    plain_conditions,
    python_chance,
    same_chance,
)
from .nodes import writes_parameter
from .sized import called
from .state import untouched
from .structure import plain_result
from .tracing import Captured


@dataclasses.dataclass
class Behaviour:
    """What some calls in a row gave, which parameters the results have gradients of, and whose gradients are the user's."""

    results: list[list[Any]]
    reached: list[frozenset[int]]
    functions: set[str]  # of autograd
    hooks: set[str]
    drawing: bool = False  # torch's random numbers
    chancy: bool = False  # Python's or numpy's
    changing: bool = False  # attributes of the model
    casting: bool = False  # by autocast
    asking: bool = False  # whether it is compiled
    unregistered: bool = False  # parameters that are none of the model's, as of layers in a plain list
    written: frozenset[str] = frozenset()  # of the model's tensors, also where that leaves them as they were


def behaviour(function: Callable, model: nn.Module, calls: list[Call], training: bool | None = None) -> Behaviour:
    """Runs the calls one after the other from the model's present state, which they leave as it is."""
    made = Behaviour([], [], set(), set())
    writes, gradients, moved = Writes(), Gradients(), set[int]()
    state = (*model.named_parameters(), *model.named_buffers())
    places = {n: (id(t), t.untyped_storage()._cdata) for n, t in state if has_storage(t)}

    def put_data(t: torch.Tensor, value: torch.Tensor) -> None:
        moved.add(id(t))
        torch._C.TensorBase.data.__set__(t, value)  # type: ignore[attr-defined]

    def asked(own: Callable[[], bool]) -> bool:
        made.asking = True
        return own()

    def noting(names: set[str]) -> Callable[[str], None]:
        return lambda name: names.add(name) if torch.is_grad_enabled() else None

    with same_chance(), untouched(model) as python, torch.inference_mode(False):
        if training is not None:
            model.train(training)
        chance = python_chance()
        try:
            for i, call in enumerate(calls):
                args, kwargs = fresh(call)
                with (
                    torch.set_grad_enabled(not i or gradients.asked),
                    gradients.watched(),
                    writes,
                    own_gradients(noting(made.functions)),
                    gradient_hooks(noting(made.hooks)),
                    plain_conditions(),
                    autocasts(lambda: setattr(made, "casting", True)),
                    data_set_by(put_data),
                    whether_compiled(asked),
                ):
                    result = flat(plain_result(function(*args, **kwargs)))
                if not i:
                    found, own = [reached(t) for t in result], frozenset(id(p) for p in model.parameters())
                    made.reached, made.unregistered = [f & own for f in found], any(f - own for f in found)
                made.results.append([t.detach().clone() if isinstance(t, torch.Tensor) else t for t in result])
                del result  # and what its graph keeps
        finally:
            made.written = frozenset(n for n, (p, m) in places.items() if p in moved or m in writes.before)
            writes.undo()
            made.changing = python.changed()
            made.chancy = python_chance() != chance
    made.drawing = bool(writes.drawing)
    return made


def flat(result: Any, *kinds: type) -> list[Any]:
    return pytree.tree_leaves(result, is_leaf=lambda v: v is None or isinstance(v, kinds))


def reached(result: Any) -> frozenset[int]:
    """Ids of the tensors whose gradients a result's graph leads to."""
    found: set[int] = set()
    todo = [result.grad_fn] if isinstance(result, torch.Tensor) and result.grad_fn is not None else []
    seen = set(todo)
    while todo:
        step = todo.pop()
        if (variable := getattr(step, "variable", None)) is not None and isinstance(variable, nn.Parameter):
            found.add(id(variable))
        for following, _ in step.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                todo.append(following)
    return frozenset(found)


def evaluate(captured: Captured, names: list[str], *args: Any, **kwargs: Any) -> Any:
    """The captured graph in torch; constants are as they were at each call."""
    given = dict(zip(names, args, strict=False)) | kwargs
    flat = iter(tensors((args, kwargs)))
    env: dict[fx.Node, Any] = {}
    last = {n: node for node in captured.graph.nodes for n in node.all_input_nodes}  # its last reader

    def leaf(v: Any) -> Any:
        if isinstance(v, fx.Node):
            return env[v]
        return v.value(captured.model.get_submodule(v.path).training) if isinstance(v, TrainingFlag) else v

    def value(v: Any) -> Any:
        return fx.node.map_aggregate(v, leaf)

    for node in captured.graph.nodes:
        name = str(node.target)
        if node.op == "placeholder":
            env[node] = next(flat) if "place" in node.meta else given[name] if name in given else node.args[0]
        elif node.op == "get_attr":
            constant = captured.constants.get(name)
            env[node] = operator.attrgetter(name)(captured.model) if constant is None else constant.clone()
        elif node.op == "output":
            return value(node.args[0])
        else:
            args, kwargs = value(node.args), value(node.kwargs)
            without = node.meta.get("no_grad") or writes_parameter(node, captured.model)
            with torch.no_grad() if without else nullcontext():
                env[node] = called(node, captured.model, args, kwargs)
            for n in node.all_input_nodes:
                if last[n] is node:
                    del env[n]
    raise AssertionError


def first_line(e: Exception) -> str:
    return f"{type(e).__name__}: {(str(e).splitlines() or [''])[0]}".rstrip(": .")

"""Autograd functions of a user: whether the gradients that they give are the derivatives of what they compute.

Capture follows what such a function computes, and its graph has the derivative of that. Most are written to save memory and give
the same one; straight-through estimators, reversed gradients and spikes do not. Those give each element of a gradient times a
number: a second capture has their results with these numbers as slopes. A third takes gradients that are any linear function of
what comes in, such as that of a learned step size, by its transpose.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import nn
from torch._functorch.eager_transforms import _vjp_with_argnums as vjp  # torch's, for which captures have another
from torch.utils import _pytree as pytree

from ..rules.aten import STRAIGHT_THROUGH
from .calls import Call
from .differences import difference
from .functional import traced
from .guard import Writes, function_applied_by, plain_conditions, same_chance
from .state import untouched
from .structure import plain_result

COTANGENTS = (1.0, 1e-3, 1e3)  # sizes of the gradients that come in: a function may clip them
Slopes = list[torch.Tensor]
Slope = Literal["elements", "transposes"]  # how a capture gives the gradients of such functions


def slopes(function: Callable, model: nn.Module, call: Call, training: bool | None) -> list[Slopes]:
    """Gradients of a call's results with respect to real inputs and all parameters, for cotangents of several sizes."""
    writes = Writes()
    leaves: list[torch.Tensor] = []

    def leaf(t: Any) -> Any:
        if not isinstance(t, torch.Tensor) or not t.is_floating_point():
            return t.clone() if isinstance(t, torch.Tensor) else t
        leaves.append(t.detach().clone().requires_grad_())
        return leaves[-1] * 1  # which the forward may write

    with (
        same_chance(),
        untouched(model),
        torch.inference_mode(False),
        torch.enable_grad(),
        plain_conditions(),
        writes,
        torch.autograd.graph.allow_mutation_on_saved_tensors(),  # of a function's inside, as values that nothing writes
    ):
        if training is not None:
            model.train(training)
        try:
            args, kwargs = pytree.tree_map(leaf, call)
            result = plain_result(function(*args, **kwargs))  # caches among them
            outs = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor) and t.requires_grad]
            wanted = [*leaves, *(p for p in model.parameters() if p.requires_grad)]
            return [gradients(outs, wanted, size) for size in COTANGENTS] if outs else []
        finally:
            writes.undo()


def gradients(outs: list[torch.Tensor], wanted: list[torch.Tensor], size: float) -> Slopes:
    draw = torch.Generator().manual_seed(0)
    cotangents = [size * torch.randn(t.shape, generator=draw, dtype=t.dtype).to(t.device) for t in outs]
    found = torch.autograd.grad(outs, wanted, cotangents, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(w) if g is None else g for g, w in zip(found, wanted, strict=True)]


def same_slopes(run: Callable, model: nn.Module, calls: list[Call], training: bool | None) -> bool | None:
    """Whether there are gradients; None where the graph's are not those that the model's own autograd functions give."""
    some = False
    try:
        for call in calls:
            ours, theirs = (slopes(f, model, call, training) for f in (run, model))
            some = some or bool(theirs)
            pairs = (zip(a, b, strict=True) for a, b in zip(ours, theirs, strict=True))
            if any(difference(a, b) for pair in pairs for a, b in pair):
                return None
    except Exception:
        return None
    return some


class Context:
    """The `ctx` of an autograd function."""

    def __init__(self, args: tuple) -> None:
        self.needs_input_grad = tuple(is_real(a) for a in args)
        self.saved_tensors: tuple = ()
        self.without: set[int] = set()  # results that have no gradients, by id

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *tensors: torch.Tensor) -> None:
        self.without.update(map(id, tensors))

    def set_materialize_grads(self, value: bool) -> None:
        """All gradients are given."""


def is_real(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def gradients_as_slopes(how: Slope) -> AbstractContextManager:
    """A user's autograd function gives what it computes, with its own gradients; the comparison tells where `how` is wrong."""
    moving = {"elements": by_elements, "transposes": by_transposes}[how]

    def apply(before: Callable, cls: Any, *args: Any) -> Any:
        ctx = Context(args)
        with torch.no_grad():
            if cls.setup_context is torch.autograd.function._SingleLevelFunction.setup_context:
                result = cls.forward(ctx, *args)
            else:
                result = cls.forward(*args)
                cls.setup_context(ctx, args, result)
        results = result if isinstance(result, tuple) else (result,)

        def with_slopes(i: int, y: Any) -> Any:
            part = moving(cls, ctx, args, results, i) if is_real(y) and id(y) not in ctx.without else None
            # Not a sum: right where x is infinite, too.
            return y if part is None else STRAIGHT_THROUGH(y.detach(), part.to(y.dtype))

        made = tuple(with_slopes(i, y) for i, y in enumerate(results))
        return made if isinstance(result, tuple) else made[0]

    return function_applied_by(apply)


def by_elements(cls: Any, ctx: Context, args: tuple, results: tuple, i: int) -> torch.Tensor | None:
    """Arguments times the gradients that `cls` gives for ones: for functions that treat each element by itself."""
    with torch.no_grad():
        found = grads_of(cls, ctx, results, i, torch.ones_like(results[i]))
    moving = None
    for x, slope in zip(args, found, strict=False):
        if is_real(x) and isinstance(slope, torch.Tensor) and slope.shape == x.shape == results[i].shape:
            part = slope.detach() * x
            moving = part if moving is None else moving + part
    return moving


def by_transposes(cls: Any, ctx: Context, args: tuple, results: tuple, i: int) -> torch.Tensor | None:
    """What is linear in the arguments, with the gradients that `cls` gives: the transpose of these, which are linear in what
    comes in."""
    with torch.no_grad():
        given = grads_of(cls, ctx, results, i, torch.zeros_like(results[i]))
    places = [k for k, (x, g) in enumerate(zip(args, given, strict=False)) if is_real(x) and is_real(g)]
    if not places:
        return None
    own = {name: v for name, v in vars(ctx).items() if name != "needs_input_grad"}

    def transpose(kept: dict[str, Any], some: list[torch.Tensor], results: tuple) -> torch.Tensor:
        vars(ctx).update(kept)

        def back(g: torch.Tensor) -> tuple:
            found = grads_of(cls, ctx, results, i, g)
            return tuple(found[k] for k in places)

        grads, pull = vjp(back, torch.zeros_like(results[i]))  # type: ignore[misc]
        return pull(tuple(x.expand_as(g).to(g.dtype) for x, g in zip(some, grads, strict=True)))[0]

    kept, some, values = pytree.tree_map(cut_off, (own, [args[k] for k in places], results))
    try:
        graph, tensors, _ = traced(transpose, (kept, some, values), {})
    finally:
        vars(ctx).update(own)
    moving = iter(args[k] for k in places)
    taken = [next(moving) if any(t is x for x in some) else t for t in tensors]  # only these have gradients
    unread = (t for t, n in zip(taken, graph.graph.find_nodes(op="placeholder"), strict=True) if not n.users)
    zeros = (t.sum() * 0 for t in unread if any(t is args[k] for k in places))  # in torch they have gradients, too
    return sum(zeros, graph(*taken)[0])


def cut_off(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def grads_of(cls: Any, ctx: Context, results: tuple, i: int, g: torch.Tensor) -> tuple:
    """The gradients that `cls` gives where that of result number i comes in, and none of others."""
    others = [torch.zeros_like(y) if is_real(y) else None for y in results]
    found = inspect.unwrap(cls.backward)(ctx, *(g if k == i else y for k, y in enumerate(others)))
    return found if isinstance(found, tuple) else (found,)

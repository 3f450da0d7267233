"""torch.func's transforms and torch.autograd.grad in forwards, which torch.export does not follow.

A transformed call is traced by itself, below autograd and the transforms, into plain calls over whole batches, which then run
in its place. A forward that asks for gradients is traced so from its beginning, since they reach back to there.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx
from torch._functorch import apis, eager_transforms
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules import adaptive
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from needle.autograd import Unsupported

from ..rules.registry import find_function_rule
from .guard import patched
from .steps import torchs_own

aten = torch.ops.aten
GRADS = ("grad_impl", "grad_and_value_impl")
JVP, VJP = "_jvp_with_argnums", "_vjp_with_argnums"


def lacks_rule(target: Any) -> bool:
    """Whether a call is a gradient of torch's that no rule has."""
    return "backward" in str(target) and find_function_rule(target) is None


def decompositions() -> dict[Any, Callable]:
    """How torch decomposes what no rule has."""
    from torch._decomp import decomposition_table  # which loads sympy, as make_fx does: 35 MB

    known = {op: f for op, f in decomposition_table.items() if find_function_rule(op) is None}
    return known | {aten._linalg_check_errors.default: lambda *_, **__: None}  # which has no result


def transforms_as_calls() -> AbstractContextManager:
    """A transform that is not inside of another one becomes the calls that it makes."""
    thread = threading.get_ident()
    busy = False

    def outermost(before: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal busy
            if busy or threading.get_ident() != thread:
                return before(*args, **kwargs)
            busy = True
            try:
                graph, given, structure = traced(before, args, kwargs)
            finally:
                busy = False
            return pytree.tree_unflatten(list(graph(*given)), structure[0])

        return call

    def in_parts(before: Callable) -> Callable:
        """torch.func.vjp returns a function, which no graph does: only what that one is given to is a call."""

        def vjp(func: Callable, *primals: Any, **how: Any) -> Any:
            if busy or threading.get_ident() != thread:
                return before(func, *primals, **how)
            made = func(*primals)
            results, *aux = made if how.get("has_aux") else (made,)
            pull = outermost(lambda primals, *given: before(func, *primals, **how)[1](*given))
            return results, lambda *given, **_: pull(primals, *given), *aux

        return vjp

    def by_directions(before: Callable) -> Callable:
        """torch.func.linearize returns a function, too, and holds its own capture's values."""

        def linearize(func: Callable, *primals: Any) -> Any:
            if threading.get_ident() != thread:
                return before(func, *primals)
            return func(*primals), lambda *tangents: torch.func.jvp(func, primals, tangents)[1]

        return linearize

    def in_one(before: Callable) -> Callable:
        """A torch.vmap in chunks gives what one over all gives, of which the size may be free."""
        return lambda func, into, out, chance, _, *args, **kwargs: before(
            func, into, out, chance, None, *args, **kwargs
        )

    jvp = (eager_transforms, JVP, forward_by_reverse(getattr(eager_transforms, JVP)))
    calls = [
        jvp,
        (apis, "vmap_impl", in_one(apis.vmap_impl)),
        *((eager_transforms, n, getattr(eager_transforms, n)) for n in GRADS),
    ]
    reverse = (vars(eager_transforms), VJP, in_parts(getattr(eager_transforms, VJP)))
    linear = [(vars(home), "linearize", by_directions(torch.func.linearize)) for home in (torch.func, eager_transforms)]
    return patched([reverse, *linear, *((vars(owner), name, outermost(f)) for owner, name, f in calls)])


def forward_by_reverse(before: Callable) -> Callable:
    """Derivatives in directions, by reverse mode alone: its transpose is linear, whose transpose they are. torch's forward mode
    makes zeros of numbers where a direction has none, which fixes sizes."""
    thread = threading.get_ident()

    def jvp(func: Callable, primals: Any, tangents: Any, argnums: Any, *, strict: bool = False, has_aux: bool) -> Any:
        if threading.get_ident() != thread or strict:
            return before(func, primals, tangents, argnums, strict=strict, has_aux=has_aux)
        places = range(len(primals)) if argnums is None else [argnums] if isinstance(argnums, int) else argnums
        places = [i % len(primals) for i in places]

        def of_some(*some: Any) -> Any:
            given = dict(zip(places, some, strict=True))
            made = func(*(given.get(i, p) for i, p in enumerate(primals)))
            return made[0] if has_aux else made

        def transpose(directions: Any) -> Any:
            return eager_transforms._vjp_with_argnums(of_some, *(primals[i] for i in places))[1](directions)

        made = func(*primals)
        results = made[0] if has_aux else made
        if not all(isinstance(r, torch.Tensor) and r.is_floating_point() for r in pytree.tree_leaves(results)):
            return before(func, primals, tangents, argnums, strict=strict, has_aux=has_aux)
        zeros = pytree.tree_map(torch.zeros_like, results)
        _, again = eager_transforms._vjp_with_argnums(transpose, zeros)  # type: ignore[misc]
        return (results, again(tangents)[0], *([made[1]] if has_aux else []))

    return jvp


class Gradients:
    """Whether a forward asked autograd for gradients; those that it may not differentiate again are cut off."""

    def __init__(self) -> None:
        self.asked = False

    def watched(self) -> AbstractContextManager:
        before, thread = torch.autograd._engine_run_backward, threading.get_ident()

        def backward(outputs: Any, given: Any, retain: bool, create_graph: bool, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != thread:
                return before(outputs, given, retain, create_graph, *args, **kwargs)
            self.asked = True
            found = before(outputs, given, retain, create_graph, *args, **kwargs)
            return found if create_graph else tuple(g if g is None else g.detach() for g in found)

        return patched([(vars(torch.autograd), "_engine_run_backward", backward)])


def refusing(before: Callable) -> Callable:
    """torch.no_grad where a forward enters it, not torch itself."""

    def enter(self: Any) -> None:
        frame = sys._getframe(1)
        owner = frame.f_globals["__name__"]
        if owner == "torch.utils._contextlib":  # the decorator
            owner = getattr(frame.f_locals.get("func"), "__module__", owner)
        if not owner.startswith("torch."):
            raise Unsupported("the forward asks for gradients, and calls torch.no_grad, which is not seen below them")
        before(self)

    return enter


def data_as_calls() -> AbstractContextManager:
    """`.data` of what a forward computes is `.detach()`, which torch.export follows, and `.data = ` a copy into it."""
    before: Any = torch._C.TensorBase.data
    thread = threading.get_ident()

    def mine() -> bool:
        return threading.get_ident() == thread and not sys._getframe(2).f_globals["__name__"].startswith("torch.")

    def data(self: torch.Tensor) -> torch.Tensor:
        return self.detach() if mine() else before.__get__(self)

    def put(self: torch.Tensor, value: torch.Tensor) -> None:
        if not mine() or self.shape != value.shape or self.dtype != value.dtype:
            before.__set__(self, value)
            return
        with torch.no_grad():
            self.copy_(value)

    return patched([(torch.Tensor, "data", property(data, put))])


def unless_whole(before: Callable) -> Callable:
    """A split into one part is all of it; the gradient of torch's own, below torch.vmap, fixes sizes."""
    thread = threading.get_ident()

    def split(self: torch.Tensor, split_size: Any, dim: int = 0) -> Any:
        whole = isinstance(split_size, list | tuple) and len(split_size) == 1 and split_size[0] == self.shape[dim]
        return (self.view_as(self),) if whole and threading.get_ident() == thread else before(self, split_size, dim)

    return split


def of_tails(model: torch.nn.Module | None) -> frozenset[int]:
    """Ids of the parameters that adaptive softmaxes have for clusters, of which an example may have none."""
    layers = () if model is None else model.modules()
    tails = (m.tail for m in layers if isinstance(m, adaptive.AdaptiveLogSoftmaxWithLoss))
    return frozenset(id(p) for tail in tails for p in tail.parameters())


def below_autograd(model: torch.nn.Module) -> AbstractContextManager:
    """The forward, with the gradients that it asks for, becomes the calls that it makes."""
    forward, thread = model.forward, threading.get_ident()

    @functools.wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return forward(*args, **kwargs)
        with patched([(torch.no_grad, "__enter__", refusing(torch.no_grad.__enter__))]):
            graph, given, structure = traced(forward, args, kwargs, functional=False)
        return pytree.tree_unflatten(list(graph(*given)), structure[0])

    return patched([(vars(model), "forward", call)])


def with_free_sizes(values: list[Any]) -> list[torch.Tensor]:
    """Tensors with free sizes that functions among these values have around them: a graph takes them for their sizes alone."""
    found: dict[int, torch.Tensor] = {}
    seen: set[int] = set()

    def look(value: Any) -> None:
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            if any(isinstance(n, torch.SymInt) for n in value.shape):
                found[id(value)] = value
        elif isinstance(value, functools.partial):
            look([value.func, *value.args, value.keywords])
        elif isinstance(value, list | tuple | dict):
            for part in value.values() if isinstance(value, dict) else value:
                look(part)
        for cell in getattr(value, "__closure__", None) or ():
            with contextlib.suppress(ValueError):  # a name that has no value yet
                look(cell.cell_contents)

    for value in values:
        if not isinstance(value, torch.Tensor):
            look(value)
    return list(found.values())


def traced(
    f: Callable, args: tuple, kwargs: dict[str, Any], functional: bool = True
) -> tuple[fx.GraphModule, list[torch.Tensor], list[Any]]:
    """A call's graph as a function of its tensors, these, and the structure of its result; functional: without writes."""
    from torch.fx.experimental.proxy_tensor import make_fx

    flat, tree = pytree.tree_flatten((args, kwargs))
    places = [i for i, v in enumerate(flat) if isinstance(v, torch.Tensor)]
    structure: list[Any] = []

    def run(*tensors: torch.Tensor) -> Any:
        values = list(flat)
        for i, t in zip(places, tensors, strict=False):
            values[i] = t
        args, kwargs = pytree.tree_unflatten(values, tree)
        results, form = pytree.tree_flatten(f(*args, **kwargs))
        structure[:] = [form]
        return results

    asked = 0  # calls of detach by the forward, not by autograd for what it keeps

    def detach(self: torch.Tensor) -> torch.Tensor:
        nonlocal asked
        asked += 1
        try:
            return before(self)
        finally:
            asked -= 1

    def kept(self: torch.Tensor) -> Any:
        return NotImplemented if asked else aten.alias.default(self)

    before = torch.Tensor.detach
    given = [*(flat[i] for i in places), *with_free_sizes(flat)]
    watched = patched([(torch.Tensor, "detach", detach), (torch.Tensor, "split", unless_whole(torch.Tensor.split))])
    with _disable_current_modes(), torch._C.DisableTorchFunction(), watched, torchs_own(), sdpa_kernel(SDPBackend.MATH):
        pure = torch.func.functionalize(run) if functional else run
        table = decompositions() | {aten.detach.default: kept}
        try:
            graph = make_fx(pure, table, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*given)
        except (
            RuntimeError
        ):  # second derivatives meet tensors that torch makes for shapes alone; here sizes are the example's
            graph = make_fx(pure, table, tracing_mode="real", _allow_non_fake_inputs=True)(*given)
    known: dict[str, fx.Node] = {}
    for node in graph.graph.nodes:  # a size may be asked of a tensor that is there for its shape alone
        if node.target is aten.sym_size.int:
            node.replace_all_uses_with(known.setdefault(str(node.meta["val"]), node))
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph, given, structure

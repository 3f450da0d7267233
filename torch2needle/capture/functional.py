"""torch.func's transforms in forwards, for torch.export, which would keep them as calls around a function of one sample.

The transformed call is traced by itself, below autograd and the transforms, into plain calls over whole batches, which then run
in its place.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx
from torch._functorch import apis, eager_transforms
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from .guard import patched

NAMES = ((apis, "vmap_impl"), (eager_transforms, "grad_impl"), (eager_transforms, "grad_and_value_impl"))


@functools.cache
def gradients() -> dict[Any, Callable]:
    """How torch decomposes its gradients."""
    from torch._decomp import decomposition_table  # which loads sympy, as make_fx does: 35 MB

    return {op: f for op, f in decomposition_table.items() if "backward" in str(op)}


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

    return patched([(vars(owner), name, outermost(getattr(owner, name))) for owner, name in NAMES])


def traced(f: Callable, args: tuple, kwargs: dict[str, Any]) -> tuple[fx.GraphModule, list[torch.Tensor], list[Any]]:
    """A call's graph as a function of its tensors, these, and the structure of its result."""
    from torch.fx.experimental.proxy_tensor import make_fx

    flat, tree = pytree.tree_flatten((args, kwargs))
    places = [i for i, v in enumerate(flat) if isinstance(v, torch.Tensor)]
    structure: list[Any] = []

    def run(*tensors: torch.Tensor) -> Any:
        values = list(flat)
        for i, t in zip(places, tensors, strict=True):
            values[i] = t
        args, kwargs = pytree.tree_unflatten(values, tree)
        results, form = pytree.tree_flatten(f(*args, **kwargs))
        structure[:] = [form]
        return results

    given = [flat[i] for i in places]
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        make = make_fx(torch.func.functionalize(run), gradients(), tracing_mode="symbolic", _allow_non_fake_inputs=True)  # type: ignore[arg-type]
        graph = make(*given)
    return graph, given, structure

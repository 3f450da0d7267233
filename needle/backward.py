"""The walk over the tape: topological order and gradients; `needle.autograd` has these functions, too."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from .backend_ndarray import NDArray

if TYPE_CHECKING:
    from .autograd import Tensor


def compute_gradient_of_variables(output: Tensor, out_grad: Tensor) -> None:
    """Store the gradient of `output` in `.grad` of every tensor that it depends on and that requires one."""
    with uncollected():
        walk(output, out_grad)


@contextmanager
def uncollected() -> Iterator[None]:
    """Python's garbage collector pauses while many small objects are made that all stay: it would walk all of a program's."""
    paused = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if paused:
            gc.enable()


def walk(output: Tensor, out_grad: Tensor) -> None:
    grads: dict[int, list[Tensor]] = {id(output): [out_grad]}
    for node in reversed(find_topo_sort([output])):
        parts = grads.pop(id(node), None)
        if parts is None or not node.requires_grad:
            continue
        total = parts[0] if len(parts) == 1 else sum_grads(parts)
        node.keep_gradient(total)
        if node.op is None:
            continue
        for i, g in zip(node.inputs, node.op.gradient_as_tuple(total, node), strict=True):
            if g is not None and i.requires_grad:
                grads.setdefault(id(i), []).append(g if same_dtype(g, i) else cast_as(g, i))


def same_dtype(gradient: Tensor, of: Tensor) -> bool:
    a, b = gradient.cached_data, of.cached_data
    return type(a) is tuple or type(b) is tuple or a.dtype == b.dtype


def cast_as(gradient: Tensor, of: Tensor) -> Tensor:
    """The gradient in its tensor's dtype: ops on several dtypes compute, and differentiate, in the widest."""
    return gradient.astype(of.dtype)


def sum_grads(parts: list[Tensor]) -> Tensor:
    if len(parts) > 2 and isinstance(parts[0].cached_data, NDArray):
        return parts[0]._total(*parts[1:])
    total = parts[0]
    for p in parts[1:]:
        total = total + p
    return total


def vjp(output: Any, out_grad: Any, inputs: Sequence[Tensor]) -> tuple[Any, ...]:
    """Gradients of `inputs` as differentiable tensors; the walk stops at them and stores nothing in `.grad`.

    Several outputs of a graph, a plain tuple, come with a tuple of gradients.
    """
    outputs, seeds = (output, out_grad) if type(output) is tuple else ((output,), (out_grad,))
    stop = {id(t) for t in inputs}
    grads: dict[int, list[Tensor]] = {id(o): [g] for o, g in zip(outputs, seeds, strict=True)}
    for node in reversed(find_topo_sort(outputs)):
        if id(node) in stop or id(node) not in grads or node.op is None:
            continue
        total = sum_grads(grads.pop(id(node)))
        for i, g in zip(node.inputs, node.op.gradient_as_tuple(total, node), strict=True):
            if g is not None and i.requires_grad:
                grads.setdefault(id(i), []).append(g if g.dtype == i.dtype else cast_as(g, i))
    return tuple(sum_grads(grads[id(t)]) if id(t) in grads else None for t in inputs)


def find_topo_sort(nodes: Sequence[Tensor]) -> list[Tensor]:
    """Tensors that `nodes` depend on, in post-order depth first."""
    order: list[Tensor] = []
    seen: set[int] = set()
    for root in nodes:
        stack: list[tuple[Tensor, Iterator[Tensor]]] = []
        if id(root) not in seen:
            seen.add(id(root))
            stack.append((root, iter(root.inputs)))
        while stack:
            node, inputs = stack[-1]
            for i in inputs:
                if id(i) not in seen:
                    seen.add(id(i))
                    if i.inputs:
                        stack.append((i, iter(i.inputs)))
                        break
                    order.append(i)
            else:
                order.append(node)
                stack.pop()
    return order

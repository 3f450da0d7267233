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


def grad(
    outputs: Any, inputs: Any, grad_outputs: Any = None, *, create_graph: bool = False, allow_unused: bool = False
) -> tuple[Any, ...]:
    """Gradients of `inputs`, a tensor or several, as a tuple, as torch.autograd.grad gives them; `.grad` of all stays.

    outputs: a tensor of one number, or any tensors with their gradients in `grad_outputs` (None: ones, for one number).
    create_graph: the gradients have gradients again. allow_unused: None for an input that the outputs do not depend on.
    Raises ValueError where no gradient is to be had. In a loss of `compile_step` they are calls of the plan.
    """
    outputs, inputs = (tuple(v) if isinstance(v, list | tuple) else (v,) for v in (outputs, inputs))
    given = tuple(grad_outputs) if isinstance(grad_outputs, list | tuple) else (grad_outputs,) * len(outputs)
    if len(given) != len(outputs):
        raise ValueError(f"[grad] grad_outputs expects one for each of {len(outputs)} outputs, got {len(given)}.")
    if any(not t.requires_grad for t in inputs):
        raise ValueError("[grad] inputs expects tensors that need a gradient, got one that needs none.")
    found = vjp(outputs, tuple(map(seed_of, outputs, given)), inputs, through=True)
    for i, g in enumerate(found):
        if g is None and not allow_unused:
            raise ValueError(f"[grad] inputs expects tensors that the outputs depend on, got another one at {i}.")
    return found if create_graph else tuple(None if g is None else g.detach() for g in found)


def seed_of(output: Tensor, gradient: Any) -> Tensor:
    if not output.requires_grad:
        raise ValueError("[grad] outputs expects results of tensors that need a gradient, got one that needs none.")
    if gradient is None and output.size != 1:
        raise ValueError(f"[grad] grad_outputs is needed for an output of several numbers, got shape {output.shape}.")
    if gradient is not None and tuple(gradient.shape) != tuple(output.shape):
        raise ValueError(f"[grad] grad_outputs expects shape {output.shape}, got {gradient.shape}.")
    return output.cotangent(gradient)


def vjp(output: Any, out_grad: Any, inputs: Sequence[Tensor], through: bool = False) -> tuple[Any, ...]:
    """Gradients of `inputs` as differentiable tensors; nothing is stored in `.grad`.

    Several outputs of a graph, a plain tuple, come with a tuple of gradients. The walk stops at the inputs, unless it goes
    `through` those that others of them are made into.
    """
    outputs, seeds = (output, out_grad) if type(output) is tuple else ((output,), (out_grad,))
    wanted = {id(t) for t in inputs}
    grads: dict[int, list[Tensor]] = {}
    for o, g in zip(outputs, seeds, strict=True):
        grads.setdefault(id(o), []).append(g)
    for node in reversed(find_topo_sort(outputs)):
        held = id(node) in wanted
        if id(node) not in grads or node.op is None or (held and not through):
            continue
        total = sum_grads(grads.pop(id(node)))
        if held:
            grads[id(node)] = [total]
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

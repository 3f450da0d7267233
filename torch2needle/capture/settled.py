"""Parameters that a forward writes, as max-norm constraints and masked convolutions do, so that a second call changes nothing."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from .calls import Call, fresh
from .differences import difference
from .guard import Writes, same_chance
from .nodes import node_location, tensor_of, writes_parameter, written
from .state import untouched
from .tracing import Captured


def settled(captured: Captured, run: Callable, call: Call) -> frozenset[str]:
    """Which of the parameters that a captured graph writes it leaves alone once it wrote them, whatever they were before."""
    roots = [r for n in captured.graph.nodes if (r := written(n)) is not None]
    found = {str(r.target): p for r in roots if isinstance(p := tensor_of(r, captured.model), nn.Parameter)}
    if not found:
        return frozenset()
    draw, writes, values = torch.Generator().manual_seed(0), Writes(), []
    with same_chance(), untouched(captured.model), torch.inference_mode(False), torch.no_grad(), writes:
        try:
            for p in found.values():  # unlike the example's, which may lie where nothing is changed
                p.mul_(1 + 2 * torch.rand(p.shape, generator=draw).to(p))
            for _ in range(2):
                args, kwargs = fresh(call)
                run(*args, **kwargs)
                values.append([p.clone() for p in found.values()])
        except Exception:  # which the comparison tells
            return frozenset()
        finally:
            writes.undo()
    return frozenset(n for n, first, second in zip(found, *values, strict=True) if not difference(second, first))


def hint_of_writes(captured: Captured) -> str:
    """What to do where a graph that writes parameters is not the model: some forwards write once, to make them ready."""
    for node in captured.graph.nodes:
        if writes_parameter(node, captured.model):
            return (
                f"; it writes {written(node).target} in place at {node_location(node)}; "  # type: ignore[union-attr]
                "if its first call alone does, call the model once before"
            )
    return ""

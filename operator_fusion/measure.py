"""How far every fused op is from the steps that it stands for, in numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from needle.autograd import Tensor, no_grad
from needle.graph import Dim, GraphModule, Node
from needle.graph.kept import state_kept
from needle.graph.report import Fired
from needle.ops.fused.layer import FusedLayer


def deltas(net: GraphModule, fired: list[Fired], inputs: Any) -> list[float | None]:
    """For each fused node: the largest difference to its unfused form on the same inputs, relative to the largest value.

    None for one whose unfused form runs anyway (a batch norm in training).
    """
    wanted = {f.node_out for f in fired}
    readers = {n for node in net.graph if node.name in wanted for n in node.inputs()}
    values: dict[Node, Any] = {}
    found: dict[str, float | None] = {}

    def watch(node: Node, value: Any) -> None:
        if node in readers:
            values[node] = value
        if node.name not in wanted:
            return
        args = [values[a] for a in node.args]
        op = node.target.resolve(lambda d: values[d.node] if isinstance(d, Dim) else d.value())
        if op.must_decompose(*args):
            found[node.name] = None
            return
        results = as_planned(op, args), op.decompose(*args)
        pairs = zip(*(list(r) if op.n_out > 1 else [r] for r in results), strict=True)
        found[node.name] = max(largest_difference(a.numpy(), b.numpy()) for a, b in pairs)

    args, kwargs = ((), inputs) if isinstance(inputs, dict) else (tuple(inputs), {})
    with state_kept(net), no_grad():  # else a fused op without a gradient of its own would run its unfused form
        net.run(*args, **kwargs, watch=watch)
    return [found[f.node_out] for f in fired]


def as_planned(op: Any, args: list[Tensor]) -> Any:
    """The fused op's value as executables compute it: with batch norms in the weights."""
    if not isinstance(op, FusedLayer) or op.base is None or op.eps is None:
        return op(*args)
    layer, inputs = op.folded(args, lambda fold, parts: fold(*parts))
    return layer(*inputs)


def largest_difference(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.abs(got - want).max(initial=0) / max(np.abs(want).max(initial=0), 1e-30))

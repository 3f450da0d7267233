"""Convolutions of one input whose results are added as one convolution: blocks that are trained with branches."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from needle.graph import Graph, Node
from needle.graph.steps import of_parameters
from needle.op import Op
from needle.ops.fused.folded import FoldedBias, FoldedWeight, UnitWeight
from needle.ops.fused.layer import FusedLayer
from needle.ops.math.elementwise import EWiseAdd
from needle.ops.nn.conv import Conv2d
from needle.ops.nn.norm import BatchNorm
from needle.ops.shape.basic import Pad
from needle.targets.images import main_op


class Branch(NamedTuple):
    """A convolution of x: its weight and bias, nodes of parameters."""

    op: Conv2d
    x: Node
    weight: Node
    bias: Node | None


def merged_branches(graph: Graph) -> Graph:
    """The graph in which sums of convolutions of one input are convolutions with the sums of their weights.

    The smaller kernel has to lie inside the larger one; a batch norm that stands alone is a convolution of one pixel.
    """
    if not any(isinstance(main_op(n.target), Conv2d) for n in graph if n.kind == "op"):
        return graph
    users, merged = graph.users(), False

    def replace(node: Node, new: Graph, done: dict[Node, Node]) -> Node | None:
        nonlocal merged
        added = summands(node) if node.kind == "op" else ()
        if not added or any(users[a] != [node] or a.meta["spec"] != node.meta["spec"] for a in added):
            return None
        made = sum_of(new, node, [done[a] for a in node.args])
        merged = merged or made is not None
        return made

    made = graph.copy(replace)
    return made.prune() if merged else graph


def summands(node: Node) -> tuple[Node, ...]:
    """What a node adds up beside its own layer."""
    op = node.target
    if isinstance(op, EWiseAdd):
        return node.args
    adds = isinstance(op, FusedLayer) and op.has_residual and op.eps is None
    return node.args[-1:] if adds else ()


def sum_of(new: Graph, node: Node, args: list[Node]) -> Node | None:
    """The layer that a sum of two branches is, with the activation of what adds them."""
    op, fused = node.target, isinstance(node.target, FusedLayer)
    if fused:
        own = as_branch(op.base, args[:-1]) if isinstance(op.base, Conv2d) else None
        found = [own, branch_of(new, args[-1], own)]
    else:
        found = [branch_of(new, a, as_branch(b.target, b.args)) for a, b in zip(args, reversed(args), strict=True)]
    one, other = found
    if one is None or other is None or one.x is not other.x:
        return None
    both = joined(new, *((one, other) if taps(one) >= taps(other) else (other, one)))
    if both is None:
        return None
    inputs = [both.x, both.weight, *([] if both.bias is None else [both.bias])]
    if not fused or op.activation == "none":
        return add(new, both.op, inputs, node)
    return add(new, dataclasses.replace(op, base=both.op, has_bias=len(inputs) > 2, has_residual=False), inputs, node)


def add(new: Graph, op: Op, inputs: list[Node], like: Node) -> Node:
    made = new.add("op", op, tuple(inputs), like.name)
    made.meta = {**like.meta, "spec": op.infer(*(i.meta["spec"] for i in inputs))}
    return made


def taps(branch: Branch) -> int:
    shape = branch.weight.meta["spec"].shape
    return int(shape[2] * shape[3])


def as_branch(op: Any, inputs: Any) -> Branch | None:
    """A convolution whose weights do not depend on the input."""
    if not isinstance(op, Conv2d) or not all(map(of_parameters, inputs[1:])):
        return None
    x, weight, *bias = inputs
    return Branch(op, x, weight, bias[0] if bias else None)


def branch_of(new: Graph, node: Node, beside: Branch | None) -> Branch | None:
    """What makes a summand, as a convolution; of a batch norm one with the groups of the branch beside it."""
    if node.kind != "op":
        return None
    if not isinstance(node.target, BatchNorm) or beside is None:
        return as_branch(node.target, node.args)
    x, mean, var, weight, bias = node.args
    if x is not beside.x or not all(map(of_parameters, node.args[1:])):
        return None
    groups = beside.op.groups
    unit = add(new, UnitWeight(groups), [weight], node)
    inputs = [unit, mean, var, weight, bias]
    folded = [add(new, fold(node.target.eps, 0), inputs, node) for fold in (FoldedWeight, FoldedBias)]
    return Branch(Conv2d(groups=groups), x, *folded)


def joined(new: Graph, large: Branch, small: Branch) -> Branch | None:
    """Two branches as one; None where the one's taps are none of the other's."""
    a, b = large.op, small.op
    sizes = [s.weight.meta["spec"].shape[2:] for s in (large, small)]
    pads = []
    for axis, (k, n) in enumerate(zip(*sizes, strict=True)):
        step = a.dilation[axis] if n == 1 else b.dilation[axis]
        before, rest = divmod(a.padding[axis] - b.padding[axis], step)
        if rest or not 0 <= before <= k - n or step != a.dilation[axis]:
            return None
        pads.append((before, k - n - before))
    if a.groups != b.groups or a.stride != b.stride:
        return None
    weight, bias = small.weight, large.bias or small.bias
    if any(map(any, pads)):
        weight = add(new, Pad(tuple(pads)), [weight], weight)
    total = add(new, EWiseAdd(), [large.weight, weight], large.weight)
    if large.bias is not None and small.bias is not None:
        bias = add(new, EWiseAdd(), [large.bias, small.bias], large.bias)
    return Branch(a, large.x, total, bias)

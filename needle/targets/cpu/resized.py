"""Convolutions of single pixels whose images were enlarged, as convolutions of the small ones: both are linear, and commute."""

from __future__ import annotations

import dataclasses
from typing import Any

from needle.autograd import Spec
from needle.graph import Graph, Node
from needle.graph.steps import of_parameters
from needle.op import Op
from needle.ops.fused.layer import FusedLayer
from needle.ops.math.activation import activation_op
from needle.ops.math.elementwise import EWiseAdd
from needle.ops.nn.conv import Conv2d
from needle.ops.nn.resize import Interpolate
from needle.ops.shape.indexing import GetItem
from needle.ops.shape.join import Concat
from needle.targets.branches import add
from needle.targets.images import main_op

# What an element costs that is added, or made of its neighbours, in operations of a convolution.
ADDED, RESIZED = 30, 80


def convolved_small(graph: Graph) -> Graph:
    """The graph in which conv(concat(a, resize(b))) is conv(a) + resize(conv(b)) where that is less work."""
    users, moved = graph.users(), False

    def replace(node: Node, new: Graph, done: dict[Node, Node]) -> Node | None:
        nonlocal moved
        if not is_pointwise(node):
            return None
        x, out = node.args[0], node.meta["spec"]
        joins = x.kind == "op" and isinstance(x.target, Concat) and x.target.axis in (1, -3)
        if joins and not all(map(is_pointwise, users[x])):
            return None
        parts = x.args if joins else (x,)
        small = [p for p in parts if users[p] == [x if joins else node] and pays(p, out.shape[1])]
        if not small:
            return None
        moved = True
        return sum_of(new, node, done, parts, small)

    made = graph.copy(replace)
    return made.prune() if moved else graph


def is_layer(node: Node, kind: type[Op]) -> bool:
    """A layer of float32 with constant weights, and nothing behind it but its activation."""
    if node.kind != "op" or not isinstance(main_op(node.target), kind):
        return False
    if isinstance(node.target, FusedLayer) and (node.target.eps is not None or node.target.has_residual):
        return False
    floats = all(isinstance(s, Spec) and s.dtype == "float32" for s in (n.meta["spec"] for n in (node, *node.args[:2])))
    return floats and all(map(of_parameters, node.args[1:]))


def is_pointwise(node: Node) -> bool:
    """A convolution of single pixels, as `is_layer` has it."""
    if not is_layer(node, Conv2d):
        return False
    conv: Any = main_op(node.target)
    return node.args[1].meta["spec"].shape[2:] == conv.stride == (1, 1) and not any(conv.padding) and conv.groups == 1


def pays(part: Node, outputs: int) -> bool:
    """Whether it is less work to resize what `outputs` channels are made of the image that a part is resized from."""
    if part.kind != "op" or not isinstance(part.target, Interpolate) or part.meta["spec"].ndim != 4:
        return False
    (_, channels, *size), image = part.meta["spec"].shape, part.args[0].meta["spec"]
    pixels, before = size[0] * size[1], image.shape[2] * image.shape[3]
    more = ADDED * outputs + RESIZED * max(0, outputs - channels)
    return bool(2 * channels * outputs * (pixels - before) > more * pixels)


def sum_of(new: Graph, node: Node, done: dict[Node, Node], parts: Any, small: list[Node]) -> Node:
    """The convolution of `parts` as those of the `small` ones before they are resized, and one of the others."""
    op, (_, weight, *bias) = node.target, [done[a] for a in node.args]
    fused, first, total, others, weights = isinstance(op, FusedLayer), 0, None, [], []
    for part in parts:
        last = first + part.meta["spec"].shape[1]
        own = add(new, GetItem((slice(None), slice(first, last))), [weight], weight) if len(parts) > 1 else weight
        first = last
        if part not in small:
            others.append(done[part])
            weights.append(own)
            continue
        given = bias if total is None and len(small) == len(parts) else []  # weights of neighbours sum up to 1
        made = add(new, Conv2d(), [done[part.args[0]], own, *given], node)
        made = add(new, part.target, [made], part)
        total = made if total is None else add(new, EWiseAdd(), [total, made], node)
    assert total is not None
    activation = op.activation if fused else "none"
    if not others:
        return total if activation == "none" else add(new, activation_op(activation, op.alpha), [total], node)
    x, own = (n[0] if len(n) == 1 else add(new, Concat(1), n, node) for n in (others, weights))
    layer = dataclasses.replace(op if fused else FusedLayer(Conv2d(), has_bias=bool(bias)), has_residual=True)
    return add(new, layer, [x, own, *bias, total], node)

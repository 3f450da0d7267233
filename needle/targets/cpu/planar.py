"""Layers over an axis that lies in front of others, done where it lies: weight @ x, with nothing moved there and back."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

from needle.graph import Graph, Node
from needle.op import Op
from needle.ops.common import Elementwise
from needle.ops.fused.layer import FusedLayer
from needle.ops.linalg.basic import Linear, MatMul
from needle.ops.math.activation import activation_op
from needle.ops.math.elementwise import EWiseAdd
from needle.ops.shape.basic import Permute, Reshape
from needle.targets.branches import add
from needle.targets.images import images, main_op

from .resized import is_layer, is_pointwise

BLOCK = 16  # outputs that packed kernels compute at a time
LONG, SHORT = 256, 32  # elements behind the axis from which linear layers gain: all, and those that fill few blocks


class Found(NamedTuple):
    """Layers one after the other over an axis of x."""

    x: Node
    axis: int
    layers: list[Node]


def planar(graph: Graph) -> Graph:
    """The graph in which linear layers between a permutation and its inverse, and convolutions of single pixels to few
    channels that no image in blocks meets, are products that read their inputs as they lie.
    """
    users, blocked, moved = graph.users(), images(graph), False

    def replace(node: Node, new: Graph, done: dict[Node, Node]) -> Node | None:
        nonlocal moved
        found = between_permutations(node, users) or apart(node, users, blocked)
        if found is None:
            return None
        moved, x = True, done[found.x]
        for layer in found.layers:
            x = as_product(new, layer, x, [done[a] for a in layer.args[1:]], found.axis)
        return x

    made = graph.copy(replace)
    return made.prune() if moved else graph


def between_permutations(node: Node, users: dict[Node, list[Node]]) -> Found | None:
    """Linear layers of x's axis, which is the last one for them, and goes back to its place in `node`."""
    layers: list[Node] = []
    last = node
    while is_permutation(node) and is_layer(last.args[0], Linear) and users[last.args[0]] == [last]:
        last = last.args[0]
        layers.insert(0, last)
    if not layers or not is_permutation(first := last.args[0]):
        return None
    x = first.args[0]
    there, back = order_of(first), order_of(node)
    axis = there[-1]
    moves_one = list(there[:-1]) == sorted(there[:-1]) and axis < len(there) - 1
    if not moves_one or [there[i] for i in back] != sorted(there):
        return None
    behind = prod(x.meta["spec"].shape[axis + 1 :])
    pays = all(behind >= (SHORT if fills_few_blocks(layer, -1) else LONG) for layer in layers)
    return Found(x, axis, layers) if pays else None


def apart(node: Node, users: dict[Node, list[Node]], blocked: set[Node]) -> Found | None:
    """A convolution of single pixels with plain arrays before it and behind it."""
    if not is_pointwise(node) or node.args[0] in blocked or not fills_few_blocks(node, 1):
        return None
    left, made = [node], {node}
    while left:
        for user in users[left.pop()]:
            if user in blocked and user not in made:
                if not isinstance(user.target, Elementwise) or any(a in blocked - made for a in user.args):
                    return None
                left.append(user)
                made.add(user)
    return Found(node.args[0], 1, [node])


def is_permutation(node: Node) -> bool:
    return node.kind == "op" and isinstance(node.target, Permute)


def order_of(permutation: Node) -> tuple[int, ...]:
    spec = permutation.args[0].meta["spec"]
    return (
        tuple(range(spec.ndim))[::-1]
        if permutation.target.axes is None
        else tuple(a % spec.ndim for a in permutation.target.axes)
    )


def fills_few_blocks(layer: Node, axis: int) -> bool:
    outputs = layer.meta["spec"].shape[axis]
    return bool(4 * outputs <= 3 * (outputs + -outputs % BLOCK))


def as_product(new: Graph, layer: Node, x: Node, rest: list[Node], axis: int) -> Node:
    """activation(weight @ x + bias) over x's axis."""
    op: Any = layer.target
    weight, *bias = rest
    main, shape = main_op(op), x.meta["spec"].shape

    def step(op: Op, *inputs: Node) -> Node:
        return add(new, op, list(inputs), layer)

    if not isinstance(main, Linear):
        weight = step(Reshape(weight.meta["spec"].shape[:2]), weight)
    elif main.layout_of_weight == "needle":
        weight = step(Permute((1, 0)), weight)
    outputs = weight.meta["spec"].shape[0]
    y = step(MatMul(), weight, step(Reshape((prod(shape[:axis]), shape[axis], prod(shape[axis + 1 :]))), x))
    if bias:
        y = step(EWiseAdd(), y, step(Reshape((outputs, 1)), bias[0]))
    if isinstance(op, FusedLayer) and op.activation != "none":
        y = step(activation_op(op.activation, op.alpha), y)
    return step(Reshape((*shape[:axis], outputs, *shape[axis + 1 :])), y)

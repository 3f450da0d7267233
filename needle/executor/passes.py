"""Graph passes of the executor: constants folded before the plan is made. They change no result and name every fold."""

from __future__ import annotations

from needle.autograd import Op
from needle.graph import Graph, Node
from needle.ops.conv import Conv2d, ConvTranspose2d
from needle.ops.fold import FoldedBias, FoldedWeight
from needle.ops.linalg import Linear
from needle.ops.norm import BatchNorm


def optimize(graph: Graph) -> Graph:
    """Batch norms folded into the weights before them; nodes that nothing reads dropped."""
    return fold_batch_norms(graph).prune()


def add_op(graph: Graph, op: Op, args: list[Node], name: str) -> Node:
    """An op node with its shape inferred from its inputs'."""
    node = graph.add("op", op, tuple(args), name)
    node.meta["spec"] = op.infer(*(a.meta["spec"] for a in args))
    return node


def fold_batch_norms(graph: Graph) -> Graph:
    """Replaces fused batch-norm ops by their folded form, and layer + batch norm pairs by the layer with folded weights."""
    users = graph.users()

    def replace(node: Node, new: Graph, done: dict[Node, Node]) -> Node | None:
        if node.kind != "op":
            return None
        op = node.target
        if hasattr(op, "folded"):
            layer, weight, bias, parts, (x, *rest) = op.folded([done[a] for a in node.args])
            folds = [add_op(new, f, parts, f"{node.name}_{f.label}") for f in (weight, bias)]
            return add_op(new, layer, [x, *folds, *rest], node.name)
        if not isinstance(op, BatchNorm):
            return None
        producer = node.args[0]
        axis = OUTPUT_AXIS.get(type(producer.target)) if producer.kind == "op" else None
        if (
            axis is None
            or len(users[producer]) > 1
            or any(not constant(a) for a in (*producer.args[1:], *node.args[1:]))
        ):
            return None
        layer = producer.target
        x, w, *bias_node = (done[a] for a in producer.args)
        mean, var, gamma, beta = (done[a] for a in node.args[1:])
        if isinstance(layer, Linear) and layer.layout_of_weight == "needle":
            axis = 1
        parts = [w, mean, var, gamma, beta, *bias_node]
        folds = [
            add_op(new, f(op.eps, axis), parts, f"{producer.name}_{f.__name__}") for f in (FoldedWeight, FoldedBias)
        ]
        return add_op(new, layer, [x, *folds], producer.name)

    return graph.copy(replace)


# Layers that a batch norm can be folded into, with the weight's axis of output channels.
OUTPUT_AXIS = {Conv2d: 0, ConvTranspose2d: 1, Linear: 0}


def constant(node: Node) -> bool:
    """A parameter, or computed from parameters alone."""
    return node.kind == "param" or (node.kind == "op" and all(map(constant, node.args)))

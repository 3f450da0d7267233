"""Graph passes of the executor: ops without a kernel decomposed, constants folded, concats nested. They change no result."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

from needle.autograd import Op, Spec, Tensor
from needle.backend_ndarray import Device, NoKernel, cpu
from needle.graph import Graph, Node, Recorder, Symbol
from needle.ops.conv import Conv2d, ConvTranspose2d
from needle.ops.fold import FoldedBias, FoldedWeight
from needle.ops.fused_norm import FusedBatchNormActivation
from needle.ops.join import Concat
from needle.ops.linalg import Linear
from needle.ops.norm import BatchNorm

from .planner import constant_nodes, missing_kernel
from .split import in_numpy


def optimize(graph: Graph, device: Device) -> Graph:
    """Kernels for every op; batch norms folded into the weights before them; nodes that nothing reads dropped."""
    return nest_concats(fold_batch_norms(decompose(graph, device)).prune())


class Decomposer(Recorder):
    """Records into a graph that is being copied; an op without a kernel becomes its decomposition."""

    def __init__(self, graph: Graph, device: Device) -> None:
        super().__init__(static=True, device=device)
        self.graph = graph

    def record(self, op: Op, inputs: Sequence[Tensor]) -> Any:
        specs = [Spec(tuple(t.shape), t.dtype) for t in inputs]
        return super().record(op, inputs) if runs_on(self.device, op, specs) else op.decompose(*inputs)


def is_planned(op: Op) -> bool:
    return op.has_kernel() or hasattr(op, "folded")


def runs_on(device: Device, op: Op, inputs: Sequence[Any]) -> bool:
    """Whether an op stays in a plan of the device, for inputs of these shapes and dtypes."""
    if op.library != "needle":
        return op.has_kernel()
    if hasattr(op, "folded"):
        return not in_numpy(op, inputs)
    if not op.has_kernel():
        return False
    missing = missing_kernel(op, inputs, device)
    if missing and type(op).decompose is Op.decompose:
        if device == cpu() and in_numpy(op, inputs):
            return True
        if device != cpu():
            raise NoKernel(f"[{op.label}] has neither a kernel for these inputs nor a decomposition: {missing}")
        found = ", ".join(dict.fromkeys(s.dtype for s in inputs if isinstance(s, Spec)))
        raise TypeError(f"[{op.label}] cannot run on {found} on {device}; cast its inputs, x.astype('float32').")
    return not missing


def decompose(graph: Graph, device: Device) -> Graph:
    """Ops without a kernel in terms of ops that have one."""
    tuples: dict[Node, list[Node]] = {}  # results of decomposed ops with several outputs
    fixed = constant_nodes(graph)
    lacking: Counter[str] = Counter()  # ops that have a kernel elsewhere

    def replace(node: Node, new: Graph, done: dict[Node, Node]) -> Node | None:
        if node.kind != "op":
            return None
        if node.args and node.args[0] in tuples:
            return tuples[node.args[0]][node.target.index]
        if node in fixed and node.target.has_kernel():
            return None  # computed once, as eager does
        op, specs = node.target, [a.meta["spec"] for a in node.args]
        folds = not hasattr(op, "folded") or all(a in fixed for i, a in enumerate(node.args) if op.is_weight(i))
        if folds and runs_on(device, op, specs):
            return None
        lacking.update([op.label] if op.has_kernel() else [])
        recorder = Decomposer(new, device)
        out = op.decompose(*(Symbol(done[a], recorder, done[a].meta["spec"]) for a in node.args))
        # A decomposition may give a constant, which is no symbol.
        nodes = [recorder._to_node(t) for t in (out if isinstance(out, tuple) else (out,))]
        if isinstance(out, tuple):
            tuples[node] = nodes
        return nodes[0]

    made = graph.copy(replace)
    made.output.meta["decomposed"] = lacking
    return made


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
        if isinstance(op, FusedBatchNormActivation) and op.has_count:  # only training counts batches
            return add_op(new, dataclasses.replace(op, has_count=False), [done[a] for a in node.args[:5]], node.name)
        if not isinstance(op, BatchNorm):
            return None
        producer = node.args[0]
        axis = OUTPUT_AXIS.get(type(producer.target)) if producer.kind == "op" else None
        if (
            axis is None
            or len(users[producer]) > 1
            or (isinstance(producer.target, Linear) and node.meta["spec"].ndim != 2)  # features are not the channels
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


def nest_concats(graph: Graph) -> Graph:
    """cat(a, b, c) reads cat(a, b) where the graph has it: so the planner keeps a list that grows in one memory (DenseNet)."""
    known: dict[tuple, Node] = {}  # (axis, inputs) -> concat, all of the old graph

    def replace(node: Node, new: Graph, done: dict[Node, Node]) -> Node | None:
        if node.kind != "op" or not isinstance(node.target, Concat):
            return None
        args = node.args
        same = known.setdefault((node.target.axis, args), node)
        if same is not node:
            return done[same]
        for n in range(len(args) - 1, 0, -1):
            shorter = known.get((node.target.axis, args[:n]))
            if shorter is not None:
                return add_op(new, node.target, [done[a] for a in (shorter, *args[n:])], node.name)
        return None

    return graph.copy(replace)


# Layers that a batch norm can be folded into, with the weight's axis of output channels.
OUTPUT_AXIS = {Conv2d: 0, ConvTranspose2d: 1, Linear: 0}


def constant(node: Node) -> bool:
    """A parameter, or computed from parameters alone."""
    return node.kind == "param" or (node.kind == "op" and all(map(constant, node.args)))

"""Graph passes of the executor: ops without a kernel decomposed, what the target rewrites. They change no result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

from needle.autograd import Op, Spec, Tensor
from needle.backend_ndarray import Device, NoKernel
from needle.backend_ndarray.sizes import has_sizes
from needle.graph import Graph, Node, Recorder, Symbol
from needle.graph.engine import Rewriting
from needle.graph.parts import merge_parts
from needle.graph.report import Fired
from needle.graph.steps import Steps

from .constants import SizedConstant
from .planner import constant_nodes, missing_kernel
from .split import in_numpy
from .target import target_of


def optimize(graph: Graph, device: Device, disable: Collection[str] = ()) -> tuple[Graph, Rewriting, list[Fired]]:
    """Kernels for every op, the target's rewrites, nothing that nobody reads; with what was rewritten."""
    target = target_of(device)
    plan = Rewriting(
        Steps(target.prepared(decompose(merge_parts(graph), device, disable))), target.rules.select(disable=disable)
    )
    made, fired = plan.rewrite(static=True)
    return target.arranged(made.prune()), plan, fired


class Decomposer(Recorder):
    """Records into a graph that is being copied; an op without a kernel becomes its decomposition."""

    def __init__(self, graph: Graph, device: Device) -> None:
        super().__init__(static=True, device=device)
        self.graph = graph

    def record(self, op: Op, inputs: Sequence[Tensor]) -> Any:
        specs = [Spec(tuple(t.shape), t.dtype) for t in inputs]
        return super().record(op, inputs) if runs_on(self.device, op, specs) else self.parts(op, inputs)

    def parts(self, op: Op, inputs: Sequence[Tensor]) -> Any:
        """What an op becomes; of traced sizes alone a constant that is made when they are known."""
        specs = [Spec(tuple(t.shape), t.dtype) for t in inputs]
        if not op.ignores_values or not has_sizes((op, specs)):
            return op.decompose(*inputs)
        made = SizedConstant(op.infer(*specs), op, None, tuple(specs))
        node = self.graph.add("param", made, (), "constant")
        node.meta["tensor"] = made
        return self._symbol(node, made.spec)


def runs_on(
    device: Device, op: Op, inputs: Sequence[Any], constant: Collection[int] = (), disable: Collection[str] = ()
) -> bool:
    """Whether an op stays in a plan of the device, for inputs of these shapes and dtypes; constant: those that never change."""
    if op.library != "needle":
        return op.has_kernel()
    target = target_of(device)
    if target.folds(op):
        return target.can_fold(op, inputs, constant, disable) and not in_numpy(op, inputs)
    if not op.has_kernel() and target.lowering(op) is None:
        return False
    missing = missing_kernel(op, inputs, device)
    if missing and type(op).decompose is Op.decompose:
        if target.numpy and in_numpy(op, inputs):
            return True
        if not target.numpy:
            raise NoKernel(f"[{op.label}] has neither a kernel for these inputs nor a decomposition: {missing}")
        found = ", ".join(dict.fromkeys(s.dtype for s in inputs if isinstance(s, Spec)))
        raise TypeError(f"[{op.label}] cannot run on {found} on {device}; cast its inputs, x.astype('float32').")
    return not missing


def decompose(graph: Graph, device: Device, disable: Collection[str] = ()) -> Graph:
    """Ops without a kernel in terms of ops that have one."""
    tuples: dict[Node, list[Node]] = {}  # results of decomposed ops with several outputs
    fixed, parts = constant_nodes(graph), target_of(device).splits(graph)
    lacking: Counter[str] = Counter()  # ops that have a kernel elsewhere

    def replace(node: Node, new: Graph, done: dict[Node, Node]) -> Node | None:
        if node.kind != "op":
            return None
        if node.args and node.args[0] in tuples:
            return tuples[node.args[0]][node.target.index]
        if node in fixed and node.target.has_kernel():
            return None  # computed once, as eager does
        op, specs = node.target, [a.meta["spec"] for a in node.args]
        split = parts.get(node)
        if split is None:
            if runs_on(device, op, specs, [i for i, a in enumerate(node.args) if a in fixed], disable):
                return None
            lacking.update([op.label] if op.has_kernel() else [])
        recorder = Decomposer(new, device)
        symbols = [Symbol(done[a], recorder, done[a].meta["spec"]) for a in node.args]
        out = split(*symbols) if split else recorder.parts(op, symbols)
        # A decomposition may give a constant, which is no symbol.
        nodes = [recorder.to_node(t) for t in (out if isinstance(out, tuple) else (out,))]
        if isinstance(out, tuple):
            tuples[node] = nodes
        return nodes[0]

    made = graph.copy(replace)
    made.output.meta["decomposed"] = lacking
    return made

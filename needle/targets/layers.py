"""Layers with what their kernels finish with, and layers side by side: the parts of their lowerings that targets share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from needle.backend_ndarray import NDArray, call
from needle.executor.builder import Builder
from needle.executor.planner import lower_into
from needle.executor.target import Target
from needle.graph import Graph
from needle.graph.steps import passes_on
from needle.op import Op
from needle.ops.common import Elementwise
from needle.ops.fused.attention import FusedMultiHeadAttention
from needle.ops.fused.layer import FusedLayer, add_and_activate
from needle.ops.fused.linears import FusedLinears, GatedLinear, slices
from needle.ops.linalg.basic import Linear
from needle.ops.math.activation import activation_code
from needle.targets.branches import merged_branches
from needle.targets.folds import FOLDS, INSIDE, has_norm_inside, joined_parts, nest_concats
from needle.targets.images import main_op
from needle.targets.other_axes import on_images
from needle.targets.views import maps_before_views


class Finish(NamedTuple):
    """What follows a layer's sums: activation(sums + residual)."""

    residual: NDArray | None = None
    activation: str = "none"
    alpha: float = 0.0

    @property
    def attrs(self) -> dict[str, float]:
        """For a kernel that takes all of it."""
        return {"activation": activation_code(self.activation), "alpha": self.alpha}

    def alone(self) -> Finish:
        """What a kernel without residual can do; `add` does the rest."""
        return self if self.residual is None else NOTHING

    def add(self, out: NDArray) -> None:
        if self.residual is not None:
            add_and_activate(out, self.residual, self.activation, self.alpha)

    def plainly(self, op: Op, out: NDArray, ins: Sequence[NDArray]) -> None:
        """The layer by its kernel for plain arrays, and what follows."""
        first = self.alone()
        op.into(out, *ins, activation=first.activation, alpha=first.alpha)  # type: ignore[call-arg]
        self.add(out)


NOTHING = Finish()


def operands(ins: Sequence[NDArray]) -> tuple[NDArray, NDArray, NDArray | None]:
    """x, weight and bias, if there is one."""
    x, weight, *bias = ins
    return x, weight, bias[0] if bias else None


Join = Callable[[Builder, NDArray, NDArray, Sequence[NDArray], Sequence[NDArray]], None]


def join_rows(*parts: NDArray) -> NDArray:
    """Matrices or vectors one below the other."""
    out = NDArray.empty((sum(p.shape[0] for p in parts), *parts[0].shape[1:]), parts[0].dtype)
    row = 0
    for p in parts:
        call("copy", [out[row : row + p.shape[0]]], x=p)
        row += p.shape[0]
    return out


def lower_fused(builder: Builder, op: FusedLayer, ins: list[NDArray], out: NDArray) -> None:
    """By its base's lowering with what follows; a batch norm alone by the kernel of batch norms."""
    parts = op.split(ins)
    finish = Finish(parts.residual, op.activation, op.alpha)
    main = main_op(op)
    found = builder.target.lowering(main)
    if op.base is None:
        weight, bias, mean, var = parts.vectors
        parts = parts._replace(operands=[ins[0], mean, var, weight, bias])
    if found is None:
        op.into(out, *ins)
    else:
        found[0](builder, main, parts.operands, out, finish)


def order_of(shape: Sequence[int], arrays: Sequence[NDArray]) -> list[int] | None:
    """The axes as the first of the arrays that have this shape lies in memory; None where one lies in their own order."""
    found = None
    for x in arrays:
        axes = [a for a, n in enumerate(x.shape) if n > 1]
        if tuple(x.shape) != tuple(shape) or any(x.strides[a] <= 0 for a in axes):
            continue
        order = sorted(axes, key=x.strides.__getitem__, reverse=True)
        if order == axes:
            return None
        found = found or order
    return found and [*(a for a in range(len(shape)) if a not in found), *found]


class LayerTarget(Target):
    """A target whose kernels finish layers with activations, and whose plans fold batch norms into weights."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.rules |= FOLDS
        self.lowers(FusedLayer)(lower_fused)

    def folds(self, op: Op) -> bool:
        return has_norm_inside(op)

    def can_fold(self, op: Any, inputs: Sequence[Any], constant: Collection[int], disable: Collection[str]) -> bool:
        weights = {i for i in range(len(inputs)) if op.is_weight(i)}
        off = {f.name for name in disable for f in self.rules.resolve(name)}
        return INSIDE not in off and weights <= set(constant) and op.base.takes_norm(op.infer(*inputs))

    def memory(self, op: Op, spec: Any, ins: Sequence[NDArray], leaves: bool) -> NDArray:
        """Maps leave elements in the order in which they find them: transposing is a step of its own, if anything needs it."""
        order = None if leaves or not isinstance(op, Elementwise) else order_of(spec.shape, ins)
        if order is None:
            return super().memory(op, spec, ins, leaves)
        made = NDArray.empty([spec.shape[a] for a in order], spec.dtype)
        return made.permute(sorted(range(len(order)), key=order.__getitem__))

    def holds(self, op: Op, home: NDArray, ins: Sequence[NDArray], leaves: bool) -> bool:
        order = None if leaves or not isinstance(op, Elementwise) else order_of(home.shape, ins)
        return (home if order is None else home.permute(order)).is_compact()

    def prepared(self, graph: Graph) -> Graph:
        return on_images(maps_before_views(graph), self.lowering)

    def arranged(self, graph: Graph) -> Graph:
        if any(map(passes_on, graph)):
            graph = graph.copy(lambda node, _, done: done[node.args[0]] if passes_on(node) else None)
        return nest_concats(joined_parts(merged_branches(graph)))

    def lowers_joined(self, join: Join) -> Join:
        """Decorator: f(builder, x, out, weights, biases) plans one product with constant weights (out, in) side by side, and
        serves the ops that have several layers of one input.
        """

        def project(
            builder: Builder, x: NDArray, weights: Sequence[NDArray], biases: Sequence[NDArray]
        ) -> list[NDArray]:
            """x W^T + b for every weight."""
            if len(weights) > 1 and all(builder.is_constant(a) for a in (*weights, *biases)):
                whole = NDArray.empty((*x.shape[:-1], sum(w.shape[0] for w in weights)))
                join(builder, x, whole, weights, biases)
                return slices(whole, weights)
            outs = [NDArray.empty((*x.shape[:-1], w.shape[0])) for w in weights]
            for i, (w, out) in enumerate(zip(weights, outs, strict=True)):
                lower_into(builder, Linear(), [x, w, *biases[i : i + 1]], out)
            return outs

        @self.lowers(FusedLinears, makes=True)
        def linears(builder: Builder, op: FusedLinears, inputs: list[NDArray]) -> Any:
            x, *rest = inputs
            return tuple(project(builder, x, rest[: op.parts], rest[op.parts :]))

        @self.lowers(GatedLinear, makes=True)
        def gated(builder: Builder, op: GatedLinear, inputs: list[NDArray]) -> NDArray:
            x, *rest = inputs
            gate, up = project(builder, x, rest[:2], rest[2:])
            out = NDArray.empty(gate.shape, gate.dtype)
            op.join(out, gate, up)
            return out

        @self.lowers(FusedMultiHeadAttention, makes=True)
        def attention(builder: Builder, op: FusedMultiHeadAttention, inputs: list[NDArray]) -> NDArray:
            sources, weights, biases, output, mask = op.split(inputs)
            projected: list[NDArray] = []
            while len(projected) < 3:  # one product for neighbours that read the same input
                first = last = len(projected)
                while last < 3 and sources[last] is sources[first]:
                    last += 1
                projected += project(builder, sources[first], weights[first:last], biases[first:last])
            out = NDArray.empty((*sources[0].shape[:-1], output[0].shape[0]))
            q, k, v = projected
            lower_into(builder, Linear(), [op.attend(q, k, v, mask), *output], out)
            return out

        return join

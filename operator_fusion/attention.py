"""Finds attention, however it is spelled: the product softmax(q k^T) v, and the projections around it.

Heads are split by views that every code base writes in its own way. They are not matched by name: the views between a projection
and the product are run on an array of position numbers, and the result says which features they hand to which head.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from needle import nn
from needle.autograd import Op, Spec
from needle.graph import Dim, Mode, Node
from needle.graph.graph import SCALAR_OPERATORS
from needle.graph.matcher import Match
from needle.graph.steps import Step, Steps
from needle.ops.fused.attention import FusedMultiHeadAttention
from needle.ops.linalg.basic import Linear, MatMul
from needle.ops.math.elementwise import DivScalar, EWiseAdd, MulScalar
from needle.ops.nn.attention import ScaledDotProductAttention
from needle.ops.nn.heads import MergeHeads, SplitHeads
from needle.ops.reduce.softmax import Softmax
from needle.ops.shape.basic import Permute, Transpose
from needle.ops.shape.indexing import GetItem, encode_index


@dataclasses.dataclass
class Core:
    """softmax(q k^T * scale + mask) v: its operands, and the nodes that it is made of, the last one first."""

    q: Node
    k: Node
    v: Node
    mask: Node | None
    op: ScaledDotProductAttention  # with every attribute
    nodes: list[Node]
    keys_last: bool = False  # k has its features before its rows, as the product wants it
    four_axes: bool = True  # False where its steps name axis 3 as the last one of a tensor whose axes are not known


def is_scale(op: Any) -> bool:
    number = isinstance(op, MulScalar | DivScalar) and isinstance(op.scalar, int | float)
    return number and (isinstance(op, MulScalar) or op.scalar != 0)


def factor_of(op: Any) -> float:
    return float(op.scalar if isinstance(op, MulScalar) else 1 / op.scalar)


def scaled(node: Node, steps: Steps, nodes: list[Node]) -> tuple[Node, float]:
    """What stands before products with numbers, and all the numbers in one; the products are added to `nodes`."""
    factor = 1.0
    while node in steps and is_scale(steps[node].op):
        factor *= factor_of(steps[node].op)
        nodes.append(node)
        node = steps[node].inputs[0]
    return node, factor


def find_core(node: Node, steps: Steps) -> Core | None:
    """The attention that ends at `node`: the op itself, or its parts."""
    step = steps.get(node)
    if step is None:
        return None
    if isinstance(step.op, ScaledDotProductAttention):
        q, k, v, *rest = step.inputs
        return Core(q, k, v, rest[0] if rest else None, step.op, [node])
    if not isinstance(step.op, MatMul):
        return None
    weights, v = step.inputs
    nodes, mask = [node], None
    dropout: float = 0.0
    training: Any = False
    layer = steps.layer(weights)
    if isinstance(layer, nn.Dropout):
        dropout, training = layer.p, Mode(layer, weights.target)
        nodes.append(weights)
        weights = weights.args[0]
    soft = steps.get(weights)
    if soft is None or not isinstance(soft.op, Softmax) or soft.op.axis not in (-1, 3):
        return None
    nodes.append(weights)
    scores = soft.inputs[0]
    added = steps.get(scores)
    if added is not None and isinstance(added.op, EWiseAdd):
        nodes.append(scores)
        a, b = added.inputs
        scores, mask = (a, b) if leads_to_product(a, steps) else (b, a)
    scores, factor = scaled(scores, steps, nodes)
    product = steps.get(scores)
    if product is None or not isinstance(product.op, MatMul):
        return None
    nodes.append(scores)
    q, of_q = scaled(product.inputs[0], steps, nodes)
    k, of_k = scaled(product.inputs[1], steps, nodes)
    keys_last = not swaps_last_two(k, steps)
    if not keys_last:
        nodes.append(k)
        k = steps[k].inputs[0]
        k, of_k2 = scaled(k, steps, nodes)
        of_k *= of_k2
    strict = mask is not None  # softmax gives NaN where the mask leaves no key
    op = ScaledDotProductAttention(False, factor * of_q * of_k, mask is not None, dropout, training, strict)
    spec = weights.meta.get("spec")
    from_front = soft.op.axis == 3 or any(names_axis_3(n, steps) for n in nodes)
    return Core(q, k, v, mask, op, nodes, keys_last, not from_front or (spec is not None and spec.ndim == 4))


def leads_to_product(node: Node, steps: Steps) -> bool:
    found, _ = scaled(node, steps, [])
    return found in steps and isinstance(steps[found].op, MatMul)


def swaps_last_two(node: Node, steps: Steps) -> bool:
    op: Any = steps[node].op if node in steps else None
    if isinstance(op, Transpose):
        return op.axes is None or sorted(op.axes) in ([-2, -1], [2, 3])
    return isinstance(op, Permute) and tuple(op.axes or ()) in ((0, 1, 3, 2), (0, 2, 1))


def names_axis_3(node: Node, steps: Steps) -> bool:
    op: Any = steps[node].op if node in steps else None
    return isinstance(op, Transpose) and op.axes is not None and max(op.axes) == 3


class CoreMatch(Match):
    """An attention product spelled out."""

    closed = True

    def __init__(self, core: Core, steps: Steps) -> None:
        nodes = sorted(set(core.nodes), key=steps.order.__getitem__)
        super().__init__({n.name: steps.stand_in(n, core.op) for n in nodes})
        self.core = core
        self.problem = "its keys are not transposed by a step of their own" if core.keys_last else ""
        if not core.four_axes:
            self.problem = "axis 3 is the last one of four axes alone, and its inputs' shapes are not known"


class CorePattern:
    """softmax(q k^T * scale + mask) v of at least two products; the op itself is no match."""

    def __len__(self) -> int:
        return 4

    def matches(self, root: Node, steps: Steps) -> Iterator[Match]:
        core = find_core(root, steps)
        if core is not None and len(core.nodes) > 1:
            yield CoreMatch(core, steps)


# -- projections ----------------------------------------------------------------------------------------------------------


def views_back(node: Node, steps: Steps, scales: list[Node] | None = None) -> tuple[Node, list[Node]]:
    """What stands before a chain of views, and the chain, the last view first; products with a number go into `scales`."""
    chain = []
    while node in steps:
        op: Any = steps[node].op
        if op.is_view and len(steps[node].inputs) == 1:
            chain.append(node)
        elif scales is not None and is_scale(op):
            scales.append(node)
        else:
            break
        node = steps[node].inputs[0]
    return node, chain


class Probe:
    """Runs views on arrays of position numbers. Sizes come from the shapes that are known, or the probe fails."""

    def __init__(self, shapes: dict[Node, tuple[int, ...]]) -> None:
        self.shapes = dict(shapes)

    def dim(self, d: Any) -> Any:
        """The value of a symbolic size."""
        return self.scalar(d.node) if isinstance(d, Dim) else d.value()

    def scalar(self, node: Node) -> Any:
        a, b = (self.dim(x) if isinstance(x, Dim) else x for x in node.args)
        if node.target == "size":
            return self.shapes[a][b]
        return SCALAR_OPERATORS[node.target](*(self.scalar(x) if isinstance(x, Node) else x for x in (a, b)))

    def run(self, chain: list[Node], x: np.ndarray, steps: Steps) -> np.ndarray:
        for node in reversed(chain):
            op: Op = steps[node].op.resolve(self.dim)
            x = op.reference(x)
            self.shapes[node] = x.shape
        return x


class AttentionMatch(Match):
    """Projections, attention, output projection. `problem` says why it cannot be one op, else the fields are set."""

    closed = True

    def __init__(self, root: Node, core: Core, steps: Steps) -> None:
        output = steps[root]
        _, tail = views_back(output.inputs[0], steps)
        self.core, self.output = core, output
        scales: list[Node] = []
        chains = [views_back(n, steps, None if n is core.v else scales) for n in (core.q, core.k, core.v)]
        self.factor = math.prod(factor_of(steps[n].op) for n in scales)  # of q and k before the product
        self.projections: list[Step] = [steps[n] for n, _ in chains]
        nodes = [root, *tail, *core.nodes, *scales, *(n for p, c in chains for n in (*c, p))]
        inner = sorted(set(nodes), key=steps.order.__getitem__)
        super().__init__({n.name: steps.stand_in(n, core.op) for n in inner})
        self.shapes: dict[Node, tuple[int, ...]] = {}
        self.heads, self.size, self.sequence_first = 0, 0, False
        self.thirds: list[int | None] = [None] * 3  # which third of a joint projection q, k and v are
        try:
            self.problem = self._split(chains, steps) or self._merged(tail, steps)
        except (KeyError, ValueError, IndexError, TypeError):
            self.problem = "its views need sizes that are not the input's"

    def _split(self, chains: list[tuple[Node, list[Node]]], steps: Steps) -> str:
        """Learn heads and thirds from the views of q, k and v."""
        inputs = list(dict.fromkeys(p.inputs[0] for p in self.projections))
        biases = {len(p.inputs) for p in self.projections}
        if len(biases) > 1:
            return "some of the projections have a bias and some have not"
        for i, ((source, chain), step) in enumerate(zip(chains, self.projections, strict=True)):
            x, weight, *_ = step.inputs
            spec = weight.meta.get("spec")
            if spec is None or step.op.layout_of_weight != "torch":  # type: ignore[attr-defined]
                return f"the weight of {source.name} is not (out, in)"
            features, width = spec.shape
            splits: list[Any] = [steps[n].op for n in chain if isinstance(steps[n].op, SplitHeads)]
            self.sequence_first = any(s.sequence_first for s in splits)
            length = 5 + 2 * inputs.index(x)
            rows = (length, 2) if self.sequence_first else (2, length)
            self.shapes |= {x: (*rows, width), source: (*rows, features)}
            numbers = np.arange(2 * length * features).reshape(*rows, features)
            found = Probe(self.shapes).run(chain, numbers, steps)
            if i == 1 and self.core.keys_last:
                found = found.swapaxes(-1, -2)
            if found.ndim != 4:
                return f"{source.name} is not split into heads"
            heads, size = found.shape[1], found.shape[3]
            parts = next((n for n in (1, 3) if n * heads * size == features), 0)
            if not parts:
                return f"the heads of {source.name} are not made of its features alone"
            split = SplitHeads(heads, self.sequence_first)
            fits = [
                j for j, part in enumerate(np.split(numbers, parts, -1)) if np.array_equal(split.reference(part), found)
            ]
            if not fits:
                return f"the features of {source.name} are laid out otherwise than head by head"
            if self.heads not in (0, heads):
                return "q, k and v have different numbers of heads"
            self.heads, self.size = heads, size if i < 2 else self.size
            self.thirds[i] = None if parts == 1 else fits[0]
        return ""

    def _merged(self, tail: list[Node], steps: Steps) -> str:
        """The views after the product put the heads side by side."""
        width = self.output.inputs[1].meta["spec"].shape[1] // self.heads
        length = self.shapes[self.projections[0].inputs[0]][0 if self.sequence_first else 1]
        numbers = np.arange(2 * self.heads * length * width).reshape(2, self.heads, length, width)
        probe = Probe({**self.shapes, self.core.nodes[0]: numbers.shape})
        found = probe.run(tail, numbers, steps)
        want = MergeHeads(self.sequence_first).reference(numbers)
        return "" if np.array_equal(found, want) else "the heads are not merged side by side"


class AttentionPattern:
    """Linear layers, their features split into heads, attention, heads merged, a linear layer."""

    def __len__(self) -> int:
        return 8

    def matches(self, root: Node, steps: Steps) -> Iterator[Match]:
        step = steps.get(root)
        if step is None or not isinstance(step.op, Linear) or step.op.layout_of_weight != "torch":
            return
        last, _ = views_back(step.inputs[0], steps)
        core = find_core(last, steps)
        if core is None:
            return
        sources = [views_back(n, steps, None if n is core.v else [])[0] for n in (core.q, core.k, core.v)]
        if all(n in steps and isinstance(steps[n].op, Linear) for n in sources):
            yield AttentionMatch(root, core, steps)


# -- replacements ---------------------------------------------------------------------------------------------------------


def fused_core(match: Any) -> tuple[Op, list[Node]]:
    core: Core = match.core
    return core.op, [core.q, core.k, core.v, *([] if core.mask is None else [core.mask])]


def fused_attention(match: Any) -> tuple[Op, list[Node]]:
    core: Core = match.core
    scale = core.op.scale
    if match.factor != 1:
        scale = match.factor * (match.size**-0.5 if scale is None else scale)
    sources, weights, biases = [], [], []
    for step, third in zip(match.projections, match.thirds, strict=True):
        x, weight, *bias = step.inputs
        sources.append(x)
        weights.append(part(weight, third))
        biases += [part(b, third) for b in bias]
    output = list(match.output.inputs[1:])
    op = FusedMultiHeadAttention(
        match.heads,
        scale,
        core.op.causal,
        core.op.dropout,
        core.op.training,
        bool(biases),
        len(output) > 1,
        core.mask is not None,
        match.sequence_first,
        core.op.strict,
    )
    return op, [*sources, *weights, *biases, *output, *([] if core.mask is None else [core.mask])]


def part(node: Node, third: int | None) -> Node:
    """A joint projection's weight or bias, or one third of its rows."""
    if third is None:
        return node
    size = node.meta["spec"].shape[0] // 3
    made = Node(
        "op", GetItem(encode_index(slice(third * size, (third + 1) * size))), (node,), f"{node.name}_{'qkv'[third]}"
    )
    made.meta["spec"] = Spec((size, *node.meta["spec"].shape[1:]))
    return made

"""Whole numbers of fewer than 32 bits: needle keeps them in 32, where arithmetic does not wrap around as it does in their own.

A graph takes them where that makes no difference: where they are moved, compared, or become numbers of another dtype first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from needle.backend_ndarray import FLOATS

from .graph import Graph, Node

NARROW = {name: np.iinfo(name) for name in ("int8", "uint8", "int16", "uint16")}


def words(*lines: str) -> frozenset[str]:
    return frozenset(" ".join(lines).split())


# Ops, and layers, by what their results are: elements of the inputs; of the first input; of the inputs or numbers of their own;
# bool; of a wide dtype whatever they read. All others compute.
MOVES = words(
    "Reshape Flatten Permute Transpose BroadcastTo Flip Squeeze Unsqueeze Unflatten MoveAxis Concat Stack Split Piece",
    "TupleGetItem MakeTuple Tile RepeatInterleave Roll BroadcastLike ReshapeLike Diagonal StopGradient Max Min Mirror",
    "MaxAlong ReLU Identity Dropout",
)
PICKS = words("GetItem Take TakeAlong Gather IndexTensors")
CHOOSES = words("Where MaskedFill Clamp EWiseMaximum EWiseMinimum AtLeast AtMost")
COMPARES = words("Equal NotEqual Greater GreaterEqual Less LessEqual")
COMPARES |= {name + "Scalar" for name in COMPARES}
WIDENS = words(
    "EWiseDiv DivScalar RDivScalar Exp Log Sqrt Rsqrt Reciprocal Sin Cos Erf Sigmoid Tanh Log1p Expm1 Summation CumSum",
    "Product ArgMax ArgSort Full",
)
EVERY = (-math.inf, math.inf)  # what arithmetic may need


class Need(NamedTuple):
    """Numbers that the dtype of some inputs and parameters must hold, if all of them are narrow or bool."""

    sources: frozenset[Node]
    values: tuple[float, ...]
    node: Node  # that computes with them

    def lacking(self, dtypes: Sequence[str]) -> str:
        """The narrow one among the sources' dtypes that does not hold them, or nothing."""
        if all(d in NARROW or d == "bool" for d in dtypes):
            for d in dtypes:
                if d in NARROW and not all(NARROW[d].min <= v <= NARROW[d].max for v in self.values):
                    return d
        return ""


def needs(graph: Graph, module: Any) -> list[Need]:
    """What the graph of a GraphModule asks of narrow dtypes."""
    found: list[Need] = []
    sources: dict[Node, frozenset[Node]] = {}  # what makes a node narrow if it is
    wide: set[Node] = set()
    numbers: dict[Node, float] = {}

    def ask(node: Node, own: frozenset[Node], values: Iterable[float]) -> None:
        if own and (values := tuple(values)):
            found.append(Need(own, values, node))

    for node in graph:
        if node.kind == "input":
            sources[node] = frozenset([node])
        elif node.kind == "param":
            dtype = (module.tensor(node.target) if isinstance(node.target, str) else node.target).dtype
            if dtype in (*FLOATS, "int64"):
                wide.add(node)
            elif dtype != "bool":
                sources[node] = frozenset([node])
        elif node.kind in ("op", "module"):
            part = node.target if node.kind == "op" else module.get_submodule(node.target)
            name, attributes = type(part).__name__, vars(part) if node.kind == "op" else {}
            args = node.inputs()[:1] if name in PICKS else node.inputs()
            for index in node.inputs()[len(args) :]:  # torch takes one of 8 bits for a mask
                ask(node, sources.get(index, frozenset()), EVERY)
            own: frozenset[Node] = frozenset().union(*(sources.get(a, ()) for a in args))
            values = [v for v in attributes.values() if type(v) in (int, float)]
            values += [numbers[a] for a in args if a in numbers]
            if name == "Number":
                numbers[node] = attributes["value"]
            elif name in COMPARES:
                if not wide.intersection(args) and not any(isinstance(v, float) for v in values):
                    ask(node, own, values)
            elif name == "Cast":
                if attributes["dtype"] != "bool":
                    wide.add(node)
            elif (
                name in WIDENS
                or wide.intersection(args)
                or any(isinstance(v, float) for v in values)
                or (node.kind == "module" and any(True for _ in part.parameters()))
            ):
                wide.add(node)
            else:
                sources[node] = own
                ask(node, own, () if name in MOVES | PICKS else values if name in CHOOSES else EVERY)
    return found


def dtype_text(value: Any) -> str:
    """Of an array of any library, or nothing."""
    return str(getattr(value, "dtype", "")).rpartition(".")[2]


def is_narrow(value: Any) -> bool:
    return dtype_text(value) in NARROW


def narrow_fault(graph: Graph, module: Any, dtypes: Mapping[Node, str]) -> str:
    """Where the graph computes with inputs or parameters of these dtypes as if they were wider, or nothing."""
    for need in needs(graph, module):
        if dtype := need.lacking([dtypes[s] for s in need.sources if s in dtypes]):
            name = next(s.name for s in graph if s in need.sources and dtypes.get(s) == dtype)
            return (
                f"{name} expects int32 or wider, since {need.node.name} computes with it and needle does not wrap around, "
                f"got {dtype}; cast it to int32"
            )
    return ""

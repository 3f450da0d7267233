"""Whole numbers of fewer than 32 bits: needle keeps them in 32, where arithmetic does not wrap around as it does in their own.

A graph takes them where that makes no difference: where they are moved, compared, or become numbers of another dtype first,
and where their sums and products are wrapped around by the op Narrowed.
What is in doubt counts as a difference: a tensor without axes, and a write in place, leave the other operand its dtype in torch.
`any` and `all` of uint8, which torch keeps in uint8, are bool.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from needle.autograd import Op
from needle.backend_ndarray import FLOATS

from .graph import Graph, Node

NARROW = {name: np.iinfo(name) for name in ("int8", "uint8", "int16", "uint16")}
FLOAT, WHOLE, BOOL = "float", "whole", "bool"  # beside the narrow dtypes: whole numbers of at least 32 bits
EVERY = (-math.inf, math.inf)  # the numbers that arithmetic may need


def words(*lines: str) -> frozenset[str]:
    return frozenset(" ".join(lines).split())


# Ops, and layers, by what their results are; all others compute something of the first input's dtype.
COMPARES = words("Equal NotEqual Greater GreaterEqual Less LessEqual")
COMPARES |= {name + "Scalar" for name in COMPARES}
FLOATS_OF_ALL = words(
    "EWiseDiv DivScalar RDivScalar Exp Log Sqrt Rsqrt Reciprocal Sin Cos Erf Sigmoid Tanh Log1p Expm1"
)
WHOLES_OF_ALL = words("Summation CumSum Product ArgMax ArgSort")
SHAPES = words("BroadcastLike ReshapeLike")  # the first input
PICKS = words("GetItem Take TakeAlong Gather IndexTensors")  # elements of the first input; in torch, uint8 is a mask
MOVES = words(  # elements of the inputs, of the dtype that those have together
    "Reshape Flatten Permute Transpose BroadcastTo Flip Squeeze Unsqueeze Unflatten MoveAxis Concat Stack Split Piece",
    "TupleGetItem MakeTuple Tile RepeatInterleave Roll Diagonal StopGradient Max Min Mirror MaxAlong ReLU Floor Ceil Round Trunc",
    "Identity Dropout",
)
CHOOSES = words(  # as MOVES, or numbers of the op
    "Bitwise Where Clamp ClampMin ClampMax EWiseMaximum EWiseMinimum AtLeast AtMost",
)
ARITHMETIC = words("EWiseAdd AddScalar EWiseMul MulScalar EWisePow PowerScalar")  # a float makes the result one
QUOTIENTS = words("WholeQuotient Remainder")  # of the numbers' own size, but for that of the least by -1
RING = words("EWiseAdd AddScalar EWiseMul MulScalar Negate Opposite BitwiseNot Shift")  # right but for the upper bits


def kind_of(dtype: str) -> str:
    return dtype if dtype in NARROW or dtype == BOOL else FLOAT if dtype in FLOATS else WHOLE


def result(part: Any, kinds: Sequence[str], values: Sequence[float]) -> tuple[str, Sequence[Sequence[float]]]:
    """The kind of an op's or a layer's result, and for each input the numbers that its dtype must hold.

    values: the numbers among the op's attributes and inputs.
    """
    name, nothing, all_of_them = type(part).__name__, [()] * len(kinds), [EVERY] * len(kinds)
    first = kinds[0] if kinds else WHOLE
    joint = kind_of(str(np.result_type(*narrow))) if (narrow := [k for k in kinds if k in NARROW]) else first
    is_float = FLOAT in kinds or any(isinstance(v, float) for v in values)
    if getattr(part, "takes_narrow", False):
        return WHOLE, nothing
    if hasattr(part, "parameters") and part.parameters():
        return FLOAT, nothing
    if isinstance(part, Op) and "dtype" in vars(part):  # of a cast, or of what takes no more than this from the input
        dtype = vars(part)["dtype"]
        return (first, [values]) if dtype in (None, "like") else (kind_of(dtype), nothing)
    if name == "CastLike":
        return kinds[-1], [(), EVERY]  # into a narrow one it would have to wrap around
    if name in COMPARES:
        return BOOL, nothing if is_float else all_of_them if WHOLE in kinds else [values] * len(kinds)
    if name in FLOATS_OF_ALL or (is_float and name in MOVES | CHOOSES | ARITHMETIC):
        return FLOAT, nothing
    if name in WHOLES_OF_ALL or (WHOLE in kinds and name in MOVES):
        return WHOLE, nothing
    if name in MOVES:
        return joint, nothing
    if name in CHOOSES and WHOLE not in kinds:
        return joint, [values] * len(kinds)
    safe = joint in NARROW and (not NARROW[joint].min or (len(kinds) == 1 and -1 not in values))
    if name in QUOTIENTS and set(kinds) == {joint} and safe:
        return joint, [values] * len(kinds)
    if name in SHAPES:
        return first, nothing
    if name in PICKS:
        return first, [(), *all_of_them[1:]]
    if name == "Shift" and part.right:
        return joint, nothing
    if name == "MaskedFill":
        return first, [values, EVERY]
    return joint if name in ARITHMETIC else first, all_of_them


@functools.cache
def name_of(dtype: Any) -> str:
    """A dtype's name in any library."""
    return str(dtype).rpartition(".")[2]


def is_narrow(value: Any) -> bool:
    return name_of(getattr(value, "dtype", "")) in NARROW


class Reading(NamedTuple):
    """An op or layer with the kinds of its inputs and its result, and what the dtypes of the inputs must hold."""

    node: Node
    part: Any
    inputs: list[Node]
    kinds: list[str]
    kind: str
    needs: Sequence[Sequence[float]]


def readings(graph: Graph, module: Any, dtypes: Mapping[Any, str]) -> Iterator[Reading]:
    """dtypes: of all inputs, and of the parameters that are narrow."""
    kinds: dict[Any, str] = {}
    numbers: dict[Any, Any] = {}
    for node in graph:
        if node.kind in ("input", "param"):
            kinds[node] = kind_of(dtypes[node] if node in dtypes else module.constant(node).dtype)
        elif node.kind in ("op", "module"):
            part = node.target if node.kind == "op" else module.get_submodule(node.target)
            if type(part).__name__ == "Number":
                numbers[node] = part.value
                continue
            inputs = node.inputs()
            args = [a for a in inputs if a in kinds]
            values = [
                *(vars(part).values() if node.kind == "op" else ()),
                *(numbers[a] for a in inputs if a in numbers),
            ]
            values = [v for v in values if type(v) in (int, float) and math.isfinite(v)]
            given = [kinds[a] for a in args]
            kinds[node], needs = result(part, given, values)
            yield Reading(node, part, args, given, kinds[node], needs)


def narrow_fault(graph: Graph, module: Any, dtypes: Mapping[Any, str]) -> str:
    """Where the graph of a GraphModule computes with inputs and parameters of these dtypes as if they were wider, or nothing."""
    users = graph.users()
    for node, part, inputs, kinds, kind, needs in readings(graph, module, dtypes):
        if type(part).__name__ in RING and set(kinds) == {kind} and all(narrows(u, kind) for u in users[node]):
            continue
        for a, k, needed in zip(inputs, kinds, needs, strict=False):
            if k in NARROW and not all(NARROW[k].min <= v <= NARROW[k].max for v in needed):
                return f"{node.name} expects {a.name} as int32 or wider, since needle does not wrap around, got {k}"
    return ""


def narrows(node: Node, dtype: str) -> bool:
    return type(node.target).__name__ == "Narrowed" and node.target.dtype == dtype


def overflowing(graph: Graph, module: Any, dtypes: Mapping[Any, str]) -> dict[Node, str]:
    """The sums and products of numbers of one narrow dtype, which torch wraps around, with that dtype."""
    return {
        r.node: r.kind
        for r in readings(graph, module, dtypes)
        if type(r.part).__name__ in RING and r.kind in NARROW and set(r.kinds) == {r.kind}
    }

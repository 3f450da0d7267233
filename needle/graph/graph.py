"""The one graph class: nodes in execution order, symbolic dims, structure of inputs and outputs."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from needle.autograd import Deferred, Op, Unsupported
from needle.shown import Shown

from .structure import map_structure

KINDS = ("input", "param", "op", "module", "scalar", "output")


class Node:
    """One value of a graph.

    kind    target                                   args
    input   name                                     ()
    param   dotted path in the module, or a Tensor   ()
    op      Op (attributes may hold Dims and Modes)  input nodes
    module  dotted path of the submodule             its arguments, nested
    scalar  "size" or an arithmetic operator         (node, axis) or (dim, dim)
    output  ""                                       (the nested result,)
    """

    __slots__ = ("args", "kind", "meta", "name", "target")

    def __init__(self, kind: str, target: Any, args: tuple, name: str) -> None:
        self.kind, self.target, self.args, self.name = kind, target, args, name
        self.meta: dict[str, Any] = {}  # spec, source line, module path

    def inputs(self) -> list[Node]:
        """The nodes that this one reads, those of its deferred attributes included."""
        if self.kind == "op":
            return [*self.args, *(d.node for d in self.target.deferred() if isinstance(d, Dim))]
        found: list[Node] = []

        def visit(x: Any) -> None:
            if isinstance(x, Node):
                found.append(x)
            elif isinstance(x, Dim):
                found.append(x.node)

        map_structure(self.args, visit)
        return found

    def __repr__(self) -> str:
        return self.name


class Dim(Deferred):
    """A size known when the graph runs. Arithmetic records scalar nodes; anything that needs the value is Unsupported."""

    def __init__(self, node: Node, graph: Graph) -> None:
        self.node, self.graph = node, graph

    def _apply(self, operator: str, a: Any, b: Any) -> Dim:
        if not all(isinstance(v, int | float | Dim) for v in (a, b)):
            return NotImplemented
        node = self.graph.add("scalar", operator, (a, b), operator)
        examples = [v.node.meta.get("example") if isinstance(v, Dim) else v for v in (a, b)]
        if None not in examples:
            node.meta["example"] = SCALAR_OPERATORS[operator](*examples)
        return Dim(node, self.graph)

    def __add__(self, other: Any) -> Dim:
        return self._apply("add", self, other)

    def __radd__(self, other: Any) -> Dim:
        return self._apply("add", other, self)

    def __sub__(self, other: Any) -> Dim:
        return self._apply("sub", self, other)

    def __rsub__(self, other: Any) -> Dim:
        return self._apply("sub", other, self)

    def __mul__(self, other: Any) -> Dim:
        return self._apply("mul", self, other)

    def __rmul__(self, other: Any) -> Dim:
        return self._apply("mul", other, self)

    def __floordiv__(self, other: Any) -> Dim:
        return self._apply("floordiv", self, other)

    def __rfloordiv__(self, other: Any) -> Dim:
        return self._apply("floordiv", other, self)

    def __truediv__(self, other: Any) -> Dim:
        return self._apply("truediv", self, other)

    def __rtruediv__(self, other: Any) -> Dim:
        return self._apply("truediv", other, self)

    def __pow__(self, other: Any) -> Dim:
        return self._apply("pow", self, other)

    def __rpow__(self, other: Any) -> Dim:
        return self._apply("pow", other, self)

    def __floor__(self) -> Dim:
        return self._apply("floor", self, 1)

    def __ceil__(self) -> Dim:
        return -(-self).__floor__()

    def __round__(self, ndigits: None = None) -> Dim:
        if ndigits is not None:
            raise Unsupported(f"the size {self.node.name} is rounded to a whole number alone")
        return self._apply("round", self, 1)

    def __trunc__(self) -> Dim:
        return self._apply("trunc", self, 1)

    def __mod__(self, other: Any) -> Dim:
        return self._apply("mod", self, other)

    def __neg__(self) -> Dim:
        return self._apply("sub", 0, self)

    def bit_length(self) -> Dim:
        return self._apply("bit_length", self, 1)

    def logarithm(self, base: float | Dim) -> Dim:
        return self._apply("log", self, base)

    def function(self, name: str) -> Dim:
        """Python's function of that name in `math`: log2, log10, isqrt."""
        return self._apply(name, self, 1)

    def compared(self, name: str, a: Any, b: Any) -> Dim:
        """Whether `a` is eq, ne, lt, le, gt or ge to `b`, told at each call; Python's operators want to know now."""
        return self._apply(name, a, b)

    def larger(self, other: Any) -> Dim:
        return self._apply("max", self, other)

    def smaller(self, other: Any) -> Dim:
        return self._apply("min", self, other)

    def __int__(self) -> int:
        raise Unsupported(f"the size {self.node.name} is not known while recording; pass example=")

    def __bool__(self) -> bool:
        raise Unsupported(f"control flow branches on the size {self.node.name}; pass example=")

    __index__ = __int__

    def _compare(self, other: object) -> bool:
        raise Unsupported(f"control flow compares the size {self.node.name}; pass example=")

    __lt__ = __le__ = __gt__ = __ge__ = _compare

    def __eq__(self, other: object) -> bool:
        return self is other or self._compare(other)

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        return f"Dim({self.node.name})"


COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
SCALAR_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "floordiv": lambda a, b: a // b,
    "truediv": lambda a, b: a / b,
    "mod": lambda a, b: a % b,
    "pow": lambda a, b: a**b,
    "floor": lambda a, b: int(a // b),
    "round": lambda a, b: round(a / b),
    "trunc": lambda a, b: int(a / b),
    "isqrt": lambda a, b: math.isqrt(a),
    "bit_length": lambda a, b: int(a).bit_length(),
    "log": math.log,
    "log2": lambda a, b: math.log2(a),
    "log10": lambda a, b: math.log10(a),
    "max": max,
    "min": min,
    **{name: getattr(operator, name) for name in COMPARISONS},
}


class Graph(Shown):
    """Nodes in execution order. Passes read it and build a new one; `fuse` and the executor never edit in place."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._names: dict[str, int] = {}

    def add(self, kind: str, target: Any, args: tuple, name: str) -> Node:
        stem = name = name.replace(".", "_")
        while name in self._names:  # a second `x` may not take the name of an input that is called x_1
            name = f"{stem}_{self._names[stem]}"
            self._names[stem] += 1
        self._names[name] = 1
        node = Node(kind, target, args, name)
        self.nodes.append(node)
        return node

    @property
    def inputs(self) -> list[Node]:
        return [n for n in self.nodes if n.kind == "input"]

    @property
    def output(self) -> Node:
        return self.nodes[-1]

    def users(self) -> dict[Node, list[Node]]:
        users: dict[Node, list[Node]] = {n: [] for n in self.nodes}
        for n in self.nodes:
            for i in dict.fromkeys(n.inputs()):
                users[i].append(n)
        return users

    def copy(self, replace: Callable[[Node, Graph, dict[Node, Node]], Node | None] | None = None) -> Graph:
        """A new graph. `replace(node, new_graph, done)` may add nodes itself and return the one that stands for `node`."""
        new = Graph()
        done: dict[Node, Node] = {}
        for node in self.nodes:
            made = replace(node, new, done) if replace else None
            done[node] = made or new.copy_node(node, done)
        return new

    def copy_node(self, node: Node, done: Mapping[Node, Node]) -> Node:
        """Add a copy of another graph's node, its inputs replaced by `done`."""

        def move(x: Any) -> Any:
            if isinstance(x, Node):
                return done[x]
            if isinstance(x, Dim):
                return Dim(done[x.node], self)
            return x

        if node.kind == "op":
            target, args = node.target.resolve(move), tuple([done[a] for a in node.args])
        else:
            target, args = node.target, map_structure(node.args, move)
        made = self.add(node.kind, target, args, node.name)
        made.meta = dict(node.meta)
        return made

    def prune(self) -> Graph:
        """A new graph without the nodes that nothing reads; inputs stay."""
        needed = {self.output, *self.inputs}
        for node in reversed(self.nodes):
            if node in needed:
                needed.update(node.inputs())
        kept = Graph()
        done: dict[Node, Node] = {}
        for node in self.nodes:
            if node in needed:
                done[node] = kept.copy_node(node, done)
        return kept

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)

    def __str__(self) -> str:
        rows = [(n.name, n.kind, describe_target(n), ", ".join(str(i) for i in n.inputs())) for n in self.nodes]
        widths = [max(len(r[i]) for r in rows) for i in range(3)]
        return "\n".join("  ".join(c.ljust(w) for c, w in zip(r, [*widths, 0], strict=True)).rstrip() for r in rows)


def describe_target(node: Node) -> str:
    if isinstance(node.target, Op):
        attributes = ", ".join(f"{k}={v}" for k, v in node.target.attributes().items())
        return f"{node.target.name}({attributes})"
    return node.target if isinstance(node.target, str) else type(node.target).__name__

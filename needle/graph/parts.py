"""Parts of tensors that are read and written: what torch's views write level by level, and read again, becomes one write."""

from __future__ import annotations

from typing import Any

from needle.ops.shape.indexing import GetItem, SetItem

from .graph import Graph, Node

PARTS = (GetItem, SetItem)
WHOLE = (None, None, None)
Index = tuple[Any, ...]  # as `encode_index` makes it, without None, "..." and whole axes at the end


def merge_parts(graph: Graph) -> Graph:
    """A new graph, of one that was traced with sizes; attributes that are known when the graph runs leave a part as it is.

    A write over the whole tensor is its value, a write over an earlier one at the same index replaces it, a write of a part of a
    part is one write, and reading what was just written gives the value.
    """
    if not any(isinstance(n.target, PARTS) and (meets_another(n) or index_of(n) == ()) for n in graph):
        return graph

    def replace(node: Node, new: Graph, done: dict[Node, Node]) -> Node | None:
        if (index := index_of(node)) is None:
            return None
        base, *value = [done[a] for a in node.args]
        if isinstance(node.target, GetItem):
            return read(node, new, base, index)
        return write(node, new, base, index, value)

    return graph.copy(replace).prune()


def meets_another(node: Node) -> bool:
    return any(isinstance(a.target, PARTS) for a in node.args)


def read(node: Node, new: Graph, base: Node, index: Index) -> Node | None:
    if not index:
        return base
    if isinstance(base.target, SetItem) and len(base.args) == 2 and index_of(base) == index:
        return base.args[1] if base.args[1].meta["spec"] == node.meta["spec"] else None
    if isinstance(base.target, GetItem) and (both := joined(index_of(base), index)) is not None:
        return added(node, new, GetItem(both), base.args[:1])
    return None


def write(node: Node, new: Graph, base: Node, index: Index, value: list[Node]) -> Node | None:
    if value and not index and value[0].meta["spec"] == node.meta["spec"]:
        return value[0]
    bare = base  # without the writes that this one covers
    while isinstance(bare.target, SetItem) and within(index_of(bare), index):
        bare = bare.args[0]
    part, writes = unrolled(index, value[0]) if value else (base, [])
    start = next((b for b in (bare, base) if is_part(part, b, index)), None) if writes else None
    if start is None:
        if bare is base:
            return None
        start, writes = bare, [(SetItem(index, node.target.value), tuple(value))]
    for target, rest in writes:
        start = added(node, new, target, (start, *rest))
    return start


def unrolled(index: Index, value: Node) -> tuple[Node, list[tuple[SetItem, tuple]]]:
    """The part of a tensor at the index from which a value was made, and the writes that made it as writes to the tensor."""
    found = []
    while isinstance(value.target, SetItem) and (both := joined(index, index_of(value))) is not None:
        found.append((SetItem(both, value.target.value), value.args[1:]))
        value = value.args[0]
    return value, found[::-1]


def within(inner: Index | None, outer: Index) -> bool:
    """Whether all that the inner index cuts out of a tensor is in what the outer one does."""
    if inner is None:
        return False
    places = (*inner, *[WHOLE] * (len(outer) - len(inner)))
    return all(o is WHOLE or o == i for i, o in zip(places, outer, strict=False))


def is_part(node: Node, base: Node, index: Index) -> bool:
    """Whether a node reads `base`, which may be a part itself, at the index."""
    if not isinstance(node.target, GetItem):
        return False
    own = index_of(node)
    if node.args[0] is base:
        return own == index
    if not isinstance(base.target, GetItem) or node.args[0] is not base.args[0] or own is None:
        return False
    return own == joined(index_of(base), index)


def joined(first: Index | None, second: Index | None) -> Index | None:
    """The index of x[first][second], where no axis is cut by both and the first keeps every axis."""
    if first is None or second is None or not all(isinstance(i, tuple) for i in first):
        return None
    n = max(len(first), len(second))
    pairs = zip(*((*i, *[WHOLE] * (n - len(i))) for i in (first, second)), strict=True)
    made = [b if a is WHOLE else a if b is WHOLE else None for a, b in pairs]
    return None if any(m is None for m in made) else tuple(made)


def index_of(node: Node) -> Index | None:
    """What a node reads or writes; None for another node, for new axes and for what is known when the graph runs."""
    if not isinstance(node.target, PARTS) or node.target.deferred() or None in node.target.index:
        return None
    index, shape = [*node.target.index], node.args[0].meta["spec"].shape
    if "..." in index:
        at = index.index("...")
        index[at : at + 1] = [WHOLE] * (len(shape) - len(index) + 1)
    index = [WHOLE if isinstance(i, tuple) and is_whole(i, size) else i for i, size in zip(index, shape, strict=False)]
    while index and index[-1] is WHOLE:
        index.pop()
    return tuple(index)


def is_whole(part: tuple, size: int) -> bool:
    """Asked by comparisons, which a plan for several sizes notes."""
    start, stop, step = part
    return (start is None or start == 0) and (stop is None or stop >= size) and (step is None or step == 1)


def added(node: Node, new: Graph, target: Any, args: tuple) -> Node:
    made = new.add("op", target, args, node.name)
    made.meta = dict(node.meta)
    return made

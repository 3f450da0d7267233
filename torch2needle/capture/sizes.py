"""Other sizes for the free axes of a captured graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .calls import Call, Sizes, tensors
from .tracing import Captured


def larger(captured: Captured, call: Call) -> list[Sizes]:
    """Other sizes for the free axes of a captured graph: all one larger, or by their step, and only those of the first.

    A size of one stays: the graph was captured at two, so that the example is another size already.
    """
    given = tensors(call)
    names = {(i, axis): name for (i, axis), name in free_names(captured).items() if given[i].shape[axis] != 1}
    first = names[min(names)] if names else ""
    grown = {}
    for i, axis in names:
        least, most, _, *steps = placeholders(captured)[i].meta["sizes"][axis]
        size = max(least, given[i].shape[axis] + (steps[0] if steps else 1))
        grown[i, axis] = size if most is None else min(size, most)
    return [grown, {place: size for place, size in grown.items() if names[place] == first}]


def smallest(captured: Captured, call: Call) -> list[Sizes]:
    """The smallest sizes for the free axes of a captured graph: two at the least, and one where that is no limit of the model."""
    given, nodes = tensors(call), placeholders(captured)
    least = {(i, k): nodes[i].meta["sizes"][k][0] for i, k in free_names(captured) if given[i].shape[k] != 1}
    return [{place: max(2, n) for place, n in least.items()}, {place: n if n > 2 else 1 for place, n in least.items()}]


def keep_ranks(captured: Captured, inputs: dict[str, Any]) -> None:
    """Inputs have as many axes as the example's, by name; what the forward asks of ranks is answered by them."""
    for node in placeholders(captured):
        if str(node.target) in inputs:
            node.meta["sizes"] = ((0, None, ""),) * inputs[str(node.target)].ndim


def takes(captured: Captured, call: Call) -> bool:
    """Whether the sizes of a call are among those of a captured graph."""
    limits = [node.meta["sizes"] for node in placeholders(captured)]
    places = [p for t, axes in zip(tensors(call), limits, strict=False) for p in zip(t.shape, axes, strict=True)]
    return all(
        least <= size and (most is None or size <= most) and all(size % n == 0 for n in step)
        for size, (least, most, _, *step) in places
    )


def placeholders(captured: Captured) -> list[Any]:
    return [n for n in captured.graph.nodes if n.op == "placeholder"]


def free_names(captured: Captured) -> dict[tuple[int, int], str]:
    """The names of free sizes by (tensor, axis); equal sizes share a name."""
    found = {}
    for i, node in enumerate(placeholders(captured)):
        found.update({(i, axis): name for axis, (_, _, name, *_) in enumerate(node.meta["sizes"]) if name})
    return found


def allow_one(captured: Captured, call: Call, agrees: Callable[[dict[tuple[int, int], int]], bool]) -> None:
    """torch.export takes sizes of one for a case of their own: allow them where the graph gives what the model gives.

    Sizes that are equal in the example are tried together, too: that rows and their lengths are as many, no name may tell.
    """
    names, nodes, given = free_names(captured), placeholders(captured), tensors(call)

    def allow(places: list[tuple[int, int]]) -> bool:
        ones = all(given[i].shape[axis] == 1 for i, axis in places)
        if not ones and not agrees(dict.fromkeys(places, 1)):
            return False
        for i, axis in places:
            sizes = list(nodes[i].meta["sizes"])
            sizes[axis] = (1, *sizes[axis][1:])
            nodes[i].meta["sizes"] = tuple(sizes)
        return True

    alone: dict[int, list[tuple[int, int]]] = {}  # places by their size
    refused: set[int] = set()
    for name in dict.fromkeys(names.values()):
        places = [p for p, n in names.items() if n == name]
        if all(nodes[i].meta["sizes"][axis][0] == 2 for i, axis in places):
            size = given[places[0][0]].shape[places[0][1]]
            alone.setdefault(size, []).extend(places)
            refused |= set() if allow(places) else {size}
    for size in refused:
        if len({names[p] for p in alone[size]}) > 1:
            allow(alone[size])

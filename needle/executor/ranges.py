"""`compile(sizes=...)`: sizes that inputs may have, planned for ahead of their calls."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from needle.autograd import Spec
from needle.graph import GraphModule
from needle.nn.module import Module

MOST_PROBED = 4096  # sizes of a range that are looked at one by one


class Range(NamedTuple):
    """A size that several axes have: their places among the sizes of all arguments, and its limits."""

    name: str
    places: list[int]
    least: int
    most: int

    def check(self, dims: Sequence[int]) -> None:
        found = list(dict.fromkeys(dims[i] for i in self.places))
        if len(found) > 1:
            raise ValueError(f"[compile] sizes expects one size for {self.name}, got {found[0]} and {found[1]}.")
        if not self.least <= found[0] <= self.most:
            raise ValueError(f"[compile] sizes expects {self.least} to {self.most} for {self.name}, got {found[0]}.")

    def probes(self) -> Iterator[int]:
        yield from range(self.least, min(self.most, self.least + MOST_PROBED) + 1)
        yield self.most


def ranges_of(sizes: Mapping[str, Any], model: Callable, specs: Sequence[Any]) -> list[Range]:
    """The ranges that `sizes` names: axes as "input.axis", several that are equal joined by commas, or the names that an exported
    program gave to sizes.
    """
    places, named = axes_of(model, specs)
    found, taken = [], set[int]()
    for key, limits in sizes.items():
        whole = isinstance(limits, tuple | list) and len(limits) == 2 and all(type(n) is int for n in limits)
        if not whole or not 0 <= limits[0] <= limits[1]:
            raise ValueError(f"[compile] sizes expects (least, most) for {key}, got {limits!r}.")
        mine: list[int] = []
        for part in key.split(","):
            part = part.strip()
            if part not in places and part not in named:
                known = ", ".join([*named, *places])
                raise ValueError(f"[compile] sizes expects names of axes, of {known}, got {part!r}.")
            mine += named.get(part) or [places[part]]
        if not taken.isdisjoint(mine):
            raise ValueError(f"[compile] sizes names an axis of {key} twice.")
        taken.update(mine)
        found.append(Range(key, mine, *limits))
    return found


def axes_of(model: Callable, specs: Sequence[Any]) -> tuple[dict[str, int], dict[str, list[int]]]:
    """The place of every axis of the inputs that are arrays, by "input.axis", and those of sizes that have names."""
    sizes: list[Any] = [None] * len(specs)
    if isinstance(model, GraphModule):
        inputs = model.graph.inputs
        names, sizes = [n.target for n in inputs], [n.meta.get("sizes") for n in inputs]
    else:
        names = list(inspect.signature(model.forward if isinstance(model, Module) else model).parameters)
    places: dict[str, int] = {}
    named: dict[str, list[int]] = {}
    at = 0
    for name, spec, limits in zip(names, specs, sizes, strict=False):
        if not isinstance(spec, Spec):
            raise ValueError(f"[compile] sizes expects inputs that are arrays, got {type(spec).__name__} for {name}.")
        for axis in range(len(spec.shape)):
            places[f"{name}.{axis}"] = at
            if limits and limits[axis][2]:
                named.setdefault(limits[axis][2], []).append(at)
            at += 1
    return places, named

"""The arguments of a GraphModule's call, and the values of its inputs among them.

Meta of an input node: "place", the argument and the keys in it where that is nested, ("batch", "ids"); "sizes", for each axis
(least, largest or None, name) and, where the size has to be a multiple of a number, that; equal names mean equal sizes;
"default". Of complex numbers each part is an input, whose place ends in "real" or "imag". Meta of the output node: "arguments",
all of the call's arguments in order, those that are no inputs with the value that they have.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from needle.complex_numbers import is_complex, parts

from .graph import Graph, Node

PARTS = ("real", "imag")
META = ("default", "place", "sizes", "arguments")  # what a saved graph keeps


def check_meta(graph: Graph) -> None:
    """Raise ValueError for a graph, of unknown origin, whose META is not as above."""
    for node in graph.nodes:
        allowed = (
            ("default", "place", "sizes") if node.kind == "input" else ("arguments",) if node.kind == "output" else ()
        )
        for key in node.meta.keys() & set(META):
            if key not in allowed or not (key == "default" or FORMS[key](node.meta[key])):
                raise ValueError(f"{node.name} has no {key} that can be")


def is_place(value: Any) -> bool:
    return (
        isinstance(value, tuple)
        and bool(value)
        and isinstance(value[0], str)
        and all(type(k) in (str, int) for k in value)
    )


def is_size(value: Any) -> bool:
    if not isinstance(value, tuple) or len(value) not in (3, 4):
        return False
    least, most, name, *step = value
    numbers = type(least) is int and (most is None or type(most) is int) and all(type(n) is int and n > 1 for n in step)
    return numbers and isinstance(name, str)


FORMS = {
    "place": is_place,
    "sizes": lambda value: isinstance(value, tuple) and all(map(is_size, value)),
    "arguments": lambda value: isinstance(value, dict) and all(isinstance(k, str) for k in value),
}


class Inputs:
    """Binds a call's arguments, which have the structure that capture saw, to the graph's inputs."""

    def __init__(self, graph: Graph, label: str) -> None:
        self.nodes, self.label = graph.inputs, label
        self.places = [n.meta.get("place", (n.target,)) for n in self.nodes]
        self.arguments = graph.output.meta.get("arguments") or dict.fromkeys(p[0] for p in self.places)
        self.names = list(self.arguments)
        self.fixed = self.arguments.keys() - {p[0] for p in self.places}
        self.flat = [(n,) for n in self.names] == self.places
        self.defaults = {n.target: n.meta["default"] for n in self.nodes if "default" in n.meta}
        self.checked = [(n, n.meta["sizes"]) for n in self.nodes if "sizes" in n.meta]

    def bind(self, args: tuple, kwargs: dict) -> list[Any]:
        plain = not kwargs and len(args) == len(self.nodes)  # also what this gave before, as executables pass it
        if plain and (self.flat or all(hasattr(a, "shape") and not is_complex(a) for a in args)):
            values = list(args)
        else:
            values = self.by_place(self.by_name(args, kwargs))
        if self.checked:
            self.check(dict(zip(self.nodes, values, strict=True)))
        return values

    def by_name(self, args: tuple, kwargs: dict) -> dict[str, Any]:
        names = self.names
        if len(args) > len(names):
            raise TypeError(f"[{self.label}] expects at most {len(names)} inputs, got {len(args)}.")
        unknown = [k for k in kwargs if k not in names]
        if unknown:
            raise TypeError(f"[{self.label}] expects inputs {', '.join(names)}, got {unknown[0]}.")
        values = self.defaults | dict(zip(names, args, strict=False)) | kwargs
        missing = [n for n in names if n not in values and n not in self.fixed]
        if missing:
            raise TypeError(f"[{self.label}] input {missing[0]} is missing.")
        for n in self.fixed & values.keys():
            want = self.arguments[n]
            if values[n] is not want and (hasattr(values[n], "shape") or values[n] != want):
                raise ValueError(f"[{self.label}] {n} is fixed to {want!r} by the conversion, got another value.")
        return values

    def by_place(self, values: dict[str, Any]) -> list[Any]:
        found = []
        for place in self.places:
            value = values[place[0]]
            for i, key in enumerate(place[1:], 1):
                try:
                    if key in PARTS and hasattr(value, "dtype"):
                        if not is_complex(value):
                            where = ".".join(map(str, place[:i]))
                            raise ValueError(
                                f"[{self.label}] input {where} expects complex numbers, got {value.dtype}."
                            )
                        value = parts(value)
                    own = isinstance(key, str) and not isinstance(value, Mapping)
                    value = getattr(value, key) if own and hasattr(value, key) else value[key]
                except (KeyError, IndexError, TypeError):
                    where = ".".join(map(str, place[: i + 1]))
                    raise TypeError(f"[{self.label}] input {where} is missing.") from None
            found.append(value)
        return found

    def check(self, values: dict[Node, Any]) -> None:
        """Sizes are those that the captured graph is right for."""
        seen: dict[str, int] = {}
        for node, sizes in self.checked:
            shape = getattr(values[node], "shape", None)
            if not isinstance(shape, tuple):  # a symbol, or no array
                continue
            if len(shape) != len(sizes):
                raise ValueError(
                    f"[{self.label}] input {node.target} expects {len(sizes)} axes, got shape {tuple(shape)}."
                )
            for axis, (got, (least, most, name, *step)) in enumerate(zip(shape, sizes, strict=True)):
                want = seen.setdefault(name, got) if name else got
                if not isinstance(got, int):
                    continue
                between = any(got % n for n in step)
                if got < least or (most is not None and got > most) or got != want or between:
                    text = (
                        f"at least {least}" if most is None else str(least) if most == least else f"{least} to {most}"
                    )
                    text += "".join(f", a multiple of {n}," for n in step)
                    text = text if got == want else str(want)
                    raise ValueError(
                        f"[{self.label}] input {node.target} expects size {text} in axis {axis}, got {got}."
                    )

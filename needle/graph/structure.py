"""Nested values: tuples, lists, dicts, named tuples and dataclasses, which keep their classes."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

from needle.autograd import Op, Spec
from needle.complex_numbers import Complex


class Fields(dict):
    """A dict whose values are attributes, too, and attributes that are None no keys: such a class of a model that was loaded."""


OWN = ("needle", "operator_fusion", "torch2needle")  # packages whose dataclasses are values to them


def is_record(value: Any) -> bool:
    """Whether a value is an instance of a user's dataclass, which keeps values under names."""
    kind = type(value)
    if hasattr(kind, "__dataclass_fields__"):
        return not isinstance(value, Op) and kind.__module__.partition(".")[0] not in OWN
    return kind is Fields


def members(value: Any) -> dict[str, Any]:
    """The attributes of a record: its fields in order, then what it has beside them."""
    names = [f.name for f in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else []
    return {k: getattr(value, k) for k in names if hasattr(value, k)} | getattr(value, "__dict__", {})


def record_of(kind: type, attributes: dict[str, Any]) -> Any:
    """An instance with these attributes, without its __init__; one that is a dict, as transformers' are, has them as items."""
    made = kind.__new__(kind)  # type: ignore[call-overload]
    for name, value in attributes.items():
        object.__setattr__(made, name, value)
    if isinstance(made, dict):
        put = OrderedDict.__setitem__ if isinstance(made, OrderedDict) else dict.__setitem__
        for name, value in attributes.items():
            if value is not None:
                put(made, name, value)  # type: ignore[arg-type]
    return made


def as_record(kind: str, name: str, attributes: dict[str, Any]) -> Any:
    """A named tuple or a dataclass of a class made for it, with this name and these fields, or Fields: what a file tells."""
    if not all(isinstance(k, str) and k.isidentifier() and not k.startswith("__") for k in (name, *attributes)):
        raise ValueError(f"{name!r} is no class with fields")
    if kind == "tuple":
        return namedtuple(name, list(attributes))._make(attributes.values())  # type: ignore[misc, attr-defined]
    if kind == "dict":
        return record_of(Fields, attributes)
    made = dataclasses.make_dataclass(name, list(attributes))
    made.__module__ = "loaded"  # Python's newer versions say the caller's
    return record_of(made, attributes)


def map_structure(value: Any, f: Callable[[Any], Any], whole: Callable[[Any, Any], Any] = Complex) -> Any:
    """`value` with `f` applied to the leaves of its nested tuples, lists, dicts, named tuples and dataclasses; what is Complex is
    `whole` of its parts.
    """
    if isinstance(value, Spec):  # a named tuple, yet one value
        return f(value)
    if isinstance(value, Complex):
        return whole(f(value.real), f(value.imag))
    if isinstance(value, tuple | list):
        items = [map_structure(v, f, whole) for v in value]
        return value._make(items) if hasattr(value, "_make") else type(value)(items)
    if is_record(value):
        return record_of(type(value), {k: map_structure(v, f, whole) for k, v in members(value).items()})
    if isinstance(value, dict):
        return {k: map_structure(v, f, whole) for k, v in value.items()}
    return f(value)

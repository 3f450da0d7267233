"""What the forwards of a model reach outside of it: global names, attributes of classes and functions, caches of results.

A capture that left what it computes with there, such as a mask for every length, would have the model read it afterwards.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

from .guard import patched

CONTAINERS = (dict, list, set)
CACHED = type(functools.lru_cache(len))  # what functools.lru_cache makes of a function
OTHERS = {"torch", "numpy", "needle", "torch2needle", "operator_fusion"} | set(sys.stdlib_module_names)


class Surroundings:
    """What functions of the models' classes name, and what functions that those name do, torch's and Python's own left out.

    names: (namespace or class or function, name); containers; cells: variables of enclosing functions; caches: (namespace or
    class, name, what functools.lru_cache made); globals: those of the functions.
    """

    def __init__(self, owners: Iterable[Any]) -> None:
        self.names: dict[tuple[int, str], tuple[Any, str]] = {}
        self.containers: dict[int, Any] = {}
        self.objects: dict[int, Any] = {}  # of the user's classes
        self.cells: dict[int, CellType] = {}
        self.caches: dict[tuple[int, str], tuple[Any, str, Any]] = {}
        self.globals: dict[int, dict[str, Any]] = {}
        self.seen: set[tuple[int, int]] = set()
        for owner in owners:
            for name in ("forward", "__call__"):
                self.attribute(type(owner), name)
            for name, value in vars(owner).items():
                self.place(vars(owner), name, value, set())

    @classmethod
    def of(cls, model: nn.Module) -> Surroundings:
        """Of the model's modules, and of the objects that they hold."""
        modules = list(model.modules())
        return cls(modules + [v for m in modules for v in vars(m).values() if is_object(v) and not foreign(type(v))])

    def function(self, value: Any, owner: type | None = None) -> None:
        """owner: the class whose attributes its `self.name` may be."""
        for kind in (staticmethod, classmethod):
            value = value.__func__ if isinstance(value, kind) else value
        if isinstance(value, property | functools.cached_property):
            value = value.fget if isinstance(value, property) else value.func
        if isinstance(value, MethodType):
            self.value(value.__self__)
            value, owner = value.__func__, type(value.__self__)
        if isinstance(wrapped := getattr(value, "__wrapped__", None), FunctionType):
            self.function(wrapped, owner)
        if not isinstance(value, FunctionType) or foreign(value) or (id(value), id(owner)) in self.seen:
            return
        self.seen.add((id(value), id(owner)))
        self.globals[id(value.__globals__)] = value.__globals__
        for cell in value.__closure__ or ():
            with suppress(ValueError):  # still empty
                self.cells[id(cell)] = cell
                self.value(cell.cell_contents, owner)
        for default in value.__defaults__ or ():
            self.value(default)
        for name in names_in(value.__code__):
            if name in value.__globals__:
                self.names[id(value.__globals__), name] = value.__globals__, name
                self.place(value.__globals__, name, value.__globals__[name], names_in(value.__code__))
            if owner is not None:
                self.attribute(owner, name)

    def place(self, place: Any, name: str, value: Any, asked: set[str]) -> None:
        """asked: the names that the function which reads this one has, among them those of the value's attributes."""
        if isinstance(cached(value), CACHED):
            self.caches[id(place), name] = place, name, value
        self.value(value)
        if isinstance(value, ModuleType) and value.__name__.partition(".")[0] not in OTHERS:
            for n in asked & vars(value).keys():
                self.names[id(vars(value)), n] = vars(value), n
                self.place(vars(value), n, vars(value)[n], set())
        elif isinstance(value, type) and not foreign(value):
            for n in asked | {"__init__", "__call__"}:
                self.attribute(value, n)
        elif isinstance(value, FunctionType) and not foreign(value):
            for n in asked:
                self.names[id(value), n] = value, n
                self.value(vars(value).get(n))
        elif id(value) in self.objects:
            for n in asked | {"__call__"}:
                self.attribute(type(value), n)

    def attribute(self, owner: type, name: str) -> None:
        for kind in owner.__mro__:
            if name in vars(kind):
                if not foreign(kind):
                    value = vars(kind)[name]
                    self.names[id(kind), name] = kind, name
                    if isinstance(cached(value), CACHED):
                        self.caches[id(kind), name] = kind, name, value
                    self.value(value, owner)
                return
        if isinstance(owner, type) and not foreign(owner) and not name.startswith("__"):
            self.names[id(owner), name] = owner, name

    def value(self, value: Any, owner: type | None = None) -> None:
        if isinstance(value, CONTAINERS):
            self.containers[id(value)] = value
            for v in list(dict.values(value) if isinstance(value, dict) else value):  # hooks, activations by name
                self.function(v, owner)
        elif is_object(value) and not foreign(type(value)):
            self.objects[id(value)] = value
        self.function(value, owner)


def is_object(value: Any) -> bool:
    plain = isinstance(value, FunctionType | ModuleType | type | nn.Module)
    return isinstance(getattr(value, "__dict__", None), dict) and not plain


def foreign(value: Any) -> bool:
    """Of torch, Python or this project."""
    return (getattr(value, "__module__", None) or "builtins").partition(".")[0] in OTHERS


def cached(value: Any) -> Any:
    return value.__func__ if isinstance(value, staticmethod | classmethod | MethodType) else value


def names_in(code: CodeType) -> set[str]:
    inner = (names_in(c) for c in code.co_consts if isinstance(c, CodeType))
    return set(code.co_names).union(*inner)


def globals_seen(model: nn.Module, around: Surroundings) -> list[dict[str, Any]]:
    """The names that the forwards of the model see, torch's own left out, and the functions that those call."""
    own = [inspect.unwrap(type(m).forward) for m in model.modules() if not type(m).__module__.startswith("torch.")]
    found = {id(f.__globals__): f.__globals__ for f in own if hasattr(f, "__globals__")}
    return list((found | around.globals).values())


def uncached(around: Surroundings) -> AbstractContextManager:
    """functools.lru_cache lets functions that the forwards call compute anew in this thread: results of a capture are no
    one else's, and sizes that it leaves free have no hash."""
    thread = threading.get_ident()

    def anew(held: Any) -> Callable:
        @functools.wraps(held.__wrapped__)
        def call(*args: Any, **kwargs: Any) -> Any:
            return (held.__wrapped__ if threading.get_ident() == thread else held)(*args, **kwargs)

        for name in ("cache_clear", "cache_info", "cache_parameters"):
            setattr(call, name, getattr(held, name))
        return call

    def instead(value: Any) -> Any:
        if isinstance(value, MethodType):
            return MethodType(anew(value.__func__), value.__self__)
        return type(value)(anew(value.__func__)) if isinstance(value, staticmethod | classmethod) else anew(value)

    return patched([(place, n, instead(v)) for place, n, v in around.caches.values()])

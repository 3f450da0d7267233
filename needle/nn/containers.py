"""Modules and parameters in lists and dicts, which are called, indexed and changed as Python's own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, MutableSequence
from typing import Any, ClassVar

from needle.autograd import Tensor
from needle.backend_ndarray import Device
from needle.op import kind_of

from .module import Module, Parameter

__all__ = ["ModuleDict", "ModuleList", "ParameterDict", "ParameterList", "Sequential"]


def module(label: str, value: Any) -> Module:
    if not isinstance(value, Module):
        raise TypeError(f"[{label}] expects modules, got {kind_of(value)}.")
    return value


def parameter(label: str, value: Any) -> Parameter:
    """A tensor becomes a parameter of its values, as in torch."""
    if not isinstance(value, Tensor):
        raise TypeError(f"[{label}] expects tensors, got {kind_of(value)}.")
    return value if isinstance(value, Parameter) else Parameter(value)


def named(label: str, name: Any) -> str:
    if not isinstance(name, str) or not name or "." in name:
        raise KeyError(f"[{label}] expects names without dots, got {name!r}.")
    return name


class Held(Module):
    """Base: members that one attribute holds, whose name is no part of their paths."""

    container = True
    holder: ClassVar[str] = "held"
    check: ClassVar[Any] = staticmethod(module)

    @property
    def members_held(self) -> Any:
        return getattr(self, self.holder)

    def taken(self, value: Any) -> Any:
        return self.check(type(self).__name__, value)

    def member_name(self, attribute: str) -> str:
        return "" if attribute == self.holder else attribute

    def __len__(self) -> int:
        return len(self.members_held)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.members_held)

    __eq__, __hash__ = object.__eq__, object.__hash__  # a module is one by identity, not by what it holds


class ModuleList(Held, MutableSequence):
    """A list of modules named "0", "1", ..., which a forward indexes or loops over."""

    def __init__(self, modules: Iterable[Any] = (), device: Device | None = None, dtype: str = "float32") -> None:
        super().__init__()
        setattr(self, self.holder, list(map(self.taken, modules)))

    def __getitem__(self, place: int | slice) -> Any:
        found = self.members_held[place]
        return type(self)(found) if isinstance(place, slice) else found

    def __setitem__(self, place: Any, value: Any) -> None:
        self.members_held[place] = list(map(self.taken, value)) if isinstance(place, slice) else self.taken(value)

    def __delitem__(self, place: int | slice) -> None:
        del self.members_held[place]

    def insert(self, index: int, value: Any) -> None:
        self.members_held.insert(index, self.taken(value))

    def append(self, value: Any) -> Any:
        """Add a member at the end; returns the list."""
        self.insert(len(self), value)
        return self

    def extend(self, values: Iterable[Any]) -> Any:
        """Add members at the end; returns the list."""
        self.members_held.extend([self.taken(v) for v in values])
        return self


class Sequential(ModuleList):
    """Calls its modules one after the other; they are named "0", "1", ... and listed in `modules`.

    Sequential({"name": module, ...}) names them.
    """

    holder = "modules"
    _names: tuple[str, ...] = ()  # of the first modules, where they have others than their numbers

    def __init__(self, *modules: Any, device: Device | None = None, dtype: str = "float32") -> None:
        if len(modules) == 1 and isinstance(modules[0], Mapping):
            self._names = tuple(named("Sequential", name) for name in modules[0])
            modules = tuple(modules[0].values())
        super().__init__(modules)

    def __getattr__(self, name: str) -> Module:
        """A module by the name that it was given."""
        if name in self._names:
            return self.members_held[self._names.index(name)]
        raise AttributeError(f"[{type(self).__name__}] has no attribute {name}.")

    def forward(self, x: Any) -> Any:
        for m in self:
            x = m(x)
        return x

    def members(self) -> Iterator[tuple[str, Any]]:
        own = {str(i): name for i, name in enumerate(self._names)}
        return ((own.get(name, name), value) for name, value in super().members())

    def __getitem__(self, place: int | slice) -> Any:
        found = self.members_held[place]
        if not isinstance(place, slice):
            return found
        names = [*self._names, *map(str, range(len(self._names), len(self)))][place]
        return Sequential(dict(zip(names, found, strict=True))) if self._names else Sequential(*found)

    def __delitem__(self, place: int | slice) -> None:
        self._names = ()  # numbers from here on, as in torch
        super().__delitem__(place)

    def insert(self, index: int, value: Any) -> None:
        self._names = self._names if index == len(self) else ()
        super().insert(index, value)


class ParameterList(ModuleList):
    """A list of parameters named "0", "1", ..."""

    check = staticmethod(parameter)

    def __init__(self, values: Iterable[Tensor] = (), device: Device | None = None, dtype: str = "float32") -> None:
        super().__init__(values)


class ModuleDict(Held, MutableMapping):
    """A dict of modules under their names."""

    def __init__(
        self, modules: Mapping[str, Any] | None = None, device: Device | None = None, dtype: str = "float32"
    ) -> None:
        super().__init__()
        setattr(self, self.holder, {})
        self.update(modules or {})

    def __getitem__(self, name: str) -> Any:
        return self.members_held[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self.members_held[named(type(self).__name__, name)] = self.taken(value)

    def __delitem__(self, name: str) -> None:
        del self.members_held[name]


class ParameterDict(ModuleDict):
    """A dict of parameters under their names."""

    check = staticmethod(parameter)

    def __init__(
        self, values: Mapping[str, Tensor] | None = None, device: Device | None = None, dtype: str = "float32"
    ) -> None:
        super().__init__(values)

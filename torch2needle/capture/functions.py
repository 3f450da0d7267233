"""Functions, and methods of models, as models: `convert(model.encode, example)`, `convert(my_loss, (scores, labels))`."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
from collections.abc import Callable
from types import BuiltinFunctionType, CellType, FunctionType, MethodType
from typing import Any

from torch import nn

from .surroundings import foreign, names_in

FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType, functools.partial)


def as_module(model: Any) -> Any:
    """A module whose forward is the function or method given; anything else as it is.

    A method's module has the parameters of the method's model, a function's those that the function looks at by name: its
    own variables' and globals'.
    """
    if not isinstance(model, FUNCTIONS) or isinstance(model, nn.Module):
        return model
    owner = getattr(model, "__self__", None)
    name, names = getattr(model, "__name__", type(model).__name__), {"__module__": getattr(model, "__module__", None)}
    made: nn.Module
    if isinstance(model, MethodType) and isinstance(owner, nn.Module):
        names["forward"] = forward_like(model, functools.partial(method_of, model.__func__, type(owner)))
        made = object.__new__(type(f"{type(owner).__name__}.{name}", (type(owner),), names))
        made.__dict__.update(vars(owner))
        return made
    held = held_by(model)
    names["forward"] = forward_like(model, functools.partial(function_of, model, held))
    made = type(str(name), (nn.Module,), names)()
    made.training = any(m.training for m in held.values() if isinstance(m, nn.Module))
    for path, value in held.items():
        setattr(made, path, value)
    return made


class Default:
    """An argument's default in the text of a forward: its place among all."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"defaults[{self.name!r}]"


def forward_like(function: Callable, of: Callable[[nn.Module], Callable]) -> Callable:
    """A forward with the function's arguments that calls `of(self)`. torch.fx reads arguments off code: it has them by name."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError as e:
        raise TypeError(
            f"[convert] expects a function whose arguments have names, such as a lambda around this one, got {function!r}."
        ) from e
    head, given = [inspect.Parameter("_self", inspect.Parameter.POSITIONAL_ONLY)], []
    for p in parameters:
        head.append(p.replace(default=p.empty if p.default is p.empty else Default(p.name), annotation=p.empty))
        stars = "*" * (p.kind is p.VAR_POSITIONAL) + "**" * (p.kind is p.VAR_KEYWORD)
        given.append(f"{p.name}={p.name}" if p.kind is p.KEYWORD_ONLY else stars + p.name)
    names: dict[str, Any] = {"defaults": {p.name: p.default for p in parameters}, "of": of}
    exec(f"def forward{inspect.Signature(head)}:\n    return of(_self)({', '.join(given)})", names)
    return names["forward"]


def method_of(function: Callable, cls: type, made: nn.Module) -> Callable:
    """The method on a model that is `made` in all but its class: what the method calls on itself is the model's own."""
    model: nn.Module = object.__new__(cls)
    model.__dict__ = vars(made)
    return MethodType(function, model)


class Walk:
    """What a function looks at by name, in variables of its own, in globals and through other functions, with `own(name, value)`
    in the place of each module and parameter."""

    def __init__(self, own: Callable[[str, Any], Any]) -> None:
        self.own = own
        self.done: dict[int, Callable] = {}

    def value(self, name: str, value: Any) -> Any:
        if isinstance(value, nn.Module | nn.Parameter):
            return self.own(name, value)
        if isinstance(value, MethodType) and isinstance(value.__self__, nn.Module):
            return MethodType(value.__func__, self.own(name, value.__self__))
        if isinstance(value, functools.partial):
            given = {k: self.value(k, v) for k, v in value.keywords.items()}
            return functools.partial(self.value(name, value.func), *(self.value(name, v) for v in value.args), **given)
        return self.function(value) if isinstance(value, FunctionType) and not foreign(value) else value

    def function(self, function: FunctionType) -> Callable:
        if id(function) not in self.done:
            code, names = function.__code__, dict(function.__globals__)
            cells = tuple(CellType() for _ in code.co_freevars)
            made = FunctionType(code, names, function.__name__, function.__defaults__, cells)
            made.__kwdefaults__, made.__module__ = function.__kwdefaults__, function.__module__
            self.done[id(function)] = made  # before it is complete, for functions that call themselves
            for name in sorted(names_in(code) & set(names)):
                names[name] = self.value(name, names[name])
            for name, ours, theirs in zip(code.co_freevars, cells, function.__closure__ or (), strict=True):
                with contextlib.suppress(ValueError):  # a variable without a value yet
                    ours.cell_contents = self.value(name, theirs.cell_contents)
        return self.done[id(function)]


def held_by(function: Callable) -> dict[str, nn.Module | nn.Parameter]:
    """Modules and parameters that a function looks at, under the names that it has for them."""
    found: dict[int, tuple[str, Any]] = {}

    def note(name: str, value: Any) -> Any:
        if id(value) not in found:
            taken = {*dir(nn.Module), *(n for n, _ in found.values())}
            others = (f"{name}_{i}" for i in itertools.count(1))
            found[id(value)] = next(n for n in itertools.chain([name], others) if n not in taken), value
        return value

    Walk(note).value("model", function)
    return dict(found.values())


def function_of(function: Callable, held: dict[str, Any], made: nn.Module) -> Callable:
    """The function with the modules and parameters of `made`, which may be a copy, for those that it looks at."""
    names = {id(v): n for n, v in held.items()}
    return Walk(lambda _, value: getattr(made, names[id(value)])).value("model", function) if held else function

"""Rules as rows of tables, where torch's call is needle's with other names: functions by signature, layers by fields."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn

from needle import nn as needle_nn
from needle.autograd import Unsupported

from .registry import rule

# Arguments of torch that change no result, or that the interpreter sees to; what is sorted here is so in a stable order.
WITHOUT_EFFECT = {
    *("inplace", "memory_format", "cudnn_enable", "cudnn_enabled", "sparse_grad", "_stacklevel"),
    *("stable", "sorted"),
}


def functions(
    signature: str, table: Mapping[tuple, Callable], refused: Mapping[str, str] | None = None, **views: Any
) -> None:
    """The rules of torch functions that call a function of needle's with the same arguments in the same order.

    signature: torch's, with its names and defaults; `**_` for such as say where a new tensor lies. table: the torch functions
    of each rule -> needle's function, which gets all arguments but those WITHOUT_EFFECT and those refused. refused: arguments
    that have to be false -> what else to say then. views: `view` and `put` of `rule`.
    """
    torchs = inspect.signature(eval(f"lambda {signature}: None"))
    for targets, f in table.items():
        made = renamed(forwarding(f, torchs, refused or {}), targets[0].__name__)
        made.__signature__ = torchs  # type: ignore[attr-defined]
        rule(*targets, **views)(made)


def forwarding(f: Callable, signature: inspect.Signature, refused: Mapping[str, str]) -> Callable:
    named = [n for n, p in signature.parameters.items() if p.kind is not p.VAR_KEYWORD]
    passed = [n for n in named if n not in WITHOUT_EFFECT and n not in refused]

    def convert(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        refuse(given.arguments, refused)
        return f(*(given.arguments[n] for n in passed))

    return convert


def layers(
    fields: str,
    *classes: type[nn.Module],
    to: Callable | None = None,
    refused: Mapping[str, str] | None = None,
    view: str | None = None,
    put: Callable | None = None,
    **constants: Any,
) -> None:
    """The rules of torch module classes that make the needle layer of the same name, or `to`, from the module's attributes.

    fields: their names, "axis=dim" where needle's argument `axis` is torch's attribute `dim`, "bias?" for whether the module
    has that tensor. refused: as for `functions`. view, put: as for `rule`. constants: what the layer takes beside the fields.
    """
    for cls in classes:
        make = partial(to or getattr(needle_nn, cls.__name__), **constants)
        rule(cls, view=view, put=put)(renamed(making(make, fields, refused or {}), cls.__name__))


def making(make: Callable, fields: str, refused: Mapping[str, str]) -> Callable:
    names = {f.partition("=")[0].rstrip("?"): f.rpartition("=")[2] for f in fields.split()}

    def convert(m: nn.Module) -> Any:
        refuse({n: getattr(m, n) for n in refused}, refused)
        return make(**{argument: field(m, name) for argument, name in names.items()})

    return convert


def field(m: nn.Module, name: str) -> Any:
    value = getattr(m, name.rstrip("?"))
    return value is not None if name.endswith("?") else value


def refuse(values: Mapping[str, Any], refused: Mapping[str, str]) -> None:
    for name, why in refused.items():
        if values[name]:
            raise Unsupported(f"{name}={values[name]} is not supported{why}")


def renamed(f: Callable, name: str) -> Callable:
    """`f` as reports show it: by the torch function's or class's name, of the file that has the table."""
    f.__name__ = f.__qualname__ = name
    f.__module__ = sys._getframe(2).f_globals["__name__"]
    return f

"""What the page speaks of: torch's core ATen list, the public functions of five of its modules, and tensors' methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from torch2needle.rules.registry import find_function_rule

from .calls_of_tensors import OPERATORS

# Of torch.nn.functional's names those that are no functions on tensors.
HELPERS = ("assert_int_or_pair", "boolean_dispatch", "handle_torch_function")


def core_aten() -> dict[str, Any]:
    """Every overload of aten that torch tags as core, by name."""
    found = {}
    for name in torch._C._dispatch_get_all_op_names():
        packet, _, overload = name.removeprefix("aten::").partition(".")
        if name.startswith("aten::") and hasattr(torch.ops.aten, packet):
            op = getattr(getattr(torch.ops.aten, packet), overload or "default", None)
            if op is not None and torch.Tag.core in op.tags:
                found[f"aten.{packet}.{overload or 'default'}"] = op
    return dict(sorted(found.items()))


def public(module: Any, helpers: tuple[str, ...] = ()) -> dict[str, Callable]:
    """The functions of a module of torch's, by full name."""
    found = {n: getattr(module, n) for n in dir(module) if not n.startswith(("_", "has_torch_function"))}
    calls = {n: f for n, f in found.items() if callable(f) and not isinstance(f, type) and n not in helpers}
    homes = ("torch", "None", "")  # not what the module imports from Python
    return {
        f"{module.__name__}.{n}": f
        for n, f in calls.items()
        if str(getattr(f, "__module__", "")).split(".")[0] in homes
    }


class Named:
    """A function of torch, looked up when it is called, as models do: captures give some another meaning."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(torch, self.__name__)(*args, **kwargs)


class Method:
    """A method as models call it."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(x, self.__name__)(*args, **kwargs)


def methods() -> dict[str, Any]:
    """Public methods of tensors, and Python's operators."""
    names = [n for n in dir(torch.Tensor) if not n.startswith("_") and callable(getattr(torch.Tensor, n))]
    return {f"torch.Tensor.{n}": Method(n) for n in (*names, *OPERATORS)}


LISTS: dict[str, Callable[[], dict[str, Any]]] = {
    "core ATen": core_aten,
    "torch": lambda: {name: Named(name.rpartition(".")[2]) for name in public(torch)},
    "torch.Tensor": methods,
    "torch.nn.functional": lambda: public(F, HELPERS),
    "torch.linalg": lambda: public(torch.linalg),
    "torch.special": lambda: public(torch.special),
    "torch.fft": lambda: public(torch.fft),
}


def has_rule(target: Any) -> bool:
    return find_function_rule(target) is not None

"""Conversion rules: from torch's functions, tensor methods and module classes to needle."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from needle.autograd import Unsupported

from .overloads import bind_overload, find_linked_rule, is_overload

FUNCTION_RULES: dict[Any, Callable] = {}
MODULE_RULES: dict[type[nn.Module], Callable] = {}
RULES_BY_NAME: dict[str, tuple[Callable[[nn.Module], bool], Callable]] = {}
COMPLEX_RULES: dict[
    Any, Callable
] = {}  # of functions whose arguments hold complex numbers, or which make some of real ones
# Python's in-place operators have no trailing underscore that would tell.
INPLACE_OPERATORS = {
    *("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor", "ilshift", "irshift"),
    "setitem",
}
CALLS = {"forward", "__call__", "_call_impl"}  # what makes a call of a module another one
# Of the names that Python reserves, those that a call reads.
CALLING = {"__call__", "__getattr__", "__getattribute__", "__new__"}
KEYWORDS = {"and_", "or_"}  # operators whose underscore only avoids a keyword


def rule(
    *targets: Any, view: str | Callable[..., str | None] | None = None, put: Callable | None = None
) -> Callable[[Callable], Callable]:
    """Decorator: the conversion rule of torch functions, tensor methods (`torch.Tensor.view`), aten overloads or module classes.

    A function's rule has torch's own signature and a body in needle's public API; aten overloads of the same name
    (`torch.ops.aten.relu.default`) share it unless they are given one of their own. A module's rule takes the torch module
    and returns a needle layer whose parameters have torch's names and shapes; the converter fills them. A function of a
    library that need not be installed is given as its full name.
    view: "always" when torch's result shares memory with the first argument, "same" when it is that tensor, "maybe" when that
    depends on strides or dtype, "mode" when on what no example tells; or a function of the call's arguments that says which.
    put: `put(base, value, *arguments)` is the base after a write of `value` through the view.
    """

    return registering(targets, view, put)


def complex_rule(*targets: Any, view: Any = None, put: Callable | None = None) -> Callable[[Callable], Callable]:
    """`rule` for calls with needle.Complex, a complex number or a complex dtype among their arguments."""
    return registering(targets, view, put, COMPLEX_RULES)


def rule_by_name(*names: str, behaves: Callable[[nn.Module], bool], view: Any = None) -> Callable[[Callable], Callable]:
    """`rule` for module classes that many packages write for themselves: whose name ends so, where `behaves(module)`."""

    def register(f: Callable) -> Callable:
        f.view, f.put = view, None  # type: ignore[attr-defined]
        RULES_BY_NAME.update(dict.fromkeys(names, (behaves, f)))
        return f

    return register


def registering(targets: tuple, view: Any, put: Callable | None, functions: dict | None = None) -> Callable:
    def register(f: Callable) -> Callable:
        f.view, f.put = view, put  # type: ignore[attr-defined]
        if f.__name__ == "<lambda>":
            f.__name__ = f.__qualname__ = getattr(targets[0], "__name__", str(targets[0]))
        for target in dict.fromkeys(targets):
            module = isinstance(target, type) and issubclass(target, nn.Module)
            table = MODULE_RULES if module else FUNCTION_RULES if functions is None else functions
            if table.get(target, f) is not f:
                raise ValueError(
                    f"[rule] {target_name(target)} has a rule already, got another in {f.__module__}.{f.__name__}."
                )
            table[target] = f
        return f

    return register


def find_module_rule(module: nn.Module) -> Callable | None:
    """The rule of the module's class, or of a base that the class extends by nothing but a constructor."""
    if has_hooks(module) or parametrize.is_parametrized(module):
        return None  # calling it does more than its class says: trace through it
    if any(isinstance(v, torch.Tensor) for v in vars(module).values()):
        return None  # a weight that is no Parameter any more, and not among what the layer would be filled with
    for cls in type(module).__mro__:
        if cls in MODULE_RULES:
            return MODULE_RULES[cls]
        if any(k in CALLING or (not k.startswith("__") and k != "extra_repr") for k in vars(cls)):
            break
    for name, (behaves, found) in RULES_BY_NAME.items():
        if type(module).__name__.endswith(name) and behaves(module):
            return found
    return None


def has_hooks(module: nn.Module) -> bool:
    """Whether a call does something before or after the forward of its class, or another forward."""
    return bool(module._forward_hooks or module._forward_pre_hooks) or not CALLS.isdisjoint(vars(module))


def is_more_than_its_class(module: nn.Module) -> bool:
    """Whether a call of the module does more than the forward of its class, which is all that torch.fx sees of a root."""
    own = any(k in vars(cls) for cls in type(module).__mro__ for k in CALLS - {"forward"} if cls is not nn.Module)
    return has_hooks(module) or own


def method(name: str) -> Any:
    """The key of a tensor method."""
    return getattr(torch.Tensor, name, None)


def find_function_rule(target: Any, rules: dict[Any, Callable] | None = None) -> Callable | None:
    """The target's rule, by default of real numbers; an aten overload without one of its own has that of the torch function or
    method of its name.
    """
    rules = FUNCTION_RULES if rules is None else rules
    try:
        rule = rules.get(target) or rules.get(target_name(target))
    except TypeError:  # not hashable, so no key either
        return None
    return find_linked_rule(target, rules) if rule is None and is_overload(target) else rule


def is_inplace(target: Any) -> bool:
    """True for relu_, Tensor.add_, operator.iadd, aten.relu_.default."""
    name = target._opname if is_overload(target) else getattr(target, "__name__", "")
    if name in INPLACE_OPERATORS or name.strip("_") in INPLACE_OPERATORS:
        return True
    return name.endswith("_") and not name.endswith("__") and name not in KEYWORDS


def target_name(target: Any) -> str:
    """How a user would write the target, or what a function of capture stands for."""
    target = getattr(target, "stands_for", target)
    if is_overload(target):
        return f"torch.ops.{target}"
    if isinstance(target, type):
        short = target.__module__.startswith("torch.nn.modules")
        return f"torch.nn.{target.__name__}" if short else f"{target.__module__}.{target.__qualname__}"
    name = getattr(target, "__name__", str(target))
    if getattr(torch.Tensor, name, None) is target:
        return f"torch.Tensor.{name}"
    for public in (nn.functional, torch, torch.special, torch.linalg, torch.fft):  # torch.fft.fft is called fft_fft
        stem = str(name).removeprefix(public.__name__.rpartition(".")[2] + "_")
        if getattr(public, stem, None) is target:
            return f"{public.__name__}.{stem}"
    module = (getattr(target, "__module__", "") or "").removeprefix("_")  # operator's functions live in _operator
    return f"{module}.{name}" if module else name


def nearest_rule(target: Any) -> str:
    """The name of the rule that looks most like the target, or nothing."""
    table = MODULE_RULES if isinstance(target, type) else FUNCTION_RULES
    names = {target_name(k).rpartition(".")[2].lower(): target_name(k) for k in table}
    own = target._opname if is_overload(target) else target_name(target).rpartition(".")[2]
    found = difflib.get_close_matches(own.lower(), names, n=1, cutoff=0.6)
    return names[found[0]] if found else ""


def bind(
    f: Callable, target: Any, args: tuple, kwargs: dict[str, Any], rules: dict[Any, Callable] | None = None
) -> inspect.BoundArguments:
    """The call's arguments by the rule's names, so that position or keyword makes no difference."""
    if is_overload(target):
        return bind_overload(f, target, args, kwargs, FUNCTION_RULES if rules is None else rules)
    try:
        return inspect.signature(f).bind(*args, **kwargs)
    except TypeError as e:
        raise Unsupported(f"the rule of {target_name(target)} takes {inspect.signature(f)}: {e}") from None

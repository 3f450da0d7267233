"""Aten overloads, which torch.export captures, under the rules of the torch functions and methods of the same name."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch._ops import OpOverload

from needle.autograd import Unsupported

# Where aten's name may be a public one. Functions in SAME are the overloads themselves: they have the same order of arguments.
SAME = (torch, torch._C._nn, torch.Tensor)
OTHERS = (F, operator)
PREFIXED = {"linalg_": torch.linalg, "special_": torch.special, "fft_": torch.fft}
FLAGS = ("training", "train", "use_input_stats")  # torch's names of training flags
DROPPING = (  # which drop by a probability that may itself be 0 in evaluation, and torch's names of that
    *(F.scaled_dot_product_attention, F.dropout, F.dropout1d, F.dropout2d, F.dropout3d),
    *(F.alpha_dropout, F.feature_alpha_dropout, torch.dropout, torch.alpha_dropout),
    *(torch.feature_dropout, torch.feature_alpha_dropout),
)
NAMES_OF_DROPPING = {f.__name__ for f in DROPPING}
PROBABILITIES = ("dropout_p", "p")
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def is_overload(target: Any) -> bool:
    return isinstance(target, OpOverload)


def draws(target: Any) -> bool:
    """Whether it is an overload that makes random numbers."""
    return is_overload(target) and torch.Tag.nondeterministic_seeded in target.tags


def drops(function: Any) -> bool:
    """Whether it is a function of DROPPING, or an overload of one."""
    return function._opname in NAMES_OF_DROPPING if is_overload(function) else function in DROPPING


def without_out(overload: OpOverload) -> OpOverload:
    """The overload that has all arguments of one with out= but that: add.Tensor of add.out."""
    wanted = [(a.name, str(a.type)) for a in overload._schema.arguments if not a.is_out]
    for name in overload.overloadpacket.overloads():
        other = getattr(overload.overloadpacket, name)
        if [(a.name, str(a.type)) for a in other._schema.arguments] == wanted:
            return other
    return overload


def base_name(overload: OpOverload) -> str:
    """The name without the underscore of the in-place form: relu for aten.relu_.default."""
    name = overload._opname
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


def twins(overload: OpOverload) -> Iterator[Any]:
    """Public functions and methods that the overload's name belongs to, the in-place ones first."""
    if overload.namespace != "aten":
        return
    for name in dict.fromkeys((overload._opname, base_name(overload))):
        for place in (*SAME, *OTHERS):
            if hasattr(place, name):
                yield getattr(place, name)
        for prefix, place in PREFIXED.items():
            if name.startswith(prefix) and hasattr(place, name.removeprefix(prefix)):
                yield getattr(place, name.removeprefix(prefix))


def find_linked_rule(overload: OpOverload, rules: Mapping[Any, Callable]) -> Callable | None:
    """The rule of a twin that has a parameter for each of the overload's required arguments."""
    for twin in twins(overload):
        rule = find(twin, rules)
        if rule is not None and set(required(overload)) <= places(rule, overload, rules).keys():
            return rule
    return None


def find(target: Any, rules: Mapping[Any, Callable]) -> Callable | None:
    try:
        return rules.get(target)
    except TypeError:  # not hashable
        return None


def same_order(rule: Callable, overload: OpOverload, rules: Mapping[Any, Callable]) -> bool:
    """True when the rule stands for the overload itself or a function that is the same, not one that has only its name."""
    names = (overload._opname, base_name(overload))
    twins = [getattr(place, name, None) for place in SAME for name in names]
    return any(find(t, rules) is rule for t in (overload, *twins))


def required(overload: OpOverload) -> list[str]:
    return [a.name for a in overload._schema.arguments if not a.has_default_value()]


def places(rule: Callable, overload: OpOverload, rules: Mapping[Any, Callable]) -> dict[str, inspect.Parameter]:
    """The rule's parameter for each argument of the overload's schema: by name, where `self` is `input`, else by place."""
    by_place = same_order(rule, overload, rules)
    parameters = list(inspect.signature(rule).parameters.values())
    named = {p.name: p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    schema = overload._schema.arguments
    names = {"input" if a.name == "self" and "input" in named else a.name for a in schema}
    found = {}
    for i, a in enumerate(schema):
        here = parameters[i] if i < len(parameters) else None
        if a.name == "self" and "input" in named:
            found[a.name] = named["input"]
        elif a.name in named:
            found[a.name] = named[a.name]
        elif not by_place or a.kwarg_only or here is None or (here.name in names and here.name != a.name):
            continue
        elif here.kind in (*POSITIONAL, here.VAR_POSITIONAL):
            found[a.name] = here
    return found


def bind_overload(
    rule: Callable, overload: OpOverload, args: tuple, kwargs: dict[str, Any], rules: Mapping[Any, Callable]
) -> inspect.BoundArguments:
    """The call's arguments, named by the schema, at the parameters of the rule. Raises Unsupported for one it does not take."""
    schema = overload._schema.arguments
    given = dict(zip((a.name for a in schema), args, strict=False)) | kwargs
    target = places(rule, overload, rules)
    signature = inspect.signature(rule)
    bound = inspect.BoundArguments(signature, {})  # type: ignore[arg-type]
    extra = next((p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), None)
    values: dict[str, Any] = {}
    for a in schema:
        if a.name not in given and a.name != "reduction":  # of which torch's functions have another default
            continue
        value, p = given.get(a.name, a.default_value), target.get(a.name)
        if p is not None:
            values[p.name] = (value,) if p.kind is p.VAR_POSITIONAL else value
        elif extra is not None:
            values.setdefault(extra, {})[a.name] = value
        elif not (a.has_default_value() and same(value, a.default_value)):
            raise Unsupported(f"the rule takes {signature}, got {a.name}={value}")
    for p in signature.parameters.values():
        if p.name in values:
            bound.arguments[p.name] = values[p.name]
        elif p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p.name != "like":
            raise Unsupported(f"the rule takes {signature}, got no {p.name}")
    return bound


def same(value: Any, default: Any) -> bool:
    return value is default or (type(value) is type(default) and value == default)


def stub_signature(overload: OpOverload) -> str:
    """The schema's arguments as a rule names them."""
    positional = [a for a in overload._schema.arguments if not a.kwarg_only]
    text = [written(a) for a in positional]
    keywords = [written(a) for a in overload._schema.arguments if a.kwarg_only]
    return f"({', '.join([*text, *(['*', *keywords] if keywords else [])])})"


def written(a: Any) -> str:
    name = "input" if a.name == "self" else a.name
    return f"{name}={a.default_value!r}" if a.has_default_value() else name

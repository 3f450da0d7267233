"""Parameter groups: which options an optimizer has, what they may be, and the lists of parameters that share them."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

import numpy as np

from needle.autograd import Tensor
from needle.nn.module import Module

# Arguments of torch's that choose between its implementations of one rule.
HINTS = ("foreach", "fused", "capturable")
BETAS = ("beta1", "beta2")


ANY = ("dampening", "beta2_decay", "ns_coefficients")  # options that may be negative
WORDS = {"adjust_lr_fn": ("original", "match_rms_adamw"), "line_search_fn": ("strong_wolfe",)}


def number(label: str, name: str, value: Any, least: float = 0.0, below: float = float("inf")) -> float:
    """`value` as a float in [least, below)."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"[{label}] {name} expects a number, got {type(value).__name__}.")
    if not least <= float(value) < below:
        wanted = f"a number of at least {least:g}" if below == float("inf") else f"a number in [{least:g}, {below:g})"
        raise ValueError(f"[{label}] {name} expects {wanted}, got {value}.")
    return float(value)


def checked(label: str, name: str, value: Any, default: Any) -> Any:
    """`value` for option `name`, whose kind is that of its default: a flag, a word, several numbers or one."""
    if isinstance(default, bool):
        if not isinstance(value, bool | np.bool_):
            raise TypeError(f"[{label}] {name} expects True or False, got {value!r}.")
        return bool(value)
    if isinstance(default, tuple):
        if not isinstance(value, tuple | list) or len(value) != len(default):
            raise TypeError(f"[{label}] {name} expects {len(default)} numbers, got {value!r}.")
        return tuple(v if v is d is None else limited(label, name, v) for v, d in zip(value, default, strict=True))
    if name in WORDS:
        if value not in (None, *WORDS[name]):
            raise ValueError(f"[{label}] {name} expects {' or '.join(WORDS[name])}, got {value!r}.")
        return value or default
    return value if value is default is None else limited(label, name, value)


def limited(label: str, name: str, value: Any) -> float:
    least, below = -float("inf") if name in ANY else 0.0, 1.0 if name == "betas" else float("inf")
    return number(label, name, value, least, below)


class Group(UserDict):
    """A dict of "params" and the options of their steps; it takes no option and no value that its optimizer does not know.

    "beta1" and "beta2" are the two numbers of "betas". "initial_lr" is the rate before any schedule.
    """

    def __init__(self, label: str, rule: str, rules: Mapping[str, Mapping[str, Any]], given: Mapping[str, Any]) -> None:
        super().__init__()
        self.label, self.rule, self.rules = label, rule, rules
        self.data |= rules[rule]
        self.update(given)

    def __getitem__(self, name: str) -> Any:
        if name in BETAS and "betas" in self.data:
            return self.data["betas"][BETAS.index(name)]
        return self.data[name]

    def __setitem__(self, name: str, value: Any) -> None:
        label, known = self.label, self.rules[self.rule]
        if name == "params":
            self.data[name] = parameters(label, value)
        elif name in known:
            self.data[name] = checked(label, name, value, known[name])
        elif name in BETAS and "betas" in known:
            betas = list(self.data["betas"])
            betas[BETAS.index(name)] = number(label, name, value, below=1.0)
            self.data["betas"] = tuple(betas)
        elif name == "initial_lr":
            self.data[name] = number(label, name, value)
        elif name == "differentiable" and value:
            raise ValueError(f"[{label}] differentiable expects False: steps are not part of the tape, got {value}.")
        elif name not in (*HINTS, "differentiable"):
            other = next((r for r, options in self.rules.items() if name in options), None)
            if other is not None:
                raise ValueError(f"[{label}] {name} belongs to rule {other}, got rule {self.rule}; say rule={other!r}.")
            raise TypeError(f"[{label}] has no option {name}; rule {self.rule} has {', '.join(known)}.")

    def __ior__(self, other: Any) -> Any:  # type: ignore[misc]
        self.update(other)  # name by name, checked
        return self

    def options(self) -> dict[str, Any]:
        return {name: value for name, value in self.data.items() if name != "params"}

    def __repr__(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options().items())


def parameters(label: str, params: Any) -> list[Tensor]:
    """The list of leaf Tensors that `params`, one or an iterable of them, or of pairs of a name and one, holds."""
    if isinstance(params, Tensor):
        return [params]
    if isinstance(params, set | frozenset | str) or not isinstance(params, Iterable):
        raise TypeError(f"[{label}] expects a list of parameters, got {type(params).__name__}.")
    found = [p[1] if isinstance(p, tuple) and len(p) == 2 and isinstance(p[0], str) else p for p in params]
    for p in found:
        if not isinstance(p, Tensor):
            kind = type(p)
            raise TypeError(
                f"[{label}] expects needle's parameters (net.parameters()), got {kind.__module__}.{kind.__name__}."
            )
        if p.op is not None:
            raise ValueError(f"[{label}] expects parameters, got the result of {p.op.label}.")
    return found


def as_groups(label: str, params: Any) -> list[dict[str, Any]]:
    """What an optimizer is made of as a list of dicts with "params"; one dict for a plain list of parameters."""
    if isinstance(params, Module):
        raise TypeError(
            f"[{label}] expects a list of parameters (net.parameters()), got the net: {type(params).__name__}."
        )
    if isinstance(params, Tensor | Mapping):
        raise TypeError(f"[{label}] expects a list of parameters or of groups, got one {type(params).__name__}.")
    params = list(params) if isinstance(params, Iterable) and not isinstance(params, set | frozenset | str) else params
    groups = params if params and isinstance(params, list) and isinstance(params[0], Mapping) else [{"params": params}]
    for group in groups:
        if not isinstance(group, Mapping) or "params" not in group:
            raise TypeError(f"[{label}] expects every group to be a dict with params, got {type(group).__name__}.")
    return [{**group, "params": parameters(label, group["params"])} for group in groups]


def once(label: str, names: Iterable[str]) -> None:
    """Raise where the decay rates are among the names of arguments in both of their forms."""
    if "betas" in names and not set(BETAS).isdisjoint(names):
        raise TypeError(f"[{label}] expects betas or beta1 and beta2, got both.")


def rule_of(label: str, params: Iterable[Any]) -> str:
    """The rule that parameters ask for: torch's those of converted models, needle's all others."""
    rules = [getattr(p, "rule", "needle") for p in params]
    if len(set(rules)) > 1:
        theirs = rules.count("torch")
        raise ValueError(
            f"[{label}] expects rule='torch' or rule='needle' for parameters of both kinds, got {theirs} of converted models "
            f"and {len(rules) - theirs} others."
        )
    return rules[0] if rules else "needle"

"""Rules of torch.view_copy and its like: those of the views, whose results share no memory here."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from needle import ops

from . import aten, indexing, sampling, shapes  # noqa: F401  the rules of views come first
from .registry import FUNCTION_RULES, complex_rule, rule
from .tables import renamed


def of_values(view: Any) -> Any:
    """The rule of a view without what says that it is one."""
    made: Any = renamed(lambda *args, **kwargs: view(*args, **kwargs), view.__name__)
    made.__signature__ = inspect.signature(view)
    return made


def view_of(name: str) -> Any:
    """The rule of the view of that name, torch's method or aten's."""
    packet = getattr(torch.ops.aten, name, None)
    names = packet.overloads() if packet is not None else ()
    named = (getattr(torch.Tensor, name, None), *(getattr(packet, n) for n in ("default", "Tensor") if n in names))
    return next((r for r in map(FUNCTION_RULES.get, named) if getattr(r, "view", None)), None)


for name in dir(torch):
    if name.endswith("_copy") and (found := view_of(name.removesuffix("_copy"))):
        rule(getattr(torch, name))(of_values(found))

rule(torch.view_as_complex_copy)(lambda input: ops.view_as_complex(input))
complex_rule(torch.view_as_real_copy)(lambda input: ops.view_as_real(input))

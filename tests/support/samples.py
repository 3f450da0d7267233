"""Calls of the listed functions: those written here, then those that torch's own tests have (their table `op_db`)."""

from __future__ import annotations

import functools
import sys
import types
import unittest
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_map

from . import calls_of_tensors  # noqa: F401 - adds to CALLS
from .calls import CALLS, RANDOM

SEED = 0


@dataclass
class Call:
    """Arguments of a call. Whole numbers marked by `Size` are read from the shape of the first tensor, as models do."""

    args: tuple
    kwargs: dict[str, Any] = field(default_factory=dict)


@functools.cache
def torchs_table() -> dict[str, list[Any]]:
    """torch's samples by name: `linalg.det`, `nn.functional.relu`, `add`."""
    if "expecttest" not in sys.modules:  # which torch's tests want and their samples do not
        stand_in = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules["expecttest"] = stand_in
    try:
        from torch.testing._internal.common_methods_invocations import op_db
    finally:
        if not hasattr(sys.modules["expecttest"], "__file__"):
            del sys.modules["expecttest"]
    found: dict[str, list[Any]] = {}
    for info in op_db:
        for name in (info.name, f"aten.{info.aten_name}", *(a.name for a in info.aliases)):
            found.setdefault(name, []).append(info)
    return found


def keys(name: str) -> tuple[str, ...]:
    """Where torch's table may have samples of a function."""
    if name.startswith("aten."):
        packet = name.split(".")[1]
        return packet, f"nn.functional.{packet}", name.rpartition(".")[0]
    short = name.removeprefix("torch.")
    last = short.rpartition(".")[2]
    if short not in (last, f"Tensor.{last}"):
        return short, last
    homes = ("", "nn.functional.", "linalg.", "special.")  # and of what writes in place, what does not
    return tuple(home + n for n in dict.fromkeys((last, last.rstrip("_"))) for home in homes)


def calls(name: str) -> Iterator[Call]:
    """Those of this folder first; the same numbers at every run."""
    for make in CALLS.get(name) or CALLS.get(name.rstrip("_"), ()):
        torch.manual_seed(SEED)
        args, kwargs = make()
        yield Call(args, kwargs)
    if name in RANDOM or "fractional" in name:  # torch's draw
        return
    for key in keys(name):
        for info in torchs_table().get(key, ()):
            yield from of_torch(info)


def of_torch(info: Any) -> Iterator[Call]:
    dtypes = [d for d in (torch.float32, torch.int64, torch.bool) if d in info.dtypes]
    if not dtypes:
        return
    torch.manual_seed(SEED)
    for sample in info.sample_inputs("cpu", dtypes[0], requires_grad=False):
        yield Call((sample.input, *sample.args), sample.kwargs)


def tensors(call: Call) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    tree_map(lambda v: found.append(v) if isinstance(v, torch.Tensor) else None, (call.args, call.kwargs))
    return found

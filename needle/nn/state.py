"""What modules are loaded from, and where and in which dtype their tensors are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from needle.autograd import Tensor, as_data
from needle.backend_ndarray import Device
from needle.backend_ndarray.functions import numpy_of
from needle.ops.methods import place_and_dtype

if TYPE_CHECKING:
    from .module import Module

FLOATING = ("float16", "bfloat16", "float32", "float64")
MAX_LINES = 20  # of the names in one message


class Difference(NamedTuple):
    """How names given to `load_state_dict` differ from a module's own."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def copy_state(module: Module, state: Mapping[str, Any], strict: bool) -> Difference:
    """`Module.load_state_dict`."""
    own = dict(module.persistent_tensors())
    arrays = {k: numpy_of(v) for k, v in state.items()}
    for k, a in arrays.items():
        if a.dtype.kind == "c" and k in own and own[k].of_pairs:
            arrays[k] = np.stack([a.real, a.imag], -1)
    diff = Difference([k for k in own if k not in arrays], [k for k in arrays if k not in own])
    wrong = [k for k, a in arrays.items() if k in own and a.shape != tuple(own[k].shape)]
    problems = [f"shape       {k} is {tuple(own[k].shape)}, got {arrays[k].shape}" for k in wrong]
    problems += [
        f"dtype       {k} is {own[k].dtype}, got {a.dtype}"
        for k, a in arrays.items()
        if k in own and a.dtype.kind == "c"
    ]
    if strict:
        problems += [f"missing     {k} {tuple(own[k].shape)}" for k in diff.missing_keys]
        problems += [f"unexpected  {k} {arrays[k].shape}" for k in diff.unexpected_keys]
    if problems:
        rest = [f"and {len(problems) - MAX_LINES} more"] if len(problems) > MAX_LINES else []
        lines = "".join(f"\n  {p}" for p in (*problems[:MAX_LINES], *rest))
        count = len(own.keys() | arrays.keys())
        raise ValueError(
            f"[load_state_dict] {len(problems)} of {count} names do not fit {type(module).__name__}:{lines}"
        )
    for k, a in arrays.items():
        if k in own:
            own[k].data = Tensor(a, device=own[k].device, dtype=own[k].dtype, requires_grad=False)
    return diff


def move(module: Module, targets: Sequence[Any], device: Device | None, dtype: str | None) -> None:
    """`Module.to`."""
    device, dtype = place_and_dtype(targets, device, dtype)
    if dtype not in (None, *FLOATING):
        raise ValueError(f"[to] dtype expects one of {', '.join(FLOATING)}, got {dtype}.")
    if device is not None:
        device.require()

    def moved(t: Tensor) -> None:
        wanted = dtype if t.dtype in FLOATING else None
        if device in (None, t.device) and wanted in (None, t.dtype):
            return
        t.cached_data = as_data(t, device or t.device, wanted or t.dtype)
        t.touch()

    constants = [t for _, m in module.named_modules() for t in m._constants()]
    for t in [*(t for _, t in module.named_tensors()), *constants]:
        moved(t)
        if t.grad is not None:
            t.grad = t.grad.detach()
            moved(t.grad)

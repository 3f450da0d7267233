"""How results and their gradients differ, in a sentence's words: of a graph in torch, and of the converted model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

import needle as ndl
from needle.graph import GraphModule

from ..report import short
from .behaviour import Behaviour, first_line, flat
from .calls import Call, fresh
from .structure import PLAIN, plain_result

# Of the largest value; a fast path of torch's own may round otherwise.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
HALF_TOLERANCE = 3e-2
NET_TOLERANCE = 1e-2  # of needle's result: what another order of sums may make of a deep network, and no wrong rule
LAST_BITS = 1e-6  # of the largest value
ROUNDING = 1e-4  # of a result in float32, where it is no longer only that of the last sums
TIES = 0.1  # of whole numbers may differ, since a rounding error picks another of almost equal values


def difference(ours: Any, theirs: Any, tolerance: float = 0.0, least: float = 0.0) -> str:
    """What distinguishes two leaves of results, or nothing; `tolerance` in place of the dtype's where it is larger, and `least`
    for the size of values that are smaller."""
    if not isinstance(theirs, torch.Tensor):
        if isinstance(ours, torch.Tensor):
            return "is a tensor instead of Python's value"
        return "" if ours == theirs or ours is theirs else f"is {ours!r} instead of {theirs!r}"
    if not isinstance(ours, torch.Tensor):
        return f"is {type(ours).__name__} instead of a tensor"
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return f"is {text_of(ours)} instead of {text_of(theirs)}"
    if not theirs.numel():
        return ""
    if theirs.is_complex():
        return difference(
            torch.view_as_real(ours.resolve_conj()), torch.view_as_real(theirs.resolve_conj()), tolerance, least
        )
    if torch.equal(ours, theirs):
        return ""
    if not theirs.is_floating_point():
        return "has other values"
    a, b = ours.double(), theirs.double()
    if not torch.equal(a.isnan(), b.isnan()) or not torch.equal(a[a.isinf()], b[b.isinf()]):
        return "has NaN or infinite values elsewhere"
    a, b = (torch.nan_to_num(t, 0, 0, 0) for t in (a, b))
    error, size = float((a - b).abs().max()), float(b.abs().max())
    near = error <= max(tolerance, TOLERANCE.get(theirs.dtype, HALF_TOLERANCE)) * max(size, least)
    return "" if near else f"is off by {error:.2g}, values being up to {size:.2g}"


def text_of(t: torch.Tensor) -> str:
    return f"{str(t.dtype).removeprefix('torch.')}{tuple(t.shape)}"


def disagreement(ours: Behaviour, theirs: Behaviour) -> str:
    for i, (a, b) in enumerate(zip(ours.results, theirs.results, strict=True)):
        where = "on the example" if not i else "at another call, with other values or another batch"
        if len(a) != len(b):
            return f"it gives {len(a)} values instead of {len(b)} {where}"
        for k, (x, y) in enumerate(zip(a, b, strict=True)):
            if text := difference(x, y):
                why = ", and the forward turns on autocast, which capture does not see" if theirs.casting else ""
                return f"its output {k} {text} {where}{why}"
    if lost := theirs.written - ours.written:
        return f"the forward writes {short(sorted(lost))}, which the graph does not"
    if theirs.chancy:
        return "the forward draws Python's or numpy's random numbers, which capture would freeze"
    return own_gradients_of(theirs.hooks)


def own_gradients_of(names: set[str]) -> str:
    return (
        f"the forward has gradients of its own ({', '.join(sorted(names))}), which capture does not see"
        if names
        else ""
    )


def lost_gradients(ours: Behaviour, theirs: Behaviour, chooses: bool | frozenset[int] = False) -> str:
    """chooses: the graph computes branches that torch leaves out, whose parameters get zeros; the ids of these, True for all."""
    for k, (mine, their) in enumerate(zip(ours.reached, theirs.reached, strict=True)):
        more = bool(chooses) if isinstance(chooses, bool) else mine - their <= chooses
        if mine != their and not (more and mine > their):
            return f"output {k} passes gradients to {len(mine)} parameters instead of {len(their)}"
    return ""


def doubled(t: Any) -> Any:
    return t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t


def error_of(rounded: Any, exact: Any) -> float:
    """How far a result is off from the one in float64."""
    real = isinstance(exact, torch.Tensor) and exact.is_floating_point() and exact.numel()
    return float(torch.nan_to_num(rounded.double() - exact, 0, 0, 0).abs().max()) if real else 0.0


def error_free(ours: Any, theirs: Any) -> bool:
    """Whether leaves of results differ by no more than the last bits, where they agree."""
    real = isinstance(theirs, torch.Tensor) and theirs.is_floating_point() and theirs.numel()
    return not real or error_of(ours, theirs.double()) <= LAST_BITS * float(
        torch.nan_to_num(theirs, 0, 0, 0).abs().max()
    )


def net_fault(
    net: GraphModule, call: Call, inputs: dict[str, Any] | None, theirs: list[Any], least: Sequence[float] = ()
) -> str:
    """How the net's results differ from the model's of a call; inputs: the call by name, where names are all.

    least: for each result the size that smaller values count as.
    """
    args, kwargs = fresh(call) if inputs is None else ((), {n: inputs[n] for n in net.input_names if n in inputs})
    values = (ndl.Tensor, ndl.Complex)
    try:
        with ndl.no_grad():
            result = flat(plain_result(net(*args, **kwargs), leaves=(*values, *PLAIN)), *values)
    except Exception as e:
        return f"the converted model fails ({first_line(e)})"
    ours = [torch.from_numpy(np.array(t.numpy())) if isinstance(t, values) else t for t in result]
    return fault_of_results(ours, [t.cpu() if isinstance(t, torch.Tensor) else t for t in theirs], least)


def fault_of_results(ours: Sequence[Any], theirs: Sequence[Any], least: Sequence[float] = ()) -> str:
    """How the results of a converted model differ from torch's, beyond what another order of sums may make of them."""
    if len(ours) != len(theirs):
        return f"the converted model gives {len(ours)} values instead of {len(theirs)}"
    for k, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.shape == b.shape:
            near = (
                not (b.is_floating_point() or b.is_complex()) and float((a != b).double().mean()) < TIES
            )  # an argmax of what is almost equal
            a = b if near else a.to(b.dtype)
        if text := difference(a, b, NET_TOLERANCE, least[k] if least else 0.0):
            return f"the converted model's output {k} {text} on the example"
    return ""

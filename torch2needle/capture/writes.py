"""What torch's in-place calls leave in memory, and whose memory it is."""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile
from typing import Any

import torch
from torch import fx

from needle import ops
from needle.autograd import Spec, Tensor, Unsupported
from needle.complex_numbers import Complex
from needle.graph import Node, Symbol
from needle.ops.dtypes import kind

from ..report import dotted
from .tracing import Captured

POSSIBLE = "possible dtypes"  # among what is known of a node
ORDER = ("bool", "int32", "int64", "float32", "float64")  # of two operands the later one is the result's
BESIDE = [("int64", "int32"), ("int32", "int64"), ("float64", "float32"), ("float32", "float64")]  # one, the others


def as_stored(result: Any, base: Any) -> Any:
    """What a write of `result` leaves in the tensor `base`, whose shape and dtype stay as they are."""
    if isinstance(base, Complex):
        result = result if isinstance(result, Complex) else ops.complex_pair(result, 0.0)
        return Complex(as_stored(result.real, base.real), as_stored(result.imag, base.imag))
    if isinstance(result, Complex):
        raise Unsupported("it writes complex numbers into a tensor of real ones")
    if not isinstance(result, Symbol) or not isinstance(base, Tensor) or result is base:
        return result
    old, new = getattr(base, "spec", None), result.spec
    if old is None or new is None:
        return ops.stored_like(result, base) if may_differ(result, base) else result
    if tuple(old.shape) != tuple(new.shape):
        raise Unsupported(f"it writes values of shape {tuple(new.shape)} into a tensor of shape {tuple(old.shape)}")
    return result if old.dtype == new.dtype else ops.cast(result, old.dtype)


def may_differ(result: Any, base: Any) -> bool:
    """Whether some dtypes of the inputs give the two other dtypes, in a write that torch takes."""
    pairs = zip(*(possible_dtypes(t.node, t.recorder) for t in (result, base)), strict=True)
    return any(new != old and kind(new) <= kind(old) for new, old in pairs)


def possible_dtypes(node: Node, recorder: Any) -> list[str]:
    """Of a value whose dtype is not known: what it is for all inputs of each dtype, and for one that differs from the others.

    Values of unknown shape have two axes, to meet all others, or none, where they leave others their dtype.
    """
    inputs = takewhile(lambda n: n.kind == "input", recorder.graph.nodes)
    names = [n.name for n in inputs if n.meta.get("spec") is None]
    cases = [dict.fromkeys(names, d) for d in ORDER] + [
        {**dict.fromkeys(names, others), name: one} for name in names for one, others in BESIDE
    ]
    shapes = [(1, 1)] * len(cases) + [()] * len(cases)
    cases += cases
    todo = [node]
    while todo:  # each node once: residual connections make a great many paths
        missing = [n for n in todo[-1].inputs() if n.kind != "scalar" and POSSIBLE not in n.meta]
        if missing:
            todo += missing
        else:
            last = todo.pop()
            given = [n for n in last.inputs() if n.kind != "scalar"]
            known = [last.meta["spec"].dtype] * len(cases) if isinstance(last.meta.get("spec"), Spec) else None
            if last.kind == "input" and known is None:
                known = [c.get(last.name, "float32") for c in cases]
            last.meta[POSSIBLE] = known or [
                dtype_from(last, [given_spec(n, n.meta[POSSIBLE][i], shape) for n in given], recorder)
                for i, shape in enumerate(shapes)
            ]
    return node.meta[POSSIBLE]


def given_spec(node: Node, dtype: str, unknown: tuple) -> Spec:
    known = node.meta.get("spec")
    return Spec(((1, 1) if known.shape else ()) if isinstance(known, Spec) else unknown, dtype)


def dtype_from(node: Node, specs: list[Spec], recorder: Any) -> str:
    if node.kind == "module":  # torch's layers take the dtype of their weights alone
        weights = [p.dtype for p in recorder.root.get_submodule(node.target).parameters()]
        specs = [Spec((), d) for d in weights] or specs
    try:
        return node.target.infer(*specs).dtype
    except Exception:  # a layer, or an op that does not take these shapes
        return max((s.dtype for s in specs), key=ORDER.index, default="float32")


def view_kind(node: fx.Node, rule: Callable, args: tuple, inplace: bool) -> str | None:
    """As the rule says, unless capture knows whether the result shares memory with the first argument.

    In place, "always" is for what gives the tensor itself another shape; others write its values.
    """
    view = getattr(rule, "view", None)
    view = view(*args) if callable(view) else view
    if inplace:
        return view if view == "always" else None
    if view == "maybe" and "shares" in node.meta:
        return "always" if node.meta["shares"] else None
    return view


def second_name(captured: Captured, name: str) -> str:
    """What else of the model lies in the memory of `name` or reads it; or nothing."""
    tensors = dict(captured.constants)
    for path, module in captured.model.named_modules():
        own = {**vars(module), **module._parameters, **module._buffers}
        tensors |= {dotted(path, k): t for k, t in own.items() if isinstance(t, torch.Tensor)}
    memory = tensors[name].untyped_storage()._cdata
    for other, t in tensors.items():
        if other != name and t.untyped_storage()._cdata == memory:
            return other
    layer = name.rpartition(".")[0]
    called = (str(n.target) for n in captured.graph.nodes if n.op == "call_module")
    return f"the layer {layer}" if any(f"{layer}.".startswith(f"{c}.") for c in called) else ""

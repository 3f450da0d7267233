"""What torch's in-place calls leave in memory, and whose memory it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from needle import ops
from needle.autograd import Spec, Tensor, Unsupported
from needle.graph import Node, Symbol

from .capture import Captured
from .registry import find_module_rule

LIKELY = "likely dtype"  # among what is known of a node
ORDER = ("bool", "uint8", "int32", "int64", "float32", "float64")  # of two operands the later one is the result's


def as_stored(result: Any, base: Any) -> Any:
    """What a write of `result` leaves in the tensor `base`, whose shape and dtype stay as they are."""
    if not isinstance(result, Symbol) or not isinstance(base, Tensor) or result is base:
        return result
    old, new = getattr(base, "spec", None), result.spec
    if old is None or new is None:
        return ops.cast_like(result, base) if likely_dtype(result.node) != likely_dtype(base.node) else result
    if tuple(old.shape) != tuple(new.shape):
        raise Unsupported(f"it writes values of shape {tuple(new.shape)} into a tensor of shape {tuple(old.shape)}")
    return result if old.dtype == new.dtype else ops.cast(result, old.dtype)


def likely_dtype(node: Node) -> str:
    """Of a value whose dtype is not known: what it would be if the inputs were float32. Two that are equal need no cast."""
    todo = [node]
    while todo:  # each node once: residual connections make a great many paths
        missing = [n for n in todo[-1].inputs() if n.kind != "scalar" and LIKELY not in n.meta]
        if missing:
            todo += missing
        else:
            last = todo.pop()
            last.meta[LIKELY] = dtype_from(last, [n.meta[LIKELY] for n in last.inputs() if n.kind != "scalar"])
    return node.meta[LIKELY]


def dtype_from(node: Node, dtypes: list[str]) -> str:
    if node.meta.get("spec") is not None:
        return node.meta["spec"].dtype
    try:
        return node.target.infer(*(Spec((1, 1), d) for d in dtypes)).dtype
    except Exception:  # an input, a layer, or an op that does not take these shapes
        return max(dtypes, key=ORDER.index, default="float32")


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
        tensors |= {f"{path}.{k}" if path else k: t for k, t in own.items() if isinstance(t, torch.Tensor)}
    memory = tensors[name].untyped_storage()._cdata
    for other, t in tensors.items():
        if other != name and t.untyped_storage()._cdata == memory:
            return other
    layer = name.rpartition(".")[0]
    return f"the layer {layer}" if layer and find_module_rule(captured.model.get_submodule(layer)) else ""

"""The nested arguments and results of an exported program, whose graph has flat ones."""

from __future__ import annotations

import dataclasses
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from needle.autograd import Unsupported


def plain(value: Any, f: Callable[[Any], Any]) -> Any:
    """`value` with `f` applied to its leaves; fx's immutable containers become plain ones."""
    if isinstance(value, tuple):
        items = [plain(v, f) for v in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [plain(v, f) for v in value]
    if isinstance(value, dict):
        return {k: plain(v, f) for k, v in value.items()}
    if isinstance(value, slice):
        return slice(plain(value.start, f), plain(value.stop, f), plain(value.step, f))
    return f(value)


PLAIN = (torch.Tensor, int, float, bool, str, torch.SymInt, torch.SymFloat, torch.SymBool)
DEPTH = 6  # of objects in results


def plain_result(value: Any, notes: list[str] | None = None, depth: int = DEPTH) -> Any:
    """A result with dicts instead of a library's classes, such as outputs and caches, which says so in `notes`."""
    if isinstance(value, tuple | list):
        parts = [plain_result(v, notes, depth) for v in value]
        return (
            type(value)(*parts)
            if hasattr(value, "_fields")
            else tuple(parts)
            if isinstance(value, torch.Size)
            else type(value)(parts)
        )
    if isinstance(value, dict) or (dataclasses.is_dataclass(value) and not isinstance(value, type)):
        items = value if isinstance(value, dict) else vars(value)
        if type(value) is not dict and notes is not None:
            notes.append(f"the output {type(value).__name__} is a dict of the same keys")
        return {k: plain_result(v, notes, depth) for k, v in items.items()}
    if value is None or isinstance(value, PLAIN):
        return value
    held = {k: v for k, v in getattr(value, "__dict__", {}).items() if depth and holds_tensors(v, depth - 1)}
    if not held:
        raise Unsupported(f"an output is of type {type(value).__name__}, which needle cannot give")
    if notes is not None:
        notes.append(f"the output {type(value).__name__} is a dict of its attributes that hold tensors")
    return {k: plain_result(v, notes, depth - 1) for k, v in held.items()}


def holds_tensors(value: Any, depth: int) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, dict | tuple | list):
        return any(holds_tensors(v, depth) for v in (value.values() if isinstance(value, dict) else value))
    return depth > 0 and any(holds_tensors(v, depth - 1) for v in getattr(value, "__dict__", {}).values())


def input_places(program: torch.export.ExportedProgram) -> dict[str, tuple]:
    """For each of the user's inputs, the argument and the keys in it: ("batch", "ids")."""
    names = [s.arg.name for s in program.graph_signature.input_specs if s.kind.name == "USER_INPUT"]
    args, kwargs = pytree.tree_unflatten(range(len(names)), program.call_spec.in_spec)
    arguments = argument_names(program)
    found = {}
    for path, i in pytree.tree_flatten_with_path((args, kwargs))[0]:
        keys: list[Any] = [getattr(k, "key", getattr(k, "idx", getattr(k, "name", None))) for k in path]
        side, first, *rest = keys
        found[names[i]] = (arguments[first] if side == 0 else first, *rest)
    return found


def arguments(program: torch.export.ExportedProgram, values: dict[str, Any]) -> dict[str, Any]:
    """The call's arguments in order, with the values that are no tensors; None for those that hold tensors."""
    flat = [values[s.arg.name] for s in program.graph_signature.input_specs if s.kind.name == "USER_INPUT"]
    args, kwargs = pytree.tree_unflatten(flat, program.call_spec.in_spec)
    given = dict(zip(argument_names(program), (*args, *kwargs.values()), strict=True))
    moving = (torch.Tensor, torch.SymInt)
    return {k: None if any(isinstance(x, moving) for x in pytree.tree_leaves(v)) else v for k, v in given.items()}


def argument_names(program: torch.export.ExportedProgram) -> list[str]:
    signature = program.module_call_graph[0].signature
    if signature is not None and signature.forward_arg_names is not None:
        return list(signature.forward_arg_names)
    args, kwargs = program.call_spec.in_spec.children()
    return [*(f"x{i}" for i in range(args.num_children)), *kwargs.context]


def structure(values: list[Any], spec: Any) -> Any:
    """The flat results in the program's structure; classes of libraries become dicts of their fields."""
    if spec.is_leaf():
        return values.pop(0)
    parts = [structure(values, child) for child in spec.children()]
    if spec.type in (tuple, list):
        return spec.type(parts)
    if spec.type is namedtuple:
        return spec.context(*parts)
    if issubclass(spec.type, tuple):
        return spec.type(*parts) if hasattr(spec.type, "_fields") else tuple(parts)  # torch.sort's and its like
    keys = spec.context
    if isinstance(keys, list | tuple) and len(keys) == 2 and isinstance(keys[0], list) and len(keys[0]) == len(parts):
        return dict(zip(keys[0], parts, strict=True)) | dict.fromkeys(keys[1])  # a registered dataclass
    if isinstance(keys, list | tuple) and len(keys) == len(parts) and all(isinstance(k, str | int) for k in keys):
        return dict(zip(keys, parts, strict=True))
    raise Unsupported(f"[convert] the structure of an output is not known, got {spec.type.__name__}.")

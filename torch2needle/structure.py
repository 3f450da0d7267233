"""The nested arguments and results of an exported program, whose graph has flat ones."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from needle.autograd import Unsupported


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
    if issubclass(spec.type, tuple) and hasattr(spec.type, "_fields"):
        return spec.type(*parts)
    keys = spec.context
    if isinstance(keys, list | tuple) and len(keys) == 2 and isinstance(keys[0], list) and len(keys[0]) == len(parts):
        return dict(zip(keys[0], parts, strict=True)) | dict.fromkeys(keys[1])  # a registered dataclass
    if isinstance(keys, list | tuple) and len(keys) == len(parts) and all(isinstance(k, str | int) for k in keys):
        return dict(zip(keys, parts, strict=True))
    raise Unsupported(f"[convert] the structure of an output is not known, got {spec.type.__name__}.")

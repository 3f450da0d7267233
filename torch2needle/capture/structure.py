"""The nested arguments and results of an exported program, whose graph has flat ones."""

from __future__ import annotations

import dataclasses
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from needle.autograd import Unsupported
from needle.graph.structure import is_record, members, record_of

from .guard import patched


def plain(value: Any, f: Callable[[Any], Any]) -> Any:
    """`value` with `f` applied to its leaves; fx's immutable containers become plain ones."""
    if isinstance(value, tuple):
        items = [plain(v, f) for v in value]
        return value._make(items) if hasattr(value, "_make") else tuple(items)
    if isinstance(value, list):
        return [plain(v, f) for v in value]
    if is_record(value):
        return record_of(type(value), {k: plain(v, f) for k, v in members(value).items()})
    if isinstance(value, dict):
        return {k: plain(v, f) for k, v in value.items()}
    if isinstance(value, slice):
        return slice(plain(value.start, f), plain(value.stop, f), plain(value.step, f))
    return f(value)


PLAIN = (torch.Tensor, int, float, bool, str, torch.SymInt, torch.SymFloat, torch.SymBool)
DEPTH = 6  # of objects in results


def plain_result(
    value: Any, notes: list[str] | None = None, depth: int = DEPTH, leaves: tuple[type, ...] = PLAIN
) -> Any:
    """A result with dicts instead of dataclasses and of a library's classes, such as caches, of which it says so in `notes`."""
    if isinstance(value, leaves) or value is None:
        return value
    if isinstance(value, tuple | list):
        parts = [plain_result(v, notes, depth, leaves) for v in value]
        return value._make(parts) if hasattr(value, "_make") else (tuple if isinstance(value, tuple) else list)(parts)
    if isinstance(value, dict) or is_record(value):
        if isinstance(value, dict) and type(value) is not dict and notes is not None and not is_record(value):
            notes.append(f"the output {type(value).__name__} is a dict of the same keys")
        items = members(value) if is_record(value) else value
        return {k: plain_result(v, notes, depth, leaves) for k, v in items.items()}
    held = {k: v for k, v in getattr(value, "__dict__", {}).items() if depth and holds_tensors(v, depth - 1)}
    if not held:
        raise Unsupported(f"an output is of type {type(value).__name__}, which needle cannot give")
    if notes is not None:
        notes.append(f"the output {type(value).__name__} is a dict of its attributes that hold tensors")
    return {k: plain_result(v, notes, depth - 1, leaves) for k, v in held.items()}


def is_record_class(target: Any) -> bool:
    """Whether a captured call makes a dataclass, of its attributes."""
    return isinstance(target, type) and dataclasses.is_dataclass(target)


def classed(value: Any, like: Any, make: Callable[[type, tuple, dict[str, Any]], Any]) -> Any:
    """What `plain_result` gave, with `make(class, args, attributes)` in the place of its named tuples, and of the dataclasses of
    `like`, which is the result itself or None."""
    if is_record(like):
        return make(type(like), (), {k: classed(value[k], v, make) for k, v in members(like).items()})
    if isinstance(value, tuple | list):
        inner = like if isinstance(like, tuple | list) else [None] * len(value)
        parts = [classed(v, w, make) for v, w in zip(value, inner, strict=True)]
        return make(type(value), tuple(parts), {}) if hasattr(value, "_make") else type(value)(parts)
    if isinstance(value, dict):
        known = like if isinstance(like, dict) else {}
        return {k: classed(v, known.get(k), make) for k, v in value.items()}
    return value


def records(value: Any) -> list[type]:
    """The classes of the dataclasses among inputs that hold tensors."""
    if is_record(value):
        inner = [kind for m in members(value).values() for kind in records(m)]
        return [type(value), *inner] if inner or holds_tensors(members(value), 1) else []
    items = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
    return [kind for v in items for kind in records(v)]


@contextmanager
def known_records(value: Any) -> Iterator[None]:
    """Torch's trees look into the dataclasses among inputs for a while."""
    kinds = [kind for kind in dict.fromkeys(records(value)) if kind not in pytree.SUPPORTED_NODES]

    def flatten(v: Any) -> tuple[list[Any], Any]:
        return list(members(v).values()), tuple(members(v))

    def flatten_with_keys(v: Any) -> tuple[list[Any], Any]:
        return [(pytree.GetAttrKey(k), m) for k, m in members(v).items()], tuple(members(v))

    def unflatten(kind: type) -> Callable:
        return lambda parts, names: record_of(kind, dict(zip(names, parts, strict=True)))

    def packed(cls: Any, *args: Any, **named: Any) -> Any:
        """A PackedSequence also of what stands for tensors, which its class looks into."""
        whole = len(args) == len(cls._fields) and not isinstance(args[1], torch.Tensor)
        return cls._make(args) if whole else before(cls, *args, **named)

    before = PackedSequence.__new__
    for kind in kinds:
        name = f"{kind.__module__}.{kind.__qualname__}"
        pytree._private_register_pytree_node(
            kind, flatten, unflatten(kind), serialized_type_name=name, flatten_with_keys_fn=flatten_with_keys
        )
    try:
        with patched([(PackedSequence, "__new__", staticmethod(packed))]):
            yield
    finally:
        for kind in kinds:
            pytree._deregister_pytree_node(kind)


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
        return spec.context._make(parts)
    if issubclass(spec.type, tuple):
        return spec.type._make(parts) if hasattr(spec.type, "_make") else tuple(parts)  # torch.sort's and its like
    keys = spec.context
    if isinstance(keys, list | tuple) and len(keys) == 2 and isinstance(keys[0], list) and len(keys[0]) == len(parts):
        return dict(zip(keys[0], parts, strict=True)) | dict.fromkeys(keys[1])  # a registered dataclass
    if isinstance(keys, list | tuple) and len(keys) == len(parts) and all(isinstance(k, str | int) for k in keys):
        return dict(zip(keys, parts, strict=True))
    raise Unsupported(f"[convert] the structure of an output is not known, got {spec.type.__name__}.")

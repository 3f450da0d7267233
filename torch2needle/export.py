"""Capture by torch.export, which follows Python's control flow for one example, and leaves free the sizes that it can."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.export import Dim, ExportedProgram, ShapesCollection
from torch.utils import _pytree as pytree

from .capture import Captured, capture_error, foreign_globals, untouched
from .program import capture_program
from .structure import input_places

Call = tuple[tuple, dict[str, Any]]  # positional and named arguments
Axes = dict[int, tuple[int, ...]]  # of the example's tensors, by number
SMALL = 400  # nodes up to which heights and widths are tried: torch.export takes half a minute for larger graphs
PROBES = (1, 2, 3, 5, 8, 16)  # added to an example's size, to see whether a condition on it holds for others


def captures(model: nn.Module, example: Any, dynamic: Any) -> Iterator[Captured]:
    """Captures with fewer and fewer free sizes, for the first that converts; raises ConversionError where none can be made."""
    call = call_of(example)
    batch, wider = batched(call) if dynamic == "auto" else (None, call)
    rows, images = free_axes(wider, batch)
    some = attempt(model, wider, rows) if rows else None
    small = some is None or len(some[0].graph.nodes) <= SMALL
    if images and small:
        most = attempt(model, wider, images)
        if most is not None:
            yield from_program(most[0], model, most[1])
    if some is not None:
        yield from_program(some[0], model, some[1])
    try:
        program, notes = export(model, *call, {})
    except Exception as e:
        if some is None:
            raise capture_error(model, e, "torch.export") from e
    else:
        yield from_program(program, model, notes)


def attempt(model: nn.Module, call: Call, free: Axes) -> tuple[ExportedProgram, list[str]] | None:
    """The program and notes with as many of the sizes free as the forward's branches do not hang on; None without any."""
    while free:
        try:
            program, notes = export(model, *call, free)
        except Exception:  # also where a size is another one's multiple: the caller tries fewer
            return None
        held = held_axes(program)
        if not held:
            return program, notes
        less = {i: tuple(a for a in axes if (i, a) not in held) for i, axes in free.items()}
        if less == free:
            return None
        free = {i: axes for i, axes in less.items() if axes}
    return None


def call_of(example: Any) -> Call:
    """A dict holds inputs by name, anything else the positional ones."""
    if isinstance(example, dict):
        return (), dict(example)
    return (tuple(example) if isinstance(example, tuple | list) else (example,)), {}


def tensors(value: Any) -> list[torch.Tensor]:
    return [t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]


def batched(call: Call) -> tuple[int | None, Call]:
    """(the batch's size, the call); a batch of one is doubled, since torch.export takes a size of one as fixed."""
    first = next((t for t in tensors(call) if t.ndim), None)
    if first is None or not first.shape[0]:
        return None, call
    size = first.shape[0]
    if size > 1:
        return size, call

    def double(t: Any) -> Any:
        return torch.cat([t, t]) if isinstance(t, torch.Tensor) and t.ndim and t.shape[0] == 1 else t

    return 2, pytree.tree_map(double, call)


def free_axes(call: Any, batch: int | None) -> tuple[Axes, Axes]:
    """The batch's axes, by number of the tensor, and the same with heights and widths where there are images."""
    if batch is None:
        return {}, {}
    rows: Axes = {i: (0,) for i, t in enumerate(tensors(call)) if t.ndim and t.shape[0] == batch}
    images: Axes = {i: (2, 3) for i, t in enumerate(tensors(call)) if t.ndim == 4 and t.is_floating_point()}
    both = {i: (*rows.get(i, ()), *images.get(i, ())) for i in {**rows, **images}}
    return rows, both if images else {}


def export(model: nn.Module, args: tuple, kwargs: dict[str, Any], free: Axes) -> tuple[ExportedProgram, list[str]]:
    """torch.export above decomposition, in evaluation mode."""
    args, kwargs = pytree.tree_map(lambda t: t.detach().clone() if isinstance(t, torch.Tensor) else t, (args, kwargs))
    shapes = ShapesCollection()
    for i, t in enumerate(tensors((args, kwargs))):
        if i in free:
            shapes[t] = dict.fromkeys(free[i], Dim.AUTO)
    notes: list[str] = []
    with untouched(model), warnings.catch_warnings(), plain_outputs(model, kwargs, notes), free_len(model):
        warnings.simplefilter("ignore")
        model.eval()
        dynamic = shapes.dynamic_shapes(model, args, kwargs) if free else None
        return torch.export.export(model, args, kwargs, dynamic_shapes=dynamic, strict=False), notes


def named_keywords(forward: Any, kwargs: dict[str, Any]) -> inspect.Signature:
    """The forward's signature with the names that the call gives for **kwargs, which torch.export cannot leave free."""
    signature = inspect.signature(forward)
    kept = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    if len(kept) < len(signature.parameters):
        kept += [inspect.Parameter(k, inspect.Parameter.KEYWORD_ONLY) for k in kwargs if k not in signature.parameters]
    return signature.replace(parameters=kept)


@contextmanager
def free_len(model: nn.Module) -> Iterator[None]:
    """`len(x)` of a tensor in the model's forwards is its free size; Python's must be a number."""

    def free(value: Any) -> Any:
        return value.shape[0] if isinstance(value, torch.Tensor) else len(value)

    places = [g for g in foreign_globals(model) if "len" not in g]
    for place in places:
        place["len"] = free
    try:
        yield
    finally:
        for place in places:
            place.pop("len", None)


@contextmanager
def plain_outputs(model: nn.Module, kwargs: dict[str, Any], notes: list[str]) -> Iterator[None]:
    """The forward returns dicts instead of a library's output classes, and None for what holds no tensors to export."""
    forward = model.forward

    def plain(value: Any) -> Any:
        if isinstance(value, tuple | list):
            parts = [plain(v) for v in value]
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        if isinstance(value, dict) or (dataclasses.is_dataclass(value) and not isinstance(value, type)):
            items = value.items() if isinstance(value, dict) else vars(value).items()
            if type(value) is not dict:
                notes.append(f"the output {type(value).__name__} is a dict of the same keys")
            return {k: plain(v) for k, v in items}
        if value is None or isinstance(value, torch.Tensor | int | float | bool | str | torch.SymInt):
            return value
        notes.append(f"an output of type {type(value).__name__} is None")
        return None

    @functools.wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return plain(forward(*args, **kwargs))

    wrapped.__signature__ = named_keywords(forward, kwargs)  # type: ignore[attr-defined]
    model.forward = wrapped  # type: ignore[method-assign]
    try:
        yield
    finally:
        del model.forward


def from_program(program: ExportedProgram, model: nn.Module | None = None, notes: list[str] | None = None) -> Captured:
    """The captured graph of a program, with the sizes that its inputs may have."""
    captured = capture_program(program, model, notes or [])
    ranges = {str(s): r for s, r in program.range_constraints.items()}
    free = []
    for node in captured.graph.nodes:
        if node.op == "placeholder":
            shape = node.meta["val"].shape
            node.meta["sizes"] = tuple(limits(s, ranges) for s in shape)
            free += [f"{node.target} axis {i}" for i, s in enumerate(shape) if not isinstance(s, int)]
    captured.notes.append(f"free sizes: {', '.join(free) or 'none'}")
    return captured


def limits(size: Any, ranges: dict[str, Any]) -> tuple[int, int | None, str]:
    """(least, largest or None, name). torch.export assumes two or more, without telling whether the forward needs that."""
    if isinstance(size, int):
        return size, size, ""
    r = ranges.get(str(size))
    least = 1 if r is None or r.lower <= 2 else int(r.lower)
    return (
        least,
        int(r.upper) if r is not None and r.upper.is_number and r.upper < 2**62 else None,
        str(size) if r is not None else "",
    )


# -- conditions ----------------------------------------------------------------------------------------------------------


SIZE = re.compile(r"L((?:\[[^\]]+\])+)\.size\(\)\[(\d+)\]")
PLAIN = re.compile(r"(?:\b(?:max|min|and|or|not|v\d+)\b|[\d\s()+\-*/%<>=!,.])*")


def held_axes(program: ExportedProgram) -> set[tuple[int, int]]:
    """(tensor, axis) of the free sizes on which a condition holds that others than the example's would not meet."""
    places = {p: n for n, p in input_places(program).items()}
    tensor = [n for n in program.graph.nodes if n.op == "placeholder" and n.name in places.values()]
    order = {n.name: i for i, n in enumerate(n for n in tensor if isinstance(n.meta.get("val"), torch.Tensor))}
    shapes = {n.name: n.meta["val"].shape for n in tensor if n.name in order}
    held: set[tuple[int, int]] = set()
    for text in program._guards_code or ():
        symbols: dict[str, Any] = {}  # name in the text -> size
        where: dict[str, list[tuple[int, int]]] = {}  # symbol -> axes

        def name(match: re.Match, symbols: dict = symbols, where: dict = where) -> str:
            place = tuple(ast.literal_eval(k) for k in re.findall(r"\[([^\]]+)\]", match[1]))
            tensor, axis = places[place], int(match[2])
            size = shapes[tensor][axis]
            where.setdefault(str(size), []).append((order[tensor], axis))
            return next((v for v, s in symbols.items() if str(s) == str(size)), None) or add(symbols, size)

        formula = SIZE.sub(name, text)
        broken = breaking(formula, symbols) if PLAIN.fullmatch(formula) else {str(v) for v in symbols.values()}
        held.update(axis for size, axes in where.items() if size in broken for axis in axes)
    return held


def add(symbols: dict[str, Any], size: Any) -> str:
    name = f"v{len(symbols)}"
    symbols[name] = size
    return name


def breaking(formula: str, symbols: dict[str, Any]) -> set[str]:
    """The free sizes that break the condition when they alone become larger."""
    hints = {v: s if isinstance(s, int) else s.node.hint for v, s in symbols.items()}

    def holds(case: dict[str, int]) -> bool:
        return bool(eval(formula, {"__builtins__": {}, "max": max, "min": min}, case))

    changed = [
        (v, hints | {v: hints[v] + more}) for v, s in symbols.items() if not isinstance(s, int) for more in PROBES
    ]
    return {str(symbols[v]) for v, case in changed if not holds(case)}

"""The Python side of a model, and what its forwards reach outside of it, put back after a capture."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .guard import MISSING, has_storage, put
from .surroundings import Surroundings, foreign

DEPTH = 4  # of containers and objects in a module's attributes
PLAIN = (str, int, float, type(None), type)


class State:
    """The Python side of a model: attributes, what containers and objects in them hold, and tensors that are no buffers; and
    names, attributes of classes and containers outside of it that its forwards reach."""

    def __init__(self, model: nn.Module) -> None:
        self.objects: list[tuple[Any, dict]] = []
        self.containers: list[tuple[Any, Any]] = []
        self.tensors: list[tuple[torch.Tensor, tuple, torch.Tensor]] = []  # with their strides and offset, and a copy
        self.memory = [
            (t, t.detach()) for t in (*model.parameters(), *model.buffers())
        ]  # which `t.data = ...` replaces
        self.seen: set[int] = set()
        for m in model.modules():
            self.seen.add(id(m))
            self.objects.append((m, dict(vars(m))))
        for m in model.modules():
            for v in vars(m).values():
                self.visit(v, DEPTH)
        around = Surroundings(owner for owner, _ in self.objects)
        inside = len(self.tensors)
        for v in (*around.containers.values(), *around.objects.values()):
            self.visit(v, DEPTH)
        del self.tensors[inside:]  # which may be large; `Writes` notes what is written
        self.names = [(p, n, named(p, n)) for p, n in around.names.values()]
        self.cells = [(c, c.cell_contents) for c in around.cells.values()]

    def visit(self, value: Any, depth: int) -> None:
        if isinstance(value, PLAIN) or id(value) in self.seen or depth == 0:
            return
        self.seen.add(id(value))
        if isinstance(value, torch.Tensor):
            if not isinstance(value, nn.Parameter) and has_storage(value) and value.device.type != "meta":
                self.tensors.append((value, geometry(value), value.detach().clone()))
        elif isinstance(value, dict | list | set | deque | tuple):
            if not isinstance(value, tuple):
                self.containers.append((value, contents(value)))
            for v in list(dict.values(value) if isinstance(value, dict) else value):
                self.visit(v, depth - 1)
        elif isinstance(getattr(value, "__dict__", None), dict) and not (callable(value) and foreign(type(value))):
            self.objects.append((value, dict(vars(value))))
            for v in vars(value).copy().values():
                self.visit(v, depth - 1)

    def changed(self) -> bool:
        """Whether an attribute or container has other contents; what torch.fx hangs on the root is not counted."""
        for owner, before in self.objects:
            now = {k: v for k, v in vars(owner).items() if not k.startswith("_tensor_constant")}
            if now.keys() != before.keys() or any(now[k] is not v for k, v in before.items() if k != "training"):
                return True
        if any(named(p, n) is not before for p, n, before in self.names):
            return True
        return any(differs(now, before) for now, before in self.containers)

    def restore(self) -> None:
        for owner, attributes in self.objects:
            now = vars(owner)
            for name in now.keys() - attributes.keys():
                del now[name]
            now.update(
                {k: v for k, v in attributes.items() if now.get(k, MISSING) is not v}
            )  # others may read meanwhile
        for container, content in self.containers:
            if differs(container, content):
                refill(container, content)
        for place, name, before in self.names:
            if named(place, name) is not before:
                put(place, name, before)
        for cell, content in self.cells:
            if cell.cell_contents is not content:
                cell.cell_contents = content
        for t, own in self.memory:
            if has_storage(t) and t.untyped_storage()._cdata != own.untyped_storage()._cdata:
                t.data = own
        for t, place, before in self.tensors:
            if geometry(t) != place:  # as `t_` leaves it
                t.data = t.data.as_strided(*place)
            if not same_bytes(t, before):
                t.data.copy_(before)


def named(place: Any, name: str) -> Any:
    return (place if isinstance(place, dict) else vars(place)).get(name, MISSING)


def geometry(t: torch.Tensor) -> tuple[Any, ...]:
    """Shape, strides and offset."""
    return t.shape, t.stride(), t.storage_offset()


# Containers of classes that inherit from Python's are read and filled as those: their own methods may do anything.


KINDS = (OrderedDict, dict, set, list, deque)


def plain(container: Any) -> Any:
    kind = type(container)
    return kind if kind in KINDS else next(k for k in KINDS if isinstance(container, k))


def contents(container: Any) -> Any:
    if type(container) in (dict, set, list):  # most are: modules have a dozen of each
        return container.copy()
    keys = plain(container).__iter__(container)
    if isinstance(container, dict):
        return {k: dict.__getitem__(container, k) for k in keys}
    return set(keys) if isinstance(container, set) else list(keys)


def refill(container: Any, content: Any) -> None:
    kind = plain(container)
    kind.clear(container)
    if isinstance(content, dict):
        for k, v in content.items():
            kind.__setitem__(container, k, v)
    else:
        (kind.update if kind is set else kind.extend)(container, content)


def differs(container: Any, before: Any) -> bool:
    """Other objects, not only other values: comparing tensors would give no truth."""
    now = contents(container)
    if isinstance(now, dict):
        return list(now) != list(before) or any(now[k] is not v for k, v in before.items())
    if isinstance(now, set):
        return now != before
    return len(now) != len(before) or any(a is not b for a, b in zip(now, before, strict=True))


def same_bytes(t: torch.Tensor, before: torch.Tensor) -> bool:
    return t.shape == before.shape and bool(((t == before) | ((t != t) & (before != before))).all())


@contextmanager
def untouched(model: nn.Module) -> Iterator[State]:
    """Put back what tracing, mode switches and the forward change in the model."""
    state = State(model)
    try:
        yield state
    finally:
        state.restore()

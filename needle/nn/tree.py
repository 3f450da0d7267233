"""Modules that hold others by their paths alone, as converted and loaded models have them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .containers import Sequential
from .module import STRUCTURE, Module, expose

__all__ = ["Numbered", "Tree", "set_submodule"]


class Numbered(Module):
    """Base: a node whose children, where they are named "0", "1", ..., are indexed as those of the list that they were."""

    container = True

    def numbers(self) -> list[str]:
        names = [name for name, _ in self.named_children()]
        numbers = [str(i) for i in range(len(names))]
        if not names or set(names) != set(numbers):
            got = ", ".join(names[:4]) or "none"
            raise TypeError(f"[{type(self).__name__}] expects modules named 0, 1, ... to be indexed, got {got}.")
        return numbers

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        return len(self.numbers())

    def __iter__(self) -> Iterator[Module]:
        return (getattr(self, name) for name in self.numbers())

    def __getitem__(self, place: int | slice) -> Any:
        found = self.numbers()[place]
        if isinstance(found, list):
            return Sequential(*(getattr(self, name) for name in found))
        return getattr(self, found)

    def __setitem__(self, place: int, module: Module) -> None:
        setattr(self, self.numbers()[place], module)


class Tree(Numbered):
    """A node of a submodule tree that has no forward of its own."""


def set_submodule(root: Module, path: str, module: Module) -> None:
    """Put `module` at `path` below `root`, making Tree nodes on the way."""
    *parents, last = path.split(".")
    for part in parents:
        child = root.__dict__.get(part)
        if child is None:
            child = Tree()
            expose(root, part)
            root.__dict__[part] = child
        root = child
    expose(root, last)
    root.__dict__[last] = module
    STRUCTURE.changed(module)

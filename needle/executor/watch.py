"""What a compiled model was made of, so that an executable sees when it is another one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from needle.nn.module import HOOKS, Module

PLAIN = (int, float, complex, str, bytes, bool, type(None))


def saved(value: Any) -> Any:
    """A value with its lists and dicts copied."""
    if isinstance(value, list | tuple):
        return tuple(map(saved, value))
    return {k: saved(v) for k, v in value.items()} if isinstance(value, dict) else value


def same(now: Any, then: Any) -> bool:
    """Whether a value is what `saved` was made from: the same objects, or equal numbers and strings."""
    if now is then:
        return True
    if isinstance(now, list | tuple) and isinstance(then, tuple):
        return len(now) == len(then) and all(map(same, now, then))
    if isinstance(now, dict) and isinstance(then, dict):
        return now.keys() == then.keys() and all(same(v, then[k]) for k, v in now.items())
    return type(now) is type(then) and isinstance(now, PLAIN) and now == then


def containers(value: Any) -> Iterator[list | dict]:
    """The lists and dicts of modules and tensors in a member's value; writes to them call no method of the module."""
    if isinstance(value, list | dict):
        yield value
    if isinstance(value, list | tuple | dict):
        for v in value.values() if isinstance(value, dict) else value:
            yield from containers(v)


class Watch:
    """Modules, and all below them, with their members and attributes."""

    def __init__(self, modules: Iterable[Module]) -> None:
        found = {id(m): m for module in modules for _, m in module.named_modules()}
        self.state = [(m, self.attributes(m)) for m in found.values()]
        lists = [c for m, _ in self.state for name, v in m.__dict__.items() if m.is_seen(name) for c in containers(v)]
        plain = [all(isinstance(v, Module) for v in (c.values() if isinstance(c, dict) else c)) for c in lists]
        self.lists = [(c, c.copy()) for c, p in zip(lists, plain, strict=True) if p]
        self.of_tensors = [(c, saved(c)) for c, p in zip(lists, plain, strict=True) if not p]
        for m, _ in self.state:
            m.__dict__["_watched"] = True

    @staticmethod
    def attributes(module: Module) -> dict[str, Any]:
        return {name: saved(v) for name, v in module.__dict__.items() if module.is_seen(name) or name in HOOKS}

    def holds(self) -> bool:
        """Whether everything is as it was."""
        return all(same(self.attributes(m), then) for m, then in self.state)

    def lists_hold(self) -> bool:
        """`holds` for what no assignment tells of."""
        try:
            for now, then in self.lists:
                if now != then:  # by identity where nothing changed
                    return False
        except (TypeError, ValueError, RuntimeError):  # tensors compare element by element
            return False
        return all(same(now, then) for now, then in self.of_tensors)

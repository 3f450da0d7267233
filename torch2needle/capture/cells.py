"""Values of captured nodes, with torch's aliasing: what an in-place write changes for later readers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from needle.autograd import Unsupported


def with_item(values: Any, index: int, item: Any) -> Any:
    """A tuple or list with another item in a place."""
    items = list(values)
    items[index] = item
    return values._make(items) if hasattr(values, "_make") else type(values)(items)


class Cell:
    """One storage, or a view of another.

    view: computes this value from that of `base`; None where torch may have copied.
    put: computes the base's value from it and this value, after a write through this view; None where that is not known.
    owner: what the storage belongs to, if the forward did not make it.
    alike: torch may have given the tensor of `base` itself instead of another one over its memory.
    """

    def __init__(
        self,
        value: Any,
        base: Cell | None = None,
        view: Callable[[Any], Any] | None = None,
        put: Callable[[Any, Any], Any] | None = None,
        owner: str = "",
        alike: bool = False,
    ) -> None:
        self.known, self.base, self.view, self.put, self.owner, self.alike = value, base, view, put, owner, alike
        self.outdated = False  # the base was written since; its readers alone compute it again
        self.views: list[Cell] = []
        self.items: dict[Any, Cell] = {}  # the values that a tuple or list holds, once they were asked for
        self.stale = ""
        if base is not None:
            base.views.append(self)

    @property
    def value(self) -> Any:
        if self.outdated and not self.stale:
            self.known = self.view(self.base.value)  # type: ignore[misc, union-attr]
            self.outdated = False
        return self.known

    @value.setter
    def value(self, value: Any) -> None:
        self.known, self.outdated = value, False

    def read(self) -> Any:
        if self.stale:
            raise Unsupported(self.stale)
        value = self.value
        for i, item in self.items.items():
            if item.base is not self:  # a cell of its own: after a new shape, that of the same tensor under every name
                value = with_item(value, i, item.read())
        return value

    def root(self) -> Cell:
        return self if self.base is None else self.base.root()

    def is_one_tensor(self) -> bool:
        """No other cell may stand for the same tensor: a new shape of it is seen here alone."""
        return not self.alike and not any(child.alike for child in self.views)

    def write(self, value: Any, where: str) -> None:
        """Replace the value; the storage and its views follow where they can be computed again, else they go stale."""
        self.value = value
        for child in self.views:
            child.follow(where)
        if self.base is not None:
            self.base.receive(self, where)

    def receive(self, child: Cell, where: str) -> None:
        """A view of this value was written."""
        if child.put is None or self.stale:
            text = f"it reads a value that {where} changed in place through a view; write that step out of place"
            self.root().mark(text, but=child)
            return
        self.value = child.put(self.value, child.value)
        for sibling in self.views:
            if sibling is not child:
                sibling.follow(where)
        if self.base is not None:
            self.base.receive(self, where)

    def follow(self, where: str) -> None:
        if self.stale or self.outdated:  # as its views are, which were made of its value
            return
        if self.view is None:
            text = (
                f"it reads a reshape taken before {where} changed the value in place, which may or may not share memory"
            )
            self.mark(text)
            return
        self.outdated = True
        for child in self.views:
            child.follow(where)

    def mark(self, text: str, but: Cell | None = None) -> None:
        """This value and its views cannot be known any more, except `but` and its views."""
        if self is but:
            return
        self.stale = self.stale or text
        for child in self.views:
            child.mark(text, but)

"""Values of captured nodes, with torch's aliasing: what an in-place write changes for later readers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from needle.autograd import Unsupported


class Cell:
    """One storage, or a view of another. `view` computes this value from `base`'s; None where torch may have copied."""

    def __init__(self, value: Any, base: Cell | None = None, view: Callable[[Any], Any] | None = None) -> None:
        self.value, self.base, self.view = value, base, view
        self.views: list[Cell] = []
        self.stale = ""
        if base is not None:
            base.views.append(self)

    def read(self) -> Any:
        if self.stale:
            raise Unsupported(self.stale)
        return self.value

    def write(self, value: Any, where: str) -> None:
        """Replace the value; views follow where they can be computed again, everything else in the storage goes stale."""
        self.value = value
        cell = self
        while cell.base is not None:
            text = f"it reads a value that {where} changed in place through a view; write that step out of place"
            cell.base.stale = text
            for sibling in cell.base.views:
                if sibling is not cell:
                    sibling.mark(text)
            cell = cell.base
        for child in self.views:
            child.follow(where)

    def follow(self, where: str) -> None:
        if self.stale:
            return
        if self.view is None:
            self.mark(
                f"it reads a reshape taken before {where} changed the value in place, which may or may not share memory"
            )
            return
        self.value = self.view(self.base.value)  # type: ignore[union-attr]
        for child in self.views:
            child.follow(where)

    def mark(self, text: str) -> None:
        self.stale = text
        for child in self.views:
            child.mark(text)

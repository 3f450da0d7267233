"""What `compile` is told, and what a plan notes of the choices that it made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

# What `compile(precision=...)` lets products compute in, with the numbers that kernels know them by.
PRECISIONS = {"float32": 0, "tf32": 1, "float16": 2, "bfloat16": 3}
WORDS = {"winograd": ("auto", "f2", "off"), "memory": ("normal", "low"), "precision": tuple(PRECISIONS)}


class Choice(NamedTuple):
    """The settings of a plan: one of WORDS each, and whether times are measured."""

    winograd: str = "auto"
    memory: str = "normal"
    tune: bool = False
    precision: str = "float32"
    disable: tuple[str, ...] = ()  # names of the target's rules
    max_plans: int | None = None  # that are kept

    def check(self) -> Choice:
        for name, known in WORDS.items():
            value = getattr(self, name)
            if value not in known:
                raise ValueError(f"[compile] {name} expects one of {', '.join(known)}, got {value!r}.")
        if self.max_plans is not None and not (isinstance(self.max_plans, int) and self.max_plans > 0):
            raise ValueError(f"[compile] max_plans expects a number of at least 1 or None, got {self.max_plans!r}.")
        return self


DEFAULT = Choice()

Measured = Callable[[str], Mapping[str, float]]  # from a layer to seconds by algorithm


def unmeasured(layer: str) -> Mapping[str, float]:
    return {}


class Option(NamedTuple):
    """A layer for which there was a choice of algorithms, and what was taken."""

    step: int
    form: str  # the layer's name with {} for its sizes
    sizes: tuple[int, ...]
    candidates: tuple[str, ...]
    taken: str

    @property
    def layer(self) -> str:
        return self.form.format(*self.sizes)

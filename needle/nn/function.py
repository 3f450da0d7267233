"""Layers that are declared: their fields, and often the one function of `needle.ops` that they are."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar

from needle.autograd import Tensor

from .module import OWN, Module

if TYPE_CHECKING:
    from typing import dataclass_transform
else:

    def dataclass_transform(**_: Any) -> Callable[[type], type]:
        """What tells type checkers that constructors take the fields; Python 3.10 has it not."""
        return lambda cls: cls


@dataclass_transform(eq_default=False)
class Declared(Module):
    """A layer without tensors whose class lists its fields, which the constructor takes in that order.

    A class that is one function, of needle.ops mostly, names it in its statement.
    """

    names: ClassVar[tuple[str, ...]] = ()  # of the fields
    function: ClassVar[Any]

    def __init_subclass__(cls, function: Callable[..., Tensor] | None = None, **kwargs: Any) -> None:
        if function is not None:
            cls.function = staticmethod(function)
            cls.__doc__ = cls.__doc__ or f"See ops.{function.__name__}."
        if inspect.get_annotations(cls) and cls.__module__.startswith(OWN):
            made: Any = dataclasses.dataclass(eq=False, repr=False)(cls)
            cls.names = tuple(f.name for f in dataclasses.fields(made))
        super().__init_subclass__(**kwargs)

    def __post_init__(self) -> None:
        """Where a subclass checks fields that depend on each other."""
        super().__init__()

    def values(self) -> list[Any]:
        """Of the fields."""
        return [getattr(self, name) for name in self.names]


class Function(Declared):
    """A layer that is one `function` of x and of the fields."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "names" in vars(cls) and "forward" not in vars(cls):
            cls.forward = call_with(*cls.names)  # type: ignore[method-assign,assignment]

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def call_with(name: str, *others: str) -> Callable[[Any, Tensor], Tensor]:
    """A `forward` that looks up its fields as fast as one that spells them out."""
    fields = attrgetter(name, *others)
    if others:
        return lambda self, x: self.function(x, *fields(self))
    return lambda self, x: self.function(x, fields(self))

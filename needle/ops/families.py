"""How op classes of one family are made, and what ops say of themselves in one line."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

from needle.autograd import Op, Tensor, op, tensor_method

T = TypeVar("T", bound=Op)


def family(cls: type[T]) -> type[T]:
    """Class decorator of a base of ops: its attributes are those of its ops."""
    return dataclasses.dataclass(frozen=True, eq=False)(cls)


def op_class(module: str, name: str, base: type[Op], doc: str, **facts: Any) -> Any:
    """An op made of what tells it from the others of its family."""
    return op(type(name, (base,), {"__module__": module, "__doc__": doc, **facts}))


def named(f: Callable[..., Tensor], name: str, doc: str | None) -> Callable[..., Tensor]:
    """A public function that was made with others of its family."""
    f.__name__, f.__doc__ = name, doc
    return f


def unary(cls: type[Op], name: str) -> Callable[[Tensor], Tensor]:
    """The public function `name` of an op of one tensor without attributes."""

    def function(a: Tensor) -> Tensor:
        return cls()(a)

    function.__module__ = cls.__module__
    return named(function, name, cls.__doc__)


def function_of(cls: type[Op], name: str, *methods: str) -> Callable[[Tensor], Tensor]:
    """As `unary`, and methods of Tensor, by default of its name."""
    return tensor_method(*methods or (name,))(unary(cls, name))


def samples_of(*cases: tuple[dict[str, Any], list]) -> Any:
    """For `samples = samples_of(...)` in an op: pairs of attributes and inputs' shapes, Specs where dtypes matter."""
    return staticmethod(lambda: list(cases))


def no_gradient(self: Op, out_grad: Any, node: Any) -> tuple[None, ...]:
    """For `gradient = no_gradient` in an op whose result steps or is no float."""
    return (None,) * len(node.inputs)

"""Numbers that Python makes of tensors and of free sizes: `float(t)`, `int(n / 2)`, `math.log(n)`.

Python wants plain numbers of these functions, so that in modules that call them others stand in their place for a while,
which leave tensors and sizes what they are.
"""

from __future__ import annotations

import linecache
import math
import operator
import os
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from math import trunc
from types import FrameType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from .guard import has_storage, patched


def caller(depth: int = 1) -> FrameType:
    """The frame that calls the one that asks, what stands in for Python's functions left out."""
    frame = sys._getframe(depth + 1)
    while frame.f_code.co_filename == __file__:
        frame = frame.f_back  # type: ignore[assignment]
    return frame


class Answer(NamedTuple):
    place: tuple[str, str, int]  # the method, and the file and line of its caller
    value: Any

    @classmethod
    def at(cls, name: str, frame: FrameType, value: Any) -> Answer:
        return cls((name, frame.f_code.co_filename, frame.f_lineno), value)

    @property
    def text(self) -> str:
        """The user's line."""
        _, path, number = self.place
        return f"{linecache.getline(path, number).strip()} ({os.path.basename(path)}:{number})"


class Real(float):
    """A number of a tensor in the run that notes what is asked: what it is compared with, or made whole for, is asked, too."""

    note: Callable[[Answer], None]

    @classmethod
    def of(cls, value: float, note: Callable[[Answer], None]) -> Real:
        made = cls(value)
        made.note = note
        return made


def asking(name: str, as_name: str) -> Callable:
    """A method of Real whose result is an answer of the caller's line."""

    def ask(self: Real, *other: Any) -> Any:
        value = getattr(float, name)(self, *other)
        if value is not NotImplemented:
            self.note(Answer.at(as_name, caller(), value))
        return value

    return ask


def carrying(name: str) -> Callable:
    def compute(self: Real, *other: Any) -> Any:
        value = getattr(float, name)(self, *other)
        return Real.of(value, self.note) if isinstance(value, float) else value

    return compute


for method in ("lt", "le", "gt", "ge", "eq", "ne", "bool"):
    setattr(Real, f"__{method}__", asking(f"__{method}__", "__bool__"))
for method in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    for side in ("", "r"):
        setattr(Real, f"__{side}{method}__", carrying(f"__{side}{method}__"))
for method in ("neg", "pos", "abs"):
    setattr(Real, f"__{method}__", carrying(f"__{method}__"))
Real.__int__ = asking("__int__", "__int__")  # type: ignore[method-assign]
Real.__hash__ = float.__hash__  # type: ignore[method-assign]


# -- what stands in for Python's functions ---------------------------------------------------------------------------------

SIZES = (torch.SymInt, torch.SymFloat)
OPEN = (torch.Tensor, Real, fx.Proxy, *SIZES)  # what has no number that stays the same
OF_SIZES: dict[Callable, Callable] = {torch.sqrt: lambda n: n**0.5, torch.pow: operator.pow}  # which stay sizes
REALS = ("atan2", "cos", "exp", "expm1", "hypot", "log1p", "log2", "log10", "pow", "sin", "sqrt", "tan", "tanh")
WHOLES = ("ceil", "floor", "trunc")
TRUTHS = ("isfinite", "isinf", "isnan")


def of_proxy(value: Any, kind: type, target: Callable, *more: Any) -> Any:
    """`kind(value)` in a graph of torch.fx, where `target` makes it of a size."""
    if value.kind() is kind:
        return value
    size = value.kind() in (int, float)
    return value.tracer.create_proxy("call_function", target, (value, *more), {}) if size else kind(value)


def real(value: Any) -> Any:
    """`float(value)` of what is open; in a capture a tensor without a gradient."""
    if isinstance(value, fx.Proxy):
        return of_proxy(value, float, operator.truediv, 1)
    if isinstance(value, torch.Tensor):
        value = value if value.is_floating_point() else value.to(torch.get_default_dtype())
        return value.item() if has_storage(value) else value.detach().reshape(())
    return torch.sym_float(value) if isinstance(value, torch.SymInt) else value


def whole(value: Any) -> Any:
    if isinstance(value, fx.Proxy):
        return of_proxy(value, int, trunc)  # math's own, which torch.fx replaces while it traces
    if isinstance(value, torch.SymInt):
        return value
    return torch.sym_int(value) if isinstance(value, torch.SymFloat) else int(value)


class StandsIn(type):
    """The metaclass of a class of numbers that passes for the one that it inherits from."""

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, cls.__base__)  # type: ignore[arg-type]

    def __subclasscheck__(cls, other: Any) -> bool:
        return issubclass(other, cls.__base__)  # type: ignore[arg-type]

    def __eq__(cls, other: Any) -> bool:
        return other is cls.__base__ or other is cls

    def __hash__(cls) -> int:
        return hash(cls.__base__)


class Float(float, metaclass=StandsIn):
    def __new__(cls, *args: Any) -> Any:
        return real(args[0]) if args and isinstance(args[0], OPEN) else float(*args)


class Int(int, metaclass=StandsIn):
    def __new__(cls, *args: Any, **base: Any) -> Any:
        return whole(args[0]) if len(args) == 1 and isinstance(args[0], OPEN) else int(*args, **base)


def open_in(places: Iterable[dict[str, Any]]) -> AbstractContextManager:
    """`int(n)` and `float(n)` of torch.fx's proxies of sizes stay proxies in functions of these globals."""
    return patched([(place, n, BUILTINS[n]) for place in places for n in ("int", "float") if n not in place])


def itself(value: Any) -> Any:
    return value


def taking_open(before: Callable, of_tensors: Callable, kind: Callable = itself) -> Callable:
    """A function of Python's that takes open numbers, too, of which it makes a tensor in a capture; kind: what it asks of its
    result, which is a question about values."""

    def call(x: Any, *more: Any) -> Any:
        args = (x, *more)
        if not any(isinstance(a, OPEN) for a in args):
            return before(*args)
        numbers = [real(a) for a in args]
        if noted := [n for n in numbers if isinstance(n, Real)]:
            return kind(Real.of(float(before(*numbers)), noted[0].note))
        if any(isinstance(n, torch.Tensor) for n in numbers):
            return kind(of_tensors(*map(as_tensor, numbers)))
        if kind is not itself:
            return before(*args)
        return OF_SIZES.get(of_tensors, lambda *n: of_tensors(*map(as_tensor, n)))(*numbers)

    return call


def as_tensor(number: Any) -> torch.Tensor:
    return number if isinstance(number, torch.Tensor) else torch.scalar_tensor(number)


def round_open(number: Any, ndigits: int | None = None) -> Any:
    if ndigits is None:
        return taking_open(round, torch.round, int)(number)
    return taking_open(lambda x: round(x, ndigits), lambda x: torch.round(x, decimals=ndigits))(number)


def length(value: Any) -> Any:
    return value.shape[0] if isinstance(value, torch.Tensor) and value.ndim else len(value)


MATH: dict[str, Callable] = {
    **{n: taking_open(getattr(math, n), getattr(torch, n)) for n in REALS},
    **{n: taking_open(getattr(math, n), getattr(torch, n), int) for n in WHOLES},
    **{n: taking_open(getattr(math, n), getattr(torch, n), bool) for n in TRUTHS},
    "isqrt": lambda n: torch.sym_int(n**0.5) if isinstance(n, torch.SymInt) else math.isqrt(n),
    "log": taking_open(math.log, lambda x, *base: x.log() / (base[0].log() if base else 1.0)),
}
BUILTINS = {"float": Float, "int": Int, "len": length, "round": round_open}
NAMES = {*BUILTINS, *MATH}
MODULE = ModuleType("math")
vars(MODULE).update(vars(math) | MATH)


def text_of(before: Callable) -> Callable:
    """`f"{float(t):.2f}"` in a capture, where there is no number."""

    def text(self: torch.Tensor, form: str) -> str:
        return format(math.nan, form) if isinstance(self, FakeTensor) and not self.ndim else before(self, form)

    return text


class Scopes:
    """The names of modules, not torch's, whose code makes plain numbers of tensors or of free sizes."""

    def __init__(self) -> None:
        self.found: dict[int, dict[str, Any]] = {}

    def add(self, frame: FrameType) -> None:
        torchs = str(frame.f_globals.get("__name__", "")).startswith(("torch.", "sympy."))
        if not torchs and NAMES.intersection(frame.f_code.co_names):
            self.found[id(frame.f_globals)] = frame.f_globals

    def watched(self) -> AbstractContextManager:
        """Finds those that make numbers of sizes."""
        thread = threading.get_ident()

        def watch(before: Callable) -> Callable:
            def make(self_: Any) -> Any:
                if threading.get_ident() == thread:
                    self.add(sys._getframe(1))
                return before(self_)

            return make

        names = [(c, n) for c in SIZES for n in ("__int__", "__float__", "__index__") if hasattr(c, n)]
        return patched([(c, n, watch(getattr(c, n))) for c, n in names])

    def open(self) -> AbstractContextManager:
        """Tensors and sizes stay what they are in these modules."""
        if not self.found:
            return patched([])
        stand_ins = {id(math): MODULE} | {id(getattr(math, name)): f for name, f in MATH.items()}
        names: list[tuple] = [(torch.Tensor, "__format__", text_of(torch.Tensor.__format__))]
        for scope in self.found.values():
            names += [(scope, n, f) for n, f in BUILTINS.items() if n not in scope]
            names += [(scope, n, stand_ins[id(v)]) for n, v in scope.items() if id(v) in stand_ins]
        return patched(names)

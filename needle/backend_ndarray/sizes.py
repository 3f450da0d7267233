"""Sizes that are traced while a plan is made: what is computed from them is noted as a program, and what is decided by them as
a condition. For other sizes under which all conditions hold, planning would take the same way, and the program gives its numbers.

A traced number acts as its value. Whoever needs that itself, as an index, a key or a text, ties the trace to it: a condition as
well. So nothing that is planned from sizes is left unnoticed.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from . import forks

F = TypeVar("F", bound=Callable)
TRACES, COUNTING = 0, forks.fork_lock(forks.TRACES)  # that are open, in any thread
COMMUTES = (operator.add, operator.mul)


def cached(maxsize: int) -> Callable[[F], F]:
    """`lru_cache` for functions of sizes, which while some are traced compute; what `f.known` is looks up numbers alone."""

    def decorate(f: Any) -> Any:
        known = functools.lru_cache(maxsize)(f)

        @functools.wraps(f)
        def call(*args: Any) -> Any:
            return f(*args) if TRACES else known(*args)

        call.known = known  # type: ignore[attr-defined]
        return call

    return decorate


class Size:
    """A number that was computed from traced sizes: number `index` of the trace's program."""

    __slots__ = ("index", "trace", "value")
    # For `isinstance` it is the kind of number that it stands for; the core and numpy, which look at the type, ask __index__.
    __class__ = property(lambda self: type(self.value))  # type: ignore[assignment]

    def __init__(self, trace: Trace, index: int, value: Any) -> None:
        self.trace, self.index, self.value = trace, index, value

    def _tied(self) -> Any:
        self.trace.tie(self)
        return self.value

    def __index__(self) -> int:
        return operator.index(self._tied())

    def __int__(self) -> int:
        return int(self._tied())

    def __float__(self) -> float:
        return float(self._tied())

    def __hash__(self) -> int:
        return hash(self._tied())

    def __repr__(self) -> str:
        return repr(self._tied())

    def __str__(self) -> str:
        return str(self._tied())

    def __format__(self, form: str) -> str:
        return format(self._tied(), form)

    def __bool__(self) -> bool:
        return self.trace.decide(operator.ne, self, 0)

    def __round__(self, digits: int | None = None) -> Any:
        return round(self._tied(), digits)

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self


def _define() -> None:
    """Arithmetic, which is noted, and comparisons, which are decided."""

    def forward(f: Callable) -> Any:
        return lambda self, other: self.trace.apply(f, self, other)

    def backward(f: Callable) -> Any:
        return lambda self, other: self.trace.apply(f, other, self)

    def alone(f: Callable) -> Any:
        return lambda self: self.trace.apply(f, self)

    def compare(f: Callable) -> Any:
        return lambda self, other: self.trace.decide(f, self, other)

    for name in ("add", "sub", "mul", "floordiv", "truediv", "mod", "pow", "and_", "or_", "xor", "lshift", "rshift"):
        f, word = getattr(operator, name), name.rstrip("_")
        setattr(Size, f"__{word}__", forward(f))
        setattr(Size, f"__r{word}__", backward(f))
    for name in ("neg", "pos", "abs", "invert"):
        setattr(Size, f"__{name}__", alone(getattr(operator, name)))
    for name in ("floor", "ceil", "trunc"):
        setattr(Size, f"__{name}__", alone(getattr(math, name)))
    for name in ("eq", "ne", "lt", "le", "gt", "ge"):
        setattr(Size, f"__{name}__", compare(getattr(operator, name)))


_define()
NUMBERS = (int, float)  # of which exactly traced ones are computed
NEUTRAL = {operator.add: 0, operator.sub: 0, operator.mul: 1, operator.floordiv: 1}  # on the right of whole numbers


class Trace:
    """What is computed from some sizes, and on what conditions.

    values: of every number, the sizes first; program: (function, operands) of those that are computed
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.values: list[Any] = []
        self.program: list[tuple[int, Callable, tuple[int, ...]]] = []
        self.conditions: dict[tuple[Callable, int, int], bool] = {}
        self.tied: set[int] = set()
        self._known: dict[Any, Size] = {}
        self.is_open = False
        self.sizes = [self._new(n) for n in sizes]

    def __enter__(self) -> Trace:
        global TRACES
        with COUNTING:
            TRACES += 1
        self.is_open = True
        return self

    def __exit__(self, *_: Any) -> None:
        """From now on traced numbers are numbers."""
        global TRACES
        with COUNTING:
            TRACES -= 1
        self.is_open = False
        self._known.clear()

    def _new(self, value: Any) -> Size:
        self.values.append(value)
        return Size(self, len(self.values) - 1, value)

    def number(self, x: Any) -> Size | None:
        """An operand as a number of the program, None for what is none."""
        if type(x) is Size:
            return x if x.trace is self else None
        if type(x) is bool:
            x = int(x)
        if type(x) not in NUMBERS:
            return None
        key = (type(x), x, math.copysign(1, x))  # -0.0 is another number than 0.0
        if key not in self._known:
            self._known[key] = self._new(x)
        return self._known[key]

    def apply(self, f: Callable, *operands: Any) -> Any:
        if not self.is_open:
            return f(*map(plain, operands))
        numbers = [self.number(x) for x in operands]
        if any(n is None for n in numbers):
            return NotImplemented if all(type(x) is not Size for x in operands[1:]) else f(*map(number_of, operands))
        if f in NEUTRAL and type(operands[1]) is int and operands[1] == NEUTRAL[f] and type(numbers[0].value) is int:  # type: ignore[union-attr]
            return operands[0]
        if f in COMMUTES:
            numbers.sort(key=lambda n: n.index)  # type: ignore[union-attr]
        places = tuple(n.index for n in numbers)  # type: ignore[union-attr]
        key = (f, places)
        if key not in self._known:
            made = self._known[key] = self._new(f(*(self.values[i] for i in places)))
            self.program.append((made.index, f, places))
        return self._known[key]

    def decide(self, f: Callable, a: Any, b: Any) -> Any:
        if not self.is_open:
            return f(plain(a), plain(b))
        x, y = self.number(a), self.number(b)
        if x is None or y is None:
            return NotImplemented
        found = bool(f(x.value, y.value))
        if x is not y and x.index != y.index:
            self.conditions[f, x.index, y.index] = found
        return found

    def tie(self, number: Size) -> None:
        if self.is_open:
            self.tied.add(number.index)

    def ask(self, f: Callable[[], int]) -> Size:
        """A number that planning asks for besides sizes; it is asked for again."""
        made = self._new(f())
        self.program.append((made.index, f, ()))
        return made

    def at(self, sizes: Sequence[int]) -> list[Any] | None:
        """All numbers for other sizes; None where planning would go another way."""
        values = self.values.copy()
        values[: len(sizes)] = sizes
        try:
            for place, f, operands in self.program:
                values[place] = f(*[values[i] for i in operands])
            if any(f(values[i], values[j]) is not found for (f, i, j), found in self.conditions.items()):
                return None
        except (ArithmeticError, ValueError):  # a number that planning would come to behind a condition
            return None
        return None if any(values[i] != self.values[i] for i in self.tied) else values


def map_sizes(value: Any, f: Callable[[Size], Any]) -> Any:
    """`value` with `f` applied to every traced number in its nested tuples, lists, dicts, slices and ops."""
    kind = type(value)
    if kind is Size:
        return f(value)
    if isinstance(value, tuple | list):
        items = [map_sizes(v, f) for v in value]
        return kind(*items) if hasattr(value, "_fields") else kind(items)
    if isinstance(value, dict):
        return {k: map_sizes(v, f) for k, v in value.items()}
    if kind is slice:
        return slice(*(map_sizes(v, f) for v in (value.start, value.stop, value.step)))
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and has_sizes(value):
        return kind(**{k: map_sizes(v, f) for k, v in vars(value).items()})
    return value


def has_sizes(value: Any) -> bool:
    """Whether there is a traced number in nested tuples, lists, dicts, slices and ops."""
    if isinstance(value, tuple | list):
        return any(map(has_sizes, value))
    if isinstance(value, dict):
        return any(map(has_sizes, value.values()))
    if type(value) is slice:
        return any(map(has_sizes, (value.start, value.stop, value.step)))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return any(map(has_sizes, vars(value).values()))
    return type(value) is Size


def plain(x: Any) -> Any:
    """The value of a traced number."""
    return x.value if type(x) is Size else x


def number_of(x: Any) -> Any:
    return x._tied() if type(x) is Size else x


def whole(x: Any) -> Any:
    """int(x), traced."""
    if type(x) is not Size:
        return int(x)
    return x if type(x.value) is int else x.trace.apply(int, x)


def real(x: Any) -> Any:
    """float(x), traced."""
    return x.trace.apply(float, x) if type(x) is Size else float(x)


def chosen(f: Callable, *numbers: Any) -> Any:
    """f(*numbers), on the condition that it comes out as it does."""
    traced = next((n for n in numbers if type(n) is Size), None)
    if traced is None:
        return f(*numbers)
    made = traced.trace.apply(f, *numbers)
    return made._tied() if type(made) is Size else made


def larger(a: Any, b: Any) -> Any:
    """max(a, b), traced."""
    traced = a if type(a) is Size else b if type(b) is Size else None
    return max(a, b) if traced is None else traced.trace.apply(max, a, b)


def smaller(a: Any, b: Any) -> Any:
    """min(a, b), traced."""
    traced = a if type(a) is Size else b if type(b) is Size else None
    return min(a, b) if traced is None else traced.trace.apply(min, a, b)


def bounds(s: slice, size: Any) -> tuple[Any, Any, Any]:
    """s.indices(size), traced."""
    if not TRACES or type(s.step) is Size or all(type(x) is not Size for x in (size, s.start, s.stop)):
        return s.indices(size)
    step = 1 if s.step is None else operator.index(s.step)
    if step == 0:
        raise ValueError("slice step cannot be zero")
    low, high = (0, size) if step > 0 else (-1, size - 1)

    def inside(x: Any, default: Any) -> Any:
        if x is None:
            return default
        x = whole(x) if type(x) is Size else operator.index(x)
        x = x + size if x < 0 else x
        return smaller(larger(x, low), high) if step > 0 else low if x < low else high if x > high else x

    first, last = (low, high) if step > 0 else (high, low)
    return inside(s.start, first), inside(s.stop, last), step

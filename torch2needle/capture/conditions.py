"""What the branches of a forward ask of free sizes, in torch.export's guards: which are the example's, the limits of others."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import torch
from torch.export import ExportedProgram

from .structure import input_places

PROBES = 200  # sizes from the least on, and on both sides of the example's, that a condition is tried with
TOGETHER = 200  # ... of several sizes at a time, about
FEW = 4  # multiples that have to hold
MOST = 2**62  # what torch.export writes for no limit
SIZE = re.compile(r"L((?:\[[^\]]+\])+)\.size\(\)\[(\d+)\]")
NAMES: dict[str, Callable] = {f.__name__: f for f in (max, min, float, round, math.ceil, math.floor, math.trunc)}
PLAIN = re.compile(rf"(?:\b(?:{'|'.join(NAMES)}|and|or|not|v\d+)\b|[\d\s()+\-*/%<>=!,.])*")
LIBRARIES = re.compile(r"\b(?:math\.(?=ceil|floor|trunc)|torch\.sym_(?=float|max|min))")

Limits = dict[str, tuple[int, int]]  # the least and the largest size by symbol


class Condition(NamedTuple):
    """What a branch of the forward asks of free sizes; code: None where it cannot be read."""

    code: Any
    sizes: dict[str, int]  # the example's, by name in the code
    free: dict[str, str]  # the symbols of those that are free
    values: dict[str, list[int]]  # other sizes to try, in order

    def holds(self, sizes: dict[str, int]) -> bool:
        try:
            return eval(self.code, {"__builtins__": {}, **NAMES}, self.sizes | sizes)
        except ZeroDivisionError:  # of sizes that others are multiples of
            return False

    def alone(self) -> tuple[set[str], Limits]:
        """The symbols that break it when they alone take another value, and where there is a stretch of values that do not, its
        ends."""
        broken, limits = set(), {}
        for v, symbol in self.free.items():
            own = self.sizes[v]
            bad = [size for size in self.values[v] if not self.holds({v: size})]
            low = max((size for size in bad if size <= own), default=None)
            high = min((size for size in bad if size >= own), default=None)
            ends = [None if size is None else self.last_good(v, size) for size in (low, high)]
            if own in bad or ends == [own, own]:
                broken.add(symbol)
            elif bad:
                limits[symbol] = ends[0] or 0, MOST if ends[1] is None else ends[1]
        return broken, limits

    def step(self, v: str) -> int:
        """The number whose multiples hold where sizes between them do not, as of windows that fill a row; else 1."""
        good = [size for size in self.values[v] if self.holds({v: size})]
        step = math.gcd(*good) if len(good) >= FEW and self.sizes[v] in good else 1
        return step if all(size in good for size in self.values[v] if size >= good[0] and size % step == 0) else 1

    def tied(self, broken: set[str]) -> dict[str, str]:
        """Symbols that break it alone, each by the one of the example's same size with which they may take any, if they take it
        together: rows and as many numbers that pick from them; or all of one size, where two are not enough."""
        names = list(self.free)
        found = {}
        for i, v in enumerate(names):
            for w in names[:i]:
                sizes = set(self.values[v]) & set(self.values[w])
                if self.sizes[v] == self.sizes[w] and all(self.holds({v: size, w: size}) for size in sizes):
                    found[self.free[v]] = self.free[w]
        if broken - {*found, *found.values()}:
            for size in {self.sizes[v] for v in names}:
                group = [v for v in names if self.sizes[v] == size]
                shared = set.intersection(*(set(self.values[v]) for v in group))
                if len(group) > 2 and all(self.holds(dict.fromkeys(group, size)) for size in shared):
                    found |= {self.free[v]: self.free[group[0]] for v in group[1:]}
        return found

    def last_good(self, v: str, bad: int) -> int:
        """The size next to those that break it, on the way from the example's to one that does."""
        good = self.sizes[v]
        while abs(good - bad) > 1:
            middle = (good + bad) // 2
            good, bad = (middle, bad) if self.holds({v: middle}) else (good, middle)
        return good

    def together(self, limits: Limits, same: dict[str, str]) -> bool:
        """Whether it holds, too, when several take values within their limits, those that are the `same` the same ones."""
        values: dict[str, list[int]] = {}
        for v, symbol in self.free.items():
            low, high = limits.get(symbol, (0, MOST))
            own = [size for size in self.values[v] if low <= size <= high]
            one = first_of(symbol, same)
            values[one] = [size for size in own if size in values.get(one, own)]
        each = max(2, round(TOGETHER ** (1 / len(values))))  # however many sizes the condition names
        some = [found[:: max(1, len(found) // each)] for found in values.values()]
        for sizes in product(*some):
            taken = dict(zip(values, sizes, strict=True))
            if not self.holds({v: taken[first_of(symbol, same)] for v, symbol in self.free.items()}):
                return False
        return True


def asks_values_alone(e: Any) -> bool:
    """Whether torch.export ended at a condition on values in which no size is, so that other free sizes end there, too."""
    condition = getattr(e, "cond", None)
    symbols = () if condition is None else condition.free_symbols
    return type(e).__name__ == "GuardOnDataDependentSymNode" and not any(str(s).startswith("s") for s in symbols)


def input_shapes(program: ExportedProgram) -> dict[str, Any]:
    """The shapes of the inputs that are tensors, by their placeholders' names, in order."""
    names = input_places(program)
    given = (n for n in program.graph.nodes if n.op == "placeholder" and n.name in names)
    return {n.name: v.shape for n in given if isinstance(v := n.meta.get("val"), torch.Tensor)}


def fixed_sizes(program: ExportedProgram) -> set[tuple[int, int]]:
    """The sizes by (tensor, axis) that torch.export took for the example's."""
    return {
        (i, axis)
        for i, shape in enumerate(input_shapes(program).values())
        for axis, size in enumerate(shape)
        if isinstance(fixed_or_free(size), int)
    }


def first_of(symbol: str, same: dict[str, str]) -> str:
    """The one that stands for all sizes that are the same as this one."""
    while symbol in same:
        symbol = same[symbol]
    return symbol


class Bounds(NamedTuple):
    """What the forward's branches ask of the free sizes: those by (tensor, axis) that must be the example's, those that must
    be multiples of a number, the limits of those that are free, which of them, by symbol, have to be the same as another one, and
    the numbers of which they have to be multiples."""

    held: set[tuple[int, int]]
    stepping: set[tuple[int, int]]
    limits: Limits
    same: dict[str, str]
    steps: dict[str, int]


def bounds(program: ExportedProgram) -> Bounds:
    places = {p: n for n, p in input_places(program).items()}
    shapes = input_shapes(program)
    order = {name: i for i, name in enumerate(shapes)}
    where: dict[str, set[tuple[int, int]]] = {}  # the axes of a symbol

    def size_at(place: tuple, axis: int) -> Any:
        if place not in places:  # of *inputs, which the program calls inputs_0, inputs_1, ...
            place = (f"{place[0]}_{place[1]}", *place[2:])
        size = fixed_or_free(shapes[places[place]][axis])
        where.setdefault(str(size), set()).add((order[places[place]], axis))
        return size

    asked = [condition(text, size_at, program.range_constraints) for text in program._guards_code or ()]
    steps = multiples(asked)
    broken: set[str] = set()
    limits: Limits = {}
    same: dict[str, str] = {}
    for c in asked:
        held, found = c.alone() if c.code else (set(c.free.values()), {})
        if c.code and (held or found) and (tied := c.tied(held | found.keys())):
            for symbol, other in tied.items():
                one, two = first_of(symbol, same), first_of(other, same)
                same |= {one: two} if one != two else {}
            both = {*tied, *tied.values()}
            held, found = held - both, {s: ends for s, ends in found.items() if s not in both}
        broken |= held
        for s, (low, high) in found.items():
            least, most = limits.get(s, (0, MOST))
            limits[s] = max(low, least), min(high, most)
    broken |= {s for s, (low, high) in limits.items() if low == high}
    for c in asked:
        if c.code and len(c.free) > 1 and broken.isdisjoint(c.free.values()) and not c.together(limits, same):
            broken.update(c.free.values())
    for s in list(limits):  # of one, of all
        one = first_of(s, same)
        least, most = limits.get(one, (0, MOST))
        limits[one] = max(limits[s][0], least), min(limits[s][1], most)
    for s in list(steps):
        one = first_of(s, same)
        steps[one] = math.lcm(steps[s], steps.get(one, 1))
    tight = {s for s in where if first_of(s, same) in steps}
    fixed, stepping = ({axis for s in several for axis in where[s]} for several in (broken, tight))
    return Bounds(fixed, stepping, limits, same, steps)


def multiples(asked: list[Condition]) -> dict[str, int]:
    """By symbol the numbers of which sizes have to be multiples; the conditions are then tried with multiples alone."""
    steps: dict[str, int] = {}
    for c in asked:
        for v, symbol in c.free.items() if c.code else ():
            steps[symbol] = math.lcm(steps.get(symbol, 1), c.step(v))
    for c in asked:
        for v, symbol in c.free.items():
            if (step := steps.get(symbol, 1)) > 1:
                c.values[v] = [size for size in c.values[v] if size % step == 0]
    return {symbol: step for symbol, step in steps.items() if step > 1}


def fixed_or_free(size: Any) -> Any:
    """The number that a size is, where the forward fixed it: torch.export keeps that as a formula without symbols."""
    number = None if isinstance(size, int) else size.node.maybe_as_int()
    return size if number is None else number


def condition(text: str, size_at: Callable[[tuple, int], Any], ranges: Any) -> Condition:
    """One of torch.export's guards; size_at: the size of an axis of the tensor at a place among the inputs."""
    names: dict[str, str] = {}  # of symbols in the code
    sizes: dict[str, Any] = {}

    def name(match: re.Match) -> str:
        place = tuple(ast.literal_eval(k) for k in re.findall(r"\[([^\]]+)\]", match[1]))
        size = size_at(place, int(match[2]))
        sizes[names.setdefault(str(size), f"v{len(names)}")] = size
        return names[str(size)]

    formula = LIBRARIES.sub("", SIZE.sub(name, text))
    free = {v: str(s) for v, s in sizes.items() if not isinstance(s, int)}
    hints = {v: s if isinstance(s, int) else s.node.hint for v, s in sizes.items()}
    named = {int(n) + more for n in re.findall(r"\d+", re.sub(r"v\d+", "", formula)) for more in (-1, 0, 1)}
    values = {}
    for v in free:
        r = ranges.get(sizes[v].node.expr)
        low = 2 if r is None else max(2, int(r.lower))
        high = MOST if r is None or not r.upper.is_number or r.upper > MOST else int(r.upper)
        tried = {*range(low, min(high, low + PROBES)), *(hints[v] + i for i in range(-PROBES, PROBES)), *named}
        values[v] = sorted(size for size in tried if low <= size <= high)
    code = compile(formula, "condition", "eval") if PLAIN.fullmatch(formula) else None
    return Condition(code, hints, free, values)

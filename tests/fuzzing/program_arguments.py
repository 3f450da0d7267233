"""Arguments of torch calls for drawn programs: by a generator of their own, else by the names of the rule's parameters.

Everything drawn is plain data. A reference to an earlier value is ("v", number) or ("v", number, item), a constant of the
model ("c", dtype, shape, seed, kind), a dtype ("dtype", name), a slice ("slice", start, stop, step), a list ("list", ...).
"""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Callable
from typing import Any

import torch

FLOATS, INTEGERS = ("float32", "float64"), ("int32", "int64")
DTYPES = (*FLOATS, *INTEGERS, "bool")
SIZES = (0, 1, 1, 2, 2, 3, 3, 4, 5)
SCALARS = (0, 1, 2, 3, -1, -2, 7, 0.5, -1.5, 2.0, 0.0, 1.0, 0.3, True, False)
WHOLE, WHOLE_SCALARS = ("complex64", "complex64", "complex64", "complex128"), (1j, 2 - 1j, -0.5 + 0.25j, 3 + 0j)
RARE_SCALARS = (2**40 + 1, 2**53 + 1, -(2**62) - 1, 2**31, math.inf, -math.inf, math.nan, 1e10, 1e-10)


class State:
    """What has been drawn so far, with torch's values."""

    def __init__(self, rng: random.Random, make: Callable[..., torch.Tensor]) -> None:
        self.rng, self.make = rng, make
        self.inputs: list[tuple] = []
        self.values: list[Any] = []
        self.whole = False  # whether complex numbers are among what is drawn

    def tensors(self) -> list[tuple[Any, torch.Tensor]]:
        """Every tensor that a step may read, with its reference."""
        found: list[tuple[Any, torch.Tensor]] = []
        for i, v in enumerate(self.values):
            if isinstance(v, torch.Tensor):
                found.append((("v", i), v))
            elif isinstance(v, tuple | list):
                found += [(("v", i, j), t) for j, t in enumerate(v) if isinstance(t, torch.Tensor)]
        return found

    def chance(self, p: float) -> bool:
        return self.rng.random() < p

    def pick(self, fits: Callable[[torch.Tensor], bool] = lambda t: True) -> tuple[Any, torch.Tensor] | None:
        """A tensor that fits, rather a late one."""
        found = [pair for pair in self.tensors() if fits(pair[1])]
        return found[max(self.rng.randrange(len(found)), self.rng.randrange(len(found)))] if found else None

    def fresh(self, shape: tuple[int, ...], dtype: str = "float32", kind: str = "plain") -> tuple[Any, torch.Tensor]:
        """A new constant of the model."""
        spec = (dtype, tuple(shape), self.rng.randrange(1000), kind)
        return ("c", *spec), self.make(*spec)

    def some(self, shape: tuple[int, ...], dtype: str = "float32") -> tuple[Any, torch.Tensor]:
        """A value of this shape and dtype, earlier or new."""
        found = self.pick(lambda t: tuple(t.shape) == tuple(shape) and str(t.dtype)[6:] == dtype)
        return found if found and self.chance(0.7) else self.fresh(shape, dtype)

    def shape(self, rank: int | None = None) -> tuple[int, ...]:
        rank = self.rng.choice((0, 1, 1, 2, 2, 2, 3, 3, 4)) if rank is None else rank
        return tuple(self.rng.choice(SIZES) for _ in range(rank))

    def dtype(self) -> str:
        if self.whole and self.chance(0.5):
            return self.rng.choice(WHOLE)
        return self.rng.choice((*DTYPES, "float32", "float32", "float32"))

    def scalar(self) -> Any:
        if self.whole and self.chance(0.2):
            return self.rng.choice(WHOLE_SCALARS)
        return self.rng.choice(RARE_SCALARS if self.chance(0.06) else SCALARS)

    def axis(self, rank: int) -> int:
        bound = max(rank, 1) + (self.chance(0.02))
        return self.rng.randrange(-bound, bound)

    def axes(self, rank: int) -> Any:
        """None, one axis, several or none of them."""
        how = self.rng.randrange(8)
        if how == 0:
            return None
        if how == 1:
            return ()
        if how < 5 or not rank:
            return self.axis(rank)
        order = self.rng.sample(range(rank), self.rng.randint(1, rank))
        return tuple(a - rank * self.rng.randrange(2) for a in order)

    def like(self, x: torch.Tensor, dtype: str = "") -> tuple[Any, torch.Tensor]:
        """A tensor that broadcasts with x."""
        found = self.pick(  # not itself: 0 / 0 instead of 1 may be a rounding
            lambda t: t is not x and broadcast(t.shape, x.shape) and dtype in ("", str(t.dtype)[6:])
        )
        if found and self.chance(0.6):
            return found
        shape = [1 if self.chance(0.25) else s for s in x.shape]
        if self.chance(0.3):
            shape = shape[self.rng.randrange(len(shape) + 1) :]
        elif self.chance(0.1):
            shape = [2, *shape]
        return self.fresh(tuple(shape), dtype or self.dtype(), self.rng.choice(("plain", "plain", "plain", "special")))


def broadcast(*shapes: Any) -> bool:
    try:
        torch.broadcast_shapes(*shapes)
    except RuntimeError:
        return False
    return True


Drawn = tuple[tuple, dict[str, Any]]
SPECIAL: dict[str, Callable[[State, torch.Tensor, Any], Drawn | None]] = {}


def special(*names: str) -> Callable[[Callable], Callable]:
    """Decorator: the generator of rules by name. It gets a tensor and its reference, and gives the arguments."""

    def register(f: Callable) -> Callable:
        SPECIAL.update(dict.fromkeys(names, f))
        return f

    return register


def arguments(s: State, rule: Callable, name: str) -> Drawn | None:
    """Arguments for a call of the torch function that `rule` converts; None where nothing fits."""
    found = s.pick()
    if found is None:
        return None
    ref, x = found
    key = name.rpartition(".")[2].rstrip("_") if not name.startswith("operator") else name.rpartition(".")[2]
    f = SPECIAL.get(name) or SPECIAL.get(key) or SPECIAL.get(rule.__name__)
    made = f(s, x, ref) if f else by_signature(s, rule, name, x, ref)
    if made is not None and name.startswith("torch.Tensor.") and isinstance(made[0][0], int | float):
        return (*reversed(made[0]),), made[1]
    return made


def by_signature(s: State, rule: Callable, name: str, x: torch.Tensor, ref: Any) -> Drawn | None:
    args: list[Any] = [ref]
    kwargs: dict[str, Any] = {}
    by_name = False
    for p in list(inspect.signature(rule).parameters.values())[1:]:
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) or p.name in ("like", "out", "non_blocking"):
            continue
        if p.name == "inplace" and not name.startswith("torch.nn.functional"):
            continue
        if p.default is not p.empty and s.chance(0.5):
            by_name = True
            continue
        value = parameter(s, p, x)
        if p.kind is p.KEYWORD_ONLY or (by_name or (s.chance(0.2) and not name.startswith("operator"))):
            kwargs[p.name], by_name = value, True
        else:
            args.append(value)
    return tuple(args), kwargs


OPERANDS = ("other", "tensor1", "tensor2", "end", "exponent", "weight", "min", "max", "value")


def parameter(s: State, p: inspect.Parameter, x: torch.Tensor) -> Any:
    annotation = str(p.annotation)
    if p.name in OPERANDS and annotation == "Any":
        if p.name in ("min", "max", "value") and s.chance(0.75):
            return s.scalar()
        return s.like(x)[0] if s.chance(0.6) else s.scalar()
    if p.name == "dim":
        return s.axes(x.ndim) if annotation == "Any" else s.axis(x.ndim)
    if p.name in ("dim0", "dim1", "dim2", "start_dim", "end_dim"):
        return s.axis(x.ndim)
    if p.name in ("dtype",):
        return ("dtype", s.dtype()) if s.chance(0.8) else None
    if annotation == "bool" or p.name in ("unbiased",):
        return s.chance(0.5)
    if p.name in ("p", "ord"):
        return s.rng.choice((2, 1, 0, math.inf, -math.inf, 3, 0.5, 2.0))
    if p.name == "correction":
        return s.rng.choice((0, 1, 2, 5))
    if p.name == "approximate":
        return s.rng.choice(("none", "tanh"))
    if p.name in ("alpha", "beta"):
        return s.rng.choice(SCALARS)
    if p.name == "fill_value":
        return s.scalar()
    if p.name in ("offset", "diagonal", "decimals", "shifts"):
        return s.rng.randrange(-3, 4)
    if p.name == "k":
        return s.rng.choice((0, 1, 1, 2, 3))
    if "float" in annotation:
        return s.rng.choice((0.5, 1.0, 0.0, 2.0, 0.1, -1.0, 1, 3))
    if "int" in annotation:
        return s.rng.choice((1, 1, 2, 2, 3, 4, 0))
    return None


# -- scalars on the left, casts, masks --------------------------------------------------------------------------------------


@special("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "eq", "ne", "lt", "le", "gt", "ge")
def two(s: State, x: torch.Tensor, ref: Any) -> Drawn:
    other = s.like(x)[0] if s.chance(0.55) else s.scalar()
    return ((other, ref) if s.chance(0.25) and isinstance(other, int | float) else (ref, other)), {}


@special("and", "or", "xor", "bitwise_and", "bitwise_or", "bitwise_xor", "and_", "or_", "iand", "ior", "ixor")
def bits(s: State, x: torch.Tensor, ref: Any) -> Drawn | None:
    found = s.pick(lambda t: not t.is_floating_point())
    if found is None:
        return None
    return (
        found[0],
        s.like(found[1], s.rng.choice(("bool", "int64", "int32")))[0] if s.chance(0.8) else s.scalar(),
    ), {}


@special("to")
def to(s: State, x: torch.Tensor, ref: Any) -> Drawn:
    return (ref, ("dtype", s.dtype())) if s.chance(0.6) else (ref, s.like(x)[0]), {}


@special("type_as", "view_as", "reshape_as", "expand_as")
def by_other(s: State, x: torch.Tensor, ref: Any) -> Drawn:
    return (ref, s.like(x)[0]), {}


@special("type")
def type_(s: State, x: torch.Tensor, ref: Any) -> Drawn:
    return (ref, ("dtype", s.dtype())), {}


@special("torch.where")
def where(s: State, x: torch.Tensor, ref: Any) -> Drawn:
    condition = s.like(x, "bool")
    sides = [ref, s.like(x)[0] if s.chance(0.6) else s.scalar()]
    if s.chance(0.15):
        sides[0] = s.scalar()
    s.rng.shuffle(sides)
    return (condition[0], *sides), {}


@special("torch.Tensor.where")
def where_method(s: State, x: torch.Tensor, ref: Any) -> Drawn:
    return (ref, s.like(x, "bool")[0], s.like(x)[0] if s.chance(0.6) else s.scalar()), {}


@special("masked_fill")
def masked_fill(s: State, x: torch.Tensor, ref: Any) -> Drawn:
    return (ref, s.like(x, "bool")[0], s.fresh((), s.dtype())[0] if s.chance(0.1) else s.scalar()), {}


@special("clamp", "clip")
def clamp(s: State, x: torch.Tensor, ref: Any) -> Drawn:
    if s.chance(0.2):
        return (ref, s.like(x)[0], s.like(x)[0] if s.chance(0.5) else None), {}
    low, high = (s.scalar() if s.chance(0.8) else None for _ in range(2))
    return (ref, low, high), {}

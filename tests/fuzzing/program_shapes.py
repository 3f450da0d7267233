"""Arguments of calls that rearrange, join, index and pick, for drawn programs."""

from __future__ import annotations

from typing import Any

import torch

from .program_arguments import SIZES, Drawn, State, special

# -- shapes -----------------------------------------------------------------------------------------------------------------


def factors(s: State, n: int) -> list[int]:
    """A shape of n elements."""
    shape: list[int] = []
    while n > 1 and len(shape) < 4:
        divisor = s.rng.choice([d for d in range(1, n + 1) if n % d == 0])
        shape.append(divisor)
        n //= divisor
    return [*shape, n] if n != 1 or s.chance(0.3) else shape


@special("view", "reshape")
def view(s: State, x: torch.Tensor, ref: Any) -> Drawn:
    shape = factors(s, x.numel()) if x.numel() else [0, *s.shape(1)]
    if shape and s.chance(0.4):
        shape[s.rng.randrange(len(shape))] = -1
    return (ref, tuple(shape)), {}


@special("unflatten")
def unflatten(s: State, x: torch.Tensor, ref: Any) -> Drawn:
    axis = s.axis(x.ndim)
    shape = factors(s, x.shape[axis]) if -x.ndim <= axis < x.ndim and x.shape[axis] else [2]
    return (ref, axis, tuple(shape) or (1,)), {}


@special("permute")
def permute(s: State, x: torch.Tensor, ref: Any) -> Drawn:
    return (ref, tuple(a - x.ndim * s.rng.randrange(2) for a in s.rng.sample(range(x.ndim), x.ndim))), {}


@special("movedim", "moveaxis")
def movedim(s: State, x: torch.Tensor, ref: Any) -> Drawn:
    if s.chance(0.5) or x.ndim < 2:
        return (ref, s.axis(x.ndim), s.axis(x.ndim)), {}
    return (ref, tuple(s.rng.sample(range(x.ndim), 2)), tuple(s.rng.sample(range(x.ndim), 2))), {}


@special("expand", "broadcast_to")
def expand(s: State, x: torch.Tensor, ref: Any) -> Drawn:
    shape = [s.rng.choice(SIZES) if n == 1 else s.rng.choice((n, n, -1)) for n in x.shape]
    return (ref, tuple([2, *shape] if s.chance(0.2) else shape)), {}


@special("repeat", "tile")
def repeat(s: State, x: torch.Tensor, ref: Any) -> Drawn:
    return (ref, tuple(s.rng.choice((1, 2, 1, 3, 0)) for _ in range(x.ndim + s.chance(0.3)))), {}


@special("repeat_interleave")
def repeat_interleave(s: State, x: torch.Tensor, ref: Any) -> Drawn:
    return (ref, s.rng.choice((0, 1, 2, 3)), s.axis(x.ndim) if s.chance(0.8) else None), {}


@special("flip")
def flip(s: State, x: torch.Tensor, ref: Any) -> Drawn:
    return (ref, tuple(s.rng.sample(range(x.ndim), s.rng.randint(0, x.ndim)))), {}


@special("roll")
def roll(s: State, x: torch.Tensor, ref: Any) -> Drawn:
    if x.ndim and s.chance(0.7):
        dims = tuple(s.rng.sample(range(-x.ndim, 0), s.rng.randint(1, x.ndim)))
        return (ref, tuple(s.rng.randrange(-6, 7) for _ in dims), dims), {}
    return (ref, s.rng.randrange(-6, 7)), {}


@special("cat", "concat", "concatenate", "hstack", "vstack", "row_stack", "stack")
def join(s: State, x: torch.Tensor, ref: Any) -> Drawn:
    parts = [ref]
    for _ in range(s.rng.randint(0, 2)):
        shape = list(x.shape)
        found = s.pick(lambda t: t.shape == x.shape)
        parts.append(found[0] if found and s.chance(0.6) else s.fresh(tuple(shape), s.dtype())[0])
    return (("list", *parts), *((s.axis(x.ndim),) if s.chance(0.6) else ())), {}


@special("hstack", "vstack", "row_stack")
def join_fixed(s: State, x: torch.Tensor, ref: Any) -> Drawn:
    return (join(s, x, ref)[0][0],), {}


@special("split", "tensor_split")
def split(s: State, x: torch.Tensor, ref: Any) -> Drawn | None:
    if not x.ndim:
        return None
    axis = s.axis(x.ndim)
    return (ref, s.rng.randint(1, 4), axis), {}


@special("chunk")
def chunk(s: State, x: torch.Tensor, ref: Any) -> Drawn:
    return (ref, s.rng.randint(1, 4), s.axis(x.ndim)), {}


@special("size")
def size(s: State, x: torch.Tensor, ref: Any) -> Drawn:
    return (ref, s.axis(x.ndim)), {}


@special("getattr")
def attribute(s: State, x: torch.Tensor, ref: Any) -> Drawn:
    return (ref, s.rng.choice(("T", "mT", "data") if x.ndim == 2 else ("mT", "data"))), {}


# -- indexing ---------------------------------------------------------------------------------------------------------------


def span(s: State, n: int) -> tuple:
    ends = [None if s.chance(0.4) else s.rng.randint(-n - 1, n + 1) for _ in range(2)]
    return ("slice", *ends, s.rng.choice((None, None, 1, 2, 3)))


def index_of(s: State, x: torch.Tensor) -> Any:
    items: list[Any] = []
    for n in x.shape:
        how = s.rng.randrange(8)
        if how < 4:
            items.append(span(s, n))
        elif how < 6 and n:
            items.append(s.rng.randrange(-n, n))
        elif how == 6:
            items.append(None)
            items.append(span(s, n))
        else:
            items.append(("...",))
            break
    items = items[: s.rng.randint(0, len(items))]
    if x.ndim and x.shape[0] and s.chance(0.2):
        items = [numbers(s, x.shape[0], s.shape(s.rng.randint(1, 2)))[0], *items[1:]]
    elif s.chance(0.05) and x.ndim:
        items = [s.fresh(tuple(x.shape[: s.rng.randint(1, x.ndim)]), "bool")[0]]
    return ("tuple", *items) if len(items) != 1 or s.chance(0.5) else items[0]


def numbers(s: State, n: int, shape: tuple[int, ...], negative: bool = True) -> tuple[Any, torch.Tensor]:
    return s.fresh(shape, s.rng.choice(("int64", "int64", "int32")), f"below {n}" if not negative else f"within {n}")


@special("getitem")
def getitem(s: State, x: torch.Tensor, ref: Any) -> Drawn:
    return (ref, index_of(s, x)), {}


@special("setitem")
def setitem(s: State, x: torch.Tensor, ref: Any) -> Drawn:
    return (ref, index_of(s, x), s.scalar() if s.chance(0.6) else s.fresh(s.rng.choice(((), (1,))), s.dtype())[0]), {}


@special("copy")
def copy(s: State, x: torch.Tensor, ref: Any) -> Drawn:
    return (ref, s.like(x)[0]), {}


@special("select")
def select(s: State, x: torch.Tensor, ref: Any) -> Drawn | None:
    axis = s.axis(x.ndim)
    if not (-x.ndim <= axis < x.ndim and x.shape[axis]):
        return None
    return (ref, axis, s.rng.randrange(-x.shape[axis], x.shape[axis])), {}


@special("narrow")
def narrow(s: State, x: torch.Tensor, ref: Any) -> Drawn | None:
    axis = s.axis(x.ndim)
    if not -x.ndim <= axis < x.ndim:
        return None
    start = s.rng.randint(0, x.shape[axis])
    return (ref, axis, start, s.rng.randint(0, x.shape[axis] - start)), {}


@special("index_select")
def index_select(s: State, x: torch.Tensor, ref: Any) -> Drawn | None:
    axis = s.axis(x.ndim)
    if not (-x.ndim <= axis < x.ndim and x.shape[axis]):
        return None
    return (ref, axis, numbers(s, x.shape[axis], s.shape(1), False)[0]), {}


@special("gather", "take_along_dim")
def gather(s: State, x: torch.Tensor, ref: Any) -> Drawn | None:
    axis = s.axis(x.ndim)
    if not (-x.ndim <= axis < x.ndim and x.shape[axis]):
        return None
    shape = [s.rng.randint(0, n) for n in x.shape] if s.chance(0.3) else list(x.shape)
    shape[axis] = s.rng.choice(SIZES)
    index = s.fresh(tuple(shape), "int64", f"below {x.shape[axis]}")[0]
    return (ref, axis, index), {}


@special("take_along_dim")
def take_along(s: State, x: torch.Tensor, ref: Any) -> Drawn | None:
    found = gather(s, x, ref)
    return found and ((found[0][0], found[0][2], found[0][1]), {})


@special("take")
def take(s: State, x: torch.Tensor, ref: Any) -> Drawn | None:
    return ((ref, s.fresh(s.shape(), "int64", f"within {x.numel()}")[0]), {}) if x.numel() else None

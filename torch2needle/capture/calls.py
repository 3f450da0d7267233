"""Calls of a model: the example, and others like it, of other sizes or other values."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

Sizes = dict[tuple[int, int], int]  # by (number of the tensor, axis)
Call = tuple[tuple, dict[str, Any]]  # positional and named arguments
# Other inputs, as multiples of the example: large ones pass thresholds, small ones let factors through normalisations.
LARGER, SMALLER = 4.0, 0.02
MANY, RUN = 1 << 18, 1 << 8  # from so many values on, runs of them are put in another order
CHANNELS = 4  # and fewer are no size that a model takes twice of
IMAGE = 64  # sides from which on images are halved


def call_of(example: Any) -> Call:
    """A dict holds inputs by name, anything else the positional ones."""
    if isinstance(example, dict):
        return (), dict(example)
    return (tuple(example) if isinstance(example, tuple | list) else (example,)), {}


def tensors(value: Any) -> list[torch.Tensor]:
    return [t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]


@dataclass
class Place:
    """Of a tensor in a call."""

    number: int
    rank: int


def named_axes(forward: Any, call: Call, dynamic: Mapping[str, Any]) -> dict[tuple[int, int], str]:
    """The places (number of the tensor, axis) that a dict of inputs and their axes names, each with its input."""
    numbers = iter(range(len(tensors(call))))
    args, kwargs = pytree.tree_map(lambda v: Place(next(numbers), v.ndim) if isinstance(v, torch.Tensor) else v, call)
    given = inspect.signature(forward).bind_partial(*args, **kwargs).arguments | kwargs
    found: dict[tuple[int, int], str] = {}
    for name, axes in dynamic.items():
        if name not in given:
            raise ValueError(f"[convert] dynamic expects inputs of the example, {', '.join(given)}, got {name!r}.")
        for place in (v for v in pytree.tree_leaves(given[name]) if isinstance(v, Place)):
            for axis in axes or ():
                if not isinstance(axis, int) or not -place.rank <= axis < place.rank:
                    raise ValueError(f"[convert] dynamic expects axes of {name}, which has {place.rank}, got {axis!r}.")
                found[place.number, axis % place.rank] = name
    return found


def fresh(call: Call) -> Call:
    def copy(t: Any) -> Any:
        return t.detach().clone().requires_grad_(t.requires_grad) if isinstance(t, torch.Tensor) else t

    return pytree.tree_map(copy, call)


def names_places(t: torch.Tensor) -> bool:
    """Whole numbers on a GPU: one outside of an axis ends the process's use of the device, where a CPU raises."""
    whole = not (t.is_floating_point() or t.is_complex() or t.dtype == torch.bool)
    return whole and t.device.type not in ("cpu", "meta")


def resized(call: Call, sizes: Sizes) -> Call:
    """The call with other sizes by (number of the tensor, axis), filled by repeating."""
    numbers, least = iter(range(len(tensors(call)))), min(sizes.values(), default=0)

    def resize(t: Any) -> Any:
        if not isinstance(t, torch.Tensor):
            return t
        i = next(numbers)
        for axis in range(t.ndim):
            if (i, axis) in sizes and t.shape[axis]:
                t = t.index_select(axis, torch.arange(sizes[i, axis], device=t.device) % t.shape[axis])
        return torch.where(t < least, t, t % least) if least and names_places(t) else t

    return pytree.tree_map(resize, call)


def shuffled(call: Call, factor: float) -> Call:
    """Other values of the same kind: those of each tensor in another order, real ones times the factor."""

    def mix(t: Any) -> Any:
        if not isinstance(t, torch.Tensor) or not t.numel() or names_places(t):
            return t
        mixed = t.detach().flatten()[other_order(t).to(t.device)].reshape(t.shape)
        return mixed * factor if t.is_floating_point() or t.is_complex() else mixed

    return pytree.tree_map(mix, call)


def other_order(t: torch.Tensor) -> torch.Tensor:
    """Places of a tensor's values; offsets stay ascending, since torch reads what is not theirs where they do not."""
    n, chance = t.numel(), torch.Generator().manual_seed(0)
    if t.ndim == 1 and n > 2 and not (t.is_floating_point() or t.is_complex() or t.dtype == torch.bool):
        before, after = t[:-1], t[1:]
        if bool((before <= after).all()) and not bool((before + 1 == after).all()):
            inner = torch.randint(0, n, (n - 2,), generator=chance).sort().values
            return torch.cat([torch.tensor([0]), inner, torch.tensor([n - 1])])
    if n < MANY:
        return torch.randperm(n, generator=chance)
    order = torch.randperm(n // RUN, generator=chance)
    return torch.cat([(order[:, None] * RUN + torch.arange(RUN)).flatten(), torch.arange(n // RUN * RUN, n)])


def varied(call: Call) -> list[Call]:
    """Large and small values; one call where there are no real numbers."""
    real = any(t.is_floating_point() or t.is_complex() for t in tensors(call))
    return [shuffled(call, factor) for factor in ((LARGER, SMALLER) if real else (1.0,))]


def other_batch(call: Call) -> Sizes:
    """Another batch, as small as can be; it is the first axis of the first tensor that has axes."""
    given = tensors(call)
    batch = next((t.shape[0] for t in given if t.ndim), 0)
    other = 3 if batch == 2 else 2
    return {(i, 0): other for i, t in enumerate(given) if batch and t.ndim and t.shape[0] == batch}


def longer_texts(call: Call) -> Sizes:
    """Texts of one word more, and all that is as long."""
    given = tensors(call)
    lengths = {t.shape[1] for t in given if t.ndim == 2 and not t.is_floating_point() and not t.is_complex()}
    return {(i, k): n + 1 for i, t in enumerate(given) for k, n in enumerate(t.shape) if k and n in lengths}


def other_sizes(call: Call) -> Iterator[Sizes]:
    """Half and twice each size beside the batch, that of all axes of one size first."""
    axes = [(i, k, n) for i, t in enumerate(tensors(call)) for k, n in enumerate(t.shape) if k and n > CHANNELS]
    groups = [[(i, k) for i, k, n in axes if n == size] for size in dict.fromkeys(n for *_, n in axes)]
    single = [[(i, k)] for i, k, _ in axes]
    for group in [g for g in groups if len(g) > 1] + single:
        n = tensors(call)[group[0][0]].shape[group[0][1]]
        yield from ({place: other for place in group} for other in (n // 2, 2 * n))


def half_images(call: Call) -> Sizes:
    """Images, or those of clips, of half the height and width, which cost a model a quarter."""
    images = [(i, t) for i, t in enumerate(tensors(call)) if t.ndim in (4, 5) and t.is_floating_point()]
    axes = [(i, axis, t.shape[axis]) for i, t in images for axis in (t.ndim - 2, t.ndim - 1)]
    return {(i, axis): size // 2 for i, axis, size in axes if size >= IMAGE}

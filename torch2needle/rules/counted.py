"""Rules of what has as many results as values say."""

from __future__ import annotations

from typing import Any

import torch

from needle import ops
from needle.autograd import Tensor, Unsupported

from .registry import rule
from .tables import functions

T = torch.Tensor
aten = torch.ops.aten


@rule(torch.nonzero, T.nonzero)
def nonzero(input: Any, *, as_tuple: bool = False) -> Any:
    places = ops.nonzero(input)
    if not as_tuple:
        return places
    if input.spec is None:
        raise Unsupported("as many results as the tensor has axes need its rank; pass example=")
    if not input.spec.shape:
        return nonzero(ops.reshape(input, (1,)), as_tuple=True)
    return tuple(ops.getitem(places, (slice(None), axis)) for axis in range(len(input.spec.shape)))


functions("input", {(torch.argwhere, T.argwhere): ops.nonzero})
functions("input", {(aten.nonzero_numpy.default,): lambda input: nonzero(input, as_tuple=True)})
functions("input, mask", {(torch.masked_select, T.masked_select): ops.masked_select})
functions("input, weights=None, minlength=0", {(torch.bincount, T.bincount): ops.bincount})


def wanted(results: Any, inverse: bool, counts: bool) -> Any:
    """Those of (values, inverse, counts) that the call asks for."""
    asked = (results[0], *results[1:2] * inverse, *results[2:] * counts)
    return asked if inverse or counts else results[0]


@rule(torch.unique, T.unique)
def unique(
    input: Any, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> Any:
    return wanted(ops.unique(input, dim), return_inverse, return_counts)


@rule(T.unique_consecutive)
def unique_consecutive(
    input: Any, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> Any:
    return wanted(ops.unique_consecutive(input, dim), return_inverse, return_counts)


@rule(torch.unique_consecutive)
def unique_consecutive_by_name(
    input: Any, *, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> Any:
    """torch's function gives other results where its flags have no names: it takes one for the other."""
    return unique_consecutive(input, return_inverse, return_counts, dim)


# Aten's have all three results.
functions(
    "input, sorted=True, return_inverse=False, return_counts=False",
    {(aten._unique2.default,): lambda x, *_: ops.unique(x)},
)
functions(
    "input, dim, sorted=True, return_inverse=False, return_counts=False",
    {(aten.unique_dim.default,): lambda x, dim, *_: ops.unique(x, dim)},
)
functions(
    "input, return_inverse=False, return_counts=False, dim=None",
    {(aten.unique_consecutive.default,): lambda x, inverse, counts, dim: ops.unique_consecutive(x, dim)},
)


@rule(torch.repeat_interleave, T.repeat_interleave)
def repeat_interleave(input: Any, repeats: Any = None, dim: int | None = None, *, output_size: Any = None) -> Any:
    if repeats is None:
        return ops.repeat_numbers(input)
    if isinstance(repeats, Tensor):
        return ops.repeat_counts(input, repeats, dim)
    return ops.repeat_interleave(input, repeats, dim)


functions(
    "repeats, *, output_size=None", {(aten.repeat_interleave.Tensor,): lambda repeats, _: ops.repeat_numbers(repeats)}
)

"""Rules of calls that move or add complex numbers: those of real numbers, for both parts."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from needle import ops
from needle.autograd import Unsupported
from needle.complex_numbers import Complex

from . import aten as _aten
from . import counted, embedding, indexing, linalg, matrices, ordering, rarer, reductions, sampling, scattering, special
from .complex_numbers import whole
from .registry import FUNCTION_RULES, complex_rule
from .shapes import Pieces, broadcast_tensors

LOADED = (
    _aten,
    counted,
    embedding,
    indexing,
    linalg,
    matrices,
    ordering,
    rarer,
    reductions,
    sampling,
    scattering,
    special,
)
T, L, aten = torch.Tensor, torch.linalg, torch.ops.aten
SUMS = (None, "add", "sum", "mean")  # what scatter may make of several numbers for one place


def promoted(value: Any) -> Any:
    """As complex numbers, those in lists, too."""
    if isinstance(value, tuple | list):
        return type(value)(map(promoted, value))
    return None if value is None else whole(value)


def by_parts(f: Callable, names: tuple[str, ...] = ()) -> Callable:
    """The rule for real and imaginary parts; arguments of the names given may be real beside complex ones."""
    signature = inspect.signature(f)

    @functools.wraps(f)
    def convert(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        for name in names:
            if name in bound.arguments:
                bound.arguments[name] = promoted(bound.arguments[name])
        name, first = next(iter(bound.arguments.items()))
        if not names and not all(isinstance(v, Complex) for v in (first if isinstance(first, tuple) else (first,))):
            raise Unsupported("complex numbers beside real ones in this call are not supported")
        if bound.arguments.get("reduce") not in SUMS:
            raise Unsupported(f"reduce expects a sum of complex numbers, got {bound.arguments['reduce']}")
        if isinstance(dtype := bound.arguments.get("dtype"), torch.dtype):
            if not dtype.is_complex:  # the real part alone is cast
                bound.arguments[name] = first.real
                return f(*bound.args, **bound.kwargs)
            bound.arguments["dtype"] = dtype.to_real()
        made = ops.complex_map(f, *bound.args, **bound.kwargs)
        if isinstance(made, Complex) and isinstance(made.real, Pieces):
            return Pieces(lambda i: Complex(made.real[i], made.imag[i]), made.real.what)
        return made

    put = getattr(f, "put", None)
    convert.put = put and (lambda base, value, *args, **named: ops.complex_map(put, base, value, *args, **named))  # type: ignore[attr-defined]
    return convert


PARTS: dict[tuple[str, ...], tuple] = {
    (): (
        *(torch.flatten, T.flatten, torch.ravel, T.ravel, torch.unflatten, T.unflatten, T.reshape, torch.reshape),
        *(T.view_as, T.reshape_as, torch.unsqueeze, T.unsqueeze, T.unsqueeze_, torch.squeeze, T.squeeze, T.squeeze_),
        *(torch.permute, T.permute, torch.transpose, T.transpose, T.transpose_, torch.swapaxes, T.swapaxes),
        *(torch.swapdims, T.swapdims, torch.t, T.t, T.t_, torch.movedim, T.movedim, torch.moveaxis, T.moveaxis),
        *(torch.broadcast_to, T.broadcast_to, T.expand, T.expand_as, T.contiguous, T.clone, torch.clone),
        *(torch.diagonal, T.diagonal, L.diagonal, torch.diag, T.diag, torch.diag_embed, T.diag_embed, torch.diagflat),
        *(T.diagflat, torch.trace, T.trace, torch.detach, T.detach, T.detach_, T.repeat, T.tile, T.flip, torch.tile),
        *(torch.flip, torch.fliplr, T.fliplr, torch.flipud, T.flipud, torch.rot90, T.rot90, torch.roll, T.roll),
        *(torch.tril, T.tril, T.tril_, torch.triu, T.triu, T.triu_, torch.repeat_interleave, T.repeat_interleave),
        *(torch.chunk, T.chunk, torch.split, T.split, torch.tensor_split, T.tensor_split, torch.unbind, T.unbind),
        *(torch.hsplit, T.hsplit, torch.vsplit, T.vsplit, torch.dsplit, T.dsplit, torch.unsafe_split, T.unsafe_split),
        *(torch.unsafe_chunk, T.unsafe_chunk, T.unfold, T.sum_to_size, torch.atleast_1d, torch.atleast_2d),
        *(torch.atleast_3d, operator.getitem, torch.select, T.select, torch.narrow, T.narrow, torch.index_select),
        *(T.index_select, torch.gather, T.gather, torch.take, T.take, torch.take_along_dim, T.take_along_dim),
        *(torch.masked_select, T.masked_select, T.cpu, T.cuda, torch.neg, torch.negative, T.neg, T.neg_, T.negative),
        *(operator.neg, torch.positive, T.positive, operator.pos, torch.nan_to_num, T.nan_to_num, T.nan_to_num_),
        torch.gradient,
        *(torch.trapezoid, torch.trapz, torch.cumulative_trapezoid, torch.embedding),
        *(aten.slice.Tensor, aten.index.Tensor, aten.alias.default, aten.lift_fresh.default, aten.mT.default),
        *(aten.lift_fresh_copy.default, aten.detach_copy.default, aten.split_with_sizes.default, aten.numpy_T.default),
    ),
    ("input",): (torch.sum, T.sum, torch.mean, T.mean, torch.cumsum, T.cumsum, T.cumsum_),
    ("input", "prepend", "append"): (torch.diff, T.diff),
    ("tensors",): (
        *(torch.cat, torch.concat, torch.concatenate, torch.stack, torch.hstack, torch.vstack, torch.row_stack),
        *(torch.dstack, torch.column_stack, torch.block_diag, torch.cartesian_prod, torch.meshgrid),
    ),
    ("weight",): (F.embedding,),
    ("value",): (operator.setitem,),
    ("input", "value"): (torch.index_fill, T.index_fill, T.index_fill_),
    ("input", "values"): (torch.index_put, T.index_put, T.index_put_, aten.index_put.default, aten.index_put_.default),
    ("input", "fill_value"): (T.fill_diagonal_,),
    ("src",): (T.copy_, aten.copy.default, aten.slice_scatter.default),
    ("input", "src", "value"): (torch.scatter, T.scatter, T.scatter_),
    ("input", "src"): (
        *(torch.scatter_add, T.scatter_add, T.scatter_add_, torch.scatter_reduce, T.scatter_reduce, T.scatter_reduce_),
        *(torch.select_scatter, T.select_scatter, torch.diagonal_scatter, T.diagonal_scatter),
    ),
    ("input", "source"): (
        *(torch.index_add, T.index_add, T.index_add_, torch.index_copy, T.index_copy, T.index_copy_, torch.put, T.put),
        *(T.put_, torch.masked_scatter, T.masked_scatter, T.masked_scatter_),
    ),
}
for _names, _targets in PARTS.items():
    for _target in _targets:
        _f = FUNCTION_RULES[_target]
        _made = by_parts(_f, _names)
        complex_rule(_target, view=getattr(_f, "view", None), put=_made.put)(_made)  # type: ignore[attr-defined]

_of_view = by_parts(FUNCTION_RULES[T.view])


def viewed_back(base: Any, value: Any, *numbers: Any, size: Any = None) -> Any:
    if isinstance(base, Complex) and isinstance(value, Complex):
        return _of_view.put(base, value, *numbers, size=size)  # type: ignore[attr-defined]
    raise Unsupported("it writes a view of the numbers' memory; see torch.view_as_real")


@complex_rule(T.view, view="always", put=viewed_back)
def view(input: Any, *numbers: Any, size: Any = None) -> Any:
    """Also as another dtype: of complex numbers their parts in turn along the last axis, and back."""
    if not (numbers and isinstance(numbers[0], torch.dtype)):
        return _of_view(input, *numbers) if size is None else _of_view(input, size=size)
    dtype = str(numbers[0]).removeprefix("torch.")
    if isinstance(input, Complex) and dtype == input.real.dtype:
        return ops.flatten(ops.view_as_real(input), -2)
    made = input if isinstance(input, Complex) else ops.view_as_complex(ops.unflatten(input, -1, (-1, 2)))
    if made.dtype != dtype:
        raise Unsupported("view(dtype) reinterprets memory")
    return made


@complex_rule(torch.broadcast_tensors, view="maybe")
def broadcast(*tensors: Any) -> Any:
    """Each keeps its dtype."""
    given = tensors[0] if len(tensors) == 1 and isinstance(tensors[0], tuple | list) else tensors
    made = iter(broadcast_tensors(*(p for t in given for p in ((t.real, t.imag) if isinstance(t, Complex) else (t,)))))
    return tuple(Complex(next(made), next(made)) if isinstance(t, Complex) else next(made) for t in given)


complex_rule(torch.adjoint, T.adjoint, view="always", put=lambda base, value: ops.conj(value.map(ops.transpose)))(
    lambda input: ops.conj(input.map(ops.transpose))
)


@complex_rule(F.pad, torch._C._nn.pad, aten.constant_pad_nd.default)
def pad(input: Any, pad: Any, mode: str = "constant", value: Any = None) -> Any:
    value = whole(value or 0)
    if mode != "constant":
        return input.map(lambda x: ops.pad(x, tuple(pad), mode))
    return Complex(ops.pad(input.real, tuple(pad), mode, value.real), ops.pad(input.imag, tuple(pad), mode, value.imag))
